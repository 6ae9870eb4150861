"""Finished jobs run again in a scratch store; what they make must be what was made.

On the same type of machine with the same versions that means: the same bytes. Elsewhere sums are rounded
differently, so the figures of the sidecar and the scores must agree within a tolerance.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from grafting.errors import UserError
from grafting.plan.jobs import Job
from grafting.plan.planfile import write_plan
from grafting.provenance import integrity
from grafting.provenance.store import Store
from grafting.provenance.why import ABSENT, differences

if TYPE_CHECKING:
    from grafting.plan.study import Study

#: What `python -m` runs for an entry of `plan.code.ENTRIES`; the report has dates and costs in it.
MODULES = {
    "data": "grafting.tasks",
    "models": "grafting.models",
    "lineage": "grafting.training.lineage",
    "rollout": "grafting.rollouts",
    "train": "grafting.training",
    "sensitivity": "grafting.sensitivity",
    "merge": "grafting.merging",
    "deltas": "grafting.merging.deltas",
    "evaluate": "grafting.evaluation",
    "frontier": "grafting.evaluation.frontier",
    "select": "grafting.evaluation.select",
}
#: Facts of the host and versions that decide whether bytes must be equal.
DECIDING_HOST = ("system", "machine", "cpu", "cpu_capability")
BYSTANDERS = {"snakemake", "dvc"}  # they move payloads, they do not make them
#: Say how much was taken over from earlier artefacts; a scratch store has none.
UNCOMPARED = {"points_computed", "points_reused"}
RELATIVE, ABSOLUTE = 0.05, 0.02  # figures of a sidecar on another type of machine
ITEMS, SHARE = 2, 0.02  # items of `correct`, and share of n; the larger counts


@dataclass
class Verdict:
    """Outcome for one job. `same`: bytes | figures (within tolerance, on another type of machine) | no."""

    job_id: str
    same: str
    details: list[str] = field(default_factory=list)


def finished(study: Study, store: Store) -> dict[str, Job]:
    """Jobs of the plan whose artefact is there and was computed, not linked; those behind selections too."""
    found = {}
    for job in study.jobs.values():
        for way in (job, *job.alternatives.values()):
            if way.stage == "report" or way.alternatives or way.id in found or not store.sentinel(way.id).exists():
                continue
            if "link" not in store.read(way.id):
                found[way.id] = way
    return found


def choose(ids: list[str], sample: int | None, seed: int) -> list[str]:
    """`sample` of the ids, the same ones for the same seed; all if it is None or there are no more."""
    ids = sorted(ids)
    return ids if sample is None or sample >= len(ids) else sorted(random.Random(seed).sample(ids, sample))


def _stock(scratch: Store, store: Store, job: Job) -> None:
    """Sentinels of a job's inputs and links to their payloads. Nothing else: an earlier artefact of the same name
    would be taken over instead of computed."""
    for job_id in job.needs():
        payload = store.payload(job_id)
        while True:
            scratch.sentinel(job_id).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(store.sentinel(job_id), scratch.sentinel(job_id))
            sidecar = store.read(job_id)
            if "link" not in sidecar:
                break
            job_id = sidecar["link"]
        place = scratch.root / "store" / job_id
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(payload.resolve(), target_is_directory=True)
            integrity.note(scratch.intact(job_id), payload, sidecar["payload"])


def rerun(job: Job, store: Store) -> Verdict:
    """Run one job in a folder of its own under work/verify/, which stays only if the outcome differs.

    Errors: UserError if an input is nowhere to be had.
    """
    (store.root / "work" / "verify").mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{job.key}-", dir=store.root / "work" / "verify")).resolve()
    scratch = Store(folder)
    _stock(scratch, store, job)
    local = dataclasses.replace(job, places={key: os.path.abspath(path) for key, path in job.places.items()})
    log = folder / "log"
    command = [sys.executable, "-m", MODULES[job.entry[0]], "--job", job.id, "--log", str(log)]
    command += ["--plan", str(write_plan({job.id: local}, folder / "plans"))]
    environment = {key: value for key, value in os.environ.items() if key != "GRAFTING_WARM"}
    package = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Verdict(job.id, "no", [f"the job failed ({done.returncode}): {said}; log: {log}"])
    verdict = compare(job.id, store, scratch)
    if verdict.same == "no":
        verdict.details.append(f"made now: {folder / 'store' / job.id}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return verdict


def compare(job_id: str, store: Store, scratch: Store) -> Verdict:
    """The artefact in `scratch` against the one in `store`."""
    old, new = store.read(job_id), scratch.read(job_id)
    before, after = ({name: a["sha256"] for name, a in side["payload"].items()} for side in (old, new))
    files = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if not files:
        return Verdict(job_id, "bytes")
    changed = _other_machine(old, new)
    if not changed:
        return Verdict(job_id, "no", [f"store/{job_id}/{name}: other bytes" for name in files])
    wrong = _figures(old["metrics"], new["metrics"])
    if job_id.startswith("evaluate/"):
        wrong += _scores(store.payload(job_id), scratch.payload(job_id))
    note = f"made on another type of machine ({', '.join(changed)}), other bytes in {', '.join(files)}"
    if before.keys() != after.keys():
        wrong.append("other files")
    return Verdict(job_id, "no" if wrong else "figures", [note, *(f"store/{job_id}: {line}" for line in wrong)])


def _other_machine(old: Mapping, new: Mapping) -> list[str]:
    """Names of the deciding facts that differ. What only one side knows does not: torch's, where it is not needed."""
    libraries = sorted(new["versions"].keys() - BYSTANDERS)
    changed = []
    for part, names in (("host", DECIDING_HOST), ("versions", libraries)):
        pairs = {name: (old[part].get(name), new[part].get(name)) for name in names}
        changed += [name for name, (was, now) in pairs.items() if was != now and None not in (was, now)]
    return changed


def _figures(old: Mapping, new: Mapping) -> list[str]:
    wrong = []
    for name, was, now in differences(old or {}, new or {}):
        if name in UNCOMPARED:
            continue
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (was, now))
        was, now = ("nothing" if value is ABSENT else value for value in (was, now))
        if not numbers or not math.isclose(was, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            wrong.append(f"{name}: {was} recorded, {now} now")
    return wrong


def _scores(old: Path, new: Path) -> list[str]:
    wrong = []
    for path in sorted(old.glob("*.json")):
        before = json.loads(path.read_text(encoding="utf-8"))
        if "scores" not in before or not (new / path.name).is_file():
            continue
        after = json.loads((new / path.name).read_text(encoding="utf-8"))
        for was, now in zip(before["scores"], after["scores"], strict=True):
            if abs(was["correct"] - now["correct"]) > max(ITEMS, SHARE * was["n"]):
                wrong.append(
                    f"{path.name}, {was['task']}: {was['correct']} of {was['n']} recorded, {now['correct']} now"
                )
    return wrong


def verify(study: Study, store: Store, sample: int | None, seed: int, say=print) -> bool:
    """Rerun finished jobs of a plan, all or a sample; True if none differs. `say` is told each outcome.

    Errors: UserError if nothing is finished.
    """
    jobs = finished(study, store)
    if not jobs:
        raise UserError("no job of this configuration is finished, so there is nothing to verify; run snakemake first")
    chosen = choose(list(jobs), sample, seed)
    words = {"bytes": "same bytes", "figures": "same within tolerance", "no": "DIFFERENT"}
    counts = dict.fromkeys(words, 0)
    for n, job_id in enumerate(chosen, start=1):
        verdict = rerun(jobs[job_id], store)
        counts[verdict.same] += 1
        say(f"[{n}/{len(chosen)}] {job_id}: {words[verdict.same]}")
        for line in verdict.details:
            say(f"    {line}")
    say(", ".join(f"{counts[same]} {word}" for same, word in words.items()))
    return counts["no"] == 0
