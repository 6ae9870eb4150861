"""Stage sensitivity: estimate the deployed model's Fisher information on the prior suite's retention data.

spec    {"estimator": "diagonal" | "kfac", "fisher": "true" | "empirical", "seed", "threads"}
inputs  model (directory), prior (data folder; its retention.jsonl, responses in the first style)
payload diagonal.safetensors or kfac.safetensors (see diagonal.py, kfac.py), and report.json
"""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

from grafting.errors import UserError
from grafting.models import count_parameters, load_model, load_tokenizer
from grafting.rollouts.runtime import device, prepare
from grafting.sensitivity.diagonal import diagonal_fisher
from grafting.sensitivity.kfac import eigenbases, kfac_factors
from grafting.sensitivity.likelihood import FISHERS, encode
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
    model = load_model(job.input("model")).to(device())
    prior = job.input("prior")
    style = load_info(prior)["styles"][0]
    sequences = encode(load_tokenizer(job.input("model")), load_examples(prior, "retention"), style)

    progress = job.progress(len(sequences), f"{estimator} Fisher", unit="example")
    with job.phase("fisher"):
        if estimator == "diagonal":
            tensors = diagonal_fisher(model, sequences, fisher=fisher, seed=seed, progress=progress)
        else:
            factors = kfac_factors(model, sequences, fisher=fisher, seed=seed, progress=progress)
    progress.close()
    if estimator == "kfac":
        with job.phase("eigenbases"):
            tensors = eigenbases(factors)
    save_file(tensors, job.out / f"{estimator}.safetensors", metadata={"format": "pt"})

    tokens = sum(len(s.inputs) for s in sequences)
    job.add_cost(
        tokens_forwarded=tokens, tokens_backpropagated=tokens, flops=6 * count_parameters(model) * tokens
    )  # 2N forward, 4N backward per token
    report = {
        "estimator": estimator,
        "fisher": fisher,
        "seed": seed,
        "examples": len(sequences),
        "tokens": tokens,
        "completion_tokens": sum(len(s.completion) for s in sequences),
        "traces": _traces(tensors, estimator),
    }
    (job.out / "report.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    job.metrics.update(examples=len(sequences), trace=sum(report["traces"].values()))


def _traces(tensors: dict[str, torch.Tensor], estimator: str) -> dict[str, float]:
    """Trace of the Fisher block of every parameter (diagonal) or of A (x) G of every linear layer (kfac)."""
    if estimator == "diagonal":
        return {name: float(values.double().sum()) for name, values in tensors.items()}
    modules = [name.removesuffix(".A.values") for name in tensors if name.endswith(".A.values")]
    return {
        m: float(tensors[f"{m}.A.values"].double().sum() * tensors[f"{m}.G.values"].double().sum()) for m in modules
    }
