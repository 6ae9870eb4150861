"""The claim, tested on test data read once: one validation-selected graft against OPSD and against SFT.

Per protocol, style, task and overall: dA (new-task accuracy) and dR (prior accuracy), graft minus opponent,
paired by seed and item, each with a 95 % interval. The verdict of a comparison is
  supported     both lower bounds >= 0 and at least one > 0,
  refuted       an upper bound < 0,
  inconclusive  otherwise.
A protocol and style is supported when every opponent's overall comparison is, refuted when one is; so is the
whole study. No correction for the number of comparisons is made; it is stated beside the verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grafting.analysis.collect import ALL, Point, Selected, Study
from grafting.analysis.statistics import ITEMS_ONLY, Observations, difference

DEFINITION = (
    "supported: both lower bounds >= 0 and at least one > 0; refuted: an upper bound < 0; "
    "inconclusive: otherwise. Differences of test accuracy, paired by seed and item, 95 % intervals over "
    "seeds and items; no correction for the number of comparisons."
)
CLAIM, CONTROL, ABLATION = "claim", "control", "ablation"
# (kind, a, b, what the comparison asks); a - b is reported
COMPARISONS = (
    (CLAIM, "graft", "opsd", "grafting against on-policy self-distillation"),
    (CLAIM, "graft", "sft", "grafting against supervised fine-tuning"),
    (CONTROL, "graft", "opsd_scaled", "OPSD given the same scaling sweep"),
    (CONTROL, "graft", "opsd_regraft", "OPSD, merged after every task as well"),
    (CONTROL, "graft", "sft_scaled", "the donor and the mask, beyond scaling"),
    (CONTROL, "sft_scaled", "opsd", "scaled SFT against OPSD"),
    (ABLATION, "graft", "graft_unmasked", "the mask"),
    (
        ABLATION,
        "graft_masked",
        "graft_random",
        "a Fisher mask against a random one of the same size, basis and scales",
    ),
    (ABLATION, "graft_unmasked", "graft_unscaled", "the scale"),
    (ABLATION, "graft_early", "sft_scaled", "an earlier donor instead of the deployed model"),
    (ABLATION, "graft_early", "opsd", "an earlier donor against OPSD"),
    (
        ABLATION,
        "graft_sum",
        "graft_regraft",
        "every update learned on one donor, instead of one after the other",
    ),
)
DIVERGENCES = {  # for readers; defined as in grafting.training.divergences, which needs torch
    "forward_kl": "forward KL = KL(teacher || student)",
    "reverse_kl": "reverse KL = KL(student || teacher)",
    "jsd": "generalised Jensen-Shannon divergence = beta KL(teacher || m) + (1 - beta) KL(student || m), "
    "m = beta teacher + (1 - beta) student",
}
Runs = dict[str, list[Point]]  # replicate (a seed) -> the final test points that count for it


def verdict(new: Any, prior: Any) -> str:
    """Verdict of one comparison from its two Estimates; "missing" when there is none."""
    if new is None or prior is None:
        return "missing"
    if new.high < 0 or prior.high < 0:
        return "refuted"
    if min(new.low, prior.low) >= 0 and max(new.low, prior.low) > 0:
        return "supported"
    return "inconclusive"


def combined(verdicts: Iterable[str]) -> str:
    """Refuted if one is, supported if all are, else inconclusive; "missing" without any comparison."""
    found = list(verdicts)
    if not found or set(found) == {"missing"}:
        return "missing"
    if "refuted" in found:
        return "refuted"
    return "supported" if set(found) == {"supported"} else "inconclusive"


def observations(runs: Runs, suite: str) -> Observations:
    """Item correctness per replicate; an item that several points of a replicate answered is averaged.

    Strata are the tasks (skills). For "new" only the tasks that a point was trained on count.
    """
    result: dict[str, dict[tuple[str, str], float]] = {}
    for seed, points in runs.items():
        answers: dict[tuple[str, str], list[float]] = {}
        for point in points:
            own = set(point.tasks())
            for key, correct in point.items.get(suite, {}).items():
                if suite != "new" or key[0] in own:
                    answers.setdefault(key, []).append(correct)
        result[seed] = {key: sum(values) / len(values) for key, values in answers.items()}
    return {seed: values for seed, values in result.items() if values}


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


def runs(study: Study, selected: Sequence[Selected], family: str, tasks: Sequence[str], model_seed: Any) -> Runs:
    """Final test points of one family per seed; only seeds for which every one of `tasks` is there.

    model_seed ALL: every model is one replicate (its seeds averaged), since models differ more than seeds do.
    """
    models = study.spec["model_seeds"] if model_seed == ALL else [model_seed]
    result: Runs = {}
    for model in models:
        for seed in study.spec["seeds"]:
            points = [
                point
                for s in selected
                if s.labels["family"] == family and s.labels["model_seed"] == model and s.labels["task"] in tasks
                for point in s.final
                if point.labels["seed"] == seed
            ]
            if {point.labels["task"] for point in points} == set(tasks):
                result.setdefault(f"m{model}" if model_seed == ALL else f"s{seed}", []).extend(points)
    return result


def make_claims(study: Study) -> dict[str, Any]:
    """All comparisons with their verdicts, as plain data for claims.json."""
    models = list(study.spec["model_seeds"])
    units = [*models, ALL] if len(models) > 1 else models
    comparisons = [
        _comparison(study, selected, cell, kind, a, b, asks, task, model)
        for cell, selected in cells(study).items()
        for kind, a, b, asks in COMPARISONS
        if _present(selected, a) and _present(selected, b)
        for task in _scopes(study, cell[0])
        for model in units
    ]
    head = [c for c in comparisons if c["kind"] == CLAIM and c["task"] == ALL and c["model_seed"] == units[-1]]
    protocols = [
        {
            "protocol": protocol,
            "style": style,
            "verdict": combined(c["verdict"] for c in head if (c["protocol"], c["style"]) == (protocol, style)),
        }
        for protocol, style in cells(study)
    ]
    return {
        "definition": DEFINITION,
        "verdict": combined(c["verdict"] for c in head),
        "opsd": opsd_setting(study.spec),
        "condition": "conditional on one model" if len(models) == 1 else f"over {len(models)} models",
        "main_comparisons": len(head),
        "protocols": protocols,
        "comparisons": comparisons,
        "missing": missing(study),
    }


def opsd_setting(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """The divergence, in full, and the kind of teacher of the OPSD compared with; None in a study without it."""
    opsd = (spec["settings"].get("learners") or {}).get("opsd")
    if opsd is None:
        return None
    return {"divergence": DIVERGENCES.get(opsd["divergence"], opsd["divergence"]), "teacher": opsd["teacher"]}


def _scopes(study: Study, protocol: str) -> list[str]:
    """The tasks to compare on, and ALL for the mean over them."""
    return [*study.spec["tasks"], ALL] if protocol == "single" else [ALL]


def _present(selected: Sequence[Selected], family: str) -> bool:
    return any(s.labels["family"] == family for s in selected)


def _comparison(
    study: Study, selected: Sequence[Selected], cell: tuple[str, str], kind: str, a: str, b: str, asks: str,
    task: str, model_seed: Any,
) -> dict[str, Any]:  # fmt: skip
    tasks = task_names(study, cell[0]) if task == ALL else [task]
    first, second = (runs(study, selected, family, tasks, model_seed) for family in (a, b))
    new, prior = (difference(observations(first, suite), observations(second, suite)) for suite in ("new", "prior"))
    expected = len(study.spec["model_seeds"] if model_seed == ALL else study.spec["seeds"])
    notes = []
    if new is not None and new.seeds < expected:
        notes.append(f"{new.seeds} of {expected} replicates")
    if new is not None and new.basis == ITEMS_ONLY:
        notes.append("interval over items only: says nothing about other seeds")
    if first and {p.key for runs_ in first.values() for p in runs_} == {p.key for r in second.values() for p in r}:
        notes.append("the same checkpoints were chosen")
    if new is not None and prior is not None and (new.low > 0 > prior.high or prior.low > 0 > new.high):
        notes.append("a trade-off: " + ("new better, prior worse" if new.low > 0 else "prior better, new worse"))
    return {
        "kind": kind,
        "asks": asks,
        "protocol": cell[0],
        "style": cell[1],
        "task": task,
        "model_seed": model_seed,
        "a": a,
        "b": b,
        "new": None if new is None else new.as_dict(),
        "prior": None if prior is None else prior.as_dict(),
        "verdict": verdict(new, prior),
        "notes": notes,
    }


def missing(study: Study) -> list[str]:
    """What the configuration asks for and the tests do not hold, one line each."""
    lines = []
    for (protocol, style), selected in cells(study).items():
        for family in dict.fromkeys(s.labels["family"] for s in selected):
            for model in study.spec["model_seeds"]:
                for task in task_names(study, protocol):
                    have = runs(study, selected, family, [task], model)
                    absent = [seed for seed in study.spec["seeds"] if f"s{seed}" not in have]
                    if absent:
                        what = f"{protocol}, {style}, {family}, task {task}, model seed {model}"
                        lines.append(f"{what}: no test point for seed(s) {', '.join(map(str, absent))}")
    return lines


def counts(claims: Mapping[str, Any]) -> dict[str, int]:
    """Number of main comparisons per verdict, tasks included."""
    verdicts = [c["verdict"] for c in claims["comparisons"] if c["kind"] == CLAIM]
    return {name: verdicts.count(name) for name in ("supported", "refuted", "inconclusive", "missing")}
