"""Training: directions, teacher, masks, accumulation, seeds, errors."""

import itertools
import json
import math
from contextlib import contextmanager

import pytest
import torch
from accelerate.state import AcceleratorState

from grafting.errors import UserError
from grafting.models import load_model, save_model
from grafting.models.scratch import new_model, new_tokenizer
from grafting.provenance.saving import Saver
from grafting.rollouts.counting import Counter
from grafting.tasks import load_examples, load_info
from grafting.tasks.tiny import build_prior, build_task
from grafting.tasks.tiny_language import ID, VOCABULARY
from grafting.training import lineage, loop, stage
from grafting.training.batches import Item, collate, draw
from grafting.training.divergences import divergence
from grafting.training.objectives import Setup, build
from grafting.training.objectives.supervised import CrossEntropy
from grafting.training.schedule import learning_rate
from grafting.training.teacher import Guard, Teacher

ARCHITECTURE = {
    "layers": 1,
    "width": 16,
    "feed_forward": 16,
    "heads": 2,
    "context": 64,
    "embedding_std": 0.06,
}
GUARD = {"threshold": 0.0, "action": "warn", "every": 2}
SFT = {
    "objective": "sft",
    "style": "own",
    "lr": 1e-2,
    "steps": 4,
    "batch_size": 6,
    "micro_batch_size": None,
    "warmup_steps": 2,
    "schedule": "cosine",
    "final_lr_ratio": 0.05,
    "weight_decay": 0.0,
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
        "ema_rate": 0.02,
        "temperature": 1.0,
        "max_new_tokens": 6,
        "skip_tokens": 0,
        "guard": GUARD,
    },
}


class Job:
    """Stands in for `grafting.provenance.runner.RunningJob`."""

    def __init__(self, out, spec, **inputs):
        self.id, self.out, self.spec, self._inputs = "train/test-0", out, spec, inputs
        self.cost, self.metrics, self.said = {}, {}, []
        self.saving = Saver()
        if out is not None:
            out.mkdir()
            self.work = out.with_name(f"{out.name}.work")

    def inputs(self, role):
        return self._inputs.get(role, [])

    def input(self, role):
        (path,) = self.inputs(role)
        return path

    def say(self, line):
        self.said.append(line)

    def track(self, label, record):
        pass

    def progress(self, total, label, unit="step"):
        class Silent:
            def update(self, n=1, **shown): ...

            def close(self): ...

        return Silent()

    def add_cost(self, **numbers):
        for key, number in numbers.items():
            self.cost[key] = self.cost.get(key, 0) + number

    @contextmanager
    def phase(self, name):
        yield


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps one precision per process; here it changes between tests."""
    torch.set_num_threads(1)
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture
def model():
    return new_model(ARCHITECTURE, VOCABULARY, seed=0)


@pytest.fixture(scope="module")
def tokenizer():
    return new_tokenizer(VOCABULARY, "deployed")


@pytest.fixture(scope="module")
def start(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("start")
    save_model(new_model(ARCHITECTURE, VOCABULARY, seed=0), tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zup")
    build_task(
        {"builder": "tiny.task", "task": "zup", "train_items": 12, "val_items": 6, "test_items": 6, "seed": 1}, folder
    )
    return folder


@pytest.fixture(scope="module")
def prior(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prior")
    sizes = {"val_items": 2, "test_items": 2, "retention_items": 2}
    build_prior({"builder": "tiny.prior", "seed": 1} | sizes, folder)
    return folder


def objective_for(job, model, tokenizer, data, teacher_model=None):
    setup = Setup(job, model, tokenizer, load_info(data), data, load_examples(data, "train"), teacher_model)
    return build(setup)


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def opsd(**changes):
    return OPSD | {"opsd": OPSD["opsd"] | changes}


# ---- divergences ------------------------------------------------------------------------------------
TEACHER = torch.tensor([[0.8, 0.2]], dtype=torch.float64).log()
STUDENT = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()


def test_forward_kl_is_teacher_to_student():
    expected = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)  # 0.1927
    assert divergence("forward_kl", TEACHER, STUDENT).item() == pytest.approx(expected, rel=1e-6)


def test_reverse_kl_is_student_to_teacher():
    expected = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)  # 0.2231
    assert divergence("reverse_kl", TEACHER, STUDENT).item() == pytest.approx(expected, rel=1e-6)


def test_jsd():
    mixture = [0.25 * 0.8 + 0.75 * 0.5, 0.25 * 0.2 + 0.75 * 0.5]
    expected = 0.25 * sum(p * math.log(p / m) for p, m in zip((0.8, 0.2), mixture))
    expected += 0.75 * sum(p * math.log(p / m) for p, m in zip((0.5, 0.5), mixture))
    assert divergence("jsd", TEACHER, STUDENT, beta=0.25).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_equal_models_do_not_diverge(name):
    logits = torch.randn(3, 7)
    assert divergence(name, logits, logits + 5).abs().max() < 1e-6


def test_unknown_divergence_and_degenerate_beta():
    with pytest.raises(UserError, match="'kl' is not known; choose one of forward_kl, reverse_kl, jsd"):
        divergence("kl", TEACHER, STUDENT)
    with pytest.raises(UserError, match="beta"):
        divergence("jsd", TEACHER, STUDENT, beta=1.0)


# ---- schedule and batches ---------------------------------------------------------------------------
def test_schedule():
    options = {"steps": 100, "lr": 2.0, "warmup_steps": 10, "final_lr_ratio": 0.05}
    rate = lambda step, schedule: learning_rate(step, schedule=schedule, **options)  # noqa: E731
    assert rate(0, "cosine") == pytest.approx(2.0 * 0.1)
    assert rate(50, "cosine") == pytest.approx(2.0 * (0.05 + 0.95 * 0.5))
    assert rate(99, "cosine") == pytest.approx(2.0 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * 0.99))))
    assert rate(50, "linear") == pytest.approx(2.0 * (0.05 + 0.95 * 0.5))
    assert rate(60, "constant") == 2.0
    assert learning_rate(0, steps=1, lr=1.0, warmup_steps=0, schedule="cosine", final_lr_ratio=0.0) == 1.0
    with pytest.raises(UserError, match="training.schedule"):
        rate(0, "cosin")


def test_batches_are_distinct_and_seeded():
    first = draw(list(range(10)), 4, seed=3)
    second = draw(list(range(10)), 4, seed=3)
    drawn = [next(first) for _ in range(5)]
    assert drawn == [next(second) for _ in range(5)]
    assert all(len(set(batch)) == 4 for batch in drawn)
    assert drawn != list(itertools.islice(draw(list(range(10)), 4, seed=4), 5))


@pytest.mark.parametrize(("n", "batch_size"), [(10, 4), (12, 4), (7, 6), (9, 2), (5, 1)])
def test_an_epoch_sees_every_example_once(n, batch_size):
    batches = list(itertools.islice(draw(list(range(n)), batch_size, seed=3), 4 * n))
    assert all(len(set(batch)) == batch_size for batch in batches)
    stream = [example for batch in batches for example in batch]
    epochs = [stream[i : i + n] for i in range(0, len(stream), n)]
    assert len(epochs) == 4 * batch_size and all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_set_no_larger_than_the_batch_is_given_whole_in_its_order():
    for batch_size in (3, 64):
        assert list(itertools.islice(draw([3, 1, 2], batch_size, seed=0), 3)) == [[3, 1, 2]] * 3


def test_prompt_tokens_carry_no_loss_and_eos_does():
    items = [Item("x", [11, 12, 13], [21, 22, 1], [31, 32, 1]), Item("y", [14], [23, 1], [33, 1])]
    ids, predicts, labels = collate(items, pad_id=0)
    assert ids.tolist() == [[11, 12, 13, 21, 22], [14, 23, 0, 0, 0]]
    assert predicts.int().tolist() == [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert labels.tolist() == [31, 32, 1, 33, 1]


def test_eos_is_supervised_though_it_is_the_pad_token(model):
    """pad = eos must not take EOS out of the loss."""
    item = Item("x", [5, 6], [7, 1], [7, 1])
    loss = CrossEntropy(Job(None, {}), pad_id=1).loss(model, [item, Item("y", [5], [1], [1])], Counter())
    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0].log_softmax(-1)
    short = model(input_ids=torch.tensor([[5]])).logits[0].log_softmax(-1)
    assert loss.item() == pytest.approx(-(logits[1, 7] + logits[2, 1] + short[0, 1]).item(), rel=1e-5)


def test_supervised_items_end_with_eos(model, tokenizer, data):
    objective = objective_for(Job(None, SFT), model, tokenizer, data)
    assert len(objective.examples) == 12
    for item in objective.examples:
        assert item.labels[-2:] == [ID["</ans>"], ID["<eos>"]]
        assert item.prompt[0] == ID["<user>"] and item.prompt[-1] == ID["<bot>"]
        assert objective.targets(item) == len(item.labels)


# ---- the loop ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", [SFT, OPSD])
def test_accumulation_equals_the_whole_batch(spec, tokenizer, data):
    """Responses of different lengths, micro-batches of unequal size: the same loss, gradient and weights."""
    found = {}
    for size in (None, 1, 4):
        model = new_model(ARCHITECTURE, VOCABULARY, seed=0)
        changed = spec | {"micro_batch_size": size, "steps": 2, "lr": 1e-3, "style": "expert"}
        job = Job(None, changed)
        other = new_model(ARCHITECTURE | {"embedding_std": 0.5}, VOCABULARY, seed=9)
        objective = objective_for(job, model, tokenizer, data, other)
        batches = draw(objective.examples, 6, seed=0)
        records = loop.train(model, batches, objective, loop.Settings.from_spec(changed), job)
        found[size] = (weights(model), [(r["loss"], r["grad_norm"]) for r in records], job.cost)
    assert min(loss for loss, _ in found[None][1]) > 0.1
    for size in (1, 4):
        for one, whole in zip(found[size][1], found[None][1]):
            assert one == pytest.approx(whole, rel=1e-4)
        assert found[size][2] == found[None][2]
        for name, weight in found[None][0].items():
            # Adam divides by the gradient's size: where that is rounding noise, so is the update
            assert torch.allclose(found[size][0][name], weight, atol=1e-4), name


def test_a_loss_that_is_not_finite_names_step_and_examples(model):
    job = Job(None, SFT)
    items = [Item("good", [5], [6, 1], [6, 1]), Item("bad", [7], [8, 1], [8, 1])]
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    with pytest.raises(UserError, match="step 1, examples good, bad: loss nan"):
        loop.train(model, iter([items]), CrossEntropy(job, 0), loop.Settings.from_spec(SFT), job)


def test_cost_counts_tokens_and_flops(model):
    job = Job(None, SFT | {"steps": 1})
    items = [Item("x", [5, 6, 7], [8, 1], [8, 1]), Item("y", [5], [1], [1])]
    loop.train(model, iter([items]), CrossEntropy(job, 0), loop.Settings.from_spec(job.spec), job)
    n = sum(parameter.numel() for parameter in model.parameters())
    counts = {"tokens_generated": 0, "tokens_forwarded": 5, "tokens_backpropagated": 5}
    assert job.cost == counts | {"flops": 6 * n * 5}


def test_unknown_objective(model, tokenizer, data):
    with pytest.raises(UserError, match="objective 'sfd' is not known; choose one of sft, dft, "):
        objective_for(Job(None, SFT | {"objective": "sfd"}), model, tokenizer, data)


# ---- the teacher ------------------------------------------------------------------------------------
def moved(model):
    student = new_model(ARCHITECTURE, VOCABULARY, seed=1)
    assert not all(torch.equal(a, b) for a, b in zip(student.parameters(), model.parameters()))
    return student


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_ema_rates(model, rate):
    before, student = weights(model), moved(model)
    teacher = Teacher("ema", model, rate)
    teacher.update(student)
    for name, weight in teacher.model.named_parameters():
        target = (1 - rate) * before[name] + rate * weights(student)[name]
        if rate in (0.0, 1.0):
            assert torch.equal(weight, target), name  # 0 never moves, 1 copies, bit for bit
        else:
            assert torch.allclose(weight, target, atol=1e-7), name


def test_frozen_stays_live_follows_and_a_separate_start_is_used(model):
    student, other = moved(model), new_model(ARCHITECTURE, VOCABULARY, seed=2)
    teacher = Teacher("frozen", model)
    teacher.update(student)
    assert teacher.model is not model
    assert all(torch.equal(a, b) for a, b in zip(teacher.model.parameters(), model.parameters()))
    assert Teacher("live", student).model is student
    assert Teacher("frozen", model, start=other).model is other
    with pytest.raises(UserError, match="opsd.teacher"):
        Teacher("fixed", model)
    with pytest.raises(UserError, match="opsd.ema_rate"):
        Teacher("ema", model, 1.5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_gradient_reaches_the_teacher(model, tokenizer, data, precision):
    spec = OPSD | {"precision": precision}
    job = Job(None, spec)
    objective = objective_for(job, model, tokenizer, data)
    before, start = weights(objective.teacher.model), weights(model)
    settings = loop.Settings.from_spec(spec)
    loop.train(model, draw(objective.examples, 6, seed=0), objective, settings, job)
    assert all(p.grad is None and not p.requires_grad for p in objective.teacher.model.parameters())
    assert all(torch.equal(before[n], p) for n, p in objective.teacher.model.named_parameters())
    assert not all(torch.equal(start[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_live_teacher_leaves_the_students_gradient_whole(model, tokenizer, data, precision):
    """Its gradient-free pass must not feed autocast's cache of weights."""
    spec = opsd(teacher="live") | {"precision": precision, "steps": 1, "lr": 1e-3}
    job = Job(None, spec)
    objective, start = objective_for(job, model, tokenizer, data), weights(model)
    settings = loop.Settings.from_spec(spec)
    (record,) = loop.train(model, draw(objective.examples, 6, seed=0), objective, settings, job)
    assert record["grad_norm"] > 0
    assert not any(torch.equal(start[n], p) for n, p in model.named_parameters() if p.dim() == 2)


def test_both_score_the_same_token_ids(model, tokenizer, data):
    job = Job(None, OPSD)
    objective = objective_for(job, model, tokenizer, data)
    pairs = objective.prepare(0, objective.examples[:5], Counter())
    for pair, question in zip(pairs, objective.examples):
        assert pair.student.labels == pair.teacher.labels == pair.student.inputs
        assert pair.student.prompt == question.prompt and pair.teacher.prompt == question.teacher_prompt
        assert ID["<ex>"] in pair.teacher.prompt and ID["<ex>"] not in pair.student.prompt
    backwards = objective.prepare(0, objective.examples[:5][::-1], Counter())
    assert [pair.student for pair in backwards[::-1]] == [pair.student for pair in pairs]


def test_skip_tokens(model, tokenizer, data):
    job = Job(None, opsd(skip_tokens=2))
    objective = objective_for(job, model, tokenizer, data)
    pairs = objective.prepare(0, objective.examples[:6], Counter())
    assert sum(map(objective.targets, pairs)) == sum(max(0, len(p.student.labels) - 2) for p in pairs)
    whole = objective_for(Job(None, OPSD), model, tokenizer, data)
    lengths = [len(p.student.labels) for p in pairs]
    with torch.no_grad():
        skipped = objective.loss(model, pairs, Counter())
        parts = [whole.loss(model, [p], Counter()) for p in pairs if len(p.student.labels) > 2]
    assert 0 < skipped < sum(parts) and max(lengths) > 2
    job = Job(None, opsd(skip_tokens=6))
    nothing = objective_for(job, model, tokenizer, data)
    with pytest.raises(UserError, match="no token carries loss"):
        loop.train(model, draw(nothing.examples, 6, seed=0), nothing, loop.Settings.from_spec(job.spec), job)


def test_a_teacher_prompt_is_never_cut(tokenizer, data):
    small = new_model(ARCHITECTURE | {"context": 19}, VOCABULARY, seed=0)
    spec = opsd(max_new_tokens=9)
    with pytest.raises(UserError, match=r"[0-9a-f]{12} of zup, prompt with the demonstration: prompt of"):
        objective_for(Job(None, spec), small, tokenizer, data)


def test_guard_warns_once_or_stops(model, tokenizer, data):
    guard = {"threshold": 0.5, "action": "warn", "every": 2}
    job = Job(None, opsd(guard=guard, teacher="ema"))
    objective = objective_for(job, model, tokenizer, data)
    values = [objective.guard.check(step) for step in range(5)]
    assert [value is None for value in values] == [False, True, False, True, False]
    assert len(job.said) == 1 and "below opsd.guard.threshold 0.5" in job.said[0]
    stopping = Guard(objective.setup, objective.teacher, guard | {"action": "stop"}, "own", 6)
    with pytest.raises(UserError, match="the ema teacher answers 0.00 of 6 examples of zup"):
        stopping.check(0)
    frozen = objective_for(Job(None, OPSD), model, tokenizer, data).guard
    assert [frozen.check(step) is None for step in range(3)] == [False, True, True]


def test_the_guard_is_no_cost_of_the_method(start, data, tmp_path):
    """Measured at every step or at the first only: the same cost, and the guard's tokens on their own."""
    jobs = []
    for name, every in (("often", 1), ("once", 100)):
        spec = opsd(teacher="ema", guard=GUARD | {"every": every}) | {"steps": 3}
        jobs.append(Job(tmp_path / name, spec, model=[start], data=[data], teacher=[start]))
        stage.run(jobs[-1])
    often, once = jobs
    assert often.cost == once.cost
    assert often.metrics["guard_tokens_generated"] > once.metrics["guard_tokens_generated"] > 0


# ---- stages -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", [SFT, OPSD, SFT | {"precision": "bfloat16"}])
def test_same_seed_same_bytes(start, data, tmp_path, spec):
    jobs, inputs = {}, {"model": [start], "data": [data], "teacher": [start]}
    for name, seed in {"a": 0, "b": 0, "c": 1}.items():
        jobs[name] = Job(tmp_path / name, spec | {"seed": seed}, **inputs)
        stage.run(jobs[name])
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"model.safetensors", "chat_template.jinja", "training.jsonl"} <= set(files)
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    records = [(tmp_path / name / "training.jsonl").read_bytes() for name in "ac"]
    assert records[0] != records[1]
    assert jobs["a"].metrics == jobs["b"].metrics and jobs["a"].cost == jobs["b"].cost


def test_supervised_training_learns(start, data, tmp_path):
    job = Job(tmp_path / "out", SFT | {"steps": 40}, model=[start], data=[data])
    stage.run(job)
    losses = [json.loads(line)["loss"] for line in (job.out / "training.jsonl").read_text().splitlines()]
    assert len(losses) == 40 and losses[-1] < 0.5 * losses[0]


def test_self_distillation_pulls_the_student_to_the_teacher(start, data, tmp_path):
    """Against a separate teacher, as in a sequence, the divergence falls."""
    other = tmp_path / "other"
    save_model(new_model(ARCHITECTURE, VOCABULARY, seed=9), new_tokenizer(VOCABULARY, "deployed"), other)
    job = Job(tmp_path / "out", OPSD | {"steps": 30}, model=[start], data=[data], teacher=[other])
    stage.run(job)
    records = [json.loads(line) for line in (job.out / "training.jsonl").read_text().splitlines()]
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]
    assert records[0]["divergence"] == "forward_kl = KL(teacher || student)"
    assert records[0]["teacher_accuracy"] == 0.0 and "teacher_accuracy" not in records[1]
    assert job.cost["tokens_generated"] > 0


def test_the_training_job_reports_a_missing_style(start, data, tmp_path):
    job = Job(tmp_path / "out", SFT | {"style": "poet"}, model=[start], data=[data])
    with pytest.raises(UserError, match="demonstration missing for style 'poet'"):
        stage.run(job)


PRETRAIN = {
    "phase": "pretrain",
    "architecture": ARCHITECTURE,
    "steps": 4,
    "batch_size": 4,
    "lr": 1e-2,
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "demonstration_share": 0.3,
    "skill_weights": {"rev": 1.5},
    "checkpoints": 2,
    "precision": "float32",
    "threads": 1,
    "seed": 0,
}
POSTTRAIN = {key: value for key, value in PRETRAIN.items() if key not in ("architecture", "checkpoints")} | {
    "phase": "posttrain",
    "gate": {"prior": 0.0, "demonstrated": 0.0, "new": 1.0, "extra_steps": 2, "attempts": 2},
}


def test_pretraining_keeps_checkpoints(tmp_path):
    job = Job(tmp_path / "out", PRETRAIN)
    lineage.run(job)
    assert sorted(path.name for path in (job.out / "checkpoints").iterdir()) == ["p100", "p50"]
    half, base = (weights(load_model(job.out / "checkpoints" / name)) for name in ("p50", "p100"))
    assert not all(torch.equal(half[name], base[name]) for name in base)
    assert len((job.out / "training.jsonl").read_text().splitlines()) == 4


def test_the_gate(start, data, prior, tmp_path):
    inputs = {"model": [start], "prior": [prior], "tasks": [data]}
    job = Job(tmp_path / "passes", POSTTRAIN, **inputs)
    lineage.run(job)
    gate = json.loads((job.out / "gate.json").read_text())
    assert [found["passed"] for found in gate["measured"]] == [True]
    assert gate["measured"][0]["n"] == {"prior": 38, "zup": 6}
    assert len(gate["measured"][0]["prior_by_skill"]) == 19
    assert "</ans>" in (job.out / "chat_template.jinja").read_text()
    strict = POSTTRAIN | {"gate": POSTTRAIN["gate"] | {"prior": 0.95}}
    job = Job(tmp_path / "fails", strict, **inputs)
    with pytest.raises(UserError, match=r"does not pass its gate after 8 steps: measured \{'prior': 0.0"):
        lineage.run(job)
    assert not (job.out / "model.safetensors").exists()
