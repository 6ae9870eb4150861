"""The largest of a long stream of scores, exactly, in linear time and little memory: no sorting.

`ranking.largest` marks entries of one tensor in memory. Here the scores come in chunks, as often as asked,
and the answer is a threshold, with which every chunk can be marked by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

#: So many scores are held and partitioned at once; more are bracketed by a sample first.
HELD = 1 << 24

Scan = Callable[[int], Iterable[tuple[int, np.ndarray]]]


@dataclass(frozen=True)
class Cut:
    """Which entries are chosen: scores above `value`, and those equal to it at index `last` or before."""

    value: float
    last: int

    def marks(self, start: int, scores: np.ndarray) -> np.ndarray:
        """Chosen entries of a chunk that begins at index `start`: bool."""
        if self.last < start:
            return scores > self.value
        if self.last >= start + len(scores) - 1:
            return scores >= self.value
        chosen = scores > self.value
        head = self.last - start + 1
        chosen[:head] = scores[:head] >= self.value
        return chosen


NOTHING = Cut(np.inf, -1)


class Near:
    """Cuts found in a single pass: keeps the scores that lie near a threshold, counts those above.

    size: of all scores; counts: how many largest are wanted, each at least 1; sample: [runs, length] of the scores,
    from evenly over them, None if there are so few that all are kept. Where the threshold proves to lie
    elsewhere, or too many scores are near it, `cut` gives None; what it gives is exact.
    """

    #: So many scores and their places are kept at most.
    MOST = 1 << 21

    def __init__(self, size: int, counts: Sequence[int], sample: np.ndarray | None):
        self._size, self._counts, self._index = size, counts, np.dtype(np.uint32 if size < 1 << 32 else np.int64)
        self._brackets = [(-1.0, np.inf) if sample is None else _between(sample, c / size) for c in counts]
        self._above = [0] * len(counts)
        self._kept: list[list[tuple[np.ndarray, np.ndarray]] | None] = [[] for _ in counts]
        self._number = [0] * len(counts)

    def feed(self, start: int, scores: np.ndarray) -> None:
        """The scores from index `start` on; in order of index, all of them."""
        for j, (low, high) in enumerate(self._brackets):
            near, over = scores >= low, scores > high
            self._above[j] += int(np.count_nonzero(over))
            near ^= over
            if self._kept[j] is None:
                continue
            places = np.flatnonzero(near)
            self._number[j] += len(places)
            self._kept[j].append(((places + start).astype(self._index), scores[places]))
            if self._number[j] > self.MOST:
                self._kept[j] = None

    def cut(self, j: int) -> Cut | None:
        """The cut of the `counts[j]` largest; among equal scores the first by index."""
        left = self._counts[j] - self._above[j]
        if self._kept[j] is None or not 0 < left <= self._number[j]:
            return None
        places, scores = (np.concatenate(parts) for parts in zip(*self._kept[j]))
        value = kth_largest(scores, left)
        equal = places[scores == value]
        accepted = left - int(np.count_nonzero(scores > value))
        return Cut(float(value), self._size if accepted == len(equal) else int(equal[accepted - 1]))


def kth_largest(scores: np.ndarray, k: int) -> float:
    """The k-th largest score, k from 1 on; no partition, which costs three times as much where many are equal."""
    while len(scores) > 4096:
        sample = np.sort(scores[:: len(scores) // 1024])
        middle = int(len(sample) * (1 - k / len(scores)))
        low, high = sample[max(0, middle - 64)], sample[min(len(sample) - 1, middle + 64)]
        over = scores > high
        above, upwards = int(np.count_nonzero(over)), int(np.count_nonzero(scores >= low))
        if k <= above:
            fewer = scores[over]
        elif k > upwards:
            fewer, k = scores[scores < low], k - upwards
        elif low == high:
            return low
        else:
            fewer, k = scores[(scores >= low) & ~over], k - above
        if len(fewer) > len(scores) // 2:
            scores = fewer
            break
        scores = fewer
    return np.sort(scores)[len(scores) - k]


def _between(sample: np.ndarray, share: float) -> tuple[float, float]:
    """Scores between which the threshold of the largest `share` lies, six standard errors of the runs either way."""
    ordered = np.sort(sample, axis=None)
    n = len(ordered)
    middle = ordered[min(n - 1, int(n * (1 - share)))]
    shares = (sample > middle).mean(axis=1)
    spread = 6 * float(shares.std(ddof=1)) / np.sqrt(len(shares)) + 6 * np.sqrt(share * (1 - share) / n) + 6 / n
    low, high = int(n * (1 - share - spread)), int(n * (1 - share + spread)) + 1
    return (float(ordered[low]) if low >= 0 else -1.0), (float(ordered[high]) if high < n else np.inf)


def cuts(scan: Scan, size: int, counts: Sequence[int], held: int = HELD) -> list[Cut]:
    """The thresholds of the `counts[j]` largest of `size` scores; among equal scores the first by index.

    `scan(step)` yields (start, scores) in order of index, scores being float32 or float64, finite and at
    least 0; with step > 1 it may leave out all but every step-th element of each chunk (and then `start`
    is not used). It is called once or twice for up to `held` scores, else three times or, rarely, more.
    """
    for count in counts:
        if not 0 <= count <= size:
            raise ValueError(f"cannot mark {count} of {size} entries")
    wanted = sorted({count for count in counts if count})
    if not wanted:
        return [NOTHING] * len(counts)
    found = _held(scan, size, wanted) if size <= held else _bracketed(scan, size, wanted, held)
    return [found[count] if count else NOTHING for count in counts]


def _gather(scan: Scan, size: int, step: int = 1) -> np.ndarray:
    whole, filled = None, 0
    for _, scores in scan(step):
        if whole is None:
            whole = np.empty(size, scores.dtype)
        whole[filled : filled + len(scores)] = scores
        filled += len(scores)
    return whole[:filled]


def _held(scan: Scan, size: int, wanted: list[int]) -> dict[int, Cut]:
    scores = _gather(scan, size)
    scores.partition([size - count for count in wanted])
    return {count: _resolve(scan, scores, count, size) for count in wanted}


def _resolve(scan: Scan, scores: np.ndarray, count: int, size: int, above: int = 0) -> Cut:
    """The cut of a partitioned array, which holds all scores but the `above` larger ones and some smaller."""
    value = scores[len(scores) - (count - above)]
    top = scores[len(scores) - (count - above) :]
    accepted = int(np.count_nonzero(top == value))
    if accepted == int(np.count_nonzero(scores == value)):
        return Cut(float(value), size)
    for start, chunk in scan(1):
        equal = np.flatnonzero(chunk == value)
        if len(equal) >= accepted:
            return Cut(float(value), start + int(equal[accepted - 1]))
        accepted -= len(equal)
    raise AssertionError("the scores changed between two scans")


def _bracketed(scan: Scan, size: int, wanted: list[int], held: int) -> dict[int, Cut]:
    step = 2 * size // held | 1  # odd: it does not keep to the same columns of a matrix
    sample = _gather(scan, size, step)
    sample.sort()
    found: dict[int, Cut] = {}
    margin = 8.0
    while len(found) < len(wanted):
        left = [count for count in wanted if count not in found]
        brackets = [_bracket(sample, count / size, margin) for count in left]
        lowest = min(low for low, _ in brackets)
        above, inside = [0] * len(left), [[] for _ in left]
        for _, scores in scan(1):
            candidates = scores[scores >= lowest]
            for j, (low, high) in enumerate(brackets):
                over = candidates > high
                above[j] += int(np.count_nonzero(over))
                inside[j].append(candidates[~over & (candidates >= low)])
        for count, over, parts in zip(left, above, inside):
            between = np.concatenate(parts)
            if over < count <= over + len(between):
                between.partition(len(between) - (count - over))
                found[count] = _resolve(scan, between, count, size, over)
        margin *= 8
    return found


def _bracket(sample: np.ndarray, share: float, margin: float) -> tuple[float, float]:
    """Scores between which the threshold of the largest `share` lies, `margin` standard errors either way."""
    n = len(sample)
    spread = margin * np.sqrt(share * (1 - share) * n) + margin
    low, high = n * (1 - share) - spread, n * (1 - share) + spread
    return (sample[int(low)] if low >= 0 else -np.inf), (sample[int(high)] if high < n else np.inf)
