"""Diagonal Fisher information: one number per coordinate."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from grafting.errors import UserError
from grafting.sensitivity.likelihood import Sequence, negative_log_likelihood
from grafting.sensitivity.upcasting import widened


def diagonal_fisher(
    model,
    sequences: list[Sequence],
    *,
    fisher: str = "true",
    seed: int = 0,
    progress=None,
    only: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """F_i = mean over examples of (d log pi(y|x) / d theta_i)^2, with the names of `named_parameters`.

    log pi(y|x) is the sum over completion tokens, so long answers weigh more than short ones; every
    parameter is covered, embeddings (a tied head counts with them), norms and biases too. One backward
    pass per example: the square does not commute with the sum over a batch. Float32, shapes of the
    parameters. `only`: names of the parameters that are wanted (all unless given), as many as memory allows:
    the rest is had by further calls, with the same bits. Raises UserError naming the example whose gradient
    is not finite.
    Source: Kirkpatrick et al. 2017 (EWC) for the use, Kunstner et al. 2019 for true against empirical.
    """
    chosen = {name: p for name, p in model.named_parameters() if only is None or name in only}
    names, parameters = list(chosen), list(chosen.values())
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    with widened(parameters):
        for sequence in sequences:
            loss = negative_log_likelihood(model, [sequence], fisher, seed)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for total, gradient in zip(sums, gradients):
                if gradient is not None:  # a parameter the likelihood does not reach has Fisher information 0
                    gradient = gradient.float()
                    total.addcmul_(gradient, gradient)
            if not torch.isfinite(loss):
                raise UserError(
                    f"the log-likelihood of retention example {sequence.id} is not finite: "
                    "the model is broken or the example is not in its vocabulary"
                )
            if progress is not None:
                progress.update(1)
    result = {name: total.div_(len(sequences)).cpu() for name, total in zip(names, sums)}
    for name, values in result.items():
        if not torch.isfinite(values).all():
            raise UserError(f"the diagonal Fisher estimate of {name} is not finite: check the model")
    return result
