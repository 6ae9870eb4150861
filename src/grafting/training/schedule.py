"""Learning-rate schedules: linear warm-up times a decay to a final share of the peak."""

from __future__ import annotations

import math

from grafting.errors import UserError


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


SCHEDULES = {"cosine": _cosine, "linear": lambda progress: 1 - progress, "constant": lambda progress: 1.0}


def learning_rate(
    step: int, *, steps: int, lr: float, warmup_steps: int, schedule: str, final_lr_ratio: float
) -> float:
    """Rate at `step` (from 0): lr * min(1, (step+1)/warmup) * (final + (1-final) * decay(step/steps)).

    The decay counts from step 0, beneath the warm-up. UserError for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"training.schedule: {schedule!r} is not known; choose one of {', '.join(SCHEDULES)}")
    warm = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    return lr * warm * (final_lr_ratio + (1 - final_lr_ratio) * SCHEDULES[schedule](step / steps))
