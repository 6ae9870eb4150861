"""How several updates of one tensor become one. Pure functions on tensors.

Every operator takes updates delta_i = theta_i - donor_i of one shape and one floating dtype, wide already
(float64, or float32 for 16-bit models), and returns a tensor of that shape and dtype. Sums run in the
order of the list: floating-point addition does not associate, so a caller who wants a result that does
not depend on the order of the donors sorts them first (merging.sweep does, by content).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grafting.sensitivity.ranking import largest

OPERATORS = ("graft", "sum", "ties")


def combine(operator: str, updates: Sequence[Tensor], density: float | None = None) -> Tensor:
    """The combined update of one tensor: `graft` (exactly one update), `sum`, or `ties` with a density."""
    if operator == "graft":
        (update,) = updates
        return update
    if operator == "sum":
        return task_arithmetic(updates)
    if operator == "ties":
        return ties(updates, density)
    raise ValueError(f"operator '{operator}' is not one of {OPERATORS}")


def task_arithmetic(updates: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """sum_i w_i delta_i, w_i = 1 unless given (Ilharco et al. 2023, "Editing Models with Task Arithmetic").

    With one update: the graft itself.
    """
    weights = [1.0] * len(updates) if weights is None else weights
    total = updates[0] * weights[0]
    for update, weight in zip(updates[1:], weights[1:], strict=True):
        total = total + update * weight
    return total


def trim(update: Tensor, density: float) -> Tensor:
    """Keep the floor(density * n), at least 1, entries of largest magnitude; exactly so many.

    Among equal magnitudes those with the smallest index stay. Raises ValueError unless 0 < density <= 1.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density {density} is not in (0, 1]")
    if density == 1:
        return update
    kept = largest(update.abs(), max(1, int(density * update.numel())))
    return torch.where(kept, update, torch.zeros_like(update))


def ties(updates: Sequence[Tensor], density: float, weights: Sequence[float] | None = None) -> Tensor:
    """TIES: trim, elect sign, disjoint mean (Yadav et al. 2023, "TIES-Merging", algorithm 1).

    tau_i = trim(delta_i); s = sign(sum_i w_i tau_i) per coordinate; the result is the mean of those
    w_i tau_i whose sign is s, weighted by w_i: sum w_i tau_i / sum w_i over them, 0 where there is none.
    As in mergekit 0.1.5, a sum of exactly 0 elects +, and the trim is per tensor. w_i = 1 unless given.
    """
    weights = [1.0] * len(updates) if weights is None else weights
    trimmed = [trim(update, density) for update in updates]
    positive = task_arithmetic(trimmed, weights) >= 0
    total, mass = torch.zeros_like(updates[0]), torch.zeros_like(updates[0])
    for update, weight in zip(trimmed, weights, strict=True):
        agrees = torch.where(positive, update > 0, update < 0)
        total = total + torch.where(agrees, update * weight, 0)
        mass = mass + agrees.to(mass.dtype) * weight
    return total / torch.where(mass == 0, 1, mass)
