"""Every objective: golden losses, hand-computed cases, no gradient into a teacher, bad input.

`python tests/unit/test_objectives.py` prints the golden losses anew; look at every number that moves before keeping it.
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from test_training import (  # noqa: F401  (fixtures)
    ARCHITECTURE,
    OPSD,
    SFT,
    Job,
    data,
    fresh_accelerate,
    model,
    objective_for,
    prior,
    start,
    tokenizer,
    weights,
)

from grafting.errors import UserError
from grafting.models import load_model, save_model
from grafting.models.scratch import new_model, new_tokenizer
from grafting.rollouts import Rollout
from grafting.rollouts.counting import Counter
from grafting.tasks import scorers
from grafting.tasks.tiny_language import ID, VOCABULARY
from grafting.training import loop, stage
from grafting.training.batches import Item
from grafting.training.divergences import divergence, importance_weights, purified, sampled_reverse_kl
from grafting.training.objectives import OBJECTIVES, Setup, build, find
from grafting.training.objectives.policy import advantages, spike_penalty
from grafting.training.objectives.self_distillation import hinted, without_question
from grafting.training.objectives.weighted import dft_weights, gate

GOLDEN = Path(__file__).parent / "golden_losses.json"
ROLLING = {"temperature": 1.0, "max_new_tokens": 6}
GRPO = ROLLING | {
    "samples": 3,
    "scale_advantages": True,
    "kl": 0.0,
    "privileged": False,
    "spike": 0.0,
    "spike_tolerance": 0.0,
}


def case(objective: str, **options) -> dict:
    """Spec of a short run; `opsd` options are added to those of the base case."""
    base = OPSD["opsd"] if objective == "opsd" else {}
    spec = SFT | {"steps": 5, "objective": objective, "style": "own"}
    return spec | ({objective: base | options} if options or base else {})


CASES = {
    "sft": case("sft"),
    "dft": case("dft"),
    "gated_sft": case("gated_sft", threshold=4.0, width=0.5),
    "sft_kl": case("sft_kl", coefficient=0.5),
    "sft_l2": case("sft_l2", coefficient=0.5),
    "replay": case("replay", share=0.34, **ROLLING),
    "reinvoke": case("reinvoke", share=0.4, divergence="reverse_kl", **ROLLING),
    "grpo": case("grpo", **GRPO),
    "grpo_kl": case("grpo", **GRPO | {"kl": 0.1, "scale_advantages": False}),
    "grpo_pedagogical": case("grpo", **GRPO | {"privileged": True, "spike": 0.5, "spike_tolerance": 0.01}),
    "sdpo": case("sdpo", samples=3, divergence="reverse_kl", teacher="ema", ema_rate=0.1, **ROLLING),
    "opsd": case("opsd"),
    "opsd_reverse": case("opsd", divergence="reverse_kl"),
    "opsd_jsd": case("opsd", divergence="jsd", beta=0.3),
    "opsd_ema": case("opsd", teacher="ema", ema_rate=0.2),
    "opsd_live": case("opsd", teacher="live"),
    "opsd_top_k": case("opsd", vocabulary="top_k", top_k=4),
    "opsd_top_k_teacher": case("opsd", vocabulary="top_k", top_k=4, support="teacher", tail=False),
    "opsd_sampled": case("opsd", divergence="reverse_kl", vocabulary="sampled_token", importance_clip=2.0),
    "opsd_cold": case("opsd", loss_temperature=0.7, temperature=0.8, skip_tokens=1),
    "opsd_purified": case("opsd", purify=0.7),
    "opsd_hint": case("opsd", hint_share=0.5),
}


def even(text: str, example: dict, options: dict) -> tuple[bool, str]:
    """A scorer that untrained models can please: an even number of words is right."""
    return len(text.split()) % 2 == 0, "counted"


@pytest.fixture
def lenient(monkeypatch):
    monkeypatch.setitem(scorers.ANSWERS, "tokens", even)


def trained(out, spec: dict, start, data, prior, other=None) -> tuple[Job, list[dict]]:
    """Job and records of a run; `other` is a second model that a teacher starts from."""
    job = Job(out, spec, model=[start], data=[data], prior=[prior], teacher=[other or start])
    stage.run(job)
    return job, [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]


# ---- all of them ------------------------------------------------------------------------------------
def test_every_objective_has_a_case():
    assert {spec["objective"] for spec in CASES.values()} == set(OBJECTIVES)


@pytest.mark.parametrize("name", CASES)
def test_golden_losses(name, start, data, prior, tmp_path, lenient):
    """The first five losses on a small model, as they were when the objective was checked."""
    _, records = trained(tmp_path / "out", CASES[name], start, data, prior)
    golden = json.loads(GOLDEN.read_text())[name]
    assert [record["loss"] for record in records] == pytest.approx(golden, rel=2e-4, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("sft", "opsd")])
def test_accumulation_equals_the_whole_batch(name, data, prior, tokenizer, tmp_path, lenient):
    found = []
    for size in (None, 2):
        spec = CASES[name] | {"micro_batch_size": size, "steps": 2, "lr": 1e-3}
        student, job = new_model(ARCHITECTURE, VOCABULARY, seed=0), Job(None, spec)
        objective = with_prior(job, student, tokenizer, data, prior)
        records = loop.train(student, objective.batches(6, 0), objective, loop.Settings.from_spec(spec), job)
        found.append((weights(student), [(r["loss"], r["grad_norm"]) for r in records], job.cost))
    for whole, parts in zip(found[0][1], found[1][1]):
        assert parts == pytest.approx(whole, rel=2e-4, abs=1e-6)
    assert found[0][2] == found[1][2]
    assert all(torch.allclose(found[0][0][n], w, atol=1e-4) for n, w in found[1][0].items())


def with_prior(job, student, tokenizer, data, prior, teacher_model=None):
    from grafting.tasks import load_examples, load_info

    examples = load_examples(data, "train")
    return build(Setup(job, student, tokenizer, load_info(data), data, examples, teacher_model, prior))


@pytest.mark.parametrize(
    "name", ["sft_kl", "reinvoke", "grpo_kl", "grpo_pedagogical", "sdpo", "opsd_purified", "replay"]
)
def test_no_gradient_reaches_the_teacher(name, data, prior, tokenizer, lenient):
    spec = CASES[name] | ({"sdpo": CASES["sdpo"]["sdpo"] | {"teacher": "frozen"}} if name == "sdpo" else {})
    student, job = new_model(ARCHITECTURE, VOCABULARY, seed=0), Job(None, spec)
    other = new_model(ARCHITECTURE, VOCABULARY, seed=7)
    objective = with_prior(job, student, tokenizer, data, prior, other)
    before, first = weights(other), weights(student)
    loop.train(student, objective.batches(6, 0), objective, loop.Settings.from_spec(spec), job)
    assert all(p.grad is None for p in other.parameters())
    assert all(torch.equal(before[n], p) for n, p in other.named_parameters())
    assert not all(torch.equal(first[n], p) for n, p in student.named_parameters())


@pytest.mark.parametrize("name", ["replay", "reinvoke", "grpo", "sdpo"])
def test_same_seed_same_bytes(name, start, data, prior, tmp_path, lenient):
    jobs = [trained(tmp_path / folder, CASES[name], start, data, prior)[0] for folder in "ab"]
    for file in ("model.safetensors", "training.jsonl"):
        assert (jobs[0].out / file).read_bytes() == (jobs[1].out / file).read_bytes()
    assert jobs[0].cost == jobs[1].cost and jobs[0].metrics == jobs[1].metrics
    assert jobs[0].cost["tokens_generated"] > 0 and jobs[0].cost["flops"] > 0


# ---- weighted ---------------------------------------------------------------------------------------
def test_weights_by_hand():
    surprisal = torch.tensor([math.log(4), math.log(2)])
    assert dft_weights(surprisal).tolist() == pytest.approx([0.25, 0.5])
    assert gate(torch.tensor([3.0, 4.0, 5.0]), 4.0, 0.5).tolist() == pytest.approx(
        [1 / (1 + math.exp(-2)), 0.5, 1 / (1 + math.exp(2))]
    )


@pytest.mark.parametrize(
    ("name", "weight"), [("dft", lambda s: math.exp(-s)), ("gated_sft", lambda s: 1 / (1 + math.exp((s - 4) / 0.5)))]
)
def test_weights_carry_no_gradient(name, weight, model, tokenizer, data):
    """Two tokens of a vocabulary of two: loss and gradient by hand."""
    objective = objective_for(Job(None, CASES[name]), model, tokenizer, data)
    logits = torch.tensor([[0.0, 0.0], [0.0, 2.0]], requires_grad=True)
    labels = torch.tensor([0, 0])
    loss = objective.combine(logits, labels)
    loss.backward()
    p = [0.5, 1 / (1 + math.exp(2))]  # of the labels
    s = [-math.log(x) for x in p]
    assert loss.item() == pytest.approx(sum(weight(x) * x for x in s), rel=1e-5)
    expected = [[weight(x) * (q - 1), weight(x) * (1 - q)] for x, q in zip(s, p)]  # weight * (softmax - one-hot)
    assert torch.allclose(logits.grad, torch.tensor(expected), atol=1e-6)


# ---- regularised ------------------------------------------------------------------------------------
ITEM = Item("x", [5, 6, 7], [8, 9, 1], [8, 9, 1])


def test_sft_kl_adds_forward_kl_from_the_reference(model, tokenizer, data, prior):
    other = new_model(ARCHITECTURE | {"embedding_std": 0.5}, VOCABULARY, seed=9)
    both = {}
    for coefficient in (0.0, 2.0):
        job = Job(None, case("sft_kl", coefficient=coefficient))
        objective = with_prior(job, model, tokenizer, data, prior, other)
        with torch.no_grad():
            both[coefficient] = objective.loss(model, [ITEM], Counter()).item()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        own, reference = (m(input_ids=ids).logits[0, 2:].log_softmax(-1) for m in (model, other))
    assert both[0.0] == pytest.approx(-sum(own[t, y].item() for t, y in enumerate((8, 9, 1))), rel=1e-5)
    expected = (reference.exp() * (reference - own)).sum().item()
    assert both[2.0] - both[0.0] == pytest.approx(2 * expected, rel=1e-4) and expected > 0.01


def test_sft_l2_counts_the_penalty_once(model, tokenizer, data, prior):
    objective = with_prior(Job(None, case("sft_l2", coefficient=3.0)), model, tokenizer, data, prior)
    plain = objective_for(Job(None, SFT), model, tokenizer, data)
    assert objective.loss(model, [ITEM], Counter()).item() == pytest.approx(plain.loss(model, [ITEM], Counter()).item())
    with torch.no_grad():
        next(model.parameters())[3, 2] += 0.5
    items = [ITEM, Item("y", [5], [1], [1])]  # four target tokens
    extra = objective.loss(model, items, Counter()).item() - plain.loss(model, items, Counter()).item()
    assert extra / 4 == pytest.approx(3.0 * 0.25, rel=1e-3)


def test_replay_mixes_the_reference_own_words(start, model, tokenizer, data, prior):
    objective = with_prior(Job(None, CASES["replay"]), model, tokenizer, data, prior)
    counter = Counter()
    batch = next(objective.batches(6, 0))
    items = objective.prepare(0, batch, counter)
    old = [item for item in items if item.id in objective.replies]
    assert len(items) == 6 and len(old) == 2  # round(0.34 * 6)
    assert counter.tokens_generated == sum(map(len, objective.replies.values()))
    with torch.no_grad():  # later steps replay what was said, whatever the student has become
        for p in model.parameters():
            p.mul_(0.5)
    _, facts = objective.state()
    again = with_prior(Job(None, CASES["replay"]), model, tokenizer, data, prior)
    again.restore({}, json.loads(json.dumps(facts)))
    assert again.prepare(3, batch, Counter()) == items


def test_objectives_that_need_general_prompts_say_so(model, tokenizer, data):
    for name in ("replay", "reinvoke"):
        with pytest.raises(UserError, match=f"objective '{name}' needs the prior suite's retention examples"):
            objective_for(Job(None, CASES[name]), model, tokenizer, data)


# ---- reinvoke ---------------------------------------------------------------------------------------
def test_reinvoke_has_two_parts(start, data, prior, tmp_path):
    _, records = trained(tmp_path / "out", CASES["reinvoke"], start, data, prior)
    assert [record["part"] for record in records] == ["sft"] * 3 + ["distillation"] * 2
    assert records[3]["divergence"] == "reverse_kl = KL(student || teacher)"


def test_reinvoke_returns_to_the_reference(start, data, prior, tmp_path):
    """With the whole run on general prompts and another model as reference, the divergence falls."""
    other = tmp_path / "other"
    save_model(new_model(ARCHITECTURE, VOCABULARY, seed=9), new_tokenizer(VOCABULARY, "deployed"), other)
    spec = case("reinvoke", share=1.0, divergence="forward_kl", **ROLLING) | {"steps": 30}
    _, records = trained(tmp_path / "out", spec, start, data, prior, other)
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]


# ---- policy -----------------------------------------------------------------------------------------
def test_advantages_by_hand():
    assert advantages([1.0, 0.0], scaled=False) == [0.5, -0.5]
    half = 0.5 / (math.sqrt(0.5) + 1e-4)  # standard deviation of (1, 0) with n - 1 = 1
    assert advantages([1.0, 0.0]) == pytest.approx([half, -half])
    assert advantages([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0] and advantages([0.3]) == [0.0]


def test_spike_is_the_largest_gap_beyond_the_tolerance():
    assert spike_penalty([-1.0, -0.1], [-1.5, -3.1], 2.0) == pytest.approx(1.0)
    assert spike_penalty([-1.0, -0.1], [-1.5, -3.1], 4.0) == 0.0
    assert spike_penalty([-2.0], [-1.0], 0.0) == 0.0  # less surprising to the student than to the teacher


def test_policy_gradient_by_hand(model, tokenizer, data, prior):
    """-A log pi, summed over the tokens; what has no advantage costs nothing."""
    from grafting.training.objectives.policy import Attempt

    objective = with_prior(Job(None, CASES["grpo"]), model, tokenizer, data, prior)
    attempts = [Attempt("x", ITEM, 2.0), Attempt("y", Item("y", [5], [1], [1]), 0.0)]
    counter = Counter()
    loss = objective.loss(model, attempts, counter)
    logs = model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 2:].log_softmax(-1)
    assert loss.item() == pytest.approx(-2 * sum(logs[t, y].item() for t, y in enumerate((8, 9, 1))), rel=1e-4)
    assert counter.tokens_backpropagated == 5 and sum(map(objective.targets, attempts)) == 4


def test_a_batch_without_signal_is_a_step_without_signal(start, data, prior, tmp_path):
    """An untrained model is never right: nothing moves, and that is in the record."""
    for name in ("grpo", "sdpo"):
        job, records = trained(tmp_path / name, CASES[name], start, data, prior)
        assert all(record["loss"] == 0 and record["rollout_accuracy"] == 0 for record in records)
        old, new = (weights(load_model(folder)) for folder in (start, job.out))
        assert all(torch.equal(old[n], new[n]) for n in old)
        assert job.cost["tokens_generated"] > 0 and job.cost["tokens_backpropagated"] == 0


def test_grpo_learns_what_the_verifier_wants(start, data, prior, tmp_path, monkeypatch):
    def odd(text, example, options):
        return len(text.split()) % 2 == 1, "counted"

    monkeypatch.setitem(scorers.ANSWERS, "tokens", odd)
    spec = case("grpo", **GRPO | {"samples": 6}) | {"steps": 40, "batch_size": 48, "lr": 2e-2}
    _, records = trained(tmp_path / "out", spec, start, data, prior)
    first, last = (sum(r["reward"] for r in part) / 5 for part in (records[:5], records[-5:]))
    assert last > first + 0.2


def test_batch_size_counts_rollouts(model, tokenizer, data, prior):
    objective = with_prior(Job(None, CASES["grpo"]), model, tokenizer, data, prior)
    assert len(next(objective.batches(6, 0))) == 2
    with pytest.raises(UserError, match="no multiple of samples 4"):
        with_prior(Job(None, case("grpo", **GRPO | {"samples": 4})), model, tokenizer, data, prior)
    with pytest.raises(UserError, match="divide batch_size"):
        spec = case("sdpo", samples=1, divergence="reverse_kl", teacher="live", **ROLLING)
        with_prior(Job(None, spec), model, tokenizer, data, prior)


# ---- sdpo -------------------------------------------------------------------------------------------
def test_hindsight_shows_another_right_answer(model, tokenizer, data, prior, monkeypatch):
    objective = with_prior(Job(None, CASES["sdpo"]), model, tokenizer, data, prior)
    end = ID["<eos>"]
    said = [[ID["a"], end], [ID["b"], ID["c"], end], [ID["d"], end]]
    rollouts = [Rollout(tokens, "stop") for tokens in said * 2]
    monkeypatch.setattr(objective, "sample", lambda *args, **kwargs: rollouts)
    right = iter([False, True, False, False, False, False])
    monkeypatch.setattr(objective, "judge", lambda *args: list(right))
    questions = next(objective.batches(6, 0))
    pairs = objective.prepare(0, questions, Counter())
    # only the siblings of the right one learn; it has no right sibling itself, nor has the second group
    assert [pair.student.labels for pair in pairs] == [said[0], said[2]]
    shown = tokenizer.decode(pairs[0].teacher.prompt)
    assert "<ex> b c </ex>" in shown and pairs[0].student.prompt == questions[0].prompt


# ---- opsd's variants --------------------------------------------------------------------------------
def test_two_tokens_by_hand():
    teacher, student = torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    sampled = sampled_reverse_kl(teacher[:, 0], student[:, 0])
    sampled.sum().backward()
    assert sampled.item() == pytest.approx((math.log(0.5) - math.log(0.8)) * math.log(0.5), rel=1e-5)
    assert student.grad[0].tolist() == pytest.approx([math.log(0.5) - math.log(0.8), 0.0], rel=1e-5)
    ratio = importance_weights(torch.tensor([0.5, 0.1]).log(), torch.tensor([0.1, 0.5]).log(), 2.0)
    assert ratio.tolist() == pytest.approx([2.0, 0.2])


@pytest.mark.parametrize("support", ["student", "teacher"])
def test_top_k_by_hand(support):
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.3, 0.5]])
    keep = 2 if support == "student" else 0  # the likeliest of q, or of p
    t, s = p[0, keep].item(), q[0, keep].item()
    tail = divergence("forward_kl", p.log(), q.log(), top_k=1, support=support)
    assert tail.item() == pytest.approx(t * math.log(t / s) + (1 - t) * math.log((1 - t) / (1 - s)), rel=1e-4)
    assert divergence("forward_kl", p.log(), q.log(), top_k=1, support=support, tail=False).item() == pytest.approx(0)
    whole = divergence("forward_kl", p.log(), q.log())
    assert divergence("forward_kl", p.log(), q.log(), top_k=3).equal(whole)
    with pytest.raises(UserError, match="opsd.support"):
        divergence("forward_kl", p.log(), q.log(), top_k=1, support="both")


def test_sampled_token_estimates_the_gradient_of_reverse_kl():
    """In expectation over the student's tokens, exactly."""
    teacher, logits = torch.tensor([[0.3, -1.0, 0.5]]), torch.tensor([[0.1, 0.4, -0.7]], requires_grad=True)
    (whole,) = torch.autograd.grad(divergence("reverse_kl", teacher, logits).sum(), logits)
    student = logits.log_softmax(-1)
    values = sampled_reverse_kl(teacher.log_softmax(-1)[0], student[0])
    (estimate,) = torch.autograd.grad((student[0].exp().detach() * values).sum(), logits)
    assert torch.allclose(whole, estimate, atol=1e-6)


def test_purified_target_by_hand():
    teacher, alone = torch.tensor([[0.6, 0.4]]).log(), torch.tensor([[0.9, 0.1]]).log()
    student = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    target = purified(teacher, alone, student, 1.0).softmax(-1)
    odds = (0.5 * 0.6 / 0.9) / (0.5 * 0.4 / 0.1)
    assert target[0].tolist() == pytest.approx([odds / (1 + odds), 1 / (1 + odds)], rel=1e-5)
    assert not target.requires_grad
    assert purified(teacher, teacher, student, 1.0).softmax(-1)[0].tolist() == pytest.approx([0.5, 0.5])


def test_reference_prompt_has_the_demonstration_without_the_question(model, tokenizer, data):
    objective = objective_for(Job(None, CASES["opsd_purified"]), model, tokenizer, data)
    question = objective.examples[0]
    alone, shown, plain = (
        tokenizer.decode(ids) for ids in (question.reference_prompt, question.teacher_prompt, question.prompt)
    )
    assert "<ex>" in alone and "zup" not in alone and "zup" in shown and "zup" in plain
    assert question.example["messages"][-1]["content"]  # the example itself is left as it was
    assert without_question(question.example)["messages"][-1]["content"] == ""


def test_a_hint_is_the_first_words_of_the_demonstration(data):
    from grafting.tasks import load_examples

    example = load_examples(data, "train")[0]
    words = example["demonstrations"]["own"].split()
    assert hinted(example, "own", 0.5)["demonstrations"]["own"].split() == words[: round(len(words) / 2)]
    assert hinted(example, "own", 0.001)["demonstrations"]["own"] == words[0]
    assert hinted(example, "own", 1.0) is example


def test_the_guard_shows_the_teacher_what_it_sees_in_training(model, tokenizer, data):
    whole, half = (
        objective_for(Job(None, case("opsd", hint_share=share)), model, tokenizer, data) for share in (1.0, 0.5)
    )
    for full, hint in zip(whole.guard.examples, half.guard.examples, strict=True):
        assert hint == hinted(full, "own", 0.5) != full


def test_a_following_teacher_is_part_of_the_state(model, tokenizer, data):
    spec = CASES["opsd_ema"]
    objective = objective_for(Job(None, spec), model, tokenizer, data)
    loop.train(model, objective.batches(6, 0), objective, loop.Settings.from_spec(spec), Job(None, spec))
    tensors, facts = objective.state()
    fresh = objective_for(Job(None, spec), new_model(ARCHITECTURE, VOCABULARY, seed=3), tokenizer, data)
    fresh.restore(tensors, json.loads(json.dumps(facts)))
    theirs = weights(fresh.teacher.model)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights(objective.teacher.model).items())
    assert fresh.guard.lowest == objective.guard.lowest and fresh.guard.counter == objective.guard.counter


# ---- bad input --------------------------------------------------------------------------------------
def test_a_vocabulary_smaller_than_the_tokenizers(data, prior, tmp_path):
    small = tmp_path / "small"
    save_model(new_model(ARCHITECTURE, VOCABULARY[:-2], seed=0), new_tokenizer(VOCABULARY, "deployed"), small)
    with pytest.raises(UserError, match=f"the model embeds {len(VOCABULARY) - 2} tokens, its tokenizer has ids beyond"):
        trained(tmp_path / "out", SFT, small, data, prior)


def test_a_scorer_that_raises_names_the_example(start, data, prior, tmp_path, monkeypatch):
    def broken(text, example, options):
        raise ZeroDivisionError("nothing to divide")

    monkeypatch.setitem(scorers.ANSWERS, "tokens", broken)
    spec = CASES["grpo"]
    with pytest.raises(UserError, match=r"step 1, example [0-9a-f]{12}: the scorer 'tokens' failed"):
        trained(tmp_path / "out", spec, start, data, prior)


def ends(model, at_once: bool) -> None:
    """Make a model end at once, or never."""
    head = model.get_output_embeddings()
    original, shift = head.forward, torch.zeros(len(VOCABULARY))
    shift[ID["<eos>"]] = 50.0 if at_once else -50.0
    head.forward = lambda states: original(states) + shift


def test_rollouts_that_never_stop_are_counted(model, tokenizer, data):
    ends(model, at_once=False)
    objective = objective_for(Job(None, OPSD), model, tokenizer, data)
    pairs = objective.prepare(0, objective.examples[:4], Counter())
    assert all(len(pair.student.labels) == 6 for pair in pairs)
    assert objective.report(lambda sums: sums)["rollout_truncated"] == 1.0


def test_empty_rollouts_are_said_and_still_teach_to_end(model, tokenizer, data):
    ends(model, at_once=True)
    job = Job(None, OPSD | {"steps": 2})
    objective = objective_for(job, model, tokenizer, data)
    records = loop.train(model, objective.batches(6, 0), objective, loop.Settings.from_spec(job.spec), job)
    assert records[0]["rollout_empty"] == 1.0 and math.isfinite(records[0]["loss"])
    assert [line for line in job.said if "all 6 rollouts are empty" in line][1:] == []  # said once
    job = Job(None, OPSD | {"opsd": OPSD["opsd"] | {"skip_tokens": 1}})
    objective = objective_for(job, model, tokenizer, data)
    with pytest.raises(UserError, match="step 1, examples .*no token carries loss"):
        loop.train(model, objective.batches(6, 0), objective, loop.Settings.from_spec(job.spec), job)


def test_a_loss_that_is_not_finite_leaves_the_last_good_weights(model, tokenizer, data):
    spec = SFT | {"lr": 1e-3}
    job = Job(None, spec)
    objective = objective_for(job, model, tokenizer, data)
    kept, whole = {}, objective.loss

    def loss(model, items, counter):
        value = whole(model, items, counter)
        return value * torch.nan if kept.get(2) else value

    objective.loss = loss

    def after(step):
        kept[step] = weights(model)

    with pytest.raises(UserError, match="step 3, examples [0-9a-f]{12}, .*: loss nan"):
        loop.train(model, objective.batches(6, 0), objective, loop.Settings.from_spec(spec), job, after_step=after)
    assert all(torch.equal(kept[2][name], weight) for name, weight in weights(model).items())


# ---- one's own --------------------------------------------------------------------------------------
def test_a_file_is_an_objective(tmp_path, monkeypatch):
    import grafting.training.objectives as package

    (tmp_path / "mine.py").write_text(
        "from grafting.training.objectives.supervised import Supervised\n\nclass Learner(Supervised):\n    pass\n"
    )
    monkeypatch.setattr(package, "__file__", str(tmp_path / "__init__.py"))
    assert find("mine") == "mine:Learner"
    assert find("theirs") is None and find("base") is None and find("../mine") is None


def golden() -> dict:
    """The first five losses of every case."""
    from grafting.tasks.tiny import build_prior, build_task

    root = Path(tempfile.mkdtemp())
    for name in ("data", "prior"):
        (root / name).mkdir()
    sizes = {"train_items": 12, "val_items": 6, "test_items": 6, "seed": 1}
    build_task({"builder": "tiny.task", "task": "zup"} | sizes, root / "data")
    build_prior(
        {"builder": "tiny.prior", "seed": 1, "val_items": 2, "test_items": 2, "retention_items": 2}, root / "prior"
    )
    save_model(new_model(ARCHITECTURE, VOCABULARY, seed=0), new_tokenizer(VOCABULARY, "deployed"), root / "start")
    torch.set_num_threads(1)
    scorers.ANSWERS["tokens"] = even
    found = {}
    for name, spec in CASES.items():
        _, records = trained(root / name, spec, root / "start", root / "data", root / "prior")
        found[name] = [float(f"{record['loss']:.7g}") for record in records]
    return found


if __name__ == "__main__":
    json.dump(golden(), sys.stdout, indent=1)
