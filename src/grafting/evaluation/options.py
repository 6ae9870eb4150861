"""Log-likelihoods of answer options, computed once per context.

The harness scores every (context, option) pair as a sequence of its own, with the output head over all positions.
Here options of one context are packed behind it (each sees the context and itself only), what many contexts
begin with is computed once and kept as keys and values, and the head runs at the positions that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import DynamicCache

from grafting.models import lean
from grafting.models.forward import check_head

# A shared beginning shorter than this is not worth a cache of its own.
SHARED_TOKENS = 16
# On a CPU so many tokens of padding cost about as much as reading the weights once more.
PADDING_TOKENS = 32


@dataclass
class Packed:
    """One context with its options behind it.

    ids, positions: the packed sequence and its positions; owner: which option a token belongs to, -1 for the context;
    wanted: per option the places whose logits predict its tokens; options: the tokens themselves.
    """

    ids: list[int]
    positions: list[int]
    owner: list[int]
    wanted: list[list[int]]
    options: list[list[int]]


def pack(context: Sequence[int], options: Sequence[Sequence[int]]) -> Packed:
    """The context, then every option without its last token (nothing is predicted from that one)."""
    packed = Packed(list(context), list(range(len(context))), [-1] * len(context), [], [list(o) for o in options])
    for number, option in enumerate(options):
        start = len(packed.ids)
        inner = list(option[:-1])
        packed.ids += inner
        packed.positions += range(len(context), len(context) + len(inner))
        packed.owner += [number] * len(inner)
        packed.wanted.append([len(context) - 1, *range(start, start + len(inner))])
    return packed


def pack_apart(context: Sequence[int], options: Sequence[Sequence[int]]) -> Packed:
    """A sequence without branches: options that differ in their last token only (the context ends before them)."""
    ids = [*context, *options[0][:-1]]
    wanted = [list(range(len(context) - 1, len(ids))) for _ in options]
    return Packed(ids, list(range(len(ids))), [-1] * len(ids), wanted, [list(option) for option in options])


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))


def groups(contexts: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """(length of the shared beginning, indices) of contexts that begin alike.

    In the order of their tokens, a group ends where the shared beginning would become less than half of what it was.
    At least one token of every context stays outside: its logits are needed.
    """
    order = sorted(range(len(contexts)), key=lambda i: list(contexts[i]))
    found: list[tuple[int, list[int]]] = []
    for i in order:
        if found:
            shared, members = found[-1]
            now = common(contexts[members[0]], contexts[i])
            now = min(now, len(contexts[i]) - 1, shared if len(members) > 1 else now)
            if now >= SHARED_TOKENS and (len(members) == 1 or 2 * now >= shared):
                found[-1] = (min(now, len(contexts[members[0]]) - 1), [*members, i])
                continue
        found.append((len(contexts[i]) - 1, [i]))
    return [(shared if len(members) > 1 else 0, members) for shared, members in found]


@torch.inference_mode()
def option_loglikelihoods(
    model, requests: Sequence[tuple[Sequence[int], Sequence[int]]], batch_size: int, pad_id: int, progress=None
) -> list[tuple[float, bool]]:
    """(sum of log-probabilities, whether it is the greedy continuation) of every (context, continuation), in order.

    Logits in float32. Equal to one forward pass per pair within rounding. `progress(n)` is told of n more pairs.
    """
    check_head(model)
    apart, on_cpu = not attends_fully(model), next(model.parameters()).device.type == "cpu"
    by_context: dict[tuple[int, ...], list[int]] = {}
    for number, (context, option) in enumerate(requests):
        inner = tuple(option[:-1]) if apart else ()
        by_context.setdefault((*context, *inner), []).append(number)
    contexts = list(by_context)
    results: list[tuple[float, bool] | None] = [None] * len(requests)
    for shared, members in [(0, list(range(len(contexts))))] if apart else groups(contexts):
        # neighbours have like lengths, so that little is padding
        members = sorted(members, key=lambda i: len(contexts[i]))
        prefix = _prefix(model, contexts[members[0]][:shared]) if shared else None
        for batch in batches([len(contexts[i]) for i in members], batch_size, on_cpu):
            chosen = [by_context[contexts[members[place]]] for place in batch]
            make = pack_apart if apart else pack
            packs = [make(requests[numbers[0]][0], [requests[n][1] for n in numbers]) for numbers in chosen]
            for numbers, scored in zip(chosen, _score(model, packs, shared, prefix, pad_id), strict=True):
                for number, result in zip(numbers, scored, strict=True):
                    results[number] = result
            if progress is not None:
                progress(sum(map(len, chosen)))
    return results


def batches(lengths: Sequence[int], batch_size: int, thrifty: bool) -> list[range]:
    """Places of ascending lengths, cut into batches; if `thrifty`, also where padding would cost more than a pass."""
    found, start = [], 0
    for place in range(1, len(lengths) + 1):
        full = place == len(lengths) or place - start == batch_size
        if not full and thrifty:
            full = sum(lengths[place] - length for length in lengths[start:place]) > PADDING_TOKENS
        if full:
            found.append(range(start, place))
            start = place
    return found


def attends_fully(model) -> bool:
    """Whether every layer sees all earlier tokens; a mask of our own would widen a sliding window."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return all(kind == "full_attention" for kind in kinds)
    return not getattr(config, "sliding_window", None) or getattr(config, "use_sliding_window", True) is False


def _prefix(model, ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of the shared beginning, per layer [1, heads, length, width]."""
    if lean.applies(model):
        return lean.beginning(model, list(ids))
    device = next(model.parameters()).device
    cache = DynamicCache(config=model.config)
    model.base_model(input_ids=torch.tensor([list(ids)], device=device), cache=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


def _score(model, packs: Sequence[Packed], shared: int, prefix, pad_id: int) -> list[list[tuple[float, bool]]]:
    rests = [len(p.ids) - shared for p in packs]
    width = max(rests)
    ids = torch.full((len(packs), width), pad_id, dtype=torch.long)
    positions = torch.zeros((len(packs), width), dtype=torch.long)
    for row, p in enumerate(packs):
        ids[row, : rests[row]] = torch.tensor(p.ids[shared:])
        positions[row, : rests[row]] = torch.tensor(p.positions[shared:])
    rows, places = [], []
    for row, p in enumerate(packs):
        for place in sorted({w for wanted in p.wanted for w in wanted}):
            rows.append(row)
            places.append(place - shared)
    branched = any(owner > -1 for p in packs for owner in p.owner)
    mask = torch.stack([_visible(p, shared, width) for p in packs])[:, None] if prefix is not None or branched else None
    head = model.get_output_embeddings()
    if lean.applies(model):
        flat = torch.tensor(rows) * width + torch.tensor(places)
        states = lean.branched_states(model, ids, positions, mask, flat, prefix)
    else:
        states = _states(model, ids, positions, mask, prefix)[rows, places]
    logits = head(states.to(head.weight.dtype)).float()
    total = torch.logsumexp(logits, -1)
    best = logits.argmax(-1)
    at = {(row, place + shared): i for i, (row, place) in enumerate(zip(rows, places, strict=True))}
    results = []
    for row, p in enumerate(packs):
        scored = []
        for option, wanted in zip(p.options, p.wanted, strict=True):
            lines = [at[row, place] for place in wanted]
            tokens = torch.tensor(option, device=logits.device)
            value = float((logits[lines, tokens] - total[lines]).sum())
            scored.append((value, bool((best[lines] == tokens).all())))
        results.append(scored)
    return results


def _states(model, ids, positions, mask, prefix) -> torch.Tensor:
    """Hidden states [B, T, d] by the model's own forward pass; see `lean.branched_states`."""
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    call = {"input_ids": ids.to(device), "position_ids": positions.to(device), "use_cache": prefix is not None}
    if mask is not None:
        blocked = torch.finfo(dtype).min
        call["attention_mask"] = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, blocked).to(device)
    if prefix is not None:
        call["cache"] = cache = DynamicCache(config=model.config)
        for number, (keys, values) in enumerate(prefix):
            size = (len(ids), -1, -1, -1)
            cache.update(keys.expand(size), values.expand(size), number)
    return model.base_model(**call).last_hidden_state


def _visible(p: Packed, shared: int, width: int) -> torch.Tensor:
    """[width, shared + width] bool: which token (from `shared` on) sees which; padding sees itself only."""
    length = len(p.ids)
    owner = torch.tensor(p.owner)
    rows = torch.arange(shared, length)
    columns = torch.arange(length)
    seen = (columns[None] <= rows[:, None]) & ((owner[None] == -1) | (owner[None] == owner[rows][:, None]))
    mask = torch.zeros((width, shared + width), dtype=torch.bool)
    mask[: length - shared, :length] = seen
    spare = torch.arange(length - shared, width)
    mask[spare, spare + shared] = True
    return mask
