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
    """Endless batches of distinct examples, drawn afresh for every step; a smaller set is drawn whole."""
    rng = random.Random(seed)
    while True:
        yield rng.sample(examples, min(batch_size, len(examples)))
