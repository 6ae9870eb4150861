"""The backend `continuous` against `native`: the same tokens, but where two tokens are nearly tied."""

import pytest
import torch
from test_rollouts import PROMPTS, model, sample  # noqa: F401  (fixture)

from grafting.rollouts import generate
from grafting.rollouts.counting import Counter
from grafting.tasks.tiny_language import ID, VOCABULARY

TIE = 1e-5  # in probability: float32 logits that were summed in another order differ by about 1e-6


def differences(native: list, continuous: list) -> list[tuple[int, int, float]]:
    """(prompt, position, native margin) where the responses part; what follows a parting is not compared."""
    found = []
    for i, (one, other) in enumerate(zip(native, continuous, strict=True)):
        parting = next((t for t, (a, b) in enumerate(zip(one.tokens, other.tokens)) if a != b), None)
        if parting is not None:
            found.append((i, parting, one.margins[parting]))
        else:
            assert len(one.tokens) == len(other.tokens) and one.finish == other.finish
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_same_tokens(model, temperature, capsys):
    prompts, seeds = PROMPTS * 8, list(range(len(PROMPTS) * 8))
    stops = set(range(0, len(VOCABULARY), 3))  # so that responses end at different steps
    both = [
        sample(model, prompts, seeds, batch_size=size, temperature=temperature, stop_ids=stops, detail=True,
               backend=backend)
        for backend, size in (("native", 40), ("continuous", 16))
    ]  # fmt: skip
    ties = sum(margin < TIE for rollout in both[0] for margin in rollout.margins)
    tokens = sum(len(rollout.tokens) for rollout in both[0])
    parted = differences(*both)
    with capsys.disabled():
        print(f"\ntemperature {temperature}: {tokens} tokens, {ties} near-ties, partings {parted}")
    assert all(margin < TIE for _, _, margin in parted)
    assert temperature == 0 or len({len(rollout.tokens) for rollout in both[0]}) > 2
    for one, other in zip(*both):
        if one.tokens == other.tokens:
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_a_real_context_and_several_pages(model):
    """Prompts longer than a page of the cache, few at a time."""
    prompts = [(PROMPTS[0] * 9)[: 20 + i] for i in range(6)]
    both = [
        generate(model, prompts, max_new_tokens=6, stop_ids={ID["<eos>"]}, pad_id=0, temperature=1.0,
                 seeds=list(range(6)), batch_size=2, detail=True, backend=backend)
        for backend in ("native", "continuous")
    ]  # fmt: skip
    assert differences(*both) == []


def test_it_leaves_the_model_as_it_was_and_counts_alike(model):
    model.train()
    attention, counters = model.config._attn_implementation, [Counter(), Counter()]
    for backend, counter in zip(("native", "continuous"), counters):
        sample(model, PROMPTS, list(range(len(PROMPTS))), counter=counter, backend=backend)
    assert counters[0] == counters[1]
    assert model.training and model.config._attn_implementation == attention
    model.eval()
    with torch.no_grad():
        before = model(input_ids=torch.tensor([PROMPTS[0]])).logits
    sample(model, PROMPTS, list(range(len(PROMPTS))), backend="continuous")
    with torch.no_grad():
        assert model(input_ids=torch.tensor([PROMPTS[0]])).logits.equal(before)


def test_live_weights_are_used(model):
    """Nothing is kept from one call to the next: other weights, other tokens, the same as native's."""
    seeds = list(range(len(PROMPTS)))
    first = sample(model, PROMPTS, seeds, backend="continuous")
    weight = model.get_input_embeddings().weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(-1.5)
        second = sample(model, PROMPTS, seeds, backend="continuous")
        assert second != first and second == sample(model, PROMPTS, seeds)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
