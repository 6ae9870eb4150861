"""One accelerator per job on a machine with several: Snakemake counts them, but does not say which is whose."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from grafting.errors import UserError

#: `<number of accelerators> <stage> <stage> ...`: set for local runs whose profile has the resource `gpu`.
VARIABLE = "GRAFTING_GPUS"
_claims: list = []


def claim(stage: str, locks: Path, wanted: int = 1) -> str | None:
    """Take accelerators for this process until it ends; their names with commas, or None if the stage asks for none.

    Narrows CUDA_VISIBLE_DEVICES to them, so it must come before CUDA is first used. A claim is a lock on a file, so
    that of a killed process is free again. Snakemake starts no more jobs than there are accelerators; should all
    be taken nevertheless (another run), this waits, with nothing in hand, until enough are free.
    """
    count, *stages = os.environ.get(VARIABLE, "0").split()
    if stage not in stages:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (visible.split(",") if visible else [str(n) for n in range(int(count))])[: int(count)]
    if wanted > len(names):
        raise UserError(f"training.processes: {wanted} need an accelerator each; this run has {len(names)}")
    locks.mkdir(parents=True, exist_ok=True)
    while True:
        taken = {}
        for name in names:
            file = (locks / f"gpu-{name}").open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            taken[name] = file
            if len(taken) == wanted:
                _claims.extend(taken.values())
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(taken)
                return os.environ["CUDA_VISIBLE_DEVICES"]
        for file in taken.values():
            file.close()
        time.sleep(1)
