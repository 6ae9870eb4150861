"""Suites of lm-evaluation-harness as prior suites, and the data folder that pins them.

A suite is a dict of harness task -> {num_fewshot, chat_template, metric}. A null is a setting that nobody here has
seen for this suite: a run stops and names it. Imports neither the harness nor torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from grafting.errors import UserError
from grafting.tasks import mmlu
from grafting.tasks.building import cut, take_options, write_folder

VERSION = "0.4.13"
_UNSEEN = {"num_fewshot": None, "chat_template": None, "metric": None}
SUITES = {
    # the names of SDFT's tables; its settings are not at hand
    "sdft": dict.fromkeys(("hellaswag", "truthfulqa_mc1", "mmlu", "ifeval", "winogrande", "humaneval"), _UNSEEN),
    # MMLU from its own archive, through a task file on JSON lines: works without the Hub
    "local": {"mmlu_local": {"num_fewshot": 0, "chat_template": True, "metric": "acc"}},
}
#: The task file of a local multiple-choice task; {file} becomes the built JSON-lines file.
LOCAL_TASK = {
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "label",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1.0},
}


def suite_of(suite: str, changes: Mapping[str, Mapping]) -> dict[str, dict]:
    """Harness task -> settings: the suite's, with what the config states. UserError: a task that is not in it."""
    tasks = {name: dict(settings) for name, settings in SUITES[suite].items()}
    if foreign := set(changes) - set(tasks):
        raise UserError(f"prior.harness: suite {suite} has no task {sorted(foreign)}; it has {', '.join(tasks)}")
    for name, stated in changes.items():
        tasks[name] |= {key: value for key, value in stated.items() if value is not None}
    return tasks


def build(spec: dict, out) -> None:
    """info.json with the pinned suite, retention data from MMLU, and for suite local its task files and items.

    val_items and test_items count per harness task; which of a task's items are which, a hash of (seed, task,
    index) decides when it runs.
    """
    sizes = {"val_items": int, "test_items": int, "retention_items": int}
    options = take_options(
        spec, {**sizes, "seed": int, "files": list, "suite": str, "tasks": dict}, {"harness_version": VERSION}
    )
    examples = mmlu.examples_of(options["files"])
    wanted = {name: options[f"{name}_items"] for name in ("val", "test", "retention")}
    splits = cut(list(examples.values()), wanted, options["seed"], "prior harness")
    info = {
        "name": "harness",
        "role": "prior",
        "kind": "harness",
        "scorer": "harness",
        "demonstration_prompt": "{question}\n\nAn example answer: {demonstration}",
        "styles": ["reference"],
        "harness": {"version": options["harness_version"], "suite": options["suite"], "tasks": options["tasks"]},
        "items": {name: wanted[name] for name in ("val", "test")},
        "seed": options["seed"],
        "counts": {},
        "notes": [f"lm-evaluation-harness {options['harness_version']}, suite {options['suite']}"],
    }
    write_folder(out, info, {"retention": splits["retention"]})
    if options["suite"] == "local":
        for split in ("val", "test"):
            _write_local(Path(out) / f"mmlu_local.{split}.jsonl", splits[split])


def _write_local(path: Path, examples: list[dict]) -> None:
    rows = (
        {
            "id": e["id"],
            "question": e["messages"][-1]["content"],
            "choices": e["options"],
            "label": e["options"].index(e["answer"]),
        }
        for e in examples
    )
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
