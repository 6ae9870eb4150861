"""From the payloads of a study to one list of points and one tidy table."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

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
DEPLOYED = "deployed"
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

    @cached_property
    def items(self) -> dict[str, dict[tuple[str, str], float]]:
        """Suite -> (task, example id) -> 1.0 if correct else 0.0, from the predictions of the point."""
        suites = {score["task"]: score["suite"] for score in self.scores}
        result: dict[str, dict[tuple[str, str], float]] = {suite: {} for suite in suites.values()}
        with gzip.open(self.folder / f"{self.key}.jsonl.gz", "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                result[suites[row["task"]]][row["task"], row["id"]] = float(row["correct"])
        return result

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

    @property
    def final(self) -> tuple[Point, ...]:
        """The test points of the last stage; all points where there are no stages."""
        last = max((p.labels["stage"] or 0 for p in self.points), default=0)
        return tuple(p for p in self.points if (p.labels["stage"] or 0) == last)


@dataclass
class Study:
    """All of a report's inputs, read."""

    spec: Mapping[str, Any]
    points: list[Point] = field(default_factory=list)  # validation points, and the deployed model on both splits
    selected: list[Selected] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)  # task, style, with_demonstration, accuracy, n

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
    """Reads the inputs of a report job. UserError names a payload that lacks a point."""
    costs = _Costs(job)
    evaluations, selections, tests = (job.inputs(role) for role in ("evaluations", "selections", "tests"))
    study = Study(job.spec)
    for entry in job.spec.get("evaluations", []):
        study.points.append(
            _point(evaluations[entry["input"]], entry["point"], entry["split"], entry["labels"],
                   entry.get("trained", []), costs)
        )  # fmt: skip
    for entry in job.spec.get("selections", []):
        choice = _read(selections[entry["selection"]] / "choice.json")
        own = {name: entry[name] for name in ("family", "protocol", "style", "task", "model_seed")}
        searched = _searched(choice)
        points = _test_points(tests[entry["test"]], own, choice, costs)
        study.selected.append(Selected(own, choice, points, searched, costs(searched)))
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


class _Costs:
    """Summed cost of training jobs, given by their keys; each sentinel is read once."""

    def __init__(self, job: Any) -> None:
        self._job, self._known = job, {}

    def __call__(self, trained: Sequence[str]) -> dict[str, float]:
        jobs = [self._cost(key) for key in dict.fromkeys(trained)]
        total = {name: sum(cost.get(name, 0) for cost in jobs) for name in (*COUNTS, *CLOCK[:2])}
        return {**total, CLOCK[2]: max((cost.get(CLOCK[2], 0) for cost in jobs), default=0)}

    def _cost(self, key: str) -> Mapping[str, float]:
        if key not in self._known:
            try:
                record = self._job.sidecar("train", key)
            except UserError:  # rollouts that were made for training
                record = self._job.sidecar("rollout", key)
            self._known[key] = record["cost"]
        return self._known[key]


def _point(
    folder: Path, key: str, split: str, labels: Mapping[str, Any], trained: Sequence[str], costs: _Costs
) -> Point:
    scores = _read(folder / f"{key}.json")["scores"]
    labels = {name: labels.get(name) for name in LABELS}
    return Point(folder, key, split, labels, scores, tuple(trained), costs(trained))


def _test_points(folder: Path, own: Mapping[str, Any], choice: Mapping[str, Any], costs: _Costs) -> tuple[Point, ...]:
    """The selected candidate's points on test data, ordered by seed and stage."""
    chosen = choice["label"]
    points = []
    for path in sorted(folder.glob("*.json")):
        content = _read(path)
        if "scores" not in content:  # protocol.json
            continue
        # The candidate says what it is, the point which seed and stage, the entry for which family.
        labels = {**chosen, **{k: v for k, v in (content["labels"] or {}).items() if v is not None}, **own}
        points.append(_point(folder, content["key"], "test", labels, _trained(chosen, labels), costs))
    return tuple(sorted(points, key=lambda p: (str(p.labels["seed"]), p.labels["stage"] or 0)))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"the report needs {path.parent.name}/{path.name}, which is not there; "
            "fetch the payload (dvc pull) or let `grafting repair` have it made again"
        ) from None


def table(study: Study) -> pd.DataFrame:
    """One row per point, split, suite and task; stable order; what differs between equal runs comes last."""
    points = [*study.points, *(point for selected in study.selected for point in selected.points)]
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
