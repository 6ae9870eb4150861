"""Rollouts that a rollout job recorded, for training on them later and elsewhere."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from grafting.errors import UserError
from grafting.rollouts.engine import Rollout


def read_rollouts(folder: Path) -> dict[str, list[Rollout]]:
    """Example id -> its rollouts in the order of their samples; token ids as they were sampled.

    UserError if the folder has none.
    """
    path = Path(folder) / "rollouts.jsonl.gz"
    if not path.is_file():
        raise UserError(f"{path} is missing; let the rollout job run again")
    found: dict[str, list[Rollout]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            found.setdefault(entry["id"], []).append(
                Rollout(entry["tokens"], entry["finish"], entry.get("logprobs"), entry.get("margins"))
            )
    return found
