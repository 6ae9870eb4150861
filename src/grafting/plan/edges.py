"""Which of a job's needs the workflow must be told of, when the others follow.

A job of a study needs its data, its model and its checkpoints; most of these are needed by one another already.
Snakemake's time goes into the edges of its graph, so it gets only those that say something.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from grafting.plan.jobs import Job


def telling_needs(jobs: Mapping[str, Job], done: Collection[str]) -> dict[str, list[str]]:
    """Id -> the needs of each job without those that another need of it brings along, in the plan's order.

    jobs: in an order in which they could run. done: ids of the jobs whose records exist.
    A need N of a job is left out if another need M of it makes sure of it: either M is still to be made, and N is
    among what must be there for that; or M comes after N, and N is settled: done, with all that it needs. Snakemake
    runs a job again when a need of it was lost and is made anew, and takes its record away meanwhile, so whatever is
    done but not settled keeps its edges. Nothing is settled for a run that is told to do things again.
    """
    bit = {job_id: 1 << n for n, job_id in enumerate(jobs)}
    finished = sum(bit[job_id] for job_id in done if job_id in bit)
    settled = 0
    behind: dict[str, int] = {}  # all jobs that come before a job
    ensured: dict[str, int] = {}  # what is there once the job has been made in this run; nothing if it is done
    found: dict[str, list[str]] = {}
    for job_id, job in jobs.items():
        needs = [need for need in job.needs() if need in bit]
        before = brought = own = 0
        for need in needs:
            own |= bit[need]
            before |= behind[need]
            brought |= ensured[need]
        behind[job_id] = own | before
        ensured[job_id] = 0 if bit[job_id] & finished else own | brought
        if bit[job_id] & finished and own & finished == own:
            settled |= bit[job_id]
        follows = brought | (before & settled)
        found[job_id] = [need for need in needs if not bit[need] & follows]
    return found
