"""Runs one job: inputs found, work aside, payload published, sentinel written last.

`python -m grafting.<room> --plan FILE --job ID --log FILE` calls `main("module:function")`, which hands
the function a `RunningJob`. A job whose sentinel exists is done. A job that hangs on a selection (it has
`alternatives`) becomes the chosen alternative; if that artefact exists already, only a link is written.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import resource
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from grafting.errors import UserError
from grafting.plan.code import code_digest
from grafting.plan.jobs import Job, key_of
from grafting.plan.planfile import read_job, read_manifest, read_settings
from grafting.provenance import allocation, devices, facts, saving
from grafting.provenance.heap import keep_heap
from grafting.provenance.progress import Progress
from grafting.provenance.store import Store
from grafting.provenance.tracking import Tracker

FORMAT = 1
#: Faults of the disk or of a folder that a user can mend.
DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}


def _tell(stream, line: str) -> None:
    """Print a line where there is still somebody who reads it: a job outlives the terminal that started it."""
    with suppress(OSError):
        print(line, file=stream, flush=True)


def fault_of_the_disk(error: Exception) -> str | None:
    """Words for a fault of the disk or of a folder; None for any other."""
    if not isinstance(error, OSError) or error.errno not in DISK_FAULTS:
        return None
    place = f" at {error.filename}" if error.filename else ""
    return f"{error.strerror}{place}; make room or mend the folder, then run again: nothing that is finished is lost"


class RunningJob:
    """What a stage function sees of its job. See `grafting.plan.jobs.Job` for spec and inputs.

    `work` is the job's folder for unfinished work: it survives failure and is removed when the job is done.
    `saving` saves it and brings it back (see `grafting.provenance.saving`).
    """

    def __init__(
        self,
        job: Job,
        store: Store,
        out: Path,
        terminal,
        settings: saving.Settings | None = None,
        started: float | None = None,
    ) -> None:
        self.job, self.store, self.out, self._terminal = job, store, out, terminal
        self.started = time.monotonic() if started is None else started
        self.stage, self.name, self.key, self.id, self.spec = job.stage, job.name, job.key, job.id, job.spec
        self.places = job.places
        self.work = store.work(job.id)
        self.results = store.root / "results"
        self.cost: dict[str, int] = {}
        self.phases: dict[str, float] = {}
        self.metrics: dict[str, object] = {}
        self._open: dict[str, float] = {}  # phases that are not over, with the process time of their start
        self._wall, self._cpu = time.monotonic(), time.process_time()
        #: of interrupted runs whose work it goes on from
        self.earlier_cost = {"cpu_seconds": 0.0, "wall_seconds": 0.0, "peak_memory_bytes": 0, "sessions": 0}
        self.saving = saving.Saver(self.work, settings, self.say, job.code, self.account, self.carry, self.started)
        folder = store.root / "work" / "tracking"
        self._tracker = Tracker(self.saving.settings.tracking, f"{job.name}-{job.key}", folder, self.say)

    @property
    def input_keys(self) -> dict[str, list[str]]:
        """Keys of the inputs by role (with subfolder, if any): what may be written into a payload."""
        return {role: [key_of(reference) for reference in refs] for role, refs in self.job.inputs.items()}

    def inputs(self, role: str) -> list[Path]:
        """Payload folders of the inputs with this role; empty if there are none."""
        return self.store.payloads(self.job.inputs.get(role, []))

    def input(self, role: str) -> Path:
        """Payload folder of the one input with this role."""
        paths = self.inputs(role)
        if len(paths) != 1:
            raise UserError(f"job {self.id}: expected one input with the role {role!r}, the plan has {len(paths)}")
        return paths[0]

    def sidecar(self, stage: str, key: str) -> dict:
        """Content of the sentinel of the finished job with this key; links are followed."""
        job_id = self.store.with_key(stage, key)
        if job_id is None:
            raise UserError(f"provenance/{stage}/: no sentinel with the key {key}; run snakemake to make it")
        return self.store.read(self.store.target(job_id))

    def addresses(self, role: str) -> list[Path]:
        """Where the payloads of the inputs with this role lie or would lie: for one who names, but does not read."""
        return [self.store.folder(reference) for reference in self.job.inputs.get(role, [])]

    def earlier(self) -> list[Path]:
        """Payload folders of finished jobs with the same stage and readable name but another key, if to be had."""
        found = []
        for job_id in self.store.with_name(self.stage, self.name):
            if job_id != self.id:
                with suppress(UserError):  # one that is nowhere or altered only costs computing anew
                    found.append(self.store.payload(job_id))
        return found

    def say(self, line: str) -> None:
        """One line for the person who watches: on the terminal and in the log."""
        for stream in (sys.stderr, self._terminal):
            _tell(stream, f"[{self.stage} {self.name}] {line}")

    def relay(self, line: str) -> None:
        """A line that one of the job's processes has written: into the log, and to the person if it was said."""
        _tell(sys.stderr, line)
        if line.startswith(f"[{self.stage} {self.name}] "):
            _tell(self._terminal, line)

    def progress(self, total: int, label: str, unit: str = "step") -> Progress:
        """A counter that says rate and time left every ten seconds."""
        return Progress(total, label, unit, self.say)

    def close(self) -> None:
        """The job is over, or leaves."""
        self._tracker.close()

    def track(self, label: str, record: dict) -> None:
        """Show a step's record to the tracker, if the configuration names one."""
        self._tracker.log(label, record)

    def add_cost(self, **numbers: int) -> None:
        """Add to the counters of the job (tokens_generated, tokens_forwarded, tokens_backpropagated, flops)."""
        for key, value in numbers.items():
            self.cost[key] = self.cost.get(key, 0) + int(value)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """CPU seconds spent inside are added to the sidecar under this name."""
        start = self._open[name] = time.process_time()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.process_time() - start
            self._open.pop(name, None)

    def account(self) -> dict[str, object]:
        """What the job has cost up to now, in this run and in interrupted ones whose work it goes on from."""
        now, earlier = time.process_time(), self.earlier_cost
        phases = dict(self.phases)
        for name, start in self._open.items():
            phases[name] = phases.get(name, 0.0) + now - start
        return {
            "cost": dict(self.cost),
            "phases": phases,
            "cpu_seconds": earlier["cpu_seconds"] + now - self._cpu,
            "wall_seconds": earlier["wall_seconds"] + time.monotonic() - self._wall,
            "peak_memory_bytes": max(
                earlier["peak_memory_bytes"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            ),
            "sessions": earlier["sessions"] + 1,
        }

    def carry(self, account: dict) -> None:
        """Add the account of interrupted runs, or of this one's processes."""
        self.add_cost(**account["cost"])
        for name, seconds in account["phases"].items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        self.earlier_cost = {key: account[key] for key in self.earlier_cost}


def stage_function(target: str):
    """The function `module:function` of a stage."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def work_of(target: str):
    """What makes a job's payload: the stage's function here, or in as many processes as its spec says."""

    def work(running: RunningJob) -> None:
        if running.spec.get("processes", 1) == 1:
            stage_function(target)(running)
            return
        from grafting.provenance import launch

        launch.together(running, target)

    return work


def execute(
    job: Job,
    store: Store,
    function,
    terminal,
    settings: saving.Settings | None = None,
    started: float | None = None,
) -> None:
    """Make the artefact of `job`, or a link to an equal one that exists.

    `settings` say when the job saves itself, `started` is its start on the monotonic clock.
    """
    concrete = job
    if job.alternatives:
        path = store.payload(job.inputs["selection"][0]) / "choice.json"
        choice = json.loads(path.read_text(encoding="utf-8"))["choice"]
        concrete = job.alternatives[choice]
    # two jobs that chose the same candidate, or a requeued job beside its first run, wait for each other
    with store.lock(concrete.stage, concrete.key):
        existing = store.with_key(concrete.stage, concrete.key)
        if existing is None:
            if not store.recall(concrete.id):
                _compute(concrete, store, function, terminal, settings, started)
            existing = concrete.id
    if existing != job.id:
        linked = {
            "format": FORMAT,
            "id": job.id,
            "key": job.key,
            "stage": job.stage,
            "name": job.name,
            "spec": job.spec,
            "inputs": job.inputs,
            "code": job.code,
            "link": existing,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if job.alternatives:
            linked |= {"choice": choice, "alternatives": {name: way.key for name, way in job.alternatives.items()}}
        if job.aliases:
            linked["aliases"] = job.aliases
        store.write(job.id, linked)


def _compute(job: Job, store: Store, function, terminal, settings, started) -> None:
    began = datetime.now(UTC)
    out = store.aside(job.id)
    running = RunningJob(job, store, out, terminal, settings, started)
    try:
        function(running)
        files = store.publish(job.id, out)
    finally:
        running.close()
        shutil.rmtree(out, ignore_errors=True)
    account = running.account()
    cost = {
        **{
            key: running.cost.get(key, 0)
            for key in ("tokens_generated", "tokens_forwarded", "tokens_backpropagated", "flops")
        },
        "cpu_seconds": round(account["cpu_seconds"], 3),
        "wall_seconds": round(account["wall_seconds"], 3),
        "peak_memory_bytes": account["peak_memory_bytes"],
        "phases": {name: round(seconds, 3) for name, seconds in sorted(running.phases.items())},
    }
    store.write(
        job.id,
        {
            "format": FORMAT,
            "id": job.id,
            "key": job.key,
            "stage": job.stage,
            "name": job.name,
            "spec": job.spec,
            "inputs": job.inputs,
            "code": job.code,
            **({"aliases": job.aliases} if job.aliases else {}),
            "seed": job.spec.get("seed"),
            "payload": files,
            "metrics": running.metrics,
            "cost": cost,
            "versions": facts.versions(),
            "git": facts.git_state(),
            "host": facts.host(),
            "environment": facts.environment(),
            # 1, and one more for every interrupted run whose work this one went on from
            "sessions": account["sessions"],
            "started": began.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )
    shutil.rmtree(running.work, ignore_errors=True)


def _redirect(log: Path | None):
    """Send stdout and stderr to the log; returns the stream that still reaches the terminal."""
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    return terminal


def same_code(job: Job) -> None:
    """UserError if the code on disk is no longer what the plan named; else the key would name another result."""
    for way in (job, *job.alternatives.values()):
        if way.entry and code_digest(*way.entry) != way.code:
            raise UserError("the code has changed since this run was planned; start snakemake again")


def run(target: str, arguments: list[str]) -> int:
    """Run one job in this process; returns the exit status: 0 done, 75 stopped with its work saved (run it again
    to go on), 2 a fault that the user can mend, 1 a bug."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m " + target.partition(":")[0])
    parser.add_argument("--plan", type=Path, required=True, help="plan file written by the Snakefile")
    parser.add_argument("--job", required=True, help="id of the job, <stage>/<name>-<key>")
    parser.add_argument("--log", type=Path, help="where output goes; progress is shown on the terminal too")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="save and leave with status 75 before the job has run this long; default: saving.budget_seconds",
    )
    options = parser.parse_args(arguments)
    terminal = _redirect(options.log)

    def both(line: str) -> None:
        for stream in (sys.stderr, terminal):
            _tell(stream, line)

    if number := allocation.slurm_id():
        print(f"SLURM job {number} on {socket.gethostname()}", file=sys.stderr, flush=True)
    try:
        keep_heap()
        module = target.partition(":")[0]
        job = read_job(options.plan, options.job)
        settings = saving.Settings(**read_settings(options.plan))
        if options.budget is not None:
            settings = replace(settings, budget_seconds=options.budget)
        settings = allocation.within(settings)
        store = Store()
        devices.claim(job.stage, store.root / "work" / "locks", job.processes)
        if module not in sys.modules:
            same_code(job)
        ways = (job, *job.alternatives.values())
        declared = {alias["new"] for way in ways for alias in way.aliases if alias["kind"] == "code"}
        for code in {way.code for way in ways} | declared:
            store.keep_code(code, lambda code=code: read_manifest(options.plan, code))
        execute(job, store, work_of(target), terminal, settings, started)
    except saving.Stopped as stop:
        both(f"{options.job}: {stop}")
        return saving.STATUS
    except UserError as error:
        # most messages of a stage name the job themselves
        both(f"error in {options.job}: {str(error).removeprefix(options.job).lstrip(':, ')}")
        return 2
    except Exception as error:
        if words := fault_of_the_disk(error):
            both(f"error in {options.job}: {words}")
            return 2
        text = traceback.format_exc()
        _tell(sys.stderr, text)
        where = f" (log: {options.log})" if options.log else ""
        _tell(terminal, f"{options.job} failed{where}: {text.strip().splitlines()[-1]}")
        return 1
    return 0


def main(target: str) -> None:
    """Entry point of a stage's `__main__`: through the warm process if one is there, else here."""
    from grafting.provenance import warm

    status = warm.delegate(target, sys.argv[1:])
    sys.exit(run(target, sys.argv[1:]) if status is None else status)
