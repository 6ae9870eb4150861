"""Pieces of HTML: tables, cells, links."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from grafting.analysis.statistics import ITEMS_ONLY, Estimate
from grafting.analysis.tables import ABSENT
from grafting.analysis.units import si


class Raw(str):
    """Text that is HTML already."""

    __slots__ = ()


#: columns of long texts
WIDE = {"setting", "what it asks, notes", "candidate"}
#: text, or (text, number to sort by; None sorts last)
Cell = str | tuple[str, float | None]


def plain(header: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """A table as it stands."""
    return f'<div class="scroll" tabindex="0"><table>{_head(header, ())}{_body(body, header, ())}</table></div>'


def live(name: str, title: str, header: Sequence[str], body: Sequence[Sequence[Any]], numeric: Collection[str]) -> str:
    """A table that can be sorted by every column and filtered by words. `numeric`: columns of numbers."""
    return (
        f'<p class="filter"><label for="{name}-filter">Filter: <span class="soft">words that a row must '
        "hold</span></label>"
        f'<input id="{name}-filter" type="search" data-table="{name}" autocomplete="off" spellcheck="false">'
        f'<output id="{name}-said" class="soft" aria-live="polite">{len(body)} rows</output></p>'
        f'<div class="scroll" role="region" aria-label="{escape(title)}" tabindex="0"><table class="live" id="{name}">'
        f"{_head(header, numeric)}{_body(body, header, numeric)}</table></div>"
    )


def _head(header: Sequence[str], numeric: Collection[str]) -> str:
    cells = "".join(f'<th scope="col"{_number(h, numeric)}>{escape(h)}</th>' for h in header)
    return f"<thead><tr>{cells}</tr></thead>"


def _body(body: Sequence[Sequence[Any]], header: Sequence[str], numeric: Collection[str]) -> str:
    lines = ("".join(_cell(v, _number(h, numeric)) for v, h in zip(row, header, strict=True)) for row in body)
    return "<tbody>" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</tbody>"


def _number(column: str, numeric: Collection[str]) -> str:
    return ' class="n"' if column in numeric else ' class="wide"' if column in WIDE else ""


def _cell(value: Cell, kind: str) -> str:
    if isinstance(value, tuple):
        text, number = value
        sort = "" if number is None else f"{number:.8g}"
        return f'<td{kind} data-v="{sort}">{html(text)}</td>'
    return f"<td{kind}>{html(value)}</td>"


def html(value: Any) -> str:
    """Escaped, unless it is `Raw`."""
    return str(value) if isinstance(value, Raw) else escape(str(value))


def verdict(name: str) -> Raw:
    """A verdict in its colour; the word says it too."""
    return Raw(f'<span class="verdict {name}">{name}</span>')


def accuracy(value: Estimate | None) -> Cell:
    """93.1 ± 2.0"""
    if value is None:
        return ABSENT, None
    mark = Raw(" <em>i</em>") if value.basis == ITEMS_ONLY else Raw("")
    return Raw(f"{100 * value.mean:.1f} ± {100 * value.half:.1f}{mark}"), value.mean


def percent(value: float | None) -> Cell:
    """93.1"""
    return (ABSENT, None) if value is None else (f"{100 * value:.1f}", float(value))


def gap(value: Mapping[str, Any] | None) -> Cell:
    """+1.2 [-0.3, +2.7], in points"""
    if value is None:
        return ABSENT, None
    mark = Raw(" <em>i</em>") if value["basis"] == ITEMS_ONLY else Raw("")
    text = f"{100 * value['mean']:+.1f} [{100 * value['low']:+.1f}, {100 * value['high']:+.1f}]"
    return Raw(text.replace("-", "−") + mark), value["mean"]


def amount(value: float | None) -> Cell:
    """12.3 k"""
    return ("", None) if value is None else (si(value), float(value))


def code(value: Any) -> str:
    """As code."""
    return f"<code>{escape(str(value))}</code>"


def anchor(job_id: str) -> str:
    """Id of the element that shows a job's record."""
    return "r-" + job_id.replace("/", ".")


def items(values: Sequence[str]) -> str:
    """A list of texts."""
    return "<ul>" + "".join(f"<li>{html(value)}</li>" for value in values) + "</ul>"
