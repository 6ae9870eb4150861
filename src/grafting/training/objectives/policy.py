"""On-policy reinforcement learning with a verifier, by group-relative advantages.

grpo (arXiv 2402.03300): K rollouts y_i ~ pi_theta(. | x) per prompt, reward r_i;
  A_i = (r_i - mean r) / (std r + 1e-4), the standard deviation with K - 1 in its denominator;
  loss of a token = -A_i log pi_theta(y_t) + kl * KL(pi_theta || pi_0), mean over all rollout tokens of the batch.
Every rollout is used for one update, so the ratio of new to old policy is 1 and clipping it would do nothing.

The pedagogical teacher is the same with a prompt that shows the answer, and a spike-aware reward:
  r = correct - spike * max(0, max_t [log pi_theta(y_t | x, answer, y_<t) - log pi_student(y_t | x, y_<t)] - tolerance),
for correct responses; 0 for others. pi_student is the deployed model. The form of the penalty is our choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from grafting.errors import UserError
from grafting.models.forward import completion_logits
from grafting.training.batches import Item, collate, draw
from grafting.training.divergences import divergence, log_probabilities
from grafting.training.objectives.base import Setup
from grafting.training.objectives.on_policy import OnPolicy, Question, teacher_logits
from grafting.training.teacher import Teacher


@dataclass(frozen=True)
class Attempt:
    """One rollout with its advantage over the others of its prompt."""

    id: str
    item: Item
    advantage: float


def advantages(rewards: list[float], scaled: bool = True) -> list[float]:
    """(r - mean) / (std + 1e-4) of one group; without the division if not `scaled`. Zeros where all are equal."""
    mean = sum(rewards) / len(rewards)
    if not scaled or len(rewards) == 1:
        return [reward - mean for reward in rewards]
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


def spike_penalty(teacher: list[float], student: list[float], tolerance: float) -> float:
    """max(0, the largest per-token gap in nats of both's log-probabilities, less the tolerance)."""
    return max(0.0, max(t - s for t, s in zip(teacher, student, strict=True)) - tolerance)


class Grpo(OnPolicy):
    """Rewards what the verifier accepts.

    options: samples (K per prompt), temperature, max_new_tokens, scale_advantages, kl (weight of the divergence from
    pi_0), privileged (the prompt shows the demonstration), spike (weight), spike_tolerance (nats). `batch_size`
    counts rollouts. A batch whose groups are all of one mind is a step without a signal.
    """

    silent_steps = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        options, spec = self.options, setup.job.spec
        self.group = options["samples"]
        if spec["batch_size"] % self.group:
            raise UserError(
                f"{self.job.id}: batch_size {spec['batch_size']} counts rollouts and is no multiple of "
                f"samples {self.group}; change one of them"
            )
        needs_reference = options["kl"] or options["spike"]
        self.reference = Teacher("frozen", setup.model, start=setup.teacher_model) if needs_reference else None
        self.examples = []
        for example in setup.train:
            plain, prompt = self.plain_prompt(example), None
            prompt = self.shown_prompt(setup.model, example, spec["style"]) if options["privileged"] else plain
            self.examples.append(Question(example["id"], example, plain, prompt))
        self._rewards: dict[str, float] = {}

    def batches(self, batch_size: int, seed: int) -> Iterator[list[Question]]:
        """Batches of prompts whose rollouts make up `batch_size`."""
        return draw(self.examples, batch_size // self.group, seed)

    def place(self, device) -> None:
        """Move the reference."""
        if self.reference is not None:
            self.reference.model.to(device)

    def prepare(self, step: int, batch: list[Question], counter) -> list[Attempt]:
        """K rollouts per prompt with their advantages."""
        asked = [question for question in batch for _ in range(self.group)]
        names = [f"{question.id}/{k}" for question in batch for k in range(self.group)]
        prompts = [question.teacher_prompt for question in asked]
        rollouts = self.sample(prompts, names, step, counter, detail=bool(self.options["spike"]))
        correct = self.judge([question.example for question in asked], rollouts, step)
        rewards = [float(right) for right in correct]
        if self.options["spike"]:
            gaps = self._gaps(asked, rollouts, counter)
            rewards = [r - self.options["spike"] * gap if r else 0.0 for r, gap in zip(rewards, gaps, strict=True)]
        found = []
        for start in range(0, len(rewards), self.group):
            found += advantages(rewards[start : start + self.group], self.options["scale_advantages"])
        signal = sum(any(found[i : i + self.group]) for i in range(0, len(found), self.group))
        self._rewards = {"reward": sum(rewards), "groups": len(batch), "signal": signal}
        return [
            Attempt(question.id, Item(question.id, prompt, rollout.tokens, rollout.tokens), advantage)
            for question, prompt, rollout, advantage in zip(asked, prompts, rollouts, found, strict=True)
        ]

    def _gaps(self, asked: list[Question], rollouts: list, counter) -> list[float]:
        """Spike penalty of every rollout, against the deployed model without help."""
        device = next(self.reference.model.parameters()).device
        items = [Item(q.id, q.prompt, r.tokens, r.tokens) for q, r in zip(asked, rollouts, strict=True)]
        logits = teacher_logits(self.job, self.reference.model, items, self.pad_id, counter, device)
        tokens = torch.tensor([token for rollout in rollouts for token in rollout.tokens], device=device)
        plain = log_probabilities(logits / self.options["temperature"], tokens).tolist()
        gaps, start = [], 0
        for rollout in rollouts:
            end = start + len(rollout.tokens)
            gaps.append(spike_penalty(rollout.logprobs, plain[start:end], self.options["spike_tolerance"]))
            start = end
        return gaps

    def targets(self, attempt: Attempt) -> int:
        """All rollout tokens, those of groups without a signal too."""
        return len(attempt.item.labels)

    def loss(self, model, attempts: list[Attempt], counter) -> torch.Tensor:
        """Sum of -A log pi (and of the weighted divergence); what has no advantage is not computed."""
        device = next(model.parameters()).device
        if not self.options["kl"]:
            attempts = [attempt for attempt in attempts if attempt.advantage]
        if not attempts:
            return torch.zeros((), device=device, requires_grad=True)
        items = [attempt.item for attempt in attempts]
        with self.job.phase("student"):
            ids, predicts, tokens = collate(items, self.pad_id, device)
            logits = completion_logits(model, ids, predicts)
            weights = [attempt.advantage for attempt in attempts for _ in attempt.item.labels]
            own = log_probabilities(logits / self.options["temperature"], tokens)
            loss = -(torch.tensor(weights, device=device) * own).sum()
        length = sum(item.length for item in items)
        counter.add(tokens_forwarded=length, tokens_backpropagated=length)
        if self.options["kl"]:
            reference = teacher_logits(self.job, self.reference.model, items, self.pad_id, counter, device)
            loss = loss + self.options["kl"] * divergence("reverse_kl", reference, logits).sum()
        return loss

    def report(self, total) -> dict:
        """What the rollouts were like, the mean reward, and the share of prompts whose rollouts differ in reward."""
        sums = total(self._rewards)
        rolled = self.rolled(total)
        n, groups = max(sums["groups"] * self.group, 1), max(sums["groups"], 1)
        return rolled | {"reward": sums["reward"] / n, "signal": sums["signal"] / groups}
