"""`grafting <verb>`: the same functions that the workflow uses, for a person."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import yaml

from grafting.config.load import read_yaml
from grafting.errors import UserError
from grafting.provenance import commands


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
    print(f"\nResults: {results}/  (report.html, summary.md, evaluations.csv, claims.json, figures/)")
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
    """Say what of a job's key changed: spec field, input, module, library, file, alias; and what changed first."""
    from grafting.plan.front import load_study
    from grafting.provenance.inspect import find
    from grafting.provenance.store import Store
    from grafting.provenance.why import why as explain

    study, store = load_study(*_overlays(options)), Store()
    job = study.jobs[find(options.target, list(study.jobs), store.root)]
    print("\n".join(explain(job, study.jobs, store, options.since)))
    return 0


def alias(options: argparse.Namespace) -> int:
    """Declare that a new code digest or key changes nothing against an old one (aliases.yaml)."""
    from grafting.plan.aliases import ALIASES, Alias, check_aliases, with_entry, write_aliases
    from grafting.plan.code import MANIFESTS, PROJECT
    from grafting.plan.front import load_study
    from grafting.plan.jobs import key_of
    from grafting.plan.study import Study
    from grafting.provenance.store import Store

    study, old, new = load_study(*_overlays(options)), key_of(options.old), key_of(options.new)
    ways = [way for job in study.jobs.values() for way in (job, *job.alternatives.values())]
    if new not in MANIFESTS and new not in {way.own_key for way in ways}:
        raise UserError(f"{new}: neither a code digest nor a key of the present plan; `grafting why JOB` prints them")
    entry = Alias("code" if new in MANIFESTS else "keys", new, old, options.reason)
    fresh = Study(study.config, with_entry(study.aliases, entry), study.claims)
    check_aliases(fresh.aliases, fresh.jobs.values(), Store())
    write_aliases(PROJECT / ALIASES, fresh.aliases)
    print(f"{ALIASES}: {new} counts as {old}; {len(set(fresh.jobs) - set(study.jobs))} jobs have other keys now")
    return 0


def trace(options: argparse.Namespace) -> int:
    """Print the tree of artefacts behind a result, down to data and code."""
    from grafting.plan.code import project_aliases
    from grafting.provenance.inspect import all_ids, find
    from grafting.provenance.inspect import trace as walk
    from grafting.provenance.store import Store

    store = Store()
    for line in walk(find(options.target, all_ids(store), store.root), store, project_aliases()):
        print(line)
    return 0


def watch(options: argparse.Namespace) -> int:
    """Show how far the run in this folder is: stages, running jobs, the queue, failures; until it ends."""
    import time

    from grafting.provenance.live import lines, look

    while True:
        view = look()
        print("\n".join(lines(view)), flush=True)
        if options.once or view.alive is False:
            return 1 if view.failed else 0
        time.sleep(options.every)
        print()


def submit(options: argparse.Namespace) -> int:
    """Run a preset on a cluster: calls Snakemake with a profile; --dry-run prints every sbatch line instead."""

    from grafting.provenance.submit import command, dry_run

    arguments = command(options.preset, options.profile, options.dry_run, options.extra)
    if options.dry_run:
        return dry_run(arguments)
    print("snakemake", " ".join(arguments), flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "snakemake", *arguments])


def publish(options: argparse.Namespace) -> int:
    """Copy the exported results to published/<preset>/ (for maintainers)."""
    from grafting.analysis.published import write_published
    from grafting.plan.code import PROJECT

    preset = read_yaml(options.results / "config.resolved.yaml")["preset"]
    target = PROJECT / "published" / preset
    write_published(options.results, target)
    print(f"written: published/{preset}/")
    return 0


def compare(options: argparse.Namespace) -> int:
    """Say what changed between two studies (git revisions or result folders): settings, code, verdicts, numbers."""
    from grafting.analysis.compare import Results
    from grafting.analysis.compare import compare as differences

    print("\n".join(differences(Results(options.before), Results(options.after), options.all)))
    return 0


def sources(options: argparse.Namespace) -> int:
    """Print size and hash of outside files (--write: into sources.lock.yaml), or the hash of a model folder."""
    from grafting.models.stage import directory_digest
    from grafting.plan.sources import LOCK, write_sources
    from grafting.provenance.files import file_digest

    entries = {}
    for folder in options.folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if not files:
            raise UserError(f"{folder}: holds no files")
        if (folder / "config.json").is_file():
            if options.write:
                raise UserError(
                    f"{folder}: a model directory is pinned in the configuration, not in {LOCK}: "
                    f"{{path: {folder}, sha256: {directory_digest(folder)}}}"
                )
            entries[folder.name] = {"path": str(folder), "sha256": directory_digest(folder)}
            continue
        entries[folder.name] = [{"name": p.name, "sha256": file_digest(p), "bytes": p.stat().st_size} for p in files]
    if options.write:
        print("\n".join(write_sources(entries)) or f"{LOCK}: nothing has changed")
    else:
        print(yaml.safe_dump(entries, sort_keys=False), end="")
    return 0


def merge(options: argparse.Namespace) -> int:
    """Merge models as a recipe says and write a complete model directory; needs no workflow."""
    from grafting.merging.command import merge as run

    return run(options)


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
    commands.register(verb)
    verb(trace).add_argument("target", help="a result, sentinel, payload or job")
    for function in (config, plan, why, alias):
        sub = verb(function)
        sub.add_argument("--configfile", type=Path, nargs="*", default=[], help="overlays on config.yaml")
        if function is plan:
            sub.add_argument("--jobs", action="store_true", help="list every job")
        if function is why:
            sub.add_argument("target", help="a job's id, its name without key, or a path of it")
            sub.add_argument("--since", metavar="REV", help="compare with the sentinels of a git revision")
        if function is alias:
            sub.add_argument("old", help="a code digest or key, or a job's id, that is recorded")
            sub.add_argument("new", help="the code digest or key of the present plan that changes nothing")
            sub.add_argument("--reason", required=True, help="why nothing changes")
    sub = verb(sources)
    sub.add_argument("folders", type=Path, nargs="+")
    sub.add_argument("--write", action="store_true", help="put the entries into sources.lock.yaml")
    sub = verb(watch)
    sub.add_argument("--once", action="store_true", help="once, instead of until the run has ended")
    sub.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="pause between two looks (5)")
    sub = verb(submit)
    sub.add_argument("--preset", help="name of a file in presets/ (none: config.yaml alone)")
    sub.add_argument("--profile", default="slurm", help="name of a folder in profiles/ (slurm)")
    sub.add_argument("--dry-run", action="store_true", help="print every sbatch line; send nothing")
    sub.add_argument("extra", nargs="*", metavar="-- ARGUMENT", help="more arguments for Snakemake, after --")
    sub = verb(compare)
    sub.add_argument("before", help="a git revision, or a folder of results")
    sub.add_argument("after", help="a git revision, or a folder of results", nargs="?", default="results")
    sub.add_argument("--all", action="store_true", help="also differences within their interval")
    sub = verb(merge)
    sub.add_argument("recipe", type=Path, nargs="?", help="a recipe (docs/reference/merging.md)")
    sub.add_argument("--from-mergekit", type=Path, metavar="FILE", help="read a mergekit configuration instead")
    sub.add_argument("--out", type=Path, help="the model directory to make; must not exist")
    sub.add_argument("--dry-run", action="store_true", help="check everything, print what would be done")
    sub.add_argument("--threads", type=int, help="tensors worked on at once (default: the cores, at most 4)")
    sub.add_argument("--hashes", action="store_true", help="put sha256 of all weights into the model card")
    sub.add_argument("--diagnostics", type=Path, metavar="DIR", help="norms, cosines and signs of the deltas to DIR")
    sub.add_argument("--print-recipe", action="store_true", help="print the recipe (of a mergekit file), and stop")
    sub = verb(estimate)
    sub.add_argument("configfile", type=Path, nargs="*", default=[], help="overlays on config.yaml, as a preset")
    sub.add_argument("--throughput", type=Path, help="a table of your own, in the form of throughput.yaml")
    options = parser.parse_args(arguments)
    try:
        return options.function(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
