"""Self-distillation policy optimisation (SDPO, arXiv 2601.20802).

K rollouts per prompt. Where another rollout of the same prompt is right, it becomes the demonstration in the teacher's
prompt, and the student is pulled to what the same network says with that hindsight:
  loss of a token = D(pi_phi(. | x, right sibling, y_<t) || pi_theta(. | x, y_<t)).
A rollout without a right sibling carries no loss. The verifier is all that is needed: no demonstrations.
Which divergence and which teacher the paper uses, this file takes from the config and does not assume.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from grafting.errors import UserError
from grafting.models.chat import decode
from grafting.rollouts.scoring import prompt_ids
from grafting.training.batches import draw
from grafting.training.divergences import NAMES, divergence
from grafting.training.objectives.base import Setup
from grafting.training.objectives.on_policy import OnPolicy, Pair, Question, pair_of, student_and_teacher
from grafting.training.teacher import Teacher


class Sdpo(OnPolicy):
    """Learns from its own right answers in hindsight.

    options: samples (K per prompt), divergence, beta, teacher, ema_rate, temperature, max_new_tokens. `batch_size`
    counts rollouts. A batch without any right answer is a step without a signal. A sibling that would not fit into
    the teacher's prompt is left out and counted, never cut.
    """

    silent_steps = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        options, spec = self.options, setup.job.spec
        self.group, self.style = options["samples"], spec["style"]
        if spec["batch_size"] % self.group or self.group < 2:
            raise UserError(
                f"{self.job.id}: samples {self.group} must be at least 2 and divide batch_size "
                f"{spec['batch_size']}, which counts rollouts"
            )
        self.teacher = Teacher(options["teacher"], setup.model, options.get("ema_rate", 0.0), setup.teacher_model)
        self.context = getattr(setup.model.config, "max_position_embeddings", None)
        self.examples = []
        for example in setup.train:
            plain = self.plain_prompt(example)
            self.examples.append(Question(example["id"], example, plain, plain))
        self._shown = {"shown": 0, "too_long": 0}

    def batches(self, batch_size: int, seed: int) -> Iterator[list[Question]]:
        """Batches of prompts whose rollouts make up `batch_size`."""
        return draw(self.examples, batch_size // self.group, seed)

    def place(self, device) -> None:
        """Move the teacher."""
        self.teacher.model.to(device)

    def prepare(self, step: int, batch: list[Question], counter) -> list[Pair]:
        """The rollouts that have a right sibling, with the prompt that shows it: the next right one in the group."""
        asked = [question for question in batch for _ in range(self.group)]
        names = [f"{question.id}/{k}" for question in batch for k in range(self.group)]
        rollouts = self.sample([question.prompt for question in asked], names, step, counter)
        correct = self.judge([question.example for question in asked], rollouts, step)
        pairs, self._shown = [], {"shown": 0, "too_long": 0}
        for i, question in enumerate(asked):
            first = i - i % self.group
            siblings = [first + (i - first + k) % self.group for k in range(1, self.group)]
            right = next((s for s in siblings if correct[s]), None)
            if right is None:
                continue
            prompt = self._hindsight(question.example, decode(self.setup.tokenizer, rollouts[right].tokens))
            if self.context is not None and len(prompt) + len(rollouts[i].tokens) > self.context:
                self._shown["too_long"] += 1
                continue
            self._shown["shown"] += 1
            pairs.append(pair_of(Question(question.id, question.example, question.prompt, prompt), rollouts[i]))
        return pairs

    def _hindsight(self, example: dict, text: str) -> list[int]:
        shown = {**example, "demonstrations": {self.style: text}}
        return prompt_ids(self.setup.tokenizer, self.setup.info, shown, self.style)

    def targets(self, pair: Pair) -> int:
        """All tokens of the rollout."""
        return len(pair.student.labels)

    def loss(self, model, pairs: list[Pair], counter) -> torch.Tensor:
        """Sum of the divergence over the rollout tokens."""
        if not pairs:
            return torch.zeros((), device=next(model.parameters()).device, requires_grad=True)
        student, teacher, _ = student_and_teacher(self.job, model, self.teacher.model, pairs, self.pad_id, counter)
        with self.job.phase("divergence"):
            return divergence(self.options["divergence"], teacher, student, self.options.get("beta", 0.5)).sum()

    def after_step(self, model) -> None:
        """The teacher follows, if it is one that follows."""
        self.teacher.update(model)

    def report(self, total) -> dict:
        """Divergence with its direction, what the rollouts were like, how many had a right sibling."""
        return {"divergence": NAMES[self.options["divergence"]], **self.rolled(total), **total(self._shown)}

    def state(self) -> tuple[dict, dict]:
        """The teacher, if it is one that follows."""
        return self.teacher.state(), {}

    def restore(self, tensors: dict, facts: dict) -> None:
        """Undo `state`."""
        self.teacher.restore(tensors)
