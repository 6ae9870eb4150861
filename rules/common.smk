"""What every rule shares. A rule's output is a sentinel; only its existence decides what is run."""

import inspect
import itertools
import os
from pathlib import Path

from grafting.plan.bundles import bundles
from grafting.plan.edges import telling_needs
from grafting.plan.planfile import write_plan
from grafting.provenance import runs
from grafting.provenance.store import Store
from grafting.provenance.verify import MODULES

STORE = Store()
PLAN = str(
    write_plan(STUDY.jobs, Path("work/plans"), {**STUDY.config.saving.model_dump(), "tracking": STUDY.config.tracking})
)
# asked for many times per job
SENTINELS = {i: str(STORE.sentinel(i)) for i in STUDY.jobs}
MADE = {i for i, path in SENTINELS.items() if os.path.exists(path)}
# a run that is told to do things again needs every edge between what is done
FORCED = any(word.startswith(("-R", "-f", "-F", "--force")) for word in sys.argv)
NEEDS = {i: job.needs() for i, job in STUDY.jobs.items()} if FORCED else telling_needs(STUDY.jobs, MADE)


wildcard_constraints:
    job=r"[A-Za-z0-9][A-Za-z0-9_.=+,~-]*-[0-9a-f]{12}",


def sentinel(job_id):
    """Path of a job's sentinel."""
    return SENTINELS[job_id]


def sentinels(*stages):
    """Sentinels of all jobs of these stages."""
    return [sentinel(job.id) for job in STUDY.jobs.values() if job.stage in stages]


def job_of(stage, wildcards):
    """The planned job behind a rule's wildcard; an artefact of an older plan has none."""
    try:
        return STUDY.jobs[f"{stage}/{wildcards.job}"]
    except KeyError:
        raise WorkflowError(f"{stage}/{wildcards.job} is not part of this configuration's plan") from None


def signed(function):
    """The function with its signature written down: Snakemake asks for it many times per job."""
    function.__signature__ = inspect.signature(function)
    return function


def needed_by(stage):
    """Input function: the sentinels a job waits for."""
    return signed(lambda wildcards: [sentinel(i) for i in NEEDS[job_of(stage, wildcards).id]])


def module_of(stage):
    """Params function: what `python -m` runs; a stage may have several entries."""
    return signed(lambda wildcards: MODULES[job_of(stage, wildcards).entry[0]])


def threads_of(stage):
    """Threads: a number if all jobs of the stage agree, else a function."""
    threads = {job.threads for job in STUDY.jobs.values() if job.stage == stage}
    if len(threads) == 1:
        return threads.pop()
    return signed(lambda wildcards: job_of(stage, wildcards).threads)


def growing(amount):
    """Resource function: the amount, multiplied by the number of the attempt."""
    return signed(lambda wildcards, attempt: amount * attempt)


# A profile with `group-components: {small: N}` lets N jobs share one scheduler job; `max-threads` is then the number
# of its CPUs. Which jobs go together is the plan's decision (grafting.plan.bundles): groups by rule would wait for
# themselves in a sequence, where training hangs on a selection that hangs on training.
BUNDLES = {}
# How many jobs this process was started for, if it was started for jobs: a bundle has several.
TARGETS = (
    len(list(itertools.takewhile(lambda text: text[:2] != "--", sys.argv[sys.argv.index("--target-jobs") + 1 :])))
    if ("--target-jobs" in sys.argv)
    else 0
)


def small():
    """How many jobs may share a scheduler job; 1 where there is none. Known only after this file has been read."""
    return workflow.group_settings.group_components.get("small", 1)


def make_bundles():
    """Put the open jobs into bundles, and fit a bundle to the CPUs of one scheduler job."""
    if workflow.is_main_process:
        cpus = workflow.resource_settings.max_threads
        wanted = workflow.resource_settings.overwrite_resources.items()
        alone = [rule for rule, wants in wanted if not {"gpu", "nodes", "mpi"}.isdisjoint(wants)]
        BUNDLES.update(bundles(STUDY.jobs, small(), alone=alone, done=MADE))
    else:
        # on a node: the plugin does not pass this on
        workflow.group_settings.group_components = {"small": TARGETS}
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    BUNDLES["made"] = True
    if cpus:
        # else a bundle would be as wide as the machine from which it is submitted
        workflow.resource_settings.cores = int(cpus)
        workflow.register_resource("_cores", int(cpus))


def bundle_of(stage):
    """Group function: the scheduler job that this job shares with others; None if it goes alone."""

    def name(wildcards):
        if workflow.is_main_process and small() == 1 or not workflow.is_main_process and TARGETS < 2:
            return None
        if "made" not in BUNDLES:
            make_bundles()
        if not workflow.is_main_process:
            return "small"
        number = BUNDLES.get(f"{stage}/{wildcards.job}")
        if number is None:
            return None
        # the parts of a bundle need not hang together: Snakemake joins them by this entry and group-components
        workflow.parent_groupids[f"small-{number}"] = "small"
        return f"small-{number}"

    return signed(name)
