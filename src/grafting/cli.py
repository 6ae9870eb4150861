"""`grafting <verb>`: the same functions that the workflow uses, for a person."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from grafting.config.load import read_yaml
from grafting.errors import UserError


def _overlays(options: argparse.Namespace) -> list[dict]:
    return [read_yaml(path) for path in options.configfile]


def show(options: argparse.Namespace) -> int:
    """Print the table of the exported results, the comparison with published/, and where all lies."""
    from grafting.analysis.published import compare
    from grafting.plan.code import PROJECT

    results = options.results
    summary = results / "summary.md"
    if not summary.is_file():
        raise UserError(f"{summary}: no results yet; run `make reproduce` or snakemake")
    print(summary.read_text(encoding="utf-8"))
    preset = read_yaml(results / "config.resolved.yaml")["preset"]
    print(compare(results, PROJECT / "published" / preset).render())
    print(f"\nResults: {results}/  (summary.md, evaluations.csv, claims.json, figures/frontier.svg)")
    print("Checkpoints and predictions: store/   What made them: provenance/   Logs: work/logs/")
    return 0


def config(options: argparse.Namespace) -> int:
    """Print the resolved configuration."""
    from grafting.plan.front import load_config

    resolved = load_config(*_overlays(options))
    print(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), end="")
    return 0


def plan(options: argparse.Namespace) -> int:
    """List the jobs of the study: how many per stage, how many are done."""
    from grafting.plan.front import load_study
    from grafting.plan.jobs import STAGES
    from grafting.provenance.store import Store

    study, store = load_study(*_overlays(options)), Store()
    for stage in STAGES:
        jobs = [job for job in study.jobs.values() if job.stage == stage]
        done = sum(store.sentinel(job.id).exists() for job in jobs)
        if jobs:
            print(f"{stage:12s} {len(jobs):5d} jobs, {done} done")
        if options.jobs:
            for job in jobs:
                print(f"  {'done' if store.sentinel(job.id).exists() else 'open'}  {job.id}")
    return 0


def estimate(options: argparse.Namespace) -> int:
    """Print what a study will take: jobs, GPU hours, generated tokens, disk, largest memory."""
    from grafting.plan.estimate import TABLE, read_table, render
    from grafting.plan.front import load_config
    from grafting.plan.study import Study

    unknown: list[str] = []
    study = Study(load_config(*_overlays(options), unknown=unknown))
    print(render(study, read_table(options.throughput), unknown, str(options.throughput or TABLE.name)))
    return 0


def why(options: argparse.Namespace) -> int:
    """Say what of a job's key changed: spec field, input, module, library."""
    from grafting.plan.front import load_study
    from grafting.provenance.inspect import find
    from grafting.provenance.inspect import why as explain
    from grafting.provenance.store import Store

    study, store = load_study(*_overlays(options)), Store()
    job = study.jobs[find(options.target, list(study.jobs))]
    print("\n".join(explain(job, store, options.since)))
    return 0


def trace(options: argparse.Namespace) -> int:
    """Print the tree of artefacts behind a result, down to data and code."""
    from grafting.provenance.inspect import all_ids, find
    from grafting.provenance.inspect import trace as walk
    from grafting.provenance.store import Store

    store = Store()
    for line in walk(find(options.target, all_ids(store)), store):
        print(line)
    return 0


def status(options: argparse.Namespace) -> int:
    """Say where the payloads are that sentinels name; exit status 1 if one is nowhere."""
    from grafting.provenance.health import examine
    from grafting.provenance.store import Store

    health = examine(Store())
    print(f"present in store/:                  {len(health.present)}")
    print(f"only in DVC's cache (dvc checkout): {len(health.cached)}")
    print(f"listed by DVC, not here (dvc pull): {len(health.listed)}")
    print(f"nowhere:                            {len(health.missing)}")
    for word, ids in (("nowhere", health.missing), ("damaged sentinel", health.damaged)):
        for job_id in ids:
            print(f"  {word}: {job_id}")
    if health.missing or health.damaged:
        print("`grafting repair` removes exactly these sentinels, so that the next run makes them again.")
        return 1
    return 0


def repair(options: argparse.Namespace) -> int:
    """Remove the sentinels of payloads that are nowhere, so that they are made again."""
    from grafting.provenance.health import examine
    from grafting.provenance.health import repair as mend
    from grafting.provenance.store import Store

    store = Store()
    removed = mend(store, examine(store))
    print("\n".join(f"removed: provenance/{job_id}.json" for job_id in removed) or "nothing to repair")
    return 0


def publish(options: argparse.Namespace) -> int:
    """Copy the exported results to published/<preset>/ (for maintainers)."""
    from grafting.analysis.published import write_published
    from grafting.plan.code import PROJECT

    preset = read_yaml(options.results / "config.resolved.yaml")["preset"]
    target = PROJECT / "published" / preset
    write_published(options.results, target)
    print(f"written: published/{preset}/")
    return 0


def sources(options: argparse.Namespace) -> int:
    """Print size and hash of outside files for sources.lock.yaml, or the hash of a model folder."""
    from grafting.models.stage import directory_digest
    from grafting.provenance.files import file_digest

    entries = {}
    for folder in options.folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if not files:
            raise UserError(f"{folder}: holds no files")
        if (folder / "config.json").is_file():
            entries[folder.name] = {"path": str(folder), "sha256": directory_digest(folder)}
            continue
        entries[folder.name] = [{"name": p.name, "sha256": file_digest(p), "bytes": p.stat().st_size} for p in files]
    print(yaml.safe_dump(entries, sort_keys=False), end="")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit status 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="grafting", description="Grafting against on-policy self-distillation.")
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(function, **extra) -> argparse.ArgumentParser:
        sub = verbs.add_parser(function.__name__, help=function.__doc__, description=function.__doc__, **extra)
        sub.set_defaults(function=function)
        return sub

    for function in (show, publish):
        verb(function).add_argument("--results", type=Path, default=Path("results"))
    for function in (status, repair):
        verb(function)
    verb(trace).add_argument("target", help="a result, sentinel, payload or job")
    for function in (config, plan, why):
        sub = verb(function)
        sub.add_argument("--configfile", type=Path, nargs="*", default=[], help="overlays on config.yaml")
        if function is plan:
            sub.add_argument("--jobs", action="store_true", help="list every job")
        if function is why:
            sub.add_argument("target", help="a job's id, its name without key, or a path of it")
            sub.add_argument("--since", metavar="REV", help="compare with the sentinels of a git revision")
    sub = verb(estimate)
    sub.add_argument("configfile", type=Path, nargs="*", default=[], help="overlays on config.yaml, as a preset")
    sub.add_argument("--throughput", type=Path, help="a table of your own, in the form of throughput.yaml")
    verb(sources).add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    try:
        return options.function(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
