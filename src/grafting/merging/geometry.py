"""How several models become one: the operators that need angles and norms.

All of these give a linear combination of the points whose coefficients follow from the points' inner products
alone. So one pass forms the Gram matrix (per tensor, per row or per column), the method runs on a matrix of
the size of the number of donors, and a second pass combines. An iteration such as Karcher's costs no passes.

The conventions, and the identities of equal models, are those of operators.py: the points are the anchor and
anchor + delta_i, and the result is anchor + update. Combining equal points with coefficients that sum to 1
gives that point bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from grafting.errors import UserError
from grafting.merging.arrays import Inputs, Piece, dot
from grafting.merging.operators import row_length


def linear(inputs: Inputs, weight: Sequence[float], normalize: bool = True) -> Piece:
    """sum_i w_i theta_i, over sum_i w_i if `normalize` (model soups, Wortsman et al. 2022, arXiv 2203.05482).

    The first weight belongs to the anchor. Normalised, equal models give that model bit for bit.
    """
    whole = sum(weight)
    if normalize:
        if whole == 0:
            raise UserError("operator linear: the weights sum to 0 and cannot be normalised; set normalize: false")
        weight = [w / whole for w in weight]
    return _mixture(inputs, [_excess(weight, normalize), *weight[1:]])


def slerp(inputs: Inputs, t: float) -> Piece:
    """Spherical interpolation from the base (t = 0) to the other model (t = 1) (Shoemake 1985).

    theta = angle(v_0, v_1); sin((1-t) theta) / sin theta * v_0 + sin(t theta) / sin theta * v_1. Straight for
    |cos theta| > 0.9995, as in mergekit. t = 0 gives v_0, and equal models give that model.
    """
    gram = point_gram(inputs)
    norms = np.sqrt(np.diag(gram))
    norms[norms == 0] = 1
    cosine = float(np.clip(gram[0, 1] / (norms[0] * norms[1]), -1, 1))
    first, second = _arc(1 - t, t, cosine, abs(cosine) > 0.9995)
    return _mixture(inputs, [_excess([first, second], abs(cosine) > 0.9995), second])


def nuslerp(
    inputs: Inputs, weight: Sequence[float], flatten: bool = True, row_wise: bool = False, points: bool = True
) -> Piece:
    """SLERP of two models with weights, t = w_1 / (w_0 + w_1) (mergekit), 0.5 where the weights cancel.

    flatten: one angle per tensor; else one per row (over the last axis), or with `row_wise` one per column
    (over the first axis; mergekit's name for it). points: of the models themselves (the anchor is the first);
    else of the two deltas, added to the base. Equal models give that model.
    """
    whole = weight[0] + weight[1]
    shares = (0.5, 0.5) if abs(whole) < 1e-6 else (weight[0] / whole, weight[1] / whole)
    axis = None if flatten or len(inputs.shape) < 2 else (0 if row_wise else -1)
    gram = axis_gram(inputs, axis)  # [k, k] or [k, k, rows]
    if points:
        gram = _points(gram)
    else:
        gram = gram[1:, 1:]
    norms = np.sqrt(np.stack([gram[0, 0], gram[1, 1]]))
    norms = np.where(norms == 0, 1.0, norms)
    cosine = np.clip(gram[0, 1] / (norms[0] * norms[1]), -1, 1)
    straight = 1 - np.square(cosine) <= 1e-16
    first, second = _arc(*shares, cosine, straight)
    if not points:
        return _mixture(inputs, [0.0, first, second], axis)
    return _mixture(inputs, [np.where(straight, 0.0, first + second - 1), second], axis)


def multislerp(inputs: Inputs, weight: Sequence[float], normalize: bool = True, points: bool = True) -> Piece:
    """Barycentric interpolation on the sphere (mergekit's multislerp).

    The weighted mean of the unit vectors, brought to the weighted mean of the norms. (mergekit goes on to the
    tangent space at that mean, where the weighted sum of the points is zero: what it adds is rounding.)
    points: of the models; else of the deltas. Weights that cancel: two models are mixed straight, more refused.
    """
    weight = np.asarray(weight, np.float64)
    if normalize:
        weight = weight / weight.sum()
    gram = point_gram(inputs) if points else gram_matrix(inputs)[1:, 1:]
    norms = np.sqrt(np.diag(gram))
    # coefficients of the mean of the unit vectors; a zero tensor has no direction
    units = np.where(norms == 0, 0.0, weight / np.where(norms == 0, 1.0, norms))
    length = float(np.sqrt(max(0.0, units @ gram @ units)))
    if len(weight) == 1:
        coefficients = np.ones(1)
    elif not norms.any():
        coefficients = np.zeros(len(weight))
    elif length < 1e-8:
        if len(weight) > 2:
            raise UserError("operator multislerp: the weighted unit vectors cancel; use other weights")
        coefficients = weight
    else:
        coefficients = units / length * float(norms @ weight)
    return _of_points(inputs, coefficients, points)


def karcher(inputs: Inputs, weight: Sequence[float], max_iter: int = 10, tol: float = 1e-5) -> Piece:
    """The Riemannian mean on the sphere, times the weighted mean of the norms (arXiv 2603.04972; Karcher 1977).

    mu <- cos|T| mu + sin|T| T / |T|, T = sum_i w_i log_mu(u_i), until |T| < tol; on coefficients, in the span
    of the points. Zero tensors have no direction and are left out. Equal models give that model.
    """
    gram = point_gram(inputs)
    norms = np.sqrt(np.diag(gram))
    weight = np.asarray(weight, np.float64) / sum(weight)
    valid = norms > 0
    if not valid.any():
        return _of_points(inputs, np.zeros(len(norms)), True)
    unit = gram[np.ix_(valid, valid)] / np.outer(norms[valid], norms[valid])
    share = weight[valid] / weight[valid].sum()

    def size(c: np.ndarray) -> float:
        return float(np.sqrt(max(0.0, c @ unit @ c)))

    mean = share / size(share) if size(share) >= tol else np.eye(len(share))[0]
    for _ in range(max_iter):
        cosine = np.clip(unit @ mean, -1, 1)
        angle = np.arccos(cosine)
        far = angle >= tol
        pull = np.where(far, share * angle / np.where(far, np.sin(angle), 1), 0)
        tangent = pull - float(pull @ cosine) * mean  # sum of pull_i (u_i - cos_i mean)
        length = size(tangent)
        if length < tol:
            break
        mean = np.cos(length) * mean + np.sin(length) * tangent / length
        mean = mean / size(mean)
    coefficients = np.zeros(len(norms))
    coefficients[valid] = float(weight @ norms) * mean / norms[valid]
    return _of_points(inputs, coefficients, True)


def model_stock(inputs: Inputs, filter_wise: bool = False) -> Piece:
    """Model Stock (Jang et al. 2024, arXiv 2403.19522): towards the mean by how well the deltas agree.

    t = N c / (1 + (N - 1) c) with c the mean cosine between deltas; the update is t * mean(delta). One c per
    tensor, or per row with `filter_wise`. Where the denominator vanishes, t = 0. Equal donors give t = 1.
    """
    axis = -1 if filter_wise and len(inputs.shape) > 1 else None
    gram = axis_gram(inputs, axis)[1:, 1:]
    n = inputs.count
    norms = np.sqrt(np.stack([gram[i, i] for i in range(n)]))
    cosines = [
        np.clip(gram[i, j] / np.maximum(norms[i] * norms[j], 1e-6), -1, 1) for i in range(n) for j in range(i + 1, n)
    ]
    cosine = sum(cosines) / len(cosines)
    below = 1 + (n - 1) * cosine
    t = np.where(np.abs(below) < 1e-6, 0.0, n * cosine / np.where(np.abs(below) < 1e-6, 1.0, below))
    return _mixture(inputs, [0.0, *[t / n] * n], axis)


# ---- what these share ----


def gram_matrix(inputs: Inputs) -> np.ndarray:
    """Inner products of anchor and deltas over the whole tensor: float64 [1 + n, 1 + n]."""
    k = inputs.count + 1
    gram = np.zeros((k, k))
    for _, anchor, deltas in inputs.chunks():
        vectors = [anchor, *deltas]
        for i in range(k):
            for j in range(i, k):
                gram[i, j] += dot(vectors[i], vectors[j])
    return np.triu(gram) + np.triu(gram, 1).T


def axis_gram(inputs: Inputs, axis: int | None) -> np.ndarray:
    """Inner products over the whole tensor (None: [k, k]), per row (-1) or per column (0): [k, k, number]."""
    if axis is None:
        return gram_matrix(inputs)
    row = inputs.shape[-1] if axis == -1 else row_length(inputs.shape)
    k = inputs.count + 1
    gram = np.zeros((k, k, inputs.size // row if axis == -1 else row))
    for start, anchor, deltas in inputs.chunks(rows=row_length(inputs.shape)):
        vectors = [v.reshape(-1, row) for v in (anchor, *deltas)]
        part = slice(start // row, start // row + len(vectors[0])) if axis == -1 else slice(None)
        for i in range(k):
            for j in range(i, k):
                if axis == -1:
                    gram[i, j, part] = (vectors[i].astype(np.float64) * vectors[j]).sum(axis=1)
                else:
                    gram[i, j] += (vectors[i].astype(np.float64) * vectors[j]).sum(axis=0)
                gram[j, i] = gram[i, j]
    return gram


def _points(gram: np.ndarray) -> np.ndarray:
    """Inner products of the points anchor and anchor + delta_i from those of anchor and deltas."""
    shift = np.zeros_like(gram)
    shift[1:] = gram[:1]
    half = gram + shift  # <p_i, (a, d_j)>
    moved = np.zeros_like(gram)
    moved[:, 1:] = half[:, :1]
    return half + moved


def point_gram(inputs: Inputs) -> np.ndarray:
    """Inner products of the points themselves: [1 + n, 1 + n]."""
    return _points(gram_matrix(inputs))


def _arc(first, second, cosine, straight):
    """Coefficients of two points along the great circle; `first` and `second` themselves where it is straight."""
    angle = np.arccos(np.where(straight, 0.0, cosine))
    sine = np.sin(angle)
    return (
        np.where(straight, first, np.sin(first * angle) / sine),
        np.where(straight, second, np.sin(second * angle) / sine),
    )


def _excess(coefficients: Sequence[float], to_one: bool) -> float:
    """By how much the coefficients' sum exceeds 1: exactly 0 where it is 1 in mathematics."""
    return 0.0 if to_one else float(sum(coefficients)) - 1.0


def _of_points(inputs: Inputs, coefficients: np.ndarray, points: bool) -> Piece:
    if points:
        excess = float(coefficients.sum()) - 1.0
        return _mixture(inputs, [0.0 if abs(excess) < 1e-12 else excess, *coefficients[1:]])
    return _mixture(inputs, [0.0, *coefficients])


def _mixture(inputs: Inputs, coefficients: Sequence, axis: int | None = None) -> Piece:
    """coefficients[0] * anchor + sum_i coefficients[i] * delta_i; scalars, or one per row (-1) or column (0)."""
    row = inputs.shape[-1] if axis == -1 else row_length(inputs.shape)
    wide = inputs.wide.type
    spread: Callable = _spread(row, axis, inputs.wide)
    fixed = [wide(c) if np.ndim(c) == 0 else np.asarray(c, inputs.wide) for c in coefficients]

    def piece(start, anchor, deltas):
        total = None
        for c, vector in zip(fixed[1:], deltas):
            vector *= spread(c, start, len(vector))
            total = vector if total is None else np.add(total, vector, out=total)
        if np.ndim(fixed[0]) or fixed[0] != 0:
            term = anchor * spread(fixed[0], start, len(anchor))
            total = term if total is None else np.add(total, term, out=total)
        return np.zeros_like(anchor) if total is None else total

    return piece


def _spread(row: int, axis: int | None, wide: np.dtype) -> Callable:
    def spread(c, start: int, length: int):
        if np.ndim(c) == 0:
            return c
        if axis == -1:
            return np.repeat(c[start // row : (start + length) // row], row)
        return np.tile(c, length // row)

    return spread
