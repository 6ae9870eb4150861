"""The plan as a file, so that a job's process finds its spec without planning again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from grafting.errors import UserError
from grafting.plan.code import MANIFESTS
from grafting.plan.jobs import Job
from grafting.provenance.files import canonical, digest, write_text

SETTINGS = "saving"
KEPT_SECONDS = 30 * 24 * 3600


def write_plan(jobs: dict[str, Job], folder: Path, settings: dict | None = None) -> Path:
    """Write one line per job to `folder/<hash of the content>.jsonl`; returns its path.

    `settings`: how jobs save themselves (the section `saving` of the configuration). They change no result, so
    they stand beside the jobs and not in their specs. Plans that no run has used for a month are removed.
    """
    lines = [f"{SETTINGS}\t{canonical(settings or {})}\n"]
    lines += [f"code/{code}\t{canonical(manifest)}\n" for code, manifest in sorted(MANIFESTS.items())]
    lines += [f"{job_id}\t{canonical(job.to_json())}\n" for job_id, job in jobs.items()]
    path = folder / f"{digest(lines, 16)}.jsonl"
    if path.exists():
        os.utime(path)
        return path
    write_text(path, "".join(lines))
    for old in folder.glob("*.jsonl"):
        if time.time() - old.stat().st_mtime > KEPT_SECONDS:
            old.unlink(missing_ok=True)
    return path


def read_manifest(path: Path, code: str) -> dict | None:
    """What a code digest of this plan is made of (modules and libraries); None if the plan does not say."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.startswith(f"code/{code}\t"):
                return json.loads(line.partition("\t")[2])
    return None


def read_settings(path: Path) -> dict:
    """How jobs save themselves; it is the plan's first line. Empty if the plan does not say."""
    with path.open(encoding="utf-8") as file:
        name, _, text = file.readline().partition("\t")
    return json.loads(text) if name == SETTINGS else {}


def read_job(path: Path, job_id: str) -> Job:
    """One job of a plan file."""
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.startswith(job_id + "\t"):
                    return Job.from_json(json.loads(line.partition("\t")[2]))
    except FileNotFoundError:
        raise UserError(f"{path}: no such plan file; run snakemake") from None
    raise UserError(f"{path}: no job {job_id} in this plan")
