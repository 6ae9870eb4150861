"""Masks: removing from an update what the deployed model is most sensitive to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer
from torch import Tensor

from grafting.errors import UserError
from grafting.sensitivity.masking import Masking

_CHUNK = 1 << 20


class Mask(BaseModel):
    """What is removed from an update: a fraction rho of directions, ranked over the whole model.

    The estimator says which directions there are (coordinates, or the K-FAC eigenbasis of each linear
    weight), the rank which of them go: by F, by F * (update in that direction)^2, or at random, the
    control of either estimator.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    estimator: Literal["kfac", "diagonal"]
    rank: Literal["fisher", "fisher_delta2", "random"]
    fraction: float = Field(ge=0, le=1)  # rho
    seed: int = 0  # of rank random
    per: Literal["model", "tensor"] = "model"  # what the fraction is a fraction of

    @model_serializer(mode="wrap")
    def _without_default(self, dump):
        """A mask per model, the only kind there was at first, is described as it was then."""
        return {key: value for key, value in dump(self).items() if (key, value) != ("per", "model")}


def apply_mask(update: dict[str, Tensor], mask: Mask | Mapping, sensitivity: Mapping[str, Path]) -> dict[str, Tensor]:
    """The update without the directions that the mask ranks first; the same names, shapes and dtypes.

    `update`: tensor name -> float32 or float64; `sensitivity`: estimator -> payload folder (or file) of
    the stage sensitivity of the deployed model. All arithmetic is float64.
    * fraction 0 returns `update` itself; fraction 1 is zero everywhere, for every estimator, so that the
      graft is the deployed model exactly.
    * diagonal: of all n coordinates of the model, the round(rho n) largest by F or F * delta^2 become 0.
    * kfac: per linear layer the update is rotated, R = U_G^T dW U_A; of all products lambda_G lambda_A^T
      over all layers (times R^2 for fisher_delta2) the round(rho n) largest lose their entry of R
      (n = number of linear weights). Embeddings, the output head, norms and biases have no factors and
      keep their update for every fraction below 1.
    * rank random: the same numbers of the same kinds of directions over the whole model, those with the
      largest of uniform scores drawn by (seed, tensor or layer name). With diagonal it needs no sensitivity;
      with kfac it needs the eigenbases.
    Equal scores: the first by tensor name, then by index. With `per: tensor`, rho and n are those of each tensor
    (or layer), ranked by itself. Raises UserError for a missing or unfitting
    sensitivity, naming the tensor.
    """
    mask = parse_mask(mask)
    if mask.fraction == 0:
        return update
    if mask.fraction == 1:
        return {name: torch.zeros_like(tensor) for name, tensor in update.items()}
    return _applied(update, mask, sensitivity_of(mask, sensitivity))


def sensitivity_of(mask: Mask, sensitivity: Mapping[str, Path]) -> Path | None:
    """The payload that a mask reads, None if it reads none. UserError if it is not among the inputs."""
    if mask.estimator == "diagonal" and mask.rank == "random":
        return None
    if mask.estimator not in sensitivity:
        raise UserError(
            f"a mask with estimator '{mask.estimator}' needs the input "
            f"sensitivity_{mask.estimator} and this job has "
            f"{sorted(sensitivity) or 'none'}: add it to the job's inputs"
        )
    return Path(sensitivity[mask.estimator])


def mask_report(
    update: Mapping[str, Tensor],
    masked: Mapping[str, Tensor],
    mask: Mask | None = None,
    sensitivity: Mapping[str, Path] | None = None,
) -> dict:
    """What a mask removes of an update: {"removed", "norm", "tensors": {name: share}}, and the estimated loss.

    Shares are of the squared norm; `norm` is the unmasked update's norm; a tensor without an update has share
    0. With a mask that reads a sensitivity there is also "loss": {"whole", "removed", "tensors"}: the loss that
    the update costs on the retention data by the quadratic estimate 1/2 d^T F d (whole), the share of it that
    the mask removes, and that share per tensor the estimate covers (all, or the linear weights of K-FAC).
    """
    whole = {name: float((u.double() ** 2).sum()) for name, u in update.items()}
    gone = {name: float(((u.double() - masked[name].double()) ** 2).sum()) for name, u in update.items()}
    total = math.fsum(whole.values())

    def share(part: float, of: float) -> float:
        return part / of if of else 0.0

    report = {
        "removed": share(math.fsum(gone.values()), total),
        "norm": math.sqrt(total),
        "tensors": {name: share(gone[name], whole[name]) for name in sorted(update)},
    }
    if mask is not None and (path := sensitivity_of(mask, sensitivity or {})) is not None:
        before, after = (estimated_loss(deltas, mask, path) for deltas in (update, masked))
        costs = math.fsum(before.values())
        report["loss"] = {
            "whole": costs,
            "removed": share(costs - math.fsum(after.values()), costs),
            "tensors": {name: share(before[name] - after[name], before[name]) for name in sorted(before)},
        }
    return report


def estimated_loss(update: Mapping[str, Tensor], mask: Mask, sensitivity: Path) -> dict[str, float]:
    """1/2 d^T F d per tensor: sum F_i d_i^2 / 2, or for K-FAC sum lambda_G lambda_A R^2 / 2 per linear weight."""
    masking = _masking(update, mask, sensitivity)
    losses = {}
    for name in masking.ranked:
        delta = update[name].detach().double().numpy()
        if mask.estimator == "kfac":
            squares = np.square(masking.rotate(name, delta))
            losses[name] = float(masking.layer(name, "G", "values") @ squares @ masking.layer(name, "A", "values")) / 2
        else:
            losses[name] = float((masking.fisher(name) * np.square(delta)).sum()) / 2
    return losses


def parse_mask(mask: Mask | Mapping) -> Mask:
    """Validate a mask. UserError says which key is wrong."""
    if isinstance(mask, Mask):
        return mask
    try:
        return Mask.model_validate(dict(mask))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"recipe.mask{''.join(f'.{p}' for p in first['loc'])}: {first['msg']} (got {first['input']!r})"
        ) from None


def _masking(update: Mapping[str, Tensor], mask: Mask, sensitivity: Path | None) -> Masking:
    flat = {name: tensor.detach().contiguous().reshape(-1).numpy() for name, tensor in update.items()}

    def deltas(name: str, step: int):
        for start in range(0, len(flat[name]), _CHUNK):
            yield start, flat[name][start : start + _CHUNK : step]

    return Masking(mask, {name: tuple(u.shape) for name, u in update.items()}, deltas, sensitivity)


def _applied(update: dict[str, Tensor], mask: Mask, sensitivity: Path | None) -> dict[str, Tensor]:
    masking, result = _masking(update, mask, sensitivity), dict(update)
    for name in masking.ranked:
        delta = update[name].detach().contiguous().numpy()
        if mask.estimator == "kfac":
            masked = masking.weight(name, delta, mask.fraction)
            if masked is not delta:
                result[name] = torch.from_numpy(masked)
            continue
        whole = delta.reshape(-1).copy()
        for start in range(0, len(whole), _CHUNK):
            masking.coordinates(name, start, whole[start : start + _CHUNK], mask.fraction)
        result[name] = torch.from_numpy(whole).view(update[name].shape)
    return result
