"""What a real SLURM does to a study: each behaviour is one test, with its figure printed (`pytest -s`)."""

from __future__ import annotations

import json
import os
import re
import time
from datetime import datetime
from pathlib import Path

import pytest
from workflow.conftest import BIN

from .conftest import Study, ask, long_study, study, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
STEPS = 2500  # of pretraining: more than the ten seconds after which a job first says how far it is
NO_GROUPS = ("--group-components", "small=1")


def figure(text: str) -> None:
    print(f"\nfigure: {text}")


# ---- the whole study --------------------------------------------------------------------------------
def test_smoke_study_through_slurm_equals_the_local_one_byte_for_byte(cluster, local, remote):
    assert remote.contents() == local.contents()
    assert len(remote.payloads()) > 60
    for name in ("evaluations.csv", "claims.json"):
        assert (remote.root / "results" / name).read_bytes() == (local.root / "results" / name).read_bytes()
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


# ---- jobs that are interrupted ----------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The long job without any interruption, on this machine: id and payload."""
    folder, job = long_study(tmp_path_factory.mktemp("whole"), STEPS)
    started = time.monotonic()
    folder.snakemake("--cores", "1", f"provenance/{job}.json", "--configfile", "presets/smoke.yaml", "long.yaml")
    side = folder.sidecars()[f"{job}.json"]
    figure(f"the long job takes {side['cost']['wall_seconds']:.0f} s ({time.monotonic() - started:.0f} s with all)")
    return job, side["payload"]


class Long:
    """The long job on its way through SLURM, in the background."""

    def __init__(self, root: Path, job: str, background: list, *arguments: str) -> None:
        self.folder, planned = long_study(root, STEPS)
        assert planned == job
        self.job, self.arguments = job, arguments
        self.sentinel = self.folder.root / "provenance" / f"{job}.json"
        self.background = background
        self.start()

    def start(self) -> None:
        self.process = self.folder.start(
            "long.yaml", *NO_GROUPS, *self.arguments, "--", str(self.sentinel.relative_to(self.folder.root))
        )
        self.background.append(self.process)

    @property
    def log(self) -> Path:
        return self.folder.root / "work" / "logs" / f"{self.job}.log"

    def running(self, cluster, seconds: float = 300) -> str:
        """SLURM id, once the job is past its imports and trains."""

        def trains():
            assert self.process.poll() is None, self.folder.said
            ids = [job for job, state in cluster.queue() if state == "RUNNING"]
            return ids[0] if ids and self.log.exists() and "steps" in self.log.read_text() else None

        return until(trains, seconds, "the job runs")

    def finish(self, seconds: float = 600) -> dict:
        assert self.process.wait(seconds) == 0, self.folder.said
        return json.loads(self.sentinel.read_text())


@pytest.fixture
def long(cluster, whole, tmp_path, background):
    return lambda *arguments: Long(tmp_path / "study", whole[0], background, *arguments)


def test_time_limit_saves_the_job_is_sent_again_and_ends_with_the_same_bytes(cluster, whole, long):
    # a limit of one minute: the profile's 90 s of warning would come before the first step
    warning = "slurm_extra=\"'--signal=URG@20'\""
    run = long("--set-resources", "models:runtime=1", "models:mem_mb=2000", "--default-resources", warning,
               "--retries", "20")  # fmt: skip
    started = time.monotonic()
    side = run.finish(900)
    assert side["payload"] == whole[1]
    ids = re.findall(r"SLURM jobid (\d+)", run.folder.said)
    assert len(ids) >= 2
    assert side["sessions"] >= 2
    figure(f"{len(ids)} allocations of one minute, {side['sessions']} sessions, {time.monotonic() - started:.0f} s")


def test_cancelled_job_is_sent_again(cluster, whole, long):
    run = long()
    number = run.running(cluster)
    started = time.monotonic()
    ask("scancel", number)
    side = run.finish()
    assert side["payload"] == whole[1]
    ids = re.findall(r"SLURM jobid (\d+)", run.folder.said)
    assert len(ids) == 2 and ids[0] == number
    figure(f"{time.monotonic() - started:.0f} s from scancel to the end, {side.get('sessions')} sessions")


def test_requeued_job_runs_again_under_its_number(cluster, whole, long):
    run = long()
    number = run.running(cluster)
    started = time.monotonic()
    ask("scontrol", "requeue", number)
    side = run.finish()
    assert side["payload"] == whole[1]
    assert set(re.findall(r"SLURM jobid (\d+)", run.folder.said)) == {number}
    figure(f"{time.monotonic() - started:.0f} s from requeue to the end, {side.get('sessions')} sessions")


def test_job_of_a_dead_node_goes_to_another(cluster, whole, long):
    run = long("--default-resources", "slurm_partition=pair")
    number = run.running(cluster)
    assert ask("squeue", "--noheader", "--jobs", number, "--format", "%N").strip() == "c2"
    started = time.monotonic()
    cluster.script("kill-node", "c2")
    try:
        side = run.finish()
    finally:
        cluster.script("start-node", "c2")
        until(lambda: "c2" in ask("sinfo", "-h", "-N", "-p", "pair", "-t", "idle", "-o", "%N"), 60, "c2 is back")
    assert side["payload"] == whole[1]
    figure(f"{time.monotonic() - started:.0f} s from the node's death to the end, {side.get('sessions')} sessions")


def test_killed_snakemake_leaves_work_that_the_next_one_takes(cluster, whole, long):
    run = long()
    number = run.running(cluster)
    run.process.kill()
    run.process.wait()
    killed = time.monotonic()
    assert [number, "RUNNING"] in cluster.queue()
    run.folder.slurm("--unlock")
    restarted = datetime.now().timestamp()
    run.start()
    side = run.finish()
    assert f"left to finish: {number}" in run.folder.said
    assert side["payload"] == whole[1]
    # made by the job that was running, not by a second one
    assert datetime.fromisoformat(side["started"]).timestamp() < restarted
    done = run.folder.slurm("long.yaml", "--", str(run.sentinel.relative_to(run.folder.root)))
    assert "Nothing to be done" in done.stdout + done.stderr
    assert cluster.empty()
    figure(f"{time.monotonic() - killed:.0f} s from kill -9 to the end; the job ran once")


def test_second_run_in_one_folder_is_told_who_runs_and_watch_shows_how_far(cluster, whole, long):
    run = long()
    number = run.running(cluster)
    started = time.monotonic()
    second = run.folder.slurm("long.yaml", "--", str(run.sentinel.relative_to(run.folder.root)), check=False)
    told = time.monotonic() - started
    said = second.stdout + second.stderr
    assert second.returncode != 0
    assert f"process {run.process.pid}" in said and "Directory cannot be locked" in said
    shown = run.folder.grafting("watch", "--once")
    assert f"models/{run.job.partition('/')[2]}: " in shown
    assert re.search(rf"\d+/{STEPS} steps, [\d.e+]+/s, .* left, SLURM {number}", shown), shown
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
