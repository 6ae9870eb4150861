"""Reading built data: examples (JSON lines), their info, and prompts that carry a demonstration."""

import json
from pathlib import Path

from grafting.errors import UserError

REQUIRED = {"id", "task", "messages", "answer", "demonstrations"}
ALLOWED = REQUIRED | {"options", "subject"}


def load_info(folder: Path) -> dict:
    """The info.json of a data folder. UserError: missing, not JSON, or without name or scorer."""
    path = Path(folder) / "info.json"
    if not path.is_file():
        raise UserError(f"data folder without info.json: {path}; build the data again (stage data)")
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); build the data again (stage data)") from None
    missing = {"name", "scorer"} - set(info)
    if missing:
        raise UserError(f"{path}: missing field {sorted(missing)}")
    return info


def load_examples(folder: Path, split: str) -> list[dict]:
    """All examples of one split ("train", "val", "test" or "retention").

    UserError: the file is missing or empty, a line is not JSON, has an unknown or a missing field, an id
    comes twice, or the number of lines is not the one that info.json states (a cut file).
    """
    path = Path(folder) / f"{split}.jsonl"
    if not path.is_file():
        raise UserError(f"no split {split!r} here: {path} is missing")
    examples, seen = [], set()
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            example = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON ({error})") from None
        check_fields(example, REQUIRED, ALLOWED, where)
        if example["id"] in seen:
            raise UserError(f"{where}: example {example['id']} comes twice")
        seen.add(example["id"])
        examples.append(example)
    if not examples:
        raise UserError(f"{path} is empty: no examples in split {split!r}")
    info_path = Path(folder) / "info.json"
    stated = load_info(folder).get("counts", {}).get(split) if info_path.is_file() else None
    if stated is not None and stated != len(examples):
        raise UserError(f"{path} has {len(examples)} examples, info.json says {stated}; build the data again")
    return examples


def check_fields(record: object, required: set, allowed: set, where: str) -> None:
    """UserError unless `record` is a mapping with every required field and none that is not allowed."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object with the fields {sorted(required)}")
    missing, unknown = required - set(record), set(record) - allowed
    if missing:
        raise UserError(f"{where}: missing field {sorted(missing)}")
    if unknown:
        raise UserError(f"{where}: unknown field {sorted(unknown)}; known are {sorted(allowed)}")


def demonstration(example: dict, style: str) -> str:
    """The demonstration of one style. UserError naming the example if there is none."""
    text = example["demonstrations"].get(style)
    if not isinstance(text, str) or not text.strip():
        have = sorted(k for k, v in example["demonstrations"].items() if v)
        raise UserError(
            f"example {example['id']} (task {example['task']}): demonstration missing for style {style!r}; "
            f"it has {have or 'none'}. Set `styles` to what the data have, or build the data with this style"
        )
    return text


def demonstration_messages(example: dict, info: dict, style: str) -> list[dict]:
    """The example's messages with its demonstration put into the last user message.

    The form is info["demonstration_prompt"], with {question} and {demonstration}. UserError if the
    demonstration, the prompt form or a user message is missing.
    """
    form = info.get("demonstration_prompt")
    if not form or "{question}" not in form or "{demonstration}" not in form:
        raise UserError(
            f"info.json of {info.get('name')}: demonstration_prompt must contain {{question}} and {{demonstration}}"
        )
    messages = [dict(message) for message in example["messages"]]
    last = next((m for m in reversed(messages) if m["role"] == "user"), None)
    if last is None:
        raise UserError(f"example {example['id']} (task {example['task']}): no user message")
    last["content"] = form.format(question=last["content"], demonstration=demonstration(example, style))
    return messages
