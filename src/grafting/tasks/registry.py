"""The tasks and prior suites that a config may name. Light: for validation before anything starts."""

from collections.abc import Mapping
from copy import deepcopy

from grafting.tasks import knowledge, mmlu, science, tooluse

_TINY = {
    "builder": "tiny.task",
    "option_defaults": {},
    "styles": ["own", "expert"],
    "source": None,
    "scorer": "tokens",
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
        "option_defaults": {"format": science.FORMAT, "filling": "leave_out"},
        "styles": ["expert"],
        "source": science.FOLDER,
        "scorer": "letter",
    },
    "tooluse": {
        "builder": "tooluse",
        "kind": "skill",
        "summary": "ToolAlpaca; its own split with its training file, else 214 queries split by tool (non-standard)",
        "option_defaults": {"format": tooluse.FORMAT},
        "styles": ["expert"],
        "source": tooluse.FOLDER,
        "scorer": "tool_calls",
    },
    "knowledge": {
        "builder": "knowledge",
        "kind": "recall",
        "summary": "generated fictional facts (1 125), as documents and as direct, reversed and rephrased questions",
        "option_defaults": {"train_items": knowledge.FACTS, "documents": 2},
        "styles": ["expert"],
        "source": None,
        "scorer": "exact",
    },
    "articles": {
        "builder": "articles",
        "kind": "recall",
        "summary": "questions on a folder of articles, with answers that a reader of them knows",
        "option_defaults": {},
        "styles": ["expert"],
        "source": knowledge.FOLDER,
        "scorer": "exact",
    },
    "medical": {
        "builder": "records",
        "kind": "skill",
        "summary": "HuatuoGPT-o1, English: medical questions with reasoning; a judge compares with the reference",
        "option_defaults": {
            "name": "medical",
            "folder": "medical",
            "prompt": "{Question}",
            "response": "<think>{Complex_CoT}</think>\n{Response}",
            "answer": "{Response}",
            "scorer": "judge",
            "scorer_options": {"thinking": ["<think>", "</think>"]},
        },
        "styles": ["expert"],
        "source": "medical",
        "scorer": "judge",
    },
    "traces": {
        "builder": "records",
        "kind": "skill",
        "summary": "prompts with an expert's responses, reasoning included; thinking is kept or stripped",
        "option_defaults": {
            "name": "traces",
            "folder": "traces",
            "prompt": "{prompt}",
            "response": "{response}",
            "answer": "{answer}",
            "scorer": "exact",
            "scorer_options": {"thinking": ["<think>", "</think>"]},
            "thinking": "keep",
            "thinking_tags": ["<think>", "</think>"],
        },
        "styles": ["expert"],
        "source": "traces",
        "scorer": "exact",
    },
}

PRIORS = {
    "skills": {
        "builder": "tiny.prior",
        "kind": "skills",
        "summary": "the tiny language's 19 prior skills",
        "styles": ["own", "expert"],
        "source": None,
        "scorer": "tokens",
    },
    "harness": {
        "builder": "harness",
        "kind": "harness",
        "summary": "suites of lm-evaluation-harness (extra `harness`), pinned; retention data from MMLU",
        "styles": ["reference"],
        "source": mmlu.FOLDER,
        "scorer": "harness",
    },
    "mmlu": {
        "builder": "mmlu",
        "kind": "options",
        "summary": "MMLU, zero-shot option log-likelihoods; items are counted over all subjects",
        "styles": ["reference"],
        "source": mmlu.FOLDER,
        "scorer": "options",
    },
}


def known_tasks() -> dict[str, dict]:
    """Name -> {kind, builder, summary, option_defaults, styles, source} of every new task.

    `option_defaults`: the builder's options beyond sizes and seed; `styles`: of the demonstrations; `source`:
    entry of sources.lock.yaml and folder under data_root, None for data that are made; `scorer`: what scores
    the answers, unless the options say otherwise.
    """
    return deepcopy(TASKS)


def tasks_of(own_tasks: Mapping[str, str]) -> dict[str, dict]:
    """The known tasks and a user's own {name: file}, which hold "spec" and "places" too. See `own.describe`."""
    from grafting.tasks.own import describe

    return known_tasks() | {name: describe(name, path) for name, path in own_tasks.items()}


def known_priors() -> dict[str, dict]:
    """The same, without option_defaults, for the prior suites."""
    return deepcopy(PRIORS)
