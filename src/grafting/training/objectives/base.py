"""What an objective is built from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setup:
    """The job, the model to be trained with its tokenizer, and the task's data folder."""

    job: Any
    model: Any
    tokenizer: Any
    info: dict
    data: Path
    train: list[dict]
    teacher_model: Any = None  # a separate start of the teacher; None: the model as it is now
