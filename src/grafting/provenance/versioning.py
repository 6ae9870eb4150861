"""New payloads are put under DVC after every run, finished or not.

Each stage's payloads are one directory, tracked by `store/<stage>.dvc`. Only payloads that DVC does not know
yet are added, one by one to that directory, so that entries whose payload is not on this machine stay.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import yaml

from grafting.plan.jobs import STAGES


def tracked(root: Path, stage: str) -> set[str] | None:
    """Names of the payloads that `store/<stage>.dvc` lists; None if there is no such file, or its list is absent."""
    pointer = root / "store" / f"{stage}.dvc"
    if not pointer.exists():
        return None
    md5 = yaml.safe_load(pointer.read_text(encoding="utf-8"))["outs"][0]["md5"]
    listing = root / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]
    if not listing.exists():
        return None
    return {entry["relpath"].split("/")[0] for entry in json.loads(listing.read_text(encoding="utf-8"))}


def untracked(root: Path) -> list[Path]:
    """Paths to add, relative to the root: whole stages that DVC does not know, else single new payloads."""
    found: list[Path] = []
    for stage in STAGES:
        folder = root / "store" / stage
        if not folder.is_dir():
            continue
        known = tracked(root, stage)
        if known is None and not (root / "store" / f"{stage}.dvc").exists():
            found.append(Path("store") / stage)
            continue
        complete = (p for p in sorted(folder.iterdir()) if (root / "provenance" / stage / f"{p.name}.json").exists())
        found += [Path("store") / stage / path.name for path in complete if path.name not in (known or ())]
    return found


def add_payloads(root: Path, attempts: int = 30) -> int:
    """Add what is new to DVC; returns how many paths. Waits for a busy lock."""
    new = untracked(root)
    if not new or not (root / ".dvc").is_dir():
        return 0
    os.environ["DVC_NO_ANALYTICS"] = "1"
    from dvc.lock import LockError
    from dvc.repo import Repo

    # DVC's advice to stage store/*.dvc after every add says nothing new to the one who runs a study
    logging.getLogger("dvc").setLevel(logging.WARNING)
    with Repo(str(root)) as repo:
        for attempt in range(attempts):
            try:
                repo.add([str(path) for path in new])
                return len(new)
            except LockError:
                if attempt == attempts - 1:
                    raise
                time.sleep(2)
    return 0


def main() -> int:
    """Entry after a run: a fault here never fails the run, but it is said."""
    started = time.monotonic()
    try:
        count = add_payloads(Path("."))
    except Exception as error:  # whatever DVC raises, the payloads are safe in store/
        print(
            f"notice: DVC did not take the new payloads ({type(error).__name__}: {error}); they are safe in store/. "
            "Try again with `python -m grafting.provenance.versioning`.",
            file=sys.stderr,
        )
        return 1
    if count:
        print(f"DVC: {count} new payloads under version control ({time.monotonic() - started:.0f} s)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
