"""On-policy self-distillation (SDFT, arXiv 2601.19897).

y ~ pi_theta(. | x); the loss of a rollout token is D(teacher_t || student_t) over the whole vocabulary, where
teacher_t = pi_phi(. | x, demonstration, y_<t) and student_t = pi_theta(. | x, y_<t) score the same token ids.
No gradient flows through the teacher or through sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grafting.models.chat import decode, stop_ids
from grafting.models.forward import completion_logits
from grafting.rollouts import check_room, example_seed, generate
from grafting.rollouts.scoring import prompt_ids, verdict
from grafting.training.batches import Item, collate
from grafting.training.divergences import NAMES, divergence
from grafting.training.objectives.base import Setup
from grafting.training.teacher import Guard, Teacher


@dataclass(frozen=True)
class Pair:
    """The same completion after the student's prompt and after the teacher's."""

    id: str
    student: Item
    teacher: Item


@dataclass(frozen=True)
class Question:
    """An example with its two prompts."""

    id: str
    example: dict
    prompt: list[int]
    teacher_prompt: list[int]


class SelfDistillation:
    """Rolls out, lets the teacher score, and pulls the student towards it.

    spec keys (under `opsd`): divergence, beta (jsd, default 0.5), teacher, ema_rate, temperature (of sampling
    only), max_new_tokens, skip_tokens (first rollout tokens without loss), guard. UserError naming the
    example whose plain or demonstration-conditioned prompt does not fit the context with the response's room.
    """

    def __init__(self, setup: Setup) -> None:
        spec = setup.job.spec
        options = spec["opsd"]
        self.setup, self.job, self.options, self.seed = setup, setup.job, options, spec["seed"]
        self.skip, self.room = options["skip_tokens"], options["max_new_tokens"]
        self.pad_id = setup.tokenizer.pad_token_id or 0
        self.stops = stop_ids(setup.model, setup.tokenizer)
        rate = options.get("ema_rate", 0.0)
        self.teacher = Teacher(options["teacher"], setup.model, rate, setup.teacher_model)
        self.guard = Guard(setup, self.teacher, options["guard"], spec["style"], self.room)
        self.examples = [self._question(example, spec["style"]) for example in setup.train]
        self._report: dict[str, int] = {}
        self._measured: float | None = None

    def _question(self, example: dict, style: str) -> Question:
        setup = self.setup
        plain = prompt_ids(setup.tokenizer, setup.info, example, None)
        shown = prompt_ids(setup.tokenizer, setup.info, example, style)
        name = f"example {example['id']} of {setup.info['name']}"
        check_room(setup.model, len(plain), self.room, name)
        check_room(self.teacher.model, len(shown), self.room, f"{name}, prompt with the demonstration")
        return Question(example["id"], example, plain, shown)

    def place(self, device) -> None:
        """Move the teacher."""
        self.teacher.model.to(device)

    def prepare(self, step: int, batch: list[Question], counter) -> list[Pair]:
        """Sample one rollout per question from the student as it is; the guard checks the teacher if due."""
        with self.job.phase("guard"):
            self._measured = self.guard.check(step)
        with self.job.phase("rollout"):
            rollouts = generate(
                self.setup.model,
                [question.prompt for question in batch],
                max_new_tokens=self.room,
                stop_ids=self.stops,
                pad_id=self.pad_id,
                temperature=self.options["temperature"],
                seeds=[example_seed(self.seed, step, question.id) for question in batch],
                batch_size=max(len(batch), 1),
                counter=counter,
            )
        correct, pairs = 0, []
        for question, rollout in zip(batch, rollouts, strict=True):
            text = decode(self.setup.tokenizer, rollout.tokens)
            correct += verdict(self.setup.info, question.example, text, rollout.finish)[0]
            student = Item(question.id, question.prompt, rollout.tokens, rollout.tokens)
            teacher = Item(question.id, question.teacher_prompt, rollout.tokens, rollout.tokens)
            pairs.append(Pair(question.id, student, teacher))
        self._report = {"n": len(batch), "tokens": sum(len(r.tokens) for r in rollouts), "correct": correct}
        return pairs

    def targets(self, pair: Pair) -> int:
        """Rollout tokens after the skipped ones."""
        return max(0, len(pair.student.labels) - self.skip)

    def loss(self, model, pairs: list[Pair], counter) -> torch.Tensor:
        """Sum of the divergence over the rollout tokens that carry loss."""
        device = next(model.parameters()).device
        # The student comes first: autocast caches the weights it casts, and a live teacher, which runs
        # without gradient, would otherwise leave casts in the cache that carry none.
        with self.job.phase("student"):
            ids, predicts, _ = collate([pair.student for pair in pairs], self.pad_id, device)
            student = completion_logits(model, ids, predicts)
        with self.job.phase("teacher"), torch.no_grad():
            ids, predicts, _ = collate([pair.teacher for pair in pairs], self.pad_id, device)
            teacher = completion_logits(self.teacher.model, ids, predicts)
        with self.job.phase("divergence"):
            values = divergence(self.options["divergence"], teacher, student, self.options.get("beta", 0.5))
            if self.skip:
                kept = [t >= self.skip for pair in pairs for t in range(len(pair.student.labels))]
                values = values[torch.tensor(kept, device=device)]
            loss = values.sum()
        tokens, shown = (sum(p.student.length for p in pairs), sum(p.teacher.length for p in pairs))
        counter.add(tokens_forwarded=tokens + shown, tokens_backpropagated=tokens)
        return loss

    def after_step(self, model) -> None:
        """The teacher follows, if it is one that follows."""
        self.teacher.update(model)

    def report(self, total) -> dict:
        """Divergence with its direction, mean rollout length in tokens, rollout accuracy, and the teacher's
        accuracy when it was measured."""
        sums = total(self._report)
        record = {
            "divergence": NAMES[self.options["divergence"]],
            "rollout_length": sums["tokens"] / sums["n"],
            "rollout_accuracy": sums["correct"] / sums["n"],
        }
        return record if self._measured is None else record | {"teacher_accuracy": self._measured}

    def state(self) -> tuple[dict, dict]:
        """The teacher, if it is one that follows, and the guard."""
        return self.teacher.state(), {"guard": self.guard.state()}

    def restore(self, tensors: dict, facts: dict) -> None:
        """Undo `state`."""
        self.teacher.restore(tensors)
        self.guard.restore(facts["guard"])
