"""Sampling engine: batched generation on live weights, and the scoring of what comes out.

Used by training (on-policy rollouts), the gate, the guard, evaluation, and the rollout stage.
"""

from grafting.rollouts.engine import Rollout, check_room, generate
from grafting.rollouts.sampling import example_seed
from grafting.rollouts.scoring import Response, accuracy, respond

__all__ = ["Response", "Rollout", "accuracy", "check_room", "example_seed", "generate", "respond"]
