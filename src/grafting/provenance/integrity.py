"""Does a payload still hold what its sidecar says?

Reading a checkpoint twice, once to hash it and once to use it, would double the cost of every job. So a file
is hashed when it is published or fetched, and its size and time of change are noted in `work/intact/`; it is
hashed again only if they differ from the note. `deep` hashes every file, whatever the note says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from grafting.provenance.files import file_digest, write_json


def stamp(path: Path) -> list[int] | None:
    """Size and time of change (ns) of a file; None if there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return [status.st_size, status.st_mtime_ns]


def note(place: Path, folder: Path, files: Mapping[str, Mapping]) -> None:
    """Note that all files were hashed just now and are what they should be."""
    with suppress(OSError):  # only spares a hash later: a full disk is found out where it matters
        write_json(place, {name: stamp(folder / name) for name in files})


def _noted(place: Path) -> dict[str, list[int]]:
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # never noted, or cut off by a crash: hash again
        return {}
    return content if isinstance(content, dict) else {}


def absent(folder: Path, files: Mapping[str, Mapping]) -> list[str]:
    """Names of the files that are not there."""
    return [name for name in files if stamp(folder / name) is None]


def altered(place: Path, folder: Path, files: Mapping[str, Mapping], deep: bool = False) -> list[str]:
    """Names of the files whose size or SHA-256 is not the recorded one, absent ones included."""
    known = {} if deep else _noted(place)
    found, hashed = [], False
    for name, about in files.items():
        now = stamp(folder / name)
        if now is None or now[0] != about["bytes"]:
            found.append(name)
        elif known.get(name) != now:
            hashed = True
            if file_digest(folder / name) != about["sha256"]:
                found.append(name)
    if hashed and not found:
        note(place, folder, files)
    return found
