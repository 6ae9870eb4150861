"""What every operator works on: an anchor, the deltas from it, and how to go through them in chunks.

All merges are written as anchor + update. The anchor is the deployed model, or the first model in canonical
order where a method has no base; a delta is trained - donor, the donor being the anchor unless a recipe names
another. So a delta of zero gives the anchor back, bit for bit, whatever the operator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

#: Elements per chunk: the buffers of a chunk stay in cache. It is part of the results: partial
#: sums are per chunk, so that they depend neither on sharding nor on the number of threads.
CHUNK = 1 << 17

#: piece(start, anchor, deltas) -> update; all flat, wide, of one chunk; the deltas may be overwritten.
Piece = Callable[[int, np.ndarray, list[np.ndarray]], np.ndarray]


class Inputs:
    """One tensor of the anchor and of every donor. `shape`, `size`, `wide` (dtype of the arithmetic), `count`."""

    shape: tuple[int, ...]
    wide: np.dtype
    count: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def chunk_length(self, rows: int = 1) -> int:
        """Elements per chunk, a multiple of `rows` (the length of a row, where an operator needs whole ones)."""
        return max(rows, CHUNK // rows * rows)

    def chunks(
        self,
        which: Sequence[int] | None = None,
        rows: int = 1,
        step: int = 1,
        part: tuple[int, int] | None = None,
    ) -> Iterator[tuple[int, np.ndarray, list[np.ndarray]]]:
        """(start, anchor, deltas of the donors `which`), wide and flat, to be used before the next is asked for.

        step: only every so many-th element of each chunk. part: only the elements from one index to another.
        """
        raise NotImplementedError

    def sample(self, which: Sequence[int]) -> list[np.ndarray]:
        """64 runs of the deltas of the donors `which`, evenly over the tensor: wide [64, length] each.

        size^(2/3) elements: sorting more would cost what a narrower search for a threshold saves.
        """
        runs, length = 64, -(-int(1.4 * self.size ** (2 / 3)) // 64)
        found = [np.empty((runs, length), self.wide) for _ in which]
        stride = (self.size - length) // (runs - 1)
        for run in range(runs):
            for start, _, deltas in self.chunks(which, part=(run * stride, run * stride + length)):
                for rows, delta in zip(found, deltas):
                    rows[run, start - run * stride :][: len(delta)] = delta
        return found

    def stream(self, donor: int, seed: int) -> Uniforms:
        """The random numbers of one donor for this tensor."""
        raise NotImplementedError


class Arrays(Inputs):
    """Tensors in memory: `anchor` and `deltas` are arrays of one shape, float32 or float64."""

    def __init__(self, anchor: np.ndarray, deltas: Sequence[np.ndarray], name: str = "", identities=None):
        self.shape, self.wide, self.count = anchor.shape, anchor.dtype, len(deltas)
        self._anchor, self._deltas = anchor.reshape(-1), [delta.reshape(-1) for delta in deltas]
        self._name, self._identities = name, identities or [str(i) for i in range(len(deltas))]

    def chunks(self, which=None, rows=1, step=1, part=None):
        """See `Inputs`. The deltas are copies."""
        length = self.chunk_length(rows)
        donors = range(self.count) if which is None else which
        first, last = part or (0, self.size)
        for start in range(first, last, length):
            here = slice(start, min(start + length, last), step)
            yield start, self._anchor[here], [self._deltas[i][here].copy() for i in donors]

    def stream(self, donor, seed):
        """See `Inputs`."""
        return Uniforms(seed, self._identities[donor], self._name)


class Uniforms:
    """Random numbers by (seed, donor's identity, tensor name, index): the same in whatever order they are drawn."""

    def __init__(self, seed: int, identity: str, name: str):
        key = hashlib.sha256(f"{seed}|{identity}|{name}".encode()).digest()
        self._bits = np.random.PCG64(np.random.SeedSequence(int.from_bytes(key[:16], "little")))
        self._begin, self._generator = self._bits.state, np.random.Generator(self._bits)
        self._at = 0

    def at(self, start: int, count: int) -> np.ndarray:
        """float32 [count] in [0, 1), those of the indices from `start` on."""
        self._seek(start // 2)  # one draw of 64 bits makes two float32
        self._at = -1
        drawn = self._generator.random(count + start % 2, dtype=np.float32)
        return drawn[start % 2 :]

    def marks(self, start: int, count: int, sixteenths: int) -> np.ndarray:
        """uint8 [count], 1 with probability sixteenths / 2^16 each, 0 < sixteenths < 2^16; from index `start` on.

        One draw of 64 bits serves 64 entries once for every binary digit of the probability: from the last digit on,
        OR with a fresh bit where the digit is 1, AND where it is 0. One half takes a bit an entry, no number 16.
        """
        digits = [bool(sixteenths >> i & 1) for i in range(16)]
        digits = digits[digits.index(True) :]
        first, groups = start // 64, -(-(start % 64 + count) // 64)
        self._seek(first * len(digits))
        self._at = (first + groups) * len(digits)
        draws = self._bits.random_raw(groups * len(digits)).reshape(groups, len(digits))
        found = draws[:, 0]
        for digit, fresh in zip(digits[1:], draws.T[1:], strict=True):
            found = found | fresh if digit else found & fresh
        bits = np.unpackbits(found.astype("<u8").view(np.uint8), bitorder="little")
        return bits[start % 64 : start % 64 + count]

    def _seek(self, draw: int) -> None:
        if draw != self._at:
            self._bits.state = self._begin
            self._bits.advance(draw)


def apply(inputs: Inputs, piece: Piece, rows: int = 1) -> np.ndarray:
    """The whole update of a tensor in memory, wide, of its shape."""
    update = np.empty(inputs.size, inputs.wide)
    for start, anchor, deltas in inputs.chunks(rows=rows):
        update[start : start + len(anchor)] = piece(start, anchor, deltas)
    return update.reshape(inputs.shape)


_COLUMNS = 4096


def dot(a: np.ndarray, b: np.ndarray | None = None) -> float:
    """sum a_i b_i of one chunk (sum a_i without b): runs of 4096 in its own dtype (too short for BLAS to use
    threads), float64 above.

    Where float32 would overflow or vanish, float64 throughout.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result = _runs(a, b)
    if a.dtype == np.float32 and not 1e-30 < abs(result) < np.inf:
        result = _runs(a.astype(np.float64), None if b is None else b.astype(np.float64))
    return result


def _runs(a: np.ndarray, b: np.ndarray | None) -> float:
    whole = len(a) // _COLUMNS * _COLUMNS
    first, last = a[:whole].reshape(-1, _COLUMNS), a[whole:]
    if b is None:
        ones = np.ones(_COLUMNS, a.dtype)
        return float(np.vecdot(first, ones).sum(dtype=np.float64)) + float(np.vecdot(last, ones[: len(last)]))
    runs = np.vecdot(first, b[:whole].reshape(-1, _COLUMNS))
    return float(runs.sum(dtype=np.float64)) + float(np.vecdot(last, b[whole:]))


def keep(values: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """values where marks, else +0, in place: an integer AND, several times as fast as a branch."""
    ones = np.negative(marks.view(np.int8))  # -1 has all bits set, in wider integers too
    bits = values.view(f"i{values.itemsize}")
    bits &= ones.astype(bits.dtype)
    return values


def add_up(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum in the order of the list, in a new array."""
    if len(parts) == 1:
        return parts[0].copy()
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total
