"""What is here of all that git names: present, only in DVC's cache, or nowhere; and the mending of the last."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from grafting.plan.jobs import STAGES
from grafting.provenance.store import Store


@dataclass
class Health:
    """Ids of artefacts by where their payload is. `listed`: DVC lists it, but its files are not in the cache
    here; a remote may hold them (`dvc pull`). `missing`: neither in store/ nor in DVC's lists."""

    present: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def _listing(root: Path, stage: str) -> dict[str, list[str]] | None:
    """Payload name -> md5 of its files, from DVC's list of the stage; None if the list is not at hand."""
    pointer = root / "store" / f"{stage}.dvc"
    if not pointer.exists():
        return {}
    md5 = yaml.safe_load(pointer.read_text(encoding="utf-8"))["outs"][0]["md5"]
    path = _cached(root, md5)
    if not path.exists():
        return None
    found: dict[str, list[str]] = {}
    for entry in json.loads(path.read_text(encoding="utf-8")):
        found.setdefault(entry["relpath"].split("/")[0], []).append(entry["md5"])
    return found


def _cached(root: Path, md5: str) -> Path:
    return root / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]


def examine(store: Store) -> Health:
    """Where every payload is that a sentinel names. Sizes are compared with the sentinel's, hashes are not."""
    health = Health()
    for stage in STAGES:
        listing = _listing(store.root, stage)
        for path in sorted((store.root / "provenance" / stage).glob("*.json")):
            job_id = f"{stage}/{path.stem}"
            try:
                sidecar = json.loads(path.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError):
                health.damaged.append(job_id)
                continue
            if "link" in sidecar:
                continue  # its payload is the chosen one's
            folder = store.root / "store" / job_id
            files = sidecar.get("payload", {})
            if folder.is_dir() and all(_size(folder / name) == about["bytes"] for name, about in files.items()):
                health.present.append(job_id)
            elif listing is None or path.stem in listing:
                hashes = None if listing is None else listing[path.stem]
                whole = hashes is not None and all(_cached(store.root, md5).exists() for md5 in hashes)
                (health.cached if whole else health.listed).append(job_id)
            else:
                health.missing.append(job_id)
    return health


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def repair(store: Store, health: Health) -> list[str]:
    """Remove the sentinels of payloads that are nowhere, and damaged ones, with the links to them; returns ids.

    The next run computes exactly these again.
    """
    lost = {*health.missing, *health.damaged}
    for stage in STAGES:
        for path in sorted((store.root / "provenance" / stage).glob("*.json")):
            job_id = f"{stage}/{path.stem}"
            if job_id not in lost and store.read(job_id).get("link") in lost:
                lost.add(job_id)
    for job_id in sorted(lost):
        store.sentinel(job_id).unlink(missing_ok=True)
    return sorted(lost)
