"""Small file operations that never leave a half-written file behind."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

#: made once: `json.dumps` with arguments makes a new one per call
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical(value: Any) -> str:
    """Canonical JSON: sorted keys, no blanks, floats by repr; equal values give equal strings."""
    return _ENCODER.encode(value)


def digest(value: Any, length: int = 12) -> str:
    """First `length` hex digits of the SHA-256 of the canonical JSON of `value`."""
    return text_digest(canonical(value), length)


def text_digest(text: str, length: int = 12) -> str:
    """First `length` hex digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write aside, then rename: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON with sorted keys."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
