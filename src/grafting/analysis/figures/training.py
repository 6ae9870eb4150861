"""Training curves, and others' published figures beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from grafting.analysis.cells import cells, deployed_estimate, observations, overall_model, runs, task_names
from grafting.analysis.collect import Study
from grafting.analysis.figures.style import GREY, METHODS, PURPLE, donor_order, donor_style, method_style, new_figure
from grafting.analysis.figures.sweeps import main_points
from grafting.analysis.statistics import estimate

#: column of training.jsonl -> title; a row of panels for each that some job wrote
MEASURES = {
    "loss": "loss",
    "kl": "KL",
    "reward": "reward",
    "rollout_length": "rollout length (tokens)",
    "rollout_accuracy": "rollout accuracy",
    "teacher_accuracy": "teacher accuracy, demonstration shown",
}


def _groups(study: Study) -> dict[tuple[str, str], list[str]]:
    """(task, "sft from base" ...) -> keys of the training jobs, one per seed (and model)."""
    found: dict[tuple[str, str], list[str]] = {}
    for p in main_points(study):
        method, donor = str(p.labels["method"]), str(p.labels["donor"])
        name = f"SFT from {donor}" if method == "sft" else method_style(method)[-1]
        for key in p.trained:
            keys = found.setdefault((str(p.labels["task"]), name), [])
            if key not in keys:
                keys.append(key)
    return found


def grouped(study: Study, curves: Mapping[str, pd.DataFrame]) -> dict[tuple[str, str], list[pd.DataFrame]]:
    """(task, learner) -> training logs at hand, one per seed; single tasks, main style."""
    groups = {group: [curves[k] for k in keys if k in curves] for group, keys in _groups(study).items()}
    return {group: frames for group, frames in groups.items() if frames}


def draw_training(study: Study, curves: Mapping[str, pd.DataFrame]) -> Any | None:
    """Mean over seeds (and their range) of what training logged, per task and learner, single tasks, main style."""
    groups = grouped(study, curves)
    measures = [
        m for m in MEASURES
        # what was logged a few times only (a guard that never saw a reason to look again) is no curve
        if any(m in frame and frame[m].count() > 2 for frames in groups.values() for frame in frames)
    ]  # fmt: skip
    tasks = [task for task in study.spec["tasks"] if any(group[0] == task for group in groups)]
    if not measures:
        return None
    figure = new_figure(3.0 * len(tasks) + 0.4, 2.1 * len(measures) + 0.7)
    axes = figure.subplots(len(measures), len(tasks), squeeze=False, sharex=True)
    handles = {}
    for (task, name), frames in groups.items():
        look = donor_style(study, name.removeprefix("SFT from ")) if name.startswith("SFT") else {
            "color": PURPLE if name == "OPSD" else GREY, "linestyle": "-."
        }  # fmt: skip
        look.pop("marker", None)
        for row, measure in enumerate(measures):
            rows = [f[["step", measure]].dropna() for f in frames if measure in f]
            if not rows:
                continue
            table = pd.concat(rows).groupby("step")[measure].agg(["mean", "min", "max"])
            axis = axes[row][tasks.index(task)]
            sparse = {"marker": "s", "markersize": 3} if len(table) < 15 else {}
            (line,) = axis.plot(table.index, table["mean"], linewidth=1.2, **look, **sparse)
            axis.fill_between(table.index, table["min"], table["max"], color=look["color"], alpha=0.15, linewidth=0)
            handles.setdefault(name, line)
    for row, measure in enumerate(measures):
        for column, task in enumerate(tasks):
            axis = axes[row][column]
            if measure == "loss":
                axis.set_yscale("log")
            if row == 0:
                axis.set_title(f"task {task}")
            if column == 0:
                axis.set_ylabel(MEASURES[measure], fontsize=8)
            if row == len(measures) - 1:
                axis.set_xlabel("step")
    order = [f"SFT from {donor}" for donor in donor_order(study)]
    names = sorted(handles, key=lambda name: order.index(name) if name in order else len(order))
    figure.legend([handles[n] for n in names], names, loc="outside lower center", ncols=min(5, len(names)),
                  title="mean over seeds; band: their range; losses of different learners differ in kind")  # fmt: skip
    return figure


def draw_reference(study: Study, tables: Mapping[str, pd.DataFrame]) -> Any | None:
    """Ours (test, chosen on validation) beside what others published, each on axes of its own."""
    panels = [
        (f"others: {source or name},\n{task}", part)
        for name, table in tables.items()
        for source, task, part in _parts(table)
    ]
    ours = next(((cell, s) for cell, s in cells(study).items() if cell[0] == "single"), None)
    if not panels or ours is None:
        return None
    columns = 3
    rows = -(-(len(panels) + 1) // columns)
    figure = new_figure(3.1 * columns, 2.8 * rows + 0.6)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    handles: dict[str, Any] = {}
    (protocol, style), selected = ours
    for family in METHODS:
        found = runs(study, selected, family, task_names(study, protocol), overall_model(study))
        new, prior = (estimate(observations(found, suite)) for suite in ("new", "prior"))
        if new and prior and family in ("sft", "opsd", "graft"):
            _mark(axes[0], family, 100 * prior.mean, 100 * new.mean, handles)
    new, prior = (deployed_estimate(study, study.spec["model_seeds"][0], suite) for suite in ("new", "prior"))
    if new and prior:
        _mark(axes[0], "deployed", 100 * prior.mean, 100 * new.mean, handles)
    axes[0].set_title(f"this study: {study.spec['preset']}, {style}\n(mean over tasks)", fontsize=9, fontweight="bold")
    for axis, (title, part) in zip(axes[1:], panels, strict=False):
        for record in part.to_dict("records"):
            _mark(axis, record["method"], record["prior_mean"], record["new_task"], handles)
        axis.set_title(title, fontsize=9, color="#555555")
        axis.set_facecolor("#F7F7F7")
    for axis in axes[: len(panels) + 1]:
        axis.set_xlabel("prior accuracy (%)")
        axis.set_ylabel("new-task accuracy (%)")
        axis.margins(0.15)
    for axis in axes[len(panels) + 1 :]:
        axis.set_visible(False)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, len(handles)),
                  title="grey panels: others' numbers, other models and tasks; context, not targets")  # fmt: skip
    return figure


def _parts(table: pd.DataFrame) -> Sequence[tuple[str | None, str, pd.DataFrame]]:
    if "source" in table:
        return [(str(s), str(t), part) for (s, t), part in table.groupby(["source", "task"], sort=False)]
    return [(None, str(t), part) for t, part in table.groupby("task", sort=False)]


def _mark(axis: Any, family: str, prior: float, new: float, handles: dict[str, Any]) -> None:
    if family == "deployed":
        (line,) = axis.plot(prior, new, marker="*", color="black", markersize=9, linestyle="none")
        handles.setdefault("deployed", line)
        return
    marker, colour, _, size, name = method_style(family)
    (line,) = axis.plot(prior, new, marker=marker, color=colour, markersize=size, linestyle="none",
                        markeredgecolor="black", markeredgewidth=0.7)  # fmt: skip
    handles.setdefault(name, line)
