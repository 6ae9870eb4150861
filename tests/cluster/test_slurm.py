"""What a real SLURM does to a study: each behaviour is one test, with its figure printed (`pytest -s`)."""

from __future__ import annotations

import csv
import json
import os
import re
import time
from datetime import datetime
from pathlib import Path

import pytest
from workflow.conftest import BIN, copied

from .conftest import POLL, SHORT, Reference, Study, ask, long_study, study, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
NO_GROUPS = ("--group-components", "small=1")


def figure(text: str) -> None:
    print(f"\nfigure: {text}")


def results(folder: Study) -> list[dict]:
    """The table of results without what was measured of the machine."""
    measured = ("cpu_seconds", "wall_seconds", "peak_memory_bytes")
    with (folder.root / "results" / "evaluations.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key not in measured} for row in csv.DictReader(file)]


# ---- the whole study --------------------------------------------------------------------------------
def test_smoke_study_through_slurm_equals_the_local_one_byte_for_byte(cluster, local, remote):
    assert remote.contents() == local.contents()
    assert len(remote.payloads()) > 60
    assert (remote.root / "results/claims.json").read_bytes() == (local.root / "results/claims.json").read_bytes()
    assert results(remote) == results(local)
    assert cluster.empty()
    count = len(set(re.findall(r"SLURM jobid (\d+)", remote.log)))
    assert count >= 2
    jobs = len(remote.sidecars())
    ratio = remote.seconds / local.seconds
    figure(f"{jobs} jobs in {count} SLURM jobs: {remote.seconds:.0f} s, local {local.seconds:.0f} s, ratio {ratio:.2f}")


def test_changed_setting_sends_only_what_depends_on_it_and_no_torch_is_imported_to_plan(cluster, remote):
    before = set(remote.sidecars())
    remote.edit("config.yaml", "lrs: [2.0e-4]", "lrs: [1.0e-4]")  # opsd's
    started = time.monotonic()
    done = remote.slurm("--until", "train", PYTHONPROFILEIMPORTTIME="1")
    fresh = [name for name in remote.sidecars() if name not in before]
    # 2 tasks x 2 styles at once; what comes later in the sequence hangs on a selection
    assert len([name for name in fresh if name.startswith("train/") and ".opsd." in name]) >= 4
    assert not [name for name in fresh if name.startswith(("data/", "models/", "rollout/", "sensitivity/"))]
    modules = set(re.findall(r"^import time:.*\|\s+([\w.]+)$", done.stderr, flags=re.MULTILINE))
    assert "grafting.plan.study" in modules
    assert not {"torch", "transformers", "accelerate"} & modules
    figure(f"{len(fresh)} jobs in {time.monotonic() - started:.0f} s; {len(modules)} modules to plan and submit")


def test_training_in_two_processes_on_two_nodes_gives_what_two_on_one_machine_give(cluster, local, tmp_path):
    """accelerate launch on each node, started by srun, meeting where SLURM's variables say (gloo)."""
    alone, spread = (Study(copied(local, tmp_path / name).root) for name in ("alone", "spread"))
    for folder in (alone, spread):
        (folder.root / "two.yaml").write_text("training: {processes: 2}\n")
    open_jobs = alone.run("python", "-m", "grafting.cli", "plan", "--jobs", "--configfile", "presets/smoke.yaml",
                          "two.yaml").stdout  # fmt: skip
    job = re.search(r"^  open +(train/wug\.own\.sft\.deployed\.\S+)", open_jobs, flags=re.MULTILINE)[1]
    target, overlays = ("--", f"provenance/{job}.json"), ("--configfile", "presets/smoke.yaml", "two.yaml")
    alone.run("snakemake", "--cores", "2", *overlays, *target)
    nodes = ("nodes=2", "tasks=2", "cpus_per_task=1", "mpi=srun", "slurm_partition=pair")
    asked = ("--set-resources", *(f"train:{word}" for word in nodes))
    shown = spread.grafting("submit", "--dry-run", "--", *overlays, *asked, *target)
    (line,) = [line for line in shown.splitlines() if line.startswith("sbatch ")]
    assert "--nodes=2" in line and "--ntasks=2" in line and "--cpus-per-task=1" in line
    started = time.monotonic()
    done = spread.slurm("two.yaml", *asked, *NO_GROUPS, *POLL, *target)
    took = time.monotonic() - started
    assert len(set(re.findall(r"SLURM jobid (\d+)", done.stdout + done.stderr))) == 1
    log = (spread.root / "work" / "logs" / f"{job}.log").read_text()
    assert "process 0 of 2 on c1" in log and "process 1 of 2 on c2" in log, log
    local_log = (alone.root / "work" / "logs" / f"{job}.log").read_text()
    assert "process 1 of 2 on " in local_log
    one, two = (folder.sidecars()[f"{job}.json"] for folder in (alone, spread))
    assert one["payload"] == two["payload"] and one["spec"]["processes"] == 2
    counted = ("tokens_forwarded", "tokens_backpropagated", "flops")
    assert [one["cost"][name] for name in counted] == [two["cost"][name] for name in counted]
    # the same training in one process, made by the whole study
    (usual,) = [side for name, side in spread.sidecars().items()
                if name.startswith(job.rpartition("-")[0]) and "processes" not in side["spec"]]  # fmt: skip
    losses = [
        [json.loads(row)["loss"] for row in (spread.root / "store" / side["id"] / "training.jsonl").open()]
        for side in (usual, two)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert [usual["cost"][name] for name in counted] == [two["cost"][name] for name in counted]
    assert cluster.empty()
    figure(f"two processes on two nodes: {took:.0f} s; the bytes of two on one machine, the loss of one to 1e-5")


# ---- jobs that are interrupted ----------------------------------------------------------------------
class Long:
    """The long job on its way through SLURM, in the background."""

    def __init__(self, root: Path, reference: Reference, background: list, *arguments: str) -> None:
        self.folder, self.job = long_study(root, reference.steps)
        assert self.job == reference.job
        self.arguments, self.steps = arguments, reference.steps
        self.sentinel = self.folder.root / "provenance" / f"{self.job}.json"
        self.background = background
        self.start()

    def start(self) -> None:
        target = str(self.sentinel.relative_to(self.folder.root))
        self.process = self.folder.start("long.yaml", *NO_GROUPS, *POLL, *self.arguments, "--", target)
        self.background.append(self.process)

    def log(self) -> str:
        """What the job has said so far."""
        path = self.folder.root / "work" / "logs" / f"{self.job}.log"
        return path.read_text() if path.exists() else ""

    def saved(self) -> bool:
        return any((self.folder.root / "work" / self.job / "states").glob("0*"))

    def resumed(self) -> str:
        """What the last run of the job said of where it began."""
        found = re.search(r"going on after step \d+ of \d+", self.log())
        return found[0] if found else "from the beginning"

    def running(self, cluster, far, seconds: float = 300) -> str:
        """SLURM id, once the job is as far as `far()` says."""

        def there():
            assert self.process.poll() is None, self.folder.said
            ids = [job for job, state in cluster.queue() if state == "RUNNING"]
            return ids[0] if ids and far() else None

        return until(there, seconds, "the job runs")

    def finish(self, seconds: float = 900) -> dict:
        assert self.process.wait(seconds) == 0, self.folder.said
        return json.loads(self.sentinel.read_text())


@pytest.fixture
def long(cluster, reference, tmp_path, background):
    return lambda *arguments, seconds=SHORT: Long(tmp_path / "study", reference(seconds), background, *arguments)


def test_time_limit_saves_the_job_is_sent_again_and_ends_with_the_same_bytes(cluster, reference, long):
    # a limit of one minute: the profile's 90 s of warning would come before the first step
    warning = "slurm_extra=\"'--signal=URG@20'\""
    # more than a minute has room for, which an allocation ends 15 s before it is up
    run = long("--set-resources", "models:runtime=1", "models:mem_mb=2000", "--default-resources", warning,
               "--retries", "20", seconds=45)  # fmt: skip
    started = time.monotonic()
    side = run.finish(1500)
    assert side["payload"] == reference(45).payload
    ids = re.findall(r"SLURM jobid (\d+)", run.folder.said)
    assert len(ids) >= 2
    assert side["sessions"] >= 2
    figure(f"{len(ids)} allocations of one minute, {side['sessions']} sessions, {time.monotonic() - started:.0f} s")


def test_cancelled_job_is_sent_again(cluster, reference, long):
    run = long()
    number = run.running(cluster, run.saved)
    started = time.monotonic()
    ask("scancel", number)
    side = run.finish()
    assert side["payload"] == reference().payload
    ids = re.findall(r"SLURM jobid (\d+)", run.folder.said)
    assert len(ids) == 2 and ids[0] == number
    figure(f"{time.monotonic() - started:.0f} s from scancel to the end; {run.resumed()}")


def test_requeued_job_runs_again_under_its_number(cluster, reference, long):
    run = long()
    number = run.running(cluster, run.saved)
    started = time.monotonic()
    ask("scontrol", "requeue", number)
    side = run.finish()
    assert side["payload"] == reference().payload
    assert set(re.findall(r"SLURM jobid (\d+)", run.folder.said)) == {number}
    figure(f"{time.monotonic() - started:.0f} s from requeue to the end; {run.resumed()}")


def test_job_of_a_dead_node_goes_to_another(cluster, reference, long):
    run = long("--default-resources", "slurm_partition=pair")
    number = run.running(cluster, run.saved)
    assert ask("squeue", "--noheader", "--jobs", number, "--format", "%N").strip() == "c2"
    started = time.monotonic()
    cluster.script("kill-node", "c2")
    try:
        side = run.finish()
    finally:
        cluster.script("start-node", "c2")
        until(lambda: "c2" in ask("sinfo", "-h", "-N", "-p", "pair", "-t", "idle", "-o", "%N"), 60, "c2 is back")
    assert side["payload"] == reference().payload
    figure(f"{time.monotonic() - started:.0f} s from the node's death to the end; {run.resumed()}")


def test_killed_snakemake_leaves_work_that_the_next_one_takes(cluster, reference, long):
    run = long(seconds=24)
    number = run.running(cluster, run.saved)
    run.process.kill()
    run.process.wait()
    killed = time.monotonic()
    assert [number, "RUNNING"] in cluster.queue()
    run.folder.slurm("--unlock")
    restarted = datetime.now().timestamp()
    run.start()
    side = run.finish()
    assert f"left to finish: {number}" in run.folder.said
    assert side["payload"] == reference(24).payload
    # made by the job that was running, not by a second one
    assert datetime.fromisoformat(side["started"]).timestamp() < restarted
    done = run.folder.slurm("long.yaml", "--", str(run.sentinel.relative_to(run.folder.root)))
    assert "Nothing to be done" in done.stdout + done.stderr
    assert cluster.empty()
    figure(f"{time.monotonic() - killed:.0f} s from kill -9 to the end; the job ran once")


def test_second_run_in_one_folder_is_told_who_runs_and_watch_shows_how_far(cluster, reference, long):
    run = long(seconds=24)
    number = run.running(cluster, lambda: re.search(r"\d/\d+ steps", run.log()))
    started = time.monotonic()
    second = run.folder.slurm("long.yaml", "--", str(run.sentinel.relative_to(run.folder.root)), check=False)
    told = time.monotonic() - started
    said = second.stdout + second.stderr
    assert second.returncode != 0
    assert f"process {run.process.pid}" in said and "Directory cannot be locked" in said
    shown = run.folder.grafting("watch", "--once")
    assert f"models/{run.job.partition('/')[2]}: " in shown
    assert re.search(rf"\d+/{run.steps} steps, [\d.e+]+/s, .* left, SLURM {number}", shown), shown
    assert re.search(rf"{number} RUNNING", shown)
    run.finish()
    assert "complete" in run.folder.grafting("watch", "--once")
    assert cluster.empty()
    figure(f"the second was told after {told:.1f} s")


def test_failing_job_of_a_bundle_costs_its_bundle_nothing(cluster, tmp_path):
    """Snakemake removes the outputs of a whole bundle when one job fails; the finished ones must survive that."""
    folder = study(tmp_path / "study")
    jobs = folder.run("python", "-m", "grafting.cli", "plan", "--jobs", "--configfile", "presets/smoke.yaml").stdout
    data = [line.split()[1] for line in jobs.splitlines() if " data/" in line]
    pretrained = next(line.split()[1] for line in jobs.splitlines() if "models/pretrained" in line)
    # a folder that is no folder: this job of the bundle fails, the others do not
    (folder.root / "work" / "locks").mkdir(parents=True)
    (folder.root / "work" / "locks" / pretrained.replace("models/pretrained.m0", "models")).mkdir()
    targets = [f"provenance/{job}.json" for job in [*data, pretrained]]
    done = folder.slurm("--retries", "1", "--", *targets, check=False)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "finished jobs of failed bundles are kept" in said, said
    assert all((folder.root / "provenance" / f"{job}.json").exists() for job in data)
    assert not (folder.root / "provenance" / f"{pretrained}.json").exists()
    assert cluster.empty()
    shown = folder.grafting("watch", "--once")
    assert f"failed: {pretrained}" in shown and "not complete" in shown


def test_results_that_appear_late_on_this_machine_are_waited_for(cluster, tmp_path, background):
    """As on a shared file system: the job has ended, and its record is not to be seen here yet."""
    folder = study(tmp_path / "study")
    jobs = folder.run("python", "-m", "grafting.cli", "plan", "--jobs", "--configfile", "presets/smoke.yaml").stdout
    job = next(line.split()[1] for line in jobs.splitlines() if " data/" in line)
    sentinel, hidden = folder.root / "provenance" / f"{job}.json", tmp_path / "hidden.json"
    # the queue is asked so late that the job has ended by then
    process = folder.start("--slurm-init-seconds-before-status-checks", "20", "--", f"provenance/{job}.json")
    background.append(process)
    until(sentinel.exists, 120, "the job's record")
    until(cluster.empty, 60, "the job's end")
    sentinel.rename(hidden)
    until(lambda: "Waiting at most 60 seconds for missing files" in folder.said, 120, "Snakemake looks for it")
    started = time.monotonic()
    time.sleep(6)  # more than Snakemake's own five
    hidden.rename(sentinel)
    assert process.wait(60) == 0, folder.said
    assert "error" not in folder.said.lower()
    figure(f"a record that appeared {time.monotonic() - started:.0f} s late was waited for")


# ---- what SLURM would refuse ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def asked(cluster, tmp_path_factory) -> Study:
    return study(tmp_path_factory.mktemp("asked"))


PROFILE = "profiles/slurm/config.yaml"
REFUSED = {
    "partition": ('  # slurm_partition: "short"', '  slurm_partition: "nowhere"', "nowhere", "pair"),
    "account": ('  # slurm_account: "12345"', '  slurm_account: "refused"', "slurm_account", "Invalid account"),
    "memory": ("models:      {mem_mb: 2000 * attempt", "models:      {mem_mb: 9000000 * attempt", " MB", "main"),
    "limit": ('  # slurm_partition: "short"', '  slurm_partition: "brief"', "10 minutes", "brief"),
    "limit of a retry": (
        "runtime: 60 * attempt}\n  rollout",
        "runtime: 600 * attempt}\n  rollout",
        "attempt 4",
        "main",
    ),
    "option": ('  # qos: "normal"', '  constraint: "no-such-feature"', "constraint", "no-such-feature"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_slurm_would_refuse_is_refused_before_anything_is_sent(cluster, asked, fault):
    old, new, *words = REFUSED[fault]
    path = asked.root / PROFILE
    before = path.read_text()
    asked.edit(PROFILE, old, new)
    line = next(n for n, (a, b) in enumerate(zip(before.splitlines(), path.read_text().splitlines()), 1) if a != b)
    try:
        groups = NO_GROUPS if fault == "limit of a retry" else ()
        started = time.monotonic()
        done = asked.slurm(*groups, check=False, seconds=60)
    finally:
        path.write_text(before)
    said = done.stderr
    assert done.returncode == 2, said
    message = said[said.index("error: ") :]
    if fault == "limit":
        # the partition is as it is; the times of the rules are too long for it
        assert f"{PROFILE}, line " in message and "runtime" in message
    else:
        assert f"{PROFILE}, line {line} " in message, message
    assert all(word in message for word in words), message
    assert "Traceback" not in said
    assert cluster.empty() and not list((asked.root / "provenance").rglob("*.json"))
    figure(f"{fault}: refused after {time.monotonic() - started:.1f} s: {message.splitlines()[0]}")


def test_no_slurm_is_said(cluster, asked, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    slurm = {"sbatch", "squeue", "scancel", "sinfo", "scontrol", "sacct", "sacctmgr", "sshare", "srun", "salloc"}
    for folder in ("/bin", "/usr/bin"):
        for tool in os.listdir(folder):
            if tool not in slurm and not (tools / tool).exists():
                (tools / tool).symlink_to(f"{folder}/{tool}")
    done = asked.run("snakemake", "--profile", "profiles/slurm", "--configfile", "presets/smoke.yaml", check=False,
                     PATH=f"{BIN}:{tools}")  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"{PROFILE}, line " in done.stderr and "no SLURM here" in done.stderr and "Traceback" not in done.stderr


def test_submit_shows_what_would_be_sent(cluster, asked):
    shown = asked.grafting("submit", "--preset", "smoke", "--dry-run")
    calls = [line for line in shown.splitlines() if line.startswith("sbatch ")]
    assert calls and all("--mem " in call and " -t " in call and "--signal=URG@90" in call for call in calls)
    jobs = [line for line in shown.splitlines() if line.startswith("    # ")]
    assert f"{len(calls)} scheduler jobs for {len(jobs)} jobs" in shown
    assert cluster.empty()
