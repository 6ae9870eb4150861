"""Parts of a study: its cells (protocol and style), the points that count for a method, candidates and their cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grafting.analysis.collect import ALL, DEPLOYED, Frontier, Point, Selected, Study
from grafting.analysis.statistics import Estimate, Observations, estimate, mean_of
from grafting.evaluation import budget as paid

Runs = dict[str, list[Point]]  # replicate (a seed, or a model) -> the final points that count for it
NEW, PRIOR = "new", "prior"
#: What tells one candidate from another; in a label of a selection and in one of a point.
SETTINGS = ("method", "donor", "scale", "mask", "lr", "operator")


def observations(runs: Mapping[str, Sequence[Point]], suite: str) -> Observations:
    """Item correctness per replicate; an item that several points of a replicate answered is averaged.

    Strata are the tasks (skills). For "new" only the tasks that a point was trained on count.
    """
    result = {}
    for seed, points in runs.items():
        parts = [point.answers[suite] for point in points if suite in point.answers]
        if suite == NEW:
            own = [frozenset(point.tasks()) for point in points if suite in point.answers]
            parts = [part.only(tasks) for part, tasks in zip(parts, own, strict=True)]
        parts = [part for part in parts if len(part)]
        if parts:
            result[seed] = mean_of(parts)
    return result


def cells(study: Study) -> dict[tuple[str, str], list[Selected]]:
    """(protocol, style) -> selections, in the order of the configuration."""
    found = {(s.labels["protocol"], s.labels["style"]) for s in study.selected}
    order = [(p, s) for p in study.spec["protocols"] for s in study.spec["styles"]]
    return {
        cell: [s for s in study.selected if (s.labels["protocol"], s.labels["style"]) == cell]
        for cell in [*(c for c in order if c in found), *sorted(found - set(order))]
    }


def task_names(study: Study, protocol: str) -> list[str]:
    """What was trained in a protocol: each task in `single`, one thing ("all") in the others."""
    return list(study.spec["tasks"]) if protocol == "single" else [ALL]


def models_of(study: Study, model_seed: Any) -> list[Any]:
    """The models behind `model_seed`: that one, or every one for ALL."""
    return list(study.spec["model_seeds"]) if model_seed == ALL else [model_seed]


def overall_model(study: Study) -> Any:
    """What the headline is over: the one model, or ALL of several."""
    models = study.spec["model_seeds"]
    return ALL if len(models) > 1 else models[0]


def replicate(model_seed: Any, model: Any, seed: Any) -> str:
    """Name of a replicate. Over several models each of them is one (its seeds averaged): models differ more."""
    return f"m{model}" if model_seed == ALL else f"s{seed}"


def find(selected: Sequence[Selected], family: str, task: str, model: Any) -> Selected | None:
    """The selection of a family on a task; None if there is none."""
    return next(
        (
            s
            for s in selected
            if (s.labels["family"], s.labels["task"], s.labels["model_seed"]) == (family, task, model)
        ),
        None,
    )


def runs(study: Study, selected: Sequence[Selected], family: str, tasks: Sequence[str], model_seed: Any) -> Runs:
    """Final test points of one family per replicate; only those for which every one of `tasks` is there."""
    return runs_of(study, lambda task, model: find(selected, family, task, model), tasks, model_seed)


def runs_of(study: Study, pick: Callable[[str, Any], Selected | None], tasks: Sequence[str], model_seed: Any) -> Runs:
    """As `runs`, of what `pick(task, model)` names."""
    result: Runs = {}
    for model in models_of(study, model_seed):
        chosen = [s for task in tasks if (s := pick(task, model)) is not None]
        for seed in study.spec["seeds"]:
            points = [point for s in chosen for point in s.final if point.labels["seed"] == seed]
            if {point.labels["task"] for point in points} == set(tasks):
                result.setdefault(replicate(model_seed, model, seed), []).extend(points)
    return result


def deployed_estimate(study: Study, model: Any, suite: str) -> Estimate | None:
    """The deployed model's accuracy on a suite's test items (every new task), with its interval over items."""
    points = [
        p for p in study.points
        if p.labels["family"] == DEPLOYED and p.split == "test" and p.labels["model_seed"] == model
    ]  # fmt: skip
    parts = [seen for p in points if (seen := observations({"": [p]}, suite).get("")) is not None]
    return estimate({"": mean_of(parts)}) if parts else None


def settings(label: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two labels the same candidate."""
    values = [label.get(name) for name in SETTINGS]
    return tuple("none" if n == "mask" and v is None else v for n, v in zip(SETTINGS, values, strict=True))


def frontier_of(study: Study, cell: tuple[str, str], task: str, model: Any) -> Frontier | None:
    """The tested frontiers of a cell's task; None if there are none."""
    wanted = dict(zip(("protocol", "style", "task", "model_seed"), (*cell, task, model), strict=True))
    return next((f for f in study.frontiers if all(f.labels[name] == value for name, value in wanted.items())), None)


def affordable(study: Study, selected: Selected, budget: float, measure: str) -> list[Mapping[str, Any]]:
    """The candidates that a budget pays for, see `grafting.evaluation.budget`."""
    return paid.affordable(selected.choice["candidates"], budget, lambda keys: study.cost(keys)[measure])


def tested(
    selected: Sequence[Selected], task: str, model: Any, candidates: Sequence[Mapping[str, Any]]
) -> tuple[Selected | None, bool]:
    """The best candidate by validation that was tested under any family, and whether it is the best of all."""
    known = {
        settings(s.choice["label"]): s
        for s in selected
        if s.labels["task"] == task and s.labels["model_seed"] == model and s.points
    }
    ranked = sorted(candidates, key=lambda c: -c["score"])  # stable: the first of equals
    for place, candidate in enumerate(ranked):
        if settings(candidate["label"]) in known:
            return known[settings(candidate["label"])], candidate["score"] == ranked[0]["score"] or place == 0
    return None, False
