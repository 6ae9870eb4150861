"""Sampling engine: what an example gets depends on its own seed only; padding and caching change nothing."""

import gzip
import json
from contextlib import contextmanager

import pytest
import torch

from grafting.errors import UserError
from grafting.models import load_tokenizer, save_model
from grafting.models.scratch import new_model, new_tokenizer
from grafting.provenance.progress import Progress
from grafting.provenance.saving import Saver
from grafting.rollouts import example_seed, generate
from grafting.rollouts.counting import Counter
from grafting.rollouts.sampling import choose, uniforms
from grafting.rollouts.scoring import respond, summary
from grafting.rollouts.stage import run
from grafting.tasks import load_examples, load_info
from grafting.tasks.tiny import build_task
from grafting.tasks.tiny_language import ID, VOCABULARY

ARCHITECTURE = {"layers": 2, "width": 16, "feed_forward": 16, "heads": 2, "context": 32, "embedding_std": 0.3}
PROMPTS = [
    [ID[w] for w in text.split()]
    for text in (
        "<user> rev a b c <bot>",
        "<user> up a b c d <bot>",
        "<user> add 1 + 2 <bot>",
        "<user> fact a <bot>",
        "<user> zup d c b a <ex> A B C D </ex> <bot>",
    )
]


class Job:
    """Stands in for `grafting.provenance.runner.RunningJob`."""

    def __init__(self, out, spec, inputs):
        self.id, self.out, self.spec, self._inputs = "rollout/test-0", out, spec, inputs
        self.cost, self.metrics, self.saving = {}, {}, Saver()
        out.mkdir()

    def input(self, role):
        return self._inputs[role]

    def add_cost(self, **numbers):
        self.cost.update(numbers)

    def progress(self, total, label, unit="step"):
        return Progress(total, label, unit, print)

    @contextmanager
    def phase(self, name):
        yield


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return new_model(ARCHITECTURE, VOCABULARY, seed=0).eval()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    build_task(
        {"builder": "tiny.task", "task": "zup", "train_items": 12, "val_items": 6, "test_items": 6, "seed": 1}, folder
    )
    return folder


def sample(model, prompts, seeds, batch_size=8, **more):
    options = {"max_new_tokens": 8, "stop_ids": {ID["<eos>"]}, "pad_id": 0, "temperature": 1.0} | more
    return generate(model, prompts, seeds=seeds, batch_size=batch_size, **options)


def test_tokens_depend_neither_on_batch_size_nor_on_order(model):
    seeds = list(range(len(PROMPTS)))
    whole = sample(model, PROMPTS, seeds)
    assert sample(model, PROMPTS, seeds, batch_size=1) == whole
    assert sample(model, PROMPTS, seeds, batch_size=2) == whole
    assert sample(model, PROMPTS[::-1], seeds[::-1])[::-1] == whole
    assert sample(model, PROMPTS, [s + 100 for s in seeds]) != whole


def test_greedy_equals_the_argmax_of_full_forward_passes(model):
    """No cache, no padding, no dropped rows: the plainest generation there is."""
    stops = {ID["<eos>"], ID["a"], ID["zup"]}
    rollouts = generate(model, PROMPTS, max_new_tokens=6, stop_ids=stops, pad_id=0, batch_size=5)
    for prompt, rollout in zip(PROMPTS, rollouts):
        tokens = []
        while len(tokens) < 6 and not (tokens and tokens[-1] in stops):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + tokens])).logits
            tokens.append(logits[0, -1].argmax().item())
        assert rollout.tokens == tokens
        assert rollout.finish == ("stop" if tokens[-1] in stops else "length")


def test_finished_rows_leave_the_batch_and_results_keep_their_order(model):
    """With half of the vocabulary as stop tokens rows end at different steps."""
    stops = set(range(0, len(VOCABULARY), 2))
    prompts, seeds = PROMPTS * 6, list(range(len(PROMPTS) * 6))
    together = sample(model, prompts, seeds, batch_size=30, stop_ids=stops)
    alone = [sample(model, [p], [s], stop_ids=stops)[0] for p, s in zip(prompts, seeds)]
    assert together == alone
    assert len({len(rollout.tokens) for rollout in together}) > 2
    assert all((rollout.tokens[-1] in stops) == (rollout.finish == "stop") for rollout in together)


def test_counts_leave_out_padding_and_finished_rows(model):
    counter = Counter()
    rollouts = sample(model, PROMPTS, list(range(len(PROMPTS))), counter=counter)
    assert counter.tokens_generated == sum(len(r.tokens) for r in rollouts)
    assert counter.tokens_forwarded == sum(len(p) + len(r.tokens) - 1 for p, r in zip(PROMPTS, rollouts))
    assert Counter(1, 10, 5).cost(100)["flops"] == 100 * (2 * 10 + 4 * 5)


def test_inverse_cdf():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]])
    probabilities = torch.softmax(logits[0], 0)
    edges = probabilities.double().cumsum(0)
    at = lambda u: choose(logits, 1.0, torch.tensor([u], dtype=torch.float64)).item()  # noqa: E731
    assert at(0.0) == 0 and at(edges[0].item() - 1e-6) == 0
    assert at(edges[0].item() + 1e-6) == 1 and at(edges[1].item() + 1e-6) == 3  # 2 has probability 0
    assert at(1 - 2**-53) == 3
    many = uniforms([5], 20_000)[0]
    drawn = choose(logits.expand(20_000, 4), 1.0, many)
    assert torch.allclose(torch.bincount(drawn, minlength=4) / 20_000, probabilities, atol=0.015)


def test_seeds_are_fixed_for_ever():
    """Golden values: another seed or generator would silently resample every published rollout."""
    assert example_seed(0, 3, "abc") == 14566550199709518682
    assert example_seed(7, 0, "") == 16726408200336966274
    numbers = uniforms([14566550199709518682, 7], 3)
    assert numbers.tolist() == [
        [0.19457924336265053, 0.9806351869040417, 0.42548928326308044],
        [0.8720734548204873, 0.29536538151378355, 0.4200976785072422],
    ]
    logits = torch.tensor([0.5, 0.0, 1.0, -1.0])
    assert [choose(logits.expand(2, 4), 1.0, numbers[:, i]).tolist() for i in range(3)] == [[0, 2], [3, 1], [1, 1]]
    assert len({example_seed(s, t, i) for s in range(3) for t in range(3) for i in "ab"}) == 18
    assert uniforms([7], 4).equal(uniforms([7], 9)[:, :4])  # a longer room moves no earlier number
    assert uniforms([1, 7], 4)[1].equal(uniforms([7], 4)[0])


def test_training_mode_is_restored(model):
    model.train()
    sample(model, PROMPTS[:1], [0])
    assert model.training
    model.eval()


def test_what_does_not_fit_is_an_error(model):
    with pytest.raises(UserError, match="exceed the model's context of 32"):
        sample(model, [PROMPTS[0] * 5], [0])
    with pytest.raises(UserError, match="prompt 1 is empty"):
        sample(model, [PROMPTS[0], []], [0, 1])


def test_an_example_that_does_not_fit_is_named(model, data):
    tokenizer = new_tokenizer(VOCABULARY, "deployed")
    info, examples = load_info(data), load_examples(data, "val")
    with pytest.raises(UserError, match=examples[0]["id"]):
        respond(model, tokenizer, info, examples, max_new_tokens=30, batch_size=4)


def test_a_cut_wrong_response_is_called_truncated(model, data):
    tokenizer = new_tokenizer(VOCABULARY, "deployed")
    info, examples = load_info(data), load_examples(data, "val")
    responses = respond(model, tokenizer, info, examples, max_new_tokens=1, batch_size=4)
    counts = summary(responses)
    assert counts["n"] == 6 and sum(counts["finish"].values()) == 6
    assert counts["reasons"].get("truncated", 0) == counts["finish"].get("length", 0)


@pytest.mark.parametrize("shown", [False, True])
def test_stage_writes_equal_bytes(model, data, tmp_path, shown):
    save_model(model, new_tokenizer(VOCABULARY, "deployed"), tmp_path / "model")
    spec = {
        "split": "val",
        "with_demonstration": shown,
        "style": "own",
        "items": 4,
        "temperature": 1.0,
        "max_new_tokens": 6,
        "seed": 0,
        "batch_size": 3,
        "threads": 1,
    }
    jobs = [Job(tmp_path / name, spec, {"model": tmp_path / "model", "data": data}) for name in "ab"]
    for job in jobs:
        run(job)
    for name in ("rollouts.jsonl.gz", "summary.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    text = gzip.decompress((tmp_path / "a" / "rollouts.jsonl.gz").read_bytes()).decode()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["id"] for line in lines] == [e["id"] for e in load_examples(data, "val")[:4]]
    assert all(("<ex>" in line["prompt"]) == shown for line in lines)
    tokenizer = load_tokenizer(tmp_path / "model")
    assert lines[0]["text"] == tokenizer.decode(lines[0]["tokens"], skip_special_tokens=True)
    assert jobs[0].metrics["n"] == 4 and jobs[0].cost["flops"] > 0
