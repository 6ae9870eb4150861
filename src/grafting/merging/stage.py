"""Stage merge: write one selected graft out.

spec    {"recipe": {...}} (see recipe.py), "threads" (1 unless given: the rotations of a K-FAC mask
        round differently with other numbers of threads)
inputs  model, trained[] and donor[] (aligned), sensitivity_kfac?, sensitivity_diagonal?
payload a complete Hugging Face directory; recipe.yaml (the recipe and the ids of all inputs);
        mask.json when the recipe has a mask (what share of each tensor's update it removed)
"""

from __future__ import annotations

import json

import torch
import yaml

from grafting.merging.materialise import materialise
from grafting.merging.recipe import Recipe
from grafting.merging.sweep import Sweep


def run(job) -> None:
    """Run one job; see the module's docstring."""
    recipe = Recipe.parse(job.spec["recipe"])
    torch.set_num_threads(job.spec.get("threads", 1))
    sweep = Sweep.of_job(job)
    progress = job.progress(len(sweep.model.names), "merge", unit="tensor")
    with job.phase("merge"):
        materialise(sweep, recipe, job.out, progress)
    progress.close()
    job.metrics["tensors"] = len(sweep.model.names)
    described = {"recipe": recipe.model_dump(mode="json"), "inputs": job.input_keys}
    (job.out / "recipe.yaml").write_text(yaml.safe_dump(described, sort_keys=True))
    if recipe.mask is not None:
        reports = sweep.mask_report(recipe)
        (job.out / "mask.json").write_text(json.dumps(reports, indent=1, sort_keys=True) + "\n")
        job.metrics["mask_removed"] = sum(report["removed"] for report in reports) / len(reports)
