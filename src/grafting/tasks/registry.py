"""The tasks and prior suites that a config may name. Light: for validation before anything starts."""

from copy import deepcopy

from grafting.tasks import mmlu, science

_TINY = {
    "builder": "tiny.task",
    "option_defaults": {},
    "styles": ["own", "expert"],
    "source": None,
    "files": [],
}

TASKS = {
    "wug": {**_TINY, "kind": "recall", "summary": "60 new facts: two Greek tokens to an attribute"},
    "zup": {**_TINY, "kind": "skill", "summary": "reverse and upper-case: a composition of known skills"},
    "dax": {**_TINY, "kind": "skill", "summary": "digits to their maximum, then their minimum"},
    "pim": {**_TINY, "kind": "skill", "summary": "swap and upper-case: interferes with zup"},
    "science": {
        "builder": "science",
        "kind": "skill",
        "summary": "SciKnowEval chemistry L3, multiple choice",
        # 75 / 5 / 20 % of the 2095 distinct questions
        "option_defaults": {
            "train_items": 1571, "val_items": 105, "test_items": 419, "seed": 11, "format": science.FORMAT,
        },
        "styles": ["expert"],
        "source": science.FOLDER,
        "files": science.FILES,
    },
}  # fmt: skip

PRIORS = {
    "skills": {
        "builder": "tiny.prior",
        "kind": "skills",
        "summary": "the tiny language's 19 prior skills",
        "option_defaults": {"val_items": 20, "test_items": 40, "retention_items": 20, "seed": 123},
        "styles": ["own", "expert"],
        "source": None,
        "files": [],
    },
    "mmlu": {
        "builder": "mmlu",
        "kind": "options",
        "summary": "MMLU, zero-shot option log-likelihoods; items are counted over all subjects",
        "option_defaults": {"val_items": 200, "test_items": 400, "retention_items": 100, "seed": 123},
        "styles": ["reference"],
        "source": mmlu.FOLDER,
        "files": mmlu.FILES,
    },
}


def known_tasks() -> dict[str, dict]:
    """Name -> {kind, builder, summary, option_defaults, styles, source, files} of every new task.

    `source`: entry of sources.lock.yaml and folder under data_root; `files`: its files (None and [] if none).
    """
    return deepcopy(TASKS)


def known_priors() -> dict[str, dict]:
    """The same for the prior suites."""
    return deepcopy(PRIORS)
