"""The table of operators: what each takes, where it comes from, and how to build it for one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grafting.errors import UserError
from grafting.merging import geometry, operators
from grafting.merging.arrays import Inputs, Piece
from grafting.merging.operators import row_length

#: Stands for a setting that has no default.
REQUIRED = object()
RESCALES = ("none", "density", "l1")


@dataclass(frozen=True)
class Operator:
    """One operator. `base`: "required", "optional" or "none" (it is then one of the points, or unused)."""

    name: str
    build: Callable[..., Piece]
    base: str = "required"
    models: tuple[int, int | None] = (1, None)  # besides the base
    shared: Mapping[str, Any] = field(default_factory=dict)  # settings of the merge, with defaults
    each: Mapping[str, Any] = field(default_factory=dict)  # settings of every model, with defaults
    fixed: Mapping[str, Any] = field(default_factory=dict)  # arguments that make a variant
    rows: Callable[[Mapping], bool] = lambda _: False  # whether chunks must be whole rows
    ordered: bool = False  # whether the order in which models are listed has a meaning
    transparent: bool = False  # whether a NaN or infinity of any input always shows in the output
    same: str = "equal models, or zero deltas, give the base"  # the identity that holds bit for bit


def _points(function: Callable) -> Callable:
    """A method that needs no base: of the points if there is none, of the deltas if there is one."""

    def build(inputs: Inputs, points: bool, **settings) -> Piece:
        return function(inputs, points=points, **settings)

    return build


def _lawa(inputs: Inputs, window: int) -> Piece:
    """LAWA (Kaddour 2022, arXiv 2209.14981): the plain mean of the last `window` checkpoints (0: of all)."""
    n = inputs.count + 1
    if not 0 <= window <= n:
        raise UserError(f"operator lawa: window {window} of {n} checkpoints; it must be 0 (all) to {n}")
    last = window or n
    return geometry.linear(inputs, [0.0] * (n - last) + [1.0] * last)


def _ema(inputs: Inputs, decay: float) -> Piece:
    """Exponential moving average along a trajectory (Polyak & Juditsky 1992; Izmailov et al. 2018).

    e_0 = theta_0, e_i = decay * e_{i-1} + (1 - decay) * theta_i, in the order in which the models are listed.
    """
    if not 0 <= decay < 1:
        raise UserError(f"operator ema: decay {decay} is not in [0, 1)")
    n = inputs.count + 1
    weights = [(1 - decay if i else 1.0) * decay ** (n - 1 - i) for i in range(n)]
    return geometry.linear(inputs, weights)


def _passthrough(inputs: Inputs, scale: Sequence[float]) -> Piece:
    """The one model, times a scale of its own."""
    return geometry.linear(inputs, scale, normalize=False)


_W = {"weight": 1.0}
_SPARSE = {**_W, "density": 1.0}
_CUT = {"normalize": False, "rescale": "none"}
_ALL = "equal models give that model"
OPERATORS = {
    o.name: o
    for o in (
        Operator("graft", operators.task_arithmetic, transparent=True, models=(1, 1), each=_W,
                 same="zero delta gives the base"),
        Operator("task_arithmetic", operators.task_arithmetic, transparent=True, shared={"normalize": False}, each=_W),
        Operator("sum", operators.task_arithmetic, transparent=True),
        Operator("magnitude", operators.magnitude, shared=_CUT, each=_SPARSE),
        Operator("ties", operators.ties, shared={**_CUT, "normalize": True}, each=_SPARSE),
        Operator("breadcrumbs", operators.breadcrumbs, shared=_CUT, each={**_SPARSE, "gamma": 0.01}),
        Operator(
            "breadcrumbs_ties",
            operators.breadcrumbs,
            shared=_CUT,
            each={**_SPARSE, "gamma": 0.01},
            fixed={"elect": True},
        ),
        Operator("dare_linear", operators.dare, shared={**_CUT, "rescale": "density", "seed": 0}, each=_SPARSE),
        Operator(
            "dare_ties",
            operators.dare,
            shared={**_CUT, "rescale": "density", "seed": 0},
            each=_SPARSE,
            fixed={"elect": True},
        ),
        Operator(
            "della",
            operators.della,
            shared={"normalize": True, "rescale": "l1", "seed": 0},
            each={**_SPARSE, "epsilon": 0.15},
            fixed={"elect": True},
            rows=lambda _: True,
        ),
        Operator(
            "della_linear",
            operators.della,
            shared={"normalize": False, "rescale": "l1", "seed": 0},
            each={**_SPARSE, "epsilon": 0.15},
            fixed={"elect": False},
            rows=lambda _: True,
        ),
        Operator("sce", operators.sce, shared={"density": 1.0}),
        Operator("nearswap", operators.nearswap, models=(1, 1), shared={"t": REQUIRED}),
        Operator("magmax", operators.magmax, each=_W),
        Operator("slerp", geometry.slerp, transparent=True, models=(1, 1), shared={"t": REQUIRED}),
        Operator("model_stock", geometry.model_stock, models=(2, None), shared={"filter_wise": False},
                 rows=lambda s: s["filter_wise"]),
        Operator("nuslerp", _points(geometry.nuslerp), base="optional", models=(2, 2),
                 shared={"flatten": True, "row_wise": False}, each={"weight": REQUIRED},
                 rows=lambda s: not s["flatten"], same=_ALL),
        Operator("multislerp", _points(geometry.multislerp), base="optional", shared={"normalize": True},
                 each={"weight": REQUIRED}, same=_ALL),
        Operator("linear", geometry.linear, transparent=True, base="none", shared={"normalize": True}, each=_W,
                 same=_ALL + " (normalised)"),
        Operator("karcher", geometry.karcher, base="none", shared={"max_iter": 10, "tol": 1e-5}, each=_W, same=_ALL),
        Operator("lawa", _lawa, base="none", shared={"window": 0}, ordered=True, same=_ALL),
        Operator("ema", _ema, base="none", shared={"decay": REQUIRED}, ordered=True, same=_ALL),
        Operator("passthrough", _passthrough, transparent=True, base="none", models=(1, 1), each={"scale": 1.0},
                 same="scale 1 copies"),
    )
}  # fmt: skip


def find(name: str) -> Operator:
    """The operator of that name; UserError lists what there is."""
    if name not in OPERATORS:
        raise UserError(f"operator '{name}' is not known; there are {', '.join(OPERATORS)}")
    return OPERATORS[name]


def has_points(operator: Operator, based: bool) -> bool:
    """Whether the models are the points themselves, the first of them being the anchor."""
    return operator.base == "none" or (operator.base == "optional" and not based)


def build(operator: Operator, inputs: Inputs, shared: Mapping, each: Mapping[str, Sequence], points: bool) -> Piece:
    """The piece of one tensor. `each`: setting -> one value per model (for points with the anchor's first)."""
    settings = {**shared, **each, **operator.fixed}
    if operator.name == "sum" or (operator.name == "graft" and "weight" not in settings):
        settings["weight"] = [1.0] * inputs.count
    if operator.base == "optional":
        settings["points"] = points
    return operator.build(inputs, **settings)


def rows_of(operator: Operator, shared: Mapping, shape: tuple[int, ...]) -> int:
    """What chunk lengths must be multiples of for this operator and tensor."""
    return max(1, row_length(shape)) if operator.rows(shared) else 1


def check(operator: Operator, setting: str, value: Any, where: str) -> Any:
    """One resolved setting, converted; UserError naming `where` if it does not fit."""

    def refuse(what: str):
        raise UserError(f"{where}: {setting} must be {what} (got {value!r})")

    if setting in ("normalize", "filter_wise", "flatten", "row_wise"):
        return value if isinstance(value, bool) else refuse("true or false")
    if setting == "rescale":
        known = RESCALES if operator.name.startswith(("dare", "della")) else ("none", "l1")
        return value if value in known else refuse("one of " + ", ".join(known))
    if setting in ("seed", "max_iter", "window"):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return value if whole else refuse("a whole number from 0 on")
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse("a number")
    value = float(value)
    if not abs(value) < float("inf"):
        refuse("finite")
    if setting == "density" and not (0 < value <= 1 or (value == 0 and operator.name == "sce")):
        refuse("in (0, 1]")
    if setting == "gamma" and not 0 <= value < 1:
        refuse("in [0, 1)")
    if setting in ("t",) and operator.name == "nearswap" and value < 0:
        refuse("at least 0")
    if setting == "tol" and value <= 0:
        refuse("above 0")
    return value


def table() -> str:
    """The operators as rows of docs/reference/merging.md."""

    def listed(settings: Mapping[str, Any]) -> str:
        def default(value: Any) -> str:
            return " (needed)" if value is REQUIRED else f" = {str(value).lower() if value in (True, False) else value}"

        return ", ".join(f"`{name}`{default(value)}" for name, value in settings.items()) or "–"

    rows = []
    for o in OPERATORS.values():
        low, high = o.models
        number = str(low) if low == high else f"{low} or more"
        order = "; in the order listed" if o.ordered else ""
        rows.append(f"| `{o.name}` | {o.base} | {number}{order} | {listed(o.shared)} | {listed(o.each)} | {o.same} |")
    return "\n".join(rows)
