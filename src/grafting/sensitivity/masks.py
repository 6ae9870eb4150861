"""Masks: removing from an update what the deployed model is most sensitive to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file
from torch import Tensor

from grafting.errors import UserError
from grafting.sensitivity.ranking import largest


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
    Equal scores: the first by tensor name, then by index. Raises UserError for a missing or unfitting
    sensitivity, naming the tensor.
    """
    mask = parse_mask(mask)
    if mask.fraction == 0:
        return update
    if mask.fraction == 1:
        return {name: torch.zeros_like(tensor) for name, tensor in update.items()}
    if mask.estimator == "diagonal" and mask.rank == "random":
        return _diagonal(update, mask, {})
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
    if mask.rank != "random":
        for name in names:
            _expect(fisher.get(name), name, update[name].shape, "diagonal.safetensors")
    scores = torch.cat([_scores(mask, name, update[name], fisher.get(name)).reshape(-1) for name in names])
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
        scores[module] = _scores(mask, module, rotated[module], products)
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


def _scores(mask: Mask, name: str, delta: Tensor, fisher: Tensor | None) -> Tensor:
    """What the directions of one tensor or layer are ranked by: float64, the shape of `delta`."""
    if mask.rank == "random":
        key = int.from_bytes(hashlib.sha256(f"{mask.seed}|{name}".encode()).digest()[:16], "little")
        draws = np.random.Generator(np.random.Philox(key=key)).random(tuple(delta.shape))
        return torch.from_numpy(draws)
    return fisher.double() * delta.double() ** 2 if mask.rank == "fisher_delta2" else fisher.double()


def _expect(tensor: Tensor | None, name: str, shape, file: str) -> None:
    if tensor is None:
        raise UserError(f"{file} has no tensor {name}: the sensitivity belongs to another model")
    if tuple(tensor.shape) != tuple(shape):
        raise UserError(
            f"{file}: {name} has shape {tuple(tensor.shape)}, the update needs {tuple(shape)}: "
            "the sensitivity belongs to another model"
        )
