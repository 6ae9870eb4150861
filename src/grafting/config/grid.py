"""A grid of training settings beside the learning rate, without a second axis everywhere: a rate that carries them."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

SHORT = {"epochs": "e", "batch_size": "b", "ema_rate": "r"}


class Setting(float):
    """A learning rate with the settings that go with it. Formats as `1e-05.e2.b32`, which is part of a job's name.

    Two are equal if rate and settings are; without settings it equals the plain number.
    """

    changes: dict[str, float]

    def __new__(cls, rate: float, **changes: float) -> Setting:
        made = super().__new__(cls, rate)
        made.changes = {name: value for name, value in changes.items() if value is not None}
        return made

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) + "".join(f".{SHORT[name]}{value:g}" for name, value in self.changes.items())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int | float):
            return NotImplemented
        return float(self) == float(other) and self.changes == getattr(other, "changes", {})

    def __ne__(self, other: object) -> bool:  # float has one of its own
        return not self == other

    def __hash__(self) -> int:
        return hash((float(self), *sorted(self.changes.items()))) if self.changes else hash(float(self))

    def __reduce__(self) -> tuple:
        return _restore, (float(self), self.changes)


def _restore(rate: float, changes: dict) -> Setting:
    return Setting(rate, **changes)


class Grid(BaseModel):
    """Values that are crossed with the learning rates; an empty list leaves the common setting as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    epochs: list[Annotated[int, Field(ge=1)]] = []
    batch_size: list[Annotated[int, Field(ge=1)]] = []
    ema_rate: list[Annotated[float, Field(ge=0, le=1)]] = []


class Gridded(BaseModel):
    """A section with `lrs` and, optionally, a `grid`: after validation `lrs` holds every combination."""

    grid: Grid | None = None

    @model_validator(mode="after")
    def _cross(self) -> Gridded:
        if self.grid is not None:
            axes = [values or [None] for values in self.grid.model_dump().values()]
            names = list(self.grid.model_dump())
            combinations = [dict(zip(names, values, strict=True)) for values in product(*axes)]
            # the section is frozen for users, not while it is made
            self.__dict__["lrs"] = [Setting(rate, **changes) for rate in self.lrs for changes in combinations]
        return self

    @field_serializer("lrs", check_fields=False)
    def _rates(self, values: list[float]) -> list[float]:
        return list(dict.fromkeys(float(value) for value in values))


def applied(spec: dict[str, Any], rate: float, items: int) -> dict[str, Any]:
    """A training spec with the settings that `rate` carries; `items`: training examples, for steps per epoch."""
    changes = getattr(rate, "changes", {})
    spec = {**spec, "lr": float(rate)}
    if "batch_size" in changes:
        spec["batch_size"] = changes["batch_size"]
        spec["micro_batch_size"] = min(spec.get("micro_batch_size") or spec["batch_size"], spec["batch_size"])
    if "epochs" in changes:
        spec["steps"] = -(-changes["epochs"] * items // spec["batch_size"])
    if "ema_rate" in changes:
        objective = spec["objective"]
        spec[objective] = {**spec[objective], "ema_rate": changes["ema_rate"]}
    return spec
