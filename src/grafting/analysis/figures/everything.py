"""All figures of a report: names, titles for readers, and the writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from grafting.analysis.collect import Study
from grafting.analysis.figures import frontier, sequences, sweeps, training, updates
from grafting.analysis.figures.style import RC, save

#: file name -> (title, what it shows); in the order of the report
FIGURES = {
    "frontier": ("Frontier", "Prior accuracy against new-task accuracy. Curves: validation, over the scale λ (small "
                 "numbers). Large marks: test, what validation chose, with 95 % intervals. Up and to the right "
                 "is better."),
    "sequence": ("A sequence of tasks", "Test accuracy after every stage, per task (grey: the stage at which it is "
                 "learned), on the prior skills, and normalised: 0 is the deployed model, 1 the best that any method "
                 "reached, mean over the tasks learned so far."),
    "matrix": ("Accuracy after every stage", "a[i][j]: test accuracy on task j after stage i, mean over seeds."),
    "scales": ("Scale", "Accuracy against λ, validation, mean over seeds and tasks: what a larger scale gains "
    "and costs."),
    "donors": ("Donor", "Accuracy against the donor's place in the lineage, validation, 95 % intervals, no mask."),
    "masks": ("Mask", "Accuracy under every mask, validation, 95 % intervals; hollow marks are random masks of the "
              "same size."),
    "cost": ("Cost", "Test accuracy against training FLOPs; dotted lines run to what the whole search cost."),
    "training": ("Training", "What training logged, per task and learner."),
    "deltas": ("Updates, layer by layer", "Before anything is merged: how large every update is, how far its donor "
               "lies from the deployed model, and whether two updates point the same way (cosine 1) or have nothing "
               "in common (0; equal signs: one half)."),
    "reference": ("Beside published figures", "Others' numbers (grey panels), from reference/: other models, other "
                  "tasks. Context, not targets."),
}  # fmt: skip


def write_figures(
    study: Study, folder: Path, curves: Mapping[str, pd.DataFrame], reference: Mapping[str, pd.DataFrame],
    deltas: pd.DataFrame,
) -> list[str]:  # fmt: skip
    """Writes <name>.svg and <name>.pdf for every figure the study has data for; returns their names."""
    import matplotlib

    matplotlib.use("Agg")
    drawing: dict[str, Callable[[], Any]] = {
        "frontier": lambda: frontier.draw(study),
        "sequence": lambda: sequences.draw_curves(study),
        "matrix": lambda: sequences.draw_matrix(study),
        "scales": lambda: sweeps.draw_scales(study),
        "donors": lambda: sweeps.draw_donors(study),
        "masks": lambda: sweeps.draw_masks(study),
        "cost": lambda: sweeps.draw_cost(study),
        "training": lambda: training.draw_training(study, curves),
        "deltas": lambda: updates.draw_updates(study, deltas),
        "reference": lambda: training.draw_reference(study, reference),
    }
    written = []
    with matplotlib.rc_context(RC):
        for name in FIGURES:
            figure = drawing[name]()
            if figure is not None:
                save(figure, folder, name)
                written.append(name)
    return written
