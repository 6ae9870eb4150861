"""Test of whole frontiers: of every method the points that dominate most on validation data, and no others.

Which points those are is fixed before test data are read: from the validation accuracies that the selections hold.
What the test of a selected candidate has answered already is taken over from there. Payload: as of the stage
evaluate, and `frontier.json`: a list of {"method", "measure", "against", "points"}, the names of the points in the
order in which they were found; measure and against say that they are those within a budget (see `run`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grafting.errors import UserError
from grafting.evaluation import stage
from grafting.evaluation.budget import affordable, trained
from grafting.provenance.files import write_json


def run(job: Any) -> None:
    """Evaluates the points of the frontiers.

    spec    as of the stage evaluate, with the points of all candidates; "keep": list of {"method", "selection" (place
            in the inputs), "size"}, and where the training of all candidates may cost no more than that of another
            method's {"measure": "flops" | "cpu_seconds", "against", "other" (place of its selection)};
            "candidates": name -> {seed: point key}
    inputs  as of the stage evaluate, with those of all candidates; selections; tests (of what they chose)
    """
    choices = [_candidates(folder) for folder in job.inputs("selections")]
    costs: dict[str, dict[str, float]] = {}

    def cost(measure: str, keys: Sequence[str]) -> float:
        for key in keys:
            if key not in costs:
                costs[key] = _record(job, key)["cost"]
        return sum(costs[key].get(measure, 0) for key in keys)

    found = []
    for kept in job.spec["keep"]:
        candidates, measure = choices[kept["selection"]], kept.get("measure")
        if measure is not None:
            own_cost = partial(cost, measure)
            budget = min(own_cost(trained(side)) for side in (candidates, choices[kept["other"]]))
            candidates = affordable(candidates, budget, own_cost)
        points = dominating(candidates, kept["size"])
        found.append({"method": kept["method"], "measure": measure, "against": kept.get("against"), "points": points})
    names = {name for entry in found for name in entry["points"]}
    wanted = {key for name in names for key in job.spec["candidates"][name].values()}
    stage.run(_asked(job, [point for point in job.spec["points"] if point["key"] in wanted]))
    write_json(job.out / "frontier.json", found)


def _candidates(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "choice.json").read_text(encoding="utf-8"))["candidates"]


def _record(job: Any, key: str) -> dict[str, Any]:
    try:
        return job.sidecar("train", key)
    except UserError:  # rollouts that were made for training
        return job.sidecar("rollout", key)


def dominating(candidates: Sequence[Mapping[str, Any]], size: int) -> list[str]:
    """Names of the `size` candidates that dominate most together, found one by one (the first of equals): the first
    k of them are what a smaller size would give.

    candidates: name, new, prior (accuracies in [0, 1]).
    """
    kept: list[Mapping[str, Any]] = []
    rest = list(candidates)
    while rest and len(kept) < size:
        areas = [area([(c["new"], c["prior"]) for c in [*kept, one]]) for one in rest]
        kept.append(rest.pop(areas.index(max(areas))))
    return [candidate["name"] for candidate in kept]


def area(points: Sequence[tuple[float, float]]) -> float:
    """What points in the unit square dominate: the area of the union of the rectangles from (0, 0) to each."""
    total, height = 0.0, 0.0
    ordered = sorted(points, reverse=True)
    for (x, y), (following, _) in zip(ordered, [*ordered[1:], (0.0, 0.0)], strict=True):
        height = max(height, y)
        total += (x - following) * height
    return total


def _asked(job: Any, points: Sequence[Mapping[str, Any]]) -> Any:
    """The job as if it had these points only: nothing else is fetched or read."""
    used = sorted({term for point in points if point["recipe"] for term in point["recipe"]["terms"]})
    place = {term: number for number, term in enumerate(used)}
    renumbered = [
        {**p, "recipe": p["recipe"] and {**p["recipe"], "terms": [place[t] for t in p["recipe"]["terms"]]}}
        for p in points
    ]
    inputs = {role: refs for role, refs in job.job.inputs.items() if role not in ("selections", "tests")}
    inputs |= {role: [job.job.inputs[role][term] for term in used] for role in ("trained", "donor")}
    asked = copy.copy(job)
    asked.job = replace(job.job, spec={**job.spec, "points": renumbered}, inputs=inputs)
    asked.spec = asked.job.spec
    asked.earlier = lambda: [*job.inputs("tests"), *job.earlier()]
    return asked


if __name__ == "__main__":
    from grafting.provenance.runner import main

    main("grafting.evaluation.frontier:run")
