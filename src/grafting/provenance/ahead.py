"""Nodes may have no network: what their jobs would have to fetch is fetched here, before the first job is sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from grafting.plan.jobs import Job
from grafting.provenance.store import Store


def lacking_inputs(jobs: Mapping[str, Job], open_jobs: Collection[str]) -> list[str]:
    """Ids of finished jobs whose payloads the open jobs read."""
    wanted = dict.fromkeys(need for job_id in open_jobs for need in jobs[job_id].needs())
    return [need for need in wanted if need not in open_jobs]


def downloads(jobs: Mapping[str, Job], open_jobs: Collection[str]) -> list[tuple[str, str, str | None]]:
    """(repository, revision, file) on the Hub that the open jobs read; file None: a whole model."""
    found = []
    for job_id in open_jobs:
        spec = jobs[job_id].spec
        source = spec.get("source")
        if isinstance(source, dict) and "hub" in source:
            found.append((source["hub"], source.get("revision"), None))
        found += [(file["hub"], file["revision"], file["path"]) for file in spec.get("files", ()) if "hub" in file]
    return list(dict.fromkeys(found))


def fetch(jobs: Mapping[str, Job], open_jobs: Collection[str], store: Store) -> None:
    """Bring what the open jobs read and what is not made by one of them: payloads from DVC's cache or remote, models
    and data from the Hub into its cache (HF_HOME), which the nodes must share. UserError names what cannot be had.
    """
    store.payloads(lacking_inputs(jobs, open_jobs))
    if wanted := downloads(jobs, open_jobs):
        from grafting import hub

        for repository, revision, file in wanted:
            if file is None:
                hub.snapshot(repository, revision)
            else:
                hub.file(repository, revision, file)
