"""Stage rollout: responses of a model to a split's examples, plain or with the demonstration in the prompt.

spec: split, with_demonstration, style, items (null: all), temperature, max_new_tokens, seed, batch_size, threads;
for training on them later also samples (rollouts per example) and first_sample, else one, number 0; where it is not
the native one, backend. With `kind` it is the module of that name that runs (`star`: self-improvement data).
inputs: model, data.
payload: rollouts.jsonl.gz (id, prompt, text, tokens, finish, correct, reason, and per token its log-probability if
there are samples), summary.json.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from importlib import import_module

from grafting.errors import UserError
from grafting.models import count_parameters, load_model, load_tokenizer
from grafting.provenance.files import write_json
from grafting.rollouts.counting import Counter
from grafting.rollouts.runtime import device, prepare
from grafting.rollouts.scoring import Response, respond, summary
from grafting.tasks import load_examples, load_info

#: kind -> module of this package. Resolved on use, so that a change to one leaves the others' jobs as they are.
KINDS = {"star": "star"}


def run(job) -> None:
    """Sample and score; an interrupted run goes on after the last batch it kept. UserError if the split is empty
    or a prompt does not fit the context."""
    spec = job.spec
    prepare(spec["threads"], spec["seed"])
    if "kind" in spec:
        import_module(f"{__package__}.{KINDS[spec['kind']]}").run(job)
        return
    info = load_info(job.input("data"))
    examples = load_examples(job.input("data"), spec["split"])[: spec["items"]]
    if not examples:
        raise UserError(f"{job.id}: the split {spec['split']!r} of {info['name']} has no examples")
    model = load_model(job.input("model")).to(device())
    tokenizer = load_tokenizer(job.input("model"))
    counter, samples = Counter(), spec.get("samples", 1)
    bar = job.progress(samples * len(examples), "rollouts", unit="example")
    responses = []
    with job.saving.section(), job.phase("rollout"):
        for sample in range(samples):
            responses += respond(
                model,
                tokenizer,
                info,
                examples,
                max_new_tokens=spec["max_new_tokens"],
                batch_size=spec["batch_size"],
                style=spec["style"] if spec["with_demonstration"] else None,
                temperature=spec["temperature"],
                seed=spec["seed"],
                step=spec.get("first_sample", 0) + sample,
                counter=counter,
                progress=bar.update,
                finished=job.saving.part(f"rollouts {sample}"),
                detail="samples" in spec,
                backend=spec.get("backend", "native"),
            )
    bar.close()
    write_responses(job.out / "rollouts.jsonl.gz", responses)
    result = summary(responses)
    write_json(job.out / "summary.json", result)
    job.metrics.update(accuracy=result["accuracy"], n=result["n"])
    job.add_cost(**counter.cost(count_parameters(model)))


def write_responses(path, responses: list[Response], more: list[dict] | None = None) -> None:
    """One JSON line per response, with the fields of `more` at its end; equal responses give equal bytes."""
    lines = []
    for response, extra in zip(responses, more or [{}] * len(responses), strict=True):
        fields = {key: value for key, value in asdict(response).items() if value is not None}
        lines.append(json.dumps(fields | extra, ensure_ascii=False) + "\n")
    path.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
