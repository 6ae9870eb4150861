"""Models kept in 16 bits while every operation on them is in float32.

A model of 7 B parameters takes 28 GB in float32 and 14 GB as it is saved. Here its linear and embedding weights
stay as saved and are widened, exactly, for the one operation that uses them, forward and again backward;
activations are kept at the borders of the layers only and formed again backward. So gradients are those of the
model in float32, in half the memory and for about one more forward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from grafting.models import load_model
from grafting.models.safefiles import Checkpoint


def load_narrow(path: Path):
    """The model of a directory in the one 16-bit format it is saved in, made ready; in float32 if in another.

    UserError: see `load_model`.
    """
    forms = {stored.form.name for stored in Checkpoint(path).tensors.values()}
    narrow = forms <= {"bfloat16"} or forms <= {"float16"}
    return upcast_in_use(load_model(path, forms.pop() if narrow else "float32"))


def upcast_in_use(model):
    """Make a model compute in float32 whatever its weights are kept in; one in float32 is returned as it is.

    The weights of linear layers and embeddings stay narrow; the output head's, norms and biases become float32.
    """
    if not any(is_narrow(p) for p in model.parameters()):
        return model
    from transformers.modeling_layers import GradientCheckpointingLayer

    head = model.get_output_embeddings()
    large = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding) and m is not head}
    large.discard(id(head.weight))  # tied to the embeddings
    for parameter in model.parameters():
        if id(parameter) not in large:
            parameter.data = parameter.data.float()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_linear, module)
        elif isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _, __, output: output.float())
        elif isinstance(module, GradientCheckpointingLayer):
            module.forward = partial(
                torch.utils.checkpoint.checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
            )
    return model


def is_narrow(parameter: Tensor) -> bool:
    """Whether it is kept in 16 bits."""
    return parameter.dtype in (torch.bfloat16, torch.float16)


@contextmanager
def widened(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Keep these in float32 for a while, so that their gradients are too. Afterwards they are as they were."""
    before = [(p, p.dtype) for p in parameters if is_narrow(p)]
    for parameter, _ in before:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in before:
            parameter.data = parameter.data.to(dtype)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    if not is_narrow(module.weight):
        return nn.functional.linear(x, module.weight, module.bias)
    y = _Widening.apply(x, module.weight)
    return y if module.bias is None else y + module.bias


class _Widening(torch.autograd.Function):
    """x W^T with W widened for as long as the product takes; W itself gets no gradient here."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return nn.functional.linear(x, weight.float())

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.float(), None
