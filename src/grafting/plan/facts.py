"""What is known of the package's modules, kept from one process to the next in a study's folder.

Reading a module's syntax takes milliseconds, and every command reads a hundred of them. What was found is taken over
while the module's text, its name, the reading code and Python's version are the same; a file that cannot be read or
written is as none.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from grafting.plan import syntax
from grafting.provenance.files import write_text

#: In the folder from which a command is given; not kept where nothing has been run.
PLACE = Path("work") / f"modules.{sys.implementation.cache_tag}.json"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Facts:
    """Facts of modules by what they were read from, in memory and in a file."""

    def __init__(self, place: Path = PLACE) -> None:
        self.place = place
        self._reader = _sha256(Path(syntax.__file__).read_text(encoding="utf-8"))
        self._known: dict[str, dict] = {}
        self._used: dict[str, dict] = {}
        with suppress(OSError, ValueError, TypeError, KeyError):
            kept = json.loads(place.read_text(encoding="utf-8"))
            if kept["reader"] == self._reader:
                self._known = kept["modules"]

    def of(self, text: str, name: str, is_package: bool, filename: str) -> syntax.Module:
        """`syntax.read`, or what it found in the same text before."""
        key = _sha256(json.dumps([name, is_package, text]))
        found = self._known.get(key)
        if found is None:
            module = syntax.read(text, name, is_package, filename)
            self._used[key] = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(module).items()}
            return module
        self._used[key] = found
        return syntax.Module(**{k: frozenset(v) if isinstance(v, list) else v for k, v in found.items()})

    def save(self) -> None:
        """Keep what is new; modules that changed replace what they were."""
        if self._used.keys() <= self._known.keys() or not self.place.parent.is_dir():
            return
        self._known = {**self._known, **self._used} if len(self._known) < 1000 else dict(self._used)
        with suppress(OSError):
            write_text(self.place, json.dumps({"reader": self._reader, "modules": self._known}))
