"""How methods look, the same in every figure, and how a figure is written.

Colours are those of Okabe and Ito; marker and line style say the same again, so that the figures survive grey
printing. The bytes are a function of the data: no date, fixed ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grafting.analysis.collect import DEPLOYED, Study
from grafting.analysis.statistics import Estimate

BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE, GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#8A8A8A"
)  # fmt: skip
PRETRAINING_DONORS = ((ORANGE, (0, (1, 1)), "P"), (GREEN, (0, (3, 1, 1, 1)), "X"), (SKY, (0, (5, 1, 1, 1, 1, 1)), "*"))
OWN_DONORS = (DEPLOYED, "last", None)  # the update is learned on the model it is added to
RC = {
    "svg.hashsalt": "grafting", "svg.fonttype": "path", "pdf.fonttype": 42, "font.family": "DejaVu Sans",
    "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#E4E4E4", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip
#: family or learner -> (marker, colour, line, size in points, name), in the order of legends
METHODS: dict[str, tuple[str, str, Any, int, str]] = {
    "sft": ("^", RED, "-", 8, "SFT"),
    "sft_scaled": ("v", RED, "--", 8, "SFT, scaled"),
    "opsd": ("s", PURPLE, "-", 7, "OPSD"),
    "opsd_scaled": ("D", PURPLE, "--", 7, "OPSD, scaled"),
    "opsd_regraft": ("d", PURPLE, "--", 8, "OPSD, merged after every task"),
    "graft": ("o", BLUE, "-", 9, "graft"),
    "graft_early": ("P", SKY, "-", 8, "graft, donor before deployed"),
    "graft_unmasked": ("X", BLUE, ":", 7, "graft, no mask"),
    "graft_masked": ("*", BLUE, "-.", 9, "graft, Fisher mask"),
    "graft_random": ("x", GREY, ":", 7, "graft, random mask (control)"),
    "graft_unscaled": ("1", BLUE, ":", 9, "graft, λ = 1"),
    "graft_regraft": ("X", BLUE, "--", 8, "graft, merged after every task"),
    "graft_sum": ("p", BLUE, ":", 8, "graft, sum of updates from one donor"),
    "dft": ("<", GREEN, "-", 7, "DFT"),
    "reinvoke": (">", GREEN, "--", 7, "Re-Invoke"),
    "sft_kl": ("<", ORANGE, "-", 7, "SFT + KL"),
    "sft_l2": (">", ORANGE, "--", 7, "SFT + L2"),
    "replay": ("8", ORANGE, ":", 7, "SFT + replay"),
    "grpo": ("H", GREY, "-", 7, "GRPO"),
    "sdpo": ("8", GREY, "--", 7, "SDPO"),
    "gated_sft": ("<", GREY, ":", 7, "gated SFT"),
}
#: light to dark: an ordered quantity such as lambda
RAMP = ("#6BAED6", "#4292C6", "#2F7EBB", "#2171B5", "#08519C", "#08306B")
RAMP_MARKERS = "vs^DoP"
_OTHERS = (("<", GREEN), (">", ORANGE), ("8", BLACK), ("H", GREEN), ("D", ORANGE))


def method_style(family: str) -> tuple[str, str, Any, int, str]:
    """Marker, colour, line, size and name of a method; one this file does not know has a look of its own by name."""
    if family in METHODS:
        return METHODS[family]
    marker, colour = _OTHERS[sum(map(ord, family)) % len(_OTHERS)]
    return marker, colour, "-.", 7, family.replace("_", " ")


def ramp(place: int, n: int) -> tuple[str, str]:
    """Colour and marker of the place-th of n ordered values."""
    at = round(place * (len(RAMP) - 1) / max(1, n - 1)) if n > 1 else len(RAMP) - 2
    return RAMP[at], RAMP_MARKERS[place % len(RAMP_MARKERS)]


def in_order(families: Sequence[str]) -> list[str]:
    """Families in the usual order, unknown ones after them."""
    found = list(dict.fromkeys(families))
    return [*(f for f in METHODS if f in found), *(f for f in found if f not in METHODS)]


def new_figure(width: float, height: float) -> Any:
    """A figure that keeps its parts from overlapping."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


#: Digits behind the second after the point, of numbers from 1 on: the scale of a glyph is smaller and must stay.
MORE_DIGITS = re.compile(r"(\b[1-9]\d*\.\d\d)\d+")


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Writes name.svg and name.pdf."""
    written = []
    # the layout once, not once per format
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for suffix, metadata in (
        ("svg", {"Date": None, "Creator": None}),
        ("pdf", {"CreationDate": None, "Creator": None, "Producer": None}),
    ):
        written.append(folder / f"{name}.{suffix}")
        figure.savefig(written[-1], metadata=metadata)
    # a hundredth of a point is finer than any screen or printer; the page holds all figures
    drawn = written[0].read_text(encoding="utf-8")
    written[0].write_text(MORE_DIGITS.sub(r"\1", drawn), encoding="utf-8")
    return written


def whiskers(value: Estimate) -> list[list[float]]:
    """Error bar lengths in points of accuracy, cut at 0 and 100 %."""
    return [[100 * (value.mean - max(0.0, value.low))], [100 * (min(1.0, value.high) - value.mean)]]


def donor_order(study: Study) -> list[str]:
    """Donors that the study uses, in the order of the lineage: pretraining checkpoints, base, deployed."""
    used = {str(p.labels["donor"]) for p in study.points if p.labels["donor"] not in (None, "last")}
    lineage: Mapping[str, Any] = study.spec["settings"].get("lineage") or {}
    named = [str(name) for name in lineage.get("donors") or {}]
    counted = sorted((d for d in used if d[:1] == "p" and d[1:].isdigit()), key=lambda d: int(d[1:]))
    order = [*counted, *named, *sorted(used - {*counted, *named, "base", DEPLOYED}), "base", DEPLOYED]
    return [donor for donor in dict.fromkeys(order) if donor in used]


def donor_style(study: Study, donor: str) -> dict[str, Any]:
    """Colour, line and marker of a donor, the same everywhere."""
    if donor in map(str, OWN_DONORS):
        return {"color": RED, "linestyle": "--", "marker": "v"}
    if donor == "base":
        return {"color": BLUE, "linestyle": "-", "marker": "o"}
    donors = [d for d in reversed(donor_order(study)) if d not in ("base", DEPLOYED)]
    colour, line, marker = PRETRAINING_DONORS[(donors.index(donor) if donor in donors else 0) % len(PRETRAINING_DONORS)]
    return {"color": colour, "linestyle": line, "marker": marker}
