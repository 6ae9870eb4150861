"""What the result tables of the page, the LaTeX files and the exports hold, as plain records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grafting.analysis.cells import cells, deployed_estimate, observations, overall_model, runs, task_names
from grafting.analysis.collect import ALL, COUNTS, Study
from grafting.analysis.figures.style import in_order
from grafting.analysis.sequence import PRIOR, before, normalised, normalised_curve, sequence_figures, sequence_matrix
from grafting.analysis.statistics import Estimate, estimate
from grafting.analysis.tables import settings_text


def method_rows(study: Study) -> Iterator[dict[str, Any]]:
    """One record per protocol, style, method, task (and ALL) and model: accuracies with intervals, cost, choice."""
    models = list(study.spec["model_seeds"])
    for model in [*models, ALL] if len(models) > 1 else models:
        for (protocol, style), selected in cells(study).items():
            names = task_names(study, protocol)
            for task in dict.fromkeys([ALL, *names]) if len(names) > 1 else names:
                tasks = names if task == ALL else [task]
                for family in in_order([s.labels["family"] for s in selected]):
                    found = runs(study, selected, family, tasks, model)
                    chosen = [
                        s for s in selected
                        if s.labels["family"] == family and s.labels["task"] in tasks
                        and (model == ALL or s.labels["model_seed"] == model)
                    ]  # fmt: skip
                    points = [point for own in found.values() for point in own]
                    new, prior = (estimate(observations(found, suite)) for suite in ("new", "prior"))
                    yield {
                        "protocol": protocol,
                        "style": style,
                        "method": family,
                        "task": task,
                        "model_seed": model,
                        "new": new,
                        "prior": prior,
                        "seeds": len(found),
                        "expected": len(models) if model == ALL else len(study.spec["seeds"]),
                        "cost": {
                            name: sum(p.cost[name] for p in points) / len(points) if points else None
                            for name in (*COUNTS, "cpu_seconds")
                        },
                        "search_flops": sum(s.search_cost["flops"] for s in chosen),
                        "candidates": sorted({len(s.choice["candidates"]) for s in chosen}),
                        "setting": settings_text(chosen),
                        "records": list(dict.fromkeys(p.record for p in points)),
                        "selections": [s.record for s in chosen],
                    }


def deployed_rows(study: Study) -> Iterator[dict[str, Any]]:
    """The deployed model's test accuracies, per model."""
    for model in study.spec["model_seeds"]:
        new, prior = (deployed_estimate(study, model, suite) for suite in ("new", "prior"))
        yield {"model_seed": model, "new": new, "prior": prior}


def sequence_rows(study: Study) -> Iterator[dict[str, Any]]:
    """One record per method of a sequence: its figures, seed by seed averaged, the matrix, the normalised curve."""
    for (protocol, style), selected in cells(study).items():
        if protocol != "sequential":
            continue
        for model in study.spec["model_seeds"]:
            own = {s.labels["family"]: s for s in selected if s.labels["model_seed"] == model and s.points}
            matrices = {family: sequence_matrix(study, own[family]) for family in in_order(list(own))}
            scaled = normalised(study.spec["tasks"], matrices, before(study, model))
            for family, matrix in matrices.items():
                yield {
                    "style": style,
                    "method": family,
                    "model_seed": model,
                    "figures": sequence_figures(study, own[family], matrix),
                    "matrix": matrix,
                    "normalised": normalised_curve(study.spec["tasks"], scaled[family]),
                    "seeds": len({p.labels["seed"] for p in own[family].points}),
                }


def accuracy_rows(study: Study) -> Iterator[dict[str, Any]]:
    """accuracies.csv: every test accuracy with n and interval, over seeds and seed by seed."""
    main = overall_model(study)
    for (protocol, style), selected in cells(study).items():
        for family in in_order([s.labels["family"] for s in selected]):
            names = task_names(study, protocol)
            for task in dict.fromkeys([*names, ALL]) if len(names) > 1 else names:
                found = runs(study, selected, family, names if task == ALL else [task], main)
                parts = {"all": found, **{name: {name: points} for name, points in found.items()}}
                for replicate, own in parts.items():
                    for suite in ("new", PRIOR):
                        value = estimate(observations(own, suite))
                        if value is not None:
                            yield {
                                "protocol": protocol, "style": style, "method": family, "task": task,
                                "replicate": replicate, "suite": suite, "n": value.items * value.seeds,
                                **_numbers(value),
                            }  # fmt: skip


def _numbers(value: Estimate) -> Mapping[str, Any]:
    numbers = value.as_dict()
    return {
        "accuracy": numbers["mean"],
        **{name: numbers[name] for name in ("low", "high", "seeds", "items", "basis")},
    }
