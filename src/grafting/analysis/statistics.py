"""Intervals for a mean over few seeds and many items, and for any function of such means.

Both are samples: other seeds would give other models, other items another test. With k seeds and strata g
(prior skills, new tasks; fixed, equally weighted, m_g items each) the 95 % interval is mean ± h,

    h^2 = t_{k-1}^2 * s_seed^2 / k  +  1.96^2 * (sum_g w_g^2 s_g^2 / m_g + 2 / M^2),

s_seed^2 the variance of the seeds' means, s_g^2 the variance over items of the items' means over seeds,
M = sum_g m_g. The last term is that of two pseudo-items which differ by ±1 (Agresti and Min 2005): it keeps
an interval open when every item agrees. Item-by-seed noise stands in both terms: h errs on the wide side.
For a statistic T that is no mean (a hypervolume) s_seed is that of T per seed, and the item term is the
variance of T over draws of the items (`Draws`).

The method was chosen by simulation at 3 seeds (benchmarks/coverage.py; what it printed: docs/statistics.md).
`COVERAGE` says how often such an interval held the truth. With one seed only the items vary; such an interval
says nothing about other seeds and is marked.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import stdtrit

Key = tuple[str, str]  # (stratum, item id)

SEEDS_AND_ITEMS, ITEMS_ONLY = "seeds and items", "items only"
Z = 1.959963984540054
DRAWS = 10_000
COVERAGE = (
    "Simulated at 3 seeds (standard deviation between seeds 0 to 10 points, easy and mixed items, 1 to 19 "
    "strata): a 95 % "
    "interval of a paired difference held the truth in 95.1 % of the studies in the worst case, that of a "
    "difference of "
    "hypervolumes in 96.0 %, that of a single accuracy near 100 % in 86.9 %, since the seeds pile up there. "
    "A nested percentile bootstrap held it in as few as 71.7 %."
)


@dataclass(frozen=True, eq=False)
class Answers:
    """Values in [0, 1] of items. `keys` are sorted, and one shared object for points with equal items."""

    keys: tuple[Key, ...]
    values: np.ndarray  # [items]

    @classmethod
    def of(cls, values: Mapping[Key, float]) -> Answers:
        """From a mapping of items to values."""
        keys = tuple(sorted(values))
        return cls(keys, np.array([values[key] for key in keys], dtype=float))

    def only(self, strata: frozenset[str]) -> Answers:
        """The items of some strata."""
        keys, places = _within(self.keys, strata)
        return self if keys is self.keys else Answers(keys, self.values[places])

    def at(self, keys: tuple[Key, ...]) -> np.ndarray:
        """Values in the order of `keys`, which must all be here."""
        return self.values if keys is self.keys else self.values[_places(self.keys, keys)]

    def __len__(self) -> int:
        return len(self.keys)


Observations = Mapping[str, Answers]  # replicate (a seed) -> its answers


@lru_cache(maxsize=256)
def _within(keys: tuple[Key, ...], strata: frozenset[str]) -> tuple[tuple[Key, ...], np.ndarray]:
    places = [i for i, key in enumerate(keys) if key[0] in strata]
    return (keys if len(places) == len(keys) else tuple(keys[i] for i in places)), np.array(places, dtype=int)


@lru_cache(maxsize=256)
def _places(keys: tuple[Key, ...], wanted: tuple[Key, ...]) -> np.ndarray:
    index = {key: i for i, key in enumerate(keys)}
    return np.array([index[key] for key in wanted], dtype=int)


@lru_cache(maxsize=256)
def _common(*parts: tuple[Key, ...]) -> tuple[Key, ...]:
    return tuple(sorted(set.intersection(*(set(keys) for keys in parts))))


@lru_cache(maxsize=256)
def blocks(keys: tuple[Key, ...]) -> tuple[tuple[str, int, int], ...]:
    """(stratum, start, stop) of sorted keys."""
    starts = [i for i, key in enumerate(keys) if i == 0 or key[0] != keys[i - 1][0]]
    return tuple((keys[a][0], a, b) for a, b in zip(starts, [*starts[1:], len(keys)]))


def shared(parts: Sequence[Answers]) -> tuple[Key, ...]:
    """The items that all of `parts` have."""
    first = parts[0].keys
    return first if all(part.keys is first for part in parts) else _common(*(part.keys for part in parts))


def mean_of(parts: Sequence[Answers]) -> Answers:
    """Item by item, the mean over those of `parts` that have it."""
    first = parts[0]
    if all(part.keys is first.keys for part in parts):
        return first if len(parts) == 1 else Answers(first.keys, np.mean([part.values for part in parts], axis=0))
    sums: dict[Key, list[float]] = {}
    for part in parts:
        for key, value in zip(part.keys, part.values, strict=True):
            sums.setdefault(key, []).append(float(value))
    return Answers.of({key: sum(values) / len(values) for key, values in sums.items()})


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval; seeds = replicates, items = distinct items behind it.

    half^2 = t^2 * seed_variance + 1.96^2 * item_variance.
    """

    mean: float
    half: float
    seeds: int
    items: int
    basis: str
    seed_variance: float = 0.0
    item_variance: float = 0.0

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def p_value(self, threshold: float = 0.0) -> float:
        """Two-sided: 1 - the level of the widest interval of this kind that leaves `threshold` outside."""
        distance = abs(self.mean - threshold)
        low, high = -300.0, 0.0  # log10 of the level
        for _ in range(60):
            middle = (low + high) / 2
            if self._half(10**middle) > distance:
                low = middle
            else:
                high = middle
        return 10**high

    def _half(self, alpha: float) -> float:
        z = math.inf if alpha <= 0 else -_normal_quantile(alpha / 2)
        t = stdtrit(self.seeds - 1, 1 - alpha / 2) if self.seeds > 1 and alpha > 1e-15 else z
        if self.seeds > 1 and alpha <= 1e-15:
            t = math.inf if self.seed_variance > 0 else 0.0
        return math.sqrt((t**2 * self.seed_variance if self.seed_variance else 0.0) + z**2 * self.item_variance)

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


def _normal_quantile(p: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(p))


def combine(mean: float, per_seed: np.ndarray, item_variance: float, items: int) -> Estimate:
    """Interval of a statistic: `per_seed` [k] its values seed by seed, `item_variance` that of its mean over seeds
    under another draw of the items. Errors: ValueError without a seed."""
    k = len(per_seed)
    if k == 0:
        raise ValueError("an interval needs at least one seed")
    seed_variance = float(np.var(per_seed, ddof=1) / k) if k > 1 else 0.0
    t = float(stdtrit(k - 1, 0.975)) if k > 1 else 0.0
    half = math.sqrt(t**2 * seed_variance + Z**2 * item_variance)
    return Estimate(
        float(mean), half, k, items, SEEDS_AND_ITEMS if k > 1 else ITEMS_ONLY, seed_variance, float(item_variance)
    )


def interval(strata: Sequence[np.ndarray]) -> Estimate:
    """Mean and interval from one array [k seeds, m_g items] per stratum; see the module's docstring.

    Errors: ValueError without strata, or when they differ in k.
    """
    seeds = {array.shape[0] for array in strata}
    if len(seeds) != 1:
        raise ValueError(f"strata must share one number of seeds >= 1, got {sorted(seeds)}")
    items = sum(array.shape[1] for array in strata)
    seed_means = np.mean([array.mean(axis=1) for array in strata], axis=0)
    # One item in a stratum: its variance is unknown; 1/4 is the largest a value in [0, 1] can have.
    spread = [np.var(array.mean(axis=0), ddof=1) if array.shape[1] > 1 else 0.25 for array in strata]
    sizes = [array.shape[1] for array in strata]
    item_variance = sum(s / m for s, m in zip(spread, sizes, strict=True)) / len(strata) ** 2 + 2 / items**2
    return combine(seed_means.mean(), seed_means, item_variance, items)


def estimate(observations: Observations) -> Estimate | None:
    """Interval of the mean of `observations`; None when there are none."""
    strata = strata_of(observations)
    return interval(list(strata.values())) if strata else None


def paired(a: Observations, b: Observations) -> Observations:
    """a - b, by seed and item, over what both have."""
    result = {}
    for seed in sorted(set(a) & set(b)):
        keys = shared([a[seed], b[seed]])
        if keys:
            result[seed] = Answers(keys, a[seed].at(keys) - b[seed].at(keys))
    return result


def difference(a: Observations, b: Observations) -> Estimate | None:
    """Interval of mean(a) - mean(b), paired by seed and item; None without a common seed and item."""
    return estimate(paired(a, b))


def strata_of(observations: Observations) -> dict[str, np.ndarray]:
    """Stratum -> [seeds, items], over the items that every seed has."""
    if not observations:
        return {}
    rows = [observations[seed] for seed in sorted(observations)]
    keys = shared(rows)
    table = np.stack([row.at(keys) for row in rows]).astype(float)
    return {stratum: table[:, a:b] for stratum, a, b in blocks(keys)}


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Holm 1979), in the order given."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    adjusted, running = [0.0] * len(values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(values) - rank) * values[i]))
        adjusted[i] = running
    return adjusted


class Draws:
    """Seeded draws of items and of seeds with replacement, as weights; one draw of a stratum's items is the same
    for everything that was asked of them, so that differences are paired."""

    def __init__(self, draws: int = DRAWS, seed: int = 0) -> None:
        self.draws, self.seed = draws, seed
        self._known: dict[tuple[str, int], np.ndarray] = {}

    def weights(self, name: str, n: int) -> np.ndarray:
        """[n, draws], columns sum to 1: shares of n things in each draw of n of them."""
        if (name, n) not in self._known:
            rng = np.random.default_rng([self.seed, zlib.crc32(name.encode()), n])
            counts = rng.multinomial(n, np.full(n, 1 / n), size=self.draws)
            self._known[name, n] = (counts.T / n).astype(np.float32)
        return self._known[name, n]

    def means(self, strata: Mapping[str, np.ndarray]) -> np.ndarray:
        """[..., draws]: mean over strata of the weighted item means of arrays [..., items]."""
        total = 0.0
        for name, array in strata.items():
            total = total + array.astype(np.float32) @ self.weights(name, array.shape[-1])
        return np.asarray(total, dtype=float) / len(strata)

    def hierarchical(self, strata: Mapping[str, np.ndarray]) -> tuple[float, float]:
        """95 % percentile interval of the mean, seeds drawn first, then items (the same ones for every seed, since
        all seeds answer the same items: Owen 2007). A second opinion: too narrow at few seeds."""
        per_seed = self.means(strata)  # [seeds, draws]
        values = (per_seed * self.weights("seeds", per_seed.shape[0])).sum(axis=0)
        low, high = np.quantile(values, [0.025, 0.975])
        return float(low), float(high)
