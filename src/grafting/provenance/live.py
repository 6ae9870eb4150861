"""How far the run in a study folder is, seen from another shell: read from its files and, on a cluster, the queue.

Nothing is asked of Snakemake. A job runs exactly while somebody holds its lock (`Store.lock`), on whatever machine;
it is done when its sentinel exists; how far it is stands in the last progress line of its log.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from grafting.plan.jobs import STAGES
from grafting.provenance import runs
from grafting.provenance.progress import clock
from grafting.provenance.store import Store

#: A line of `progress.Progress`: label, done, total, unit, rate per second, time left, numbers.
STEP = re.compile(
    r"\] (?P<label>[^:\]]+): (?P<done>\d+)/(?P<total>\d+) (?P<unit>\w+), (?P<rate>[^/]+)/s, (?P<left>.+?) left"
)
SLURM = re.compile(r"^SLURM job (?P<id>\S+) on (?P<node>\S+)$", re.MULTILINE)
FAULT = re.compile(r"^(error in |Traceback )", re.MULTILINE)
LAST_LINES = 5


@dataclass
class Running:
    """One running job. `step` is empty until its first progress line, `slurm` outside SLURM."""

    job: str
    step: str = ""
    slurm: str = ""
    seconds_silent: float = 0.0


@dataclass
class View:
    """What is known of a run at one moment. `stages`: stage -> (done, running, all). `queue`: lines of squeue."""

    run: dict | None
    alive: bool | None
    stages: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    failed: dict[str, list[str]] = field(default_factory=dict)
    queue: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Finished jobs of the plan."""
        return sum(done for done, _, _ in self.stages.values())

    @property
    def total(self) -> int:
        """All jobs of the plan."""
        return sum(total for _, _, total in self.stages.values())


def planned(path: Path) -> dict[str, list[str]]:
    """Id of every job of a plan file -> keys under which it may hold a lock: its own, and those of its alternatives."""
    found: dict[str, list[str]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            job_id, _, text = line.partition("\t")
            if job_id.partition("/")[0] not in STAGES:
                continue  # what the keys are made of, settings
            found[job_id] = [job_id.rpartition("-")[2]]
            if '"alternatives"' in text:
                found[job_id] += [way.rpartition("-")[2] for way in json.loads(text)["alternatives"].values()]
    return found


def held(path: Path) -> bool:
    """Whether a lock file is locked by a process, here or (on a file system that passes locks on) elsewhere."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _queue(root: Path) -> list[str]:
    """`id state time/limit node or reason` for this folder's jobs in the queue; empty without SLURM."""
    if shutil.which("squeue") is None:
        return []
    from grafting.provenance.cluster import ask

    done = ask("squeue", "--noheader", "--format", "%i|%T|%M|%l|%R|%Z")
    rows = [line.split("|", 5) for line in done.stdout.splitlines()]
    return [f"{i} {state} {used}/{limit} {why}" for i, state, used, limit, why, place in rows
            if Path(place) == root.resolve()]  # fmt: skip


def _tail(path: Path, size: int = 20000) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode("utf-8", errors="replace")


def _running(job_id: str, log: Path) -> Running:
    if not log.exists():
        return Running(job_id)
    text = _tail(log)
    steps = list(STEP.finditer(text))
    last = steps[-1].groupdict() if steps else None
    step = "{label} {done}/{total} {unit}, {rate}/s, {left} left".format(**last) if last else ""
    with log.open(encoding="utf-8", errors="replace") as file:
        place = SLURM.search(file.read(2000))
    return Running(job_id, step, place["id"] if place else "", time.time() - log.stat().st_mtime)


def look(root: Path = Path(".")) -> View:
    """The state of the run in a study folder. Reads only."""
    about = runs.read(root)
    view = View(about, runs.alive(about) if about else False)
    if about is None or not (root / about["plan"]).exists():
        return view
    store = Store(root)
    started = datetime.fromisoformat(about["started"]).timestamp()
    counts = {stage: [0, 0, 0] for stage in STAGES}
    for job_id, keys in planned(root / about["plan"]).items():
        stage, _, name = job_id.partition("/")
        counts[stage][2] += 1
        if store.sentinel(job_id).exists():
            counts[stage][0] += 1
            continue
        log = root / "work" / "logs" / stage / f"{name}.log"
        if any(held(root / "work" / "locks" / f"{stage}-{key}") for key in keys):
            counts[stage][1] += 1
            view.running.append(_running(job_id, log))
        elif log.exists() and log.stat().st_mtime >= started:
            text = _tail(log)
            if FAULT.search(text):
                view.failed[job_id] = [line for line in text.splitlines() if line.strip()][-LAST_LINES:]
    view.stages = {stage: tuple(numbers) for stage, numbers in counts.items() if numbers[2]}
    view.queue = _queue(root) if about["executor"] == "slurm" else []
    return view


def lines(view: View) -> list[str]:
    """The view as text."""
    if view.run is None:
        return ["no run was started in this folder yet"]
    state = {True: "running", None: "started on another machine, not ended", False: "died without a word"}[view.alive]
    if "ended" in view.run:
        state = f"ended {view.run['ended']}, " + ("complete" if view.run["ok"] else "not complete")
    text = [f"run ({view.run['executor']}) of {runs.describe(view.run)}: {state}"]
    for stage, (done, running, total) in view.stages.items():
        text.append(f"  {stage:12s} {done:5d} of {total:5d} done" + (f", {running} running" if running else ""))
    text.append(f"  {'all':12s} {view.done:5d} of {view.total:5d} done")
    if view.running:
        text.append("running:")
    for job in view.running:
        parts = [job.step or "no step yet", f"SLURM {job.slurm}" if job.slurm else ""]
        if job.seconds_silent > 60:
            parts.append(f"silent for {clock(job.seconds_silent)}")
        text.append(f"  {job.job}: " + ", ".join(part for part in parts if part))
    if view.queue:
        text += ["in the queue (id, state, time/limit, node or reason):", *(f"  {line}" for line in view.queue)]
    for job_id, last in view.failed.items():
        text += [f"failed: {job_id} (work/logs/{job_id}.log)", *(f"    {line}" for line in last)]
    return text
