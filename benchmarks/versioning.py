"""What it costs to put one checkpoint of 1 GB under version control, in time and in disk.

    python benchmarks/versioning.py [--megabytes 1000] [--repeat 3] [--folder FOLDER]

Prints two ratios. Time: publishing (both hashes) and adding to DVC, in a process of its own as after a run,
over hashing the file once (SHA-256, or MD5, whichever is slower); of each time the shortest of some repetitions.
Disk: what store and cache take together over the file's size. Beside them the same for plain `dvc add` with
DVC's default configuration. FOLDER lies on the file system to be measured; default: where temporary files lie.
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


def version(root: Path, file: Path, times: dict[str, list[float]]) -> int:
    """Publish and add the file in a new study folder, as a run does; returns bytes on disk. The file stays."""
    store, job = study(root, True), Job("train", "checkpoint", {}, {}, "c")
    out, files = store.aside(job.id), {}
    place = root / "store" / job.id / file.name
    os.replace(file, out / file.name)
    times["publish"].append(seconds(lambda: files.update(store.publish(job.id, out))))
    store.write(job.id, {"id": job.id, "payload": files})
    command = [sys.executable, "-m", "grafting.provenance.versioning"]
    for name in ("add", "idle"):
        times[name].append(seconds(lambda: subprocess.run(command, cwd=root, check=True, stderr=subprocess.DEVNULL)))
    disk = used(root)
    os.replace(place, file)
    shutil.rmtree(root)
    return disk


def version_plainly(root: Path, file: Path, times: dict[str, list[float]]) -> int:
    """The same by `dvc add` alone, in a folder as `dvc init` makes it; returns bytes on disk."""
    study(root, False)
    (root / "store" / "train").mkdir(parents=True)
    shutil.copyfile(file, root / "store" / "train" / file.name)
    command = [sys.executable, "-m", "dvc", "add", "-q", "store/train"]
    times["plain"].append(seconds(lambda: subprocess.run(command, cwd=root, check=True)))
    disk = used(root)
    shutil.rmtree(root)
    return disk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in ("sha256", "md5", "publish", "add", "idle", "plain")}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        file = Path(scratch) / "model.safetensors"
        random_file(file, options.megabytes)
        size = file.stat().st_size
        for n in range(options.repeat):
            for name in ("sha256", "md5"):
                times[name].append(hash_once(file, name))
            disk = version(Path(scratch) / f"ours{n}", file, times)
            theirs = version_plainly(Path(scratch) / f"peer{n}", file, times)
    best = {name: min(values) for name, values in times.items()}
    slower, cost = max(best["sha256"], best["md5"]), best["publish"] + best["add"]
    print(f"hashing once: SHA-256 {best['sha256']:.2f} s, MD5 {best['md5']:.2f} s ({size / 1e9:.2f} GB)")
    print(f"publishing {best['publish']:.2f} s, adding to DVC {best['add']:.2f} s ({best['idle']:.2f} s once a run)")
    print(f"added cost of versioning / hashing once: {cost / slower:.2f}   (must be <= 1.5)")
    print(f"disk / size:                             {disk / size:.3f}   (must be <= 1.05)")
    print(f"plain dvc add, DVC's defaults: time {best['plain'] / slower:.2f}, disk {theirs / size:.3f}")


if __name__ == "__main__":
    main()
