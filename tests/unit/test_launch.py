"""Jobs of several processes: how they are started, and what becomes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grafting.errors import UserError
from grafting.plan.jobs import Job
from grafting.provenance import launch, runner
from grafting.provenance.saving import Settings, Stopped
from grafting.provenance.store import Store

#: Stands for a stage: what every process sees goes into the payload of the first.
STAGE = """
import os, time
from accelerate import Accelerator
from accelerate.utils import gather_object
from grafting.errors import UserError

def run(job):
    accelerator = Accelerator(cpu=True)
    mine = [accelerator.process_index, accelerator.num_processes, os.environ["OMP_NUM_THREADS"], job.seed]
    if job.spec.get("fault") == accelerator.process_index:
        raise UserError("this one cannot")
    if job.spec.get("dies") == accelerator.process_index:
        os._exit(9)
    seen = gather_object([mine])
    with job.saving.section():
        for step in range(job.spec["steps"]):
            time.sleep(0.05)
            (job.work / f"at-{accelerator.process_index}").write_text(str(step))
            due = max(gather_object([job.saving.due()]))
            if due:
                job.saving.save({}, {"step": step}, must=due == 2, write=accelerator.is_main_process)
            if due == 2:
                job.saving.leave(f"step {step}")
    job.say("all done")
    job.add_cost(flops=7)
    (job.out / "seen").write_text(repr(seen))
    job.metrics.update(steps=job.spec["steps"])
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Make a job whose stage is STAGE, in this process; its record."""
    (tmp_path / "stage_of_two.py").write_text(STAGE.replace("job.seed", 'job.spec["seed"]'))
    source = Path(__file__).resolve().parents[2] / "src"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(source)]))
    store = Store(tmp_path / "study")

    def run(settings: Settings | None = None, **spec) -> dict:
        job = Job("train", "x", {"processes": 2, "threads": 1, "seed": 5, "steps": 1, **spec}, {}, "c")
        work = runner.work_of("stage_of_two:run")
        runner.execute(job, store, work, sys.stderr, settings)
        return store.read(job.id) | {"at": store.payload(job.id)}

    return run


def test_both_processes_run_and_the_record_counts_both(make, capfd):
    side = make()
    assert (side["at"] / "seen").read_text() == "[[0, 2, '1', 5], [1, 2, '1', 5]]"
    assert side["metrics"] == {"steps": 1} and side["cost"]["flops"] == 7
    assert side["cost"]["cpu_seconds"] > 2  # two processes have imported torch
    assert side["sessions"] == 1
    assert capfd.readouterr().err.count("[train x] all done") == 2  # the log and the terminal; the second is silent


def test_fault_of_one_process_is_the_job_s(make):
    with pytest.raises(UserError, match="this one cannot"):
        make(fault=1)


def test_death_of_one_process_is_an_error(make):
    with pytest.raises(RuntimeError, match="one of the job's 2 processes died"):
        make(dies=1)


def test_budget_stops_all_after_the_same_step_and_the_next_goes_on(make, tmp_path):
    with pytest.raises(Stopped, match="stopped by its time budget.*saved at step"):
        make(Settings(budget_seconds=0.1), steps=50)
    work = next((tmp_path / "study" / "work" / "train").glob("x-*"))
    assert (work / "at-0").read_text() == (work / "at-1").read_text()
    assert len(list((work / "states").glob("0*"))) == 1


DRIVER = """
import sys
from pathlib import Path
from grafting.plan.jobs import Job
from grafting.provenance import runner
from grafting.provenance.saving import Settings, Stopped
from grafting.provenance.store import Store
job = Job("train", "x", {"processes": 2, "threads": 1, "seed": 5, "steps": 4000}, {}, "c")
try:
    runner.execute(job, Store(sys.argv[1]), runner.work_of("stage_of_two:run"), sys.stderr, Settings(signal="USR1"))
except Stopped as stop:
    print("stopped:", stop)
    sys.exit(75)
"""


def _driven(make, tmp_path: Path) -> tuple[subprocess.Popen, Path]:
    """A job of two processes in a process of its own, past its first step; and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "study")], stdout=subprocess.PIPE, text=True
    )
    work = tmp_path / "study" / "work" / "train"
    end = time.monotonic() + 120
    while not list(work.glob("x-*/at-1")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    return process, next(work.glob("x-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_the_job_reaches_its_processes(make, tmp_path, number):
    process, work = _driven(make, tmp_path)
    process.send_signal(number)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 75 and f"stopped: stopped by {number.name}" in said
    assert (work / "at-0").read_text() == (work / "at-1").read_text()


def test_processes_of_a_killed_job_end(make, tmp_path):
    process, work = _driven(make, tmp_path)
    pids = [json.loads(path.read_text())["pid"] for path in (work / "ranks").glob("rank-*.json")]
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert list((work / "states").glob("0*"))  # they saved


def test_call_for_several_nodes():
    call = launch.command("work/request.json", 8, 2, nodes=2)
    assert call[:2] == ["srun", "--overlap"] and "--cpus-per-task=8" in call and "--ntasks-per-node=1" in call
    assert call[call.index("--num_processes") + 1] == "8" and "work/request.json" in call
    place = call.index("-c") + 1
    echo = ["sh", "-c", call[place].replace("exec", "echo"), "R", "accelerate"]
    said = subprocess.run(echo, capture_output=True, text=True, check=True, env={
        **os.environ, "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"
    }).stdout  # fmt: skip
    assert said.split() == ["accelerate", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1",
                            "--module", "grafting.provenance.launch", "R"]  # fmt: skip
    with pytest.raises(UserError, match="3 processes do not spread evenly over the 2 nodes"):
        launch.command("r", 3, 1, nodes=2)


def test_environment_of_a_step_is_not_handed_on(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    found = launch.environment()
    assert "SLURM_NTASKS" not in found and found["SLURM_JOB_ID"] == "17"
