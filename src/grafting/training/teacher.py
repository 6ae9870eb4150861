"""The teacher of self-distillation, and the guard that watches it."""

from __future__ import annotations

import copy
from dataclasses import asdict

import torch

from grafting.errors import UserError
from grafting.rollouts import accuracy, respond
from grafting.rollouts.counting import Counter
from grafting.tasks import load_examples

KINDS = ("frozen", "ema", "live")


class Teacher:
    """A model that never receives a gradient.

    frozen: stays at its start. ema: phi <- (1 - rate) phi + rate theta after each optimiser step (rate 0
    never moves, rate 1 copies the student). live: the student itself; a separate start has no meaning then.
    """

    def __init__(self, kind: str, student, rate: float = 0.0, start=None) -> None:
        """`start` is the teacher's start if it is not a copy of the student as it is now."""
        if kind not in KINDS:
            raise UserError(f"opsd.teacher: {kind!r} is not known; choose one of {', '.join(KINDS)}")
        if kind == "ema" and not 0 <= rate <= 1:
            raise UserError(f"opsd.ema_rate: {rate} is outside [0, 1]")
        self.kind, self.rate = kind, rate
        if kind == "live":
            self.model = student
        else:
            self.model = (copy.deepcopy(student) if start is None else start).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, student) -> None:
        """Follow the student after an optimiser step, if the teacher is one that follows."""
        if self.kind == "ema":
            torch._foreach_lerp_(list(self.model.parameters()), list(student.parameters()), self.rate)

    def state(self) -> dict[str, torch.Tensor]:
        """What of it is not there at the start of training: the weights of an ema teacher."""
        return dict(self.model.named_parameters()) if self.kind == "ema" else {}

    @torch.no_grad()
    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Undo `state`."""
        for name, parameter in self.model.named_parameters():
            if name in tensors:
                parameter.copy_(tensors[name])


class Guard:
    """Measures every `every` steps whether the teacher still answers when it is shown the demonstration.

    A drifting student can destroy an ema or live teacher. Below `threshold` it warns once, or stops
    (UserError). A frozen teacher is measured once. The measure is greedy accuracy on the first validation
    examples. It watches and trains nothing, so what it generates is no cost of the method: `counter` is its own.
    """

    def __init__(
        self, setup, teacher: Teacher, options: dict, style: str, max_new_tokens: int, items: int = 16
    ) -> None:
        self.setup, self.teacher, self.style, self.max_new_tokens = setup, teacher, style, max_new_tokens
        self.threshold, self.action, self.every = options["threshold"], options["action"], options["every"]
        if self.action not in ("warn", "stop"):
            raise UserError(f"opsd.guard.action: {self.action!r} is not known; choose warn or stop")
        self.examples = load_examples(setup.data, "val")[:items]
        self.lowest: float | None = None
        self.counter = Counter()

    def check(self, step: int) -> float | None:
        """Accuracy if it is due before this step, else None."""
        due = step == 0 if self.teacher.kind == "frozen" else step % self.every == 0
        if not due:
            return None
        setup = self.setup
        value = accuracy(
            respond(
                self.teacher.model,
                setup.tokenizer,
                setup.info,
                self.examples,
                style=self.style,
                max_new_tokens=self.max_new_tokens,
                batch_size=len(self.examples),
                counter=self.counter,
            )
        )
        if value < self.threshold and (self.lowest is None or self.lowest >= self.threshold):
            message = (
                f"step {step}: the {self.teacher.kind} teacher answers {value:.2f} of {len(self.examples)} "
                f"examples of {setup.info['name']} with the demonstration in its prompt, below "
                f"opsd.guard.threshold {self.threshold}; lower lr or opsd.ema_rate, or use teacher: frozen"
            )
            if self.action == "stop":
                raise UserError(f"{setup.job.id}, {message}")
            setup.job.say(f"warning: {message}")
        self.lowest = value if self.lowest is None else min(self.lowest, value)
        return value

    def state(self) -> dict:
        """What it has found and used so far, as JSON."""
        return {"lowest": self.lowest, "counter": asdict(self.counter)}

    def restore(self, facts: dict) -> None:
        """Undo `state`."""
        self.lowest, self.counter = facts["lowest"], Counter(**facts["counter"])
