"""Science Q&A: SciKnowEval, chemistry L3 (HICAI-ZJU). Multiple choice; filling items are left out, or kept."""

import json
from collections import Counter

from grafting.errors import UserError
from grafting.tasks.building import cut, make_example, take_options, write_folder
from grafting.tasks.examples import check_fields
from grafting.tasks.sources import read_sources

FOLDER = "sciknoweval"
FIELDS = {"prompt", "question", "choices", "answerKey", "answer", "type", "domain", "details"}
CHOICE, FILLING = "mcq-4-choices", "filling"

# Prompt form after SDFT; the wording is ours. The demonstration states the reference answer and nothing
# invented.
FORMAT = {
    "system": (
        "Given a question and four options, select the right answer. Respond in this format:\n"
        "<reasoning>\n...\n</reasoning>\n<answer>X</answer>\n"
        "Put only the letter of the right option (A, B, C or D) between <answer> and </answer>."
    ),
    "filling_system": (
        "Answer the question. Respond in this format:\n"
        "<reasoning>\n...\n</reasoning>\n<answer>...</answer>\n"
        "Put only the answer itself between <answer> and </answer>."
    ),
    "filling_response": "<reasoning>\nThe answer is {answer}\n</reasoning>\n<answer>{answer}</answer>",
    "response": ("<reasoning>\nThe right option is {letter}: {option}\n</reasoning>\n<answer>{letter}</answer>"),
    "demonstration_prompt": (
        "{question}\n\nThis is an example for a response to the question:\n{demonstration}\n\n"
        "Now answer with a response of your own, including the thinking process:"
    ),
}


def _records(name: str, data: bytes):
    """(place, record) for each line; UserError with file and line for what is not as expected."""
    lines = data.decode("utf-8").split("\n")
    if not data.strip():
        raise UserError(f"{FOLDER}/{name} is empty")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{FOLDER}/{name}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON ({error})") from None
        check_fields(record, FIELDS, FIELDS, where)
        if record["type"] not in (CHOICE, FILLING):
            raise UserError(f"{where}: unknown type {record['type']!r}; known are {CHOICE}, {FILLING}")
        yield where, record


def _example(where: str, record: dict, form: dict) -> dict:
    labels, texts = record["choices"]["label"], record["choices"]["text"]
    if len(labels) != len(texts) or not labels:
        raise UserError(f"{where}: {len(labels)} option labels for {len(texts)} option texts")
    letter = record["answerKey"]
    if letter not in labels:
        raise UserError(f"{where}: demonstration missing: answerKey {letter!r} is none of the options {labels}")
    options = "\n".join(f"{label}: {text}" for label, text in zip(labels, texts, strict=True))
    messages = [
        {"role": "system", "content": form["system"]},
        {"role": "user", "content": f"{record['question'].strip()}\n{options}"},
    ]
    shown = form["response"].format(letter=letter, option=texts[labels.index(letter)])
    return make_example("science", messages, letter, {"expert": shown}, subject=record["details"]["task"])


def _filling(where: str, record: dict, form: dict) -> dict:
    answer = record["answer"].strip()
    if not answer or not record["question"].strip():
        raise UserError(f"{where}: a filling item needs a question and an answer")
    messages = [
        {"role": "system", "content": form["filling_system"]},
        {"role": "user", "content": record["question"].strip()},
    ]
    shown = form["filling_response"].replace("{answer}", answer)
    return make_example("science", messages, answer, {"expert": shown}, subject=record["details"]["task"])


def build(spec: dict, out) -> None:
    """Train, val and test by content hash. A question that comes again (other options too) is left out."""
    sizes = {"train_items": int, "val_items": int, "test_items": int}
    options = take_options(spec, {**sizes, "seed": int, "files": list}, {"format": {}, "filling": "leave_out"})
    if options["filling"] not in ("leave_out", "keep"):
        raise UserError(f"task science: filling must be leave_out or keep, got {options['filling']!r}")
    unknown = set(options["format"]) - set(FORMAT)
    if unknown:
        raise UserError(f"task science: unknown option format.{sorted(unknown)}; known are {sorted(FORMAT)}")
    form, types, used, subjects = {**FORMAT, **options["format"]}, Counter(), Counter(), Counter()
    examples: dict[str, dict] = {}
    for name, data in sorted(read_sources(FOLDER, options["files"]).items()):
        for where, record in _records(name, data):
            types[record["type"]] += 1
            if record["type"] == CHOICE:
                example = _example(where, record, form)
            elif options["filling"] == "keep":
                example = _filling(where, record, form)
            else:
                continue
            used[record["type"]] += 1
            subjects[record["details"]["task"]] += 1
            examples.setdefault(" ".join(record["question"].split()), example)
    repeated = used.total() - len(examples)
    wanted = {name: options[f"{name}_items"] for name in ("test", "val", "train")}
    splits = cut(list(examples.values()), wanted, options["seed"], "task science")
    info = {
        "name": "science",
        "role": "new",
        "kind": "skill",
        "scorer": "letter" if options["filling"] == "leave_out" else "tagged",
        "scorer_options": {},
        "demonstration_prompt": form["demonstration_prompt"],
        "styles": ["expert"],
        "counts": {
            "read": sum(types.values()),
            "multiple_choice": types[CHOICE],
            "filling": types[FILLING],
            "filling_left_out": types[FILLING] - used[FILLING],
            "by_subject": dict(sorted(subjects.items())),
            "repeated_questions_left_out": repeated,
        },
        "notes": [
            f"of {types[FILLING]} filling items {types[FILLING] - used[FILLING]} are left out "
            f"(option filling: {options['filling']})",
            f"{repeated} items whose question came before are left out",
            "the source's answers carry no reasoning: demonstrations state the right option, no more",
        ],
    }
    write_folder(out, info, {name: splits[name] for name in ("train", "val", "test")})
