"""Frontiers: sets of (new, prior) points, what they dominate, and one set against another.

A frontier claim compares two point sets of *equal size* (or equal training cost) that were fixed without looking
at the items they are compared on: of the larger set as many points are kept as the smaller has, those that
dominate most on one half of the validation items; they are compared on the other half, and the other way round
(cross-fitting; the halves are the even and the odd places of the sorted item ids). Nothing of the test data is
read for it: test points exist only for selected candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Sets:
    """The two point sets of one task, on one half of its items."""

    left: Side
    right: Side
    items: tuple[int, int]  # new, prior


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


def _half(whole: Whole, fold: int) -> Side:
    """The items at even (fold 0) or odd (fold 1) places of every stratum; all of a stratum of one item in fold 0."""
    return {
        suite: {name: array[..., a:b][..., fold::2] for name, a, b in blocks(keys) if b - a > fold}
        for suite, (keys, array) in whole.items()
    }


def means(part: Side) -> list[np.ndarray]:
    """[new, prior], each [points, seeds]: mean over strata of the means over items."""
    return [np.mean([array.mean(-1) for array in part[suite].values()], axis=0) for suite in (NEW, PRIOR)]


def choose(part: Side, k: int) -> list[int]:
    """Places of k points that dominate most together, found one by one (greedy; the first of equals)."""
    new, prior = (values.mean(axis=1) for values in means(part))
    kept: list[int] = []
    for _ in range(min(k, len(new))):
        rest = [i for i in range(len(new)) if i not in kept]
        sets = np.array([[*kept, i] for i in rest])
        kept.append(rest[int(np.argmax(hypervolume(new[sets], prior[sets])))])
    return sorted(kept)


def _take(part: Side, places: Sequence[int]) -> Side:
    return {suite: {name: array[list(places)] for name, array in strata.items()} for suite, strata in part.items()}


@dataclass(frozen=True)
class Outcome:
    """A frontier comparison: its estimate and the number of points per side."""

    estimate: Estimate
    points: int


def contrast(name: str, tasks: Sequence[tuple[Whole, Whole]], draws: Draws) -> Outcome | None:
    """Statistic `name` of left against right, mean over tasks; None when a half of a task's items is empty."""
    fitted: list[list[Sets]] = [[], []]
    size = 0
    for wholes in tasks:
        k = min(len(whole[NEW][1]) for whole in wholes)
        size = max(size, k)
        halves = [[_half(whole, fold) for whole in wholes] for fold in (0, 1)]
        if not all(part[suite] for half in halves for part in half for suite in (NEW, PRIOR)):
            return None
        for fold in (0, 1):
            kept = [_take(part, choose(other, k)) for part, other in zip(halves[fold], halves[1 - fold], strict=True)]
            counts = tuple(sum(v.shape[-1] for v in halves[fold][0][suite].values()) for suite in (NEW, PRIOR))
            fitted[fold].append(Sets(kept[0], kept[1], counts))
    every = [sets for fold in fitted for sets in fold]
    mean = np.mean([_at(name, sets, over_seeds=True) for sets in every])
    per_seed = np.mean([_at(name, sets, over_seeds=False) for sets in every], axis=0)
    drawn = np.mean(
        [_drawn(name, sets, (t, fold), draws) for fold in (0, 1) for t, sets in enumerate(fitted[fold])], axis=0
    )
    new = sum(sets.items[0] for sets in every)
    prior = max(sum(fold[t].items[1] for fold in fitted) for t in range(len(tasks)))
    # the pseudo-items of both suites: an area and a matched difference move by at most as much as the accuracies
    variance = float(np.var(drawn, ddof=1)) + 2 / new**2 + 2 / prior**2
    return Outcome(combine(float(mean), per_seed, variance, new + prior), size)


def _at(name: str, sets: Sets, over_seeds: bool) -> np.ndarray:
    """The statistic of the means over seeds, or seed by seed [seeds]."""
    sides = [means(part) for part in (sets.left, sets.right)]  # per suite [points, seeds]
    return statistic(name, *([v.mean(axis=1) if over_seeds else v.T for v in values] for values in sides))


def _drawn(name: str, sets: Sets, place: tuple[int, int], draws: Draws) -> np.ndarray:
    """[draws]: the statistic over draws of the items, seeds averaged. New items differ between tasks (`place`: task,
    half), prior items are the same for all of them and are drawn together."""
    sides = []
    for part in (sets.left, sets.right):
        names = {NEW: f"{NEW}/{place[0]}/{place[1]}", PRIOR: f"{PRIOR}/{place[1]}"}
        strata = [
            {f"{names[suite]}/{stratum}": array.mean(axis=1) for stratum, array in part[suite].items()}
            for suite in (NEW, PRIOR)
        ]
        sides.append([draws.means(s).T for s in strata])  # [draws, points]
    step = max(1, CHUNK // (LEVELS * max(values[0].shape[1] for values in sides)))
    return np.concatenate(
        [statistic(name, *([v[i : i + step] for v in values] for values in sides)) for i in range(0, draws.draws, step)]
    )
