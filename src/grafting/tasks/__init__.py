"""Task families: examples, splits, demonstrations and scorers. Imports neither torch nor transformers.

Only the reading of built data is imported here, so that a stage that reads examples does not depend (by its
code digest) on how they were built. The registry and the builders are resolved on first use.
"""

from grafting.tasks.examples import demonstration_messages, load_examples, load_info

__all__ = [
    "check_sources",
    "demonstration_messages",
    "known_priors",
    "known_tasks",
    "load_examples",
    "load_info",
    "tasks_of",
]

_LAZY = {"known_tasks": "registry", "known_priors": "registry", "tasks_of": "registry", "check_sources": "sources"}


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
