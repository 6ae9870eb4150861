"""What a job keeps of unfinished work: numbered states, and a log of finished pieces. safetensors and JSON only.

Both lie below the job's folder in `work/`, whose name holds the job's key, so other settings, inputs or code
never meet them. What is damaged is found by its hash, said, and left out; nothing here is ever unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafting.provenance.files import file_digest

#: Layout of states and logs. This module is in no key, so a change here must not meet what an older one wrote.
FORMAT = 1
MANIFEST = "manifest.json"
TENSORS, FACTS = "tensors.safetensors", "facts.json"


@dataclass(frozen=True)
class State:
    """A saved state: named tensors on the CPU, and JSON values."""

    tensors: dict[str, Any]
    facts: dict[str, Any]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its path in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in paths}


def publish_folder(target: Path, write: Callable[[Path], object], **about: Any) -> None:
    """Let `write(folder)` fill a folder aside, then put it at `target` by one rename, with a manifest of hashes.

    Whoever looks sees the whole folder or none. A folder that is there already is replaced. OSError if the
    disk does not take it; then nothing is left of the attempt.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        write(aside)
        manifest = {"format": FORMAT, **about, "files": _hashes(aside)}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        for path in aside.rglob("*"):
            _sync(path)
        _sync(aside)
        if target.exists():
            shutil.rmtree(target)
        os.rename(aside, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def fault(folder: Path, **about: Any) -> str | None:
    """What is wrong with a folder that `publish_folder` wrote; None if its content is what was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        found = _hashes(folder)
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"
    if not isinstance(manifest, dict) or {k: manifest.get(k) for k in ("format", *about)} != {
        "format": FORMAT,
        **about,
    }:
        return "it was written by another version of the code"
    found.pop(MANIFEST, None)
    if manifest.get("files") != found:
        return "its hashes do not fit"
    return None


class States:
    """Numbered states `000001`, `000002`, ... in a folder; the two newest are kept.

    `say` receives one line for a person when a state turns out to be damaged. `code` is the digest of the code
    that makes the job's payload: a state of other code is not taken.
    """

    KEPT = 2

    def __init__(self, folder: Path, say: Callable[[str], None], code: str = "") -> None:
        self.folder, self.say, self.code = folder, say, code

    def _numbers(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}"

    def write(self, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
        """Save a state as the newest and drop all but the two newest. Tensors may lie on any device, but must not
        share memory; facts are JSON values without NaN. OSError if the disk does not take it: older states stay."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        def fill(folder: Path) -> None:
            try:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
            except SafetensorError as error:  # it hides what the system said in its text
                found = re.search(r"os error (\d+)", str(error))
                number = int(found[1]) if found else errno.EIO
                raise OSError(number, os.strerror(number), str(folder)) from None
            (folder / FACTS).write_text(_json(facts), encoding="utf-8")

        numbers = self._numbers()
        number = numbers[-1] + 1 if numbers else 1
        publish_folder(self._path(number), fill, code=self.code)
        for old in [*numbers, number][: -self.KEPT]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def read(self) -> State | None:
        """The newest state whose hashes hold; None if there is none. Damaged ones are said and removed."""
        from safetensors.torch import load_file

        if self.folder.is_dir():
            for remains in self.folder.glob(".*"):  # of a save that was killed
                shutil.rmtree(remains, ignore_errors=True)
        numbers = self._numbers()
        for number in reversed(numbers):
            path = self._path(number)
            wrong = fault(path, code=self.code)
            if wrong is None:
                facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
                return State(load_file(path / TENSORS), facts)
            last = number == numbers[0]
            follows = "there is no other: starting from the beginning" if last else "taking the one before"
            self.say(f"the saved state {path} is not usable, {wrong}; {follows}")
            shutil.rmtree(path, ignore_errors=True)
        return None

    def clear(self) -> None:
        """Remove all states."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Log:
    """Finished pieces of work in an append-only file, one line each: a checksum, a blank, JSON.

    What a killed process left of its last line is dropped; after a damaged line nothing is believed.
    """

    def __init__(self, path: Path, say: Callable[[str], None], code: str = "") -> None:
        self.path, self.say, self.code = path, say, code
        self.entries: list[Any] = []
        self._waiting: list[bytes] = []
        self._read()

    def _head(self) -> dict[str, Any]:
        return {"format": FORMAT, "code": self.code}

    def _read(self) -> None:
        """Fill `entries`, and cut the file behind the last good line."""
        good, lines = 0, []
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            content = b""
        for line in content.splitlines(keepends=True):
            checksum, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or checksum != _checksum(text):
                break
            lines.append(json.loads(text))
            good += len(line)
        if lines and lines[0] != self._head():
            self.say(f"{self.path} was written by another version of the code: starting from the beginning")
            good, lines = 0, []
        elif content[good:].endswith(b"\n"):
            self.say(f"{self.path} is damaged after {max(len(lines) - 1, 0)} entries: going on from there")
        if good < len(content):
            os.truncate(self.path, good)
        self.entries = lines[1:]
        if not lines:
            self._waiting.append(_line(self._head()))

    def add(self, entry: Any) -> None:
        """Remember an entry (a JSON value without NaN); `flush` writes it."""
        self._waiting.append(_line(entry))

    def flush(self) -> None:
        """Append what waits to the file. OSError if the disk does not take it: nothing of it is written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                file.write(b"".join(self._waiting))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            if self.path.exists():
                os.truncate(self.path, before)
            raise
        self._waiting.clear()


def _json(value: Any) -> str:
    """Compact JSON in the order given: what comes back is written into payloads, where the order of keys counts."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()


def _line(value: Any) -> bytes:
    text = _json(value).encode()
    return _checksum(text) + b" " + text + b"\n"
