"""Floating-point formats of stored weights, without torch: widening, rounding once, finding what is broken.

numpy has no bfloat16, so such tensors are handled as their 16 bits: widening shifts them into the upper half
of a float32, rounding is to nearest even by integer arithmetic, as in hardware and in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """One stored format: its name in safetensors and in recipes, and how it lies in memory."""

    code: str  # in safetensors headers
    name: str  # in recipes and in config.json
    storage: np.dtype  # what a buffer of it is read as
    wide: np.dtype  # the arithmetic on it: one precision wider than itself (float64 has nothing wider here)
    infinity: int  # the bits of +infinity, above which lie the NaNs

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.storage.itemsize

    @property
    def largest(self) -> float:
        """The largest finite number, rounded down to a power of two."""
        return {"BF16": 2.0**127, "F16": 2.0**15, "F32": 2.0**127, "F64": 2.0**1023}[self.code]


_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
FORMATS = {
    f.code: f
    for f in (
        Format("BF16", "bfloat16", np.dtype(np.uint16), _SINGLE, 0x7F80),
        Format("F16", "float16", np.dtype(np.float16), _SINGLE, 0x7C00),
        Format("F32", "float32", _SINGLE, _DOUBLE, 0x7F80_0000),
        Format("F64", "float64", _DOUBLE, _DOUBLE, 0x7FF0_0000_0000_0000),
    )
}
BY_NAME = {f.name: f for f in FORMATS.values()}


def largest_magnitude(raw: np.ndarray, form: Format) -> float:
    """The largest magnitude in a contiguous buffer, infinity if one is NaN or infinite; two integer maxima, no
    temporary.

    As signed integers the largest positive numbers are the largest, as unsigned ones the negative.
    """
    if raw.size == 0:
        return 0.0
    sign = 1 << (8 * form.itemsize - 1)
    positive = max(int(raw.view(f"i{form.itemsize}").max()), 0)
    negative = max(int(raw.view(f"u{form.itemsize}").max()) - sign, 0)
    if (bits := max(positive, negative)) >= form.infinity:
        return float("inf")
    return float(widen(np.array([bits], f"u{form.itemsize}").view(form.storage), form, np.empty(1, form.wide))[0])


def is_finite(raw: np.ndarray, form: Format) -> bool:
    """Whether no element of a contiguous buffer is NaN or infinite."""
    return largest_magnitude(raw, form) < float("inf")


def has_negative_zero(raw: np.ndarray, form: Format) -> bool:
    """Whether an element is -0, the smallest of all bit patterns read as signed integers."""
    return raw.size > 0 and int(raw.view(f"i{form.itemsize}").min()) == -(1 << (8 * form.itemsize - 1))


def widen(raw: np.ndarray, form: Format, out: np.ndarray) -> np.ndarray:
    """The numbers of a buffer in the dtype of `out` (float32 or float64), written there; exact when not narrower."""
    if form.code != "BF16":
        np.copyto(out, raw, casting="same_kind")
        return out
    if out.dtype == _SINGLE:
        bits = out.view(np.uint32)
        np.copyto(bits, raw)
        np.left_shift(bits, 16, out=bits)
        return out
    np.copyto(out, widen(raw, form, np.empty(raw.size, np.float32)))
    return out


def narrow(wide: np.ndarray, form: Format, out: np.ndarray, spare: np.ndarray | None = None) -> np.ndarray:
    """Round to nearest even into `out` (storage of `form`). `wide` is float32 or float64.

    Overflow gives infinity: the caller checks with `is_finite`. float64 to bfloat16 is rounded to odd in
    between, so that it is one rounding there too. `spare`: uint32, as long, saves an allocation.
    """
    if form.code != "BF16":
        with np.errstate(over="ignore"):
            np.copyto(out, wide, casting="same_kind")
        return out
    if wide.dtype == _DOUBLE:
        wide = _to_odd(wide)
    bits = wide.view(np.uint32)
    sums = np.right_shift(bits, 16, out=spare)
    sums &= 1
    sums += 0x7FFF
    sums += bits
    sums >>= 16
    np.copyto(out, sums, casting="unsafe")  # with `out=` of another type the shift would be buffered
    return out


def _to_odd(wide: np.ndarray) -> np.ndarray:
    """float64 as float32, inexact results to the neighbour with an odd last bit: rounding again is then exact."""
    with np.errstate(over="ignore"):
        near = wide.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32)
    even = (bits & 1) == 0
    # the odd neighbour on the true value's side: one step in magnitude, up or down
    bits[even & (np.abs(back) < np.abs(wide))] += 1
    bits[even & (np.abs(back) > np.abs(wide))] -= 1
    return near
