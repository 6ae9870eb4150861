"""The loop under `accelerate launch`: two CPU processes give what one gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_objectives import OPSD, SFT
from test_training import Job, data, prior, start, tokenizer  # noqa: F401  (fixtures)

from grafting.rollouts import stage as rollout_stage

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
SHORT = {"steps": 3, "lr": 1e-3, "batch_size": 6, "style": "expert"}


def launch(processes: int, spec: dict, folders: list, out: Path, *options: str) -> dict:
    # with --cpu it would start one process, whatever --num_processes says
    several = ([] if options else ["--multi_gpu"]) if processes > 1 else ["--cpu"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *several, "--num_machines", "1",
               "--num_processes", str(processes), "--mixed_precision", "no", "--dynamo_backend", "no",
               "--main_process_port", "0", *options, str(HERE / "two_processes.py"),
               json.dumps(spec), *map(str, folders), str(out)]  # fmt: skip
    paths = os.pathsep.join([str(PROJECT / "src"), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def rollouts(start, data, tmp_path_factory):
    """Recorded rollouts of the start."""
    spec = {"split": "train", "with_demonstration": False, "style": "own", "items": None, "temperature": 1.0,
            "max_new_tokens": 6, "seed": 0, "batch_size": 8, "threads": 1, "samples": 2, "first_sample": 0}  # fmt: skip
    job = Job(tmp_path_factory.mktemp("rollouts") / "out", spec, model=[start], data=[data])
    rollout_stage.run(job)
    return job.out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "opsd"])
def test_two_processes_give_the_loss_curve_of_one(name, start, data, prior, rollouts, tmp_path):
    spec = (SFT if name == "sft" else OPSD) | SHORT
    folders = [start, data, prior, rollouts if name == "opsd" else ""]
    one, two = (launch(n, spec, folders, tmp_path / f"{n}.json") for n in (1, 2))
    assert (one["processes"], two["processes"]) == (1, 2)
    for alone, together in zip(one["losses"], two["losses"], strict=True):
        # a divergence of 4e-4 is a difference of logarithms of size 1, known in float32 to some 1e-8
        assert together == pytest.approx(alone, rel=1e-5, abs=5e-8)
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-5)
    guard = {"tokens_generated"}  # every process has one
    assert {k: v for k, v in two["cost"].items() if k not in guard} == {
        k: v for k, v in one["cost"].items() if k not in guard
    }


@pytest.mark.slow
def test_sharded_training_gives_the_loss_curve_of_one(start, data, prior, tmp_path):
    """FSDP with the config for large models, on two CPU processes."""
    spec, folders = SFT | SHORT, [start, data, prior, ""]
    one = launch(1, spec, folders, tmp_path / "1.json")
    sharded = launch(2, spec, folders, tmp_path / "2.json", "--config_file", str(PROJECT / "profiles" / "fsdp.yaml"))
    assert (one["processes"], sharded["processes"]) == (1, 2) and sharded["sharded"] and not one["sharded"]
    for alone, together in zip(one["losses"], sharded["losses"], strict=True):
        assert together == pytest.approx(alone, rel=1e-5)
    assert sharded["weights"] == pytest.approx(one["weights"], rel=1e-5)
