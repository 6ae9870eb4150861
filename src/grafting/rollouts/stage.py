"""Stage rollout: responses of a model to a split's examples, plain or with the demonstration in the prompt.

spec: split, with_demonstration, style, items (null: all), temperature, max_new_tokens, seed, batch_size,
threads. inputs: model, data.
payload: rollouts.jsonl.gz (id, prompt, text, tokens, finish, correct, reason), summary.json.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict

from grafting.errors import UserError
from grafting.models import count_parameters, load_model, load_tokenizer
from grafting.provenance.files import write_json
from grafting.rollouts.counting import Counter
from grafting.rollouts.runtime import device, prepare
from grafting.rollouts.scoring import respond, summary
from grafting.tasks import load_examples, load_info


def run(job) -> None:
    """Sample and score; an interrupted run goes on after the last batch it kept. UserError if the split is empty
    or a prompt does not fit the context."""
    spec = job.spec
    prepare(spec["threads"], spec["seed"])
    info = load_info(job.input("data"))
    examples = load_examples(job.input("data"), spec["split"])[: spec["items"]]
    if not examples:
        raise UserError(f"{job.id}: the split {spec['split']!r} of {info['name']} has no examples")
    model = load_model(job.input("model")).to(device())
    tokenizer = load_tokenizer(job.input("model"))
    counter, bar = Counter(), job.progress(len(examples), "rollouts", unit="example")
    with job.saving.section(), job.phase("rollout"):
        responses = respond(
            model,
            tokenizer,
            info,
            examples,
            max_new_tokens=spec["max_new_tokens"],
            batch_size=spec["batch_size"],
            style=spec["style"] if spec["with_demonstration"] else None,
            temperature=spec["temperature"],
            seed=spec["seed"],
            counter=counter,
            progress=bar.update,
            finished=job.saving.part("rollouts"),
        )
    bar.close()
    lines = "".join(json.dumps(asdict(response), ensure_ascii=False) + "\n" for response in responses)
    (job.out / "rollouts.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    result = summary(responses)
    write_json(job.out / "summary.json", result)
    job.metrics.update(accuracy=result["accuracy"], n=result["n"])
    job.add_cost(**counter.cost(count_parameters(model)))
