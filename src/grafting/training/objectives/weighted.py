"""Supervised fine-tuning in which every token has a weight of its own; no gradient flows through the weights.

dft        w_t = pi_theta(y*_t)                       (dynamic fine-tuning, arXiv 2508.05629)
gated_sft  w_t = sigmoid((threshold - s_t) / width)   with the surprisal s_t = -log pi_theta(y*_t) in nats

The gate is our reading of surprisal-gated imitation (Pedagogical RL): tokens that are too surprising to the
student are weighted down. Both divide by the number of completion tokens, not by the sum of the weights, so a
batch that is too surprising as a whole moves the model less.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from grafting.training.objectives.base import Setup
from grafting.training.objectives.supervised import Supervised


def dft_weights(surprisal: torch.Tensor) -> torch.Tensor:
    """pi(y*_t) from surprisals [n] in nats."""
    return torch.exp(-surprisal)


def gate(surprisal: torch.Tensor, threshold: float, width: float) -> torch.Tensor:
    """sigmoid((threshold - s) / width) from surprisals [n] in nats: 1 for the expected, 0 for the surprising."""
    return torch.sigmoid((threshold - surprisal) / width)


class Dft(Supervised):
    """Every token weighted by its own probability."""

    def combine(self, logits, labels):
        """Sum of stop_grad(pi(y*_t)) * -log pi(y*_t)."""
        surprisal = F.cross_entropy(logits, labels, reduction="none")
        return (dft_weights(surprisal.detach()) * surprisal).sum()


class GatedSft(Supervised):
    """Every token weighted by a gate on its surprisal. options: threshold, width (both in nats)."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.threshold, self.width = setup.options["threshold"], setup.options["width"]

    def combine(self, logits, labels):
        """Sum of stop_grad(gate(s_t)) * s_t."""
        surprisal = F.cross_entropy(logits, labels, reduction="none")
        return (gate(surprisal.detach(), self.threshold, self.width) * surprisal).sum()
