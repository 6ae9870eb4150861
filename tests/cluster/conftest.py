"""A real SLURM on the loopback interface, and study folders whose jobs go through it.

Only `make test-cluster` lets these tests install and start it (GRAFTING_TEST_CLUSTER=1): it needs root on Debian.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path

import pytest
from workflow.conftest import BIN, Folder, new_folder

SCRIPT = Path(__file__).with_name("cluster.sh")


def ask(*command: str) -> str:
    """Output of one of SLURM's commands."""
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def until(condition, seconds: float, what: str):
    """Wait until `condition()` is true; its value. Fails with `what` after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.5)
    pytest.fail(f"{what}: not within {seconds:.0f} s")


class Cluster:
    """The running test cluster."""

    def script(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False)

    def queue(self) -> list[list[str]]:
        """Rows of [id, state] in the queue, jobs that end just now left out."""
        rows = [line.split("|") for line in ask("squeue", "--noheader", "--format", "%i|%T").splitlines()]
        return [row for row in rows if row[1] != "COMPLETING"]

    def empty(self) -> bool:
        return not self.queue()


@pytest.fixture(scope="session")
def cluster():
    if os.environ.get("GRAFTING_TEST_CLUSTER") != "1":
        pytest.skip("a real SLURM is installed and started only by `make test-cluster`")
    running = Cluster()
    for step in ("install", "start"):
        done = running.script(step)
        if done.returncode == 77:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stdout + done.stderr
    yield running
    running.script("stop")


class Study(Folder):
    """A study folder with ways to run it through SLURM."""

    def slurm(
        self, *arguments: str, check: bool = True, seconds: int = 1500, **environment: str
    ) -> subprocess.CompletedProcess:
        # an interrupted Snakemake cancels its jobs
        limit = ("timeout", "--signal=INT", "--kill-after=60", str(seconds))
        command = ("snakemake", "--profile", "profiles/slurm", "--configfile", "presets/smoke.yaml", *arguments)
        return self.run(*limit, *command, check=check, **environment)

    def start(self, *arguments: str, profile: tuple[str, ...] = ("--profile", "profiles/slurm")) -> subprocess.Popen:
        """The same in the background; its output goes to `out` in the folder."""
        command = [str(BIN / "snakemake"), *profile, "--configfile", "presets/smoke.yaml"]
        environment = {
            **os.environ, "PYTHONPATH": str(self.root / "src"), "PATH": f"{BIN}:{os.environ['PATH']}"
        }  # fmt: skip
        with (self.root / "out").open("a") as out:
            return subprocess.Popen(
                [*command, *arguments], cwd=self.root, env=environment, stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return (self.root / "out").read_text()

    def grafting(self, *arguments: str) -> str:
        done = self.run(sys.executable, "-m", "grafting.cli", *arguments, check=False)
        return done.stdout + done.stderr


def end(process: subprocess.Popen) -> None:
    """End a Snakemake that still runs; it cancels its jobs."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture
def background():
    """Processes that a test starts; what is left of them is ended."""
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        end(process)


def study(root: Path) -> Study:
    """A fresh study folder."""
    return Study(new_folder(root).root)


#: One job that takes a while: the pretraining of the smoke model, with more steps. It saves itself often.
LONG = """
lineage:
  pretrain: {steps: %d, checkpoints: %d}
saving: {steps: 200}
"""
CHECKPOINTS = 2
#: Steps of the shortest of such jobs, and about its seconds of training on an idle core.
STEPS, SHORT = 900, 13
#: The plugin looks at the queue after this many seconds, and then after ever longer ones, ten more each time.
POLL = ("--slurm-init-seconds-before-status-checks", "1")


def long_study(root: Path, steps: int) -> tuple[Study, str]:
    """A folder whose pretraining takes a while, and the id of that job."""
    folder = study(root)
    with (folder.root / "long.yaml").open("w") as file:
        file.write(LONG % (steps, CHECKPOINTS))
    jobs = folder.run(
        sys.executable, "-m", "grafting.cli", "plan", "--jobs", "--configfile", "presets/smoke.yaml", "long.yaml"
    ).stdout
    job = next(line.split()[1] for line in jobs.splitlines() if "models/pretrained" in line)
    return folder, job


class Reference:
    """The long job without any interruption and without SLURM, made in the background."""

    def __init__(self, root: Path, steps: int) -> None:
        self.steps = steps
        self.folder, self.job = long_study(root, steps)
        self.process = self.folder.start(
            "--cores", "1", f"provenance/{self.job}.json", "--configfile", "presets/smoke.yaml", "long.yaml", profile=()
        )

    @cached_property
    def sidecar(self) -> dict:
        """The record of the job, once it is finished."""
        assert self.process.wait(600) == 0, self.folder.said
        return self.folder.sidecars()[f"{self.job}.json"]

    @property
    def payload(self) -> dict:
        """Hashes of what the job makes."""
        return self.sidecar["payload"]


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """How long jobs end that nobody interrupts, by the seconds of training they take here; made when first asked for.

    The shortest is measured; the others' steps follow from the CPU seconds it took.
    """
    made: dict[int, Reference] = {}

    def of(seconds: int = SHORT) -> Reference:
        if seconds not in made:
            steps = STEPS
            if seconds != SHORT:
                short = of().sidecar
                rounds = seconds * STEPS / sum(short["cost"]["phases"].values()) / CHECKPOINTS
                steps = CHECKPOINTS * round(rounds)  # the configuration refuses what is not a multiple
            made[seconds] = Reference(tmp_path_factory.mktemp(f"reference{seconds}"), steps)
        return made[seconds]

    yield of
    for run in made.values():
        end(run.process)


@pytest.fixture(scope="session")
def local(tmp_path_factory):
    """The smoke study run on this machine without SLURM; `seconds` is how long it took."""
    folder = study(tmp_path_factory.mktemp("local"))
    started = time.monotonic()
    folder.snakemake("--cores", "2")
    folder.seconds = time.monotonic() - started
    return folder


@pytest.fixture(scope="session")
def remote(cluster, tmp_path_factory):
    """The same study through SLURM."""
    folder = study(tmp_path_factory.mktemp("remote"))
    started = time.monotonic()
    done = folder.slurm()
    folder.seconds = time.monotonic() - started
    folder.log = done.stdout + done.stderr
    return folder
