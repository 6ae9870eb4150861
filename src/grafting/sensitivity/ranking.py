"""Choosing the largest entries, always exactly as many as asked, always the same ones."""

from __future__ import annotations

import torch
from torch import Tensor


def largest(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` largest entries: bool, shape of `scores`, exactly `count` true.

    Equal scores are a fact of life here (many Fisher values are exactly zero), and `torch.topk` leaves
    open which of them it returns. So the threshold is a value (`kthvalue`), and among entries equal to
    it those with the smallest index are taken.
    """
    if not 0 <= count <= scores.numel():
        raise ValueError(f"cannot mark {count} of {scores.numel()} entries")
    flat = scores.reshape(-1)
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = torch.kthvalue(flat, flat.numel() - count + 1).values
    chosen = flat > threshold
    ties = torch.nonzero(flat == threshold)[:, 0]
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen.reshape(scores.shape)
