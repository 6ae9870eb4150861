"""The workflow is told of few edges, and must run the same jobs as with all of them."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from grafting.plan.code import PROJECT
from grafting.plan.edges import telling_needs
from grafting.plan.front import load_config
from grafting.plan.jobs import Job
from grafting.plan.study import Study
from grafting.provenance.files import canonical


@st.composite
def studies(draw):
    """Jobs in an order in which they could run, and which of them are done."""
    jobs: dict[str, Job] = {}
    for n in range(draw(st.integers(1, 9))):
        needs = sorted(draw(st.sets(st.sampled_from(list(jobs))))) if jobs else []
        job = Job("train", f"j{n}", {"n": n}, {"model": needs} if needs else {}, "c")
        jobs[job.id] = job
    return jobs, draw(st.sets(st.sampled_from(list(jobs))))


def run_by_snakemake(edges: dict[str, list[str]], done: set[str]) -> set[str]:
    """What Snakemake runs for the last job, all inputs being ancient: what is not there and needed by the target or by
    what runs, and what directly needs something that was not there."""
    target, running = list(edges)[-1], set()
    while True:
        wanted = {target, *(need for job in running for need in edges[job])}
        lost = running - done
        more = {job for job in edges if (job in wanted and job not in done) or lost & set(edges[job])} - running
        if not more:
            return running
        running |= more


@given(studies())
def test_the_same_jobs_run_and_find_what_they_need(study):
    jobs, done = study
    told, full = telling_needs(jobs, done), {job_id: job.needs() for job_id, job in jobs.items()}
    running = run_by_snakemake(told, done)
    assert running == run_by_snakemake(full, done)
    before: dict[str, set[str]] = {}
    reached: dict[str, set[str]] = {}
    for job_id, needs in told.items():
        assert set(needs) <= set(full[job_id])
        # a job waits for what runs among its own needs, and for nothing else
        before[job_id] = {n for need in needs if need in running for n in (need, *before[need])}
        reached[job_id] = {n for need in needs for n in (need, *reached[need])}
        assert set(full[job_id]) <= reached[job_id]  # nobody is cut off
        if job_id in running:
            # everything is there, and what is made in this run is made before
            assert set(full[job_id]) <= done | running
            assert set(full[job_id]) & running <= before[job_id]


def test_an_edge_that_says_nothing_is_left_out_and_a_lost_payload_keeps_its_edge():
    model = Job("models", "m", {}, {}, "c")
    trained = Job("train", "t", {}, {"model": [model.id]}, "c")
    judged = Job("evaluate", "e", {}, {"model": [model.id], "trained": [trained.id]}, "c")
    jobs = {job.id: job for job in (model, trained, judged)}
    assert telling_needs(jobs, ())[judged.id] == [trained.id]
    assert telling_needs(jobs, jobs)[judged.id] == [trained.id]
    assert telling_needs(jobs, {trained.id})[judged.id] == [model.id, trained.id]


def test_canonical_text_that_is_put_together_from_pieces_is_that_of_the_whole():
    study = Study(load_config(folder=PROJECT))
    ways = [way for job in study.jobs.values() for way in job.alternatives.values()]
    written = [job for job in [*study.jobs.values(), *ways] if job.text]
    assert {job.stage for job in written} == {"evaluate", "select", "merge"}
    assert all(job.text == canonical(job.spec) for job in written)
