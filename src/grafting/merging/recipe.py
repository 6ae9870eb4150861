"""A graft as a recipe: what is combined, how, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grafting.errors import UserError
from grafting.sensitivity.masks import Mask


class Recipe(BaseModel):
    """theta = theta_0 + scale * combine_i(mask(trained_i - donor_i)), i in `terms`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    operator: Literal["graft", "sum", "ties"] = "graft"
    scale: float = Field(allow_inf_nan=False)  # lambda
    density: float | None = Field(default=None, gt=0, le=1)  # share of entries that TIES keeps
    terms: tuple[int, ...] = (0,)  # indices into the lists `trained` and `donor`
    mask: Mask | None = None

    @model_validator(mode="after")
    def _fits(self):
        if (self.operator == "ties") != (self.density is not None):
            raise ValueError("density belongs to operator 'ties', which needs it, and to no other")
        if self.operator == "graft" and len(self.terms) != 1:
            raise ValueError("operator 'graft' takes exactly one term; use 'sum' or 'ties' for several")
        if not self.terms or len(set(self.terms)) != len(self.terms) or min(self.terms) < 0:
            raise ValueError("terms must be distinct indices from 0 on, at least one")
        return self

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

    @property
    def effective_mask(self) -> Mask | None:
        """The mask, or None where it removes nothing (fraction 0)."""
        return self.mask if self.mask is not None and self.mask.fraction > 0 else None

    def unscaled(self) -> str:
        """Canonical text of everything but the scale: recipes that share it share their combined update."""
        return self.model_copy(update={"scale": 1.0}).model_dump_json()
