"""Log-likelihoods of options: shared work gives what one forward pass per pair gives; pass@k by hand."""

import itertools
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grafting.evaluation import options
from grafting.evaluation.samples import add_pass_at_k, pass_at_k
from grafting.models import lean
from grafting.rollouts.sampling import choose

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "lean", "qwen2", "sliding"])
def model(request):
    torch.manual_seed(0)
    if request.param == "lean":  # a vocabulary from which on our own pass is taken
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": lean.SMALL + 8}, attn_implementation="sdpa"))
        assert lean.applies(model.eval())
        return model
    if request.param == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="sdpa")).eval()
    window = (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1} if request.param == "sliding" else {}
    )
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, attn_implementation="sdpa", **window)).eval()


def one_by_one(model, requests):
    found = []
    for context, continuation in requests:
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *continuation]])).logits[0].float()
        lines = logits[len(context) - 1 : -1].log_softmax(-1)
        value = lines[range(len(continuation)), continuation].sum()
        found.append((float(value), bool((lines.argmax(-1) == torch.tensor(continuation)).all())))
    return found


def some_requests(seed: int, lengths) -> list:
    rng = random.Random(seed)
    draw = lambda n: [rng.randrange(97) for _ in range(n)]  # noqa: E731
    heads = [draw(20), draw(40), []]
    requests = []
    for i in range(14):
        context = heads[i % 3] + draw(3 + i)
        requests += [(context, draw(rng.choice(lengths))) for _ in range(4)]
    rng.shuffle(requests)
    return requests


@pytest.mark.parametrize("lengths", [[1], [1, 2, 5]])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_equal_to_one_pass_per_pair(model, lengths, batch_size):
    requests = some_requests(1, lengths)
    requests[0] = (requests[0][0], requests[1][1])
    found = options.option_loglikelihoods(model, requests, batch_size, 0)
    for (value, greedy), (wanted, wanted_greedy) in zip(found, one_by_one(model, requests), strict=True):
        assert value == pytest.approx(wanted, abs=1e-4) and greedy == wanted_greedy


def test_greedy_continuation_is_noticed(model):
    context = [5, 6, 7]
    with torch.no_grad():
        best = int(model(torch.tensor([context])).logits[0, -1].argmax())
    found = options.option_loglikelihoods(model, [(context, [best]), (context, [(best + 1) % 97])], 8, 0)
    assert [greedy for _, greedy in found] == [True, False]


def test_a_sliding_window_is_not_widened(model):
    assert options.attends_fully(model) is (model.config.model_type == "llama" or not model.config.use_sliding_window)


def test_shared_beginnings_are_computed_once(model):
    """Tokens that go through the model: less than a third of what single pairs would cost."""
    if not options.attends_fully(model):
        pytest.skip("nothing is shared under a sliding window")
    head = list(range(60))
    requests = [([*head, i, i + 1], [j]) for i in range(10) for j in range(4)]
    seen = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, given, out: seen.append(given[0].numel()))
    options.option_loglikelihoods(model, requests, 8, 0)
    hook.remove()
    assert sum(seen) <= 60 + 10 * 3 < sum(len(c) + 1 for c, _ in requests) / 3


def test_batches_are_cut_where_padding_is_dear():
    lengths = [10, 10, 12, 60, 61, 61, 61]
    assert [list(b) for b in options.batches(lengths, 3, False)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [list(b) for b in options.batches(lengths, 8, True)] == [[0, 1, 2], [3, 4, 5, 6]]
    assert options.batches([], 8, True) == []


# ---- sampling ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 4), (5, 3, 3), (8, 1, 8)])
def test_pass_at_k_counts_the_draws(n, c, k):
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_of_a_score():
    rows = [{"task": "t", "id": i, "correct": right} for i, s in (("a", [1, 0]), ("b", [0, 0])) for right in s]
    scores = [{"suite": "new", "task": "t"}, {"suite": "prior", "task": "t"}]
    add_pass_at_k(scores, rows, {"n": 2, "k": [1, 2], "temperature": 1.0, "top_p": 0.95})
    assert scores[0]["samples"] == {"n": 2, "temperature": 1.0, "top_p": 0.95, "pass@1": 0.25, "pass@2": 0.5}
    assert "samples" not in scores[1]


def test_nucleus_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    grid = torch.linspace(0.001, 0.999, 500, dtype=torch.float64)
    drawn = choose(logits.expand(500, 4), 1.0, grid, top_p=0.79)
    assert set(drawn.tolist()) == {0, 1}  # .5 + .3 reach it
    assert float((drawn == 0).float().mean()) == pytest.approx(0.625, abs=0.01)
    assert set(choose(logits.expand(500, 4), 1.0, grid, top_p=0.81).tolist()) == {0, 1, 2}
    assert set(choose(logits.expand(500, 4), 1.0, grid).tolist()) == {0, 1, 2, 3}
