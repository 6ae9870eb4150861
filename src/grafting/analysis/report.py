"""Stage report: the study's tables, claims, figure and summary into `results/`.

No payload in the store: every file is written aside and renamed over the old one, so that a reader never
sees half a file and a hard link into the DVC cache is never written through.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from grafting.analysis import figures, tables
from grafting.analysis.claims import ALL, cells, counts, make_claims, observations, runs, task_names
from grafting.analysis.collect import Study, collect, selection_table, table
from grafting.analysis.statistics import estimate


def run(job: Any) -> None:
    """Writes evaluations.csv, selections.csv, summary.md, metrics.json, claims.json, config.resolved.yaml and
    figures/frontier.{svg,pdf} to `job.results`, and links models/<name>.

    UserError names a payload that is not there.
    """
    study = collect(job)
    claims = make_claims(study)
    results = Path(job.results)
    results.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".report-", dir=results))
    try:
        (aside / "figures").mkdir()
        table(study).to_csv(aside / "evaluations.csv", index=False, lineterminator="\n")
        selection_table(study).to_csv(aside / "selections.csv", index=False, lineterminator="\n")
        _write(aside / "claims.json", _json(claims))
        _write(aside / "metrics.json", _json(metrics(study, claims)))
        _write(aside / "config.resolved.yaml", yaml.safe_dump(job.spec["settings"], sort_keys=False))
        figures.write_frontier(study, aside / "figures")
        _write(aside / "summary.md", tables.summary(study, claims))
        _publish(aside, results)
        _link_models(job, results / "models")
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    job.metrics["verdict"] = claims["verdict"]


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
    model = ALL if len(study.spec["model_seeds"]) > 1 else study.spec["model_seeds"][0]
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
