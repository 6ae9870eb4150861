"""`grafting compare A B`: what changed between two studies in settings, code and numbers.

A and B are git revisions of this study (with `results/` committed) or folders of results (also published ones).
Differences of accuracies are B minus A; their intervals add the two intervals in square, as for independent
samples: predictions are not part of exported results, so nothing is paired and the intervals are wide.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from grafting.analysis.collect import COUNTS
from grafting.analysis.statistics import combine
from grafting.errors import UserError
from grafting.provenance.why import ABSENT, differences

SCOPE = ["protocol", "style", "method", "task", "suite"]


class Results:
    """Exported results and their records, of a folder or of a git revision."""

    def __init__(self, name: str, root: Path = Path(".")) -> None:
        self.name, self._root = name, root
        self._folder = Path(name) if Path(name).is_dir() else None
        if self._folder is None:
            done = subprocess.run(
                ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"],
                cwd=root,
                capture_output=True,
                check=False,
            )
            if done.returncode:
                raise UserError(f"{name}: neither a folder of results nor a git revision of this repository")
        if self.text("evaluations.csv") is None:
            raise UserError(
                f"{name}: has no {'' if self._folder else 'results/'}evaluations.csv; "
                + (
                    "give the results/ folder of a study"
                    if self._folder
                    else "that revision was committed without results/"
                )
            )

    def _bytes(self, path: str) -> bytes | None:
        """Content of a file by its path from the study's folder; results/ is the folder itself if one was given."""
        if self._folder is not None:
            inside = (
                self._folder / path.removeprefix("results/")
                if path.startswith("results/")
                else self._folder.parent / path
            )
            return inside.read_bytes() if inside.is_file() else None
        done = subprocess.run(
            ["git", "show", f"{self.name}:./{path}"], cwd=self._root, capture_output=True, check=False
        )
        return done.stdout if done.returncode == 0 else None

    def text(self, name: str) -> str | None:
        """Text of a file of the results, gunzipped if need be."""
        content = self._bytes(f"results/{name}")
        if content is None and (packed := self._bytes(f"results/{name}.gz")) is not None:
            content = gzip.decompress(packed)
        return None if content is None else content.decode("utf-8")

    def table(self, name: str) -> pd.DataFrame | None:
        """A CSV file of the results."""
        text = self.text(name)
        return None if text is None else pd.read_csv(io.StringIO(text))

    def settings(self) -> dict[str, Any]:
        """The resolved configuration; {} without one."""
        return yaml.safe_load(self.text("config.resolved.yaml") or "{}")

    def claims(self) -> dict[str, Any]:
        """claims.json; {} without one."""
        return json.loads(self.text("claims.json") or "{}")

    def code(self) -> dict[str, set[str]]:
        """Stage -> code digests of its records; {} where there are no records (published results)."""
        found: dict[str, set[str]] = {}
        for path, content in self._records():
            try:
                sidecar = json.loads(content)
            except ValueError:
                raise UserError(f"{self.name}: {path} is not valid JSON") from None
            if sidecar.get("code"):
                found.setdefault(sidecar["stage"], set()).add(sidecar["code"])
        return found

    def _records(self) -> list[tuple[str, bytes]]:
        if self._folder is not None:
            paths = sorted((self._folder.parent / "provenance").glob("*/*.json"))
            return [(str(p), p.read_bytes()) for p in paths if p.parent.name != "code"]
        listing = subprocess.run(
            ["git", "ls-tree", "-r", "--name-only", self.name, "provenance/"], cwd=self._root, capture_output=True,
            text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        names = [n for n in listing if n.endswith(".json") and not n.startswith("provenance/code/")]
        asked = "".join(f"{self.name}:./{name}\n" for name in names)
        answer = subprocess.run(
            ["git", "cat-file", "--batch"], cwd=self._root, input=asked.encode(), capture_output=True, check=True
        ).stdout
        found, at = [], 0
        for name in names:
            end = answer.index(b"\n", at)
            size = int(answer[at:end].split()[-1])
            found.append((name, answer[end + 1 : end + 1 + size]))
            at = end + size + 2
        return found

    def modules(self, digest: str) -> Mapping[str, str]:
        """Module or library -> hash or version behind a code digest; {} if it was not recorded."""
        content = self._bytes(f"provenance/code/{digest}.json")
        manifest = json.loads(content) if content else {}
        return {**manifest.get("modules", {}), **manifest.get("libraries", {})}

    def accuracies(self) -> pd.DataFrame:
        """Mean, half, n and replicates per protocol, style, method, task and suite, on test data."""
        known = self.table("accuracies.csv")
        if known is not None:
            known = known[known.replicate == "all"]
            return known.assign(half=(known.high - known.low) / 2).set_index(SCOPE)[["accuracy", "half", "n", "seeds"]]
        return _from_counts(self.table("evaluations.csv"))


def _from_counts(table: pd.DataFrame) -> pd.DataFrame:
    """The same from counts alone (results of before there was accuracies.csv): items as independent draws."""
    table = table[(table.split == "test") & table.family.notna() & (table.family != "deployed")]
    last = table.groupby(["protocol", "style", "family", "trained_task"])["stage"].transform("max")
    table = table[table.stage.isna() | (table.stage == last)]
    own = (table.suite == "prior") | (table.trained_task == "all") | (table.task == table.trained_task)
    rows = []
    for (protocol, style, family, task, suite), part in table[own].groupby(
        ["protocol", "style", "family", "trained_task", "suite"]
    ):
        per_seed = part.groupby(["model_seed", "seed"])["accuracy"].mean().to_numpy()
        pooled = part.groupby("task").agg(correct=("correct", "sum"), n=("n", "sum"), one=("n", "max"))
        share = pooled.correct / pooled.n
        items = int(pooled.one.sum())
        variance = float((share * (1 - share) / pooled.one).sum()) / len(pooled) ** 2 + 2 / items**2
        value = combine(float(np.mean(per_seed)), per_seed, variance, items)
        rows.append((protocol, style, family, task, suite, value.mean, value.half, items * value.seeds, value.seeds))
    return pd.DataFrame(rows, columns=[*SCOPE, "accuracy", "half", "n", "seeds"]).set_index(SCOPE)


def compare(before: Results, after: Results, everything: bool = False) -> list[str]:
    """Lines for a person: settings, code, verdicts, accuracies, cost. `everything`: also within the interval."""
    return [
        f"{before.name} -> {after.name}",
        *_section("Settings", _settings(before, after)),
        *_section("Code", _code(before, after)),
        *_section("Verdicts", _verdicts(before.claims(), after.claims())),
        *_section("Test accuracies, points (95 % interval of the difference)", _numbers(before, after, everything)),
        *_section("Cost", _cost(before.table("evaluations.csv"), after.table("evaluations.csv"))),
    ]


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines or ["the same"])]


def _settings(before: Results, after: Results) -> list[str]:
    return [
        f"{key}: {' -> '.join('(absent)' if value is ABSENT else str(value) for value in (old, new))}"
        for key, old, new in differences(before.settings(), after.settings())
    ]


def _code(before: Results, after: Results) -> list[str]:
    old, new = before.code(), after.code()
    if not old or not new:
        return [f"{which.name}: no records at hand, so code cannot be compared"
                for which, found in ((before, old), (after, new)) if not found]  # fmt: skip
    lines = []
    for stage in sorted(old.keys() | new.keys()):
        gone, come = old.get(stage, set()) - new.get(stage, set()), new.get(stage, set()) - old.get(stage, set())
        if not gone and not come:
            continue
        lines.append(f"{stage}: {', '.join(sorted(gone)) or '(none)'} -> {', '.join(sorted(come)) or '(none)'}")
        was: dict[str, str] = {}
        now: dict[str, str] = {}
        for digest in sorted(gone):
            was |= before.modules(digest)
        for digest in sorted(come):
            now |= after.modules(digest)
        if was and now:
            lines += [f"  {name}" for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)]
    return lines


def _verdicts(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    def listed(claims: Mapping[str, Any]) -> dict[str, str]:
        found = {"overall": claims.get("verdict", "(absent)")}
        for c in claims.get("comparisons", []):
            model = "" if c["model_seed"] in (0, None) else f", model {c['model_seed']}"
            name = c.get("name") or c["asks"]
            found[f"{name}: {c['a']} - {c['b']}, {c['protocol']}, {c['style']}, {c['task']}{model}"] = c["verdict"]
        return found

    was, now = listed(old), listed(new)
    return [f"{key}: {was[key]} -> {now[key]}" for key in now if key in was and was[key] != now[key]]


def _numbers(before: Results, after: Results, everything: bool) -> list[str]:
    both = before.accuracies().merge(
        after.accuracies(), how="outer", left_index=True, right_index=True, suffixes=("_a", "_b")
    )
    lines, quiet = [], 0
    for key, row in both.iterrows():
        where = ", ".join(map(str, key))
        if np.isnan(row.accuracy_a) or np.isnan(row.accuracy_b):
            lines.append(f"{where}: only in {after.name if np.isnan(row.accuracy_a) else before.name}")
            continue
        gap, half = 100 * (row.accuracy_b - row.accuracy_a), 100 * float(np.hypot(row.half_a, row.half_b))
        clear = abs(gap) > half
        if not clear and not everything:
            quiet += 1
            continue
        values = f"{100 * row.accuracy_a:.1f} (n = {row.n_a:.0f}) -> {100 * row.accuracy_b:.1f} (n = {row.n_b:.0f})"
        lines.append(f"{where}: {values}, {gap:+.1f} [{gap - half:+.1f}, {gap + half:+.1f}]{' *' if clear else ''}")
    if quiet:
        lines.append(f"{quiet} accuracies differ by nothing or by less than their interval (--all shows them)")
    return lines


def _cost(old: pd.DataFrame, new: pd.DataFrame) -> list[str]:
    def total(table: pd.DataFrame) -> pd.Series:
        tested = table[(table.split == "test") & table.family.notna()]
        return tested.drop_duplicates("point")[list(COUNTS)].sum()

    was, now = total(old), total(new)
    return [
        f"{name}, training of all tested checkpoints: {was[name]:.4g} -> {now[name]:.4g}"
        for name in COUNTS
        if was[name] != now[name]
    ]
