"""What every rule shares. A rule's output is a sentinel; only its existence decides what is run."""

from pathlib import Path

from grafting.plan.planfile import write_plan
from grafting.provenance.store import Store

STORE = Store()
PLAN = str(write_plan(STUDY.jobs, Path("work/plans"), STUDY.config.saving.model_dump()))


wildcard_constraints:
    job=r"[A-Za-z0-9][A-Za-z0-9_.=+,~-]*-[0-9a-f]{12}",


def sentinel(job_id):
    """Path of a job's sentinel."""
    return str(STORE.sentinel(job_id))


def sentinels(*stages):
    """Sentinels of all jobs of these stages."""
    return [sentinel(job.id) for job in STUDY.jobs.values() if job.stage in stages]


def job_of(stage, wildcards):
    """The planned job behind a rule's wildcard; an artefact of an older plan has none."""
    try:
        return STUDY.jobs[f"{stage}/{wildcards.job}"]
    except KeyError:
        raise WorkflowError(f"{stage}/{wildcards.job} is not part of this configuration's plan") from None


def needed_by(stage):
    """Input function: the sentinels a job waits for."""
    return lambda wildcards: [sentinel(i) for i in job_of(stage, wildcards).needs()]


def spec_of(stage):
    """Params function: the job's canonical spec."""
    return lambda wildcards: job_of(stage, wildcards).spec_string


def threads_of(stage):
    """Threads function."""
    return lambda wildcards: job_of(stage, wildcards).threads
