"""Stage sensitivity: estimate the deployed model's Fisher information on the prior suite's retention data.

spec    {"estimator": "diagonal" | "kfac", "fisher": "true" | "empirical", "seed", "threads"}
inputs  model (directory), prior (data folder; its retention.jsonl, responses in the first style)
payload diagonal.safetensors or kfac.safetensors (see diagonal.py, kfac.py), and report.json. What does not fit
        into memory is estimated a group of layers at a time (see streaming.py), on a model that is kept in the
        16 bits it was saved in and computed with in float32 (see upcasting.py)
"""

from __future__ import annotations

import json

from grafting.errors import UserError
from grafting.models import count_parameters, load_tokenizer
from grafting.rollouts.runtime import device, prepare
from grafting.sensitivity.likelihood import FISHERS, encode
from grafting.sensitivity.streaming import passes, write_estimate
from grafting.sensitivity.upcasting import load_narrow
from grafting.tasks import load_examples, load_info


def run(job) -> None:
    """Run one job; see the module's docstring. UserError for an unknown estimator or unusable data."""
    estimator, fisher, seed = job.spec["estimator"], job.spec["fisher"], job.spec["seed"]
    if estimator not in ("diagonal", "kfac") or fisher not in FISHERS:
        raise UserError(
            f"sensitivity: estimator '{estimator}' with fisher '{fisher}' is unknown: "
            f"use diagonal or kfac, and one of {', '.join(FISHERS)}"
        )
    prepare(job.spec["threads"], seed)
    model = load_narrow(job.input("model")).to(device())
    prior = job.input("prior")
    style = load_info(prior)["styles"][0]
    sequences = encode(load_tokenizer(job.input("model")), load_examples(prior, "retention"), style)

    rounds = passes(model, estimator)
    progress = job.progress(rounds * len(sequences), f"{estimator} Fisher", unit="example")
    with job.phase("fisher"):
        path = job.out / f"{estimator}.safetensors"
        traces = write_estimate(model, sequences, estimator, path, fisher=fisher, seed=seed, progress=progress)
    progress.close()

    tokens = sum(len(s.inputs) for s in sequences)
    job.add_cost(
        tokens_forwarded=rounds * tokens,
        tokens_backpropagated=rounds * tokens,
        flops=6 * count_parameters(model) * rounds * tokens,
    )  # 2N forward, 4N backward per token
    report = {
        "estimator": estimator,
        "fisher": fisher,
        "seed": seed,
        "examples": len(sequences),
        "tokens": tokens,
        "completion_tokens": sum(len(s.completion) for s in sequences),
        "traces": traces,
    }
    (job.out / "report.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    job.metrics.update(examples=len(sequences), trace=sum(report["traces"].values()))
