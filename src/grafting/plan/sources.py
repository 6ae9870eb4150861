"""`sources.lock.yaml`: size and hash of every outside file, so that a key holds content and never a path."""

from __future__ import annotations

from functools import cache

import yaml

from grafting.errors import UserError
from grafting.plan.code import PROJECT

LOCK = "sources.lock.yaml"


@cache
def locked_sources() -> dict[str, list[dict]]:
    """Source name -> list of {"name", "sha256", "bytes"}."""
    path = PROJECT / LOCK
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; restore it from git") from None


def files_of(source: str) -> list[dict]:
    """The locked files of one source; UserError naming it if it is not locked."""
    sources = locked_sources()
    if source not in sources:
        raise UserError(f"{LOCK}: no entry {source!r}; known: {', '.join(sources)}")
    return sources[source]
