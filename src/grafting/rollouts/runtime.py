"""State of the process that results depend on: threads and global random generators."""

from __future__ import annotations

import random

import numpy as np
import torch


def prepare(threads: int, seed: int) -> None:
    """Set the number of CPU threads and seed Python, NumPy and torch (all devices).

    Threads are part of a job's identity: the order of a sum, and so its last bits, depends on them.
    Nothing is read from the environment.
    """
    torch.set_num_threads(threads)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def device() -> torch.device:
    """Where a job without the training loop computes: the first GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
