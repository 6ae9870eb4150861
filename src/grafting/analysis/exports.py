"""Tables for other tools: CSV and Parquet, LaTeX, what `dvc plots` draws. See docs/reference/results.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from grafting.analysis import rows
from grafting.analysis.cells import cells
from grafting.analysis.claims import CLAIM
from grafting.analysis.collect import ALL, Study, selection_table, table
from grafting.analysis.figures.frontier import curves
from grafting.analysis.figures.style import method_style
from grafting.analysis.figures.training import grouped
from grafting.analysis.figures.updates import update_name
from grafting.analysis.sequence import NAMES
from grafting.analysis.statistics import ITEMS_ONLY, Estimate
from grafting.analysis.tables import ABSENT
from grafting.analysis.units import si


def write_tables(study: Study, updates: pd.DataFrame, folder: Path) -> None:
    """evaluations and accuracies as CSV and Parquet, answers, selections, deltas and sequence as CSV."""
    evaluations = table(study)
    accuracies = pd.DataFrame(
        list(rows.accuracy_rows(study)),
        columns=["protocol", "style", "method", "task", "replicate", "suite", "accuracy", "low", "high", "n", "seeds",
                 "items", "basis"],
    )  # fmt: skip
    for name, frame in (("evaluations", evaluations), ("accuracies", accuracies)):
        _csv(frame, folder / f"{name}.csv")
        frame.to_parquet(folder / f"{name}.parquet", index=False)
    _csv(answers(study), folder / "answers.csv")
    _csv(selection_table(study), folder / "selections.csv")
    _csv(updates, folder / "deltas.csv")
    stages = [
        {"style": row["style"], "method": row["method"], "model_seed": row["model_seed"], "stage": stage, "task": task,
         "accuracy": round(value, 6)}
        for row in rows.sequence_rows(study)
        for stage, line in row["matrix"].items()
        for task, value in line.items()
    ]  # fmt: skip
    _csv(pd.DataFrame(stages, columns=["style", "method", "model_seed", "stage", "task", "accuracy"]),
         folder / "sequence.csv")  # fmt: skip


def answers(study: Study) -> pd.DataFrame:
    """Why answers were right or wrong, and how they ended: one row per evaluated point, task, kind and name, counted.

    kind: `reason` (the scorer's) or `finish` (of the generation).
    """
    columns = ["point", "split", "suite", "task", "n", "kind", "name", "answers"]
    points = {(p.key, p.split): p for p in [*study.points, *(p for s in study.selected for p in s.points)]}
    found = [
        (point.key, point.split, score["suite"], score["task"], score["n"], kind, name, count)
        for point in points.values()
        for score in point.scores
        for kind, key in (("reason", "reasons"), ("finish", "finish"))
        for name, count in score.get(key, {}).items()
    ]
    return pd.DataFrame(found, columns=columns)


def write_plots(study: Study, training: Mapping[str, pd.DataFrame], updates: pd.DataFrame, folder: Path) -> None:
    """plots/*.csv: what `dvc.yaml` tells `dvc plots` to draw, accuracies in per cent. `series` is a line, `order` the
    order of its points (.dvc/plots/series.json)."""
    folder.mkdir(exist_ok=True)
    lines = [
        (f"{protocol}, {style}: {curve.name}", scale, round(100 * prior, 4), round(100 * new, 4))
        for protocol, style in cells(study)
        for curve in curves(study, protocol, style)
        if not curve.masked
        for scale, prior, new in curve.points
    ]
    tested = [
        (f"{row['protocol']}, {row['style']}: {method_style(row['method'])[-1]}", 0,
         round(100 * row["prior"].mean, 4), round(100 * row["new"].mean, 4))
        for row in rows.method_rows(study)
        if row["task"] == ALL and row["new"] and row["prior"]
    ]  # fmt: skip
    sequences = [
        (method_style(row["method"])[-1], stage + 1, stage + 1, round(value, 4))
        for row in rows.sequence_rows(study)
        for stage, value in enumerate(row["normalised"])
    ]
    losses = [
        (f"{task}: {name}", int(step), int(step), round(float(value), 6))
        for (task, name), frames in grouped(study, training).items()
        for step, value in pd.concat(frames).groupby("step")["loss"].mean().items()
    ]
    norms = updates[(updates["quantity"] == "relative_norm") & updates["layer"].map(str.isdigit).astype(bool)]
    means = norms.groupby(["task", "method", "donor", "layer"])["value"].mean()
    sizes = [
        (f"{task}: {update_name(method, donor)}", int(layer), int(layer), round(100 * float(value), 4))
        for (task, method, donor, layer), value in means.items()
    ]
    for name, found, x, y in (
        ("curves", lines, "prior", "new"),
        ("test", tested, "prior", "new"),
        ("sequence", sequences, "stage", "normalised"),
        ("training", losses, "step", "loss"),
        ("updates", sorted(sizes), "layer", "relative_norm"),
    ):
        _csv(pd.DataFrame(found, columns=["series", "order", x, y]), folder / f"{name}.csv")


def write_latex(study: Study, claims: Mapping[str, Any], folder: Path) -> None:
    """tables/*.tex: one table per protocol and style, the headline comparisons, the figures of the sequence.

    They need the package booktabs and are meant for \\input.
    """
    folder.mkdir(exist_ok=True)
    found = [row for row in rows.method_rows(study) if row["model_seed"] in (ALL, study.spec["model_seeds"][0])]
    if len(study.spec["model_seeds"]) > 1:
        found = [row for row in found if row["model_seed"] == ALL]
    for protocol, style in cells(study):
        own = [r for r in found if (r["protocol"], r["style"], r["task"]) == (protocol, style, ALL)]
        body = [
            [_tex(method_style(r["method"])[-1]), _tex_accuracy(r["new"]), _tex_accuracy(r["prior"]), f"{r['seeds']}",
             _tex(si(r["cost"]["flops"])) if r["cost"]["flops"] is not None else "", _tex(si(r["search_flops"]))]
            for r in own
        ]  # fmt: skip
        header = ["method", r"new task (\%)", r"prior (\%)", "seeds", "FLOPs", "search"]
        _write(folder / f"{protocol}_{style}.tex", header, body, "lrrrrr")
    head = [c for c in claims["comparisons"] if c["kind"] == CLAIM and c["task"] == ALL]
    body = [
        [c["protocol"], c["style"], f"{_tex(method_style(c['a'])[-1])} $-$ {_tex(method_style(c['b'])[-1])}",
         _tex_gap(c["new"]), _tex_gap(c["prior"]), c["verdict"]]
        for c in head
    ]  # fmt: skip
    _write(folder / "claims.tex", ["protocol", "style", "comparison", r"$\Delta$new", r"$\Delta$prior", "verdict"],
           body, "lllrrl")  # fmt: skip
    body = [
        [_tex(method_style(row["method"])[-1]),
         *(f"{100 * v:.1f}" if (v := row["figures"].get(name)) is not None else ABSENT for name in NAMES)]
        for row in rows.sequence_rows(study)
    ]  # fmt: skip
    if body:
        _write(folder / "sequence.tex", ["method", *NAMES], body, "lrrrr")


def _write(path: Path, header: Sequence[str], body: Sequence[Sequence[str]], columns: str) -> None:
    lines = [
        f"\\begin{{tabular}}{{{columns}}}",
        "\\toprule",
        " & ".join(header) + r" \\",
        "\\midrule",
        *(" & ".join(line) + r" \\" for line in body),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _tex(text: str) -> str:
    for plain, safe in (("\\", r"\textbackslash{}"), ("&", r"\&"), ("%", r"\%"), ("_", r"\_"), ("#", r"\#")):
        text = text.replace(plain, safe)
    return text.replace("λ", r"$\lambda$")


def _tex_accuracy(value: Estimate | None) -> str:
    if value is None:
        return ABSENT
    mark = "^{i}" if value.basis == ITEMS_ONLY else ""
    return f"${100 * value.mean:.1f} \\pm {100 * value.half:.1f}{mark}$"


def _tex_gap(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return ABSENT
    return f"${100 * value['mean']:+.1f}$ $[{100 * value['low']:+.1f}, {100 * value['high']:+.1f}]$"


def _csv(frame: pd.DataFrame, path: Path) -> None:
    frame.to_csv(path, index=False, lineterminator="\n")
