"""Which jobs share one scheduler job: starting Python twice and asking a queue costs more than many a small job.

A bundle must never wait for itself: no path of the study may leave it and come back. The open jobs are put into
one order in which every job comes after what it needs, and the order is cut into pieces; what lies in one piece
is one bundle. Every path follows the order, so a path that has left a piece cannot return to it. Sorting by depth
keeps independent jobs side by side: wide levels give bundles that run at the same time, narrow ones share one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from grafting.plan.jobs import Job


def depths(jobs: Mapping[str, Job]) -> dict[str, int]:
    """Id -> length of the longest chain of needed jobs below it (0: needs none)."""
    found: dict[str, int] = {}
    for start in jobs:
        waiting = [start]
        while waiting:
            job_id = waiting[-1]
            needs = [need for need in jobs[job_id].needs() if need in jobs]
            if open_needs := [need for need in needs if need not in found]:
                waiting += open_needs
                continue
            found[job_id] = 1 + max((found[need] for need in needs), default=-1)
            waiting.pop()
    return found


def bundles(
    jobs: Mapping[str, Job], size: int, alone: Collection[str] = (), done: Collection[str] = ()
) -> dict[str, int]:
    """Id of an open job -> number of its bundle, for bundles of at most `size` jobs.

    `alone`: stages whose jobs are never bundled (those that ask for an accelerator). `done`: ids of finished jobs;
    one that hangs on an unfinished job counts as open, since Snakemake runs it again.
    Bundles are as equal in size as the depth allows: a level of 17 jobs gives two of at most 9, not 16 and 1.
    """
    depth = depths(jobs)
    levels: dict[int, list[str]] = {}
    finished: set[str] = set()
    for job_id in sorted(jobs, key=depth.__getitem__):  # stable: the plan's own order within a level
        if job_id in done and all(need in finished or need not in jobs for need in jobs[job_id].needs()):
            finished.add(job_id)
        else:
            levels.setdefault(depth[job_id], []).append(job_id)
    found: dict[str, int] = {}
    number = filled = 0
    for _, level in sorted(levels.items()):
        together = [job_id for job_id in level if jobs[job_id].stage not in alone]
        if filled and filled + len(together) > size:
            number, filled = number + 1, 0
        share = -(-len(together) // max(1, -(-len(together) // size)))
        for job_id in together:
            if filled >= (size if len(together) <= size else share):
                number, filled = number + 1, 0
            found[job_id] = number
            filled += 1
        if len(together) < len(level):
            # jobs that go alone stand between this piece and the next
            number, filled = number + 1, 0
    return found
