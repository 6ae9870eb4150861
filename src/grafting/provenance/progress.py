"""Progress of long work as plain lines with rate and time left, on the terminal and in the job's log alike.

Several jobs share one terminal, so a bar that redraws itself would be torn to pieces: one line every
few seconds, with the job's name in front, stays readable everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def clock(seconds: float) -> str:
    """12 s, 3 min 20 s, 2 h 05 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


class Progress:
    """Counts `total` units of work; `say` receives a line at most every `interval` seconds."""

    def __init__(self, total: int, label: str, unit: str, say: Callable[[str], None], interval: float = 10.0) -> None:
        self.total, self.label, self.unit, self.say, self.interval = total, label, unit, say, interval
        self.done = self.found = 0
        self.started = self.spoken = time.monotonic()

    def skip(self, n: int) -> None:
        """`n` units were done by an interrupted run: they count, but say nothing about the rate."""
        self.done += n
        self.found += n

    def update(self, n: int = 1, **shown: float) -> None:
        """`n` units are done; `shown` are numbers to print beside (loss, accuracy)."""
        self.done += n
        now = time.monotonic()
        if now - self.spoken < self.interval:
            return
        self.spoken = now
        rate = (self.done - self.found) / (now - self.started)
        left = clock((self.total - self.done) / rate) if rate > 0 else "?"
        numbers = "".join(f", {key} {value:.4g}" for key, value in shown.items())
        self.say(f"{self.label}: {self.done}/{self.total} {self.unit}s, {rate:.3g}/s, {left} left{numbers}")

    def close(self) -> None:
        """Say the last line, if any was said before."""
        elapsed = time.monotonic() - self.started
        if elapsed >= self.interval:
            self.say(f"{self.label}: {self.done}/{self.total} {self.unit}s in {clock(elapsed)}")
