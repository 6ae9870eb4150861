"""`claims.yaml`: what is compared with what, as data. A report's verdicts come from here and nowhere else."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from grafting.config.load import read_yaml
from grafting.config.schema import Name, Section
from grafting.errors import UserError

CLAIMS = "claims.yaml"
#: Methods (rows of the result tables) that the default claims name; a study need not have them all.
METHODS = (
    "sft", "sft_scaled", "opsd", "opsd_scaled", "opsd_regraft", "graft", "graft_early", "graft_unmasked",
    "graft_masked", "graft_random", "graft_unscaled", "graft_regraft", "graft_sum",
)  # fmt: skip
FRONTIERS = ("hypervolume", "prior_at_new", "new_at_prior")
Bound = Annotated[float, Field(ge=-1, le=1)]


class Condition(Section):
    """Where a claim is tested. `equal`: what both sides may spend on their search."""

    protocols: list[Literal["single", "sequential", "parallel"]] | None = None
    styles: list[Name] | None = None
    equal: Literal["flops", "cpu_seconds"] | None = None


class Claim(Section):
    """One comparison, left minus right."""

    name: Name
    kind: Literal["claim", "frontier", "equal_cost", "control", "ablation"]
    left: Name
    right: Annotated[list[Name], Field(min_length=1)]
    asks: Annotated[str, Field(min_length=1)]
    statistic: Literal["both", "new", "prior", "hypervolume", "prior_at_new", "new_at_prior"] = "both"
    threshold: Bound = 0.0
    condition: Condition = Condition()

    @field_validator("right", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _sides_differ(self) -> Claim:
        if self.left in self.right:
            raise ValueError(f"compares {self.left} with itself")
        if self.kind == "frontier" and self.statistic not in FRONTIERS:
            raise ValueError(f"a frontier claim needs one of the statistics {', '.join(FRONTIERS)}")
        if self.kind == "claim" and (self.statistic != "both" or self.condition.equal or self.threshold):
            raise ValueError("kind claim is the headline: statistic both, threshold 0, no equal; use another kind")
        return self


class Claims(Section):
    """The whole file."""

    claims: list[Claim]

    @field_validator("claims")
    @classmethod
    def _distinct(cls, claims: list[Claim]) -> list[Claim]:
        names = [claim.name for claim in claims]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two claims are called {', '.join(twice)}")
        return claims


def load_claims(path: Path) -> list[Claim]:
    """The claims of a file. UserError names the claim and the key that is wrong."""
    data = read_yaml(path)
    try:
        return Claims.model_validate(data).claims
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            where = [str(part) for part in fault["loc"]]
            entries = data.get("claims")
            if len(where) > 1 and isinstance(entries, list) and where[1].isdigit():
                entry = entries[int(where[1])]
                name = entry.get("name") if isinstance(entry, dict) else None
                where[1] = f"{where[1]}{f' ({name})' if name else ''}"
            given = "" if isinstance(fault.get("input"), dict | list) else f" (given: {fault.get('input')!r})"
            lines.append(f"  {'.'.join(where)}: {fault['msg'].removeprefix('Value error, ')}{given}")
        raise UserError("\n".join([f"{path}: not valid", *lines])) from None


def check_methods(claims: Iterable[Claim], families: Sequence[str], source: str = CLAIMS) -> None:
    """UserError when a claim names a method that neither this study has nor the default claims know."""
    known = list(dict.fromkeys([*families, *METHODS]))
    for claim in claims:
        for side, names in (("left", [claim.left]), ("right", claim.right)):
            for name in names:
                if name not in known:
                    close = difflib.get_close_matches(name, known, n=1)
                    meant = f"; did you mean {close[0]!r}?" if close else ""
                    raise UserError(
                        f"{source}: claim {claim.name}: {side}: no method is called {name!r}{meant} "
                        f"This study has: {', '.join(families) or 'none'}"
                    )
