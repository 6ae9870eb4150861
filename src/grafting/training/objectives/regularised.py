"""Supervised fine-tuning that is held back: controls for forgetting.

sft_kl   -log pi(y*_t) + coefficient * KL(pi_0(. | x, y*_<t) || pi_theta(. | x, y*_<t)), over the whole vocabulary
sft_l2   -log pi(y*_t) + coefficient * ||theta - theta_0||^2
replay   -log pi(y_t), with a share of every batch made of pi_0's own responses to the prior suite's retention prompts

pi_0 is the deployed model: the `teacher` input of the job, or the model as it starts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from grafting.errors import UserError
from grafting.models.chat import stop_ids
from grafting.models.forward import completion_logits
from grafting.rollouts import check_room, example_seed, generate
from grafting.rollouts.scoring import prompt_ids
from grafting.tasks import load_info
from grafting.training.batches import Item, collate, draw
from grafting.training.divergences import divergence
from grafting.training.objectives.base import Setup, retention
from grafting.training.objectives.supervised import Supervised
from grafting.training.teacher import Teacher


class SftKl(Supervised):
    """Held back in what it says. options: coefficient."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.coefficient = setup.options["coefficient"]
        self.reference = Teacher("frozen", setup.model, start=setup.teacher_model)

    def place(self, device) -> None:
        """Move the reference."""
        self.reference.model.to(device)

    def loss(self, model, items: list[Item], counter):
        """Cross-entropy plus the weighted divergence from the reference, summed over the completion tokens."""
        device = next(model.parameters()).device
        ids, predicts, labels = collate(items, self.pad_id, device)
        with self.job.phase("student"):
            logits = completion_logits(model, ids, predicts).float()
            loss = self.combine(logits, labels)
        with self.job.phase("teacher"), torch.no_grad():
            reference = completion_logits(self.reference.model, ids, predicts)
        with self.job.phase("divergence"):
            loss = loss + self.coefficient * divergence("forward_kl", reference, logits).sum()
        tokens = sum(item.length for item in items)
        counter.add(tokens_forwarded=2 * tokens, tokens_backpropagated=tokens)
        return loss


class SftL2(Supervised):
    """Held back in where it goes. options: coefficient."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.coefficient = setup.options["coefficient"]
        start = setup.model if setup.teacher_model is None else setup.teacher_model
        origin = {name: p.detach().clone() for name, p in start.named_parameters()}
        names = [name for name, p in setup.model.named_parameters() if p.requires_grad]
        if missing := [name for name in names if name not in origin]:
            raise UserError(f"{setup.job.id}: sft_l2 needs the start of {missing[0]}; train without lora")
        self.origin = [origin[name] for name in names]

    def place(self, device) -> None:
        """Move the start."""
        self.origin = [origin.to(device) for origin in self.origin]

    def loss(self, model, items: list[Item], counter):
        """Cross-entropy, plus the penalty times the number of tokens: the loop divides by all tokens of the batch,
        so over its micro-batches and processes the penalty is counted once."""
        loss = super().loss(model, items, counter)
        with self.job.phase("penalty"):
            parameters = [p for p in model.parameters() if p.requires_grad]
            squares = [(p - origin).square().sum() for p, origin in zip(parameters, self.origin, strict=True)]
            penalty = torch.stack(squares).sum()
        return loss + self.coefficient * sum(map(self.targets, items)) * penalty


@dataclass(frozen=True)
class Prompt:
    """A general prompt whose answer is still to be given by the reference."""

    id: str
    prompt: list[int]


class Replay(Supervised):
    """Mixed with the deployed model's own words. options: share (of a batch), temperature, max_new_tokens.

    The responses are sampled once, before the first step, one per retention prompt; they are counted as generated.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        options, model = setup.options, setup.model
        self.share, self.room, self.temperature = (
            options["share"],
            options["max_new_tokens"],
            options["temperature"],
        )
        self.reference = setup.teacher_model if setup.teacher_model is not None else model
        info = load_info(setup.prior) if setup.prior is not None else {}
        self.prompts = [
            Prompt(example["id"], prompt_ids(setup.tokenizer, info, example, None)) for example in retention(setup)
        ]
        for prompt in self.prompts:
            check_room(model, len(prompt.prompt), self.room, f"retention example {prompt.id}")
        self.replies: dict[str, list[int]] = {}

    def place(self, device) -> None:
        """Move the reference."""
        self.reference.to(device)

    def batches(self, batch_size: int, seed: int) -> Iterator[list]:
        """Every batch has round(share * batch_size) prompts to replay, at least one, and demonstrations."""
        old = min(max(1, round(self.share * batch_size)), batch_size - 1)
        if batch_size < 2:
            raise UserError(f"{self.job.id}: replay needs a batch_size of at least 2")
        mixed = zip(
            draw(self.examples, batch_size - old, seed),
            draw(self.prompts, old, random.Random(f"replay/{seed}").getrandbits(32)),
            strict=True,
        )
        for new, general in mixed:
            yield [*new, *general]

    def prepare(self, step: int, batch: list, counter) -> list[Item]:
        """Prompts become items with the reference's response; all of them are answered at the first step."""
        if not self.replies:
            with self.job.phase("rollout"):
                rollouts = generate(
                    self.reference,
                    [prompt.prompt for prompt in self.prompts],
                    max_new_tokens=self.room,
                    stop_ids=stop_ids(self.reference, self.setup.tokenizer),
                    pad_id=self.pad_id,
                    temperature=self.temperature,
                    seeds=[example_seed(self.job.spec["seed"], 0, prompt.id) for prompt in self.prompts],
                    batch_size=64,
                    counter=counter,
                )
            self.replies = {p.id: r.tokens for p, r in zip(self.prompts, rollouts, strict=True)}
        return [item if isinstance(item, Item) else self._replayed(item) for item in batch]

    def _replayed(self, prompt: Prompt) -> Item:
        reply = self.replies[prompt.id]
        return Item(prompt.id, prompt.prompt, reply, reply)

    def state(self) -> tuple[dict, dict]:
        """The responses: the model that gave them may have moved since."""
        return {}, {"replies": self.replies}

    def restore(self, tensors: dict, facts: dict) -> None:
        """Take up the responses."""
        self.replies = facts["replies"]
