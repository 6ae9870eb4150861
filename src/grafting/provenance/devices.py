"""One accelerator per job on a machine with several: Snakemake counts them, but does not say which is whose."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

#: `<number of accelerators> <stage> <stage> ...`: set for local runs whose profile has the resource `gpu`.
VARIABLE = "GRAFTING_GPUS"
_claims: list = []


def claim(stage: str, locks: Path) -> str | None:
    """Take an accelerator for this process until it ends; its name, or None if the stage asks for none.

    Narrows CUDA_VISIBLE_DEVICES to it, so it must come before CUDA is first used. A claim is a lock on a file, so
    that of a killed process is free again. Snakemake starts no more jobs than there are accelerators; should all
    be taken nevertheless (another run), this waits for the first.
    """
    count, *stages = os.environ.get(VARIABLE, "0").split()
    if stage not in stages:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (visible.split(",") if visible else [str(n) for n in range(int(count))])[: int(count)]
    locks.mkdir(parents=True, exist_ok=True)
    files = [(name, (locks / f"gpu-{name}").open("w")) for name in names]
    for wait in (fcntl.LOCK_NB, 0):
        for name, file in files:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | wait)
            except BlockingIOError:
                continue
            _claims.append(file)
            os.environ["CUDA_VISIBLE_DEVICES"] = name
            return name
    return None
