"""Divergences between teacher and student over the whole vocabulary, named by their direction.

forward_kl = KL(teacher || student); reverse_kl = KL(student || teacher);
jsd = beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student
(the generalised Jensen-Shannon divergence of arXiv 2306.13649).
"""

from __future__ import annotations

import torch

from grafting.errors import UserError

NAMES = {
    "forward_kl": "forward_kl = KL(teacher || student)",
    "reverse_kl": "reverse_kl = KL(student || teacher)",
    "jsd": "jsd = beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student",
}


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) per row of log-probabilities [n, V]; a token with p = 0 adds nothing."""
    return (p.exp() * (p - q)).sum(-1)


def divergence(name: str, teacher: torch.Tensor, student: torch.Tensor, beta: float = 0.5) -> torch.Tensor:
    """Divergence per position [n] from logits [n, V] of teacher and student, in float32.

    UserError for an unknown name, or for a beta outside (0, 1) with jsd.
    """
    teacher, student = torch.log_softmax(teacher.float(), -1), torch.log_softmax(student.float(), -1)
    if name == "forward_kl":
        return _kl(teacher, student)
    if name == "reverse_kl":
        return _kl(student, teacher)
    if name != "jsd":
        raise UserError(f"opsd.divergence: {name!r} is not known; choose one of {', '.join(NAMES)}")
    if not 0 < beta < 1:
        raise UserError(f"opsd.beta: {beta} must lie between 0 and 1; else use forward_kl or reverse_kl")
    weights = torch.tensor([beta, 1 - beta], device=teacher.device).log()
    mixture = torch.logaddexp(teacher + weights[0], student + weights[1])
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)
