"""How several updates of one tensor become one: the operators that work coordinate by coordinate.

Every operator takes an `Inputs` (arrays.py) and its settings, goes through the tensor as often as it needs
statistics, and returns a `Piece`: a pure function from a chunk of anchor and deltas to a chunk of the update.
Sums run in the order of the donors: floating-point addition does not associate, so the engine and the sweep
sort donors by content first. geometry.py has the operators that need angles and norms.

Identities, bit for bit in float32, bfloat16 and float16, where the output is anchor + scale * update, rounded
once: all deltas zero -> the anchor, for every operator here. One delta with weight 1 and density 1 -> that
delta, for every operator here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from grafting.merging.arrays import Inputs, Piece, add_up, dot, keep
from grafting.sensitivity.selection import NOTHING, Cut, Near, cuts

#: (start, delta of one donor) -> the same without the dropped entries; may overwrite.
Sparse = Callable[[int, np.ndarray], np.ndarray]

#: DARE's densities are multiples of 1/65536.
_STEPS = 1 << 16
#: Magnitudes of tensors up to this size are kept whole to find a threshold.
_ALL_KEPT = 1 << 17


def task_arithmetic(inputs: Inputs, weight: Sequence[float], normalize: bool = False) -> Piece:
    """sum_i w_i delta_i, divided by sum_i w_i if `normalize` (Ilharco et al. 2023, arXiv 2212.04089).

    With one donor and weight 1 this is the graft itself, and with scale 1 and donor = deployed it is the
    fine-tuned model (the engine copies that one, so that it holds bit for bit).
    """
    return _combined([_whole] * inputs.count, weight, False, normalize)


def magnitude(inputs: Inputs, weight, density, rescale: str = "none", normalize: bool = False) -> Piece:
    """sum_i w_i trim(delta_i, p_i): the floor(p n), at least 1, entries of largest magnitude stay.

    The trim of TIES (arXiv 2306.01708) without its election. Among equal magnitudes the first by index stay.
    """
    return _combined(_trims(inputs, density, rescale), weight, False, normalize)


def ties(inputs: Inputs, weight, density, rescale: str = "none", normalize: bool = True) -> Piece:
    """TIES: trim, elect sign, disjoint mean (Yadav et al. 2023, arXiv 2306.01708, algorithm 1).

    x_i = w_i trim(delta_i, p_i); s = sign(sum_i x_i) per coordinate, a sum of exactly 0 electing +; the update
    is sum x_i / sum w_i over the x_i whose sign is s, 0 where there is none. As in mergekit the trim is per
    tensor. `normalize=False` leaves the division out.
    """
    return _combined(_trims(inputs, density, rescale), weight, True, normalize)


def breadcrumbs(
    inputs: Inputs, weight, density, gamma, rescale: str = "none", normalize: bool = False, elect: bool = False
) -> Piece:
    """Model Breadcrumbs (Davari & Belilovsky 2023, arXiv 2312.06795): outliers and small entries are dropped.

    Of n entries the floor(gamma n) largest go, of the rest the floor(p n) largest stay (fewer outliers go where
    n would not suffice, as in mergekit). `elect=True`: followed by the election of TIES (breadcrumbs_ties).
    """
    return _combined(_outliers(inputs, density, gamma, rescale), weight, elect, normalize)


def dare(
    inputs: Inputs, weight, density, seed: int, rescale: str = "density", normalize: bool = False, elect: bool = False
) -> Piece:
    """DARE (Yu et al. 2024, arXiv 2311.03099): each entry stays with probability p_i, then is rescaled.

    p_i is the density rounded to a multiple of 1/65536, and at least that: one random bit an entry for each of its
    binary digits.
    rescale: "density" 1 / p_i, the paper's, unbiased; "l1" so that the L1 norm of the delta's tensor is what
    it was (mergekit's); "none". Draws are by (seed, donor's content, tensor name, index): the order of donors,
    sharding and threads change none. `elect=True`: DARE-TIES, `elect=False`: DARE-linear.
    """
    return _combined(_bernoulli(inputs, density, seed, rescale), weight, elect, normalize)


def della(
    inputs: Inputs, weight, density, epsilon, seed: int, rescale="l1", normalize: bool = True, elect: bool = True
) -> Piece:
    """DELLA (Deep et al. 2024, arXiv 2406.11617): entries stay with a probability that grows with their rank.

    Per row (the whole of a vector) of m entries, the one of rank r = 0..m-1 by magnitude stays with probability
    p - eps + 2 eps r / (m - 1). rescale: "l1" as in mergekit; "density": each kept entry by 1 / its probability
    as in the paper; "none". `elect=False`: DELLA-linear. Needs chunks of whole rows.
    """
    return _combined(_magprune(inputs, density, epsilon, seed, rescale), weight, elect, normalize)


def sce(inputs: Inputs, density: float = 1.0) -> Piece:
    """SCE (Wan et al. 2024, arXiv 2408.07990): select by variance, weigh by energy, erase minority signs.

    Selected are the floor(density * number of nonzero variances) coordinates of largest variance over the
    donors; donor i weighs w_i = mean(delta_i^2) / sum_j of the same, over the selected (equal weights where
    the sum is below 1e-6); the update is sum w_i delta_i / max(sum w_i, 1e-6) over donors of the elected sign.
    """

    def variance(deltas: list[np.ndarray]) -> np.ndarray:
        mean = add_up(deltas)
        mean /= len(deltas)
        return add_up([(delta - mean) ** 2 for delta in deltas]) / len(deltas)

    cut = None
    if density < 1:
        nonzero = sum(int(np.count_nonzero(variance(deltas))) for _, _, deltas in inputs.chunks())

        def scan(step):
            return ((start, variance(deltas)) for start, _, deltas in inputs.chunks(step=step))

        (cut,) = cuts(scan, inputs.size, [int(nonzero * density)])

    def selected(start, deltas):
        if cut is not None:
            marks = cut.marks(start, variance(deltas))
            deltas = [keep(delta, marks) for delta in deltas]
        return deltas

    energy = np.zeros(inputs.count)
    for start, _, deltas in inputs.chunks():
        energy += [float((delta * delta).sum(dtype=np.float64)) for delta in selected(start, deltas)]
    energy /= inputs.size
    weight = energy / energy.sum() if energy.sum() >= 1e-6 else np.full(inputs.count, 1 / inputs.count)

    def piece(start, _, deltas):
        deltas = selected(start, deltas)
        positive = add_up(deltas) >= 0
        total, mass = np.zeros_like(deltas[0]), np.zeros_like(deltas[0])
        for delta, w in zip(deltas, weight):
            agrees = _agrees(delta, positive)
            total += keep(delta * inputs.wide.type(w), agrees)
            mass += agrees * inputs.wide.type(w)
        return total / np.maximum(mass, inputs.wide.type(1e-6))

    return piece


def nearswap(inputs: Inputs, t: float) -> Piece:
    """nearswap (alchemonaut 2024): w = clip(t / max(|delta|, 1e-6), 0, 1) per coordinate; the update is w delta."""

    def piece(_, __, deltas):
        (delta,) = deltas
        share = np.maximum(np.abs(delta), inputs.wide.type(1e-6))
        np.divide(inputs.wide.type(t), share, out=share)
        np.clip(share, 0, 1, out=share)
        share *= delta
        return share

    return piece


def magmax(inputs: Inputs, weight) -> Piece:
    """MagMax (Marczak et al. 2024, arXiv 2407.06322): per coordinate the w_i delta_i of largest magnitude.

    Of equal magnitudes the first in canonical order.
    """

    def piece(_, __, deltas):
        parts = _weighted(deltas, weight)
        best, size = parts[0], np.abs(parts[0])
        for part in parts[1:]:
            other = np.abs(part)
            larger = other > size
            np.copyto(best, part, where=larger)
            np.copyto(size, other, where=larger)
        return best

    return piece


# ---- what the family of sparse task vectors shares ----


def _combined(sparse: Sequence[Sparse], weight: Sequence[float], elect: bool, normalize: bool) -> Piece:
    """Weighted sum of sparse deltas, over all or over those of the elected sign, divided by the weights' sum."""
    whole = sum(weight)
    divisor = whole if normalize and abs(whole) >= 1e-8 else 1.0

    def piece(start, _, deltas):
        parts = _weighted([drop(start, delta) for drop, delta in zip(sparse, deltas)], weight)
        if elect:
            return _elected(parts, weight, normalize)
        total = parts[0]
        for part in parts[1:]:
            total += part
        if divisor != 1:
            total /= total.dtype.type(divisor)
        return total

    return piece


def _weighted(parts: list[np.ndarray], weight: Sequence[float]) -> list[np.ndarray]:
    for part, w in zip(parts, weight):
        if w != 1:
            part *= part.dtype.type(w)
    return parts


def _agrees(part: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Where the sign of `part` is the elected one; zeros have none."""
    agrees = part > 0
    agrees &= positive
    agrees |= (part < 0) > positive
    return agrees


def _elected(parts: list[np.ndarray], weight: Sequence[float], normalize: bool) -> np.ndarray:
    total = add_up(parts)
    flip = total.view(f"u{total.itemsize}")
    flip &= flip.dtype.type(1 << (8 * total.itemsize - 1))  # the sign bit, by which what agrees becomes positive
    nothing, agreeing = _zeros(len(total), total.dtype), []
    for part in parts:
        bits = part.view(flip.dtype)
        bits ^= flip
        if normalize:
            agreeing.append(part > 0)
        np.maximum(part, nothing, out=part)
    result = parts[0]
    for part in parts[1:]:
        result += part
    if normalize:
        result /= _mass(agreeing, weight, result.dtype)
    bits = result.view(flip.dtype)
    bits ^= flip
    return result


@lru_cache(maxsize=4)
def _zeros(count: int, dtype: np.dtype) -> np.ndarray:
    """Read-only zeros: a maximum with a number costs five times that with an array."""
    found = np.zeros(count, dtype)
    found.setflags(write=False)
    return found


def _mass(agreeing: list[np.ndarray], weight: Sequence[float], wide: np.dtype) -> np.ndarray:
    """Sum of the weights of those that agree, 1 where it is 0."""
    w = weight[0]
    # where a product is what the sum would be, bit for bit
    if set(weight) == {w} and w != 0 and len(weight) <= (255 if w == 1 else 3):
        number = agreeing[0].view(np.uint8)
        for agrees in agreeing[1:]:
            number += agrees.view(np.uint8)
        number |= number == 0
        mass = number.astype(wide)
        if w != 1:
            mass *= wide.type(w)
        return mass
    mass = np.zeros(len(agreeing[0]), wide)
    for agrees, w in zip(agreeing, weight):
        mass += keep(np.full(len(mass), w, wide), agrees)
    mass += mass == 0
    return mass


# ---- what is dropped ----


def _trims(inputs: Inputs, density: Sequence[float], rescale: str) -> list[Sparse]:
    counts = [[] if p == 1 else [max(1, int(p * inputs.size))] for p in density]

    def trim(cut: Cut) -> Sparse:
        return lambda start, delta: keep(delta, cut.marks(start, np.abs(delta)))

    drops = [trim(*found) if found else None for found in _magnitude_cuts(inputs, counts)]
    return _rescaled(inputs, drops, rescale)


def _outliers(inputs: Inputs, density: Sequence[float], gamma: Sequence[float], rescale: str) -> list[Sparse]:
    n, counts = inputs.size, []
    for p, g in zip(density, gamma):
        target = int(p * n)
        bottom = max(0, n - target - int(g * n))
        counts.append([] if p == 1 else [n - bottom, n - bottom - target])

    def trim(small: Cut, large: Cut) -> Sparse:
        def drop(start, delta):
            size = np.abs(delta)
            return keep(delta, small.marks(start, size) & ~large.marks(start, size))

        return drop

    drops = [trim(*found) if found else None for found in _magnitude_cuts(inputs, counts)]
    return _rescaled(inputs, drops, rescale)


def _magnitude_cuts(inputs: Inputs, counts: Sequence[Sequence[int]]) -> list[list[Cut]]:
    """Per donor the cuts of its `counts[i]` entries of largest magnitude: all donors in one pass, as a rule."""
    wanted = {i: sorted({c for c in several if c}) for i, several in enumerate(counts)}
    which = [i for i, several in wanted.items() if several]
    if not which:
        return [[NOTHING] * len(several) for several in counts]
    samples = [None] * len(which)
    if inputs.size > _ALL_KEPT:
        samples = [np.abs(delta, out=delta) for delta in inputs.sample(which)]
    search = [Near(inputs.size, wanted[i], sample) for i, sample in zip(which, samples)]
    for start, _, deltas in inputs.chunks(which):
        for near, delta in zip(search, deltas):
            near.feed(start, np.abs(delta, out=delta))
    found: dict[tuple[int, int], Cut] = {}
    for i, near in zip(which, search):

        def scan(step, i=i):
            for start, _, (delta,) in inputs.chunks([i], step=step):
                yield start, np.abs(delta, out=delta)

        for j, count in enumerate(wanted[i]):
            found[i, count] = near.cut(j) or cuts(scan, inputs.size, [count])[0]
    return [[found.get((i, count), NOTHING) for count in several] for i, several in enumerate(counts)]


def _bernoulli(inputs: Inputs, density: Sequence[float], seed: int, rescale: str) -> list[Sparse]:
    thresholds = [min(max(round(p * _STEPS), 1), _STEPS) for p in density]

    def thin(i: int, threshold: int) -> Sparse:
        uniforms = inputs.stream(i, seed)
        return lambda start, delta: keep(delta, uniforms.marks(start, len(delta), threshold))

    drops = [thin(i, t) if t < _STEPS else None for i, t in enumerate(thresholds)]
    return _rescaled(inputs, drops, rescale, [_STEPS / t for t in thresholds])


def _magprune(inputs: Inputs, density, epsilon, seed: int, rescale: str) -> list[Sparse]:
    row = row_length(inputs.shape)

    def prune(i: int, p: float, e: float) -> Sparse:
        uniforms = inputs.stream(i, seed)

        def drop(start, delta):
            size = np.abs(delta).reshape(-1, row)
            ranks = np.empty(size.shape, np.float32)
            order = np.argsort(size, axis=1, kind="stable")
            np.put_along_axis(ranks, order, np.arange(row, dtype=np.float32)[None, :], axis=1)
            ranks *= np.float32(2 * e / max(1, row - 1))
            ranks += np.float32(p - e)
            probability = ranks.reshape(-1)
            kept = keep(delta, uniforms.at(start, len(delta)) < probability)
            return kept / probability if rescale == "density" else kept

        return drop

    drops = [prune(i, p, e) if p < 1 else None for i, (p, e) in enumerate(zip(density, epsilon))]
    return _rescaled(inputs, drops, "none" if rescale == "density" else rescale, rows=row)


def _rescaled(
    inputs: Inputs, drops: Sequence[Sparse | None], rescale: str, factors: Sequence[float] = (), rows: int = 1
) -> list[Sparse]:
    """Each drop followed by a factor: one given, or what gives the delta's tensor its L1 norm back. None keeps all."""
    which = [i for i, drop in enumerate(drops) if drop is not None]
    if rescale == "l1" and which:
        before, after = np.zeros(len(drops)), np.zeros(len(drops))
        for start, _, deltas in inputs.chunks(which, rows=rows):
            for i, delta in zip(which, deltas):
                size = np.abs(delta, out=delta)  # no drop looks at signs
                before[i] += dot(size)
                after[i] += dot(drops[i](start, size))
        factors = [b / a if b >= 1e-7 and a >= 1e-7 else 1.0 for b, a in zip(before, after)]

    def scaled(drop: Sparse, factor: float) -> Sparse:
        def both(start, delta):
            delta = drop(start, delta)
            delta *= delta.dtype.type(factor)
            return delta

        return both

    return [
        _whole if drop is None else drop if rescale == "none" else scaled(drop, factors[i])
        for i, drop in enumerate(drops)
    ]


def _whole(_: int, delta: np.ndarray) -> np.ndarray:
    return delta


def row_length(shape: tuple[int, ...]) -> int:
    """Length of a row: all but the first axis; the whole of a vector or scalar."""
    return int(np.prod(shape[1:] if len(shape) > 1 else shape, dtype=np.int64))
