"""Numbers for readers."""

from __future__ import annotations


def si(number: float) -> str:
    """Three digits and a prefix: 12345 -> 12.3 k."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g}"
