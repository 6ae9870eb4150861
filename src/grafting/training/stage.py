"""Stage train: a learner from a start model to a checkpoint.

spec: objective, style, lr, steps, batch_size, micro_batch_size, warmup_steps, schedule, final_lr_ratio,
weight_decay, betas, clip_norm, precision, threads, seed; the objective's own options under its name (see
`objectives`); where they are used also lora and gradient_checkpointing (see `fitting`).
inputs: model, data; for some objectives teacher (where the teacher or reference starts), prior (retention prompts),
rollouts (made beforehand).
payload: the trained model directory, training.jsonl (one record per step).
"""

from __future__ import annotations

from grafting.errors import UserError
from grafting.models import load_model, load_tokenizer, save_model
from grafting.rollouts.runtime import prepare
from grafting.tasks import load_examples, load_info
from grafting.training import fitting, loop
from grafting.training.objectives import Setup, build


def run(job) -> None:
    """Train and save; UserError for what the user can mend (see the objectives and the loop)."""
    spec = job.spec
    prepare(spec["threads"], spec["seed"])
    start, data = job.input("model"), job.input("data")
    info, train = load_info(data), load_examples(data, "train")
    if not train:
        raise UserError(f"{job.id}: the training split of {info['name']} has no examples")
    model, tokenizer = load_model(start), load_tokenizer(start)
    fitting.check_vocabulary(model, tokenizer, job.id)
    fitting.prepare(model, spec)
    objective = build(
        Setup(
            job,
            model,
            tokenizer,
            info,
            data,
            train,
            teacher_model=_teacher(job, start),
            prior=_optional(job, "prior"),
            rollouts=_optional(job, "rollouts"),
        )
    )
    batches = objective.batches(spec["batch_size"], spec["seed"])
    settings = loop.Settings.from_spec(spec)
    records = loop.train(model, batches, objective, settings, job, label=spec["objective"])
    fitting.finish(model, spec)
    with job.phase("saving"):
        save_model(model, tokenizer, job.out)
    loop.write_records(job.out / "training.jsonl", records)
    job.metrics.update(loss=records[-1]["loss"], steps=len(records))
    job.metrics.update(objective.metrics(records))


def _optional(job, role: str):
    """The one input with this role, or None."""
    return job.input(role) if job.inputs(role) else None


def _teacher(job, start):
    """A teacher or reference that starts elsewhere than the student; None if it starts as a copy of it."""
    origin, options = _optional(job, "teacher"), job.spec.get(job.spec["objective"]) or {}
    if origin is None or origin == start or options.get("teacher") == "live":
        return None
    model = load_model(origin)
    if options.get("teacher") == "ema":
        fitting.prepare(model, job.spec)  # it follows the student parameter by parameter
    return model
