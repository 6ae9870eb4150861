"""Killed at any moment, a real run goes on and ends in the bytes of an undisturbed one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from grafting.config import resolve
from grafting.config.load import read_yaml
from grafting.plan.study import Study
from grafting.provenance.store import describe

from .conftest import BIN, PROJECT, Folder, new_folder

#: Training long enough for kills to hit it, saved often enough for a second run to go on from there.
LONG = {
    "saving": {"seconds": 0.2, "share": 1.0},
    "lineage": {"pretrain": {"steps": 800}, "posttrain": {"steps": 200}},
    "training": {"steps": 250},
    "learners": {"opsd": {"teacher": "ema", "steps": 150, "guard": {"every": 50}}},
}
PRESETS = ("presets/smoke.yaml", "long.yaml")
KILLS = 20


def targets() -> dict[str, str]:
    """Short name -> id of the jobs that are run here: training of every kind, rollouts, an evaluation."""
    config = resolve(read_yaml(PROJECT / "config.yaml"), read_yaml(PROJECT / PRESETS[0]), LONG)
    wanted = {
        "pretrained": "models/pretrained.m0-",
        "deployed": "models/deployed.m0-",
        "sft": "train/wug.own.sft.deployed.",
        "opsd": "train/wug.own.opsd.deployed.",
        "rollout": "rollout/wug.shown-own.m0-",
        "evaluation": "evaluate/val.reference.m0-",
    }
    ids = list(Study(config).jobs)
    return {name: next(i for i in ids if i.startswith(start)) for name, start in wanted.items()}


TARGETS = targets()


def long_folder(root: Path) -> Folder:
    folder = new_folder(root)
    (root / "long.yaml").write_text(yaml.safe_dump(LONG))
    return folder


def command(*names: str) -> list[str]:
    sentinels = [f"provenance/{TARGETS[name]}.json" for name in names or TARGETS]
    # a killed job is simply started again, as a cluster does
    return ["snakemake", "--configfile", *PRESETS, "--cores", "2", "--retries", "1000", "--", *sentinels]


def start(folder: Folder, *names: str, retries: int = 1000) -> subprocess.Popen:
    """Snakemake in a process group of its own, its output in a file."""
    words = [str(retries) if word == "1000" else word for word in command(*names)]
    environment = {**os.environ, "PYTHONPATH": str(folder.root / "src"), "PATH": f"{BIN}:{os.environ['PATH']}"}
    with (folder.root / "output.txt").open("ab") as output:
        return subprocess.Popen(words, cwd=folder.root, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip


def output(folder: Folder) -> str:
    return (folder.root / "output.txt").read_text(errors="replace")


def payloads(folder: Folder) -> dict[str, dict]:
    """Hashes of what really lies in the store."""
    return {name: describe(folder.root / "store" / job_id) for name, job_id in TARGETS.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Folder:
    folder = long_folder(tmp_path_factory.mktemp("undisturbed"))
    folder.run(*command())
    return folder


def processes(folder: Folder, snakemake: int) -> dict[str, list[int]]:
    """The processes at work in this study folder, by what they are. A job is a child of the warm process, or of one
    that was killed; its client waits for it."""
    found = {"job": [], "client": [], "warm": [], "snakemake": [snakemake]}
    for path in Path("/proc").iterdir():
        try:
            if not path.name.isdigit() or Path(os.readlink(path / "cwd")) != folder.root:
                continue
            words = (path / "cmdline").read_bytes().decode().split("\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # gone meanwhile
        if "grafting.provenance.warm" in words:
            found["warm" if parent == snakemake else "job"].append(int(path.name))
        elif "--plan" in words:
            found["client"].append(int(path.name))
    if not found["warm"]:
        found["job"] += found["client"]  # without a warm process a client does the job itself
    return found


def wait(condition, seconds: float = 120):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def sessions(folder: Folder, name: str) -> int:
    return folder.sidecars()[f"{TARGETS[name]}.json"]["sessions"]


def test_a_stopped_trainer_leaves_with_75_and_goes_on(undisturbed, tmp_path):
    """First SIGTERM to the training job, then Ctrl-C on the whole run, then undisturbed to the end."""
    shutil.copytree(undisturbed.root, tmp_path / "study", symlinks=True)
    folder = Folder(tmp_path / "study")
    (folder.root / "provenance" / f"{TARGETS['opsd']}.json").unlink()
    shutil.rmtree(folder.root / "store" / TARGETS["opsd"])
    states = folder.root / "work" / TARGETS["opsd"] / "states"
    run = start(folder, "opsd", retries=0)
    wait(lambda: states.is_dir() and any(path.name.isdigit() for path in states.iterdir()))
    (trainer,) = processes(folder, run.pid)["client"]
    os.kill(trainer, signal.SIGTERM)
    assert run.wait(timeout=120) == 1
    assert "stopped by SIGTERM, saved at step" in output(folder) and "Traceback" not in output(folder)
    kept = sorted(path.name for path in states.iterdir())

    run = start(folder, "opsd", retries=0)
    wait(lambda: "going on after step" in output(folder) and sorted(path.name for path in states.iterdir()) > kept)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(timeout=120) == 1
    assert "stopped by SIGINT, saved at step" in output(folder)

    folder.run(*command("opsd"))
    assert sessions(folder, "opsd") == 3
    assert payloads(folder)["opsd"] == payloads(undisturbed)["opsd"]
    mine, theirs = (f.sidecars()[f"{TARGETS['opsd']}.json"] for f in (folder, undisturbed))
    assert mine["metrics"] == theirs["metrics"]
    assert {k: v for k, v in mine["cost"].items() if k.startswith(("tokens", "flops"))} == {
        k: v for k, v in theirs["cost"].items() if k.startswith(("tokens", "flops"))
    }


def kill_at_random(folder: Folder, rng: random.Random, most: int, end: float) -> list[str]:
    """-9 to up to `most` processes of a study; whom it hit. Less where the study was finished before: how far it gets
    between two kills hangs on the machine."""
    run, killed = None, []
    while len(killed) < most:
        assert time.monotonic() < end, f"only {killed} until now\n{output(folder)[-3000:]}"
        if run is None:
            folder.run("snakemake", "--unlock", "--configfile", *PRESETS)
            run = start(folder)
        time.sleep(rng.uniform(0.2, 1.2))
        kind = rng.choices(["job", "client", "warm", "snakemake"], [13, 3, 1, 3])[0]
        alive = processes(folder, run.pid)
        if run.poll() is not None:
            assert run.returncode == 0, f"ended with {run.returncode} after {killed}\n{output(folder)[-3000:]}"
            return killed
        if not alive["job"] or not alive[kind]:
            continue  # still starting
        with suppress(ProcessLookupError):
            os.kill(rng.choice(sorted(alive[kind])), signal.SIGKILL)
            killed.append(kind)
        if kind == "snakemake":
            run.wait()
            run = None
            # the killed run could put nothing under DVC; what it had finished is whole and can be added
            recorded = set(folder.payloads())
            folder.grafting("add", preset=False)
            listed = {f"{stage}/{name}.json" for stage, names in folder.lists().items() for name in names}
            assert recorded <= listed <= set(folder.payloads())
    if run is not None:
        run.wait(timeout=600)
    return killed


def test_kills_at_random_moments_change_no_byte(undisturbed, tmp_path):
    """-9 to the trainer, its client, the warm process and Snakemake itself, while something is trained."""
    seed = int(os.environ.get("GRAFTING_KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"GRAFTING_KILL_SEED={seed}")
    rng, killed, end = random.Random(seed), [], time.monotonic() + 1200
    while len(killed) < KILLS:
        folder = long_folder(tmp_path / f"study{len(killed)}")
        for place in ("provenance", "store"):  # data are there, so that all kills hit what takes long
            shutil.copytree(undisturbed.root / place / "data", folder.root / place / "data")
        hit = kill_at_random(folder, rng, KILLS - len(killed), end)
        assert hit, "a whole study ended before any kill: make the jobs longer"
        killed += hit
        folder.run("snakemake", "--unlock", "--configfile", *PRESETS)
        folder.run(*command())
        print("killed:", {kind: hit.count(kind) for kind in sorted(set(hit))},
              "sessions:", {name: sessions(folder, name) for name in TARGETS})  # fmt: skip
        assert payloads(folder) == payloads(undisturbed)
        if len(hit) == KILLS:
            assert sum(sessions(folder, name) for name in TARGETS) > len(TARGETS)  # some went on from a saved state
        assert not [path for job_id in TARGETS.values() if (path := folder.root / "work" / job_id).exists()]
        wait(lambda root=folder: not sum((p for k, p in processes(root, 0).items() if k != "snakemake"), []))
