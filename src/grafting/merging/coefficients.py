"""Settings that differ from tensor to tensor: by name, or along the depth of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from grafting.errors import UserError

_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")


class Depth:
    """Where a tensor stands: 0 in the first layer to 1 in the last; outside layers 0, as in mergekit."""

    def __init__(self, names: Sequence[str]):
        numbers = [int(match[1]) for name in names if (match := _LAYER.search(f".{name}"))]
        self._last = max(numbers, default=0)

    def of(self, name: str) -> float:
        """The depth of a tensor."""
        match = _LAYER.search(f".{name}")
        if match is None:
            return 0.0
        return int(match[1]) / self._last if self._last else 1.0


def resolve(setting: Any, name: str, depth: float, where: str) -> Any:
    """The value of a setting for the tensor `name` at `depth`.

    A number (or word, or truth value) holds everywhere. A list of numbers is a gradient over depth, linear
    between its entries. A list of {match: glob, value: ...} takes the first entry whose glob fits the name;
    one without `match` fits all. UserError if nothing fits or the form is unknown.
    """
    if isinstance(setting, Mapping):
        setting = [setting]
    if not isinstance(setting, list | tuple):
        return setting
    if setting and all(isinstance(entry, Mapping) for entry in setting):
        for entry in setting:
            if set(entry) - {"match", "value"} or "value" not in entry:
                raise UserError(f"{where}: an entry has `value` and, if not for all tensors, `match`; got {entry!r}")
            if fnmatchcase(name, entry.get("match", "*")):
                return resolve(entry["value"], name, depth, where)
        raise UserError(f"{where}: no entry fits tensor {name}; add one without `match` at the end")
    if not setting or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in setting):
        raise UserError(f"{where}: a list holds either numbers (a gradient) or {{match, value}} entries")
    place = depth * (len(setting) - 1)
    low = min(int(place), len(setting) - 1)
    high = min(low + 1, len(setting) - 1)
    share = place - low
    return (1 - share) * setting[low] + share * setting[high]
