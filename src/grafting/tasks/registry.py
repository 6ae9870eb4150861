"""The tasks and prior suites that a config may name. Light: for validation before anything starts."""

from copy import deepcopy

from grafting.tasks import mmlu, science

_TINY = {
    "builder": "tiny.task",
    "option_defaults": {},
    "styles": ["own", "expert"],
    "source": None,
}

TASKS = {
    "wug": {**_TINY, "kind": "recall", "summary": "60 new facts: two Greek tokens to an attribute"},
    "zup": {**_TINY, "kind": "skill", "summary": "reverse and upper-case: a composition of known skills"},
    "dax": {**_TINY, "kind": "skill", "summary": "digits to their maximum, then their minimum"},
    "pim": {**_TINY, "kind": "skill", "summary": "swap and upper-case: interferes with zup"},
    "science": {
        "builder": "science",
        "kind": "skill",
        "summary": "SciKnowEval chemistry L3, multiple choice; 2095 distinct questions (75 / 5 / 20 %: 1571, 105, 419)",
        "option_defaults": {"format": science.FORMAT},
        "styles": ["expert"],
        "source": science.FOLDER,
    },
}

PRIORS = {
    "skills": {
        "builder": "tiny.prior",
        "kind": "skills",
        "summary": "the tiny language's 19 prior skills",
        "styles": ["own", "expert"],
        "source": None,
    },
    "mmlu": {
        "builder": "mmlu",
        "kind": "options",
        "summary": "MMLU, zero-shot option log-likelihoods; items are counted over all subjects",
        "styles": ["reference"],
        "source": mmlu.FOLDER,
    },
}


def known_tasks() -> dict[str, dict]:
    """Name -> {kind, builder, summary, option_defaults, styles, source} of every new task.

    `option_defaults`: the builder's options beyond sizes and seed; `styles`: of the demonstrations; `source`:
    entry of sources.lock.yaml and folder under data_root, None for data that are made.
    """
    return deepcopy(TASKS)


def known_priors() -> dict[str, dict]:
    """The same, without option_defaults, for the prior suites."""
    return deepcopy(PRIORS)
