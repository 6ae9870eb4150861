"""`sources.lock.yaml`: size and hash of every outside file, so that a key holds content and never a path."""

from __future__ import annotations

from functools import cache

import yaml

from grafting.errors import UserError
from grafting.plan.code import PROJECT
from grafting.provenance.files import write_text

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


def write_sources(entries: dict[str, list[dict]]) -> list[str]:
    """Put entries into the lock, in place of those of the same name; its comments at the top stay.

    Returns what changed, one line per file.
    """
    path, known = PROJECT / LOCK, locked_sources()
    changes = []
    for source, files in entries.items():
        before = {file["name"]: file for file in known.get(source, [])}
        after = {file["name"]: file for file in files}
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                word = "added" if name not in before else "removed" if name not in after else "changed"
                changes.append(f"{source}/{name}: {word}")
    header = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    text = yaml.safe_dump({**known, **entries}, sort_keys=False)
    write_text(path, "\n".join([*header, text]))
    locked_sources.cache_clear()
    return changes
