"""What can be known of a cluster without one: times, partitions, lines of the profile, accelerators, live view."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grafting.errors import UserError
from grafting.plan.jobs import Job
from grafting.plan.planfile import write_plan
from grafting.provenance import allocation, cluster, devices, live, runs
from grafting.provenance.progress import Progress
from grafting.provenance.store import RUN, Store
from grafting.provenance.submit import command

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "profiles" / "slurm" / "config.yaml"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("59", 59), ("1:05", 65), ("2:00:01", 7201), ("1-00:00:00", 86400), ("2-03", 183600), ("3-04:05", 273900),
     ("UNLIMITED", None), ("INVALID", None), ("", None), ("infinite", None)],
)  # fmt: skip
def test_times_of_slurm(text, seconds):
    assert allocation.seconds(text) == seconds


def test_partitions_are_as_large_as_their_largest_node():
    found = cluster.read_partitions("main*|1-00:00:00|2|23000\nmain*|1-00:00:00|64|256000\nopen|infinite|4|8000\n")
    assert found["main"] == cluster.Partition("main", 1440, 64, 256000, True)
    assert found["open"].minutes > 10**9 and not found["open"].default


def test_outside_slurm_nothing_is_known(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    assert allocation.slurm_id() is None and allocation.time_left() is None


def test_message_names_the_line_of_the_profile():
    lines = PROFILE.read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.strip().startswith("train:"))
    for key in ("mem_mb", "runtime"):
        assert cluster.line_of(PROFILE, key, "train").startswith(f"{PROFILE}, line {number} (`train:")
    # a rule that set-resources does not name takes the default
    default = next(n for n, line in enumerate(lines, 1) if line.strip().startswith("mem_mb:"))
    assert f", line {default} " in cluster.line_of(PROFILE, "mem_mb", "unheard")
    commented = cluster.line_of(PROFILE, "slurm_account", "train")
    assert "now a comment" in commented and "12345" in commented
    assert "no profile" in cluster.line_of(None, "runtime")
    assert "command line" in cluster.line_of(PROFILE, "reservation")


def test_profile_of_a_command_line(monkeypatch):
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    assert cluster.profile_path(["snakemake", "--profile", str(PROFILE.parent)]) == PROFILE
    assert cluster.profile_path([f"--profile={PROFILE}"]) == PROFILE
    assert cluster.profile_path(["snakemake"]) is None


def test_no_slurm_is_a_message_that_names_the_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"line 5 \(`executor: slurm`\): no SLURM here: the command sbatch"):
        cluster.partitions(PROFILE)


def test_words_of_slurm_lead_to_the_key():
    said = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    message = cluster._explain(said, "rule train", "train", PROFILE, "sbatch -A x")
    assert "slurm_account" in message and "Invalid account" in message and "sbatch -A x" in message


# ---- accelerators -----------------------------------------------------------------------------------
CLAIM = """
import sys, time
from pathlib import Path
from grafting.provenance import devices
print(devices.claim("train", Path(sys.argv[1])), flush=True)
time.sleep(60)
"""


def test_every_job_takes_an_accelerator_of_its_own_and_a_killed_one_gives_it_back(tmp_path, monkeypatch):
    monkeypatch.setenv(devices.VARIABLE, "2 train evaluate")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,9")

    def job():
        return subprocess.Popen([sys.executable, "-c", CLAIM, str(tmp_path)], stdout=subprocess.PIPE, text=True)

    first, second = job(), job()
    assert {first.stdout.readline().strip(), second.stdout.readline().strip()} == {"5", "7"}
    first.kill()
    first.wait()
    third = job()
    assert third.stdout.readline().strip() in {"5", "7"}
    for process in (second, third):
        process.kill()
        process.wait()
    assert devices.claim("select", tmp_path) is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,7,9"


def test_job_of_two_processes_takes_two_accelerators(tmp_path, monkeypatch):
    monkeypatch.setenv(devices.VARIABLE, "3 train")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,9")
    monkeypatch.setattr(devices, "_claims", [])
    with pytest.raises(UserError, match="4 need an accelerator each; this run has 3"):
        devices.claim("train", tmp_path, 4)
    assert devices.claim("train", tmp_path, 2) == "5,7" == os.environ["CUDA_VISIBLE_DEVICES"]
    for file in devices._claims:
        file.close()


# ---- sentinels that Snakemake removes with a bundle ---------------------------------------------------
def test_run_remembers_what_it_finished(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN, "r1")
    store = Store(tmp_path)
    jobs = [Job("train", name, {}, {}, "c").id for name in ("kept", "gone", "lost")]
    for job in jobs:
        folder = store.aside(job)
        (folder / "f").write_text("12345")
        store.write(job, {"id": job, "payload": store.publish(job, folder)})
        store.sentinel(job).unlink()
    (tmp_path / "store" / jobs[2] / "f").unlink()
    assert store.recall(jobs[0]) and store.read(jobs[0])["id"] == jobs[0]
    assert not store.recall(jobs[2])
    assert store.recall_all() == 1
    assert store.sentinel(jobs[1]).exists() and not store.sentinel(jobs[2]).exists()
    store.sentinel(jobs[1]).unlink()  # by a person, after the run
    assert not store.recall(jobs[1])
    monkeypatch.delenv(RUN)
    assert not store.recall(jobs[1]) and store.recall_all() == 0


# ---- the live view ----------------------------------------------------------------------------------
def test_live_view_of_a_run(tmp_path, monkeypatch):
    store = Store(tmp_path)
    way = Job("train", "way", {"n": 9}, {}, "c")
    jobs = [Job("train", name, {"n": n}, {}, "c") for n, name in enumerate(("done", "busy", "bad", "later"))]
    linked = Job("merge", "chosen", {}, {"selection": ["select/s-0123456789ab"]}, "c", alternatives={"w": way})
    plan = write_plan({job.id: job for job in (*jobs, linked)}, tmp_path / "work" / "plans")
    assert live.lines(live.look(tmp_path)) == ["no run was started in this folder yet"]
    runs.begin(tmp_path, str(plan.relative_to(tmp_path)), cluster=False)
    store.write(jobs[0].id, {"id": jobs[0].id})
    logs = tmp_path / "work" / "logs" / "train"
    logs.mkdir(parents=True)
    said = ["SLURM job 17 on c1"]
    progress = Progress(80, "sft", "step", lambda line: said.append(f"[train busy] {line}"), interval=0)
    progress.started -= 10
    progress.update(20, loss=0.5)
    (logs / f"{jobs[1].id.partition('/')[2]}.log").write_text("\n".join(said) + "\n")
    (logs / f"{jobs[2].id.partition('/')[2]}.log").write_text("one\nerror in train/bad: no room\n")
    with store.lock("train", jobs[1].key), store.lock("merge", way.key):
        view = live.look(tmp_path)
    assert view.stages == {"train": (1, 1, 4), "merge": (0, 1, 1)}
    busy = next(job for job in view.running if job.job == jobs[1].id)
    assert busy.slurm == "17" and busy.step == "sft 20/80 steps, 2/s, 30 s left"
    assert view.failed == {jobs[2].id: ["one", "error in train/bad: no room"]}
    text = "\n".join(live.lines(view))
    assert "1 of     5 done" in text and "SLURM 17" in text and "error in train/bad: no room" in text
    assert not live.look(tmp_path).running
    runs.end(tmp_path, succeeded=False)
    assert "not complete" in live.lines(live.look(tmp_path))[0]


def test_second_run_is_told_who_runs(tmp_path):
    assert runs.notice(tmp_path) is None
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "snakemake"])
    runs.begin(tmp_path, "plan", cluster=False)
    assert runs.notice(tmp_path) is None  # our own
    about = runs.read(tmp_path)
    runs.write_json(runs.record(tmp_path), {**about, "pid": process.pid})
    assert f"process {process.pid}" in runs.notice(tmp_path)
    process.kill()
    process.wait()
    assert runs.notice(tmp_path) is None
    runs.write_json(runs.record(tmp_path), {**about, "host": "elsewhere", "pid": 1})
    assert "elsewhere" in runs.notice(tmp_path) and "--unlock" in runs.notice(tmp_path)


# ---- submit -----------------------------------------------------------------------------------------
def test_submit_names_presets_and_profiles(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert command("smoke", "slurm", False, ["-k"]) == [
        "--profile", "profiles/slurm", "--configfile", "presets/smoke.yaml", "-k"
    ]  # fmt: skip
    with pytest.raises(UserError, match="presets/nope.yaml: no such preset; there are: .*smoke"):
        command("nope", "slurm", True, [])
    with pytest.raises(UserError, match="no such profile; there are: .*slurm"):
        command(None, "pbs", True, [])


def test_lock_of_a_file_is_seen(tmp_path):
    path = tmp_path / "lock"
    assert not live.held(path)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert live.held(path)
    assert not live.held(path)
