"""Supervised fine-tuning: -log pi_theta(y*_t), mean over the completion tokens of the batch."""

from __future__ import annotations

import torch.nn.functional as F

from grafting.models.chat import encode_example
from grafting.models.forward import completion_logits
from grafting.rollouts import check_room
from grafting.tasks.examples import demonstration
from grafting.training.batches import Item, collate
from grafting.training.objectives.base import Objective, Setup


class CrossEntropy(Objective):
    """Cross-entropy of given completions; batches hold `Item`s already (pretraining, post-training)."""

    def __init__(self, job, pad_id: int) -> None:
        self.job, self.pad_id = job, pad_id

    def loss(self, model, items: list[Item], counter):
        """Sum of -log pi(label) over the completion tokens, EOS among them."""
        with self.job.phase("student"):
            device = next(model.parameters()).device
            ids, predicts, labels = collate(items, self.pad_id, device)
            logits = completion_logits(model, ids, predicts).float()
            loss = self.combine(logits, labels)
        tokens = sum(item.length for item in items)
        counter.add(tokens_forwarded=tokens, tokens_backpropagated=tokens)
        return loss

    def combine(self, logits, labels):
        """Sum of the tokens' losses, from logits [n, V] and labels [n]."""
        return F.cross_entropy(logits, labels, reduction="sum")

    def state(self) -> tuple[dict, dict]:
        """Nothing that changes."""
        return {}, {}

    def restore(self, tensors: dict, facts: dict) -> None:
        """Nothing to bring back."""


class Supervised(CrossEntropy):
    """Cross-entropy of the demonstrations in one style. UserError naming the example that does not fit."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.job, setup.pad_id)
        self.setup = setup
        self.examples = supervised_items(setup, setup.train, setup.job.spec["style"])


def supervised_items(setup: Setup, examples: list[dict], style: str) -> list[Item]:
    """Prompts with their demonstrations; UserError naming the example that does not fit the context."""
    items = []
    for example in examples:
        response = demonstration(example, style)
        prompt, completion = encode_example(setup.tokenizer, example["messages"], response, example["id"])
        name = f"example {example['id']} of {setup.info['name']}"
        check_room(setup.model, len(prompt), len(completion), name)
        items.append(Item(example["id"], prompt, completion, completion))
    return items
