"""Before the first job is submitted: would SLURM take these jobs? And what an earlier run left in the queue.

SLURM refuses a job at submission, or worse, takes it and lets it wait for ever (a time limit above the
partition's). Asked beforehand, with the very `sbatch` line that would be sent, nothing is half submitted and the
message can name the line of the profile to change.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grafting.errors import UserError

#: Resources that decide whether SLURM takes a job.
DECIDING = ("slurm_partition", "slurm_account", "mem_mb", "mem_mb_per_cpu", "runtime", "gpu", "gpu_model", "gres",
            "constraint", "qos", "nodes", "tasks", "cpus_per_task", "slurm_extra")  # fmt: skip
UNLIMITED = 1 << 40


@dataclass(frozen=True)
class Partition:
    """What the largest node of a partition gives: minutes, CPUs, MB."""

    name: str
    minutes: int
    cpus: int
    memory: int
    default: bool


def minutes(text: str) -> int:
    """SLURM's time limit as whole minutes; `infinite` is a very large number."""
    from grafting.provenance.allocation import seconds

    found = seconds(text)
    return UNLIMITED if found is None else found // 60


def read_partitions(text: str) -> dict[str, Partition]:
    """Partitions from the output of `sinfo --exact --noheader --format '%P|%l|%c|%m'`."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, limit, cpus, memory = line.strip().split("|")
        default, name = name.endswith("*"), name.rstrip("*")
        old = found.get(name, Partition(name, 0, 0, 0, default))
        found[name] = Partition(name, minutes(limit), max(old.cpus, int(cpus)), max(old.memory, int(memory)), default)
    return found


def profile_path(arguments: list[str]) -> Path | None:
    """The configuration file of the profile that a Snakemake command line names; None if it names none."""
    named = os.environ.get("SNAKEMAKE_PROFILE")
    for n, argument in enumerate(arguments):
        if argument == "--profile" and n + 1 < len(arguments):
            named = arguments[n + 1]
        elif argument.startswith("--profile="):
            named = argument.partition("=")[2]
    if not named:
        return None
    path = Path(named)
    return next((p for p in (path / "config.yaml", path / "config.v8+.yaml", path) if p.is_file()), None)


def line_of(path: Path | None, key: str, rule: str = "") -> str:
    """Where a key stands in the profile, for a message: in `set-resources` for the rule, else the first such line.

    A line that only stands there as a comment is named too: it is the one to uncomment.
    """
    if path is None:
        return f"{key} (no profile was given)"
    lines = path.read_text(encoding="utf-8").splitlines()
    at_word = re.compile(rf"(^|[\s{{,\-]){re.escape(key)}\s*[:=]")
    of_rule = re.compile(rf"^\s+{re.escape(rule)}:") if rule else None
    inside, indent = False, 0
    for number, line in enumerate(lines, 1):
        width = len(line) - len(line.lstrip())
        if of_rule is not None and of_rule.match(line):
            inside, indent = True, width
        elif inside and line.strip() and width <= indent:
            inside = False
        if inside and at_word.search(line.split(" #")[0]):
            return f"{path}, line {number} (`{line.split(' #')[0].strip()}`)"
    for commented in (False, True):
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if text.startswith("#") != commented:
                continue
            text = text.lstrip("# ") if commented else text.split(" #")[0].strip()
            if re.match(rf"(- )?{re.escape(key)}\s*[:=]", text):
                return f"{path}, line {number} (`{text}`{', now a comment' if commented else ''})"
    return f"{path} (no line `{key}:` there; is it given on the command line?)"


def ask(*command: str) -> subprocess.CompletedProcess:
    """Run one of SLURM's commands; its words are in English whatever the locale."""
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


def partitions(profile: Path | None) -> dict[str, Partition]:
    """The cluster's partitions; UserError if there is no SLURM here or it does not answer."""
    where = line_of(profile, "executor")
    missing = [name for name in ("sbatch", "squeue", "scancel", "sinfo") if shutil.which(name) is None]
    if missing:
        raise UserError(
            f"{where}: no SLURM here: the command {missing[0]} is not found. Start on a login node of your cluster, "
            "or leave --profile away to run on this machine"
        )
    done = ask("sinfo", "--exact", "--noheader", "--format", "%P|%l|%c|%m")
    if done.returncode or not done.stdout.strip():
        said = done.stderr.strip() or "no partition"
        raise UserError(f"{where}: SLURM does not answer here; `sinfo` says: {said}")
    return read_partitions(done.stdout)


def _requests(workflow) -> Iterator[tuple[object, str, dict, int]]:
    """Every scheduler job that would be submitted now: the job or group, a rule of it, its resources, the attempt."""
    seen = set()
    retries = workflow.execution_settings.retries
    for job in workflow.dag.needrun_jobs():
        if job.is_local:
            continue
        unit = workflow.dag.get_job_group(job) or job
        if id(unit) in seen:
            continue
        seen.add(id(unit))
        rule = job.rule.name
        yield unit, rule, dict(unit.resources.items()), 1
        if not unit.is_group() and retries:
            last = job.rule.expand_resources(job.wildcards_dict, job.input, retries + 1, skip_evaluation={"tmpdir"})
            yield unit, rule, dict(last.items()), retries + 1


def _refusal(partition: Partition, resources: dict, threads: int) -> tuple[str, str] | None:
    """Key of the profile and words for what the partition cannot give; None if it can."""
    name, memory, time = partition.name, resources.get("mem_mb") or 0, resources.get("runtime") or 0
    if memory > partition.memory:
        return "mem_mb", f"asks for {memory} MB; the largest node of partition {name} has {partition.memory} MB"
    if time > partition.minutes:
        return "runtime", f"asks for {time} minutes; the limit of partition {name} is {partition.minutes} minutes"
    if threads > partition.cpus:
        return "max-threads", f"asks for {threads} CPUs; the largest node of partition {name} has {partition.cpus}"
    return None


def check(workflow, arguments: list[str]) -> None:
    """UserError that names a line of the profile if SLURM would refuse one of the jobs or never start it."""
    from snakemake_executor_plugin_slurm.submit_string import get_submit_command
    from snakemake_executor_plugin_slurm.utils import set_gres_string

    profile = profile_path(arguments)
    known = partitions(profile)
    default = next((name for name, partition in known.items() if partition.default), None)
    asked: set[tuple] = set()
    accounts: set[str] = set()
    for unit, rule, resources, attempt in _requests(workflow):
        threads = resources.get("cpus_per_task") or unit.threads
        request = (threads, *(resources.get(key) for key in DECIDING))
        if request in asked:
            continue
        asked.add(request)
        what = f"a bundle of {len(list(unit.jobs))} jobs" if unit.is_group() else f"rule {rule}"
        what += f" at attempt {attempt}" if attempt > 1 else ""
        name = resources.get("slurm_partition") or default
        if name is not None and str(name) not in known:
            shown = ", ".join(sorted(known))
            where = line_of(profile, "slurm_partition", rule)
            raise UserError(f"{where}: SLURM has no partition {name!r}; it has: {shown}")
        if name is not None and (refused := _refusal(known[str(name)], resources, threads)):
            key, words = refused
            fewer = ""
            if unit.is_group():
                # the part of the bundle that asks for the most is the one to change
                rule = max(unit.jobs, key=lambda job: job.resources.get(key) or 0).rule.name
                fewer = "; fewer jobs in a bundle (group-components: small) ask for less"
            raise UserError(f"{line_of(profile, key, rule)}: {what} {words}{fewer}. Such a job would never start")
        account = resources.get("slurm_account")
        if account is not None and str(account) not in accounts:
            accounts.add(str(account))
            _check_account(str(account), line_of(profile, "slurm_account", rule))
        if attempt > 1:
            continue
        command = get_submit_command(
            unit,
            {
                "run_uuid": "grafting-test-only",
                "slurm_logfile": "/dev/null",
                "comment_str": "test",
                "account": f"-A {shlex.quote(str(account))}" if account is not None else "",
                "partition": f"-p {shlex.quote(str(name))}" if name is not None else "",
                "workdir": os.getcwd(),
            },
            settings=workflow.executor_settings,
        )
        command += set_gres_string(unit) + " --test-only --wrap=true"
        done = ask(*shlex.split(command))
        if done.returncode:
            raise UserError(_explain(done.stderr, what, rule, profile, command))


#: A word of SLURM's refusal -> the key of the profile that it is about; the first that fits.
WORDS = (("account", "slurm_account"), ("partition", "slurm_partition"), ("qos", "qos"), ("time limit", "runtime"),
         ("gres", "gpu"), ("generic resource", "gpu"), ("feature", "constraint"), ("memory", "mem_mb"),
         ("node count", "nodes"))  # fmt: skip


def _explain(said: str, what: str, rule: str, profile: Path | None, command: str) -> str:
    words = " ".join(said.replace("sbatch: error:", "").replace("allocation failure:", "").split())
    key = next((key for word, key in WORDS if word in words.lower()), None)
    where = line_of(profile, key, rule) if key else f"{profile or 'the command line'}"
    return f"{where}: SLURM refuses {what}: {words}\n  asked with: {command}"


def _check_account(account: str, where: str) -> None:
    """UserError if the plugin would not find the account among the user's."""
    import logging

    from snakemake_executor_plugin_slurm.accounts import validate_account
    from snakemake_interface_common.exceptions import WorkflowError

    try:
        validate_account(account, logging.getLogger(__name__))
    except (WorkflowError, OSError) as error:
        words = " ".join(str(error).split())
        raise UserError(f"{where}: SLURM refuses the account {account!r}: {words}") from None


def left_behind(folder: Path) -> dict[str, list[str]]:
    """State (PENDING, RUNNING, ...) -> SLURM ids of this user's jobs that an earlier run started in this folder."""
    done = ask("squeue", "--user", str(os.getuid()), "--noheader", "--format", "%i|%T|%k|%Z")
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        job, state, comment, place = line.strip().split("|", 3)
        if comment.startswith(("rule_", "group_")) and Path(place) == folder:
            found.setdefault(state, []).append(job)
    return found


def take_over(folder: Path) -> None:
    """Deal with what a killed run left in the queue: waiting jobs are cancelled, running ones are left to finish.

    The new run asks for both again. A new job waits for the running one that makes the same artefact and then
    takes its result, so nothing is computed twice.
    """
    found = left_behind(folder)
    if waiting := found.pop("PENDING", []):
        ask("scancel", *waiting)
        print(f"SLURM: {len(waiting)} jobs that an earlier run left waiting were cancelled", file=sys.stderr)
    if running := sorted(job for jobs in found.values() for job in jobs):
        shown = ", ".join(running)
        print(f"SLURM: an earlier run's jobs still run and are left to finish: {shown}", file=sys.stderr)


def choose_status_command(settings) -> None:
    """Let the plugin ask squeue where accounting is off; it would choose sacct because the program is there.

    With the plugin's version 2.8.0 a failed question forgets the jobs it was about, and the run waits for ever.
    """
    if settings.status_command == "sacct" and ask("sacct", "--noheader", "--allocations").returncode:
        settings.status_command = "squeue"
