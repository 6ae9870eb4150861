"""Frontiers: sets of (new, prior) points, what they dominate, and one set against another.

A frontier claim compares two point sets of *equal size* that were fixed before test data were read: of every method
the points that dominate most together on validation data (`grafting.evaluation.frontier`), as many as the method
with fewer candidates has. The sets are compared on test data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from grafting.analysis.cells import observations
from grafting.analysis.collect import Point
from grafting.analysis.statistics import Draws, Estimate, Key, blocks, combine, shared

HYPERVOLUME, PRIOR_AT_NEW, NEW_AT_PRIOR = "hypervolume", "prior_at_new", "new_at_prior"
STATISTICS = (HYPERVOLUME, PRIOR_AT_NEW, NEW_AT_PRIOR)
LEVELS = 41
CHUNK = 4_000_000  # numbers at once
NEW, PRIOR = "new", "prior"
Side = dict[str, dict[str, np.ndarray]]  # suite -> stratum -> [points, seeds, items]


def pareto(new: Sequence[float], prior: Sequence[float]) -> list[bool]:
    """Which points no other point beats in one accuracy without losing in the other."""
    points = list(zip(new, prior, strict=True))
    return [not any(b >= a and d >= c and (b, d) != (a, c) for b, d in points) for a, c in points]


def hypervolume(new: np.ndarray, prior: np.ndarray, reference: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
    """Area dominated by points [..., K] above `reference` = (new, prior); in [0, 1] for accuracies over (0, 0)."""
    new, prior = np.broadcast_arrays(np.clip(new - reference[0], 0, None), np.clip(prior - reference[1], 0, None))
    order = np.argsort(-new, axis=-1)
    a = np.take_along_axis(new, order, -1)
    r = np.maximum.accumulate(np.take_along_axis(prior, order, -1), axis=-1)
    widths = a - np.concatenate([a[..., 1:], np.zeros_like(a[..., :1])], axis=-1)
    return (widths * r).sum(axis=-1)


def matched(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Mean difference of b and d at equal levels of a and c: points (a, b) [..., K] against (c, d) [..., L].

    At a level x a set attains max {b_i : a_i >= x}. Levels run from where one of the sets starts to give up b for
    a (below, both stand still) to the highest one that both reach.
    """
    top = np.minimum(a.max(-1), c.max(-1))
    start = [np.take_along_axis(x, y.argmax(-1)[..., None], -1)[..., 0] for x, y in ((a, b), (c, d))]
    bottom = np.minimum(np.minimum(*start), top)
    levels = bottom[..., None] + (top - bottom)[..., None] * np.linspace(0, 1, LEVELS)
    gained = [
        np.where(x[..., None, :] >= levels[..., None] - 1e-9, y[..., None, :], -np.inf).max(-1)
        for x, y in ((a, b), (c, d))
    ]
    return (gained[0] - gained[1]).mean(-1)


def statistic(name: str, left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> np.ndarray:
    """`name` of two sets, each (new [..., K], prior [..., K])."""
    if name == HYPERVOLUME:
        return hypervolume(*left) - hypervolume(*right)
    if name == PRIOR_AT_NEW:
        return matched(left[0], left[1], right[0], right[1])
    return matched(left[1], left[0], right[1], right[0])


Whole = dict[str, tuple[tuple[Key, ...], np.ndarray]]  # suite -> items, [points, seeds, items]


def side(candidates: Sequence[Mapping[str, Sequence[Point]]], seeds: Sequence[str]) -> Whole | None:
    """Answers of candidates, each a mapping from replicate to its points; None where a suite is absent."""
    result = {}
    for suite in (NEW, PRIOR):
        seen = [observations({seed: candidate[seed] for seed in seeds}, suite) for candidate in candidates]
        if not seen or any(set(part) != set(seeds) for part in seen):
            return None
        keys = shared([part[seed] for part in seen for seed in seeds])
        if not keys:
            return None
        result[suite] = keys, np.array([[part[seed].at(keys) for seed in seeds] for part in seen])
    return result


def by_stratum(whole: Whole) -> Side:
    """Suite -> stratum -> [points, seeds, items]."""
    return {suite: {name: array[..., a:b] for name, a, b in blocks(keys)} for suite, (keys, array) in whole.items()}


def means(part: Side) -> list[np.ndarray]:
    """[new, prior], each [points, seeds]: mean over strata of the means over items."""
    return [np.mean([array.mean(-1) for array in part[suite].values()], axis=0) for suite in (NEW, PRIOR)]


def contrast(name: str, tasks: Sequence[tuple[Whole, Whole]], draws: Draws, aligned: bool = True) -> Estimate:
    """Statistic `name` of left against right, mean over tasks.

    aligned: a point is the same candidate in every replicate, so that the statistic is that of the means over
    replicates. Else (each model has a frontier of its own) it is the mean of the replicates' statistics.
    """
    sides = [tuple(by_stratum(whole) for whole in wholes) for wholes in tasks]
    per_seed = np.mean([statistic(name, *([v.T for v in means(part)] for part in pair)) for pair in sides], axis=0)
    if aligned:
        over = [[[v.mean(axis=1) for v in means(part)] for part in pair] for pair in sides]
        mean = float(np.mean([statistic(name, *pair) for pair in over]))
        drawn = [_drawn(name, pair, task, draws, None) for task, pair in enumerate(sides)]
    else:
        mean = float(np.mean(per_seed))
        replicates = range(len(per_seed))
        drawn = [_drawn(name, pair, task, draws, r) for task, pair in enumerate(sides) for r in replicates]
    new = sum(len(left[NEW][0]) for left, _ in tasks)
    prior = max(len(left[PRIOR][0]) for left, _ in tasks)
    # the pseudo-items of both suites: an area and a matched difference move by at most as much as the accuracies
    variance = float(np.var(np.mean(drawn, axis=0), ddof=1)) + 2 / new**2 + 2 / prior**2
    return combine(mean, per_seed, variance, new + prior)


def _drawn(name: str, pair: tuple[Side, Side], task: int, draws: Draws, replicate: int | None) -> np.ndarray:
    """[draws]: the statistic over draws of the items, of one replicate or of their mean. New items differ between
    tasks, prior items are the same for all of them and are drawn together."""
    sides = []
    for part in pair:
        strata = [
            {
                f"{label}/{stratum}": array.mean(axis=1) if replicate is None else array[:, replicate]
                for stratum, array in part[suite].items()
            }
            for suite, label in ((NEW, f"{NEW}/{task}"), (PRIOR, PRIOR))
        ]
        sides.append([draws.means(s).T for s in strata])  # [draws, points]
    step = max(1, CHUNK // (LEVELS * max(values[0].shape[1] for values in sides)))
    return np.concatenate(
        [statistic(name, *([v[i : i + step] for v in values] for values in sides)) for i in range(0, draws.draws, step)]
    )
