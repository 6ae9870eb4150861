"""What a search may cost: the candidates that a budget pays for. Used for tests and by the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def trained(candidates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys of the training jobs behind candidates, over all seeds and stages, each once."""
    labels = [candidate["label"].get("trained", {}) for candidate in candidates]
    return list(dict.fromkeys(key for of in labels for stages in of.values() for keys in stages for key in keys))


def affordable(
    candidates: Sequence[Mapping[str, Any]], budget: float, cost: Callable[[Sequence[str]], float]
) -> list[Mapping[str, Any]]:
    """Candidates in the configuration's order whose training jobs, together with those before, cost at most
    `budget`; one that would exceed it is left out. A job that several share is paid once."""
    kept: list[Mapping[str, Any]] = []
    paid: list[str] = []
    for candidate in candidates:
        keys = list(dict.fromkeys([*paid, *trained([candidate])]))
        if cost(keys) <= budget * (1 + 1e-9):
            kept.append(candidate)
            paid = keys
    return kept
