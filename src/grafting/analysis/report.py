"""Stage report: the study's tables, claims, figures, summary and page into `results/`.

No payload in the store: every file is written aside and renamed over the old one, so that a reader never
sees half a file and a hard link into the DVC cache is never written through.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from grafting.analysis import exports, figures, records, tables
from grafting.analysis.cells import cells, observations, overall_model, runs, task_names
from grafting.analysis.claims import counts, make_claims
from grafting.analysis.collect import MEND, Study, collect, training_curves
from grafting.analysis.page import write_page
from grafting.analysis.statistics import estimate
from grafting.errors import UserError

DELTAS = ["model_seed", "seed", "layer", "task", "method", "donor", "lr", "other", "quantity", "value"]


def run(job: Any) -> None:
    """Writes the tables (CSV, Parquet, LaTeX), claims.json, metrics.json, figures/*.{svg,pdf}, plots/*.csv, summary.md,
    report.html and config.resolved.yaml to `job.results`, and links models/<name>.

    UserError names a payload that is not there or holds no number.
    """
    study = collect(job)
    claims = make_claims(study)
    training = training_curves(job, study)
    results = Path(job.results)
    results.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".report-", dir=results))
    try:
        (aside / "figures").mkdir()
        updates = deltas(job)
        exports.write_tables(study, updates, aside)
        exports.write_plots(study, training, updates, aside / "plots")
        exports.write_latex(study, claims, aside / "tables")
        _write(aside / "claims.json", _json(claims))
        _write(aside / "metrics.json", _json(metrics(study, claims)))
        _write(aside / "config.resolved.yaml", yaml.safe_dump(job.spec["settings"], sort_keys=False))
        drawn = figures.write_figures(study, aside / "figures", training, reference(job.spec), updates)
        write_page(aside / "report.html", study, claims, drawn, aside / "figures", records.behind(job))
        _write(aside / "summary.md", tables.summary(study, claims))
        _publish(aside, results)
        for stale in set(figures.FIGURES) - set(drawn):
            for suffix in ("svg", "pdf"):
                (results / "figures" / f"{stale}.{suffix}").unlink(missing_ok=True)
        _link_models(job, results / "models")
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    job.metrics["verdict"] = claims["verdict"]


def reference(spec: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """Title -> table of others' published figures, whose text the spec holds."""
    return {
        name.removesuffix(".csv").replace("_", " "): pd.read_csv(io.StringIO(text), comment="#")
        for name, text in spec.get("reference", {}).items()
    }


def deltas(job: Any) -> pd.DataFrame:
    """What the updates look like, layer by layer; no rows in a study without single tasks."""
    folders, parts = job.inputs("deltas"), []
    for entry in job.spec.get("deltas", []):
        path = folders[entry["input"]] / "deltas.csv"
        try:
            frame = pd.read_csv(path, dtype={"layer": str, "other": str}, keep_default_na=False, na_values=["nan"])
            value, pair = frame["value"].astype(float), frame["other"] != ""
        except (OSError, KeyError, ValueError) as error:
            raise UserError(f"{path.parent.name}/{path.name}: no table of updates ({error}); {MEND}") from None
        # of a pair without an update there is no cosine
        if np.isinf(value).any() or value[~pair].isna().any():
            raise UserError(f"{path.parent.name}/{path.name}: a value is no number; {MEND}")
        parts.append(frame.assign(model_seed=entry["model_seed"], seed=entry["seed"])[DELTAS])
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=DELTAS)


def _link_models(job: Any, folder: Path) -> None:
    """`results/models/<name>`: relative links to the selected grafts that were written out, here or not."""
    paths = job.addresses("models")
    wanted = {n: paths[i] for entry in job.spec.get("selections", []) for n, i in entry.get("models", {}).items()}
    if not wanted:
        return
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():  # of an earlier study; the model itself stays in the store
        if old.is_symlink():
            old.unlink()
        elif old.is_dir():  # links to DVC's cache, made of ours
            shutil.rmtree(old)
    for name, path in wanted.items():
        (folder / name).symlink_to(os.path.relpath(path, folder), target_is_directory=True)


def metrics(study: Study, claims: Mapping[str, Any]) -> dict[str, Any]:
    """Plain numbers for `dvc metrics`: protocol -> style -> method -> {new, prior}, and verdicts counted."""
    model = overall_model(study)
    result: dict[str, Any] = {}
    for (protocol, style), selected in cells(study).items():
        for family in dict.fromkeys(s.labels["family"] for s in selected):
            found = runs(study, selected, family, task_names(study, protocol), model)
            for suite in ("new", "prior"):
                value = estimate(observations(found, suite))
                if value is not None:
                    place = result.setdefault(protocol, {}).setdefault(style, {}).setdefault(family, {})
                    place[suite] = round(value.mean, 6)
    for rollout in study.rollouts:
        shown = "with_demonstration" if rollout["with_demonstration"] else "without_demonstration"
        place = result.setdefault("deployed", {}).setdefault(f"m{rollout.get('model_seed')}", {})
        style = place.setdefault(shown, {}).setdefault(rollout["style"], {})
        style[rollout["task"]] = round(rollout["accuracy"], 6)
    return {**result, "comparisons": counts(claims)}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _publish(aside: Path, results: Path) -> None:
    """Renames every file of `aside` to its place; the summary, which points to the others, last."""
    files = sorted((p for p in aside.rglob("*") if p.is_file()), key=lambda p: (p.name == "summary.md", p.as_posix()))
    for source in files:
        target = results / source.relative_to(aside)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source, target)
