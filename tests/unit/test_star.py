"""Self-improvement data: what is kept, what is rationalised, what comes out as a data folder."""

import gzip
import json

import pytest
from test_training import SFT, Job, data, start, tokenizer  # noqa: F401  (fixtures)

from grafting.errors import UserError
from grafting.rollouts import stage
from grafting.tasks import load_examples, load_info, scorers
from grafting.training import stage as training

SPEC = {
    "kind": "star", "name": "star", "samples": 2, "keep": 1, "rationalise": True, "with_demonstration": False,
    "temperature": 1.0, "max_new_tokens": 6, "seed": 0, "batch_size": 8, "threads": 1,
}  # fmt: skip


def collect(out, start, data, **changes):
    job = Job(out, SPEC | changes, model=[start], data=[data])
    stage.run(job)
    rows = [json.loads(line) for line in gzip.decompress((out / "rollouts.jsonl.gz").read_bytes()).splitlines()]
    return job, rows, json.loads((out / "summary.json").read_text())


def short(text, example, options):
    """Right if it is short and ends: untrained models manage that sometimes."""
    return len(text.split()) <= 4, "counted"


@pytest.fixture
def lenient(monkeypatch):
    monkeypatch.setitem(scorers.ANSWERS, "tokens", short)


@pytest.fixture
def stopping(monkeypatch):
    """Responses may end with many tokens, so that untrained models end at all."""
    from grafting.rollouts import scoring

    monkeypatch.setattr(scoring, "stop_ids", lambda model, tokenizer: set(range(0, 60, 2)))


def test_kept_samples_are_accepted_ones_and_all_are_recorded(start, data, tmp_path, lenient, stopping):
    job, rows, rates = collect(tmp_path / "a", start, data)
    train = load_examples(job.out, "train")
    original = {example["id"]: example for example in load_examples(data, "train")}
    kept = {row["id"]: row for row in rows if row["kept"]}
    assert 0 < len(train) == len(kept) == rates["kept_prompts"]
    for example in train:
        row = kept[example["id"]]
        assert example["demonstrations"]["star"] == row["text"] and row["correct"] and row["finish"] == "stop"
        # the prompt that is learned never shows the answer
        assert example["messages"] == original[example["id"]]["messages"]
    plain, shown = ([row for row in rows if row["shown"] is s] for s in (False, True))
    assert len(plain) == 2 * len(original)
    assert rates["acceptance_plain"] == sum(row["accepted"] for row in plain) / len(plain)
    unanswered = {e for e in original if not any(row["accepted"] for row in plain if row["id"] == e)}
    assert {row["id"] for row in shown} == unanswered  # only the rest is rationalised
    assert all("<ex>" in row["prompt"] for row in shown) and not any("<ex>" in row["prompt"] for row in plain)
    assert job.metrics["kept_prompts"] == len(train) and job.cost["tokens_generated"] > 0
    again, _, _ = collect(tmp_path / "b", start, data)
    for name in ("train.jsonl", "info.json", "rollouts.jsonl.gz", "summary.json"):
        assert (job.out / name).read_bytes() == (again.out / name).read_bytes()


def test_several_distinct_responses_per_prompt(start, data, tmp_path, lenient, stopping):
    job, _, _ = collect(tmp_path / "out", start, data, samples=6, keep=3, rationalise=False)
    found = load_examples(job.out, "train")
    texts: dict[str, list[str]] = {}
    for example in found:
        texts.setdefault(example["id"].partition(".")[0], []).append(example["demonstrations"]["star"])
    assert max(map(len, texts.values())) > 1
    assert all(len(set(said)) == len(said) <= 3 for said in texts.values())


def test_learners_read_the_result(start, data, tmp_path, lenient, stopping):
    job, _, _ = collect(tmp_path / "data", start, data)
    assert load_info(job.out)["styles"] == ["own", "expert", "star"]
    assert load_info(job.out)["counts"]["train"] == len(load_examples(job.out, "train"))
    trained = Job(tmp_path / "out", SFT | {"style": "star", "steps": 2}, model=[start], data=[job.out])
    training.run(trained)
    assert (trained.out / "model.safetensors").is_file()


def test_a_verifier_that_accepts_nothing(start, data, tmp_path):
    with pytest.raises(UserError, match="the verifier accepts none of 48 responses to 12 prompts of zup"):
        collect(tmp_path / "out", start, data)


def test_a_verifier_that_raises_is_no_rejection(start, data, tmp_path, monkeypatch):
    def broken(text, example, options):
        raise ZeroDivisionError("nothing to divide")

    monkeypatch.setitem(scorers.ANSWERS, "tokens", broken)
    with pytest.raises(UserError, match=r"the scorer 'tokens' failed on sample 0 of example [0-9a-f]{12}"):
        collect(tmp_path / "out", start, data)


def test_privileged_traces(start, data, tmp_path, lenient, stopping):
    _, rows, rates = collect(tmp_path / "out", start, data, with_demonstration=True, rationalise=False)
    assert all(row["shown"] for row in rows) and "acceptance_plain" not in rates
