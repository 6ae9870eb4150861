"""What a job can know of the SLURM allocation that it runs in."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

from grafting.provenance.saving import Settings

#: Seconds kept free at the end of an allocation, for what comes after the job's own last save; and their share of
#: a long one, since SLURM looks at limits only now and then.
SPARE, SHARE = 15.0, 0.02


def slurm_id() -> str | None:
    """The SLURM id of the job that this process runs in, `<id>` or `<array id>_<task>`; None outside SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def seconds(text: str) -> int | None:
    """SLURM's time, `[days-]hours:minutes:seconds` or a shorter form of it, in seconds; None if it is no time."""
    days, dash, clock = text.strip().rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None  # UNLIMITED, INVALID, NOT_SET
    if dash:  # days-hours[:minutes[:seconds]]
        parts += ["0"] * (3 - len(parts))
    total = 0
    for part in parts:
        total = 60 * total + int(part)
    return total + 86400 * int(days or 0)


def time_left() -> int | None:
    """Seconds until SLURM ends the allocation of this process; None outside SLURM or without a limit.

    Asked of the queue, since older releases do not put the end into the environment.
    """
    return seconds(_queue("%L"))


def nodes() -> int:
    """Nodes of the allocation of this process; 1 outside SLURM.

    Asked of the queue, since a job step knows only its own.
    """
    said = _queue("%D")
    return int(said) if said.isdigit() else 1


def _queue(field: str) -> str:
    """What the queue says of this process's SLURM job; empty outside SLURM, or if it does not answer."""
    job = slurm_id()
    if job is None:
        return ""
    try:
        done = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format", field],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def within(settings: Settings) -> Settings:
    """The settings of a job's saving, fitted to the SLURM allocation it runs in: leave before its end, and heed
    the signal URG that the profile announces the end with, if no other is chosen. Outside SLURM as they are.
    """
    if slurm_id() is None:
        return settings
    settings = replace(settings, signal=settings.signal or "URG")
    left = time_left()
    if left is None:
        return settings
    budget = max(1.0, left - max(SPARE, SHARE * left))
    return replace(settings, budget_seconds=min(budget, settings.budget_seconds or budget))
