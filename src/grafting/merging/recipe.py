"""A graft as a recipe: what is combined, how, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer, model_validator

from grafting.errors import UserError
from grafting.merging.registry import OPERATORS, REQUIRED, check, find
from grafting.sensitivity.masks import Mask

#: Operators that combine updates; those that combine models have no place in a sweep over scales.
BASED = tuple(name for name, operator in OPERATORS.items() if operator.base == "required")


class Recipe(BaseModel):
    """theta = theta_0 + scale * operator_i(mask(trained_i - donor_i)), i in `terms`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    operator: Literal[BASED] = "graft"
    scale: float = Field(allow_inf_nan=False)  # lambda
    density: float | None = Field(default=None, gt=0, le=1)  # share of entries that TIES keeps
    terms: tuple[int, ...] = (0,)  # indices into the lists `trained` and `donor`
    mask: Mask | None = None
    settings: dict[str, Any] = Field(default_factory=dict)  # of the other operators; one value, or one per term

    @model_validator(mode="after")
    def _fits(self):
        if (self.operator == "ties") != (self.density is not None):
            raise ValueError("density belongs to operator 'ties', which needs it, and to no other (use settings)")
        if self.operator == "graft" and len(self.terms) != 1:
            raise ValueError("operator 'graft' takes exactly one term; use 'sum' or 'ties' for several")
        if not self.terms or len(set(self.terms)) != len(self.terms) or min(self.terms) < 0:
            raise ValueError("terms must be distinct indices from 0 on, at least one")
        low, high = find(self.operator).models
        if len(self.terms) < low or (high is not None and len(self.terms) > high):
            raise ValueError(f"operator '{self.operator}' does not take {len(self.terms)} terms")
        try:
            self.resolved()
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    @model_serializer(mode="wrap")
    def _without_default(self, dump):
        """Recipes without settings are described as they were before there were any."""
        return {key: value for key, value in dump(self).items() if key != "settings" or value}

    @classmethod
    def parse(cls, recipe: Recipe | Mapping) -> Recipe:
        """Validate a recipe. UserError names the key that is wrong."""
        if isinstance(recipe, cls):
            return recipe
        try:
            return cls.model_validate(dict(recipe))
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"recipe{''.join(f'.{part}' for part in first['loc'])}: {first['msg']} (got {first['input']!r})"
            ) from None

    def resolved(self) -> tuple[dict[str, Any], dict[str, list]]:
        """The operator's shared settings, and those per term (one list entry per term). UserError for unknown ones."""
        operator = find(self.operator)
        given = dict(self.settings) if self.density is None else {**self.settings, "density": self.density}
        for name in given:
            if name not in operator.shared and name not in operator.each:
                raise UserError(f"settings.{name}: operator '{self.operator}' has no such setting")
        shared, each = {}, {}
        for name, default in operator.shared.items():
            value = given.get(name, default)
            if value is REQUIRED:
                raise UserError(f"settings.{name}: operator '{self.operator}' needs it")
            shared[name] = check(operator, name, value, "settings")
        for name, default in operator.each.items():
            value = given.get(name, default)
            values = list(value) if isinstance(value, list | tuple) else [value] * len(self.terms)
            if len(values) != len(self.terms):
                raise UserError(f"settings.{name}: {len(values)} values for {len(self.terms)} terms")
            each[name] = [check(operator, name, value, "settings") for value in values]
        return shared, each

    @property
    def effective_mask(self) -> Mask | None:
        """The mask, or None where it removes nothing (fraction 0)."""
        return self.mask if self.mask is not None and self.mask.fraction > 0 else None

    @property
    def is_plain(self) -> bool:
        """Whether it combines one whole update, so that at scale 1 on its own donor it is the trained model."""
        return self.effective_mask is None and self.is_bare

    @property
    def is_bare(self) -> bool:
        """Whether its operator leaves its one update as it is."""
        if len(self.terms) != 1:
            return False
        if self.operator in ("sce", "nearswap", "slerp", "model_stock"):
            return False
        _, each = self.resolved()
        return set(each.get("weight", [1.0])) == {1.0} and set(each.get("density", [1.0])) == {1.0}

    def unscaled(self) -> str:
        """Canonical text of everything but the scale: recipes that share it share their combined update."""
        return self.model_copy(update={"scale": 1.0}).model_dump_json()
