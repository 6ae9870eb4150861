"""From the payloads of a study to one list of points and one tidy table."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grafting.analysis.statistics import Answers, Key
from grafting.errors import UserError

LABELS = (
    "protocol", "style", "family", "method", "task", "model_seed", "seed", "stage",
    "donor", "scale", "mask", "lr", "operator",
)  # fmt: skip
COUNTS = ("tokens_generated", "tokens_forwarded", "tokens_backpropagated", "flops")
CLOCK = (
    "cpu_seconds",
    "wall_seconds",
    "peak_memory_bytes",
)  # differ from run to run: always the last columns
DEPLOYED, FRONTIER = "deployed", "frontier"  # families that are no method
ALL = "all"


@dataclass(frozen=True)
class Point:
    """One evaluated checkpoint on one split. `cost` is that of the training jobs behind it, summed."""

    folder: Path
    key: str
    split: str
    labels: Mapping[str, Any]
    scores: Sequence[Mapping[str, Any]]
    trained: tuple[str, ...]  # keys of the training jobs
    cost: Mapping[str, float]
    pool: dict[tuple[Key, ...], tuple[Key, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def answers(self) -> dict[str, Answers]:
        """Suite -> 1.0 per item answered correctly, else 0.0, from the predictions of the point."""
        suites = {score["task"]: score["suite"] for score in self.scores}
        found: dict[str, dict[Key, float]] = {suite: {} for suite in suites.values()}
        path = self.folder / f"{self.key}.jsonl.gz"
        try:
            # all lines at once: twice as fast, and a study has thousands of such files
            lines = gzip.decompress(path.read_bytes()).decode("utf-8").rstrip("\n").replace("\n", ",")
            for row in json.loads(f"[{lines}]"):
                found[suites[row["task"]]][row["task"], row["id"]] = float(row["correct"])
        except FileNotFoundError:
            raise _absent(path) from None
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{_shown(path)}: damaged predictions ({error}); {MEND}") from None
        result = {}
        for suite, values in found.items():
            n = sum(score["n"] for score in self.scores if score["suite"] == suite)
            if len(values) != n:
                raise UserError(f"{_shown(path)}: {len(values)} items of the {suite} suite, {n} in its record; {MEND}")
            keys = tuple(sorted(values))
            keys = self.pool.setdefault(keys, keys)
            result[suite] = Answers(keys, np.array([values[key] for key in keys]))
        return result

    @property
    def record(self) -> str:
        """Id of the evaluation that holds this point, which is also where its sidecar lies."""
        return f"evaluate/{self.folder.name}"

    def tasks(self) -> list[str]:
        """New tasks that count for this point: the one it was trained on, or all after several."""
        own = self.labels["task"]
        return [s["task"] for s in self.scores if s["suite"] == "new" and own in (ALL, None, s["task"])]

    def accuracy(self, suite: str, tasks: Iterable[str] | None = None) -> float | None:
        """Mean over the suite's tasks (skills) of their accuracy; None if it has none of them."""
        wanted = self.tasks() if tasks is None and suite == "new" else tasks
        values = [
            s["correct"] / s["n"]
            for s in self.scores
            if s["suite"] == suite and (wanted is None or s["task"] in wanted)
        ]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Selected:
    """What validation chose for one family, with its test points (per seed, and per stage of a sequence)."""

    labels: Mapping[str, Any]  # family, protocol, style, task, model_seed
    choice: Mapping[str, Any]
    points: tuple[Point, ...]
    searched: tuple[str, ...]  # keys of the training jobs behind all candidates, over all seeds
    search_cost: Mapping[str, float]
    record: str = ""  # id of the selection

    @property
    def final(self) -> tuple[Point, ...]:
        """The test points of the last stage; all points where there are no stages."""
        last = max((p.labels["stage"] or 0 for p in self.points), default=0)
        return tuple(p for p in self.points if (p.labels["stage"] or 0) == last)


@dataclass(frozen=True)
class Frontier:
    """The points of several methods that dominate most on validation data, on test data."""

    labels: Mapping[str, Any]  # protocol, style, task, model_seed
    # (method, measure, other method) -> names of its candidates, the one that dominates most first; measure and other
    # are None, or say that these are the ones within the budget of both
    methods: Mapping[tuple[str, str | None, str | None], Sequence[str]]
    points: Mapping[str, Mapping[Any, Point]]  # name of a candidate -> seed -> its point


@dataclass
class Study:
    """All of a report's inputs, read."""

    spec: Mapping[str, Any]
    points: list[Point] = field(default_factory=list)  # validation points, and the deployed model on both splits
    selected: list[Selected] = field(default_factory=list)
    frontiers: list[Frontier] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)  # task, style, with_demonstration, accuracy, n
    trained: dict[str, dict[str, Any]] = field(default_factory=dict)  # key -> sidecar of a training job

    def cost(self, keys: Iterable[str]) -> dict[str, float]:
        """Cost of training jobs, each once: summed, and the largest peak of memory."""
        jobs = [self.trained[key]["cost"] for key in dict.fromkeys(keys)]
        total = {name: sum(cost.get(name, 0) for cost in jobs) for name in (*COUNTS, *CLOCK[:2])}
        return {**total, CLOCK[2]: max((cost.get(CLOCK[2], 0) for cost in jobs), default=0)}

    def deployed(self, split: str, model_seed: Any, task: str | None = None) -> Point | None:
        """The deployed model's point on `split` (on `task`, if it was evaluated task by task)."""
        for point in self.points:
            labels = point.labels
            new = {score["task"] for score in point.scores if score["suite"] == "new"}
            if (labels["family"], point.split, labels["model_seed"]) == (DEPLOYED, split, model_seed) and (
                task is None or task in new
            ):
                return point
        return None

    def kinds(self) -> dict[str, str]:
        """New task -> kind ("skill", "recall"), as its scores say."""
        every = [*self.points, *(point for s in self.selected for point in s.points)]
        return {s["task"]: s.get("kind", "skill") for p in every for s in p.scores if s["suite"] == "new"}


def collect(job: Any) -> Study:
    """Reads the inputs of a report job. UserError names a payload that lacks a point, or holds no number."""
    study = Study(job.spec)
    reader = _Reader(job, study)
    evaluations, selections, tests = (job.inputs(role) for role in ("evaluations", "selections", "tests"))
    for entry in job.spec.get("evaluations", []):
        study.points.append(
            reader.point(evaluations[entry["input"]], entry["point"], entry["split"], entry["labels"],
                         entry.get("trained", []))
        )  # fmt: skip
    for entry in job.spec.get("selections", []):
        folder = selections[entry["selection"]]
        choice = _read(folder / "choice.json")
        own = {name: entry[name] for name in ("family", "protocol", "style", "task", "model_seed")}
        searched = _searched(choice)
        points = reader.tests(tests[entry["test"]], own, choice)
        study.selected.append(Selected(own, choice, points, searched, reader.cost(searched), f"select/{folder.name}"))
    folders = job.inputs("frontiers")
    study.frontiers = [reader.frontier(folders[entry["input"]], entry) for entry in job.spec.get("frontiers", [])]
    folders = job.inputs("rollouts")
    for entry in job.spec.get("rollouts", []):
        summary = _read(folders[entry["input"]] / "summary.json")
        study.rollouts.append({**entry, "accuracy": summary["accuracy"], "n": summary["n"]})
    return study


def _searched(choice: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of the training jobs of all candidates, over all seeds and stages, each once."""
    labels = [candidate.get("label", {}) for candidate in choice["candidates"]] or [choice["label"]]
    return tuple(
        dict.fromkeys(
            job for label in labels for stages in label.get("trained", {}).values() for jobs in stages for job in jobs
        )
    )


def _trained(chosen: Mapping[str, Any], labels: Mapping[str, Any]) -> list[str]:
    """Keys of the training jobs behind one test point: those up to its own stage of a sequence, not the whole chain's.

    chosen["trained"]: seed -> stages -> keys behind the model after that stage; one stage outside sequences.
    """
    stages = chosen.get("trained", {}).get(str(labels.get("seed")), [])
    stage = labels.get("stage")
    return stages[-1 if stage is None else stage] if stages else []


class _Reader:
    """Reads points; what many of them share (training records, items) is read or kept once."""

    def __init__(self, job: Any, study: Study) -> None:
        self._job, self._study = job, study
        self._sums: dict[tuple[str, ...], dict[str, float]] = {}
        self._keys: dict[tuple[Key, ...], tuple[Key, ...]] = {}

    def cost(self, trained: Sequence[str]) -> dict[str, float]:
        keys = tuple(trained)
        if keys not in self._sums:
            for key in keys:
                if key not in self._study.trained:
                    self._study.trained[key] = self._record(key)
            self._sums[keys] = self._study.cost(keys)
        return self._sums[keys]

    def _record(self, key: Key) -> dict[str, Any]:
        try:
            return self._job.sidecar("train", key)
        except UserError:  # rollouts that were made for training
            return self._job.sidecar("rollout", key)

    def point(self, folder: Path, key: str, split: str, labels: Mapping[str, Any], trained: Sequence[str]) -> Point:
        path = folder / f"{key}.json"
        scores = _read(path)["scores"]
        for score in scores:
            if not (isinstance(score["n"], int) and isinstance(score["correct"], int)) or not (
                0 <= score["correct"] <= score["n"] > 0
            ):
                raise UserError(
                    f"{_shown(path)}: {score['correct']} of {score['n']} correct on {score['task']} is no count; {MEND}"
                )
        labels = {name: labels.get(name) for name in LABELS}
        return Point(folder, key, split, labels, scores, tuple(trained), self.cost(trained), self._keys)

    def tests(self, folder: Path, own: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[Point, ...]:
        """The selected candidate's points on test data, ordered by seed and stage."""
        chosen = choice["label"]
        points = []
        for path in sorted(folder.glob("*.json")):
            content = _read(path)
            if "scores" not in content:  # protocol.json
                continue
            # The candidate says what it is, the point which seed and stage, the entry for which family.
            labels = {**chosen, **{k: v for k, v in (content["labels"] or {}).items() if v is not None}, **own}
            points.append(self.point(folder, content["key"], "test", labels, _trained(chosen, labels)))
        return tuple(sorted(points, key=lambda p: (str(p.labels["seed"]), p.labels["stage"] or 0)))

    def frontier(self, folder: Path, entry: Mapping[str, Any]) -> Frontier:
        """The points of a test of frontiers; which candidate is what stands in the selections."""
        own = {name: entry[name] for name in ("protocol", "style", "task", "model_seed")}
        labels = {
            candidate["name"]: candidate["label"]
            for selected in self._study.selected
            if all(selected.labels[name] == value for name, value in own.items())
            for candidate in selected.choice["candidates"]
        }
        found, points = _read(folder / "frontier.json"), {}
        methods = {(entry["method"], entry["measure"], entry["against"]): entry["points"] for entry in found}
        for name in dict.fromkeys(name for names in methods.values() for name in names):
            points[name] = {
                point["seed"]: self.point(
                    folder, point["point"], "test",
                    {**labels[name], **own, "family": FRONTIER, "seed": point["seed"]}, point["trained"],
                )
                for point in entry["candidates"][name]
            }  # fmt: skip
        return Frontier(own, methods, points)


MEND = "delete its record in provenance/ and run snakemake, which makes it again"


def _shown(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _absent(path: Path) -> UserError:
    return UserError(
        f"the report needs {_shown(path)}, which is not there; "
        "fetch the payload (dvc pull) or let `grafting repair` have it made again"
    )


def _read(path: Path) -> Any:
    def constant(name: str) -> float:
        raise UserError(f"{_shown(path)}: holds {name} where a number belongs; {MEND}")

    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=constant)
    except FileNotFoundError:
        raise _absent(path) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{_shown(path)}: not valid JSON ({error}); {MEND}") from None


def training_curves(job: Any, study: Study) -> dict[str, pd.DataFrame]:
    """Key of a training job -> its training.jsonl, one row per step; jobs whose payload is not at hand are left out.

    UserError names a file with a value that is no number.
    """
    curves = {}
    for key, sidecar in study.trained.items():
        path = job.store.root / "store" / sidecar["id"] / "training.jsonl"
        if not path.is_file():
            continue
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        except json.JSONDecodeError as error:
            raise UserError(f"{_shown(path)}: not valid JSON ({error}); {MEND}") from None
        for row in rows:
            for name, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise UserError(f"{_shown(path)}: {name} is {value} at step {row.get('step')}; {MEND}")
        curves[key] = pd.DataFrame(rows)
    return curves


def table(study: Study) -> pd.DataFrame:
    """One row per point, split, suite and task; stable order; what differs between equal runs comes last."""
    points = [*study.points, *(point for selected in study.selected for point in selected.points)]
    points += [point for f in study.frontiers for seeds in f.points.values() for point in seeds.values()]
    rows = [
        {
            **{("trained_task" if name == "task" else name): point.labels[name] for name in LABELS},
            "point": point.key,
            "split": point.split,
            "suite": score["suite"],
            "task": score["task"],
            "n": score["n"],
            "correct": score["correct"],
            "accuracy": round(score["correct"] / score["n"], 6),
            **{name: int(point.cost[name]) for name in COUNTS},
            **{name: round(point.cost[name], 3) for name in CLOCK},
        }
        for point in points
        for score in point.scores
    ]
    columns = [
        *("trained_task" if name == "task" else name for name in LABELS),
        "point", "split", "suite", "task", "n", "correct", "accuracy", *COUNTS, *CLOCK,
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=columns)
    for name in ("model_seed", "seed", "stage"):
        frame[name] = frame[name].astype("Int64")
    return frame


def selection_table(study: Study) -> pd.DataFrame:
    """One row per candidate of every selection: its validation score, and whether it was chosen."""
    rows = [
        {
            **selected.labels,
            "candidate": candidate["name"],
            "chosen": candidate["name"] == selected.choice["choice"],
            **{name: round(candidate[name], 6) for name in ("score", "new", "prior")},
        }
        for selected in study.selected
        for candidate in selected.choice["candidates"]
    ]
    columns = [
        "family",
        "protocol",
        "style",
        "task",
        "model_seed",
        "candidate",
        "chosen",
        "score",
        "new",
        "prior",
    ]
    return pd.DataFrame(rows, columns=columns)
