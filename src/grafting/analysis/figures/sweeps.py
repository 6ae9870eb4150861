"""Figures of the axes of a graft, on validation data: scale, donor, mask; and accuracy against cost, on test data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grafting.analysis.cells import cells, observations, overall_model, replicate, runs, task_names
from grafting.analysis.collect import Point, Study
from grafting.analysis.figures.frontier import TESTED, curve_style, curves
from grafting.analysis.figures.style import (
    BLACK,
    METHODS,
    donor_order,
    in_order,
    method_style,
    new_figure,
    ramp,
    whiskers,
)
from grafting.analysis.statistics import Estimate, estimate
from grafting.analysis.units import si

SUITES = (("new", "new-task accuracy (%)"), ("prior", "prior accuracy (%)"))


def draw_scales(study: Study) -> Any | None:
    """Accuracy against lambda: new tasks above, prior skills below, a column per protocol and style."""
    panels = {
        cell: lines
        for cell in cells(study)
        if (lines := [c for c in curves(study, *cell) if not c.masked and len(c.points) > 1])
    }
    if not panels:
        return None
    figure = new_figure(3.2 * len(panels) + 0.3, 5.6)
    axes = figure.subplots(2, len(panels), squeeze=False)
    handles = {}
    for column, ((protocol, style), lines) in enumerate(panels.items()):
        for curve in lines:
            scales, prior, new = zip(*curve.points, strict=True)
            look = curve_style(curve, study)
            for row, values in enumerate((new, prior)):
                (line,) = axes[row][column].plot(scales, [100 * v for v in values], **look)
                handles.setdefault(curve.name, line)
        axes[0][column].set_title(f"{protocol}, {style} demonstrations", fontsize=9)
        axes[1][column].set_xlabel("scale λ")
        for row, (_, label) in enumerate(SUITES):
            axes[row][column].set_ylabel(f"{label}, validation")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    return figure


def main_points(study: Study) -> list[Point]:
    """Validation points of the single protocol, main style."""
    style = study.spec["styles"][0]
    return [
        p for p in study.points
        if p.split == "val" and (p.labels["protocol"], p.labels["style"]) == ("single", style)
        and p.labels["scale"] is not None
    ]  # fmt: skip


def measured(study: Study, points: Sequence[Point], suite: str) -> Estimate | None:
    """Mean accuracy of validation points over tasks, with its interval; None unless every seed has every task."""
    model_seed = overall_model(study)
    found: dict[str, list[Point]] = {}
    for point in points:
        name = replicate(model_seed, point.labels["model_seed"], point.labels["seed"])
        found.setdefault(name, []).append(point)
    whole = [own for own in found.values() if {p.labels["task"] for p in own} == set(study.spec["tasks"])]
    if not whole or len(whole) < len(found):
        return None
    return estimate(observations(found, suite))


def draw_donors(study: Study) -> Any | None:
    """Accuracy against the donor's place in the lineage, one line per scale, no mask."""
    points = [p for p in main_points(study) if p.labels["method"] == "sft" and p.labels["mask"] in (None, "none")]
    donors = [d for d in donor_order(study) if any(str(p.labels["donor"]) == d for p in points)]
    if len(donors) < 2:
        return None
    scales = sorted({p.labels["scale"] for p in points})
    figure = new_figure(7.6, 3.7)
    axes = figure.subplots(1, 2)
    for place, scale in enumerate(scales):
        colour, marker = ramp(place, len(scales))
        for axis, (suite, _) in zip(axes, SUITES, strict=True):
            found = {
                i: value
                for i, donor in enumerate(donors)
                if (value := measured(study, _like(points, donor=donor, scale=scale), suite))
            }
            shift = 0.05 * (place - (len(scales) - 1) / 2)
            _line(axis, {i + shift: v for i, v in found.items()}, colour, marker, f"λ = {scale:g}")
    for axis, (_, label) in zip(axes, SUITES, strict=True):
        axis.set_xticks(range(len(donors)), [_donor_title(d) for d in donors])
        axis.set_xlabel("donor: where the update is learned (earlier to later)")
        axis.set_ylabel(f"{label}, validation")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(scales))
    return figure


def _donor_title(donor: str) -> str:
    return f"{donor[1:]} % of\npretraining" if donor[:1] == "p" and donor[1:].isdigit() else donor


def _like(points: Sequence[Point], **labels: Any) -> list[Point]:
    """Points with these labels; of several learning rates, the smallest."""
    own = [p for p in points if all(str(p.labels[name]) == str(value) for name, value in labels.items())]
    rates = {p.labels["lr"] for p in own}
    return [p for p in own if p.labels["lr"] == min(rates)] if rates else []


def _line(axis: Any, found: Mapping[float, Estimate], colour: str, marker: str, name: str) -> None:
    axis.errorbar(
        list(found), [100 * v.mean for v in found.values()],
        yerr=[[whiskers(v)[side][0] for v in found.values()] for side in (0, 1)],
        color=colour, marker=marker, markersize=5, linewidth=1.2, elinewidth=0.9, capsize=2, label=name,
    )  # fmt: skip


def draw_masks(study: Study) -> Any | None:
    """Accuracy under every mask (estimator, ranking, fraction), beside no mask, at the scales that have both."""
    points = [p for p in main_points(study) if p.labels["method"] == "sft"]
    masks = {str(p.labels["mask"]) for p in points} - {"none", "None"}
    if not masks:
        return None
    # the fraction runs within an estimator and ranking; the random control stands beside what it is a control of
    order = ["none", *sorted(masks, key=_mask_order)]
    donors = [d for d in donor_order(study) if _like(points, donor=d, mask=order[1])]
    scales = sorted({p.labels["scale"] for p in points if str(p.labels["mask"]) == order[1]})
    figure = new_figure(4.2 * len(donors) + 0.4, 6.6)
    axes = figure.subplots(2, len(donors), squeeze=False, sharex=True)
    for column, donor in enumerate(donors):
        for row, (suite, label) in enumerate(SUITES):
            axis = axes[row][column]
            for place, scale in enumerate(scales):
                colour, marker = ramp(place, len(scales))
                shift = min(0.3, 0.7 / len(scales)) * (place - (len(scales) - 1) / 2)
                for i, mask in enumerate(order):
                    value = measured(study, _like(points, donor=donor, scale=scale, mask=mask), suite)
                    if value is None:
                        continue
                    random = "-random-" in mask
                    axis.errorbar(
                        i + shift, 100 * value.mean, yerr=whiskers(value), color=colour, marker=marker, markersize=6,
                        markerfacecolor="white" if random else colour, capsize=2, elinewidth=0.9, linestyle="none",
                        label=f"λ = {scale:g}" if i == 0 else None,
                    )  # fmt: skip
                    if i == 0:
                        axis.axhline(100 * value.mean, color=colour, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
            axis.set_ylabel(f"{label}, validation")
        axes[0][column].set_title(f"update learned on {donor}")
        axes[1][column].set_xticks(
            range(len(order)), [_mask_title(m) for m in order], rotation=35, ha="right", fontsize=8
        )
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(scales) + 1,
        title="hollow: random mask of the same size (control); dashed: no mask at that scale",
    )  # fmt: skip
    return figure


def _mask_parts(mask: str) -> tuple[str, str, float, bool]:
    """Estimator, rank, fraction, and whether that is of every tensor: of `kfac-fisher-0.01[-tensor]`."""
    estimator, rank, fraction = mask.split("-", 2)
    return estimator, rank, float(fraction.removesuffix("-tensor")), fraction.endswith("-tensor")


def _mask_order(mask: str) -> tuple[str, bool, float, bool, str]:
    estimator, rank, fraction, per_tensor = _mask_parts(mask)
    return estimator, per_tensor, fraction, rank == "random", rank


def _mask_title(mask: str) -> str:
    if mask == "none":
        return "no mask"
    estimator, rank, fraction, per_tensor = _mask_parts(mask)
    share = f"{100 * fraction:g} %" + (" per tensor" if per_tensor else "")
    ranking = rank.replace("fisher", "Fisher").replace("_delta2", "·Δ²")
    return f"{ {'kfac': 'K-FAC'}.get(estimator, estimator) } {ranking} {share}"


def _round_numbers(low: float, high: float, most: int = 4) -> list[float]:
    """At most `most` round numbers between two positive ones, for a logarithmic axis; Matplotlib's own locator falls
    back to evenly spaced ones below a decade, whose labels run into each other."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**e for e in decades for m in (1, 1.5, 2, 3, 5, 7) if low <= m * 10.0**e <= high]
    while len(found) > most:
        found = found[::2]
    return found


def draw_cost(study: Study) -> Any | None:
    """Test accuracy against training FLOPs: of the selected checkpoint (marker), and of the whole search (line)."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    panels = cells(study)
    if not panels:
        return None
    figure = new_figure(3.2 * len(panels) + 0.3, 5.8)
    axes = figure.subplots(2, len(panels), squeeze=False)
    handles, model, drawn = {}, overall_model(study), False
    for column, ((protocol, style), selected) in enumerate(panels.items()):
        for family in in_order([s.labels["family"] for s in selected]):
            if family in METHODS and family not in TESTED:
                continue  # the ablations cost what the graft costs and would hide it
            found = runs(study, selected, family, task_names(study, protocol), model)
            own = [p.cost["flops"] for points in found.values() for p in points]
            search = sum(s.search_cost["flops"] for s in selected if s.labels["family"] == family)
            if not own or not sum(own):
                continue
            # of the search: what one seed's share of all tasks cost, to compare with one checkpoint
            seeds = len(study.spec["seeds"]) * len(study.spec["model_seeds"]) * len(task_names(study, protocol))
            marker, colour, line, size, name = method_style(family)
            for row, (suite, _) in enumerate(SUITES):
                value = estimate(observations(found, suite))
                if value is None:
                    continue
                x = sum(own) / len(own)
                axes[row][column].plot([x, search / seeds], [100 * value.mean] * 2, color=colour, linewidth=0.9,
                                       linestyle=":", zorder=2)  # fmt: skip
                handles.setdefault(
                    name,
                    axes[row][column].errorbar(
                        x, 100 * value.mean, yerr=whiskers(value), color=colour, marker=marker, markersize=size - 1,
                        markeredgecolor=BLACK, markeredgewidth=0.7, elinewidth=0.9, capsize=2, linestyle="none",
                        zorder=4,
                    ),
                )  # fmt: skip
                drawn = True
        for row, (_, label) in enumerate(SUITES):
            axes[row][column].set_xscale("log")
            axes[row][column].xaxis.set_major_locator(FixedLocator(_round_numbers(*axes[row][column].get_xlim())))
            axes[row][column].xaxis.set_major_formatter(FuncFormatter(lambda x, _: si(x)))
            axes[row][column].xaxis.set_minor_formatter(NullFormatter())
            axes[row][column].set_ylabel(label)
        axes[0][column].set_title(f"{protocol}, {style} demonstrations", fontsize=9)
        axes[1][column].set_xlabel("training FLOPs per checkpoint")
    if not drawn:
        return None
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3,
                  title="dotted: up to the whole search's FLOPs, per seed and task")  # fmt: skip
    return figure
