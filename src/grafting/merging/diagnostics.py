"""What the updates of a merge look like before they are merged: sizes, directions, signs, per layer."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np

from grafting.merging.arrays import dot
from grafting.merging.engine import Donor, Job, Merge, Scratch, Stream
from grafting.merging.planning import Plan
from grafting.models.numerics import FORMATS

COLUMNS = ("layer", "model", "other", "quantity", "value")
_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")


def diagnose(plan: Plan, advance: Callable[[int], None] = lambda _: None) -> list[dict]:
    """Rows of `COLUMNS` per layer (its number, or the tensor's name outside layers) and for `all`.

    For every model: `norm` of its delta, `relative_norm` (over the anchor's), `donor_distance` (the norm of
    donor - anchor over the anchor's). For every pair: `cosine` of the deltas and `sign_agreement`, the share of
    coordinates with equal signs among those where neither is zero (NaN where there is none). Models are named
    by their folders. `advance` is told the bytes of each tensor that is done.
    """
    merge, reference = plan.merge, plan.reference
    n = len(merge.donors)
    # the donors' own distances are deltas from the anchor as well
    donors = [Donor(p.trained, p.donor, "", p.mask) for p in merge.donors]
    donors += [Donor(p.donor, merge.anchor, "") for p in merge.donors]
    both = Merge(merge.operator, merge.anchor, donors, merge.points)
    sums: dict[str, np.ndarray] = {}
    signs: dict[str, np.ndarray] = {}
    scratch = Scratch()
    for name in reference.names:
        stored, layer = reference.tensors[name], layer_of(name)
        gram, agree = np.zeros((2 * n + 1, 2 * n + 1)), np.zeros((2, n, n))
        form = FORMATS["F32"] if stored.form.wide == np.float64 else stored.form
        for _, anchor, deltas in Stream(both, Job(name, form, stored.shape, {}, {}, 1.0), scratch).chunks():
            vectors = [anchor, *deltas]
            for i in range(2 * n + 1):
                gram[i, i] += dot(vectors[i], vectors[i])
            for i, j in combinations(range(n), 2):
                gram[1 + i, 1 + j] += dot(deltas[i], deltas[j])
                product = np.sign(deltas[i]) * np.sign(deltas[j])
                agree[0, i, j] += np.count_nonzero(product > 0)
                agree[1, i, j] += np.count_nonzero(product)
        for key in (layer, "all"):
            sums[key] = sums.get(key, 0) + gram
            signs[key] = signs.get(key, 0) + agree
        advance(stored.nbytes)
    names = model_names(plan)
    rows = []
    for layer in sorted(sums, key=_order):
        gram, agree = sums[layer], signs[layer]
        norms = np.sqrt(np.diag(gram))
        for i in range(n):
            values = {
                "norm": norms[1 + i],
                "relative_norm": _ratio(norms[1 + i], norms[0]),
                "donor_distance": _ratio(norms[1 + n + i], norms[0]),
            }
            rows += [_row(layer, names[i], "", quantity, value) for quantity, value in values.items()]
        for i, j in combinations(range(n), 2):
            cosine = _ratio(gram[1 + i, 1 + j], norms[1 + i] * norms[1 + j])
            rows.append(_row(layer, names[i], names[j], "cosine", cosine))
            rows.append(_row(layer, names[i], names[j], "sign_agreement", _ratio(agree[0, i, j], agree[1, i, j])))
    return rows


def write(rows: list[dict], folder: Path) -> list[Path]:
    """deltas.csv and deltas.svg in `folder`; equal rows give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "deltas.csv"
    with table.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return [table, _draw(rows, folder / "deltas.svg")]


def model_names(plan: Plan) -> list[str]:
    """Short names of the merged models: their folders' names, numbered where they repeat."""
    short = [pair.trained.path.name for pair in plan.merge.donors]
    return [name if short.count(name) == 1 else f"{name}#{i}" for i, name in enumerate(short)]


def layer_of(name: str) -> str:
    """The number of a tensor's layer, or its name."""
    match = _LAYER.search(f".{name}")
    return match[1] if match else name


def _draw(rows: list[dict], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [k for k in ("relative_norm", "cosine", "sign_agreement") if any(r["quantity"] == k for r in rows)]
    layers = sorted({r["layer"] for r in rows if r["layer"].isdigit()}, key=int)
    style = {"svg.hashsalt": "grafting", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(1, len(kinds), figsize=(3.4 * len(kinds), 2.8), squeeze=False)
        for axis, kind in zip(axes[0], kinds):
            lines: dict[str, dict[str, float]] = {}
            for row in rows:
                if row["quantity"] == kind:
                    label = row["model"] + (f" - {row['other']}" if row["other"] else "")
                    lines.setdefault(label, {})[row["layer"]] = row["value"]
            for label, values in lines.items():
                axis.plot([int(i) for i in layers], [values[i] for i in layers], marker="o", markersize=3, label=label)
            axis.set(xlabel="layer", title=kind.replace("_", " "))
            if kind == "relative_norm":
                axis.set_ylim(bottom=0)
            axis.legend(fontsize=7, frameon=False)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    return path


def _row(layer: str, model: str, other: str, quantity: str, value: float) -> dict:
    return dict(zip(COLUMNS, (layer, model, other, quantity, float(value))))


def _ratio(part: float, of: float) -> float:
    return float(part) / float(of) if of else float("nan")


def _order(layer: str) -> tuple:
    return (2,) if layer == "all" else (0, int(layer), "") if layer.isdigit() else (1, 0, layer)
