"""What the updates of a study look like, layer by layer: sizes, directions, signs.

spec    {"updates": [{"task", "method", "donor", "lr"}, ...]}, aligned with the inputs
inputs  model, trained[] and donor[]
payload deltas.csv: see `COLUMNS`. Of pairs those are kept that share the task (does another learner or donor move
        the weights in the same direction?) or everything but the task (do two tasks?)
Neither torch nor transformers is imported here.
"""

from __future__ import annotations

import csv
from typing import Any

from grafting.merging.diagnostics import measure
from grafting.merging.engine import Donor, Merge
from grafting.merging.planning import require_fitting
from grafting.merging.registry import find
from grafting.models.safefiles import Checkpoint

#: layer: number, tensor's name or "all"; task, method, donor, lr of the update; other: the same of the other update
#: of a pair, joined by spaces; quantity and value: see `grafting.merging.diagnostics.measure`
COLUMNS = ("layer", "task", "method", "donor", "lr", "other", "quantity", "value")
LABEL = COLUMNS[1:5]


def run(job: Any) -> None:
    """Run one job; see the module's docstring. UserError names a tensor that does not fit."""
    updates = job.spec["updates"]
    reference = Checkpoint(job.input("model"))
    opened = {reference.path.resolve(): reference}

    def checkpoint(path: Any) -> Checkpoint:
        if path.resolve() not in opened:
            opened[path.resolve()] = Checkpoint(path)
            require_fitting(reference, opened[path.resolve()])
        return opened[path.resolve()]

    pairs = zip(job.inputs("trained"), job.inputs("donor"), strict=True)
    donors = [Donor(checkpoint(trained), checkpoint(donor), "") for trained, donor in pairs]
    progress = job.progress(len(reference.names), "deltas", unit="tensor")
    with job.phase("deltas"):
        rows = measure(
            Merge(find("sum"), reference, donors, False), reference, list(range(len(updates))), related(updates),
            lambda _: progress.update(1),
        )  # fmt: skip
    progress.close()
    with (job.out / "deltas.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            other = "" if row["other"] == "" else " ".join(str(updates[row["other"]][name]) for name in LABEL)
            label = [updates[row["model"]][name] for name in LABEL]
            # six digits: what is below depends on the order of sums
            writer.writerow([row["layer"], *label, other, row["quantity"], f"{row['value']:.6g}"])
    job.metrics.update(updates=len(updates), rows=len(rows))


def related(updates: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Pairs of places that differ in the task only, or share the task."""
    keys = [(u["task"], (u["method"], u["donor"], u["lr"])) for u in updates]
    return [
        (i, j) for j in range(len(keys)) for i in range(j) if (keys[i][0] == keys[j][0]) != (keys[i][1] == keys[j][1])
    ]


if __name__ == "__main__":
    from grafting.provenance.runner import main

    main("grafting.merging.deltas:run")
