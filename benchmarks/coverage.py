"""How often 95 % intervals hold the truth at few seeds: the choice of the interval method, on data with known truth.

    python benchmarks/coverage.py            # minutes; the table of docs/statistics.md
    python benchmarks/coverage.py --runs 200 # quicker and coarser

Two methods answer the same items. An item has a difficulty, each method's training run (a seed) an offset; an
answer is right with probability sigmoid(level + difficulty) + offset. The statistic is the difference of the two
accuracies, as in the claims; then one accuracy by itself, near the ceiling, and the difference of two hypervolumes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

import numpy as np
from scipy.special import expit, stdtrit

from grafting.analysis.frontier import contrast, hypervolume
from grafting.analysis.statistics import Draws, interval

SEED_SD = (0.0, 0.02, 0.05, 0.10)
ITEM_SD = (0.0, 1.0, 2.0)
SHAPES = ((1, 100), (3, 60), (19, 40))  # strata, items of each
SEEDS = 3
LEVELS = (2.0, 1.4)
METHODS = (
    "nested percentile bootstrap",
    "crossed percentile bootstrap",
    "t over seeds",
    "chosen: t over seeds + items",
)


def chances(rng, shape, k, item_sd, seed_sd, level, shared, own_share=0.5):
    """[strata, k, items] chances of a right answer."""
    strata, m = shape
    own = rng.normal(0, own_share * item_sd, (strata, 1, m))
    return np.clip(expit(level + shared + own) + rng.normal(0, seed_sd, (1, k, 1)), 0, 1)


def truth(shape, item_sd, seed_sd, levels):
    """Expected difference (or accuracy, with one level): over items, seeds and answers."""
    rng = np.random.default_rng(12345)
    total = []
    for sign, level in zip((1, -1), levels):
        difficulty = rng.normal(0, item_sd * np.sqrt(1.25), 4_000)[:, None]
        total.append(sign * np.clip(expit(level + difficulty) + rng.normal(0, seed_sd, (1, 1_000)), 0, 1).mean())
    return sum(total)


def sample(rng, shape, item_sd, seed_sd, levels):
    """[strata, seeds, items]: paired differences of answers (answers, with one level)."""
    strata, m = shape
    shared = rng.normal(0, item_sd, (strata, 1, m))
    result = 0.0
    for sign, level in zip((1, -1), levels):
        p = chances(rng, shape, SEEDS, item_sd, seed_sd, level, shared)
        result = result + sign * (rng.random(p.shape) < p)
    return result


class Bootstraps:
    """Percentile bootstraps whose draws are made once."""

    def __init__(self, shape, draws):
        rng = np.random.default_rng(7)
        strata, m = shape
        self.pick = rng.integers(0, SEEDS, (draws, SEEDS))
        self.items = rng.multinomial(m, np.full(m, 1 / m), size=(SEEDS, strata, draws)).transpose(0, 1, 3, 2) / m

    def __call__(self, data):
        slots = [np.matmul(data, w).mean(axis=0) for w in self.items]  # per slot [seeds, draws]
        at = np.arange(self.pick.shape[0])
        nested = np.mean([slot[self.pick[:, j], at] for j, slot in enumerate(slots)], axis=0)
        crossed = np.mean([slots[0][self.pick[:, j], at] for j in range(SEEDS)], axis=0)
        return [tuple(np.quantile(values, [0.025, 0.975])) for values in (nested, crossed)]


def intervals(data, bootstraps):
    """One (low, high) per method of METHODS."""
    found = interval(list(data))
    per_seed = data.mean(axis=(0, 2))
    half = stdtrit(SEEDS - 1, 0.975) * per_seed.std(ddof=1) / np.sqrt(SEEDS)
    return [*bootstraps(data), (per_seed.mean() - half, per_seed.mean() + half), (found.low, found.high)]


def grid(runs, draws, levels):
    """(seed sd, item sd, shape) -> coverage and mean half-width per method."""
    result = {}
    for number, (seed_sd, item_sd, shape) in enumerate(itertools.product(SEED_SD, ITEM_SD, SHAPES)):
        rng, bootstraps = np.random.default_rng([1, number]), Bootstraps(shape, draws)
        true = truth(shape, item_sd, seed_sd, levels)
        held, widths = np.zeros(len(METHODS)), np.zeros(len(METHODS))
        for _ in range(runs):
            for i, (low, high) in enumerate(intervals(sample(rng, shape, item_sd, seed_sd, levels), bootstraps)):
                held[i] += low <= true <= high
                widths[i] += (high - low) / 2
        result[seed_sd, item_sd, shape] = held / runs, widths / runs
    return result


def frontier_grid(runs, draws):
    """(seed sd, item sd) -> coverage of the hypervolume difference of two curves of three points."""
    result = {}
    scales = np.array([0.6, 0.8, 1.0])
    centres = {  # method -> (levels of new, levels of prior), one per scale
        "left": (4 * scales - 2.0, 3.2 - 2.0 * scales),
        "right": (4 * scales - 2.4, 3.0 - 2.2 * scales),
    }
    for number, (seed_sd, item_sd) in enumerate(itertools.product(SEED_SD, ITEM_SD)):
        rng, held = np.random.default_rng([2, number]), 0
        big = np.random.default_rng(3).normal(0, item_sd, 200_000)
        clip = np.random.default_rng(4).normal(0, seed_sd, 2_000)
        areas = []
        for levels in centres.values():
            flat = [[expit(level + big).mean() for level in suite] for suite in levels]
            # offsets hardly reach the ends here; their clipping is averaged as well
            flat = [[float(np.clip(value + clip, 0, 1).mean()) for value in suite] for suite in flat]
            areas.append(float(hypervolume(np.array(flat[0]), np.array(flat[1]))))
        for run in range(runs):
            wholes, fixed = [], {}
            for suite, (strata, m) in (("new", (1, 60)), ("prior", (19, 20))):
                fixed[suite] = rng.normal(0, item_sd, (strata, 1, m))
            for levels in centres.values():
                whole = {}
                offsets = rng.normal(0, seed_sd, (2, 1, SEEDS, 1))
                for place, suite in enumerate(("new", "prior")):
                    p = [np.clip(expit(level + fixed[suite]) + offsets[place], 0, 1) for level in levels[place]]
                    answers = [(rng.random(q.shape) < q).astype(float) for q in p]  # [strata, seeds, items]
                    strata, _, m = answers[0].shape
                    keys = tuple((f"{suite}{g:02d}", f"{i:04d}") for g in range(strata) for i in range(m))
                    whole[suite] = keys, np.array([a.transpose(1, 0, 2).reshape(SEEDS, -1) for a in answers])
                wholes.append(whole)
            found = contrast("hypervolume", [tuple(wholes)], Draws(draws, seed=run % 20))
            held += found.low <= areas[0] - areas[1] <= found.high
        result[seed_sd, item_sd] = held / runs
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="simulated studies per cell of the grid")
    parser.add_argument("--draws", type=int, default=500, help="bootstrap draws per interval")
    options = parser.parse_args()
    started = time.perf_counter()
    for title, levels in (("difference of two accuracies", LEVELS), ("one accuracy, near the ceiling", (3.0,))):
        found = grid(options.runs, options.draws, levels)
        print(f"\n{title}, {SEEDS} seeds, {options.runs} simulated studies per cell: least - mean coverage\n")
        print("| seed sd | " + " | ".join(METHODS) + " |\n|---|" + "---|" * len(METHODS))
        for seed_sd in SEED_SD:
            part = np.array([c for key, (c, _) in found.items() if key[0] == seed_sd])
            print(
                f"| {seed_sd:g} | " + " | ".join(f"{a:.3f} - {b:.3f}" for a, b in zip(part.min(0), part.mean(0))) + " |"
            )
        every = np.array([c for c, _ in found.values()])
        widths = np.array([w for _, w in found.values()]).mean(0)
        print("| all | " + " | ".join(f"**{a:.3f}** - {b:.3f}" for a, b in zip(every.min(0), every.mean(0))) + " |")
        print("| mean half-width, points | " + " | ".join(f"{100 * w:.1f}" for w in widths) + " |")
    found = frontier_grid(max(1, options.runs // 4), options.draws)
    print(f"\ndifference of two hypervolumes, chosen method, {max(1, options.runs // 4)} simulated studies per cell\n")
    print("| seed sd | " + " | ".join(f"item sd {s:g}" for s in ITEM_SD) + " |\n|---|" + "---|" * len(ITEM_SD))
    for seed_sd in SEED_SD:
        print(f"| {seed_sd:g} | " + " | ".join(f"{found[seed_sd, s]:.3f}" for s in ITEM_SD) + " |")
    print(f"\n{time.perf_counter() - started:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
