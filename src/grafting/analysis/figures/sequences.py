"""Figures of the sequential protocol: accuracy after every stage, its normalised mean, and the matrix a[i][j]."""

from __future__ import annotations

from typing import Any

from grafting.analysis.cells import cells, observations, replicate
from grafting.analysis.collect import Selected, Study
from grafting.analysis.figures.style import BLACK, in_order, method_style, new_figure
from grafting.analysis.sequence import PRIOR, before, normalised, normalised_curve, sequence_matrix
from grafting.analysis.statistics import Estimate, estimate


def sequential(study: Study) -> dict[str, tuple[str, Selected]]:
    """Family -> (title, selection) in the sequential protocol, main style, first model; {} without one.

    Families that chose the same models are one, named after all of them.
    """
    for (protocol, _), selected in cells(study).items():
        if protocol == "sequential":
            model = study.spec["model_seeds"][0]
            own = {s.labels["family"]: s for s in selected if s.labels["model_seed"] == model and s.points}
            found: dict[str, tuple[str, Selected]] = {}
            for family in in_order(list(own)):
                keys, name = [p.key for p in own[family].points], method_style(family)[-1]
                twin = next((f for f, (_, s) in found.items() if [p.key for p in s.points] == keys), None)
                if twin is None:
                    found[family] = name, own[family]
                else:
                    found[twin] = f"{found[twin][0]} = {name.removeprefix('graft, ')}", found[twin][1]
            return found
    return {}


def _stage(selected: Selected, stage: int, suite: str, task: str | None) -> Estimate | None:
    """Accuracy after a stage on a task (or prior), with its interval."""
    runs = {replicate(None, None, p.labels["seed"]): [p] for p in selected.points if (p.labels["stage"] or 0) == stage}
    seen = observations(runs, suite)
    if task is not None:
        seen = {s: own for s, answers in seen.items() if len(own := answers.only(frozenset([task])))}
    return estimate(seen)


def draw_curves(study: Study) -> Any | None:
    """Per task, the prior suite and the normalised mean: accuracy against the stage, one line per method."""
    families = sequential(study)
    tasks = study.spec["tasks"]
    if not families:
        return None
    model = study.spec["model_seeds"][0]
    start = before(study, model)
    matrices = {family: sequence_matrix(study, s) for family, (_, s) in families.items()}
    scaled = normalised(tasks, matrices, start)
    panels = [*tasks, PRIOR, "normalised"]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(3.1 * columns, 2.5 * rows + 0.8)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    stages = ["deployed", *(f"after {task}" for task in tasks)]
    handles = {}
    for place, (family, (name, selected)) in enumerate(families.items()):
        marker, colour, line, size, _ = method_style(family)
        # side by side by a little, so that intervals do not hide one another
        shift = 0.06 * (place - (len(families) - 1) / 2)
        look = {"color": colour, "linestyle": line, "marker": marker, "markersize": size - 3, "linewidth": 1.3}
        for axis, panel in zip(axes, panels, strict=False):
            if panel == "normalised":
                ys = normalised_curve(tasks, scaled[family])
                (handles[name],) = axis.plot([i + 1 + shift for i in range(len(ys))], ys, label=name, **look)
                continue
            found = {
                stage: value
                for stage in range(len(tasks))
                if (value := _stage(selected, stage, *((PRIOR, None) if panel == PRIOR else ("new", panel))))
            }
            xs = [stage + 1 + shift for stage in found]
            ys = [100 * value.mean for value in found.values()]
            if panel in start:
                xs, ys = [shift, *xs], [100 * start[panel], *ys]
            axis.plot(xs, ys, **look)
            axis.vlines(
                [stage + 1 + shift for stage in found],
                [100 * max(0, v.low) for v in found.values()],
                [100 * min(1, v.high) for v in found.values()], color=colour, linewidth=0.9,
            )  # fmt: skip
    for axis, panel in zip(axes, panels, strict=False):
        axis.set_xticks(range(len(stages)), stages, fontsize=7)
        axis.set_xlim(-0.35, len(tasks) + 0.35)
        if panel == "normalised":
            axis.set_title("normalised, tasks learned so far")
            axis.set_ylabel("0 = deployed, 1 = best seen")
            axis.set_ylim(-0.05, 1.08)
            continue
        axis.set_title("prior skills" if panel == PRIOR else f"task {panel}")
        axis.set_ylabel("test accuracy (%)")
        axis.set_ylim(-4, 104)
        if panel != PRIOR:
            learned = tasks.index(panel) + 1
            axis.axvspan(learned - 0.5, learned + 0.5, color="#F1F1F1", zorder=0)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


def draw_matrix(study: Study) -> Any | None:
    """Heat maps of a[i][j], one per method, with the prior suite as last column."""
    families = sequential(study)
    tasks = study.spec["tasks"]
    if not families:
        return None
    columns = min(3, len(families))
    rows = -(-len(families) // columns)
    figure = new_figure(3.0 * columns, (0.42 * len(tasks) + 1.3) * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    names, image = [*tasks, PRIOR], None
    for axis, (name, selected) in zip(axes, families.values(), strict=False):
        matrix = sequence_matrix(study, selected)
        table = [[100 * matrix.get(i, {}).get(name, float("nan")) for name in names] for i in range(len(tasks))]
        image = axis.imshow(table, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        for i, row in enumerate(table):
            for j, value in enumerate(row):
                shown = f"{value:.0f}" if value == value else "–"
                axis.text(j, i, shown, ha="center", va="center", fontsize=8, color="white" if value < 55 else BLACK)
        axis.set_xticks(range(len(names)), names)
        axis.set_yticks(range(len(tasks)), [f"after {task}" for task in tasks])
        axis.axvline(len(tasks) - 0.5, color="white", linewidth=2)
        axis.grid(visible=False)
        axis.set_title(name.replace(" = ", " =\n"), fontsize=9)
        axis.set_xlabel("tested on", fontsize=8)
    for axis in axes[len(families) :]:
        axis.set_visible(False)
    figure.colorbar(image, ax=axes, label="test accuracy (%)", shrink=0.8)
    return figure
