"""Supervised fine-tuning: -log pi_theta(y*_t), mean over the completion tokens of the batch."""

from __future__ import annotations

import torch.nn.functional as F

from grafting.models.chat import encode_example
from grafting.models.forward import completion_logits
from grafting.rollouts import check_room
from grafting.tasks.examples import demonstration
from grafting.training.batches import Item, collate
from grafting.training.objectives.base import Setup


class CrossEntropy:
    """Cross-entropy of given completions; batches hold `Item`s already (pretraining, post-training)."""

    def __init__(self, job, pad_id: int) -> None:
        self.job, self.pad_id = job, pad_id

    def place(self, device) -> None:
        """No model of its own to move."""

    def prepare(self, step: int, batch: list[Item], counter) -> list[Item]:
        """Items as they are."""
        return batch

    def targets(self, item: Item) -> int:
        """Completion tokens, EOS among them."""
        return len(item.labels)

    def loss(self, model, items: list[Item], counter):
        """Sum of -log pi(label) over the completion tokens."""
        with self.job.phase("student"):
            device = next(model.parameters()).device
            ids, predicts, labels = collate(items, self.pad_id, device)
            logits = completion_logits(model, ids, predicts).float()
            loss = F.cross_entropy(logits, labels, reduction="sum")
        tokens = sum(item.length for item in items)
        counter.add(tokens_forwarded=tokens, tokens_backpropagated=tokens)
        return loss

    def after_step(self, model) -> None:
        """Nothing to keep up."""

    def report(self, total) -> dict:
        """Nothing beyond the loss."""
        return {}

    def state(self) -> tuple[dict, dict]:
        """Nothing that changes."""
        return {}, {}

    def restore(self, tensors: dict, facts: dict) -> None:
        """Nothing to bring back."""


class Supervised(CrossEntropy):
    """Cross-entropy of the demonstrations in one style. UserError naming the example that does not fit."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.job, setup.tokenizer.pad_token_id or 0)
        style = setup.job.spec["style"]
        self.examples = []
        for example in setup.train:
            response = demonstration(example, style)
            prompt, completion = encode_example(setup.tokenizer, example["messages"], response, example["id"])
            name = f"example {example['id']} of {setup.info['name']}"
            check_room(setup.model, len(prompt), len(completion), name)
            self.examples.append(Item(example["id"], prompt, completion, completion))
