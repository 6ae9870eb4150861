"""Interrupted after every step, a job makes the same bytes, numbers and costs as an undisturbed one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from grafting.evaluation import stage as evaluation
from grafting.models import save_model
from grafting.models.scratch import new_model, new_tokenizer
from grafting.plan.jobs import Job
from grafting.provenance import runner
from grafting.provenance.files import write_json
from grafting.provenance.saving import Settings, Stopped
from grafting.provenance.store import Store
from grafting.rollouts import stage as rollouts
from grafting.tasks.tiny import build_prior, build_task
from grafting.tasks.tiny_language import VOCABULARY
from grafting.training import lineage
from grafting.training import stage as training
from grafting.training.objectives import OBJECTIVES, supervised

ARCHITECTURE = {"layers": 1, "width": 16, "feed_forward": 16, "heads": 2, "context": 64, "embedding_std": 0.06}
SFT = {
    "objective": "sft",
    "style": "own",
    "lr": 1e-2,
    "steps": 5,
    "batch_size": 5,
    "micro_batch_size": 2,
    "warmup_steps": 2,
    "schedule": "cosine",
    "final_lr_ratio": 0.05,
    "weight_decay": 0.1,
    "betas": [0.9, 0.98],
    "clip_norm": 1.0,
    "precision": "float32",
    "threads": 1,
    "seed": 0,
}
OPSD = SFT | {
    "objective": "opsd",
    "opsd": {
        "divergence": "forward_kl",
        "teacher": "frozen",
        "ema_rate": 0.1,
        "temperature": 1.0,
        "max_new_tokens": 6,
        "skip_tokens": 0,
        "guard": {"threshold": 0.5, "action": "warn", "every": 2},
    },
}
PRETRAIN = {
    "phase": "pretrain",
    "architecture": ARCHITECTURE,
    "steps": 6,
    "batch_size": 4,
    "lr": 1e-2,
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "demonstration_share": 0.3,
    "skill_weights": {"rev": 1.5},
    "checkpoints": 3,
    "precision": "float32",
    "threads": 1,
    "seed": 0,
}
POSTTRAIN = {key: value for key, value in PRETRAIN.items() if key not in ("architecture", "checkpoints")} | {
    "phase": "posttrain",
    "steps": 3,
    "gate": {"prior": 0.0, "demonstrated": 0.0, "new": 1.0, "extra_steps": 2, "attempts": 2},
}
INPUTS = {"model": ["models/start-000000000001"], "data": ["data/zup-000000000002"]}


def opsd(**changes):
    return OPSD | {"opsd": OPSD["opsd"] | changes}


@pytest.fixture(autouse=True)
def own_signals():
    """A job that was stopped stays deaf to signals; the tests' process must not."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps one precision per process; here it changes between tests."""
    torch.set_num_threads(1)
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A store with what jobs start from."""
    root = tmp_path_factory.mktemp("inputs")
    store, tokenizer = Store(root), new_tokenizer(VOCABULARY, "deployed")
    for seed, name in enumerate(("start-000000000001", "other-000000000003")):
        save_model(new_model(ARCHITECTURE, VOCABULARY, seed), tokenizer, root / "store" / "models" / name)
    sizes = {"train_items": 12, "val_items": 6, "test_items": 6, "seed": 1}
    for path in ("data/zup-000000000002", "data/prior-000000000004"):
        (root / "store" / path).mkdir(parents=True)
    build_task({"builder": "tiny.task", "task": "zup", **sizes}, root / "store" / "data/zup-000000000002")
    sizes = {"val_items": 2, "test_items": 2, "retention_items": 2, "seed": 1}
    build_prior({"builder": "tiny.prior", **sizes}, root / "store" / "data/prior-000000000004")
    for path in (root / "store").glob("*/*"):
        write_json(store.sentinel(f"{path.parent.name}/{path.name}"), {})
    return root


class Study:
    """A store with the inputs, in which a job is run, undisturbed or not."""

    def __init__(self, inputs, root, job, function):
        shutil.copytree(inputs, root)
        self.store, self.job, self.function = Store(root), job, function

    def run(self, **settings):
        AcceleratorState._reset_state(True)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(123)  # a new process starts anywhere
        runner.execute(self.job, self.store, self.function, sys.stderr, Settings(**settings))

    def sessions(self, **settings):
        """Run with a budget that is always exhausted, until it is done; returns the number of runs."""
        for number in range(1, 100):
            try:
                self.run(budget_seconds=0, **settings)
            except Stopped as stop:
                assert "run again to go on" in str(stop)
                assert not self.store.sentinel(self.job.id).exists()
            else:
                return number
        raise AssertionError("never done")

    def result(self):
        side = self.store.read(self.job.id)
        kept = {name: side["cost"][name] for name in side["cost"] if name.startswith(("tokens", "flops"))}
        return side["payload"], side["metrics"], kept


@pytest.fixture
def twice(inputs, tmp_path):
    """(stage, function, spec, inputs) -> an undisturbed study that is done, and one that is still to be run."""

    def make(name, function, spec, roles):
        job = Job(name, "x", spec, roles, "code")
        whole, other = (Study(inputs, tmp_path / folder, job, function) for folder in ("whole", "interrupted"))
        whole.run()
        return whole, other

    return make


TRAINED = {
    "sft": SFT,
    "sft in bfloat16": SFT | {"precision": "bfloat16", "micro_batch_size": None},
    "opsd, frozen teacher": opsd(),
    "opsd, frozen teacher of its own": opsd(),
    "opsd, ema teacher": opsd(teacher="ema"),
    "opsd, live teacher": opsd(teacher="live"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_training_interrupted_after_every_step_gives_the_same_bytes(twice, name):
    spec = TRAINED[name]
    teacher = "models/other-000000000003" if "of its own" in name else INPUTS["model"][0]
    roles = INPUTS | ({"teacher": [teacher]} if "opsd" in name else {})
    whole, other = twice("train", training.run, spec, roles)
    assert other.sessions() == spec["steps"] + 1
    assert other.result() == whole.result()
    assert "training.jsonl" in whole.result()[0] and whole.result()[2]["flops"] > 0
    assert other.store.read(other.job.id)["sessions"] == spec["steps"] + 1
    assert not other.store.work(other.job.id).exists()


def test_saving_without_interruption_changes_no_byte(twice):
    whole, other = twice("train", training.run, opsd(teacher="ema"), INPUTS | {"teacher": INPUTS["model"]})
    other.run(steps=1)
    assert other.result() == whole.result()


@pytest.mark.parametrize("damaged", [1, 2])
def test_training_goes_on_from_the_state_before_a_damaged_one_or_from_the_beginning(twice, capfd, damaged):
    whole, other = twice("train", training.run, opsd(teacher="ema"), INPUTS | {"teacher": INPUTS["model"]})
    for _ in range(3):
        with pytest.raises(Stopped):
            other.run(budget_seconds=0)
    states = sorted((other.store.work(other.job.id) / "states").iterdir())
    assert len(states) == 2
    for state in states[-damaged:]:
        file = state / "tensors.safetensors"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(bytes(content))
    capfd.readouterr()
    other.run()
    text = capfd.readouterr().err
    assert ("going on after step 2 of 5" if damaged == 1 else "starting from the beginning") in text
    assert other.result() == whole.result()


def test_a_run_that_dies_between_two_saves_loses_only_the_steps_after_the_last(twice, monkeypatch, capfd):
    whole, other = twice("train", training.run, SFT | {"steps": 7}, INPUTS)
    step = supervised.CrossEntropy.after_step
    calls = []

    def dies(self, model):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt  # in the middle of a step
        step(self, model)

    monkeypatch.setattr(supervised.CrossEntropy, "after_step", dies)
    with pytest.raises(KeyboardInterrupt):
        other.run(steps=3)
    monkeypatch.undo()
    other.run()
    assert "going on after step 3 of 7" in capfd.readouterr().err
    assert other.result() == whole.result()


def test_every_objective_can_be_saved():
    """A new one must say what it holds: `state` and `restore` (see the objectives' docstring)."""
    from importlib import import_module

    for place in OBJECTIVES.values():
        module, _, name = place.partition(":")
        objective = getattr(import_module(f"grafting.training.objectives.{module}"), name)
        assert callable(objective.state) and callable(objective.restore), name


def test_the_guard_goes_on_with_what_it_found(inputs, tmp_path):
    """Its warning is given once, over all sessions."""
    spec = opsd(teacher="ema", guard={"threshold": 0.5, "action": "warn", "every": 1})
    study = Study(inputs, tmp_path / "s", Job("train", "x", spec, INPUTS | {"teacher": INPUTS["model"]}, "c"), None)
    warned = []

    def watched(job):
        say = job.say
        job.say = lambda line: (warned.append(line) if "warning" in line else None, say(line))
        training.run(job)

    study.function = watched
    study.sessions()
    assert len(warned) == 1


# ---- the lineage ------------------------------------------------------------------------------------
def test_pretraining_keeps_its_checkpoints_over_interruptions(twice):
    whole, other = twice("models", lineage.run, PRETRAIN, {})
    assert other.sessions() == PRETRAIN["steps"] + 1
    assert other.result() == whole.result()
    names = {name.split("/")[1] for name in whole.result()[0] if name.startswith("checkpoints/")}
    assert names == {"p33", "p67", "p100"}
    assert not [name for name in whole.result()[0] if "manifest" in name]


def test_a_damaged_kept_checkpoint_starts_pretraining_again(twice, capfd):
    whole, other = twice("models", lineage.run, PRETRAIN, {})
    for _ in range(4):
        with pytest.raises(Stopped):
            other.run(budget_seconds=0)
    shutil.rmtree(other.store.work(other.job.id) / "checkpoints" / "p33")
    other.run()
    assert "starting from the beginning" in capfd.readouterr().err
    assert other.result() == whole.result()


def test_post_training_goes_on_over_the_cycles_of_its_gate(twice, monkeypatch):
    """The gate refuses twice; the model of the third cycle and all that was measured are the same."""
    measure = lineage.measure_gate

    def strict(job, model, tokenizer):
        measured = job.saving._before["measured"]
        return measure(job, model, tokenizer) | {"passed": len(measured) == 2}

    monkeypatch.setattr(lineage, "measure_gate", strict)
    roles = {"model": INPUTS["model"], "prior": ["data/prior-000000000004"], "tasks": INPUTS["data"]}
    whole, other = twice("models", lineage.run, POSTTRAIN, roles)
    assert other.sessions() == 3 + 2 + 2 + 1
    assert other.result() == whole.result()
    gate = json.loads((other.store.payload(other.job.id) / "gate.json").read_text())
    assert [found["passed"] for found in gate["measured"]] == [False, False, True]
    assert [found["steps"] for found in gate["measured"]] == [3, 5, 7]


# ---- answers ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend, items, pieces", [("native", 12, 3), ("continuous", 4, 4)])
def test_rollouts_interrupted_after_every_piece_give_the_same_bytes(twice, backend, items, pieces):
    """The native backend keeps batches (of 5), the continuous one every single response."""
    spec = {
        "split": "train",
        "with_demonstration": True,
        "style": "own",
        "items": items,
        "temperature": 1.0,
        "max_new_tokens": 6,
        "seed": 0,
        "batch_size": 5,
        "threads": 1,
        "backend": backend,
    }
    whole, other = twice("rollout", rollouts.run, spec, INPUTS)
    assert other.sessions() == pieces + 1
    assert other.result() == whole.result()
    assert whole.result()[2]["tokens_generated"] > 0


def write_options(folder):
    """A suite of option letters beside the generated ones."""
    shutil.copytree(folder.parent / "zup-000000000002", folder)
    info = json.loads((folder / "info.json").read_text())
    write_json(folder / "info.json", info | {"name": "letters", "scorer": "options", "role": "prior"})
    lines = [json.loads(line) for line in (folder / "val.jsonl").read_text().splitlines()]
    lines = [line | {"options": ["x", "y"], "answer": "A", "task": "letters"} for line in lines]
    (folder / "val.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_evaluation_interrupted_after_every_batch_gives_the_same_bytes(inputs, twice, capfd):
    letters = inputs / "store" / "data" / "letters-000000000005"
    if not letters.exists():
        write_options(letters)
        write_json(Store(inputs).sentinel("data/letters-000000000005"), {})
    recipe = {"operator": "graft", "terms": [0]}
    points = [
        {"name": f"l{scale}", "key": f"key{scale}", "labels": {"seed": 0}, "recipe": recipe | {"scale": scale}}
        for scale in (0.5, 1.0)
    ] + [{"name": "deployed", "key": "none", "labels": {}, "recipe": None}]
    spec = {"split": "val", "points": points, "batch_size": 4, "max_new_tokens": 4, "threads": 1}
    roles = {
        "model": INPUTS["model"],
        "trained": ["models/other-000000000003"],
        "donor": INPUTS["model"],
        "prior": ["data/letters-000000000005"],
        "tasks": INPUTS["data"],
    }
    whole, other = twice("evaluate", evaluation.run, spec, roles)
    # per point: 6 examples generated in two batches, 6 letters in two, and the point itself
    assert other.sessions() == 3 * (2 + 2 + 1) + 1
    assert other.result() == whole.result()
    assert whole.result()[1]["points_computed"] == 3


# ---- several processes ------------------------------------------------------------------------------
RANK = """
import os, random, signal, sys
from pathlib import Path
from safetensors.torch import save_file
from grafting.models.scratch import new_model
from grafting.plan.jobs import Job
from grafting.provenance.runner import RunningJob
from grafting.provenance.saving import Settings, Stopped
from grafting.provenance.store import Store
from grafting.tasks.tiny_language import VOCABULARY
from grafting.training import loop
from grafting.training.batches import Item, draw
from grafting.training.objectives.supervised import CrossEntropy

root, stop, rank = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])
spec = {"steps": 6, "lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.1, "precision": "float32"}
architecture = {"layers": 1, "width": 16, "feed_forward": 16, "heads": 2, "context": 64, "embedding_std": 0.06}
job = RunningJob(Job("train", "x", spec, {}, "c"), Store(root), root, sys.stderr, Settings(steps=2))
model = new_model(architecture, VOCABULARY, 0)
rng = random.Random(0)
items = [Item(str(i), [rng.randrange(40) for _ in range(3)], c, c) for i in range(9)
         for c in [[rng.randrange(40) for _ in range(rng.randrange(1, 5))]]]

def after_step(step):
    if rank == 1 and step == stop:
        os.kill(os.getpid(), signal.SIGTERM)  # one of them is told, all leave

try:
    records = loop.train(model, draw(items, 4, 0), CrossEntropy(job, 0), loop.Settings.from_spec(spec), job,
                         after_step=after_step)
except Stopped as stopped:
    print(f"rank {rank}: {stopped}", file=sys.stderr)
    sys.exit(75)
if rank == 0:
    save_file({n: p.detach() for n, p in model.named_parameters()}, root / "final.safetensors")
    loop.write_records(root / "records.jsonl", records)
    (root / "cost").write_text(str(sorted(job.cost.items())))
"""


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from grafting.training import state

class Stateless:
    def state(self):
        return {}, {}

    def restore(self, tensors, facts): ...

def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

def steps(model, optimiser, numbers):
    for number in numbers:
        torch.manual_seed(number)
        model(torch.randn(4, 6)).square().sum().backward()
        optimiser.step()
        optimiser.zero_grad()

dist.init_process_group("gloo")
model, optimiser = make(0)
steps(model, optimiser, range(3))
tensors, facts = state.collect(model, optimiser, Stateless())
tensors = {name: tensor.clone() for name, tensor in tensors.items()}
assert tensors["model/0.weight"].shape == tensors["optimiser/0/exp_avg"].shape == (5, 6)
steps(model, optimiser, range(3, 6))
other, its_optimiser = make(1)
state.restore(other, its_optimiser, Stateless(), tensors, facts)
steps(other, its_optimiser, range(3, 6))
assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(model.parameters(), other.parameters()))
print("equal", file=sys.stderr)
"""


def launch(script, *arguments):
    """Two processes of a script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    return subprocess.run(
        [*command, "--rdzv_endpoint=localhost:0", str(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_sharded_weights_and_optimiser_are_saved_whole_and_cut_again(tmp_path):
    (tmp_path / "sharded.py").write_text(SHARDED)
    done = launch(tmp_path / "sharded.py")
    assert done.returncode == 0 and done.stderr.count("equal") == 2, done.stderr


def test_two_processes_stop_after_the_same_step_and_go_on(tmp_path):
    """Only one of them gets the signal; the main one saves."""

    script = tmp_path / "rank.py"
    script.write_text(RANK)
    whole, other = tmp_path / "whole", tmp_path / "other"
    for folder in (whole, other):
        folder.mkdir()
    done = launch(script, whole, 0)
    assert done.returncode == 0, done.stderr
    done = launch(script, other, 3)
    assert done.returncode != 0 and not (other / "final.safetensors").exists()
    assert "rank 0: stopped by another process of the job, saved at step 3 of 6" in done.stderr
    assert "rank 1: stopped by SIGTERM, saved at step 3 of 6" in done.stderr
    assert len(list((other / "work" / "train").glob("*/states/0*"))) == 2  # steps 2 and 3, each written once
    done = launch(script, other, 0)
    assert done.returncode == 0 and "going on after step 3 of 6" in done.stderr, done.stderr
    for name in ("final.safetensors", "records.jsonl", "cost"):
        assert (other / name).read_bytes() == (whole / name).read_bytes(), name
