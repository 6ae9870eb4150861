"""What objectives share that learn from the student's own rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grafting.errors import UserError
from grafting.models.chat import decode, stop_ids
from grafting.models.forward import completion_logits, continued_logits
from grafting.rollouts import Rollout, check_room, example_seed, generate
from grafting.rollouts.scoring import prompt_ids, verdict
from grafting.tasks.scorers import FAILED
from grafting.training.batches import Item, collate
from grafting.training.objectives.base import Objective, Setup


@dataclass(frozen=True)
class Question:
    """An example with its prompt, and with the prompt of who knows more (the teacher)."""

    id: str
    example: dict
    prompt: list[int]
    teacher_prompt: list[int]
    reference_prompt: list[int] | None = None  # what is shown, without the question


@dataclass(frozen=True)
class Pair:
    """The same completion after the student's prompt and after the teacher's."""

    id: str
    student: Item
    teacher: Item
    reference: Item | None = None
    logprobs: list[float] | None = None  # of the completion's tokens, under the model that sampled them


def pair_of(question: Question, rollout: Rollout) -> Pair:
    """The rollout behind every prompt of its question; token ids are never made anew."""

    def behind(prompt: list[int]) -> Item:
        return Item(question.id, prompt, rollout.tokens, rollout.tokens)

    reference = None if question.reference_prompt is None else behind(question.reference_prompt)
    return Pair(question.id, behind(question.prompt), behind(question.teacher_prompt), reference, rollout.logprobs)


class OnPolicy(Objective):
    """Samples from the student as it is, and judges what it says.

    options: temperature (of sampling), max_new_tokens, backend (default native; see `grafting.rollouts`).
    """

    samples = True

    def __init__(self, setup: Setup) -> None:
        options = setup.options
        self.setup, self.job, self.options, self.seed = setup, setup.job, options, setup.job.spec["seed"]
        self.room = options["max_new_tokens"]
        self.pad_id = setup.pad_id
        self.stops = stop_ids(setup.model, setup.tokenizer)
        self._report: dict[str, float] = {}
        self._warned = False

    def plain_prompt(self, example: dict, info: dict | None = None, what: str = "example") -> list[int]:
        """Prompt without any help; UserError naming the example that leaves no room for the response."""
        info = info or self.setup.info
        prompt = prompt_ids(self.setup.tokenizer, info, example, None)
        check_room(self.setup.model, len(prompt), self.room, f"{what} {example['id']} of {info['name']}")
        return prompt

    def shown_prompt(self, model, example: dict, style: str) -> list[int]:
        """Prompt that shows a demonstration; it is never cut."""
        prompt = prompt_ids(self.setup.tokenizer, self.setup.info, example, style)
        name = f"example {example['id']} of {self.setup.info['name']}, prompt with the demonstration"
        check_room(model, len(prompt), self.room, name)
        return prompt

    def sample(
        self,
        prompts: list[list[int]],
        names: list[str],
        step: int,
        counter,
        detail: bool = False,
        kept: list | None = None,
    ) -> list[Rollout]:
        """One rollout per prompt. What it is depends on (seed, step, name) only. kept: see `generate`."""
        with self.job.phase("rollout"):
            return generate(
                self.setup.model,
                prompts,
                max_new_tokens=self.room,
                stop_ids=self.stops,
                pad_id=self.pad_id,
                temperature=self.options["temperature"],
                seeds=[example_seed(self.seed, step, name) for name in names],
                batch_size=max(len(prompts), 1),
                counter=counter,
                detail=detail,
                backend=self.options.get("backend", "native"),
                kept=kept,
            )

    def judge(self, examples: list[dict], rollouts: list[Rollout], step: int) -> list[bool]:
        """Verdicts of the task's scorer; what they and the lengths sum up to is kept for the report.

        UserError naming the example for which the scorer itself fails.
        """
        correct, texts = [], []
        for example, rollout in zip(examples, rollouts, strict=True):
            texts.append(decode(self.setup.tokenizer, rollout.tokens))
            right, reason = verdict(self.setup.info, example, texts[-1], rollout.finish)
            if reason == FAILED:  # an evaluation counts it; here it would be learned from
                raise UserError(
                    f"{self.job.id}, step {step + 1}, example {example['id']}: the scorer "
                    f"{self.setup.info['scorer']!r} failed on the response {texts[-1][:80]!r}, "
                    "its own message stands above in the log; mend the scorer and run again"
                )
            correct.append(right)
        empty = sum(len(rollout.tokens) <= 1 and rollout.finish == "stop" for rollout in rollouts)
        self._report = {
            "n": len(rollouts),
            "tokens": sum(len(rollout.tokens) for rollout in rollouts),
            "correct": sum(correct),
            "truncated": sum(rollout.finish == "length" for rollout in rollouts),
            "empty": empty,
        }
        if rollouts and empty == len(rollouts) and not self._warned:
            self._warned = True
            self.job.say(f"warning: step {step + 1}: all {empty} rollouts are empty: the model ends at once")
        return correct

    def rolled(self, total) -> dict:
        """Mean rollout length in tokens; shares of correct, truncated and empty rollouts."""
        sums = total(self._report)
        n = max(sums["n"], 1)
        return {
            "rollout_length": sums["tokens"] / n,
            "rollout_accuracy": sums["correct"] / n,
            "rollout_truncated": sums["truncated"] / n,
            "rollout_empty": sums["empty"] / n,
        }

    def metrics(self, records: list[dict]) -> dict:
        """Accuracy of the last step's rollouts, and the share of rollouts that never stopped, over all steps."""
        rolled = [record for record in records if "rollout_accuracy" in record]
        if not rolled:
            return {}
        truncated = sum(record["rollout_truncated"] for record in rolled) / len(rolled)
        return {"rollout_accuracy": rolled[-1]["rollout_accuracy"], "rollout_truncated": truncated}


def student_and_teacher(job, model, teacher, pairs: list[Pair], pad_id: int, counter, prompts=None):
    """(student logits, teacher logits, tokens): [n, V], [n, V], [n] at the pairs' completion tokens.

    prompts: the pass over the student's prompts, if sampling has kept it: the weights are the same, so it is not
    repeated.
    """
    device = next(model.parameters()).device
    # The student comes first: autocast caches the weights it casts, and a live teacher, which runs
    # without gradient, would otherwise leave casts in the cache that carry none.
    with job.phase("student"):
        ids, predicts, tokens = collate([pair.student for pair in pairs], pad_id, device)
        if prompts is None:
            student = completion_logits(model, ids, predicts)
        else:
            student = continued_logits(model, prompts, [pair.student.inputs for pair in pairs])
    shown = teacher_logits(job, teacher, [pair.teacher for pair in pairs], pad_id, counter, device)
    length = sum(pair.student.length for pair in pairs)
    known = 0 if prompts is None else sum(len(pair.student.prompt) for pair in pairs)
    counter.add(tokens_forwarded=length - known, tokens_backpropagated=length)
    return student, shown, tokens


def teacher_logits(job, teacher, items: list[Item], pad_id: int, counter, device) -> torch.Tensor:
    """Logits [n, V] of a model that gets no gradient."""
    with job.phase("teacher"), torch.no_grad():
        ids, predicts, _ = collate(items, pad_id, device)
        counter.add(tokens_forwarded=sum(item.length for item in items))
        return completion_logits(teacher, ids, predicts)
