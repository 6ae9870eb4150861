"""Estimates of models larger than memory has room for: a group of layers at a time, straight to the file.

Every group costs a pass over the retention data. Labels are drawn by example, so all passes see the same ones,
and the file has the same bytes however many groups there are. Of a model of 7 B parameters the K-FAC factors
take 130 GB and its diagonal 28 GB; a group takes at most `BUDGET`, and the model what its 16 bits take
(upcasting.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from grafting.models.numerics import FORMATS
from grafting.models.safefiles import Planned, ShardFile
from grafting.sensitivity.diagonal import diagonal_fisher
from grafting.sensitivity.kfac import eigenbases, kfac_factors, linear_layers
from grafting.sensitivity.likelihood import Sequence
from grafting.sensitivity.upcasting import is_narrow

BUDGET = 4 << 30


def write_estimate(
    model, sequences: list[Sequence], estimator: str, path: Path, *, fisher: str, seed: int, progress=None,
    budget: int = BUDGET,
) -> dict[str, float]:  # fmt: skip
    """Write diagonal.safetensors or kfac.safetensors and return its traces.

    Traces: the Fisher block's of every parameter (diagonal), or of A (x) G of every linear layer (kfac).
    `progress` is told the examples of every pass (see `passes`); `budget`: bytes of one group's sums.
    """
    groups = list(_groups(_sizes(model, estimator), budget))
    file = ShardFile(path, _planned(model, estimator))
    traces = {}
    try:
        for group in groups:
            options = {"fisher": fisher, "seed": seed, "progress": progress, "only": frozenset(group)}
            if estimator == "diagonal":
                tensors = diagonal_fisher(model, sequences, **options)
                traces.update((name, float(values.double().sum())) for name, values in tensors.items())
            else:
                tensors = eigenbases(kfac_factors(model, sequences, **options))
                for name in group:
                    a, g = (float(tensors[f"{name}.{letter}.values"].double().sum()) for letter in "AG")
                    traces[name] = a * g
            for name in sorted(tensors):
                file.write(name, 0, np.ascontiguousarray(tensors[name].numpy()))
    finally:
        file.close()
    return traces


def passes(model, estimator: str, budget: int = BUDGET) -> int:
    """How often the retention data are gone through."""
    return len(list(_groups(_sizes(model, estimator), budget)))


def _sizes(model, estimator: str) -> dict[str, int]:
    """Bytes of the sums, and of what is made from them, per parameter or layer."""
    if estimator == "diagonal":
        # the sum, a gradient, and a weight that is widened for it
        return {name: (12 if is_narrow(p) else 8) * p.numel() for name, p in model.named_parameters()}
    return {n: 3 * 8 * (m.in_features**2 + m.out_features**2) for n, m in linear_layers(model).items()}


def _groups(sizes: dict[str, int], budget: int) -> Iterator[list[str]]:
    group: list[str] = []
    for name, size in sizes.items():
        if group and sum(sizes[other] for other in group) + size > budget:
            yield group
            group = []
        group.append(name)
    yield group


def _planned(model, estimator: str) -> list[Planned]:
    single = FORMATS["F32"]
    if estimator == "diagonal":
        return [Planned(name, single, tuple(p.shape)) for name, p in model.named_parameters()]
    planned = []
    for name, module in linear_layers(model).items():
        for letter, n in (("A", module.in_features), ("G", module.out_features)):
            planned += [Planned(f"{name}.{letter}.vectors", single, (n, n))]
            planned += [Planned(f"{name}.{letter}.values", single, (n,))]
    return planned
