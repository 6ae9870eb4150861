"""What an objective is built from, and what it offers to the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafting.errors import UserError


@dataclass(frozen=True)
class Setup:
    """The job, the model to be trained with its tokenizer, and the task's data folder."""

    job: Any
    model: Any
    tokenizer: Any
    info: dict
    data: Path
    train: list[dict]
    teacher_model: Any = None  # a separate start of the teacher (or reference); None: the model as it is now
    prior: Path | None = None  # data folder of the prior suite, for objectives that use its retention examples
    rollouts: Path | None = None  # rollouts made beforehand, for `opsd.rounds`

    @property
    def options(self) -> dict:
        """The objective's own section of the spec."""
        return self.job.spec.get(self.job.spec["objective"]) or {}

    @property
    def pad_id(self) -> int:
        """Token that fills batches up; it is never looked at."""
        return self.tokenizer.pad_token_id or 0


class Objective:
    """Base of all objectives: what one need not say. See the package's docstring for the whole protocol."""

    #: examples that batches are drawn from; each has an `id`
    examples: list
    #: a batch in which no token carries loss is a step without a signal rather than an error
    silent_steps = False
    #: whether `prepare` samples from the model that is trained
    samples = False

    def batches(self, batch_size: int, seed: int) -> Iterator[list]:
        """Endless batches; a function of the seed alone, so that a resumed run can go through it again."""
        from grafting.training.batches import draw  # the plan reads this package without torch

        return draw(self.examples, batch_size, seed)

    def place(self, device) -> None:
        """Before the first step: models of its own move to the device. None here."""

    def prepare(self, step: int, batch: list, counter) -> list:
        """Items of a batch, as they are."""
        return batch

    def targets(self, item) -> int:
        """Number of the item's tokens that carry loss."""
        return len(item.labels)

    def loss(self, model, items: list, counter):
        """Sum of the loss over those tokens."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(model, items, counter)")

    def after_step(self, model) -> None:
        """After each optimiser step. Nothing to keep up here."""

    def report(self, total: Callable[[dict], dict]) -> dict:
        """Numbers for this step's record; `total` sums a dict over processes. None here."""
        return {}

    def state(self) -> tuple[dict, dict]:
        """What a resumed run needs besides model and optimiser: tensors by name, and facts (JSON values)."""
        return {}, {}

    def restore(self, tensors: dict, facts: dict) -> None:
        """Take up what `state` gave."""

    def metrics(self, records: list[dict]) -> dict:
        """Numbers for the job's record, from the records of all steps."""
        return {}


def retention(setup: Setup) -> list[dict]:
    """The prior suite's retention examples: general prompts. UserError if the job has no prior suite."""
    from grafting.tasks import load_examples

    if setup.prior is None:
        raise UserError(
            f"{setup.job.id}: objective {setup.job.spec['objective']!r} needs the prior suite's retention examples; "
            "give the job an input with the role `prior`"
        )
    return load_examples(setup.prior, "retention")
