"""Stage train: a learner (sft, opsd) from a start model to a checkpoint.

spec: objective, style, lr, steps, batch_size, micro_batch_size, warmup_steps, schedule, final_lr_ratio,
weight_decay, betas, clip_norm, precision, threads, seed; for opsd also `opsd` (see `self_distillation`).
inputs: model, data; for opsd also teacher, the model the teacher starts from.
payload: the trained model directory, training.jsonl (one record per step).
"""

from __future__ import annotations

from grafting.errors import UserError
from grafting.models import load_model, load_tokenizer, save_model
from grafting.rollouts.runtime import prepare
from grafting.tasks import load_examples, load_info
from grafting.training import loop
from grafting.training.batches import draw
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
    origin = job.inputs("teacher")
    separate = origin and origin[0] != start and spec.get("opsd", {}).get("teacher") != "live"
    objective = build(
        Setup(
            job,
            model,
            tokenizer,
            info,
            data,
            train,
            teacher_model=load_model(origin[0]) if separate else None,
        )
    )
    batches = draw(objective.examples, spec["batch_size"], spec["seed"])
    settings = loop.Settings.from_spec(spec)
    records = loop.train(model, batches, objective, settings, job, label=spec["objective"])
    save_model(model, tokenizer, job.out)
    loop.write_records(job.out / "training.jsonl", records)
    job.metrics.update(loss=records[-1]["loss"], steps=len(records))
    if spec["objective"] == "opsd":
        accuracies = [r["teacher_accuracy"] for r in records if "teacher_accuracy" in r]
        job.metrics.update(
            rollout_accuracy=records[-1]["rollout_accuracy"],
            teacher_accuracy=min(accuracies),
            guard_tokens_generated=objective.guard.counter.tokens_generated,
        )
