"""Masks applied chunk by chunk: thresholds first, in linear time, then every tensor by itself.

The update is never held as a whole: `Masking` asks for its deltas as often as the ranking needs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from grafting.errors import UserError
from grafting.models.safefiles import TensorFile
from grafting.sensitivity.selection import Cut, cuts

#: (tensor name, step) -> (start, delta) in order; flat, float32 or float64, to be used before the next.
Deltas = Callable[[str, int], Iterable[tuple[int, np.ndarray]]]
_ROWS = 1 << 20  # scores formed at once


class Masking:
    """One estimator and ranking on one update: which directions go, for any number of fractions.

    mask: estimator, rank, per, seed (see masks.Mask; its fraction is not used). shapes: of all tensors of the
    update. sensitivity: the folder (or file) of the estimator, None for random coordinates. UserError for a
    sensitivity that belongs to another model, naming the tensor.
    """

    def __init__(self, mask, shapes: Mapping[str, tuple[int, ...]], deltas: Deltas, sensitivity: Path | None):
        self._mask, self._deltas, self._shapes = mask, deltas, dict(shapes)
        self._file = None if sensitivity is None else open_sensitivity(Path(sensitivity), mask.estimator)
        if mask.estimator == "kfac":
            self.ranked = self._layers()
        else:
            self.ranked = sorted(self._shapes)
            if mask.rank != "random":
                for name in self.ranked:
                    _expect(self._file, name, self._shapes[name])
        self.ranked_names = frozenset(self.ranked)
        sizes = [int(np.prod(self._shapes[name], dtype=np.int64)) for name in self.ranked]
        self._sizes = dict(zip(self.ranked, sizes))
        self._begin = dict(zip(self.ranked, np.cumsum([0, *sizes[:-1]]).tolist()))
        self._cuts: dict[tuple[str | None, float], Cut] = {}
        self._spare = np.empty(0)

    def prepare(self, fractions: Sequence[float]) -> None:
        """Find the thresholds of several fractions in one pass."""
        groups = {None: self.ranked} if self._mask.per == "model" else {name: [name] for name in self.ranked}
        for group, names in groups.items():
            open_ones = [f for f in fractions if (group, f) not in self._cuts]
            size = sum(self._sizes[name] for name in names)
            begin = self._begin[names[0]] if names else 0

            def scan(step: int, names=names, begin=begin) -> Iterator[tuple[int, np.ndarray]]:
                for name in names:
                    for start, scores in self._scores(name, step):
                        yield self._begin[name] - begin + start, scores

            if open_ones:
                found = cuts(scan, size, [round(fraction * size) for fraction in open_ones])
                self._cuts.update({(group, f): cut for f, cut in zip(open_ones, found)})

    def coordinates(self, name: str, start: int, delta: np.ndarray, fraction: float) -> np.ndarray:
        """Diagonal: the chunk of a delta with its masked coordinates at 0, in place."""
        scores = self._coordinate_scores(name, start, delta)
        # by index: few are marked as a rule, and a condition costs several times as much
        delta[np.flatnonzero(self._marks(name, start, scores, fraction))] = 0
        return delta

    def marks(self, name: str, rotated: np.ndarray, fraction: float) -> np.ndarray | None:
        """K-FAC: the entries of the rotated weight U_G^T dW U_A that go, bool of its shape; None if none does."""
        out = np.zeros(self._shapes[name], bool)
        for start, scores in self._layer_scores(name, 1, rotated):
            out.reshape(-1)[start : start + len(scores)] = self._marks(name, start, scores, fraction)
        return out if out.any() else None

    def layer(self, name: str, letter: str, part: str) -> np.ndarray:
        """A factor's "vectors" or "values" of the weight `name`, float64."""
        return read(self._file, f"{name.removesuffix('.weight')}.{letter}.{part}").astype(np.float64)

    # ---- inside ----

    def _marks(self, name: str, start: int, scores: np.ndarray, fraction: float) -> np.ndarray:
        group = None if self._mask.per == "model" else name
        if (group, fraction) not in self._cuts:
            self.prepare([fraction])
        offset = self._begin[name] if group is None else 0
        return self._cuts[group, fraction].marks(offset + start, scores)

    def _scores(self, name: str, step: int) -> Iterator[tuple[int, np.ndarray]]:
        if self._mask.estimator == "kfac":
            yield from self._layer_scores(name, step, None)
        elif self._mask.rank == "fisher_delta2":
            for start, delta in self._deltas(name, 1):
                yield start, self._coordinate_scores(name, start, delta)[::step]
        else:
            size = self._sizes[name]
            for start in range(0, size, _ROWS):
                yield start, self._coordinate_scores(name, start, None, min(_ROWS, size - start))[::step]

    def _coordinate_scores(self, name: str, start: int, delta: np.ndarray | None, count: int = 0) -> np.ndarray:
        count = count if delta is None else len(delta)
        if self._mask.rank == "random":
            return uniforms(self._mask.seed, name, start, count)
        raw = self._file.mapped(name)[start : start + count]
        if self._mask.rank == "fisher":
            return raw  # the order is the same, and the numbers are
        if len(self._spare) < count:
            self._spare = np.empty(count)
        scores = np.square(delta, dtype=np.float64)
        np.copyto(self._spare[:count], raw)  # a product of two types would cost twice as much
        scores *= self._spare[:count]
        return scores

    def _layers(self) -> list[str]:
        names = []
        for module in sorted(n.removesuffix(".A.values") for n in self._file.tensors if n.endswith(".A.values")):
            name = f"{module}.weight"
            if name not in self._shapes:
                raise UserError(
                    f"kfac.safetensors has factors of {module} and the update has no tensor {name}: "
                    "the sensitivity belongs to another model"
                )
            for letter, size in zip("GA", self._shapes[name]):
                _expect(self._file, f"{module}.{letter}.vectors", (size, size))
                _expect(self._file, f"{module}.{letter}.values", (size,))
            names.append(name)
        # the order of modules, which decides between equal scores
        return names

    def _layer_scores(self, name: str, step: int, rotated: np.ndarray | None) -> Iterator[tuple[int, np.ndarray]]:
        module, (rows, columns) = name.removesuffix(".weight"), self._shapes[name]
        if self._mask.rank == "random":
            for start in range(0, rows * columns, _ROWS):
                yield start, uniforms(self._mask.seed, module, start, min(_ROWS, rows * columns - start))[::step]
            return
        g, a = self.layer(name, "G", "values"), self.layer(name, "A", "values")
        if self._mask.rank == "fisher_delta2" and rotated is None:
            rotated = self.rotate(name, self.whole(name))
        block = max(1, _ROWS // columns)
        for row in range(0, rows, block):
            scores = np.outer(g[row : row + block], a)
            if self._mask.rank == "fisher_delta2":
                scores *= np.square(rotated[row : row + block])
            yield row * columns, scores.reshape(-1)[::step]

    def fisher(self, name: str) -> np.ndarray:
        """The diagonal estimate of one tensor, float64, of its shape."""
        return read(self._file, name).astype(np.float64)

    def whole(self, name: str) -> np.ndarray:
        """The delta of one weight, float64, of its shape."""
        whole = np.empty(self._sizes[name])
        for start, delta in self._deltas(name, 1):
            whole[start : start + len(delta)] = delta
        return whole.reshape(self._shapes[name])

    def rotate(self, name: str, delta: np.ndarray) -> np.ndarray:
        """U_G^T dW U_A, float64."""
        return _product(self.layer(name, "G", "vectors").T, delta, self.layer(name, "A", "vectors"))

    def weight(self, name: str, delta: np.ndarray, fraction: float) -> np.ndarray:
        """K-FAC: one weight's delta without its masked directions; the same array if it loses nothing."""
        rotated = self.rotate(name, delta.astype(np.float64))
        marks = self.marks(name, rotated, fraction)
        if marks is None:
            return delta
        # dW - U_G ((1 - M) * R) U_A^T = U_G (M * R) U_A^T, and a layer that loses nothing keeps its bits
        lost = np.where(marks, rotated, 0.0)
        gone = _product(self.layer(name, "G", "vectors"), lost, self.layer(name, "A", "vectors").T)
        return (delta.astype(np.float64) - gone).astype(delta.dtype)


def _product(left: np.ndarray, middle: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left @ middle @ right by torch, whose threads the caller has set: numpy's follow the number of cores."""
    import torch

    one, two, three = (torch.from_numpy(m) for m in (left, middle, right))
    return (one @ two @ three).numpy()


def uniforms(seed: int, name: str, start: int, count: int) -> np.ndarray:
    """Scores of a random ranking by (seed, tensor or layer name, index): float64 in [0, 1)."""
    key = int.from_bytes(hashlib.sha256(f"{seed}|{name}".encode()).digest()[:16], "little")
    generator = np.random.Generator(np.random.Philox(key=key, counter=start // 4))  # four draws per count
    return generator.random(start % 4 + count)[start % 4 :]


def open_sensitivity(path: Path, estimator: str) -> TensorFile:
    """The tensors of a sensitivity payload (folder or file). UserError if it is of another estimator."""
    file = path / f"{estimator}.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"no {estimator}.safetensors in {path.name}: give the payload of a sensitivity job "
            f"with estimator '{estimator}'"
        )
    opened = TensorFile(file)
    for name, stored in opened.tensors.items():
        if stored.form.code not in ("F32", "F64"):
            raise UserError(f"{file}: {name} is {stored.form.name}: a sensitivity is kept in float32 or float64")
    return opened


def read(file: TensorFile, name: str) -> np.ndarray:
    """A whole tensor of a file of 32 or 64 bit floats."""
    stored = file.tensors[name]
    whole = np.empty(stored.size, stored.form.storage)
    file.read_into(name, 0, whole)
    return whole.reshape(stored.shape)


def _expect(file: TensorFile, name: str, shape: tuple[int, ...]) -> None:
    if name not in file.tensors:
        raise UserError(f"{file.path.name} has no tensor {name}: the sensitivity belongs to another model")
    if file.tensors[name].shape != tuple(shape):
        raise UserError(
            f"{file.path.name}: {name} has shape {file.tensors[name].shape}, the update needs {tuple(shape)}: "
            "the sensitivity belongs to another model"
        )
