"""Divergences between teacher and student, named by their direction.

forward_kl = KL(teacher || student); reverse_kl = KL(student || teacher);
jsd = beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student
(the generalised Jensen-Shannon divergence of arXiv 2306.13649).

Over the whole vocabulary, or over the k likeliest tokens of one of the two, with the rest as one more token (tail)
or left out and the k renormalised. `sampled_reverse_kl` estimates the gradient of reverse_kl from the sampled
token alone. Values and gradients of all of them equal those of TRL 1.16 (tests/unit/test_parity.py).
"""

from __future__ import annotations

import torch

from grafting.errors import UserError

NAMES = {
    "forward_kl": "forward_kl = KL(teacher || student)",
    "reverse_kl": "reverse_kl = KL(student || teacher)",
    "jsd": "jsd = beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student",
}
SUPPORTS = ("student", "teacher")


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) per row of log-probabilities [n, V]; a token with p = 0 adds nothing."""
    return (p.exp() * (p - q)).sum(-1)


def divergence(
    name: str,
    teacher: torch.Tensor,
    student: torch.Tensor,
    beta: float = 0.5,
    *,
    top_k: int | None = None,
    support: str = "student",
    tail: bool = True,
) -> torch.Tensor:
    """Divergence per position [n] from logits [n, V] of teacher and student, in float32.

    top_k: only the k likeliest tokens of `support` ("student" or "teacher"); None: all of them.
    UserError for an unknown name or support, or for a beta outside (0, 1) with jsd.
    """
    teacher, student = torch.log_softmax(teacher.float(), -1), torch.log_softmax(student.float(), -1)
    if top_k is not None and top_k < teacher.shape[-1]:
        teacher, student = _on_support(teacher, student, top_k, support, tail)
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


def _on_support(
    teacher: torch.Tensor, student: torch.Tensor, k: int, support: str, tail: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both log-distributions over the k likeliest tokens of one of them: [n, k + 1] with the tail, else [n, k]."""
    if support not in SUPPORTS:
        raise UserError(f"opsd.support: {support!r} is not known; choose one of {', '.join(SUPPORTS)}")
    chosen = (student if support == "student" else teacher).detach().topk(k, -1).indices
    kept = [logs.gather(-1, chosen) for logs in (teacher, student)]
    if not tail:
        return tuple(torch.log_softmax(logs, -1) for logs in kept)
    return tuple(torch.cat([logs, _rest(logs)], -1) for logs in kept)


def _rest(logs: torch.Tensor) -> torch.Tensor:
    """log of the probability that the tokens [n, k] leave over, [n, 1]; kept finite where it rounds to zero."""
    return torch.log(-torch.expm1(torch.logsumexp(logs, -1, keepdim=True).clamp(max=-1e-7)))


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log pi(token) [n] from logits [n, V] and tokens [n], in float32."""
    return torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, None])[:, 0]


def sampled_reverse_kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """stop_grad(log pi_S - log pi_T) * log pi_S per position [n], from both log-probabilities of the sampled token.

    Its gradient is, in expectation over tokens sampled from the student, that of KL(student || teacher); its value
    is no divergence and may have either sign.
    """
    return (student - teacher).detach() * student


def importance_weights(student: torch.Tensor, sampled: torch.Tensor, clip: float) -> torch.Tensor:
    """min(pi_S / pi_sampler, clip) per token [n] from log-probabilities, without gradient.

    Corrects for rollouts that an earlier student sampled.
    """
    return torch.exp((student - sampled).detach()).clamp(max=clip)


def purified(teacher: torch.Tensor, reference_only: torch.Tensor, student: torch.Tensor, strength: float):
    """Logits [n, V] of a target without what the demonstration alone suggests (after Purified OPSD, arXiv 2607.02234).

    log target = log pi_S + strength * (log pi_T(. | x, y*) - log pi_T(. | y*)) + constant: the pointwise mutual
    information of token and question, given the demonstration, tilts the student. Only the paper's abstract was at
    hand; that the residual tilts the student, and by which strength, is our reading of it.
    """
    logs = [torch.log_softmax(logits.float(), -1) for logits in (teacher, reference_only, student)]
    return logs[2].detach() + strength * (logs[0] - logs[1])


ROWS = 32  # at once: what a divergence needs beside the logits stays small enough for the processor's cache


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, student, *others):
        values = torch.empty(len(student), dtype=torch.float32, device=student.device)
        gradient = torch.empty_like(student)
        for start in range(0, len(student), ROWS):
            rows = slice(start, start + ROWS)
            part = student[rows].detach().requires_grad_()
            with torch.enable_grad():
                found = function(part, *(other[rows] for other in others))
                (gradient[rows],) = torch.autograd.grad(found.sum(), part)
            values[rows] = found.detach()
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return None, gradient.mul_(upstream[:, None]), *(None for _ in ctx.needs_input_grad[2:])


def by_rows(function, student: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """function(student, *others) [n] for a function of logits [n, V] whose rows do not mix, `ROWS` rows at a time.

    The gradient for the student's logits is formed at once, so that of all else that has the size of the logits
    nothing is kept; the others get none.
    """
    return _ByRows.apply(function, student, *others)
