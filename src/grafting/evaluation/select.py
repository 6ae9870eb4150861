"""Stage select: the best candidate by validation, mean over seeds. Imports neither torch nor pandas.

A candidate (one learning rate, donor, scale, mask ...; for a sequence, one whole chain) names one evaluated
point per seed. Its score is (1 - w) * A + w * R with w = `prior_weight`, A the mean accuracy over the new
tasks and R the mean over the prior skills. Exact fractions are compared, so that equal scores are equal and
the first of them wins. Payload: `choice.json`.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

from grafting.errors import UserError


def run(job: Any) -> None:
    """Writes choice.json: choice, label, score, and every candidate with its score, new and prior."""
    if job.spec["rule"] != "balanced":
        raise UserError(f"selection.rule is '{job.spec['rule']}', which is not known; use 'balanced'")
    if not job.spec["candidates"]:
        raise UserError(f"the selection {job.name} has no candidates; give its method at least one setting")
    weight = Fraction(str(job.spec["prior_weight"]))
    folders = job.inputs("evaluations")
    scored = [(candidate, *_measure(candidate, folders)) for candidate in job.spec["candidates"]]
    scores = [(1 - weight) * new + weight * prior for _, new, prior in scored]
    best = scores.index(max(scores))
    winner = scored[best][0]
    choice = {
        "choice": winner["name"],
        "label": winner["label"],
        "score": float(scores[best]),
        "candidates": [
            {
                "name": candidate["name"],
                "label": candidate["label"],
                "score": float(score),
                "new": float(new),
                "prior": float(prior),
            }
            for (candidate, new, prior), score in zip(scored, scores, strict=True)
        ],
    }
    text = json.dumps(choice, indent=1, ensure_ascii=False) + "\n"
    (job.out / "choice.json").write_text(text, encoding="utf-8")
    job.metrics["score"] = float(scores[best])
    job.metrics["candidates"] = len(scored)


def _measure(candidate: dict[str, Any], folders: list[Path]) -> tuple[Fraction, Fraction]:
    """(new, prior) of a candidate: within a point mean over tasks, then mean over its points."""
    points = [
        json.loads((folders[point["evaluation"]] / f"{point['point']}.json").read_text(encoding="utf-8"))
        for point in candidate["points"]
    ]
    if not points:
        raise UserError(f"the candidate '{candidate['name']}' names no evaluated point; give it one per seed")
    return _mean([_accuracy(p, "new") for p in points]), _mean([_accuracy(p, "prior") for p in points])


def _accuracy(point: dict[str, Any], suite: str) -> Fraction:
    scores = [Fraction(score["correct"], score["n"]) for score in point["scores"] if score["suite"] == suite]
    if not scores:
        raise UserError(f"the point '{point['name']}' was not evaluated on a '{suite}' suite; add one to select by")
    return _mean(scores)


def _mean(values: list[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


if __name__ == "__main__":
    from grafting.provenance.runner import main

    main("grafting.evaluation.select:run")
