"""The verbs of `grafting` that keep a study whole: status, repair, add, gc, verify."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grafting.config.load import read_yaml
from grafting.errors import UserError
from grafting.provenance.store import Store


def status(options: argparse.Namespace) -> int:
    """Say where the payloads are that sentinels name; exit status 1 if one is nowhere or not as it was made."""
    from grafting.provenance.health import examine

    health = examine(Store(), options.deep)
    remote = f"the DVC remote {health.remote_name!r}" if health.remote_name else "a DVC remote (none is configured)"
    print(f"present in store/:                   {len(health.present)}")
    print(f"only in DVC's cache (dvc checkout):  {len(health.cached)}")
    print(f"only in {remote} (dvc pull): {len(health.remote)}")
    print(f"nowhere:                             {len(health.missing)}")
    if health.unversioned:
        print(f"not under DVC yet (`grafting add`, or the next run): {len(health.unversioned)} of the present")
    for job_id in health.missing:
        print(f"  nowhere: {job_id}")
    for job_id, files in health.altered.items():
        origin = "DVC still has it" if job_id in health.mendable else "DVC has no other copy"
        print(f"  altered: store/{job_id}: {', '.join(files)} ({origin})")
    for job_id in health.damaged:
        print(f"  damaged sentinel: provenance/{job_id}.json")
    if not health.sound:
        print("`grafting repair` brings back from DVC what it still has, and removes exactly the sentinels of the "
              "rest, so that the next run makes it again.")  # fmt: skip
    return 0 if health.sound else 1


def repair(options: argparse.Namespace) -> int:
    """Bring back altered payloads that DVC still has; let the next run make again what is nowhere."""
    from grafting.provenance.health import examine
    from grafting.provenance.health import repair as mend

    store = Store()
    mended = mend(store, examine(store, options.deep))
    for job_id in mended.restored:
        print(f"brought back: store/{job_id}")
    for job_id in mended.removed:
        print(f"removed: provenance/{job_id}.json")
    if not (mended.restored or mended.removed):
        print("nothing to repair")
    return 0


def add(options: argparse.Namespace) -> int:
    """Put payloads under DVC that are not yet, as every run does at its end."""
    from grafting.provenance.versioning import add_payloads

    added = add_payloads(Store())
    print(f"{len(added.taken)} payloads are new under DVC")
    for job_id in added.refused:
        print(f"  altered since it was made, not taken: store/{job_id}", file=sys.stderr)
    return 1 if added.refused else 0


def _planned(overlays: list[Path]) -> set[str]:
    """Ids of all jobs of all presets and of config.yaml with the given overlays, those behind selections included."""
    from grafting.plan.front import load_config
    from grafting.plan.study import Study

    ids: set[str] = set()
    for overlay in [None, *sorted(Path("presets").glob("*.yaml")), *overlays]:
        try:
            study = Study(load_config(*([] if overlay is None else [read_yaml(overlay)])))
        except UserError as error:
            if overlay is None or overlay in overlays:
                raise
            print(f"{overlay}: not planned, its payloads are not known ({str(error).splitlines()[0]})", file=sys.stderr)
            continue
        for job in study.jobs.values():
            ids |= {job.id, *(way.id for way in job.alternatives.values())}
    return ids


def gc(options: argparse.Namespace) -> int:
    """List payloads that no branch, tag, experiment, work tree or preset names; --yes drops them."""
    from grafting.provenance.gc import collect, drop

    store = Store()
    garbage = collect(store, _planned(options.configfile))
    if not garbage:
        print("nothing to drop")
        return 0
    for job_id in sorted({*garbage.here, *garbage.listed}):
        size = f"{garbage.here[job_id] / 1e6:.1f} MB" if job_id in garbage.here else "not here, listed by DVC"
        print(f"store/{job_id}  {size}")
    total = f"{len({*garbage.here, *garbage.listed})} payloads, {sum(garbage.here.values()) / 1e6:.1f} MB"
    if not options.yes:
        print(f"{total}; nothing is dropped without --yes")
        return 0
    notice = drop(store, garbage)
    print(f"dropped: {total}")
    if notice:
        print(f"notice: {notice}", file=sys.stderr)
    return 0


def verify(options: argparse.Namespace) -> int:
    """Run finished jobs again in a scratch store and compare what they make; exit status 1 on a difference."""
    from grafting.plan.front import load_study, set_environment
    from grafting.provenance.verify import verify as check

    study = load_study(*[read_yaml(path) for path in options.configfile])
    set_environment(study)
    return 0 if check(study, Store(), options.sample, options.seed, lambda line: print(line, flush=True)) else 1


def register(verb) -> None:
    """Add these verbs to the command line; `verb(function)` makes a parser for one."""
    for function in (status, repair):
        verb(function).add_argument("--deep", action="store_true", help="hash every file, also unchanged ones")
    verb(add)
    for function in (gc, verify):
        sub = verb(function)
        sub.add_argument("--configfile", type=Path, nargs="*", default=[], help="overlays on config.yaml")
        if function is gc:
            sub.add_argument("--yes", action="store_true", help="drop what is listed")
        else:
            sub.add_argument("--sample", type=int, metavar="N", help="only N jobs, chosen at random (default: all)")
            sub.add_argument("--seed", type=int, default=0, help="of the choice")
