"""Before and after a run: the warm process, what a cluster would refuse, and DVC for what was made."""

import atexit
import subprocess

from grafting.provenance import devices, warm

WARM = []


def end_warm():
    """Stop the warm process, if there is one."""
    while WARM:
        warm.stop(*WARM.pop())


def open_jobs():
    """Ids of the study's jobs that this run is to do."""
    jobs = [job for job in workflow.dag.needrun_jobs() if not job.is_local]
    return {f"{job.rule.name}/{job.wildcards.job}" for job in jobs}


def begin():
    """Start the warm process where jobs run on this machine; else ask the cluster whether it takes the jobs."""
    STORE.sweep_aside()
    if not workflow.is_main_process:
        return
    if workflow.non_local_exec:
        from grafting.provenance import ahead, cluster

        try:
            cluster.check(workflow, sys.argv)
            ahead.fetch(STUDY.jobs, open_jobs(), STORE)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        cluster.take_over(Path.cwd())
        cluster.choose_status_command(workflow.executor_settings)
    else:
        if gpus := workflow.global_resources.get("gpu").value:
            wants = workflow.resource_settings.overwrite_resources.items()
            os.environ[devices.VARIABLE] = " ".join([str(gpus), *(rule for rule, asked in wants if "gpu" in asked)])
        WARM.append(warm.start())
    runs.begin(Path("."), PLAN, workflow.non_local_exec)


def end(succeeded):
    """Stop the warm process; put new payloads under version control, also after a failed run."""
    end_warm()
    if count := STORE.recall_all():
        print(f"{count} finished jobs of failed bundles are kept", file=sys.stderr)
    runs.end(Path("."), succeeded)
    subprocess.run([sys.executable, "-m", "grafting.provenance.versioning"], check=False)


# On a node, inside a bundle: its jobs share one warm process, as those of a local run do. SLURM_STEP_NUM_TASKS tells the
# Snakemake that runs the jobs from the one that only starts it.
if workflow.remote_exec and "SLURM_STEP_NUM_TASKS" in os.environ and TARGETS > 1:
    WARM.append(warm.start())
    atexit.register(end_warm)

if workflow.is_main_process and (other := runs.notice(Path("."))):
    print(other, file=sys.stderr)


onstart:
    begin()


onsuccess:
    end(True)


onerror:
    end(False)
