"""Stage models, from scratch: the tiny lineage in time, pretraining checkpoints -> base -> deployed.

phase "pretrain": no inputs; payload checkpoints/p10 ... checkpoints/p100 (base), training.jsonl.
phase "posttrain": inputs model (base), prior (data folder), tasks (data folders of the new tasks);
  payload the deployed model directory, training.jsonl, gate.json.
Common spec keys: steps, batch_size, lr, warmup_steps, weight_decay, demonstration_share, skill_weights,
precision, threads, seed; pretrain adds architecture and checkpoints, posttrain gate.

Completion-only cross-entropy, AdamW with betas (0.9, 0.98), cosine to 5 % of lr, gradient norm clipped at 1.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator

from grafting.errors import UserError
from grafting.models import count_parameters, load_model, save_model
from grafting.models.scratch import new_model, new_tokenizer
from grafting.provenance.files import write_json
from grafting.provenance.resume import MANIFEST, fault, publish_folder
from grafting.rollouts import accuracy, respond
from grafting.rollouts.counting import Counter
from grafting.rollouts.runtime import prepare
from grafting.tasks import load_examples, load_info
from grafting.tasks.tiny_language import VOCABULARY, training_stream
from grafting.training import loop
from grafting.training.batches import Item
from grafting.training.objectives.supervised import CrossEntropy

GATE_NEW_TOKENS = 9  # the longest answer of the tiny language in the expert's style, with its end
GATE_BATCH = 256


def run(job) -> None:
    """Make the checkpoints of one phase. UserError if the deployed model never passes its gate."""
    spec = job.spec
    prepare(spec["threads"], spec["seed"])
    if spec["phase"] == "pretrain":
        _pretrain(job)
    elif spec["phase"] == "posttrain":
        _posttrain(job)
    else:
        raise UserError(f"{job.id}: phase {spec['phase']!r} is not known; choose pretrain or posttrain")


def _items(spec: dict) -> Iterator[list[Item]]:
    """Batches of the phase's training stream; items are named by their place in it."""
    stream = training_stream(
        random.Random(spec["seed"]),
        spec["phase"],
        spec["batch_size"],
        spec["demonstration_share"],
        spec["skill_weights"],
    )
    for number, batch in enumerate(stream):
        yield [Item(f"{spec['phase']}/{number}/{i}", *example) for i, example in enumerate(batch)]


def _pretrain(job) -> None:
    spec = job.spec
    tokenizer = new_tokenizer(VOCABULARY, "base")
    model = new_model(spec["architecture"], VOCABULARY, spec["seed"])
    marks = {
        round(spec["steps"] * k / spec["checkpoints"]): f"p{round(100 * k / spec['checkpoints'])}"
        for k in range(1, spec["checkpoints"] + 1)
    }

    # what lies in job.out is dropped when the job is interrupted
    kept = {step: job.work / "checkpoints" / mark for step, mark in marks.items()}

    def keep(step: int) -> None:
        if step in kept:
            publish_folder(kept[step], lambda folder: save_model(model, tokenizer, folder))

    saved = job.saving.peek()
    for step, folder in kept.items():
        if saved is not None and step <= len(saved.facts["records"]) and (wrong := fault(folder)) is not None:
            job.say(f"the kept checkpoint {folder} is not usable, {wrong}; starting from the beginning")
            job.saving.forget()
            break
    objective, settings = CrossEntropy(job, tokenizer.pad_token_id), loop.Settings.from_spec(spec)
    records = loop.train(model, _items(spec), objective, settings, job, "pretraining", keep)
    for folder in kept.values():
        shutil.copytree(folder, job.out / "checkpoints" / folder.name, ignore=shutil.ignore_patterns(MANIFEST))
    loop.write_records(job.out / "training.jsonl", records)
    job.metrics.update(loss=_last(records), steps=len(records))


def _posttrain(job) -> None:
    """Train, measure the gate, and go on with further cycles of warm-up and decay until it passes."""
    spec, gate = job.spec, job.spec["gate"]
    tokenizer = new_tokenizer(VOCABULARY, "deployed")
    model = load_model(job.input("model"))
    objective, batches = CrossEntropy(job, tokenizer.pad_token_id), _items(spec)
    saved = job.saving.peek()
    before = saved.facts["before"] if saved is not None else {"records": [], "measured": []}
    records, measured = before["records"], before["measured"]
    for _ in records:
        next(batches)
    for attempt in range(len(measured), gate["attempts"] + 1):
        job.saving.keep(records=records, measured=measured)
        cycle = spec if attempt == 0 else spec | {"steps": gate["extra_steps"]}
        label = "post-training" + (f", further attempt {attempt} of {gate['attempts']}" if attempt else "")
        part = loop.train(model, batches, objective, loop.Settings.from_spec(cycle), job, label)
        records += [record | {"step": len(records) + record["step"]} for record in part]
        with job.phase("gate"):
            measured.append({"steps": len(records)} | measure_gate(job, model, tokenizer))
        if measured[-1]["passed"]:
            break
    write_json(job.out / "gate.json", {"wanted": gate, "measured": measured})
    if not measured[-1]["passed"]:
        numbers = {key: measured[-1][key] for key in ("prior", "demonstrated", "new")}
        raise UserError(
            f"{job.id}: the deployed model does not pass its gate after {len(records)} steps: measured "
            f"{numbers}, wanted prior >= {gate['prior']}, demonstrated >= {gate['demonstrated']}, "
            f"new <= {gate['new']}; raise lineage.gate.attempts or pretrain.steps, or change lineage.gate"
        )
    save_model(model, tokenizer, job.out)
    loop.write_records(job.out / "training.jsonl", records)
    final = measured[-1]
    job.metrics.update(
        loss=_last(records),
        steps=len(records),
        prior=final["prior"],
        demonstrated=min(final["demonstrated"].values()),
        new=max(final["new"].values()),
    )


def measure_gate(job, model, tokenizer) -> dict:
    """Greedy accuracy on validation data: prior skills, new tasks with the demonstration, new tasks without.

    The gate looks at the first demonstration style; the others are measured too (`demonstrated_by_style`).
    `n` counts the examples behind each number.
    """
    gate, counter = job.spec["gate"], Counter()

    def ask(info: dict, examples: list[dict], style: str | None = None) -> list:
        return respond(
            model,
            tokenizer,
            info,
            examples,
            style=style,
            max_new_tokens=GATE_NEW_TOKENS,
            batch_size=GATE_BATCH,
            counter=counter,
        )

    folder = job.input("prior")
    info, examples = load_info(folder), load_examples(folder, "val")
    verdicts: dict[str, list[bool]] = {}
    for example, response in zip(examples, ask(info, examples), strict=True):
        verdicts.setdefault(example["task"], []).append(response.correct)
    by_skill = {skill: sum(found) / len(found) for skill, found in sorted(verdicts.items())}
    demonstrated, by_style, new, n = {}, {}, {}, {"prior": len(examples)}
    for folder in job.inputs("tasks"):
        info, examples = load_info(folder), load_examples(folder, "val")
        name = info["name"]
        by_style[name] = {style: accuracy(ask(info, examples, style)) for style in info["styles"]}
        demonstrated[name] = by_style[name][info["styles"][0]]
        new[name] = accuracy(ask(info, examples))
        n[name] = len(examples)
    prior = sum(by_skill.values()) / len(by_skill)
    passed = (
        prior >= gate["prior"]
        and all(value >= gate["demonstrated"] for value in demonstrated.values())
        and all(value <= gate["new"] for value in new.values())
    )
    job.add_cost(**counter.cost(count_parameters(model)))
    return {
        "passed": passed,
        "prior": prior,
        "prior_by_skill": by_skill,
        "demonstrated": demonstrated,
        "demonstrated_by_style": by_style,
        "new": new,
        "n": n,
    }


def _last(records: list[dict], window: int = 50) -> float:
    """Mean loss of the last steps: a single batch of like-length items says little."""
    losses = [record["loss"] for record in records[-window:]]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    from grafting.provenance.runner import main

    main("grafting.training.lineage:run")
