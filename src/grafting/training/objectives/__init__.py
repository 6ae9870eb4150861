"""Objectives, by name. A new one is one file here and one entry under `learners` in the config: see
docs/how-to/own-objective.md.

An objective is a subclass of `base.Objective`, built as `Class(setup)`, and offers
  examples                              what batches are drawn from (each with an id)
  batches(batch_size, seed)             endless batches of them, a function of the seed
  place(device)                         before the first step: models of its own move to the device
  prepare(step, batch, counter) -> items    turns drawn examples into items; sampling happens here
  targets(item) -> int                  number of the item's tokens that carry loss
  loss(model, items, counter) -> Tensor sum of the loss over those tokens; counts the tokens it computes
  after_step(model)                     after each optimiser step
  report(total) -> dict                 numbers for this step's record; `total` sums a dict over processes
  state() -> (tensors, facts)           all that it holds and that steps change, by name; facts are JSON values
  restore(tensors, facts)               undoes `state` in an objective that was just built and placed
  metrics(records) -> dict              numbers for the job's record
All but examples and loss have a default.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from grafting.errors import UserError
from grafting.training.objectives.base import Objective, Setup

__all__ = ["OBJECTIVES", "Objective", "Setup", "build", "find"]

#: name -> module of this package and its class. Resolved on use: a changed objective reruns its own jobs only.
OBJECTIVES = {
    "sft": "supervised:Supervised",
    "dft": "weighted:Dft",
    "gated_sft": "weighted:GatedSft",
    "sft_kl": "regularised:SftKl",
    "sft_l2": "regularised:SftL2",
    "replay": "regularised:Replay",
    "opsd": "self_distillation:SelfDistillation",
    "reinvoke": "reinvoke:Reinvoke",
    "grpo": "policy:Grpo",
    "sdpo": "sdpo:Sdpo",
}


def find(name: str) -> str | None:
    """`module:Class` of the objective of this name, or None.

    A file `<name>.py` of this package that no entry names is an objective, too: its class is called `Learner`.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    taken = {entry.partition(":")[0] for entry in OBJECTIVES.values()} | {"__init__", "base", "on_policy"}
    own = name.isidentifier() and name not in taken and (Path(__file__).parent / f"{name}.py").is_file()
    return f"{name}:Learner" if own else None


def build(setup: Setup) -> Objective:
    """The objective named in the spec; UserError if there is none of that name."""
    name = setup.job.spec["objective"]
    found = find(name)
    if found is None:
        known = ", ".join(OBJECTIVES)
        raise UserError(f"{setup.job.id}: objective {name!r} is not known; choose one of {known}")
    module, _, objective = found.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), objective)(setup)
