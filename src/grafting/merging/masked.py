"""Masks in the streaming engine: thresholds from a first pass, then every chunk or layer by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from grafting.merging.engine import Job, Merge, Scratch, Stream
from grafting.merging.engine import Masking as Function
from grafting.merging.mergefile import MergeFile
from grafting.models.numerics import FORMATS
from grafting.models.safefiles import Checkpoint
from grafting.sensitivity.masking import Masking


def maskings(recipe: MergeFile, merge: Merge, reference: Checkpoint, root: Path) -> list[Function]:
    """One function per donor that masks a chunk of its delta; thresholds are found here, in a pass of their own."""
    mask = recipe.mask
    shapes = {name: stored.shape for name, stored in reference.tensors.items()}
    path = None if mask.sensitivity is None else root / mask.sensitivity
    functions = []
    for i in range(len(merge.donors)):

        def deltas(name: str, step: int, i=i) -> Iterator[tuple[int, np.ndarray]]:
            form = reference.tensors[name].form
            form = FORMATS["F32"] if form.wide == np.float64 else form
            job = Job(name, form, shapes[name], {}, {}, 1.0)
            for start, _, (delta,) in Stream(merge, job, Scratch()).chunks([i], step=step):
                yield start, delta

        masking = Masking(mask, shapes, deltas, path)
        masking.prepare([mask.fraction])
        functions.append(_by_layer(masking, mask.fraction) if mask.estimator == "kfac" else _by_chunk(masking, mask))
    return functions


def _by_chunk(masking: Masking, mask) -> Function:
    return lambda name, start, delta: masking.coordinates(name, start, delta, mask.fraction)


def _by_layer(masking: Masking, fraction: float) -> Function:
    """The masked delta of a whole weight is formed at its first chunk and kept for the next ones, per thread."""
    local = threading.local()

    def masked(name: str, start: int, delta: np.ndarray) -> np.ndarray:
        if name not in masking.ranked_names:
            return delta
        if getattr(local, "name", None) != name:
            local.name, local.weight = name, masking.weight(name, masking.whole(name), fraction).reshape(-1)
        np.copyto(delta, local.weight[start : start + len(delta)], casting="same_kind")
        return delta

    return masked
