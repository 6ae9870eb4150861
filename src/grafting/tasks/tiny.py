"""Builders of the tiny language's data: one new task, or the suite of prior skills."""

import random

from grafting.errors import UserError
from grafting.tasks import tiny_language as tiny
from grafting.tasks.building import cut, in_hash_order, make_example, shrink, take_options, write_folder

DEMONSTRATION_PROMPT = "{question} <ex> {demonstration} </ex>"
STYLES = ["own", "expert"]
MISSES = 5000  # draws in a row without a new item: there are no more
RECALL_NOTE = "kind recall: memorised items, so val and test are disjoint subsets of train"


def _example(task: str, x: list[str], y: list[str]) -> dict:
    messages = [{"role": "user", "content": " ".join([task, *x])}]
    shown = {"own": " ".join(y), "expert": " ".join(tiny.expert_style(y))}
    return make_example(task, messages, " ".join(y), shown)


def _info(name: str, role: str, kind: str, notes: list[str], **more) -> dict:
    return {
        "name": name,
        "role": role,
        "kind": kind,
        "scorer": "tokens",
        "scorer_options": {"ignore": tiny.STYLE_WORDS},
        "demonstration_prompt": DEMONSTRATION_PROMPT,
        "styles": STYLES,
        "notes": notes,
        **more,
    }


def _draw(task: str, sizes: dict[str, int], seed: int, held_out: bool) -> dict[str, list[dict]]:
    """Distinct random items, each given to a split by its own hash, until every split is full.

    So the splits are disjoint by content, and one split's size does not move another's items.
    """
    rng = random.Random(f"{seed}/{task}/{'held out' if held_out else 'trained'}")
    names, splits, seen, misses = list(sizes), {name: [] for name in sizes}, set(), 0
    while misses < MISSES:
        if all(len(splits[name]) == sizes[name] for name in names):
            return splits
        example = _example(task, *tiny.sample(task, rng, held_out))
        name = names[int(example["id"], 16) % len(names)]
        misses += 1
        if example["id"] not in seen and len(splits[name]) < sizes[name]:
            seen.add(example["id"])
            splits[name].append(example)
            misses = 0
    found = {name: len(items) for name, items in splits.items()}
    raise UserError(f"tiny language, {task}: {sizes} items asked for, only {found} distinct ones exist; ask for fewer")


def _check_length(examples: list[dict], limit: int) -> None:
    """The longest sequence is the teacher's: markers, question, demonstration, then a response as long."""
    for example in examples:
        question = example["messages"][-1]["content"]
        for style, shown in example["demonstrations"].items():
            prompt = DEMONSTRATION_PROMPT.format(question=question, demonstration=shown)
            words = len(f"<user> {prompt} <bot> {shown} </ans> <eos>".split())
            if words > limit:
                raise UserError(
                    f"example {example['id']} (task {example['task']}, style {style}): prompt, "
                    f"demonstration and response make {words} tokens, context is {limit}; nothing is cut: "
                    "raise lineage.architecture.context or shorten the demonstration"
                )


def build_task(spec: dict, out) -> None:
    """One new task: train, val and test, disjoint by content (recall: val and test are parts of train)."""
    sizes = {"train_items": int, "val_items": int, "test_items": int}
    options = take_options(spec, {"task": str, **sizes, "seed": int}, {"max_tokens": None})
    task, seed = options["task"], options["seed"]
    if task not in tiny.NEW_TASKS:
        raise UserError(f"tiny language: unknown task {task!r}; known are {tiny.NEW_TASKS}")
    tested = {"val": options["val_items"], "test": options["test_items"]}
    kind, notes = "skill", []
    if task in tiny.RECALL:
        every = [_example(task, x, y) for x, y in tiny.recall_items(task)]
        train = in_hash_order(every, seed)[: options["train_items"]]
        fitted = shrink(tested, len(train))
        kind, notes = "recall", [RECALL_NOTE]
        if fitted != tested:
            notes.append(f"val and test shrunk from {tested} to {fitted}: the task has {len(train)} trained facts")
        splits = {"train": train, **cut(train, fitted, seed, f"task {task}")}
    else:
        splits = _draw(task, {"train": options["train_items"]}, seed, held_out=False)
        splits |= _draw(task, tested, seed, held_out=True)
    if options["max_tokens"] is not None:
        _check_length([e for examples in splits.values() for e in examples], options["max_tokens"])
    write_folder(out, _info(task, "new", kind, notes), splits)


def build_prior(spec: dict, out) -> None:
    """The 19 prior skills, items per skill. Retention has trained inputs, val and test held-out ones."""
    sizes = {"val_items": int, "test_items": int, "retention_items": int}
    options = take_options(spec, {**sizes, "seed": int})
    seed = options["seed"]
    wanted = {name: options[f"{name}_items"] for name in ("val", "test", "retention")}
    splits, kinds = {name: [] for name in wanted}, {}
    for skill in tiny.SKILLS:
        kinds[skill] = "recall" if skill in tiny.RECALL else "skill"
        if skill in tiny.RECALL:
            every = [_example(skill, x, y) for x, y in tiny.recall_items(skill)]
            parts = cut(every, shrink(wanted, len(every)), seed, f"skill {skill}")
        else:
            parts = _draw(skill, {name: wanted[name] for name in ("val", "test")}, seed, held_out=True)
            parts |= _draw(skill, {"retention": wanted["retention"]}, seed, held_out=False)
        for name in wanted:
            splits[name] += parts[name]
    notes = [
        "fact and add are recall (memorised items): val and test are disjoint subsets of the trained items",
        "retention items are trained inputs, disjoint from val and test",
    ]
    write_folder(out, _info("skills", "prior", "skills", notes, skills=kinds), splits)
