"""Batched generation with a key-value cache on live weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from transformers.cache_utils import DynamicCache

from grafting.errors import UserError
from grafting.models import lean
from grafting.rollouts.sampling import choose, details, uniforms

# Finished rows are removed from the batch once they are this share of it: each removal copies the cache.
DROP_SHARE = 0.25


@dataclass(frozen=True)
class Rollout:
    """A sampled response: token ids, with the stop token if one was reached, and why it ended.

    On request per token: its log-probability under the sampler (at its temperature), and the margin by which it was
    chosen, in probability (see `sampling.details`).
    """

    tokens: list[int]
    finish: str  # "stop" | "length"
    logprobs: list[float] | None = None
    margins: list[float] | None = None


BACKENDS = ("native", "continuous")


def check_room(model, prompt_length: int, response_length: int, what: str) -> None:
    """UserError if prompt and response do not fit the model's context; `what` names the example."""
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and prompt_length + response_length > context:
        raise UserError(
            f"{what}: prompt of {prompt_length} tokens and room for {response_length} response tokens "
            f"exceed the model's context of {context}; lower max_new_tokens, or leave the example out of "
            f"the data (nothing is cut silently)"
        )


@torch.no_grad()
def generate(
    model,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    stop_ids: set[int],
    pad_id: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seeds: list[int] | None = None,
    batch_size: int,
    counter=None,
    progress: Callable[[int], object] | None = None,
    finished=None,
    detail: bool = False,
    backend: str = "native",
    kept: list | None = None,
) -> list[Rollout]:
    """One response per prompt, in the order of the prompts.

    Greedy at temperature 0, else sampled with one seed per prompt (see `sampling`). Prompts are batched by
    length and padded on the left; padding does not change logits beyond rounding. `counter.add(
    tokens_generated=, tokens_forwarded=)` receives what was computed, padding and finished rows not counted;
    `progress(n)` is told when n more prompts are answered. `finished` (a `grafting.provenance.saving.Part`)
    holds what an interrupted run has answered and takes what is answered here, batch by batch (continuous: prompt by
    prompt); on a stop signal it ends the job after one. `detail`: with log-probabilities and margins. backend:
    "native" (this module) or "continuous" (see `continuous`); both choose the same tokens, but where two tokens are
    nearly tied rounding decides. `kept` receives the pass over the prompts with its gradient (a
    `grafting.models.lean.Prompts`), if all of them make one batch and `lean` computes the model.
    UserError: empty prompt, prompt and response longer than the context, unknown backend.
    """
    if backend not in BACKENDS:
        raise UserError(f"backend: {backend!r} is not known; choose one of {', '.join(BACKENDS)}")
    if temperature != 0 and (seeds is None or len(seeds) != len(prompts)):
        raise ValueError("sampling needs one seed per prompt")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {i} is empty; check the chat template and the example's messages")
        check_room(model, len(prompt), max_new_tokens, f"prompt {i}")
    if backend == "continuous":
        if top_p != 1:
            raise UserError(f"top_p: {top_p} needs the native backend; the continuous one samples from all tokens")
        return _continuous(
            model,
            prompts,
            max_new_tokens,
            stop_ids,
            pad_id,
            temperature,
            seeds,
            batch_size,
            counter,
            progress,
            finished,
            detail,
        )
    keeps = kept is not None and len(prompts) <= batch_size and lean.applies(model)
    order = list(range(len(prompts))) if keeps else sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    rollouts: list[Rollout | None] = [None] * len(prompts)
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            results = None if finished is None else _recall(finished.get(str(start)))
            known = results is not None
            if not known:
                numbers = uniforms([seeds[i] for i in chosen], max_new_tokens) if temperature != 0 else None
                batch = [prompts[i] for i in chosen]
                results = _decode(
                    model,
                    batch,
                    max_new_tokens,
                    stop_ids,
                    pad_id,
                    temperature,
                    numbers,
                    top_p,
                    detail,
                    kept if keeps else None,
                )
            for i, rollout in zip(chosen, results, strict=True):
                rollouts[i] = rollout
                if counter is not None:
                    # the last token is given out, but not fed in again
                    fed = len(prompts[i]) + len(rollout.tokens) - 1
                    counter.add(tokens_generated=len(rollout.tokens), tokens_forwarded=fed)
            if progress is not None:
                progress(len(chosen))
            if finished is not None and not known:
                answers = [asdict(rollout) for rollout in results]
                finished.add(str(start), answers, f"answer {start + len(chosen)} of {len(order)}")
    finally:
        model.train(was_training)
    return rollouts


def _continuous(
    model,
    prompts,
    max_new_tokens,
    stop_ids,
    pad_id,
    temperature,
    seeds,
    batch_size,
    counter,
    progress,
    finished,
    detail,
) -> list[Rollout]:
    """`generate` by the other backend: what an interrupted run has answered is kept prompt by prompt."""
    from grafting.rollouts.continuous import decode

    rollouts: list[Rollout | None] = [None] * len(prompts)
    for i in range(len(prompts) if finished is not None else 0):
        known = _recall(finished.get(str(i)))
        rollouts[i] = None if known is None else known[0]
    rest = [i for i, rollout in enumerate(rollouts) if rollout is None]
    done = len(prompts) - len(rest)
    if progress is not None and done:
        progress(done)

    def answered(row: int, rollout: Rollout) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(1)
        if finished is not None:
            finished.add(str(rest[row]), [asdict(rollout)], f"answer {done} of {len(prompts)}")

    if rest:
        chosen = None if seeds is None else [seeds[i] for i in rest]
        asked = [prompts[i] for i in rest]
        found = decode(
            model, asked, max_new_tokens, stop_ids, pad_id, temperature, chosen, batch_size, detail, answered
        )
        for i, rollout in zip(rest, found, strict=True):
            rollouts[i] = rollout
    if counter is not None:
        for prompt, rollout in zip(prompts, rollouts, strict=True):
            fed = len(prompt) + len(rollout.tokens) - 1  # the last token is given out, but not fed in again
            counter.add(tokens_generated=len(rollout.tokens), tokens_forwarded=fed)
    return rollouts


class _Decoder:
    """One step of any model after the other, with transformers' cache; see `grafting.models.lean.Decoder`."""

    def __init__(self, model, width: int) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Logits [B, V] after the last of the new tokens [B, T]."""
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows of the batch."""
        self.cache.batch_select_indices(rows)


def _recall(answers: list | None) -> list[Rollout] | None:
    return None if answers is None else [Rollout(**answer) for answer in answers]


def _decode(
    model, prompts, max_new_tokens, stop_ids, pad_id, temperature, numbers, top_p=1.0, detail=False, kept=None
) -> list[Rollout]:
    """Decode one batch; `numbers` [n, max_new_tokens] are the uniforms, None for greedy. kept: see `generate`."""
    device = next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + p for p in prompts], device=device)
    padded = any(len(p) < width for p in prompts)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    numbers = None if numbers is None else numbers.to(device)
    decoder = (lean.Decoder if lean.applies(model) else _Decoder)(model, width + max_new_tokens)
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    margins: list[list[float]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    rows = list(range(len(prompts)))  # the prompt that each row of the batch belongs to
    for step in range(max_new_tokens):
        # without padding no mask is needed, and attention takes its fast path
        if step == 0 and kept is not None:
            logits, passed = decoder.prompts(ids, positions, mask if padded else None)
            kept.append(passed)
        else:
            logits = decoder.logits(ids, positions, mask if padded else None)
        number = None if numbers is None else numbers[:, step]
        chosen = choose(logits, temperature, number, top_p)
        if detail:
            noted = zip(
                rows, *(values.tolist() for values in details(logits, temperature, number, chosen)), strict=True
            )
            for row, logprob, margin in noted:
                if not finished[row]:
                    logprobs[row].append(logprob)
                    margins[row].append(margin)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if not finished[row]:
                tokens[row].append(token)
                finished[row] = token in stop_ids
        keep = [k for k, row in enumerate(rows) if not finished[row]]
        if not keep or step + 1 == max_new_tokens:
            break
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        if len(rows) - len(keep) >= DROP_SHARE * len(rows):
            index = torch.tensor(keep, device=device)
            decoder.select(index)
            ids, positions, mask = ids[index], positions[index], mask[index]
            numbers = None if numbers is None else numbers[index]
            rows = [rows[k] for k in keep]
    return [
        Rollout(t, "stop" if f else "length", *((p, m) if detail else (None, None)))
        for t, f, p, m in zip(tokens, finished, logprobs, margins, strict=True)
    ]
