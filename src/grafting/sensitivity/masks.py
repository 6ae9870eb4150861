"""Masks: removing from an update what the deployed model is most sensitive to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.torch import load_file
from torch import Tensor

from grafting.errors import UserError
from grafting.sensitivity.ranking import largest


class Mask(BaseModel):
    """What is removed from an update: a fraction rho of directions, ranked over the whole model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    estimator: Literal["diagonal", "kfac", "random"]
    rank: Literal["fisher", "fisher_delta2", "random"]  # by F, or by F * (update in that direction)^2
    fraction: float = Field(ge=0, le=1)  # rho
    seed: int = 0  # of the random mask

    @model_validator(mode="after")
    def _pairs(self):
        if (self.estimator == "random") != (self.rank == "random"):
            raise ValueError("rank 'random' belongs to estimator 'random' and to no other")
        return self


def apply_mask(update: dict[str, Tensor], mask: Mask | Mapping, sensitivity: Mapping[str, Path]) -> dict[str, Tensor]:
    """The update without its most sensitive directions; the same names, shapes and dtypes.

    `update`: tensor name -> float32 or float64; `sensitivity`: estimator -> payload folder (or file) of
    the stage sensitivity of the deployed model. All arithmetic is float64.
    * fraction 0 returns `update` itself; fraction 1 is zero everywhere, for every estimator, so that the
      graft is the deployed model exactly.
    * diagonal: of all n coordinates of the model, the round(rho n) largest by F or F * delta^2 become 0.
    * kfac: per linear layer the update is rotated, R = U_G^T dW U_A; of all products lambda_G lambda_A^T
      over all layers (times R^2 for fisher_delta2) the round(rho n) largest lose their entry of R
      (n = number of linear weights). Embeddings, the output head, norms and biases have no factors and
      keep their update for every fraction below 1.
    * random: in every tensor of n coordinates, round(rho n) become 0, drawn by (seed, tensor name).
    Equal scores: the first by tensor name, then by index. Raises UserError for a missing or unfitting
    sensitivity, naming the tensor.
    """
    mask = parse_mask(mask)
    if mask.fraction == 0:
        return update
    if mask.fraction == 1:
        return {name: torch.zeros_like(tensor) for name, tensor in update.items()}
    if mask.estimator == "random":
        return {name: _random(name, tensor, mask) for name, tensor in update.items()}
    if mask.estimator not in sensitivity:
        raise UserError(
            f"a mask with estimator '{mask.estimator}' needs the input "
            f"sensitivity_{mask.estimator} and this job has "
            f"{sorted(sensitivity) or 'none'}: add it to the job's inputs"
        )
    estimates = _read(Path(sensitivity[mask.estimator]), mask.estimator)
    return (_diagonal if mask.estimator == "diagonal" else _kfac)(update, mask, estimates)


def mask_report(update: Mapping[str, Tensor], masked: Mapping[str, Tensor]) -> dict:
    """Share of the update's squared norm that a mask removed: {"removed", "norm", "tensors": {name: share}}.

    `norm` is the unmasked update's norm; a tensor without an update has share 0.
    """
    whole = {name: float((u.double() ** 2).sum()) for name, u in update.items()}
    gone = {name: float(((u.double() - masked[name].double()) ** 2).sum()) for name, u in update.items()}
    total = math.fsum(whole.values())

    def share(part: float, of: float) -> float:
        return part / of if of else 0.0

    return {
        "removed": share(math.fsum(gone.values()), total),
        "norm": math.sqrt(total),
        "tensors": {name: share(gone[name], whole[name]) for name in sorted(update)},
    }


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


def _read(path: Path, estimator: str) -> dict[str, Tensor]:
    file = path / f"{estimator}.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"no {estimator}.safetensors in {path.name}: give the payload of a sensitivity job "
            f"with estimator '{estimator}'"
        )
    return load_file(file)


def _diagonal(update: dict[str, Tensor], mask: Mask, fisher: dict[str, Tensor]) -> dict[str, Tensor]:
    names = sorted(update)
    for name in names:
        _expect(fisher.get(name), name, update[name].shape, "diagonal.safetensors")
    scores = torch.cat([_scores(fisher[name].double(), update[name], mask.rank).reshape(-1) for name in names])
    gone = largest(scores, round(mask.fraction * scores.numel()))
    parts = gone.split([update[name].numel() for name in names])
    return {name: update[name].masked_fill(part.view(update[name].shape), 0) for name, part in zip(names, parts)}


def _kfac(update: dict[str, Tensor], mask: Mask, bases: dict[str, Tensor]) -> dict[str, Tensor]:
    modules = sorted(name.removesuffix(".A.values") for name in bases if name.endswith(".A.values"))
    rotated, scores = {}, {}
    for module in modules:
        name = f"{module}.weight"
        if name not in update:
            raise UserError(
                f"kfac.safetensors has factors of {module} and the update has no tensor {name}: "
                "the sensitivity belongs to another model"
            )
        out_features, in_features = update[name].shape
        for letter, size in (("G", out_features), ("A", in_features)):
            _expect(
                bases.get(f"{module}.{letter}.vectors"), f"{module}.{letter}.vectors", (size, size), "kfac.safetensors"
            )
            _expect(bases.get(f"{module}.{letter}.values"), f"{module}.{letter}.values", (size,), "kfac.safetensors")
        rotated[module] = (
            bases[f"{module}.G.vectors"].double().T @ update[name].double() @ bases[f"{module}.A.vectors"].double()
        )
        products = torch.outer(bases[f"{module}.G.values"].double(), bases[f"{module}.A.values"].double())
        scores[module] = _scores(products, rotated[module], mask.rank)
    flat = torch.cat([scores[module].reshape(-1) for module in modules])
    gone = largest(flat, round(mask.fraction * flat.numel()))
    result = dict(update)
    for module, part in zip(modules, gone.split([scores[module].numel() for module in modules])):
        if part.any():
            # dW - U_G ((1 - M) * R) U_A^T = U_G (M * R) U_A^T, and a layer that loses nothing keeps its bits
            lost = rotated[module] * part.view(rotated[module].shape)
            removed = bases[f"{module}.G.vectors"].double() @ lost @ bases[f"{module}.A.vectors"].double().T
            weight = update[f"{module}.weight"]
            result[f"{module}.weight"] = (weight.double() - removed).to(weight.dtype)
    return result


def _random(name: str, tensor: Tensor, mask: Mask) -> Tensor:
    key = int.from_bytes(hashlib.sha256(f"{mask.seed}|{name}".encode()).digest()[:16], "little")
    draws = np.random.Generator(np.random.Philox(key=key)).random(tensor.numel())
    gone = largest(torch.from_numpy(draws), round(mask.fraction * tensor.numel()))
    return tensor.masked_fill(gone.view(tensor.shape).to(tensor.device), 0)


def _scores(fisher: Tensor, delta: Tensor, rank: str) -> Tensor:
    return fisher * delta.double() ** 2 if rank == "fisher_delta2" else fisher


def _expect(tensor: Tensor | None, name: str, shape, file: str) -> None:
    if tensor is None:
        raise UserError(f"{file} has no tensor {name}: the sensitivity belongs to another model")
    if tuple(tensor.shape) != tuple(shape):
        raise UserError(
            f"{file}: {name} has shape {tuple(tensor.shape)}, the update needs {tuple(shape)}: "
            "the sensitivity belongs to another model"
        )
