"""What it costs to put one checkpoint of 1 GB under version control, in time and in disk.

    python benchmarks/versioning.py [--megabytes 1000] [--folder FOLDER]

Prints two ratios. Time: publishing (both hashes) and adding to DVC, in a process of its own as after a run,
over hashing the file once (SHA-256, or MD5, whichever is slower). Disk: what store and cache take together
over the file's size. Beside them the same for plain `dvc add` with DVC's default configuration.
FOLDER lies on the file system to be measured; default: the system's folder for temporary files.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grafting.plan.jobs import Job
from grafting.provenance.store import Store

PROJECT = Path(__file__).resolve().parents[1]


def used(root: Path) -> int:
    """Bytes on disk of store and cache together; a file with several names counts once."""
    paths = [path for part in ("store", ".dvc/cache") for path in (root / part).rglob("*") if not path.is_dir()]
    return sum({(s := path.lstat()).st_ino: s.st_blocks * 512 for path in paths}.values())


def seconds(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def hash_once(path: Path, name: str) -> float:
    """Seconds to hash a file that is in the page cache, by this Python's hashlib."""
    with path.open("rb") as file:
        return seconds(lambda: hashlib.file_digest(file, name))


def random_file(path: Path, megabytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1_000_000))


def study(root: Path, config: bool) -> Store:
    """A folder under git and DVC, with this project's DVC configuration or DVC's own."""
    root.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], cwd=root, check=True)
    if config:
        shutil.copy(PROJECT / ".dvc" / "config", root / ".dvc" / "config")
    return Store(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        ours, peer = study(Path(scratch) / "ours", True), study(Path(scratch) / "peer", False)
        job = Job("train", "checkpoint", {}, {}, "c")
        out = ours.aside(job.id)
        random_file(out / "model.safetensors", options.megabytes)
        size = (out / "model.safetensors").stat().st_size
        once = {name: hash_once(out / "model.safetensors", name) for name in ("sha256", "md5")}

        files: dict = {}
        publish = seconds(lambda: files.update(ours.publish(job.id, out)))
        ours.write(job.id, {"id": job.id, "payload": files})
        command = [sys.executable, "-m", "grafting.provenance.versioning"]
        add = seconds(lambda: subprocess.run(command, cwd=ours.root, check=True))
        again = seconds(lambda: subprocess.run(command, cwd=ours.root, check=True))
        disk = used(ours.root)

        place = peer.root / "store" / "train"
        place.mkdir(parents=True)
        shutil.copyfile(ours.root / "store" / job.id / "model.safetensors", place / "model.safetensors")
        plain = [sys.executable, "-m", "dvc", "add", "-q", "store/train"]
        added = seconds(lambda: subprocess.run(plain, cwd=peer.root, check=True))
        theirs = used(peer.root)

    slower = max(once.values())
    print(f"hashing once: SHA-256 {once['sha256']:.2f} s, MD5 {once['md5']:.2f} s ({size / 1e9:.2f} GB)")
    print(f"publishing {publish:.2f} s, adding to DVC {add:.2f} s (with nothing to add: {again:.2f} s)")
    print(f"added cost of versioning / hashing once: {(publish + add) / slower:.2f}   (must be <= 1.5)")
    print(f"disk / size:                             {disk / size:.3f}   (must be <= 1.05)")
    print(f"plain dvc add, DVC's defaults: time {added / slower:.2f}, disk {theirs / size:.3f}")


if __name__ == "__main__":
    main()
