"""The plan as a file, so that a job's process finds its spec without planning again.

The first line is an index (JSON): for each job's id, each alternative's (`way/<id>`), each code digest
(`code/<digest>`) and the settings of saving the place of its line behind the index, in bytes.
So a job's process reads its own lines only.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from grafting.errors import UserError
from grafting.plan.code import MANIFESTS
from grafting.plan.jobs import Job
from grafting.provenance.files import canonical, write_text

SETTINGS = "saving"
KEPT_SECONDS = 30 * 24 * 3600


def write_plan(jobs: dict[str, Job], folder: Path, settings: dict | None = None) -> Path:
    """Write one line per job to `folder/<hash of the content>.jsonl`; returns its path.

    `settings`: how jobs save themselves (the section `saving` of the configuration). They change no result, so
    they stand beside the jobs and not in their specs. Plans that no run has used for a month are removed.
    """
    lines = {SETTINGS: canonical(settings or {})}
    lines |= {f"code/{code}": canonical(manifest) for code, manifest in sorted(MANIFESTS.items())}
    for job_id, job in jobs.items():
        lines[job_id] = job.to_json()
        for way in job.alternatives.values():
            if (place := f"way/{way.id}") not in lines:  # families share their candidates
                lines[place] = way.to_json()
    text = "".join(f"{name}\t{line}\n" for name, line in lines.items())
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if path.exists():
        os.utime(path)
        return path
    index, position = {}, 0
    for name, line in lines.items():
        start = position + len(name) + 1
        position = start + len(line.encode()) + 1
        index[name] = [start, position - 1 - start]
    write_text(path, canonical(index) + "\n" + text)
    for old in folder.glob("*.jsonl"):
        if time.time() - old.stat().st_mtime > KEPT_SECONDS:
            old.unlink(missing_ok=True)
    return path


def _lines(path: Path, *names: str) -> list[str | None]:
    """The lines of these names; None for a name that the plan does not have."""
    try:
        with path.open("rb") as file:
            index, found = json.loads(file.readline()), []
            start = file.tell()
            for name in names:
                if name not in index:
                    found.append(None)
                    continue
                offset, length = index[name]
                file.seek(start + offset)
                found.append(file.read(length).decode())
            return found
    except FileNotFoundError:
        raise UserError(f"{path}: no such plan file; run snakemake") from None


def read_manifest(path: Path, code: str) -> dict | None:
    """What a code digest of this plan is made of (modules and libraries); None if the plan does not say."""
    (line,) = _lines(path, f"code/{code}")
    return None if line is None else json.loads(line)


def read_settings(path: Path) -> dict:
    """How jobs save themselves; empty if the plan does not say."""
    (line,) = _lines(path, SETTINGS)
    return {} if line is None else json.loads(line)


def read_job(path: Path, job_id: str) -> Job:
    """One job of a plan file, with its alternatives."""
    (line,) = _lines(path, job_id)
    if line is None:
        raise UserError(f"{path}: no job {job_id} in this plan")
    ids = list(json.loads(line).get("alternatives", {}).values())
    ways = dict(zip(ids, _lines(path, *(f"way/{i}" for i in ids)), strict=True)) if ids else {}
    return Job.from_json(line, lambda way: Job.from_json(ways[way], lambda _: None))
