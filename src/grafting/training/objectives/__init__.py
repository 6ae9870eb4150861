"""Objectives, by name. A new one is one file here and one entry in `OBJECTIVES`.

An objective is built as `Objective(setup)` and offers
  examples                              what batches are drawn from (each with an id)
  place(device)                         before the first step: models of its own move to the device
  prepare(step, batch, counter) -> items    turns drawn examples into items; sampling happens here
  targets(item) -> int                  number of the item's tokens that carry loss
  loss(model, items, counter) -> Tensor sum of the loss over those tokens; counts the tokens it computes
  after_step(model)                     after each optimiser step
  report(total) -> dict                 numbers for this step's record; `total` sums a dict over processes
  state() -> (tensors, facts)           all that it holds and that steps change, by name; facts are JSON values
  restore(tensors, facts)               undoes `state` in an objective that was just built and placed
"""

from __future__ import annotations

from importlib import import_module

from grafting.errors import UserError
from grafting.training.objectives.base import Setup

#: name -> module of this package and its class. Resolved on use: a changed objective reruns its own jobs only.
OBJECTIVES = {"sft": "supervised:Supervised", "opsd": "self_distillation:SelfDistillation"}


def build(setup: Setup):
    """The objective named in the spec; UserError if there is none of that name."""
    name = setup.job.spec["objective"]
    if name not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise UserError(f"{setup.job.id}: objective {name!r} is not known; choose one of {known}")
    module, _, objective = OBJECTIVES[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), objective)(setup)
