"""Training items, batches of them, and the tensors a model sees."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Item:
    """A prompt with its completion. `inputs` are what the model is fed, `labels` what it is to predict; they
    have equal length and differ only where inputs were corrupted on purpose. Prompt tokens carry no loss;
    the completion's last token, EOS, does."""

    id: str
    prompt: list[int]
    inputs: list[int]
    labels: list[int]

    @property
    def length(self) -> int:
        """Tokens fed to the model: the last completion token is predicted, but predicts nothing."""
        return len(self.prompt) + len(self.inputs) - 1


def collate(items: list[Item], pad_id: int, device=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded input ids [B, T], mask [B, T] of the positions that predict a label, labels [n].

    n is the number of completion tokens; labels come row by row, as boolean indexing by the mask yields
    positions. Padding comes last and attention is causal, so no attention mask is needed.
    """
    width = max(item.length for item in items)
    ids, predicts, labels = [], [], []
    for item in items:
        blank = width - item.length
        ids.append(item.prompt + item.inputs[:-1] + [pad_id] * blank)
        predicts.append([False] * (len(item.prompt) - 1) + [True] * len(item.labels) + [False] * blank)
        labels += item.labels
    return (
        torch.tensor(ids, device=device),
        torch.tensor(predicts, device=device),
        torch.tensor(labels, device=device),
    )


def draw(examples: list, batch_size: int, seed: int) -> Iterator[list]:
    """Endless batches of distinct examples, in epochs: of the examples in the order of the stream, every
    len(examples) in a row are all of them.

    An epoch is a seeded shuffle. What is left of it when less than a batch remains opens the next epoch's
    first batch, which is filled up with other examples, the first of the new shuffle. A set no larger than
    the batch is given whole at every step, in its own order.
    """
    while len(examples) <= batch_size:
        yield list(examples)
    rng, order = random.Random(seed), []
    while True:
        shuffled = rng.sample(range(len(examples)), len(examples))
        left = set(order)
        filling = [i for i in shuffled if i not in left][: batch_size - len(order)]
        taken = set(filling)
        order += filling + [i for i in shuffled if i not in taken]
        while len(order) >= batch_size:
            yield [examples[i] for i in order[:batch_size]]
            del order[:batch_size]
