"""Writing a graft out as an ordinary, complete Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from grafting.merging.publishing import copy_companions
from grafting.merging.recipe import Recipe
from grafting.merging.sweep import Sweep
from grafting.models.safefiles import INDEX


def materialise(sweep: Sweep, recipe: Recipe | Mapping, out: Path, progress=None) -> None:
    """Write the graft to `out`: weights in the deployed model's dtypes and shards, and its companions.

    Tied weights are written once. The bytes depend only on the inputs' contents and the recipe.
    """
    out.mkdir(parents=True, exist_ok=True)
    copy_companions(sweep.model.path, out)
    size, weight_map = 0, {}
    for file, names in sorted(sweep.model.files.items()):
        tensors = {}
        for name, tensor in sweep.tensors(recipe, names):
            tensors[name] = tensor.contiguous()
            size += tensor.nbytes
            weight_map[name] = file
            if progress is not None:
                progress.update(1)
        save_file(tensors, out / file, metadata={"format": "pt"})
    if len(sweep.model.files) > 1 or (sweep.model.path / INDEX).is_file():
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
