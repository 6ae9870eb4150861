"""The sidecars behind a report: every job from the evaluations down to data and code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from grafting.errors import UserError

STAGES = ("data", "models", "rollout", "train", "sensitivity", "merge", "evaluate", "select")
#: Lists in a spec that fill pages; the record itself holds them.
LONG = ("points", "candidates")
#: Fields that tell machines and library versions apart.
ENVIRONMENT = ("versions", "host", "git")


def behind(job: Any) -> dict[str, dict[str, Any]]:
    """Id -> sidecar of every job behind the report, links followed; in the order of stages. Absent ones are skipped."""
    found: dict[str, dict[str, Any]] = {}
    waiting = [reference for references in job.job.inputs.values() for reference in references]
    while waiting:
        job_id = waiting.pop().partition(":")[0]
        if job_id in found:
            continue
        try:
            sidecar = job.store.read(job_id)
        except UserError:
            continue
        found[job_id] = sidecar
        waiting += [sidecar["link"]] if "link" in sidecar else []
        waiting += [reference for references in sidecar.get("inputs", {}).values() for reference in references]
    return dict(sorted(found.items(), key=lambda item: (_place(item[0]), item[0])))


def _place(job_id: str) -> int:
    stage = job_id.partition("/")[0]
    return STAGES.index(stage) if stage in STAGES else len(STAGES)


def made(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Without the links."""
    return {job_id: sidecar for job_id, sidecar in records.items() if "link" not in sidecar}


def shown_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A spec with its long lists counted instead of listed."""
    return {
        key: f"{len(value)} (listed in the record)" if key in LONG and isinstance(value, list) else value
        for key, value in spec.items()
    }


def costs(records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per stage: jobs, CPU and wall seconds, tokens, FLOPs, largest peak memory."""
    rows = []
    for stage in STAGES:
        own = [s["cost"] for job_id, s in made(records).items() if job_id.startswith(f"{stage}/") and "cost" in s]
        if own:
            names = (
                "cpu_seconds",
                "wall_seconds",
                "tokens_generated",
                "tokens_forwarded",
                "tokens_backpropagated",
                "flops",
            )
            rows.append(
                {
                    "stage": stage,
                    "jobs": len(own),
                    **{name: sum(cost.get(name, 0) for cost in own) for name in names},
                    "peak_memory_bytes": max(cost.get("peak_memory_bytes", 0) for cost in own),
                }
            )
    return rows


def environments(records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The distinct machines, revisions and versions that the jobs ran on, with the number of jobs of each."""
    found: dict[str, dict[str, Any]] = {}
    for sidecar in made(records).values():
        parts = {name: sidecar.get(name) or {} for name in ENVIRONMENT}
        key = repr(sorted((name, sorted(map(repr, part.items()))) for name, part in parts.items()))
        found.setdefault(key, {**parts, "jobs": 0})["jobs"] += 1
    return sorted(found.values(), key=lambda part: -part["jobs"])


def files(sidecar: Mapping[str, Any]) -> Iterable[tuple[str, str, int | None]]:
    """(name, sha256, bytes) of a payload's files and of the outside files it was made from.

    A file on the Hub is pinned by its repository's revision: that stands in place of the hash, and bytes is None.
    """
    for name, about in (sidecar.get("payload") or {}).items():
        yield name, about["sha256"], about["bytes"]
    for entry in (sidecar.get("spec") or {}).get("files", []):
        if "hub" in entry:
            yield f"source: {entry['path']} of {entry['hub']}, revision", entry["revision"], None
        else:
            yield f"source: {entry['name']}", entry["sha256"], entry.get("bytes", 0)
