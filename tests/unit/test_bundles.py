"""Bundles of jobs: never larger than asked, and never waiting for themselves."""

from hypothesis import given, settings
from hypothesis import strategies as st

from grafting.plan.bundles import bundles, depths
from grafting.plan.jobs import Job


def study(edges):
    """Jobs 0..n-1; `edges[i]` are the earlier jobs that i needs, and whether it goes alone."""
    jobs, ids = {}, []
    for n, (needs, single) in enumerate(edges):
        inputs = {"model": [ids[need] for need in sorted(needs)]}
        job = Job("train" if single else "evaluate", f"j{n}", {"n": n}, inputs, "c")
        jobs[job.id] = job
        ids.append(job.id)
    return jobs


@st.composite
def studies(draw):
    count = draw(st.integers(1, 25))
    return study([
        (draw(st.sets(st.integers(0, n - 1), max_size=3)) if n else set(), draw(st.booleans())) for n in range(count)
    ])  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(studies(), st.integers(1, 9), st.data())
def test_no_bundle_waits_for_itself(jobs, size, data):
    done = data.draw(st.sets(st.sampled_from(sorted(jobs)), max_size=5))
    found = bundles(jobs, size, alone={"train"}, done=done)
    finished = set()
    for job_id, job in jobs.items():
        if job_id in done and set(job.needs()) <= finished:
            finished.add(job_id)
    assert set(found) == {i for i, job in jobs.items() if job.stage != "train" and i not in finished}
    assert all(list(found.values()).count(n) <= size for n in set(found.values()))
    # what a job waits for, its bundle waits for: the bundles (and the jobs that go alone) must form no circle
    waits = {}
    for job_id, job in jobs.items():
        for need in job.needs():
            a, b = found.get(job_id, job_id), found.get(need, need)
            if a != b:
                waits.setdefault(a, set()).add(b)
    finished = set()
    nodes = {*waits, *(w for ws in waits.values() for w in ws)}
    while nodes:
        ready = {node for node in nodes if waits.get(node, set()) <= finished}
        assert ready, "bundles wait for each other in a circle"
        finished |= ready
        nodes -= ready


def test_chain_is_one_bundle_and_a_wide_level_is_shared_out_equally():
    chain = study([(set(), False), ({0}, False), ({1}, False)])
    assert set(bundles(chain, 3).values()) == {0}
    assert list(depths(chain).values()) == [0, 1, 2]
    wide = study([(set(), False)] * 17)
    counts = [list(bundles(wide, 16).values()).count(n) for n in (0, 1)]
    assert counts == [9, 8]


def test_jobs_that_go_alone_part_the_bundles():
    jobs = study([(set(), False), ({0}, True), ({1}, False)])
    assert sorted(bundles(jobs, 9, alone={"train"}).values()) == [0, 1]
