"""What all sections of the configuration are made of: the strict base class and the types of values."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Rate = Annotated[float, Field(gt=0)]
Scale = Annotated[float, Field(ge=0, le=10)]
Decay = Annotated[float, Field(ge=0)]
#: A name that becomes part of a file name.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,40}$")]


def _distinct(values: list) -> list:
    """Values must differ in the six digits that a candidate's name shows."""
    shown = [repr(v) if isinstance(v, BaseModel) else f"{v:g}" for v in values]
    if len(set(shown)) != len(shown):
        raise ValueError(f"{', '.join(shown)}: two values are equal in six digits; names could not tell them apart")
    return values


Distinct = AfterValidator(_distinct)


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values cannot change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
