"""Run by `accelerate launch` from test_several_processes.py: trains, and writes the losses of the main process.

arguments: spec (JSON), start, data, prior, rollouts ("" for none), out
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from test_training import Job

from grafting.models import load_model, load_tokenizer
from grafting.tasks import load_examples, load_info
from grafting.training import loop, parallel
from grafting.training.objectives import Setup, build


def main(spec: str, start: str, data: str, prior: str, rollouts: str, out: str) -> None:
    torch.set_num_threads(1)
    job, folder = Job(None, json.loads(spec)), Path(data)
    model, tokenizer = load_model(start), load_tokenizer(start)
    objective = build(
        Setup(job, model, tokenizer, load_info(folder), folder, load_examples(folder, "train"), None, Path(prior),
              Path(rollouts) if rollouts else None)
    )  # fmt: skip
    batches = objective.batches(job.spec["batch_size"], job.spec["seed"])
    records = loop.train(model, batches, objective, loop.Settings.from_spec(job.spec), job)
    weights = {name: parameter.double().norm().item() for name, parameter in parallel.whole(model).items()}
    if PartialState().is_main_process:
        losses = [[record["loss"], record["grad_norm"]] for record in records]
        launched = PartialState().num_processes
        sharded = all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        found = {"processes": launched, "sharded": sharded, "losses": losses, "weights": weights, "cost": job.cost}
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
