"""A task that one Python file of the user's defines.

The file states `TASK`, a literal dict (kind, styles, files ...; read without running the file), and defines
`examples(options, files)`, which returns {"train": [...], "val": [...], "test": [...]}: each item has "question" or
"messages", "answer", and "demonstration" or "demonstrations". It may define `score(text, example)`.
"""

from grafting.errors import UserError
from grafting.tasks.building import make_example, write_folder
from grafting.tasks.records import DEMONSTRATION_PROMPT, SPLITS
from grafting.tasks.sources import read_sources


def build(spec: dict, out, root: str) -> None:
    """Runs the file's `examples` and writes what it returns; the file's text goes along for its scorer."""
    name, task = spec["name"], spec["task"]
    contents = read_sources(spec["folder"], [spec["file"], *spec["files"]], root)
    source = contents.pop(spec["file"]["name"]).decode("utf-8")
    namespace: dict = {"__name__": f"grafting_task_{name}"}
    exec(compile(source, spec["file"]["name"], "exec"), namespace)
    if not callable(namespace.get("examples")):
        raise UserError(f"task {name}: {spec['file']['name']} defines no function examples(options, files)")
    sizes = {key: spec[key] for key in ("train_items", "val_items", "test_items", "seed")}
    made = namespace["examples"]({**sizes, **spec["options"]}, contents)
    if not isinstance(made, dict) or set(made) != set(SPLITS):
        raise UserError(f"task {name}: examples() must return a dict with train, val and test")
    splits = {split: [_example(name, split, i, item) for i, item in enumerate(made[split])] for split in SPLITS}
    scored = callable(namespace.get("score"))
    info = {
        "name": name,
        "role": "new",
        "kind": task.get("kind", "skill"),
        "scorer": "python" if scored else task.get("scorer", "exact"),
        "scorer_options": {"source": source} if scored else task.get("scorer_options", {}),
        "demonstration_prompt": task.get("demonstration_prompt", DEMONSTRATION_PROMPT),
        "styles": task.get("styles", ["expert"]),
        "notes": task.get("notes", []),
    }
    write_folder(out, info, splits)


def _example(task: str, split: str, number: int, item: dict) -> dict:
    where = f"task {task}: item {number} of {split}"
    if not isinstance(item, dict) or "answer" not in item or not ({"question", "messages"} & set(item)):
        raise UserError(f"{where} must be a dict with answer and question (or messages), got {item!r}")
    messages = item.get("messages") or [{"role": "user", "content": item["question"]}]
    shown = item.get("demonstrations") or {"expert": item.get("demonstration", "")}
    if not all(isinstance(text, str) and text.strip() for text in shown.values()):
        raise UserError(f"{where}: a demonstration is empty")
    more = {"subject": item["subject"]} if "subject" in item else {}
    return make_example(task, messages, item["answer"], shown, **more)
