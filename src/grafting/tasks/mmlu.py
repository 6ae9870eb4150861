"""MMLU (Hendrycks et al.) as a prior suite: zero-shot, accuracy of the most likely option letter."""

import csv
import io
import zipfile
from collections import Counter

from grafting.errors import UserError
from grafting.tasks.building import cut, make_example, take_options, write_folder
from grafting.tasks.sources import read_sources

FOLDER = "mmlu"
LETTERS = ["A", "B", "C", "D"]
PROMPT = "{question}\n{options}\nAnswer with the letter of the right option only."


def _rows(name: str, data: bytes):
    """(place, subject, row) of every CSV in data/dev, data/val and data/test of the archive."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile:
        raise UserError(f"{FOLDER}/{name} is not a zip archive; fetch it again") from None
    members = [
        m for m in archive.namelist() if m.startswith(("data/dev/", "data/val/", "data/test/")) and m.endswith(".csv")
    ]
    if not members:
        raise UserError(f"{FOLDER}/{name}: no CSV files in data/dev, data/val or data/test")
    for member in sorted(members):
        text = archive.read(member).decode("utf-8")
        if not text.strip():
            raise UserError(f"{FOLDER}/{name}: {member} is empty")
        subject = member.rsplit("/", 1)[1].rsplit("_", 1)[0]
        for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
            where = f"{FOLDER}/{name}: {member}, row {number}"
            if len(row) != 6:
                raise UserError(f"{where}: {len(row)} fields, expected question, A, B, C, D, answer")
            if row[5] not in LETTERS:
                raise UserError(f"{where}: answer {row[5]!r} is not one of {LETTERS}")
            yield where, subject, row


def examples_of(files: list[dict], count: Counter | None = None) -> dict[str, dict]:
    """Prompt -> example of every distinct item in the files; count["read"] tells how many were read."""
    examples = {}
    for name, data in sorted(read_sources(FOLDER, files).items()):
        for _, subject, (question, *choices, answer) in _rows(name, data):
            if count is not None:
                count["read"] += 1
            lines = "\n".join(f"{letter}: {text}" for letter, text in zip(LETTERS, choices, strict=True))
            content = PROMPT.format(question=question.strip(), options=lines)
            messages = [{"role": "user", "content": content}]
            example = make_example("mmlu", messages, answer, {"reference": answer}, options=LETTERS, subject=subject)
            examples.setdefault(content, example)
    return examples


def build(spec: dict, out) -> None:
    """Val, test and retention: samples by content hash, disjoint, in all as many items as asked for."""
    sizes = {"val_items": int, "test_items": int, "retention_items": int}
    options, count = take_options(spec, {**sizes, "seed": int, "files": list}), Counter()
    examples = examples_of(options["files"], count)
    read = count["read"]
    wanted = {name: options[f"{name}_items"] for name in ("val", "test", "retention")}
    splits = cut(list(examples.values()), wanted, options["seed"], "prior mmlu")
    info = {
        "name": "mmlu",
        "role": "prior",
        "kind": "options",
        "scorer": "options",
        "scorer_options": {},
        "demonstration_prompt": "{question}\n\nAn example answer: {demonstration}",
        "styles": ["reference"],
        "skills": {"mmlu": "options"},
        "counts": {"read": read, "repeated_left_out": read - len(examples)},
        "notes": [
            "zero-shot, with the chat template; a sample over all subjects and over MMLU's dev, "
            "val and test files: not comparable with published 5-shot figures",
            f"{read - len(examples)} repeated items are left out",
        ],
    }
    write_folder(out, info, splits)
