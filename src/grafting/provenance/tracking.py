"""Live logging of training through Accelerate's trackers: to watch a run, never to decide anything.

Off unless `tracking` in the configuration names a tracker. What is logged stands in the payload as well
(training.jsonl), so nothing is lost without one, and a tracker that fails is said once and left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grafting.errors import UserError

#: tracker -> packages of which one must be installed
PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}
PROJECT = "grafting"


def check_tracker(kind: str | None) -> None:
    """UserError if the tracker's package is not installed."""
    if kind is not None and not any(find_spec(package) for package in PACKAGES[kind]):
        raise UserError(f"tracking: {kind} is not installed; run `pip install {PACKAGES[kind][0]}`, or tracking: null")


class Tracker:
    """Logs the records of one job. kind: a key of PACKAGES; None logs nothing. folder: of trackers that write files."""

    def __init__(self, kind: str | None, name: str, folder: Path, say: Callable[[str], None]) -> None:
        self.kind, self.name, self.folder, self.say = kind, name, folder, say
        self._tracker: Any = None

    def log(self, label: str, record: dict[str, Any]) -> None:
        """The numbers of one step, as `label/<name>`."""
        if self.kind is None:
            return
        try:
            if self._tracker is None:
                self._tracker = self._start()
            numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
            step = numbers.pop("step")
            self._tracker.log({f"{label}/{name}": value for name, value in numbers.items()}, step=step)
        except Exception as error:  # whatever a service far away may raise: the training is worth more
            self.say(f"warning: {self.kind} does not log ({type(error).__name__}: {error}); going on without it")
            self.kind = None

    def _start(self) -> Any:
        from accelerate.tracking import TensorBoardTracker, WandBTracker

        if self.kind == "tensorboard":
            tracker = TensorBoardTracker(self.name, self.folder)
        else:
            tracker = WandBTracker(PROJECT, name=self.name, dir=str(self.folder))
        tracker.start()
        return tracker

    def close(self) -> None:
        """Write out what the tracker still holds."""
        if self._tracker is not None and self.kind is not None:
            self._tracker.finish()
