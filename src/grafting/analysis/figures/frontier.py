"""The frontier: prior accuracy against new-task accuracy, validation curves over lambda and test points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafting.analysis.cells import cells, observations, overall_model, runs, task_names
from grafting.analysis.collect import DEPLOYED, Point, Selected, Study
from grafting.analysis.figures.style import (
    BLACK,
    BLUE,
    GREY,
    OWN_DONORS,
    PURPLE,
    donor_style,
    method_style,
    new_figure,
    whiskers,
)
from grafting.analysis.statistics import estimate

#: shown as test points; the other families are the ablations, which would hide these
TESTED = ("sft", "sft_scaled", "opsd", "opsd_scaled", "opsd_regraft", "graft_early", "graft")
LEGEND_INCHES = 1.65


@dataclass(frozen=True)
class Curve:
    """One validation curve: (scale, prior, new) sorted by scale; masked curves are bare markers."""

    name: str
    masked: bool
    points: tuple[tuple[float, float, float], ...]


def draw(study: Study) -> Any | None:
    """The matplotlib figure, one panel per protocol and style; None when no protocol has a selection."""
    panels = cells(study)
    if not panels:
        return None
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    height = 3.5 * rows + LEGEND_INCHES
    figure = new_figure(4.3 * columns, height)
    figure.get_layout_engine().set(rect=(0, LEGEND_INCHES / height, 1, 1 - LEGEND_INCHES / height), hspace=0.06)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    validation: dict[str, Any] = {}
    test: dict[str, Any] = {}
    model = overall_model(study)
    for axis, ((protocol, style), selected) in zip(axes, panels.items(), strict=False):
        drawn = [(c, _draw_curve(axis, c, curve_style(c, study))) for c in curves(study, protocol, style)]
        for curve, line in drawn:
            validation.setdefault(curve.name, line)
        _draw_deployed(axis, study, test)
        for family in TESTED:
            _draw_test(axis, study, selected, family, model, protocol, test)
        axis.set_title(f"{protocol}, {style} demonstrations")
        axis.set_xlabel("prior accuracy (%)")
        axis.set_ylabel("new-task accuracy (%)")
        axis.margins(0.09)
        _label_scales(axis, drawn)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    _legends(figure, validation, test)
    return figure


def _legends(figure: Any, validation: Mapping[str, Any], test: Mapping[str, Any]) -> None:
    """Two blocks under the panels: what was tested, and the validation curves."""
    order = sorted(validation, key=_curve_order)
    width, height = figure.get_size_inches()
    for title, names, handles, top in (
        ("Test, chosen on validation (95 % intervals)", list(test), test, LEGEND_INCHES),
        ("Validation, mean over seeds and tasks (small numbers: λ)", order, validation, LEGEND_INCHES - 0.75),
    ):
        figure.legend(
            [handles[name] for name in names], names, title=title, loc="upper left", frameon=False,
            bbox_to_anchor=(0.015, top / height), ncols=4 if width > 6 else 2, alignment="left", fontsize=8,
            title_fontproperties={"weight": "bold", "size": 8}, handlelength=2.8, columnspacing=1.2,
        )  # fmt: skip


def curves(study: Study, protocol: str, style: str) -> list[Curve]:
    """Validation curves of one panel. A λ that lacks a task or a seed the others have is left out."""
    points = [
        p
        for p in study.points
        if p.split == "val" and p.labels["protocol"] == protocol and p.labels["style"] == style
        and p.labels["scale"] is not None
    ]  # fmt: skip
    last = max((p.labels["stage"] or 0 for p in points), default=0)
    groups: dict[tuple, dict[float, dict[tuple, tuple[float, float]]]] = {}
    for p in points:
        labels, values = p.labels, (p.accuracy("prior"), p.accuracy("new"))
        if (labels["stage"] or 0) != last or None in values:
            continue
        series = (
            _name(labels),
            _masked(labels),
            labels["mask"],
            labels["operator"],
            labels["lr"],
            labels["method"],
            labels["donor"],
        )
        runs_of = groups.setdefault(series, {}).setdefault(float(labels["scale"]), {})
        runs_of[(labels["model_seed"], labels["task"], labels["seed"])] = values
    whole = max((len(r) for scales in groups.values() for r in scales.values()), default=0)
    found = []
    for series, scales in sorted(groups.items(), key=lambda item: tuple(map(str, item[0]))):
        line = tuple(
            (scale, *(sum(column) / whole for column in zip(*r.values(), strict=True)))
            for scale, r in sorted(scales.items())
            if len(r) == whole
        )
        if line:
            found.append(Curve(series[0], series[1], line))
    return found


def _masked(labels: Mapping[str, Any]) -> bool:
    return labels["mask"] not in (None, "none")


def _name(labels: Mapping[str, Any]) -> str:
    if _masked(labels):
        rank = str(labels["mask"]).split("-")[1:2]  # <estimator>-<rank>-<fraction>
        return "graft, random mask (control)" if rank == ["random"] else "graft, masked"
    learner = "OPSD" if labels["method"] == "opsd" else "SFT"
    if labels["donor"] == "last":
        return f"{learner}, merged after each task"
    if learner == "OPSD":
        return "OPSD, scaled"
    name = "SFT, scaled" if labels["donor"] in OWN_DONORS else f"graft from {labels['donor']}"
    return f"{name}, TIES" if str(labels["operator"]).startswith("ties") else name


def _curve_order(name: str) -> tuple[int, str]:
    heads = ("SFT", "OPSD", "graft from base", "graft from", "graft, masked", "graft, random")
    return next((i for i, head in enumerate(heads) if name.startswith(head)), len(heads)), name


def curve_style(curve: Curve, study: Study) -> dict[str, Any]:
    """Colour, line and marker of a curve; a donor has the same ones in every panel."""
    if curve.masked:
        random = "random" in curve.name
        return {
            "color": GREY if random else BLUE,
            "marker": "x" if random else "+",
            "linestyle": "none",
            "markersize": 5,
        }
    style = {"markersize": 4, "linewidth": 1.3, "markerfacecolor": "white"}
    if curve.name.startswith("SFT"):
        style |= donor_style(study, DEPLOYED)
    elif curve.name.startswith("OPSD"):
        style |= {"color": PURPLE, "linestyle": "-.", "marker": "D"}
    else:
        style |= donor_style(study, curve.name.removeprefix("graft from ").partition(",")[0])
    if curve.name.endswith("each task"):
        style |= {"marker": "<" if curve.name.startswith("SFT") else "h", "linewidth": 2}
    if curve.name.endswith("TIES"):
        style |= {"alpha": 0.6, "marker": "*", "markersize": 5}
    return style


def _draw_curve(axis: Any, curve: Curve, style: Mapping[str, Any]) -> Any:
    scales, prior, new = zip(*curve.points, strict=True)
    x, y = [100 * v for v in prior], [100 * v for v in new]
    (line,) = axis.plot(x, y, zorder=2, label=curve.name, **style)
    return line


def _label_scales(axis: Any, drawn: Sequence[tuple[Curve, Any]]) -> None:
    """Writes λ along the grafts' curves and at both ends of the others, unless another label is there already."""
    axis.autoscale_view()
    taken: list[tuple[float, float]] = []
    for whole in (True, False):
        for curve, line in drawn:
            if curve.masked or len(curve.points) < 2 or curve.name.startswith("graft from base") != whole:
                continue
            ends = {len(curve.points) - 1: (3, 4), 0: (4, -8)}
            places = {**ends, **dict.fromkeys(range(1, len(curve.points) - 1), (3, 4))} if whole else ends
            for place, offset in places.items():
                scale, prior, new = curve.points[place]
                x, y = axis.transData.transform((100 * prior, 100 * new))
                if all(abs(x - u) > 18 or abs(y - v) > 12 for u, v in taken):
                    taken.append((x, y))
                    axis.annotate(
                        f"{scale:g}", (100 * prior, 100 * new), xytext=offset, textcoords="offset points",
                        fontsize=6.5, color=line.get_color(), zorder=3,
                    )  # fmt: skip


def _draw_deployed(axis: Any, study: Study, legend: dict[str, Any]) -> None:
    """The deployed model's prior accuracy as a line: its new-task accuracy near 0 would squeeze the rest."""
    points: list[Point] = [p for p in study.points if p.labels["family"] == DEPLOYED and p.split == "test"]
    prior = [v for p in points if (v := p.accuracy("prior")) is not None]
    if prior:
        line = axis.axvline(100 * sum(prior) / len(prior), color=BLACK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        legend.setdefault("deployed model's prior accuracy", line)


def _draw_test(
    axis: Any, study: Study, selected: Sequence[Selected], family: str, model: Any, protocol: str,
    legend: dict[str, Any],
) -> None:  # fmt: skip
    found = runs(study, selected, family, task_names(study, protocol), model)
    new, prior = (estimate(observations(found, suite)) for suite in ("new", "prior"))
    if new is None or prior is None:
        return
    marker, colour, _, size, name = method_style(family)
    bars = axis.errorbar(
        100 * prior.mean, 100 * new.mean, xerr=whiskers(prior), yerr=whiskers(new), marker=marker, color=colour,
        markersize=size, markeredgecolor=BLACK, markeredgewidth=0.9, linestyle="none", elinewidth=1.1,
        capsize=2, zorder=5,
    )  # fmt: skip
    legend.setdefault(name, bars)
