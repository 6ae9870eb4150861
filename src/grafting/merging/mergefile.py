"""The recipe that `grafting merge` reads: a small YAML file, checked before anything is opened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from grafting.errors import UserError
from grafting.merging.registry import REQUIRED, find

Embedding = Literal["error", "pad", "crop"]
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Section):
    """A model: a folder, an artefact of the workflow's store, or a model of the Hub at a revision."""

    path: Path | None = None
    store: str | None = None  # "<stage>/<name>-<key>"
    hub: str | None = None
    revision: str | None = None

    @model_validator(mode="after")
    def _one(self):
        if sum(value is not None for value in (self.path, self.store, self.hub)) != 1:
            raise ValueError("give exactly one of path, store and hub")
        if (self.hub is not None) != (self.revision is not None):
            raise ValueError("a model of the Hub needs `hub` and `revision` (the commit that you have seen)")
        return self

    def __str__(self) -> str:
        return str(self.path or self.store or f"{self.hub}@{self.revision}")


def _reference(value: Any) -> Any:
    return {"path": value} if isinstance(value, str | Path) else value


Reference = Annotated[Model, BeforeValidator(_reference)]


class Term(_Section):
    """One model to be merged, its donor (the base unless given), and settings of its own."""

    model: Reference
    donor: Reference | None = None
    weight: Any = None
    density: Any = None
    gamma: Any = None
    epsilon: Any = None
    scale: Any = None  # of operator passthrough

    def settings(self) -> dict[str, Any]:
        """What this entry sets."""
        given = {name: getattr(self, name) for name in ("weight", "density", "gamma", "epsilon", "scale")}
        return {name: value for name, value in given.items() if value is not None}


class MaskFile(_Section):
    """A mask of the update, as in the workflow, with the folder of the sensitivity it reads."""

    estimator: Literal["kfac", "diagonal"]
    rank: Literal["fisher", "fisher_delta2", "random"]
    fraction: float = Field(ge=0, le=1)
    per: Literal["model", "tensor"] = "model"
    seed: int = 0
    sensitivity: Path | None = None


class MergeFile(_Section):
    """theta = base + scale * operator(mask(model_i - donor_i)); see docs/reference/merging.md."""

    operator: str
    models: tuple[Term, ...] = Field(min_length=1)
    base: Reference | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    scale: Any = 1.0
    mask: MaskFile | None = None
    dtype: Literal["as_base", "float32", "float16", "bfloat16", "float64"] = "as_base"
    tokenizer: Reference | None = None
    embedding: Embedding = "error"
    shard_size: Any = "5GB"

    @model_validator(mode="after")
    def _fits(self):
        operator = find(self.operator)
        low, high = operator.models
        n = len(self.models)
        if operator.base == "required" and self.base is None:
            raise ValueError(f"operator {operator.name} needs `base`, the model whose updates are combined")
        if n < low or (high is not None and n > high):
            number = f"exactly {low}" if low == high else f"at least {low}"
            raise ValueError(f"operator {operator.name} takes {number} model(s) besides the base, not {n}")
        known = {**operator.shared, **operator.each}
        for name in self.settings:
            if name not in known:
                raise ValueError(
                    f"settings.{name}: operator {operator.name} has no such setting; it has {sorted(known) or 'none'}"
                )
        for i, term in enumerate(self.models):
            for name in term.settings():
                if name not in operator.each:
                    raise ValueError(
                        f"models.{i}.{name}: operator {operator.name} has no such setting per model; "
                        f"it has {sorted(operator.each) or 'none'}"
                    )
            if term.donor is not None and operator.base != "required":
                raise ValueError(f"models.{i}.donor: operator {operator.name} combines models, not updates")
            for name, default in operator.each.items():
                if default is REQUIRED and name not in term.settings() and name not in self.settings:
                    raise ValueError(f"models.{i}.{name}: operator {operator.name} needs it")
        for name, default in operator.shared.items():
            if default is REQUIRED and name not in self.settings:
                raise ValueError(f"settings.{name}: operator {operator.name} needs it")
        if self.mask is not None and operator.base != "required":
            raise ValueError(f"mask: operator {operator.name} combines models, not updates")
        if (
            self.mask is not None
            and self.mask.sensitivity is None
            and ((self.mask.estimator, self.mask.rank) != ("diagonal", "random"))
        ):
            raise ValueError("mask.sensitivity: the folder of a sensitivity job of the base is needed")
        byte_size(self.shard_size)
        return self

    @classmethod
    def parse(cls, data: Mapping, where: str = "recipe") -> MergeFile:
        """Validate; UserError lists every fault with its key."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            lines = []
            for item in error.errors():
                path = ".".join(map(str, item["loc"]))
                message = item["msg"].removeprefix("Value error, ")
                given = "" if isinstance(item["input"], Mapping | BaseModel) else f" (got {item['input']!r})"
                if item["type"] == "extra_forbidden":
                    message, given = "unknown key", ""
                lines.append(f"{where}: {path + ': ' if path else ''}{message}{given}")
            raise UserError("\n".join(lines)) from None

    def described(self) -> dict:
        """The recipe as plain data without what is left at its default."""
        return self.model_dump(mode="json", exclude_defaults=True)


def byte_size(value: Any) -> int:
    """Bytes of "5GB", "500 MB" or a number. UserError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    size = float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ") if match else 0
    if size < 1:
        raise UserError(f"shard_size must be a size such as 5GB (got {value!r})")
    return int(size)
