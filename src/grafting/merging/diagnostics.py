"""What the updates of a merge look like before they are merged: sizes, directions, signs, per layer."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from grafting.merging.arrays import dot
from grafting.merging.engine import Donor, Job, Merge, Scratch, Stream
from grafting.merging.planning import Plan
from grafting.models.numerics import FORMATS
from grafting.models.safefiles import Checkpoint

COLUMNS = ("layer", "model", "other", "quantity", "value")
_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")


def diagnose(plan: Plan, advance: Callable[[int], None] = lambda _: None) -> list[dict]:
    """`measure` of the updates of a merge, all pairs; models are named by their folders."""
    pairs = list(combinations(range(len(plan.merge.donors)), 2))
    return measure(plan.merge, plan.reference, model_names(plan), pairs, advance)


def measure(
    merge: Merge,
    reference: Checkpoint,
    names: Sequence[Any],
    pairs: Sequence[tuple[int, int]],
    advance: Callable[[int], None] = lambda _: None,
) -> list[dict]:
    """Rows of `COLUMNS` per layer (its number, or the tensor's name outside layers) and for `all`.

    For every update: `norm` of its delta, `relative_norm` (over the anchor's), `donor_distance` (the norm of
    donor - anchor over the anchor's). For every one of `pairs` (places): `cosine` of the deltas and
    `sign_agreement`, the share of coordinates with equal signs among those where neither is zero (NaN where there is
    none). `names`: what the updates are called. `advance` is told the bytes of each tensor that is done.
    """
    n = len(merge.donors)
    # the donors' own distances are deltas from the anchor as well; one donor often serves many updates
    apart = list(dict.fromkeys(pair.donor for pair in merge.donors))
    donors = [Donor(p.trained, p.donor, "", p.mask) for p in merge.donors]
    donors += [Donor(donor, merge.anchor, "") for donor in apart]
    both = Merge(merge.operator, merge.anchor, donors, merge.points)
    sums: dict[str, np.ndarray] = {}
    scratch = Scratch()
    for name in reference.names:
        stored, layer = reference.tensors[name], layer_of(name)
        # squared norms of the anchor, the deltas and the donors' deltas; per pair products, equal and nonzero signs
        total = np.zeros(1 + n + len(apart) + 3 * len(pairs))
        squares, products = total[: 1 + n + len(apart)], total[1 + n + len(apart) :].reshape(3, len(pairs))
        form = FORMATS["F32"] if stored.form.wide == np.float64 else stored.form
        for _, anchor, deltas in Stream(both, Job(name, form, stored.shape, {}, {}, 1.0), scratch).chunks():
            squares += [dot(vector, vector) for vector in (anchor, *deltas)]
            signs = [np.sign(delta).astype(np.int8) for delta in deltas[:n]]
            for place, (i, j) in enumerate(pairs):
                product = signs[i] * signs[j]
                nonzero = np.count_nonzero(product)
                # every product is -1, 0 or 1: their sum says how many are positive
                positive = (nonzero + int(product.sum(dtype=np.int64))) // 2
                products[:, place] += dot(deltas[i], deltas[j]), positive, nonzero
        for key in (layer, "all"):
            sums[key] = sums.get(key, 0) + total
        advance(stored.nbytes)
    rows = []
    for layer in sorted(sums, key=_order):
        norms = np.sqrt(sums[layer][: 1 + n + len(apart)])
        for i in range(n):
            values = {
                "norm": norms[1 + i],
                "relative_norm": _ratio(norms[1 + i], norms[0]),
                "donor_distance": _ratio(norms[1 + n + apart.index(merge.donors[i].donor)], norms[0]),
            }
            rows += [_row(layer, names[i], "", quantity, value) for quantity, value in values.items()]
        for (i, j), (product, positive, nonzero) in zip(pairs, sums[layer][len(norms) :].reshape(3, -1).T):
            cosine = _ratio(product, norms[1 + i] * norms[1 + j])
            rows.append(_row(layer, names[i], names[j], "cosine", cosine))
            rows.append(_row(layer, names[i], names[j], "sign_agreement", _ratio(positive, nonzero)))
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


def _row(layer: str, model: Any, other: Any, quantity: str, value: float) -> dict:
    return dict(zip(COLUMNS, (layer, model, other, quantity, float(value))))


def _ratio(part: float, of: float) -> float:
    return float(part) / float(of) if of else float("nan")


def _order(layer: str) -> tuple:
    return (2,) if layer == "all" else (0, int(layer), "") if layer.isdigit() else (1, 0, layer)
