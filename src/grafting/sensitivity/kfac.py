"""Kronecker-factored Fisher information of every linear layer, as eigenbases."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from grafting.errors import UserError
from grafting.sensitivity.likelihood import Sequence, negative_log_likelihood, pad


def linear_layers(model) -> dict[str, nn.Linear]:
    """Every nn.Linear but the output head, by module name. UserError when there is none."""
    head = model.get_output_embeddings()
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no nn.Linear besides its output head, so K-FAC has "
            "nothing to factor: use the diagonal estimator"
        )
    return layers


def kfac_factors(
    model,
    sequences: list[Sequence],
    *,
    fisher: str = "true",
    seed: int = 0,
    batch_size: int = 16,
    progress=None,
    only: Collection[str] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """A = E[a a^T] (in x in) and G = E[g g^T] (out x out) per linear layer, float64.

    a is the layer's input and g = d log pi(y|x) / d(layer output) at one token; the mean is over all
    tokens the model reads, prompt and completion, since the prompt's activations carry the update too.
    `only`: names of the layers that are wanted (all unless given), as many as memory allows: the rest is had
    by further calls, with the same bits.
    Source: Martens & Grosse 2015; the "expand" form for weight sharing of Eschenhagen et al. 2023.
    """
    layers = {name: m for name, m in linear_layers(model).items() if only is None or name in only}
    sums = {
        name: (
            torch.zeros(m.in_features, m.in_features, dtype=torch.float64),
            torch.zeros(m.out_features, m.out_features, dtype=torch.float64),
        )
        for name, m in layers.items()
    }
    real: Tensor = torch.zeros(0)
    forwards = True

    def watch(name):
        def hook(_, inputs, output):
            if not forwards:  # activations formed again on the way back were counted
                return
            a = inputs[0].detach()[real].float()  # [tokens, in]; padding left out
            sums[name][0].add_((a.T @ a).cpu())

            def outer(gradient):  # [B, T, out]; zero on padding, which reaches no loss
                g = gradient[real].float()
                sums[name][1].add_((g.T @ g).cpu())

            output.register_hook(outer)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in layers.items()]
    tokens = 0
    try:
        for start in range(0, len(sequences), batch_size):
            group = sequences[start : start + batch_size]
            batch = pad(group)
            real = batch[1].to(model.device)
            forwards = True
            loss = negative_log_likelihood(model, group, fisher, seed, batch)
            forwards = False
            # asking for the embeddings' gradient alone walks the whole graph but forms no other weight's
            torch.autograd.grad(loss, model.get_input_embeddings().weight)
            tokens += int(real.sum())
            if progress is not None:
                progress.update(len(group))
    finally:
        for handle in handles:
            handle.remove()
    for name, factors in sums.items():
        for factor in factors:
            factor.div_(tokens)
            if not torch.isfinite(factor).all():
                raise UserError(f"the K-FAC factors of {name} are not finite: check the model's weights")
    return sums


def eigenbases(factors: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Eigen-decompositions, computed in float64, kept in float32, eigenvalues descending.

    "<module>.A.vectors" (in x in, eigenvectors in columns), "<module>.A.values" (in), and G likewise
    (out). Negative eigenvalues, which only rounding produces, become 0.
    """
    tensors = {}
    for module, pair in factors.items():
        for letter, factor in zip("AG", pair):
            values, vectors = torch.linalg.eigh(factor)
            tensors[f"{module}.{letter}.values"] = values.flip(0).clamp(min=0).float().contiguous()
            tensors[f"{module}.{letter}.vectors"] = vectors.flip(1).float().contiguous()
    return tensors
