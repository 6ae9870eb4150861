"""`grafting submit`: Snakemake for a preset and a profile; as a dry run, every sbatch line that it would send.

Snakemake's own dry run names the jobs but not what the queue would be asked for. Here its dry-run executor is
given the SLURM plugin's own function for the line, so that what is shown is what would be sent.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from grafting.errors import UserError


def command(preset: str | None, profile: str, dry_run: bool, extra: list[str]) -> list[str]:
    """Arguments for Snakemake; UserError if there is no such preset or profile."""
    arguments = ["--profile", f"profiles/{profile}"]
    if not Path(arguments[1], "config.yaml").is_file():
        known = ", ".join(sorted(path.parent.name for path in Path("profiles").glob("*/config.yaml")))
        raise UserError(f"{arguments[1]}: no such profile; there are: {known or 'none in this folder'}")
    if preset is not None:
        path = Path("presets", f"{preset}.yaml")
        if not path.is_file():
            known = ", ".join(sorted(path.stem for path in Path("presets").glob("*.yaml")))
            raise UserError(f"{path}: no such preset; there are: {known or 'none in this folder'}")
        arguments += ["--configfile", str(path)]
    return [*arguments, *(["--dry-run", "--quiet", "all"] if dry_run else []), *extra]


def sbatch_line(job, workflow) -> str:
    """The sbatch call for a job or bundle of a dry run, without the Snakemake command that it wraps."""
    from snakemake.resources import GroupResources
    from snakemake_executor_plugin_slurm.submit_string import get_submit_command
    from snakemake_executor_plugin_slurm.utils import set_gres_string

    if job.is_group():
        # a dry run counts as local, and there the parts of a bundle would be added up instead of fitted together
        job._resources = GroupResources.basic_layered(
            toposorted_jobs=job.toposorted,
            constraints=job.global_resources,
            run_local=False,
            additive_resources=["runtime"],
            sortby=["runtime"],
        )
    partition, account = job.resources.get("slurm_partition"), job.resources.get("slurm_account")
    parameters = {
        "run_uuid": "RUN",
        "slurm_logfile": f".snakemake/slurm_logs/{'group' if job.is_group() else 'rule'}_{job.name}/%j.log",
        "comment_str": f"rule_{job.name}",
        "account": f"-A {shlex.quote(str(account))}" if account else "",
        "partition": f"-p {shlex.quote(str(partition))}" if partition else "",
        "workdir": os.getcwd(),
    }
    call = get_submit_command(job, parameters, settings=workflow.executor_settings) + set_gres_string(job)
    return " ".join(call.split())


def dry_run(arguments: list[str]) -> int:
    """Plan with Snakemake and print one sbatch line per scheduler job, with the jobs in it; nothing is sent."""
    from snakemake import cli
    from snakemake.executors import dryrun

    report = dryrun.Executor.run_job
    counts = [0, 0]

    def run_job(executor, job) -> None:
        jobs = list(job.jobs) if job.is_group() else [job]
        if not all(part.rule.norun or part.rule.name in executor.workflow._localrules for part in jobs):
            counts[0] += 1
            counts[1] += len(jobs)
            print(sbatch_line(job, executor.workflow))
            for part in sorted(jobs, key=lambda part: (part.rule.name, str(part.output))):
                print(f"    # {part.rule.name}/{Path(part.output[0]).stem}")
        report(executor, job)

    dryrun.Executor.run_job = run_job
    # what the Snakefile takes for the command line, and for the name of the program
    sys.argv = ["snakemake", *arguments]
    try:
        cli.main(arguments)
    except SystemExit as end:
        if end.code:
            return int(end.code)
    finally:
        dryrun.Executor.run_job = report
    print(f"{counts[0]} scheduler jobs for {counts[1]} jobs of the study; nothing was sent")
    return 0
