"""The forward and backward pass of Llama-like models on the CPU, with less memory traffic.

transformers' modules make a tensor per arithmetic operation and keep most of them for the backward pass. Here each
half of a layer is one function with a gradient of its own, which keeps its input, the attention's queries, keys and
values and the two projections of the feed-forward part, and computes the rest again. The last layer's feed-forward
part runs only where logits are wanted; the key-value cache of decoding is allocated once. What is computed is the
same; the low bits differ, so that models of up to `SMALL` tokens (those made inside the pipeline, whose published
numbers are compared by their bytes) stay on transformers' path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, scaled_dot_product_attention, silu

SMALL = 4096  # vocabulary up to which transformers' own path is taken


def applies(model) -> bool:
    """Whether this module computes what the model does: a plain Llama in float32 on the CPU, nobody listening.

    Not for adapters beside its layers, forward hooks, shards, checkpointing, autocast or dropout in training.
    """
    config = model.config
    if config.model_type != "llama" or config.vocab_size <= SMALL or hasattr(model, "sharded_logits"):
        return False
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    if config.hidden_act != "silu" or config.attention_bias or config.mlp_bias or config.attention_dropout:
        return False
    if "sdpa" not in config._attn_implementation:
        return False
    if any(getattr(m, "gradient_checkpointing", False) for m in (model.model, *model.model.layers)):
        return False
    head = model.get_output_embeddings()
    return not any(
        m._forward_hooks
        or m._forward_pre_hooks
        or m._backward_hooks
        or ("proj" in name and type(m) is not torch.nn.Linear)
        or (m is head and type(m) is not torch.nn.Linear)
        for name, m in model.named_modules()
    )


def hidden_states(model, input_ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Normed hidden states [n, d] at the n true positions of `wanted` [B, T], in row-major order; differentiable.

    input_ids [B, T], padded on the right.
    """
    rows = wanted.flatten().nonzero()[:, 0]
    positions = torch.arange(input_ids.shape[1])[None]
    return _layers(model.model, input_ids, positions, None, rows, lambda number, k, v: (k, v))


def beginning(model, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [1, H_kv, T, D] of the tokens per layer."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(number, k, v):
        found.append((k, v))
        return k, v

    _layers(model.model, torch.tensor([ids]), torch.arange(len(ids))[None], None, _last(torch.tensor([ids])), keep)
    return found


def branched_states(model, input_ids, positions, seen, rows, before) -> torch.Tensor:
    """Normed hidden states [n, d] at n rows of the flattened batch input_ids [B, T], at `positions` [B, T].

    before: what `beginning` gave of P tokens that stand before every row of the batch, or None. seen [B, 1, T, P + T]
    bool: which tokens see which; None: causal.
    """

    def behind(number, k, v):
        if before is None:
            return k, v
        earlier, values = (part.expand(k.shape[0], -1, -1, -1) for part in before[number])
        return torch.cat([earlier, k], 2), torch.cat([values, v], 2)

    return _layers(model.model, input_ids, positions, seen, rows, behind)


@dataclass(frozen=True)
class Prompts:
    """The pass over a batch of prompts, padded on the left, with its gradient: what their continuations need of it.

    keys, values: per layer [B, H_kv, T, D]. hidden [B, d]: normed, at the last token. lengths [B]. mask [B, T]: 1
    where a token is no padding; None if there is none.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    hidden: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor | None


def continued(model, prompts: Prompts, completions: list[list[int]]) -> torch.Tensor:
    """Normed hidden states [n, d] that predict the n tokens of the completions, row by row; differentiable.

    The same as `hidden_states` of prompts and completions together: the prompts are not computed a second time.
    """
    fed = [len(completion) - 1 for completion in completions]
    width, start = max(fed), prompts.keys[0].shape[2]
    if width == 0:
        return prompts.hidden
    ids = torch.tensor([c[:-1] + [0] * (width - n) for c, n in zip(completions, fed, strict=True)])
    positions = prompts.lengths[:, None] + torch.arange(width)
    seen = torch.ones(width, start + width, dtype=torch.bool).tril(start)[None, None]
    if prompts.mask is not None:
        seen = seen & torch.nn.functional.pad(prompts.mask.bool(), (0, width), value=True)[:, None, None, :]
    rows = torch.cat([torch.arange(n) + row * width for row, n in enumerate(fed)])

    def behind(number, k, v):
        return torch.cat([prompts.keys[number], k], 2), torch.cat([prompts.values[number], v], 2)

    later = _layers(model.model, ids, positions, seen, rows, behind)
    # row by row, the prompt's last state stands before those of its completion
    order, place = [], len(fed)
    for row, n in enumerate(fed):
        order += [row, *range(place, place + n)]
        place += n
    return torch.cat([prompts.hidden, later])[torch.tensor(order)]


class Decoder:
    """Decoding on the CPU: the cache [B, H_kv, width, D] per layer is allocated once.

    The batch is padded on the left, so that every row writes to the same place.
    """

    def __init__(self, model, width: int) -> None:
        """`width`: prompt and response tokens together."""
        self.model, self.width, self.length = model, width, 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Logits [B, V] after the last of the new tokens ids [B, T] at `positions` [B, T].

        mask [B, length so far + T]: 1 where a token is no padding; None if there is none.
        """
        seen = _seen(mask, ids.shape[1])
        start, self.length = self.length, self.length + ids.shape[1]

        def store(number, k, v):
            self._store(number, k, v, start)
            return self.keys[number][:, :, : self.length], self.values[number][:, :, : self.length]

        return self._head(_layers(self.model.model, ids, positions, seen, _last(ids), store))

    def prompts(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, Prompts]:
        """`logits` of the first pass, without gradient, and the pass itself with it."""
        keys, values = [], []

        def keep(number, k, v):
            keys.append(k)
            values.append(v)
            self._store(number, k.detach(), v.detach(), 0)
            return k, v

        with torch.enable_grad():
            hidden = _layers(self.model.model, ids, positions, _seen(mask, ids.shape[1]), _last(ids), keep)
        self.length = ids.shape[1]
        return self._head(hidden.detach()), Prompts(keys, values, hidden, positions[:, -1] + 1, mask)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.model.get_output_embeddings().weight)

    def _store(self, number: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        batch, heads, length, size = k.shape
        if number == len(self.keys):
            self.keys.append(k.new_empty(batch, heads, self.width, size))
            self.values.append(k.new_empty(batch, heads, self.width, size))
        self.keys[number][:, :, start : start + length] = k
        self.values[number][:, :, start : start + length] = v

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows of the batch."""
        self.keys, self.values = [k[rows] for k in self.keys], [v[rows] for v in self.values]


def _last(ids: torch.Tensor) -> torch.Tensor:
    """Rows of the flattened batch with the last token of each of its rows."""
    batch, length = ids.shape
    return torch.arange(1, batch + 1) * length - 1


def _seen(mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Which keys the last `length` tokens see [B, 1, length, S], from the mask [B, S] of what is no padding."""
    if mask is None:
        return None
    seen = mask[:, None, None, :].bool()
    if length == 1:
        return seen
    before = mask.shape[1] - length
    seen = seen & torch.ones(length, mask.shape[1], dtype=torch.bool).tril(before)
    # padding sees itself, since a softmax over nothing is not a number
    return seen | (torch.arange(length)[:, None] + before == torch.arange(mask.shape[1]))


def _layers(decoder, ids, positions, seen, rows, keep) -> torch.Tensor:
    """Normed hidden states [n, d] at n rows of the flattened batch ids [B, T].

    seen: see `_seen`; None: causal, or for a single token everything. keep(layer, k, v) gives the keys and values
    that the queries look at.
    """
    table = decoder.embed_tokens
    # a tied table's gradient begins with the head's, which is dense: what the few rows get is added to it in place
    x = torch.nn.functional.embedding(ids, table.weight, table.padding_idx, sparse=decoder.config.tie_word_embeddings)
    cos, sin = _angles(decoder, x, positions)
    x = x.flatten(0, 1)
    last = len(decoder.layers) - 1
    for number, layer in enumerate(decoder.layers):
        q, k, v = _project(layer, x, cos, sin, ids.shape)
        k, v = keep(number, k, v)
        mixed = _attend(q, k, v, attn_mask=seen, is_causal=seen is None and ids.shape[1] > 1)
        if number == last and len(rows) < len(x):
            x, mixed = x[rows], mixed[rows]
        x = _feed(layer, torch.addmm(x, mixed, layer.self_attn.o_proj.weight.T))
    return _norm(decoder.norm, x)


def _angles(decoder, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [B or 1, T, 1, D / 2] of the rotary embedding, as the model itself computes them."""
    cos, sin = decoder.rotary_emb(x, positions)
    half = cos.shape[-1] // 2
    return cos[:, :, None, :half], sin[:, :, None, :half]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask=None, is_causal: bool = False) -> torch.Tensor:
    """Attention of q [B, H, T, D] on k, v [B, H_kv, S, D] -> [B T, H D]."""
    batch, heads, length, size = q.shape
    group = heads // k.shape[1]
    if group > 1 and not is_causal:
        # the queries of a group share their keys, so they are rows of one product: no copies of the keys
        q = q.reshape(batch, k.shape[1], group * length, size)
        seen = attn_mask if attn_mask is None or length == 1 else attn_mask.repeat(1, 1, group, 1)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=seen).reshape(batch, heads, length, size)
        mixed = mixed.transpose(1, 2).reshape(batch * length, heads * size)
    else:
        mixed = scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=k.shape[1] != heads
        )
        mixed = mixed.transpose(1, 2).reshape(batch * length, heads * size)
    return mixed


def _norm(module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def _project(layer, x, cos, sin, shape):
    """Rotated queries, keys, and values [B, H or H_kv, T, D] of x [B T, d]."""
    attention, norm = layer.self_attn, layer.input_layernorm
    weights = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
    found = _Project.apply(x, norm.weight, *weights, cos, sin, norm.variance_epsilon, shape, attention.head_dim)
    return tuple(part.transpose(1, 2) for part in found)


def _feed(layer, x):
    """x + down(silu(gate(norm(x))) * up(norm(x))) for x [n, d]."""
    mlp, norm = layer.mlp, layer.post_attention_layernorm
    return _Feed.apply(
        x, norm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, norm.variance_epsilon
    )


def _inverse_size(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """1 / sqrt(mean of squares + epsilon) per row [n, 1]."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return size.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


def _norm_backward(gradient, x, scale, weight, needs):
    """Gradients for input and weight of weight * x * scale, scale = 1 / sqrt(mean of squares + epsilon)."""
    unit = x * scale
    own = torch.einsum("nd,nd->d", gradient, unit) if needs else None
    gradient = gradient * weight
    inner = torch.linalg.vecdot(gradient, unit).div_(x.shape[-1])[:, None]
    return gradient.sub_(unit.mul_(inner)).mul_(scale), own


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """x [B, T, H, D] with its halves turned by the angle, or back by it (sign -1); contiguous."""
    first, second = x.chunk(2, -1)
    turned = torch.empty(x.shape, dtype=x.dtype)
    one, two = turned.chunk(2, -1)
    torch.mul(first, cos, out=one).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=two).addcmul_(first, sin, value=sign)
    return turned


class _Project(torch.autograd.Function):
    """RMSNorm, the three projections and the rotation; keeps its input and one number per row of it."""

    @staticmethod
    def forward(ctx, x, norm, q, k, v, cos, sin, epsilon, shape, size):
        scale = _inverse_size(x, epsilon)
        unit = (x * scale).mul_(norm)
        ctx.save_for_backward(x, scale, norm, q, k, v, cos, sin)
        queries, keys, values = ((unit @ weight.T).view(*shape, -1, size) for weight in (q, k, v))
        return _rotate(queries, cos, sin, 1.0), _rotate(keys, cos, sin, 1.0), values

    @staticmethod
    @once_differentiable
    def backward(ctx, queries, keys, values):
        x, scale, norm, q, k, v, cos, sin = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rows = x.shape[0]
        queries = _rotate(queries, cos, sin, -1.0).view(rows, -1)
        keys = _rotate(keys, cos, sin, -1.0).view(rows, -1)
        values = values.reshape(rows, -1)
        unit = (x * scale).mul_(norm)
        own = [g.T @ unit if need else None for g, need in zip((queries, keys, values), needs[2:5], strict=True)]
        gradient = (queries @ q).addmm_(keys, k).addmm_(values, v)
        inputs, weight = _norm_backward(gradient, x, scale, norm, needs[1])
        return inputs, weight, *own, None, None, None, None, None


class _Feed(torch.autograd.Function):
    """The feed-forward half with its residual; keeps its input and the two projections."""

    @staticmethod
    def forward(ctx, x, norm, gate, up, down, epsilon):
        scale = _inverse_size(x, epsilon)
        unit = (x * scale).mul_(norm)
        opened, lifted = unit @ gate.T, unit @ up.T
        ctx.save_for_backward(x, scale, norm, gate, up, down, opened, lifted)
        return torch.addmm(x, silu(opened).mul_(lifted), down.T)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, scale, norm, gate, up, down, opened, lifted = ctx.saved_tensors
        needs = ctx.needs_input_grad
        active = silu(opened)
        own = [None, None, gradient.T @ (active * lifted) if needs[4] else None]
        product = gradient @ down
        active.mul_(product)  # from here the gradient of `lifted`
        opened = torch.ops.aten.silu_backward(product.mul_(lifted), opened)
        unit = (x * scale).mul_(norm)
        own[0] = opened.T @ unit if needs[2] else None
        own[1] = active.T @ unit if needs[3] else None
        inputs, weight = _norm_backward((opened @ gate).addmm_(active, up), x, scale, norm, needs[1])
        return inputs.add_(gradient), weight, *own, None
