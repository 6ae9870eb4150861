"""Re-invocation: SFT, then on-policy distillation back towards the deployed model on general prompts.

First (1 - share) of the steps: -log pi_theta(y*_t) on the demonstrations. Then: y ~ pi_theta(. | x) for retention
prompts x of the prior suite, loss of a token = D(pi_0(. | x, y_<t) || pi_theta(. | x, y_<t)), without demonstration.
A control in SDFT's tables (arXiv 2601.19897); one schedule and one optimiser run through both parts, which is ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from grafting.tasks import load_info
from grafting.training.batches import Item, draw
from grafting.training.divergences import NAMES, divergence
from grafting.training.objectives.base import Setup, retention
from grafting.training.objectives.on_policy import OnPolicy, Pair, Question, pair_of, student_and_teacher
from grafting.training.objectives.supervised import CrossEntropy, supervised_items
from grafting.training.teacher import Teacher


class Reinvoke(OnPolicy):
    """options: share (of the steps that distil), divergence, beta, temperature, max_new_tokens."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        spec = setup.job.spec
        self.supervised = CrossEntropy(setup.job, self.pad_id)
        self.examples = supervised_items(setup, setup.train, spec["style"])
        self.turn = spec["steps"] - round(self.options["share"] * spec["steps"])
        self.teacher = Teacher("frozen", setup.model, start=setup.teacher_model)
        self.general_info = load_info(setup.prior) if setup.prior is not None else {}
        self.general = []
        for example in retention(setup):
            prompt = self.plain_prompt(example, self.general_info, "retention example")
            self.general.append(Question(example["id"], example, prompt, prompt))

    def batches(self, batch_size: int, seed: int) -> Iterator[list]:
        """Demonstrations up to the turn, general prompts from there on."""
        demonstrations = draw(self.examples, batch_size, seed)
        for _ in range(self.turn):
            yield next(demonstrations)
        yield from draw(self.general, batch_size, seed)

    def place(self, device) -> None:
        """Move the teacher."""
        self.teacher.model.to(device)

    def prepare(self, step: int, batch: list, counter) -> list:
        """Demonstrations as they are; general prompts with a rollout of the student as it is."""
        self._report = {}
        if step < self.turn:
            return batch
        names = [question.id for question in batch]
        rollouts = self.sample([question.prompt for question in batch], names, step, counter)
        self._report = {"n": len(rollouts), "tokens": sum(len(rollout.tokens) for rollout in rollouts)}
        return [pair_of(question, rollout) for question, rollout in zip(batch, rollouts, strict=True)]

    def targets(self, item: Item | Pair) -> int:
        """Completion tokens, or rollout tokens."""
        return len(item.student.labels if isinstance(item, Pair) else item.labels)

    def loss(self, model, items: list, counter) -> torch.Tensor:
        """Sum of the cross-entropy, or of the divergence; a batch is of one kind."""
        if isinstance(items[0], Item):
            return self.supervised.loss(model, items, counter)
        student, teacher, _ = student_and_teacher(self.job, model, self.teacher.model, items, self.pad_id, counter)
        with self.job.phase("divergence"):
            return divergence(self.options["divergence"], teacher, student, self.options.get("beta", 0.5)).sum()

    def report(self, total) -> dict:
        """Which part this step was, and for the second the divergence and the rollouts' mean length."""
        if not self._report:
            return {"part": "sft"}
        sums = total(self._report)
        named = NAMES[self.options["divergence"]]
        return {"part": "distillation", "divergence": named, "rollout_length": sums["tokens"] / max(sums["n"], 1)}
