"""Runs one job: inputs found, work aside, payload published, sentinel written last.

`python -m grafting.<room> --plan FILE --job ID --log FILE` calls `main("module:function")`, which hands
the function a `RunningJob`. A job whose sentinel exists is done. A job that hangs on a selection (it has
`alternatives`) becomes the chosen alternative; if that artefact exists already, only a link is written.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import importlib
import json
import os
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from grafting.errors import UserError
from grafting.plan.code import code_digest
from grafting.plan.jobs import Job, key_of
from grafting.plan.planfile import read_job, read_manifest
from grafting.provenance import facts
from grafting.provenance.progress import Progress
from grafting.provenance.store import Store

FORMAT = 1
#: Faults of the disk or of a folder that a user can mend.
DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}


class RunningJob:
    """What a stage function sees of its job. See `grafting.plan.jobs.Job` for spec and inputs."""

    def __init__(self, job: Job, store: Store, out: Path, terminal) -> None:
        self.job, self.store, self.out, self._terminal = job, store, out, terminal
        self.stage, self.name, self.key, self.id, self.spec = job.stage, job.name, job.key, job.id, job.spec
        self.places = job.places
        self.work = store.work(job.id)
        self.results = store.root / "results"
        self.cost: dict[str, int] = {}
        self.phases: dict[str, float] = {}
        self.metrics: dict[str, object] = {}

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
            print(f"[{self.stage} {self.name}] {line}", file=stream, flush=True)

    def progress(self, total: int, label: str, unit: str = "step") -> Progress:
        """A counter that says rate and time left every ten seconds."""
        return Progress(total, label, unit, self.say)

    def add_cost(self, **numbers: int) -> None:
        """Add to the counters of the job (tokens_generated, tokens_forwarded, tokens_backpropagated, flops)."""
        for key, value in numbers.items():
            self.cost[key] = self.cost.get(key, 0) + int(value)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """CPU seconds spent inside are added to the sidecar under this name."""
        start = time.process_time()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.process_time() - start


def _keep_heap() -> None:
    """Stop glibc from giving memory back to the kernel between steps.

    With its defaults every activation is mapped and unmapped again, which cost up to three quarters of the
    time of a small model's training here. Blocks over 32 MiB (large models) are still mapped one by one.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_mmap_threshold, m_trim_threshold, m_top_pad = -3, -1, -2
        libc.mallopt(m_mmap_threshold, 32 << 20)
        libc.mallopt(m_trim_threshold, 1 << 30)
        libc.mallopt(m_top_pad, 64 << 20)


def execute(job: Job, store: Store, function, terminal) -> None:
    """Make the artefact of `job`, or a link to an equal one that exists."""
    concrete = job
    if job.alternatives:
        choice = json.loads((store.payload(job.inputs["selection"][0]) / "choice.json").read_text(encoding="utf-8"))
        concrete = job.alternatives[choice["choice"]]
    # two jobs that chose the same candidate, or a requeued job beside its first run, wait for each other
    with store.lock(concrete.stage, concrete.key):
        existing = store.with_key(concrete.stage, concrete.key)
        if existing is None:
            _compute(concrete, store, function, terminal)
            existing = concrete.id
    if existing != job.id:
        linked = {
            "format": FORMAT,
            "id": job.id,
            "key": job.key,
            "stage": job.stage,
            "name": job.name,
            "inputs": job.inputs,
            "link": existing,
        }
        store.write(job.id, linked)


def _compute(job: Job, store: Store, function, terminal) -> None:
    started, wall, cpu = datetime.now(UTC), time.monotonic(), time.process_time()
    out = store.aside(job.id)
    running = RunningJob(job, store, out, terminal)
    try:
        function(running)
        files = store.publish(job.id, out)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    cost = {
        **{
            key: running.cost.get(key, 0)
            for key in ("tokens_generated", "tokens_forwarded", "tokens_backpropagated", "flops")
        },
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "wall_seconds": round(time.monotonic() - wall, 3),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
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
            "payload": files,
            "metrics": running.metrics,
            "cost": cost,
            "versions": facts.versions(),
            "git": facts.git_state(),
            "host": facts.host(),
            "started": started.isoformat(timespec="seconds"),
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


def _same_code(job: Job) -> None:
    """UserError if the code on disk is no longer what the plan named; else the key would name another result."""
    for way in (job, *job.alternatives.values()):
        if way.entry and code_digest(*way.entry) != way.code:
            raise UserError("the code has changed since this run was planned; start snakemake again")


def run(target: str, arguments: list[str]) -> int:
    """Run one job in this process; returns the exit status (0 done, 2 a fault that the user can mend, 1 a bug)."""
    parser = argparse.ArgumentParser(prog="python -m " + target.partition(":")[0])
    parser.add_argument("--plan", type=Path, required=True, help="plan file written by the Snakefile")
    parser.add_argument("--job", required=True, help="id of the job, <stage>/<name>-<key>")
    parser.add_argument("--log", type=Path, help="where output goes; progress is shown on the terminal too")
    options = parser.parse_args(arguments)
    terminal = _redirect(options.log)
    try:
        _keep_heap()
        module, _, name = target.partition(":")
        job = read_job(options.plan, options.job)
        store = Store()
        if module not in sys.modules:
            _same_code(job)
        for code in {job.code, *(way.code for way in job.alternatives.values())}:
            store.keep_code(code, lambda code=code: read_manifest(options.plan, code))
        execute(job, store, getattr(importlib.import_module(module), name), terminal)
    except UserError as error:
        for stream in (sys.stderr, terminal):
            text = str(error)
            # most messages of a stage name the job themselves
            print(f"error in {options.job}: {text.removeprefix(options.job).lstrip(':, ')}", file=stream, flush=True)
        return 2
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_FAULTS:
            place = f" at {error.filename}" if error.filename else ""
            for stream in (sys.stderr, terminal):
                print(
                    f"error in {options.job}: {error.strerror}{place}; make room or mend the folder, then run again: "
                    "nothing that is finished is lost",
                    file=stream,
                    flush=True,
                )
            return 2
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        where = f" (log: {options.log})" if options.log else ""
        print(f"{options.job} failed{where}: {text.strip().splitlines()[-1]}", file=terminal, flush=True)
        return 1
    return 0


def main(target: str) -> None:
    """Entry point of a stage's `__main__`: through the warm process if one is there, else here."""
    from grafting.provenance import warm

    status = warm.delegate(target, sys.argv[1:])
    sys.exit(run(target, sys.argv[1:]) if status is None else status)
