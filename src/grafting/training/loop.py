"""The training loop, on Accelerate: autocast, accumulation, clipping; one process or many.

Every objective is trained by this loop: supervised fine-tuning, self-distillation, pretraining and
post-training. An objective turns a batch into items and items into a loss (see `objectives`).

* The loss of a step is a sum over target tokens divided by the number of target tokens of the *whole* batch,
  so accumulated micro-batches, and several processes, give the same gradient as one batch.
* Gradients of several processes are summed by hand after the backward pass: that needs no wrapper around the
  model, which the objectives call below its head.
* An interrupted run goes on after the last saved step (see `state`): the result is the same, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from grafting.errors import UserError
from grafting.models import count_parameters
from grafting.provenance.saving import NOT_YET, STOP
from grafting.rollouts.counting import Counter
from grafting.training import parallel, state
from grafting.training.schedule import learning_rate


@dataclass(frozen=True)
class Settings:
    """How to optimise. `precision`: "bfloat16" (autocast over float32 weights and optimiser) or "float32"."""

    steps: int
    lr: float
    warmup_steps: int
    weight_decay: float
    precision: str
    schedule: str = "cosine"
    final_lr_ratio: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float = 1.0
    micro_batch_size: int | None = None

    @classmethod
    def from_spec(cls, spec: dict) -> Settings:
        """The settings among the keys of a job's spec."""
        return cls(**{key: spec[key] for key in cls.__dataclass_fields__ if key in spec})


def train(
    model,
    batches: Iterator[list],
    objective,
    settings: Settings,
    job,
    label: str = "training",
    after_step: Callable[[int], None] | None = None,
) -> list[dict]:
    """Train `model` in place; returns one record per step (loss, lr, grad_norm, what the objective adds).

    `after_step(n)` is called when n steps are done; `batches` starts with the first step's batch, also where
    an interrupted run goes on, whose steps are not repeated. Cost and CPU seconds by phase go to `job`.
    `Stopped` after a save, on a signal or an exhausted time budget. UserError naming step and example ids: a
    loss or gradient that is not finite, a batch without any target token.
    """
    with job.saving.section():
        return _train(model, batches, objective, settings, job, label, after_step)


def _train(model, batches, objective, settings: Settings, job, label: str, after_step) -> list[dict]:
    mixed = "bf16" if settings.precision == "bfloat16" else "no"
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=mixed)
    model.to(accelerator.device).train()
    if parallel.is_sharded(accelerator):
        parallel.shard(model, objective, accelerator)
    objective.place(accelerator.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=tuple(settings.betas),
        weight_decay=settings.weight_decay,
        fused=accelerator.device.type in ("cpu", "cuda") and not parallel.is_sharded(accelerator),
    )
    counter, records = Counter(), []
    progress = job.progress(settings.steps, label)
    job.saving.expect(3 * sum(parameter.nbytes for parameter in parameters))
    if (saved := job.saving.take()) is not None:
        records, counter = _resume(accelerator, model, optimiser, objective, saved)
        for _ in records:
            next(batches)
        progress.skip(len(records))
        job.say(f"{label}: going on after step {len(records)} of {settings.steps}")
    for step in range(len(records), settings.steps):
        batch = next(batches)
        mine = batch[accelerator.process_index :: accelerator.num_processes]
        items = objective.prepare(step, mine, counter)
        total = _sum(accelerator, {"targets": sum(map(objective.targets, items))})["targets"]
        if total == 0 and not objective.silent_steps:
            raise UserError(
                f"{_where(job, step, batch)}: no token carries loss; check the responses and opsd.skip_tokens"
            )
        loss = 0.0
        size = settings.micro_batch_size or max(len(items), 1)
        for start in range(0, len(items), size):
            with accelerator.autocast():
                part = objective.loss(model, items[start : start + size], counter) / max(total, 1)
            loss += part.item()
            with job.phase("backward"):
                accelerator.backward(part)
        loss = _sum(accelerator, {"loss": loss})["loss"]
        rate = learning_rate(
            step,
            steps=settings.steps,
            lr=settings.lr,
            warmup_steps=settings.warmup_steps,
            schedule=settings.schedule,
            final_lr_ratio=settings.final_lr_ratio,
        )
        with job.phase("optimiser"):
            _share_gradients(accelerator, parameters)
            norm = parallel.clip(accelerator, parameters, settings.clip_norm)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise UserError(
                    f"{_where(job, step, batch)}: loss {loss}, gradient norm {norm}; "
                    f"lower lr, or look at these examples"
                )
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            optimiser.zero_grad()
            objective.after_step(model)
        record = {"step": step + 1, "loss": loss, "lr": rate, "grad_norm": norm}
        records.append(record | objective.report(lambda sums: _sum(accelerator, sums)))
        if accelerator.is_main_process:
            job.track(label, records[-1])
        progress.update(1, loss=loss)
        if after_step is not None:
            after_step(step + 1)
        if (due := _agree(accelerator, job.saving.due())) != NOT_YET:
            with job.phase("saving"):
                _save(accelerator, model, optimiser, objective, records, counter, job, must=due == STOP)
            if due == STOP:
                accelerator.wait_for_everyone()
                job.saving.leave(f"step {step + 1} of {settings.steps} of {label}")
    progress.close()
    model.eval()
    cost = _sum(accelerator, counter.cost(count_parameters(model)))
    job.add_cost(**{key: round(number) for key, number in cost.items()})
    return records


def write_records(path: Path, records: list[dict]) -> None:
    """One JSON object per line; no times in it, so equal runs give equal bytes."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _agree(accelerator: Accelerator, due: int) -> int:
    """What any of the processes wants: all save, and stop, after the same step."""
    if accelerator.num_processes == 1:
        return due
    return int(accelerator.gather(torch.tensor([due], device=accelerator.device)).max())


def _save(accelerator, model, optimiser, objective, records, counter: Counter, job, must: bool) -> None:
    """Save all that the next step depends on; the main process writes."""
    tensors, own = state.collect(model, optimiser, objective)
    counts = {name: round(number) for name, number in _sum(accelerator, asdict(counter)).items()}
    facts = {"records": records, "counter": counts, "objective": own, "random": state.generators(accelerator)}
    job.saving.save(tensors, facts, must=must, write=accelerator.is_main_process)


def _resume(accelerator, model, optimiser, objective, saved) -> tuple[list[dict], Counter]:
    """Undo `_save`; returns records and counter. The counts of all processes go on in the main one."""
    state.restore(model, optimiser, objective, saved.tensors, saved.facts["objective"])
    state.set_generators(accelerator, saved.facts["random"])
    return saved.facts["records"], Counter(**saved.facts["counter"]) if accelerator.is_main_process else Counter()


def _where(job, step: int, batch: list) -> str:
    names = [item["id"] if isinstance(item, dict) else item.id for item in batch]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"{job.id}, step {step + 1}, examples {shown}"


def _sum(accelerator: Accelerator, values: dict[str, float]) -> dict[str, float]:
    """Sum of each value over the processes."""
    if accelerator.num_processes == 1:
        return values
    numbers = torch.tensor(list(map(float, values.values())), dtype=torch.float64, device=accelerator.device)
    return dict(zip(values, accelerator.reduce(numbers, "sum").tolist(), strict=True))


def _share_gradients(accelerator: Accelerator, parameters: list[torch.Tensor]) -> None:
    """Sum the gradients over the processes."""
    if accelerator.num_processes == 1 or parallel.is_sharded(accelerator):
        return
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = accelerator.reduce(gradient, "sum")
