"""The log-likelihood whose gradients the Fisher estimates are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grafting.errors import UserError
from grafting.models.chat import encode_example
from grafting.models.forward import completion_logits
from grafting.rollouts.sampling import choose, example_seed, uniforms

FISHERS = ("true", "empirical")


@dataclass(frozen=True)
class Sequence:
    """One retention example as token ids: a prompt of P >= 1 tokens, a completion of C >= 1 tokens."""

    id: str
    prompt: list[int]
    completion: list[int]

    @property
    def inputs(self) -> list[int]:
        """The P + C - 1 tokens the model reads; nothing is predicted from the last completion token."""
        return self.prompt + self.completion[:-1]


def encode(tokenizer, examples: list[dict], style: str) -> list[Sequence]:
    """Encode retention examples in their own order, with the response in the given style.

    Raises UserError when there is no example, or one lacks the style, a prompt or a completion.
    """
    if not examples:
        raise UserError(
            "the prior suite's retention.jsonl is empty: a Fisher estimate needs examples; "
            "set prior.retention_items to at least 1"
        )
    sequences = []
    for example in examples:
        if style not in example["demonstrations"]:
            raise UserError(
                f"retention example {example['id']} has no response in style '{style}' "
                f"(it has {sorted(example['demonstrations'])}): rebuild the data stage"
            )
        prompt, completion = encode_example(
            tokenizer, example["messages"], example["demonstrations"][style], example["id"]
        )
        if not prompt or not completion:
            raise UserError(
                f"retention example {example['id']} has an empty prompt or completion: "
                "every completion token must follow some token"
            )
        sequences.append(Sequence(example["id"], list(prompt), list(completion)))
    return sequences


def pad(sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded inputs, which of them are tokens, which predict a completion token; each [B, T].

    Attention is causal, so padding on the right reaches no real token.
    """
    length = max(len(s.inputs) for s in sequences)
    ids = torch.zeros(len(sequences), length, dtype=torch.long)
    real = torch.zeros(len(sequences), length, dtype=torch.bool)
    predicts = torch.zeros_like(real)
    for row, s in enumerate(sequences):
        end = len(s.inputs)
        ids[row, :end] = torch.tensor(s.inputs)
        real[row, :end] = True
        predicts[row, len(s.prompt) - 1 : end] = True
    return ids, real, predicts


def sample_labels(logits: Tensor, sequences: list[Sequence], seed: int) -> Tensor:
    """One label per completion position, drawn from softmax(logits [n, V]); int64 [n].

    One uniform per (seed, example id, position), as rollouts are sampled: the labels depend neither on the
    batch nor on the order of the examples.
    """
    numbers = [uniforms([example_seed(seed, 0, s.id)], len(s.completion))[0] for s in sequences]
    return choose(logits.detach(), 1.0, torch.cat(numbers).to(logits.device))


def negative_log_likelihood(
    model, sequences: list[Sequence], fisher: str, seed: int, batch: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """-sum over sequences and completion positions t of log pi(label_t | x, y*_<t), a scalar.

    `fisher="empirical"`: label_t = y*_t, the data's. `fisher="true"`: label_t ~ pi(. | x, y*_<t), drawn
    independently at every position behind the data's own prefix; then E[g g^T] of the summed gradient is
    the exact Fisher information sum_t sum_v pi(v) (d log pi(v))(d log pi(v))^T of those conditionals,
    since every term has mean zero.
    """
    ids, _, predicts = batch or pad(sequences)
    logits = completion_logits(model, ids.to(model.device), predicts.to(model.device)).float()
    if fisher == "true":
        labels = sample_labels(logits, sequences, seed)
    else:
        labels = torch.tensor([token for s in sequences for token in s.completion], device=logits.device)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
