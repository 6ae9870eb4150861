"""The plan as a file, so that a job's process finds its spec without planning again."""

from __future__ import annotations

import json
from pathlib import Path

from grafting.errors import UserError
from grafting.plan.code import MANIFESTS
from grafting.plan.jobs import Job
from grafting.provenance.files import canonical, digest, write_text

KEPT = 10


def write_plan(jobs: dict[str, Job], folder: Path) -> Path:
    """Write one line per job to `folder/<hash>.jsonl`, unless it is there; returns its path. Old plans are pruned."""
    path = folder / f"{digest(sorted(jobs), 16)}.jsonl"
    if not path.exists():
        lines = [f"code/{code}\t{canonical(manifest)}\n" for code, manifest in sorted(MANIFESTS.items())]
        lines += [f"{job_id}\t{canonical(job.to_json())}\n" for job_id, job in jobs.items()]
        write_text(path, "".join(lines))
        plans = sorted(folder.glob("*.jsonl"), key=lambda p: p.stat().st_mtime_ns, reverse=True)
        for old in plans[KEPT:]:
            old.unlink(missing_ok=True)
    return path


def read_manifest(path: Path, code: str) -> dict | None:
    """What a code digest of this plan is made of (modules and libraries); None if the plan does not say."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.startswith(f"code/{code}\t"):
                return json.loads(line.partition("\t")[2])
    return None


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
