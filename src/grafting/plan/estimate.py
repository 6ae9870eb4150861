"""What a study will take, before anything starts: jobs, GPU hours, generated tokens, disk, memory.

FLOPs by the rule that the records use, too: 2 N per forwarded and 4 N per backpropagated token. Everything else
(tokens per example, achieved FLOP rates, bytes per parameter) comes from a throughput table that the user edits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafting.config.load import read_yaml
from grafting.errors import UserError
from grafting.plan.code import PROJECT
from grafting.plan.jobs import STAGES, Job
from grafting.plan.study import Study

TABLE = PROJECT / "throughput.yaml"
KEYS = {
    "device", "gpu_memory_gb", "forward_tflops", "training_tflops", "decode_tokens_per_second", "decode_parameters",
    "load_seconds", "utilisation", "bytes_per_parameter", "default_parameters", "parameters", "tokens",
}  # fmt: skip


@dataclass
class Amount:
    """What one job, or all of a stage, takes. Seconds are those of the device; memory is the largest of a job."""

    jobs: int = 0
    seconds: float = 0.0
    generated: float = 0.0
    disk: float = 0.0
    memory: float = 0.0

    def add(self, other: Amount) -> None:
        """Sums, and the larger memory."""
        self.jobs += other.jobs
        self.seconds += other.seconds
        self.generated += other.generated
        self.disk += other.disk
        self.memory = max(self.memory, other.memory)


def read_table(path: Path | None = None) -> dict[str, Any]:
    """The throughput table. UserError: absent, or a key is missing or unknown."""
    table = read_yaml(path or TABLE)
    if odd := sorted(set(table) ^ KEYS):
        raise UserError(f"{path or TABLE}: missing or unknown keys: {', '.join(odd)}")
    return table


class Estimate:
    """Amounts of every job of a study under a throughput table."""

    def __init__(self, study: Study, table: Mapping[str, Any]) -> None:
        self.study, self.table, config = study, table, study.config
        self.parameters = self._parameters()
        self.new = {
            task: {**config.task_defaults.model_dump(), **study.abouts[task]["option_defaults"],
                   **config.task_options.get(task, {})}
            for task in config.tasks
        }  # fmt: skip
        dtype = getattr(config.lineage, "dtype", "float32")
        self.checkpoint = self.parameters * table["bytes_per_parameter"]["weights"][dtype]

    def _parameters(self) -> float:
        """Parameters of the deployed model: stated, or nominal from its name, or the table's default."""
        lineage = self.study.config.lineage
        if lineage.kind == "scratch":
            shape = lineage.architecture
            return shape.layers * (4 * shape.width**2 + 3 * shape.width * shape.feed_forward)
        name = lineage.deployed.hub or lineage.deployed.path or lineage.deployed.gguf_package or ""
        if name in self.table["parameters"]:
            return float(self.table["parameters"][name])
        nominal = re.search(r"(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", name)
        if nominal:
            return float(nominal.group(1)) * {"B": 1e9, "M": 1e6}[nominal.group(2)]
        return float(self.table["default_parameters"])

    def tokens(self, name: str) -> Mapping[str, float]:
        """Tokens of a task's prompt, response and demonstration."""
        return self.table["tokens"].get(name, self.table["tokens"]["default"])

    # ---- seconds ----------------------------------------------------------------------------------
    def forward(self, tokens: float) -> float:
        """Seconds of a forward pass over so many tokens."""
        return 2 * self.parameters * tokens / (self.table["forward_tflops"] * 1e12)

    def backward(self, tokens: float) -> float:
        """Seconds of forward and backward passes."""
        return 6 * self.parameters * tokens / (self.table["training_tflops"] * 1e12)

    def decode(self, tokens: float) -> float:
        """Seconds of generating so many tokens in batches."""
        return tokens * self.parameters / self.table["decode_parameters"] / self.table["decode_tokens_per_second"]

    # ---- jobs -------------------------------------------------------------------------------------
    def of(self, job: Job) -> Amount:
        """One job; of one that hangs on a selection the dearest of what it may become."""
        if job.alternatives:
            return max((self.of(other) for other in job.alternatives.values()), key=lambda amount: amount.seconds)
        made = getattr(self, f"_{job.stage}", self._light)(job)
        made.jobs = 1
        if made.seconds:
            made.seconds += self.table["load_seconds"]
        return made

    @staticmethod
    def _light(job: Job) -> Amount:
        return Amount()

    def _models(self, job: Job) -> Amount:
        return Amount(disk=self.checkpoint, memory=self.checkpoint)

    def _merge(self, job: Job) -> Amount:
        if "updates" in job.spec:  # looked at, in pieces; only a table is written
            return Amount(seconds=len(job.spec["updates"]) * self.checkpoint / 1e9)
        # two models beside the result, in float32 where the stored type is shorter
        return Amount(seconds=self.checkpoint / 1e9, disk=self.checkpoint, memory=4 * self.parameters * 3)

    def _sensitivity(self, job: Job) -> Amount:
        per = self.table["bytes_per_parameter"]
        size = self.parameters * (per["kfac"] if job.spec["estimator"] == "kfac" else 4)
        about = self.tokens("retention")
        tokens = self.study.config.prior.retention_items * (about["prompt"] + about["response"])
        return Amount(0, self.backward(tokens), 0, size, 4 * self.parameters + size)

    def _train(self, job: Job) -> Amount:
        spec, task = job.spec, job.name.split(".")[0]
        about, examples = self.tokens(task), spec["steps"] * spec["batch_size"]
        memory = self.parameters * self.table["bytes_per_parameter"]["training"]
        settings = spec.get(spec["objective"])
        if not isinstance(settings, Mapping) or "max_new_tokens" not in settings:
            tokens = examples * (about["prompt"] + about["demonstration"])
            return Amount(seconds=self.backward(tokens), disk=self.checkpoint, memory=memory)
        # on policy: generate, score with the teacher, who also reads the demonstration, learn
        answer = min(about["response"], settings["max_new_tokens"])
        seconds = self.forward(examples * about["prompt"]) + self.decode(examples * answer)
        seconds += self.forward(examples * (about["prompt"] + about["demonstration"] + answer))
        seconds += self.backward(examples * (about["prompt"] + answer))
        teacher = self.parameters * self.table["bytes_per_parameter"]["inference"]
        return Amount(0, seconds, examples * answer, self.checkpoint, memory + teacher)

    def _rollout(self, job: Job) -> Amount:
        return self._answers(job.name.split(".")[0], job.spec["items"] or 0, job.spec["max_new_tokens"], 1)

    def _answers(self, task: str, items: float, limit: int, samples: int) -> Amount:
        about = self.tokens(task)
        answer = min(about["response"], limit)
        seconds = self.forward(items * about["prompt"]) + self.decode(items * answer * samples)
        memory = self.parameters * self.table["bytes_per_parameter"]["inference"]
        return Amount(0, seconds, items * answer * samples, items * samples * 4 * answer, memory)

    def _evaluate(self, job: Job) -> Amount:
        spec, total = job.spec, Amount()
        samples = 1 + spec.get("samples", {}).get("n", 0)
        kind = self.study.config.prior.kind
        prior = spec["split"] == "val" and self.study.config.prior.val_items or self.study.config.prior.test_items
        suites = [(task, self.new[task][f"{spec['split']}_items"], samples) for task in self._tasks_of(job)]
        if kind == "harness":
            count = len(self.study.jobs[self.study.prior_data].spec["tasks"])
            suites.append(("harness", prior * count, 1))
        else:
            suites.append((kind, prior, 1))
        points = len(spec["points"])
        if "keep" in spec:  # of frontiers only some points are tested, whichever they will be
            points = min(points, len(self.study.config.seeds) * sum(kept["size"] for kept in spec["keep"]))
        for _ in range(points):
            for name, items, drawn in suites:
                total.add(self._answers(name, items, spec["max_new_tokens"], drawn))
        total.memory *= 1 + 2 * bool(job.inputs.get("trained"))  # a sweep holds the update and its donor, too
        return total

    def _tasks_of(self, job: Job) -> list[str]:
        by_job = {job_id: task for task, job_id in self.study.task_data.items()}
        return [by_job[job_id] for job_id in job.inputs["tasks"]]

    def stages(self) -> dict[str, Amount]:
        """Stage -> what all its jobs take."""
        found: dict[str, Amount] = {}
        for job in self.study.jobs.values():
            found.setdefault(job.stage, Amount()).add(self.of(job))
        return {stage: found[stage] for stage in STAGES if stage in found}


def render(study: Study, table: Mapping[str, Any], unknown: list[str], source: str) -> str:
    """The table of stages, with what it rests on and what is still null."""
    estimate = Estimate(study, table)
    stages = estimate.stages()
    total = Amount()
    lines = [
        f"{'stage':12s} {'jobs':>6s} {'GPU hours':>10s} {'tokens generated':>17s} {'disk GB':>9s} {'memory GB':>10s}"
    ]
    for stage, amount in stages.items():
        total.add(amount)
        lines.append(_line(stage, amount, table))
    lines += [_line("all", total, table), ""]
    lines.append(f"Assumed: {table['device']}; {estimate.parameters:.3g} parameters; table: {source}")
    lines.append("Disk counts every checkpoint once; memory is that of the largest job. None of it was measured.")
    if total.memory > table["gpu_memory_gb"] * 1e9:
        parts = -(-total.memory // (table["gpu_memory_gb"] * 1e9))
        lines.append(f"The largest job needs {parts:.0f} such devices, or sharding and smaller optimiser states.")
    if unknown:
        lines += ["", "Still null, and a run stops there until somebody who has seen them fills them in:"]
        lines += [f"  {key}" for key in unknown]
    return "\n".join(lines)


def _line(name: str, amount: Amount, table: Mapping[str, Any]) -> str:
    hours = amount.seconds / 3600 / table["utilisation"]
    return (
        f"{name:12s} {amount.jobs:6d} {hours:10.1f} {amount.generated:17,.0f} "
        f"{amount.disk / 1e9:9.1f} {amount.memory / 1e9:10.1f}"
    )
