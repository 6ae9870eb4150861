"""A job of several processes: `accelerate launch` starts them, on this machine or on all nodes of the SLURM allocation.

The job's own process keeps lock, log and record, and starts no training itself. Every started process (a rank) runs the
stage's function up to where the payload is written, which only the first does. What a rank has to tell stands in a file
of its own below the job's folder, which the nodes share.

On several nodes `srun` starts one `accelerate launch` on each. They meet at the address of the first, which SLURM puts
into SLURM_LAUNCH_NODE_IPADDR, on a port that was free there; SLURM_NODEID and SLURM_NNODES say which of how many.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from grafting.errors import UserError
from grafting.plan.jobs import Job
from grafting.provenance import allocation, saving
from grafting.provenance.files import write_json
from grafting.provenance.heap import keep_heap
from grafting.provenance.runner import RunningJob, fault_of_the_disk, same_code, stage_function
from grafting.provenance.store import Store

PRCTL, PR_SET_PDEATHSIG = getattr(ctypes.CDLL(None), "prctl", None), 1
#: What SLURM says of the step that a process runs in would be taken for wishes of the next one.
KEPT = {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_CLUSTER_NAME", "SLURM_CONF"}
NODE = (
    'exec "$@" --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID"'
    ' --main_process_ip "$SLURM_LAUNCH_NODE_IPADDR" --module grafting.provenance.launch "$0"'
)


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as server:
        server.bind(("", 0))
        return server.getsockname()[1]


def command(request: str, processes: int, threads: int, nodes: int = 1) -> list[str]:
    """The call that starts all processes of a job. UserError if they do not spread evenly over the nodes."""
    if processes % nodes:
        raise UserError(
            f"training.processes: {processes} processes do not spread evenly over the {nodes} nodes of this "
            "allocation; change it, or `nodes` in the profile"
        )
    # on a machine without accelerators, too: its other launcher starts a single process there
    start = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes),
             "--num_cpu_threads_per_process", str(threads), "--mixed_precision", "no",
             "--dynamo_backend", "no"]  # fmt: skip
    if nodes == 1:
        return [*start, "--num_machines", "1", "--main_process_port", "0", "--module", __name__, request]
    each = processes // nodes
    spread = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1",
              f"--cpus-per-task={each * threads}", "--kill-on-bad-exit=1"]  # fmt: skip
    return [*spread, "sh", "-c", NODE, request, *start, "--same_network", "--main_process_port", str(free_port())]


def environment() -> dict[str, str]:
    """What the processes inherit."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in KEPT}


def die_with_parent() -> None:
    """End this process with SIGTERM when the one that started it is gone (Linux): none is left over alone."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)


def together(job: RunningJob, target: str) -> None:
    """Run the stage's function `target` in all processes of a job; payload, metrics and cost are then the job's.

    Signals that stop a job reach its ranks; one of them is enough, since they agree after every step. Errors: UserError
    and `Stopped` as the function's own; RuntimeError if a process dies otherwise (its log says why).
    """
    folder = job.work / "ranks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "request.json", {
        "job": job.job.to_json(), "target": target, "out": str(job.out), "settings": asdict(job.saving.settings),
        "root": str(job.store.root), "started": time.time() - (time.monotonic() - job.started),
    })  # fmt: skip
    call = command(str(folder / "request.json"), job.spec["processes"], job.spec.get("threads", 1), allocation.nodes())
    print(f"several processes: {shlex.join(call)}", file=sys.stderr, flush=True)
    launcher = subprocess.Popen(
        call, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    received: list[int] = []

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        if not _signal_ranks(folder, number) and number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            launcher.terminate()

    wanted = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    if job.saving.settings.signal is not None:
        wanted.add(getattr(signal, f"SIG{job.saving.settings.signal}"))
    before = {number: signal.signal(number, forward) for number in wanted if signal.getsignal(number) != signal.SIG_IGN}
    try:
        for line in launcher.stdout:
            job.relay(line.rstrip("\n"))
        status = launcher.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _conclude(job, folder, status, received)


def _told(folder: Path) -> list[dict]:
    """What the ranks have told so far, by number."""
    paths = sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _signal_ranks(folder: Path, number: int) -> bool:
    """Send a signal to the ranks on this machine; whether there are any."""
    found = [rank["pid"] for rank in _told(folder) if rank["host"] == socket.gethostname() and "state" not in rank]
    for pid in found:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    return bool(found)


def _conclude(job: RunningJob, folder: Path, status: int, received: list[int]) -> None:
    ranks = _told(folder)
    states = [rank.get("state") for rank in ranks]
    for wanted, error in (("fault", UserError), ("stopped", saving.Stopped)):
        if wanted in states:
            raise error(ranks[states.index(wanted)]["text"])
    if received and status:
        signal.signal(received[0], signal.SIG_DFL)
        os.kill(os.getpid(), received[0])
    if status or states != ["done"] * job.spec["processes"]:
        raise RuntimeError(f"one of the job's {job.spec['processes']} processes died (launcher: status {status})")
    accounts = [rank["account"] for rank in ranks]
    phases: dict[str, float] = {}
    for account in accounts:
        for name, seconds in account["phases"].items():
            phases[name] = phases.get(name, 0.0) + seconds
    job.metrics.update(ranks[0]["metrics"])
    job.carry({
        # the loop has summed the tokens over the processes; time and memory are those of all
        "cost": accounts[0]["cost"], "phases": phases, "wall_seconds": ranks[0]["earlier"]["wall_seconds"],
        "cpu_seconds": sum(account["cpu_seconds"] for account in accounts),
        "peak_memory_bytes": sum(account["peak_memory_bytes"] for account in accounts),
        "sessions": ranks[0]["earlier"]["sessions"],
    })  # fmt: skip


class NothingToWrite(BaseException):
    """A process other than the first has come to where the payload is written: its part is done."""


class Rank(RunningJob):
    """One process's view of the job. Only the first speaks, and only it writes."""

    def __init__(self, rank: int, *arguments) -> None:
        self.rank = rank
        super().__init__(*arguments)

    @property
    def out(self) -> Path:
        """Where the payload is written: the first process's question. `NothingToWrite` for the others."""
        if self.rank:
            raise NothingToWrite
        return self._out

    @out.setter
    def out(self, path: Path) -> None:
        self._out = path

    def say(self, line: str) -> None:
        """One line for the person who watches; the job's own process passes it on."""
        if self.rank == 0:
            print(f"[{self.stage} {self.name}] {line}", file=sys.stderr, flush=True)


def main(path: Path) -> int:
    """What each started process does; the exit status is 0 also where it has stopped: its file says so."""
    die_with_parent()
    keep_heap()
    request = json.loads(path.read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    print(f"process {rank} of {os.environ['WORLD_SIZE']} on {node}", file=sys.stderr, flush=True)
    started = time.monotonic() - (time.time() - request["started"])
    job, store = Job.from_json(request["job"], lambda _: None), Store(request["root"])
    mine = path.parent / f"rank-{rank}.json"
    told = {"pid": os.getpid(), "host": socket.gethostname()}
    write_json(mine, told)
    settings = saving.Settings(**request["settings"])
    running = Rank(rank, job, store, Path(request["out"]), sys.stderr, settings, started)
    try:
        same_code(job)
        with suppress(NothingToWrite):
            stage_function(request["target"])(running)
        account = running.account()
        told |= {"state": "done", "metrics": running.metrics, "account": account, "earlier": running.earlier_cost}
    except saving.Stopped as stop:
        told |= {"state": "stopped", "text": str(stop)}
    except UserError as error:
        told |= {"state": "fault", "text": str(error)}
    except Exception as error:
        if (words := fault_of_the_disk(error)) is None:
            traceback.print_exc()
            return 1
        told |= {"state": "fault", "text": words}
    finally:
        running.close()
    write_json(mine, told)
    if told["state"] == "fault":
        return 1  # the others wait for this one; the launcher ends them
    _part()
    return 0


def _part() -> None:
    """Take leave of the other processes; without it they would warn."""
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
