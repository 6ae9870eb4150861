"""Sizes and hashes of payload files: SHA-256, which a sidecar vouches with, and MD5, by which DVC names a file.

Both are taken when a payload is published, side by side, so that DVC never has to read the file a second time.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

#: Files from this size on are hashed by two threads; hashlib lets go of the interpreter's lock.
LARGE = 8 << 20


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        # MD5 is DVC's name of a file here, nothing that keeps a secret
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def describe_file(path: Path) -> dict[str, str | int]:
    """`{"bytes", "sha256", "md5"}` of one file."""
    size = path.stat().st_size
    if size < LARGE:
        data = path.read_bytes()
        return {
            "bytes": size,
            "sha256": hashlib.sha256(data).hexdigest(),
            "md5": hashlib.md5(data, usedforsecurity=False).hexdigest(),
        }
    with ThreadPoolExecutor(2) as pool:
        sha256, md5 = pool.map(_digest, (path, path), ("sha256", "md5"))
    return {"bytes": size, "sha256": sha256, "md5": md5}


def describe(folder: Path) -> dict[str, dict]:
    """`describe_file` of every file below a folder, by its path in it."""
    return {
        path.relative_to(folder).as_posix(): describe_file(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }
