"""What the updates themselves look like in every layer: how large, in which direction, from how far away."""

from __future__ import annotations

from typing import Any

import pandas as pd

from grafting.analysis.collect import DEPLOYED, Study
from grafting.analysis.figures.style import PURPLE, donor_order, donor_style, in_order, method_style, new_figure

#: quantity -> (title, label of the axis), of single updates
SIZES = {
    "relative_norm": ("size of the update", "‖Δ‖ / ‖θ₀‖ (%)"),
    "donor_distance": ("distance of the donor", "‖θ_donor − θ₀‖ / ‖θ₀‖ (%)"),
}
#: the same of pairs of updates
PAIRS = {"cosine": "cosine", "sign_agreement": "share of equal signs"}


def draw_updates(study: Study, table: pd.DataFrame) -> Any | None:
    """Per layer: norms, the donor's distance, and cosine and sign agreement of pairs; mean over seeds and tasks, with
    their range. None when no layer is numbered. table: see `grafting.merging.deltas`."""
    places = _places(table)
    if places is None:
        return None
    table = table.assign(learner=[update_name(m, d) for m, d in zip(table["method"], table["donor"], strict=True)])
    base = update_name("sft", DEPLOYED)
    other = table["other"].str.split(" ", expand=True).reindex(columns=range(4))
    table = table.assign(other_task=other[0], other_learner=[
        update_name(m, d) if m else "" for m, d in zip(other[1].fillna(""), other[2].fillna(""), strict=True)
    ])  # fmt: skip
    same_task = table[table["task"] == table["other_task"]]
    figure = new_figure(9.6, 6.2)
    axes = figure.subplots(2, 3)
    handles: dict[str, Any] = {}
    learners = _learners(study, table)
    for name, (method, donor) in learners.items():
        look = _look(study, method, donor)
        own = table[table["learner"] == name]
        for axis, quantity in ((axes[0][0], "relative_norm"), (axes[1][0], "donor_distance")):
            if quantity == "donor_distance" and donor == DEPLOYED:
                continue  # no distance from itself
            _line(axis, own[own["quantity"] == quantity], places, look, 100, handles, name)
        beside = same_task[_involves(same_task, name) & _involves(same_task, base)]
        across = own[(own["task"] != own["other_task"]) & (own["other_learner"] == name)]
        for row, quantity in enumerate(PAIRS):
            if name != base:
                _line(axes[row][1], beside[beside["quantity"] == quantity], places, look, 1, handles, name)
            _line(axes[row][2], across[across["quantity"] == quantity], places, look, 1, handles, name)
    for row, quantity in enumerate(SIZES):
        title, label = SIZES[quantity]
        axes[row][0].set_title(title)
        axes[row][0].set_ylabel(label)
        axes[row][0].set_ylim(bottom=0)
    for row, (quantity, label) in enumerate(PAIRS.items()):
        axes[row][1].set_title(f"against {base}, same task" if row == 0 else "", fontsize=9)
        axes[row][2].set_title("between two tasks, same learner" if row == 0 else "", fontsize=9)
        for axis in axes[row][1:]:
            axis.set_ylabel(label)
            axis.axhline(0 if quantity == "cosine" else 0.5, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
    names = list(places)
    for axis in axes.flat:
        axis.set_xticks(range(len(names)), names, fontsize=7 if len(names) > 8 else 8)
    for axis in axes[1]:
        axis.set_xlabel("layer")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(5, len(handles)),
                  title="mean over seeds and tasks; band: their range; dashed: unrelated directions")  # fmt: skip
    return figure


def _places(table: pd.DataFrame) -> dict[str, list[str]] | None:
    """Title on the axis -> layers of the table: the embedding first, then the numbered ones."""
    layers = list(dict.fromkeys(table["layer"]))
    numbered = sorted((layer for layer in layers if layer.isdigit()), key=int)
    embedding = [layer for layer in layers if "embed" in layer or ".wte" in layer]
    if not numbered:
        return None
    return {**({"emb.": embedding} if embedding else {}), **{layer: [layer] for layer in numbered}}


def update_name(method: str, donor: str) -> str:
    """`SFT from base`, `OPSD`."""
    return f"SFT from {donor}" if method == "sft" else method_style(method)[-1]


def _involves(pairs: pd.DataFrame, name: str) -> Any:
    return (pairs[["learner", "other_learner"]] == name).any(axis=1)


def _learners(study: Study, table: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Name -> (method, donor), in the order of the lineage, then of the methods."""
    pairs = set(zip(table["method"], table["donor"], strict=True))
    donors = [("sft", donor) for donor in donor_order(study) if ("sft", donor) in pairs]
    rest = [pair for method in in_order([m for m, _ in sorted(pairs)]) for pair in sorted(pairs) if pair[0] == method]
    return {update_name(*pair): pair for pair in dict.fromkeys([*donors, *rest])}


def _look(study: Study, method: str, donor: str) -> dict[str, Any]:
    if method == "sft":
        return donor_style(study, donor)
    marker, colour, line, _, _ = method_style(method)
    return {"color": colour, "linestyle": "-." if colour == PURPLE else line, "marker": marker}


def _line(
    axis: Any, rows: pd.DataFrame, places: dict[str, list[str]], look: dict[str, Any], factor: float,
    handles: dict[str, Any], name: str,
) -> None:  # fmt: skip
    """Mean and range over seeds and tasks at every place."""
    found = {}
    for at, layers in enumerate(places.values()):
        values = factor * rows[rows["layer"].isin(layers)]["value"].dropna()
        if len(values):
            found[at] = values.mean(), values.min(), values.max()
    if not found:
        return
    mean, low, high = zip(*found.values(), strict=True)
    (line,) = axis.plot(list(found), mean, markersize=4, linewidth=1.3, **look)
    axis.fill_between(list(found), low, high, color=look["color"], alpha=0.15, linewidth=0)
    handles.setdefault(name, line)
