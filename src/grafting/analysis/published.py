"""This run against what the maintainers obtained (`published/<preset>/`).

Every accuracy, count, token and FLOP figure is compared; seconds, memory and dates never are. A test accuracy
is correct / n, so it is compared as `correct`, in items, and not counted a second time. A difference is a
notice, not a failure: another CPU may round otherwise.
"""

from __future__ import annotations

import gzip
import io
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from grafting.analysis.collect import CLOCK, COUNTS
from grafting.errors import UserError

TABLE = "evaluations.csv"
SMALL = (
    "report.html",
    "summary.md",
    "claims.json",
    "metrics.json",
    "selections.csv",
    "accuracies.csv",
    "sequence.csv",
    "config.resolved.yaml",
)
FOLDERS = ("figures/*.svg", "tables/*.tex")
LARGEST = 1 << 20  # bytes of a table that is committed as it is; larger ones are gzipped
MEASURED = {
    TABLE: ("n", "correct", *COUNTS),
    "selections.csv": ("chosen", "score", "new", "prior"),
}
IGNORED = {
    TABLE: ("point", "accuracy", *CLOCK),
    "selections.csv": (),
}  # a point's key moves with the code, not with the result; accuracy follows from correct and n
# What another CPU's rounding may turn in answers:
ITEM_TOLERANCE, ITEM_SHARE = 2, 0.02  # items of `correct`, and share of n; the larger counts
MEAN_TOLERANCE = 0.05  # absolute, for accuracies that come without their counts (selections.csv)
COUNT_TOLERANCE = 0.02  # relative: tokens and FLOPs follow the length of the answers
SHOWN = 20


@dataclass
class Comparison:
    """Counts over all compared figures. `only_here` and `only_published` count rows without a partner."""

    published: Path
    present: bool = True
    identical: int = 0
    within: int = 0
    different: int = 0
    only_here: int = 0
    only_published: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """True when nothing differs by more than the tolerance and every row has its partner."""
        return self.present and not (self.different or self.only_here or self.only_published)

    def note(self, where: str, name: str, ours: Any, theirs: Any, n: int = 0) -> None:
        """Files one pair of figures; n is the number of items behind a `correct`."""
        if ours == theirs or (_missing(ours) and _missing(theirs)):
            self.identical += 1
        elif _close(name, ours, theirs, n):
            self.within += 1
        else:
            self.different += 1
            self.differences.append(f"{where}: {name} {ours} here, {theirs} published")

    def render(self) -> str:
        """A few lines for a person."""
        if not self.present:
            return (
                f"Nothing is published for this preset yet ({self.published} is not there), so there is "
                "nothing to compare with. That is fine: the results stand on their own."
            )
        total = self.identical + self.within + self.different
        lines = [
            f"Compared every accuracy, count, token and FLOP figure with {self.published}: "
            f"{self.identical} of {total} figures identical, {self.within} within tolerance, "
            f"{self.different} different.",
            f"Accuracy = correct / n is compared by its correct items. Tolerance: {ITEM_TOLERANCE} items or "
            f"{100 * ITEM_SHARE:g} % of n, whichever is larger; {MEAN_TOLERANCE:g} for mean validation accuracies; "
            f"{100 * COUNT_TOLERANCE:g} % for tokens and FLOPs.",
        ]
        if self.only_here or self.only_published:
            lines.append(f"Rows only here: {self.only_here}; only published: {self.only_published}.")
        lines += [f"  {line}" for line in self.differences[:SHOWN]]
        if len(self.differences) > SHOWN:
            lines.append(f"  and {len(self.differences) - SHOWN} more")
        if not self.agrees:
            lines.append("A difference is a notice, not a fault: another configuration or CPU gives other figures.")
        return "\n".join(lines)


def compare(results: Path, published: Path) -> Comparison:
    """Compares `results` with `published`. UserError when `results` has no tables."""
    results, published = Path(results), Path(published)
    comparison = Comparison(published)
    if _find(published, TABLE) is None:
        comparison.present = False
        return comparison
    for name in MEASURED:
        ours, theirs = _read(results, name), _read(published, name)
        if ours is None:
            raise UserError(f"{results / name} is not there; let the report be made first (snakemake report)")
        if theirs is not None:
            _compare_tables(name, ours, theirs, comparison)
    return comparison


def write_published(results: Path, published: Path) -> list[Path]:
    """Copies the files that are committed to `published`; a table over 1 MiB is gzipped (no time inside)."""
    results, published = Path(results), Path(published)
    source = results / TABLE
    if not source.is_file():
        raise UserError(f"{source} is not there; let the report be made first (snakemake report)")
    (published / "figures").mkdir(parents=True, exist_ok=True)
    for old in (published / TABLE, published / f"{TABLE}.gz"):
        old.unlink(missing_ok=True)
    content = source.read_bytes()
    target = published / TABLE
    if len(content) > LARGEST:
        target = published / f"{TABLE}.gz"
        packed = io.BytesIO()
        with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as file:
            file.write(content)
        content = packed.getvalue()
    target.write_bytes(content)
    written = [target]
    for pattern in FOLDERS:
        for old in published.glob(pattern):
            old.unlink()
    names = [*SMALL, *(p.relative_to(results).as_posix() for pattern in FOLDERS for p in sorted(results.glob(pattern)))]
    for name in names:
        if (results / name).is_file():
            (published / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(results / name, published / name)
            written.append(published / name)
    return written


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read(folder: Path, name: str) -> pd.DataFrame | None:
    path = _find(folder, name)
    return None if path is None else pd.read_csv(path)


def _compare_tables(name: str, ours: pd.DataFrame, theirs: pd.DataFrame, comparison: Comparison) -> None:
    """Rows are matched by their labels; a label that repeats is matched in order."""
    mine, other = _index(name, ours), _index(name, theirs)
    comparison.only_here += len(mine.keys() - other.keys())
    comparison.only_published += len(other.keys() - mine.keys())
    for key, row in mine.items():
        if key in other:
            where = f"{name} [{' '.join(part for part in key if part != '')}]"
            for column in MEASURED[name]:
                if column in row and column in other[key]:
                    comparison.note(where, column, row[column], other[key][column], row.get("n", 0))


def _index(name: str, frame: pd.DataFrame) -> dict[tuple[str, ...], Mapping[str, Any]]:
    labels = [c for c in frame.columns if c not in MEASURED[name] and c not in IGNORED[name]]
    keys = frame[labels].astype(object).where(frame[labels].notna(), "").map(_text)
    keys["#"] = keys.groupby(labels, sort=False).cumcount().map(lambda i: f"#{i}" if i else "")
    rows = frame[[c for c in MEASURED[name] if c in frame.columns]].to_dict("records")
    return dict(zip(keys.itertuples(index=False, name=None), rows, strict=True))


def _text(value: Any) -> str:
    """1, 1.0 and "1" are one label."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _missing(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _close(name: str, ours: Any, theirs: Any, n: int) -> bool:
    if name == "correct":
        return abs(ours - theirs) <= max(ITEM_TOLERANCE, ITEM_SHARE * n)
    if name in COUNTS:
        return math.isclose(ours, theirs, rel_tol=COUNT_TOLERANCE)
    if name in ("score", "new", "prior"):
        return abs(ours - theirs) <= MEAN_TOLERANCE
    return False
