"""Tasks from JSON-lines files: a user's own, expert traces, medical questions. No code, only field names and templates.

A template is text with {field} for the fields of a record; anything else in braces stays as it is.
"""

import json
import re

from grafting.errors import UserError
from grafting.tasks.building import cut, make_example, write_folder
from grafting.tasks.sources import read_sources

SPLITS = ("train", "val", "test")
DEMONSTRATION_PROMPT = (
    "{question}\n\nThis is an example for a response to the question:\n{demonstration}\n\n"
    "Now answer with a response of your own, including the thinking process:"
)
#: option -> (type, default); a default of ... must be given. What docs/how-to/own-task.md lists.
OPTIONS = {
    "name": (str, ...),
    "kind": (str, "skill"),
    "folder": (str, ...),
    "files": (list, ...),
    "splits": (dict, {}),
    "system": (str, ""),
    "prompt": (str, "{question}"),
    "response": (str, "{answer}"),
    "answer": (str, "{answer}"),
    "subject": (str, ""),
    "keep": (dict, {}),
    "demonstration_prompt": (str, DEMONSTRATION_PROMPT),
    "scorer": (str, "exact"),
    "scorer_options": (dict, {}),
    "stops": (list, []),
    "thinking": (str, "keep"),
    "thinking_tags": (list, ["<think>", "</think>"]),
    "train_items": (int, ...),
    "val_items": (int, ...),
    "test_items": (int, ...),
    "seed": (int, ...),
}


def options_of(spec: dict) -> dict:
    """The options with defaults. UserError for a missing, unknown or ill-typed one."""
    where = f"task {spec.get('name', '?')}"
    if unknown := set(spec) - set(OPTIONS) - {"builder"}:
        raise UserError(f"{where}: unknown option {sorted(unknown)}; known are {sorted(OPTIONS)}")
    options = {}
    for name, (kind, default) in OPTIONS.items():
        value = spec.get(name, default)
        if value is ...:
            raise UserError(f"{where}: option {name} is missing")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{where}: option {name} must be of type {kind.__name__}, got {value!r}")
        options[name] = value
    if options["thinking"] not in ("keep", "strip"):
        raise UserError(f"{where}: thinking must be keep or strip, got {options['thinking']!r}")
    if options["kind"] not in ("skill", "recall"):
        raise UserError(f"{where}: kind must be skill or recall, got {options['kind']!r}")
    return options


def fill(template: str, record: dict, where: str) -> str:
    """The template with the record's fields. UserError: a field that the template names is missing or empty."""

    def value(match: re.Match) -> str:
        name = match.group(1)
        if name not in record:
            raise UserError(
                f"{where}: no field {name!r}, which the template {template[:60]!r} names; has {sorted(record)}"
            )
        text = record[name] if isinstance(record[name], str) else json.dumps(record[name], ensure_ascii=False)
        if not text.strip():
            raise UserError(f"{where}: the field {name!r} is empty; mend or leave out the item")
        return text

    return re.sub(r"\{([A-Za-z_][\w .-]*)\}", value, template)


def strip_thinking(text: str, tags: list[str]) -> str:
    """A response without its thinking: all between the tags, tags included."""
    opened, closed = map(re.escape, tags)
    text = re.sub(rf"{opened}.*?{closed}\s*", "", text, flags=re.DOTALL)
    return re.sub(rf"^.*?{closed}\s*", "", text, flags=re.DOTALL)


def _records(folder: str, name: str, data: bytes):
    """(place, record) of a JSON-lines file, or of the list in a .json file."""
    text = data.decode("utf-8")
    where = f"{folder}/{name}"
    try:
        if name.endswith(".json"):
            items = json.loads(text)
            if not isinstance(items, list):
                raise UserError(f"{where}: expected a list of objects")
            for number, record in enumerate(items, 1):
                yield f"{where}, item {number}", record
            return
        for number, line in enumerate(text.split("\n"), 1):
            where = f"{folder}/{name}, line {number}"
            if line.strip():
                yield where, json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None


def example_of(record: dict, options: dict, where: str) -> dict:
    """One example by the templates; a record with `messages` keeps them in place of `prompt` and `system`."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object")
    if "messages" in record and options["prompt"] == OPTIONS["prompt"][1]:
        messages = record["messages"]
    else:
        system = [{"role": "system", "content": options["system"]}] if options["system"] else []
        messages = [*system, {"role": "user", "content": fill(options["prompt"], record, where)}]
    response = fill(options["response"], record, where)
    if options["thinking"] == "strip":
        response = strip_thinking(response, options["thinking_tags"])
        if not response.strip():
            raise UserError(f"{where}: the response is all thinking; thinking: strip leaves nothing")
    answer = fill(options["answer"], record, where)
    more = {"subject": fill(options["subject"], record, where)} if options["subject"] else {}
    return make_example(options["name"], messages, answer, {"expert": response}, **more)


def build(spec: dict, out, root: str | None = None) -> None:
    """Train, val and test from the files: cut by content hash, or as options["splits"] {split: file name} says.

    options["keep"] {field: value}: only records whose field has this value; the others are counted. An example
    that comes again is left out and counted. `root`: where the folder lies, if not under data_root.
    """
    options = options_of(spec)
    contents = read_sources(options["folder"], options["files"], root)
    found: dict[str, dict[str, dict]] = {}
    read = kept = 0
    for name, data in sorted(contents.items()):
        split = next((s for s, file in options["splits"].items() if file == name), "all")
        for where, record in _records(options["folder"], name, data):
            read += 1
            if any(record.get(field) != value for field, value in options["keep"].items()):
                continue
            kept += 1
            example = example_of(record, options, where)
            found.setdefault(split, {}).setdefault(example["id"], example)
    distinct = sum(map(len, found.values()))
    wanted = {name: options[f"{name}_items"] for name in ("test", "val", "train")}
    what, seed, recall = f"task {options['name']}", options["seed"], options["kind"] == "recall"
    splits: dict[str, list[dict]] = {}
    for source, examples in found.items():
        items = list(examples.values())
        names = [name for name in wanted if name not in options["splits"]] if source == "all" else [source]
        if recall and "train" in names and len(names) > 1:
            # trained items are what is asked: val and test are cut from those that are trained
            items = splits["train"] = cut(items, {"train": wanted["train"]}, seed, what)["train"]
            names.remove("train")
        splits |= cut(items, {name: wanted[name] for name in names}, seed, what)
    if missing := [name for name in SPLITS if name not in splits]:
        raise UserError(
            f"{what}: no items for {', '.join(missing)}; `splits` must name a file for each, or be left out"
        )
    info = {
        "name": options["name"],
        "role": "new",
        "kind": options["kind"],
        "scorer": options["scorer"],
        "scorer_options": options["scorer_options"],
        "demonstration_prompt": options["demonstration_prompt"],
        "styles": ["expert"],
        "counts": {"read": read, "left_out_by_keep": read - kept, "repeated_left_out": kept - distinct},
        "notes": ["kind recall: val and test are disjoint subsets of train"] if recall else [],
    }
    if options["stops"]:
        info["stops"] = options["stops"]
    write_folder(out, info, {name: splits[name] for name in SPLITS})
