"""From logits to tokens, so that a token depends on its own example only.

Inverse-CDF sampling with one uniform number per (example seed, position), drawn from a counter-based
generator: neither the batch size nor the order of the examples can change what an example gets.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def example_seed(seed: int, step: int, example_id: str) -> int:
    """Seed of one example's rollout at one step: 64 bits of a SHA-256, equal on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{example_id}".encode()).digest()[:8], "big")


def uniforms(seeds: list[int], length: int) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64 [len(seeds), length]; row i depends on seeds[i] only."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(length) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def choose(logits: torch.Tensor, temperature: float, uniform: torch.Tensor | None, top_p: float = 1.0) -> torch.Tensor:
    """Next tokens [n] from logits [n, V]; greedy at temperature 0, else by `uniform` [n].

    The softmax is taken in float32 and summed up in float64. A token of probability 0 is never chosen. top_p below
    1: only the fewest tokens whose probabilities reach it (nucleus sampling, Holtzman et al. 2020).
    """
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.float() / temperature, -1).double()
    if top_p < 1:
        ordered, places = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        probabilities = torch.zeros_like(ordered).scatter(-1, places, ordered.masked_fill(before >= top_p, 0.0))
    cumulative = probabilities.cumsum(-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def details(
    logits: torch.Tensor, temperature: float, uniform: torch.Tensor | None, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [n] of the chosen tokens, and by which margin [n] they were chosen, in probability.

    Sampled: the distance from the uniform number to the nearer edge of the token's interval. Greedy: the distance
    from the second likeliest token. Where the margin is of the size of rounding errors, two correct computations
    may choose different tokens.
    """
    logs = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
    logprobs = logs.gather(-1, chosen[:, None])[:, 0]
    if temperature == 0:
        best = logs.exp().topk(2, -1).values
        return logprobs, best[:, 0] - best[:, 1]
    cumulative = torch.softmax(logits.float() / temperature, -1).double().cumsum(-1)
    point = uniform * cumulative[:, -1]
    upper = cumulative.gather(-1, chosen[:, None])[:, 0]
    lower = torch.where(chosen > 0, cumulative.gather(-1, (chosen - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    return logprobs, torch.minimum(upper - point, point - lower)
