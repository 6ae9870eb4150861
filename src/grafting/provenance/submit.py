"""`grafting submit`: Snakemake for a preset and a profile; as a dry run, every sbatch line that it would send.

Snakemake's own dry run names the jobs but not what the queue would be asked for. Here its dry-run executor is
given the SLURM plugin's own function for the line, so that what is shown is what would be sent.
"""

from __future__ import annotations

import contextlib
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
    return [*arguments, *(["--dry-run"] if dry_run else []), *extra]


def sbatch_line(job, workflow) -> str:
    """The sbatch call for a job or bundle, without the Snakemake command that it wraps."""
    from snakemake_executor_plugin_slurm.submit_string import get_submit_command
    from snakemake_executor_plugin_slurm.utils import set_gres_string

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


def sbatch_lines(workflow) -> list[str]:
    """For every scheduler job of a planned workflow its sbatch line, and a line for each job of the study in it."""
    from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

    dag, own = workflow.dag, workflow._executor_plugin
    found: list[str] = []
    # a dry run counts as local, and locally the parts of a bundle would be added up instead of fitted together
    workflow._executor_plugin = ExecutorPluginRegistry().get_plugin("slurm")
    try:
        jobs = [job for job in dag.needrun_jobs() if not job.is_local]
        units = {id(unit): unit for job in jobs for unit in [dag.get_job_group(job) or job]}
        for unit in units.values():
            unit._resources = None
            found.append(sbatch_line(unit, workflow))
            parts = unit.jobs if unit.is_group() else [unit]
            found += sorted(f"    # {part.rule.name}/{Path(part.output[0]).stem}" for part in parts)
    finally:
        workflow._executor_plugin = own
    return [*found, f"{len(units)} scheduler jobs for {len(jobs)} jobs of the study; nothing was sent"]


def dry_run(arguments: list[str]) -> int:
    """Plan with Snakemake and print one sbatch line per scheduler job, with the jobs in it; nothing is sent.

    Returns Snakemake's exit status. What Snakemake says itself goes to standard error.
    """
    from snakemake import cli
    from snakemake.executors import dryrun

    original = dryrun.Executor.run_job
    found: list[str] = []

    def run_job(executor, job) -> None:
        if not found:
            found.extend(sbatch_lines(executor.workflow))
        original(executor, job)

    dryrun.Executor.run_job = run_job
    # what the Snakefile takes for the command line, and for the name of the program
    sys.argv = ["snakemake", *arguments]
    status = 0
    try:
        with contextlib.redirect_stdout(sys.stderr):
            cli.main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    finally:
        dryrun.Executor.run_job = original
    if not status:
        sys.stderr.flush()
        print("\n".join(found or ["nothing to be done"]))
    return status
