"""On-policy self-distillation (SDFT, arXiv 2601.19897).

y ~ pi_theta(. | x); the loss of a rollout token is D(teacher_t || student_t) over the whole vocabulary, where
teacher_t = pi_phi(. | x, demonstration, y_<t) and student_t = pi_theta(. | x, y_<t) score the same token ids.
No gradient flows through the teacher or through sampling.

Beside the whole vocabulary: its likeliest tokens, or the sampled token alone (see `divergences`). Variants: a hint
(the first words of the demonstration) in place of the whole, and a target purified of what the demonstration
suggests by itself. With the input `rollouts` nothing is sampled here: they were, by the model this job starts from.
"""

from __future__ import annotations

import copy

import torch

from grafting.errors import UserError
from grafting.models import lean
from grafting.rollouts import check_room
from grafting.rollouts.recorded import read_rollouts
from grafting.rollouts.scoring import prompt_ids
from grafting.tasks.examples import demonstration
from grafting.training.divergences import (
    NAMES,
    by_rows,
    divergence,
    importance_weights,
    log_probabilities,
    purified,
    sampled_reverse_kl,
)
from grafting.training.objectives.base import Setup
from grafting.training.objectives.on_policy import (
    OnPolicy,
    Pair,
    Question,
    pair_of,
    student_and_teacher,
    teacher_logits,
)
from grafting.training.teacher import Guard, Teacher


class SelfDistillation(OnPolicy):
    """Rolls out, lets the teacher score, and pulls the student towards it.

    options: divergence, beta (jsd, default 0.5), teacher, ema_rate, temperature (of sampling only),
    max_new_tokens, skip_tokens (first rollout tokens without loss), guard; and, where they differ from the default,
    vocabulary (full | top_k | sampled_token), top_k, support, tail, loss_temperature (of both distributions in the
    loss), importance_clip, purify (strength), hint_share, backend. UserError naming the example whose plain or
    demonstration-conditioned prompt does not fit the context with the response's room.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        options, style = self.options, setup.job.spec["style"]
        self.skip = options["skip_tokens"]
        self.vocabulary = options.get("vocabulary", "full")
        self.loss_temperature, self.clip = options.get("loss_temperature", 1.0), options.get("importance_clip")
        self.strength, self.hint_share = options.get("purify", 0.0), options.get("hint_share", 1.0)
        rate = options.get("ema_rate", 0.0)
        self.teacher = Teacher(options["teacher"], setup.model, rate, setup.teacher_model)
        self.guard = Guard(setup, self.teacher, options["guard"], style, self.room)
        # it watches the teacher as it teaches: with the hint alone
        self.guard.examples = [hinted(example, style, self.hint_share) for example in self.guard.examples]
        self.examples = [self._question(example, style) for example in setup.train]
        self.recorded = None if setup.rollouts is None else read_rollouts(setup.rollouts)
        if self.recorded is not None and (
            missing := [question.id for question in self.examples if question.id not in self.recorded]
        ):
            raise UserError(f"{self.job.id}: the recorded rollouts lack example {missing[0]}; make them again")
        self.samples = self.recorded is None
        self._measured: float | None = None
        self._prompts = None  # the pass over the batch's prompts, from sampling to the loss

    def _question(self, example: dict, style: str) -> Question:
        teacher = self.teacher.model
        plain = self.plain_prompt(example)
        shown = self.shown_prompt(teacher, hinted(example, style, self.hint_share), style)
        if not self.strength:
            return Question(example["id"], example, plain, shown)
        alone = prompt_ids(self.setup.tokenizer, self.setup.info, without_question(example), style)
        check_room(teacher, len(alone), self.room, f"example {example['id']}, prompt of the demonstration alone")
        return Question(example["id"], example, plain, shown, alone)

    def place(self, device) -> None:
        """Move the teacher."""
        self.teacher.model.to(device)

    def prepare(self, step: int, batch: list[Question], counter) -> list[Pair]:
        """One rollout per question, of the student as it is or recorded; the guard checks the teacher if due."""
        with self.job.phase("guard"):
            self._measured = self.guard.check(step)
        if self.recorded is None:
            names, prompts = [question.id for question in batch], [question.prompt for question in batch]
            spec = self.job.spec
            whole = (spec.get("micro_batch_size") or len(batch)) >= len(batch)
            kept = [] if whole and spec.get("precision", "float32") == "float32" else None
            rollouts = self.sample(prompts, names, step, counter, detail=self.clip is not None, kept=kept)
            self._prompts = kept[0] if kept else None
        else:
            epoch = step * self.job.spec["batch_size"] // len(self.examples)
            rollouts = [self.recorded[q.id][epoch % len(self.recorded[q.id])] for q in batch]
        self.judge([question.example for question in batch], rollouts, step)
        return [pair_of(question, rollout) for question, rollout in zip(batch, rollouts, strict=True)]

    def targets(self, pair: Pair) -> int:
        """Rollout tokens after the skipped ones."""
        return max(0, len(pair.student.labels) - self.skip)

    def loss(self, model, pairs: list[Pair], counter) -> torch.Tensor:
        """Sum of the divergence over the rollout tokens that carry loss."""
        prompts, self._prompts = self._prompts, None  # let go with the graph, after the backward pass
        student, teacher, tokens = student_and_teacher(
            self.job, model, self.teacher.model, pairs, self.pad_id, counter, prompts
        )
        device = tokens.device
        if self.strength:
            items = [pair.reference for pair in pairs]
            alone = teacher_logits(self.job, self.teacher.model, items, self.pad_id, counter, device)
            teacher = purified(teacher, alone, student, self.strength)
        with self.job.phase("divergence"):
            if student.shape[-1] > lean.SMALL:
                values = by_rows(lambda s, t, chosen: self.token_losses(t, s, chosen), student, teacher, tokens)
            else:
                values = self.token_losses(teacher, student, tokens)
            if self.clip is not None:
                sampled = torch.tensor([p for pair in pairs for p in pair.logprobs], device=device)
                own = log_probabilities(student / self.options["temperature"], tokens)
                values = values * importance_weights(own, sampled, self.clip)
            if self.skip:
                kept = [t >= self.skip for pair in pairs for t in range(len(pair.student.labels))]
                values = values[torch.tensor(kept, device=device)]
            loss = values.sum()
        return loss

    def token_losses(self, teacher: torch.Tensor, student: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Loss per token [n] from logits [n, V] of both and the sampled tokens [n]."""
        options = self.options
        if self.loss_temperature != 1:
            teacher, student = teacher / self.loss_temperature, student / self.loss_temperature
        if self.vocabulary == "sampled_token":
            return sampled_reverse_kl(log_probabilities(teacher, tokens), log_probabilities(student, tokens))
        return divergence(
            options["divergence"],
            teacher,
            student,
            options.get("beta", 0.5),
            top_k=options["top_k"] if self.vocabulary == "top_k" else None,
            support=options.get("support", "student"),
            tail=options.get("tail", True),
        )

    def after_step(self, model) -> None:
        """The teacher follows, if it is one that follows."""
        self.teacher.update(model)

    def report(self, total) -> dict:
        """Divergence with its direction, what the rollouts were like, and the teacher's accuracy when it was
        measured."""
        record = {"divergence": NAMES[self.options["divergence"]], **self.rolled(total)}
        return record if self._measured is None else record | {"teacher_accuracy": self._measured}

    def state(self) -> tuple[dict, dict]:
        """The teacher, if it is one that follows, and the guard."""
        return self.teacher.state(), {"guard": self.guard.state()}

    def restore(self, tensors: dict, facts: dict) -> None:
        """Undo `state`."""
        self.teacher.restore(tensors)
        self.guard.restore(facts["guard"])

    def metrics(self, records: list[dict]) -> dict:
        """Those of the rollouts, the teacher's lowest accuracy, and what measuring it generated."""
        accuracies = [record["teacher_accuracy"] for record in records if "teacher_accuracy" in record]
        return super().metrics(records) | {
            "teacher_accuracy": min(accuracies),
            "guard_tokens_generated": self.guard.counter.tokens_generated,
        }


def hinted(example: dict, style: str, share: float) -> dict:
    """The example with the first `share` of its demonstration's words, at least one; all of it at share 1."""
    if share == 1:
        return example
    words = demonstration(example, style).split(" ")
    kept = " ".join(words[: max(1, round(share * len(words)))])
    return {**example, "demonstrations": {**example["demonstrations"], style: kept}}


def without_question(example: dict) -> dict:
    """The example with an empty last user message, which the demonstration is then put into."""
    messages = copy.deepcopy(example["messages"])
    next(m for m in reversed(messages) if m["role"] == "user")["content"] = ""
    return {**example, "messages": messages}
