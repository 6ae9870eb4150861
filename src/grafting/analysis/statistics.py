"""Intervals for a mean over few seeds and many items.

Both are samples: other seeds would give other models, other items another test. With k seeds and strata g
(prior skills, new tasks; fixed, equally weighted, m_g items each) the 95 % interval is mean ± h,

    h^2 = t_{k-1}^2 * s_seed^2 / k  +  1.96^2 * (sum_g w_g^2 s_g^2 / m_g + 2 / M^2),

s_seed^2 the variance of the seeds' means, s_g^2 the variance over items of the items' means over seeds,
M = sum_g m_g. The last term is that of two pseudo-items which differ by ±1 (Agresti and Min 2005): it keeps
an interval open when every item agrees. Item-by-seed noise stands in both terms: h errs on the wide side.

Coverage by simulation at 3 seeds (a small version is tests/unit/test_analysis.py): .96 to .997 for paired
differences over between-seed standard deviations 0 to .1, one to 19 strata, with and without difficult items.
For a single accuracy whose seeds pile up at 100 % it can fall to about .84: the distribution is lopsided
there, as for any symmetric interval. With one seed only the items vary; such an interval says nothing about
other seeds and is marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

Key = tuple[str, str]  # (stratum, item id)
Observations = Mapping[str, Mapping[Key, float]]  # replicate (a seed) -> item -> value in [0, 1]

SEEDS_AND_ITEMS, ITEMS_ONLY = "seeds and items", "items only"
Z = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval; seeds = replicates, items = distinct items behind it."""

    mean: float
    half: float
    seeds: int
    items: int
    basis: str

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, rounded so that the last bits of a sum do not show."""
        return {
            "mean": round(self.mean, 6),
            "low": round(self.low, 6),
            "high": round(self.high, 6),
            "seeds": self.seeds,
            "items": self.items,
            "basis": self.basis,
        }


def interval(strata: Sequence[np.ndarray]) -> Estimate:
    """Mean and interval from one array [k seeds, m_g items] per stratum; see the module's docstring.

    Errors: ValueError without strata, or when they differ in k.
    """
    seeds = {array.shape[0] for array in strata}
    if len(seeds) != 1:
        raise ValueError(f"strata must share one number of seeds >= 1, got {sorted(seeds)}")
    k = seeds.pop()
    items = sum(array.shape[1] for array in strata)
    seed_means = np.mean([array.mean(axis=1) for array in strata], axis=0)
    # One item in a stratum: its variance is unknown; 1/4 is the largest a value in [0, 1] can have.
    spread = [np.var(array.mean(axis=0), ddof=1) if array.shape[1] > 1 else 0.25 for array in strata]
    sizes = [array.shape[1] for array in strata]
    squared = Z**2 * (sum(s / m for s, m in zip(spread, sizes, strict=True)) / len(strata) ** 2 + 2 / items**2)
    if k > 1:
        squared += stdtrit(k - 1, 0.975) ** 2 * np.var(seed_means, ddof=1) / k
    basis = SEEDS_AND_ITEMS if k > 1 else ITEMS_ONLY
    return Estimate(float(seed_means.mean()), float(np.sqrt(squared)), k, items, basis)


def estimate(observations: Observations) -> Estimate | None:
    """Interval of the mean of `observations`; None when there are none."""
    strata = _strata(observations)
    return interval(list(strata.values())) if strata else None


def difference(a: Observations, b: Observations) -> Estimate | None:
    """Interval of mean(a) - mean(b), paired by seed and item; None without a common seed and item."""
    shared = sorted(set(a) & set(b))
    paired = {seed: {key: a[seed][key] - b[seed][key] for key in a[seed] if key in b[seed]} for seed in shared}
    return estimate(paired)


def _strata(observations: Observations) -> dict[str, np.ndarray]:
    """Stratum -> [seeds, items], over the items that every seed has."""
    if not observations:
        return {}
    seeds = sorted(observations)
    common = set.intersection(*(set(observations[seed]) for seed in seeds))
    names: dict[str, list[Key]] = {}
    for key in sorted(common):
        names.setdefault(key[0], []).append(key)
    return {
        stratum: np.array([[observations[seed][key] for key in keys] for seed in seeds], dtype=float)
        for stratum, keys in names.items()
    }
