"""What all builders share: content ids, order by content hash, options, writing a data folder."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from grafting.errors import UserError


def content_id(*parts: object) -> str:
    """12 hex digits of the SHA-256 of the canonical JSON of `parts`."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def make_example(task: str, messages: list[dict], answer: str, demonstrations: dict, **more) -> dict:
    """One line of a split; its id is a hash of task, messages and answer."""
    return {
        "id": content_id(task, messages, answer),
        "task": task,
        "messages": messages,
        "answer": answer,
        "demonstrations": demonstrations,
        **more,
    }


def in_hash_order(examples: list[dict], seed: int) -> list[dict]:
    """Examples ordered by hash of (seed, id): by content only, not by the file's order."""
    return sorted(examples, key=lambda e: hashlib.sha256(f"{seed}:{e['id']}".encode()).hexdigest())


def cut(examples: list[dict], sizes: Mapping[str, int], seed: int, what: str) -> dict[str, list[dict]]:
    """Disjoint splits of the given sizes from the order by hash. UserError if there are too few examples."""
    wanted = sum(sizes.values())
    if wanted > len(examples):
        asked = ", ".join(f"{name}_items {size}" for name, size in sizes.items())
        raise UserError(f"{what}: {asked} make {wanted} items, there are {len(examples)}; ask for fewer")
    ordered, splits, start = in_hash_order(examples, seed), {}, 0
    for name, size in sizes.items():
        splits[name] = ordered[start : start + size]
        start += size
    return splits


def shrink(sizes: Mapping[str, int], available: int) -> dict[str, int]:
    """Sizes reduced in proportion until they fit; what rounding leaves over goes to the largest."""
    wanted = sum(sizes.values())
    if wanted <= available:
        return dict(sizes)
    small = {name: available * size // wanted for name, size in sizes.items()}
    small[max(sizes, key=sizes.get)] += available - sum(small.values())
    return small


def take_options(spec: Mapping, required: Mapping[str, type], optional: Mapping[str, object] = {}) -> dict:
    """The builder's options from the spec. UserError for a missing, unknown or ill-typed one.

    Sizes (keys ending in _items) are whole numbers above 0.
    """
    where = f"data builder {spec.get('builder')!r}"
    missing = set(required) - set(spec)
    unknown = set(spec) - set(required) - set(optional) - {"builder"}
    if missing:
        raise UserError(f"{where}: missing option {sorted(missing)}")
    if unknown:
        known = sorted(set(required) | set(optional))
        raise UserError(f"{where}: unknown option {sorted(unknown)}; known are {known}")
    for name, kind in required.items():
        if not isinstance(spec[name], kind) or isinstance(spec[name], bool):
            raise UserError(f"{where}: option {name} must be of type {kind.__name__}, got {spec[name]!r}")
        if name.endswith("_items") and spec[name] < 1:
            raise UserError(f"{where}: option {name} must be at least 1, got {spec[name]}")
    return {**optional, **{name: value for name, value in spec.items() if name != "builder"}}


def check_hygiene(info: Mapping, splits: Mapping[str, list[dict]]) -> None:
    """UserError naming the examples: an empty field, an answer that is no option, one prompt in two splits.

    Only a recall task may test what it trains, and even its val and test are apart.
    """
    recall = info.get("kind") == "recall"
    seen: dict[str, tuple[str, str]] = {}
    for split, examples in splits.items():
        for example in examples:
            where = f"data {info['name']}, split {split}, example {example['id']}"
            if not example["messages"] or not all(str(m.get("content", "")).strip() for m in example["messages"]):
                raise UserError(f"{where}: a message is empty; mend or leave out the item")
            if not example["answer"]:
                raise UserError(f"{where}: the answer is empty; mend or leave out the item")
            if "options" in example and example["answer"] not in example["options"]:
                raise UserError(f"{where}: the answer {example['answer']!r} is none of {example['options']}")
            if recall and split == "train":
                continue
            content = content_id(example["messages"])
            other = seen.setdefault(content, (split, example["id"]))
            if other[0] != split:
                raise UserError(
                    f"{where}: the same prompt is in split {other[0]} (example {other[1]}); "
                    "leave out one of them, or split by what makes items equal"
                )


def write_folder(out: Path, info: dict, splits: Mapping[str, list[dict]]) -> None:
    """Write info.json (with counts) and one JSON-lines file per split; equal input gives equal bytes."""
    counts = {name: len(examples) for name, examples in splits.items()}
    info = {**info, "counts": {**counts, **info.get("counts", {})}}
    check_hygiene(info, splits)
    for name, examples in splits.items():
        if not examples:
            raise UserError(f"data {info['name']}: split {name!r} would be empty; ask for more items")
        lines = (json.dumps(e, ensure_ascii=False) + "\n" for e in examples)
        (Path(out) / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    text = json.dumps(info, indent=2, ensure_ascii=False) + "\n"
    (Path(out) / "info.json").write_text(text, encoding="utf-8")
