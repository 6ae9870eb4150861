"""The claims of claims.yaml, tested.

Per claim, protocol, style, task and overall: left minus right, paired by seed and item, with a 95 % interval.
Statistic `both` (new-task accuracy dA and prior accuracy dR, on test data read once) is
  supported     both lower bounds >= 0 and at least one > 0,
  refuted       an upper bound < 0,
  inconclusive  otherwise;
any other statistic is supported above its threshold, refuted below it. A protocol and style, and the study, is
supported when every headline comparison is (an intersection-union test: it needs no correction), refuted when one
is after Holm's correction over all headline comparisons and both accuracies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from grafting.analysis import frontier
from grafting.analysis.cells import (
    Runs,
    affordable,
    cells,
    find,
    frontier_of,
    models_of,
    observations,
    replicate,
    runs,
    runs_of,
    task_names,
    tested,
)
from grafting.analysis.collect import ALL, Point, Selected, Study
from grafting.analysis.statistics import ITEMS_ONLY, Draws, Estimate, holm, paired, strata_of
from grafting.analysis.statistics import estimate as estimate_of

DEFINITION = (
    "supported: both lower bounds >= 0 and at least one > 0; refuted: an upper bound < 0; "
    "inconclusive: otherwise. Differences of test accuracy, paired by seed and item, 95 % intervals over "
    "seeds and items. Overall: supported when every headline comparison is (no correction needed); refuted when one "
    "is after Holm's correction over all headline comparisons and both accuracies."
)
CLAIM, FRONTIER, EQUAL_COST, CONTROL, ABLATION = "claim", "frontier", "equal_cost", "control", "ablation"
BOTH = "both"
LEVEL = 0.05
DIVERGENCES = {  # for readers; defined as in grafting.training.divergences, which needs torch
    "forward_kl": "forward KL = KL(teacher || student)",
    "reverse_kl": "reverse KL = KL(student || teacher)",
    "jsd": "generalised Jensen-Shannon divergence = beta KL(teacher || m) + (1 - beta) KL(student || m), "
    "m = beta teacher + (1 - beta) student",
}


def verdict(new: Estimate | None, prior: Estimate | None) -> str:
    """Verdict of one comparison of both accuracies; "missing" when there is none."""
    if new is None or prior is None:
        return "missing"
    if new.high < 0 or prior.high < 0:
        return "refuted"
    if min(new.low, prior.low) >= 0 and max(new.low, prior.low) > 0:
        return "supported"
    return "inconclusive"


def verdict_of(value: Estimate | None, threshold: float) -> str:
    """Verdict of one statistic against its threshold."""
    if value is None:
        return "missing"
    return "supported" if value.low > threshold else "refuted" if value.high < threshold else "inconclusive"


def combined(verdicts: Iterable[str]) -> str:
    """Refuted if one is, supported if all are, else inconclusive; "missing" without any comparison."""
    found = list(verdicts)
    if not found or set(found) == {"missing"}:
        return "missing"
    if "refuted" in found:
        return "refuted"
    return "supported" if set(found) == {"supported"} else "inconclusive"


def overall(comparisons: Iterable[Mapping[str, Any]]) -> str:
    """As `combined`; refuted only what stays so after Holm's correction."""
    return combined(
        "inconclusive" if c["verdict"] == "refuted" and c["adjusted"] != "refuted" else c["verdict"]
        for c in comparisons
    )


def make_claims(study: Study) -> dict[str, Any]:
    """All comparisons with their verdicts, as plain data for claims.json."""
    tester = _Tester(study)
    tests = [
        (claim, cell, selected, task, model)
        for cell, selected in cells(study).items()
        for claim in study.spec["claims"]
        if tester.applies(claim, cell, selected)
        for task in _scopes(study, claim, cell[0])
        for model in tester.units
    ]
    comparisons = [tester.compare(*test) for test in tests]
    head = [c for c in comparisons if c["task"] == ALL and c["model_seed"] == tester.units[-1]]
    for kind in (CLAIM, FRONTIER, EQUAL_COST, CONTROL, ABLATION):
        _adjust([c for c in head if c["kind"] == kind])
    for comparison in comparisons:
        comparison.setdefault("adjusted", None)
        comparison.pop("estimates")
    names = {claim["name"] for claim in study.spec["claims"]}
    untested = sorted(names - {c["name"] for c in comparisons})
    models = list(study.spec["model_seeds"])
    main = [c for c in head if c["kind"] == CLAIM]
    return {
        "definition": DEFINITION,
        "verdict": overall(main),
        "opsd": opsd_setting(study.spec),
        "condition": "conditional on one model" if len(models) == 1 else f"over {len(models)} models",
        "main_comparisons": len(main),
        "protocols": _by_cell(study, main),
        FRONTIER: _summed(study, head, FRONTIER),
        EQUAL_COST: _summed(study, head, EQUAL_COST),
        "comparisons": comparisons,
        "untested": untested,
        "missing": missing(study),
    }


def _by_cell(study: Study, comparisons: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    return [
        {
            "protocol": protocol,
            "style": style,
            "verdict": overall(c for c in comparisons if (c["protocol"], c["style"]) == (protocol, style)),
        }
        for protocol, style in cells(study)
    ]


def _summed(study: Study, head: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    own = [c for c in head if c["kind"] == kind]
    return {"verdict": overall(own), "comparisons": len(own), "protocols": _by_cell(study, own)}


def _adjust(comparisons: Sequence[dict[str, Any]]) -> None:
    """Writes `adjusted` and `p_holm` into comparisons of one kind: verdicts at 5 % for all of them together."""
    hypotheses = [(c, name, e) for c in comparisons for name, e in c["estimates"].items() if e is not None]
    adjusted = holm([e.p_value(c["threshold"]) for c, _, e in hypotheses])
    for c in comparisons:
        own = {name: (e, p) for (other, name, e), p in zip(hypotheses, adjusted, strict=True) if other is c}
        c["p_holm"] = {name: float(f"{p:.3g}") for name, (_, p) in own.items()}
        if len(own) < len(c["estimates"]):
            c["adjusted"] = "missing"
            continue
        below = any(e.mean < c["threshold"] and p <= LEVEL for e, p in own.values())
        above = all(e.mean > c["threshold"] and p <= LEVEL for e, p in own.values())
        c["adjusted"] = "refuted" if below else "supported" if above else "inconclusive"


def opsd_setting(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """The divergence, in full, and the kind of teacher of the OPSD compared with; None in a study without it."""
    opsd = (spec["settings"].get("learners") or {}).get("opsd")
    if opsd is None:
        return None
    return {"divergence": DIVERGENCES.get(opsd["divergence"], opsd["divergence"]), "teacher": opsd["teacher"]}


def _scopes(study: Study, claim: Mapping[str, Any], protocol: str) -> list[str]:
    """The tasks to compare on, and ALL for the mean over them; frontiers are compared over all tasks only."""
    each = protocol == "single" and claim["statistic"] not in frontier.STATISTICS
    return [*study.spec["tasks"], ALL] if each else [ALL]


class _Tester:
    """Compares; keeps what comparisons share."""

    def __init__(self, study: Study) -> None:
        models = list(study.spec["model_seeds"])
        self.study, self.units = study, [*models, ALL] if len(models) > 1 else models
        self.draws = Draws()
        self._seen: dict[tuple, Any] = {}

    def applies(self, claim: Mapping[str, Any], cell: tuple[str, str], selected: Sequence[Selected]) -> bool:
        """Whether the cell is one of the claim's and has both methods."""
        condition = claim["condition"]
        wanted = all(
            condition.get(key) is None or value in condition[key]
            for key, value in zip(("protocols", "styles"), cell, strict=True)
        )
        have = {s.labels["family"] for s in selected}
        return wanted and claim["left"] in have and not have.isdisjoint(claim["right"])

    def compare(
        self, claim: Mapping[str, Any], cell: tuple[str, str], selected: Sequence[Selected], task: str, model: Any
    ) -> dict[str, Any]:
        have = {s.labels["family"] for s in selected}
        a, b = claim["left"], next(name for name in claim["right"] if name in have)
        tasks = task_names(self.study, cell[0]) if task == ALL else [task]
        test = self._frontier if claim["statistic"] in frontier.STATISTICS else self._accuracies
        found, notes = test(claim, cell, selected, (a, b), tasks, model)
        if claim["statistic"] == BOTH:
            shown = {"new": found["new"], "prior": found["prior"]}
            said = verdict_with(found["new"], found["prior"], claim["threshold"])
        else:
            found = {claim["statistic"]: found[claim["statistic"]]}
            shown, said = {"value": found[claim["statistic"]]}, verdict_of(*found.values(), claim["threshold"])
        return {
            "name": claim["name"],
            "kind": claim["kind"],
            "asks": claim["asks"],
            "protocol": cell[0],
            "style": cell[1],
            "task": task,
            "model_seed": model,
            "a": a,
            "b": b,
            "statistic": claim["statistic"],
            "threshold": claim["threshold"],
            **{name: None if value is None else value.as_dict() for name, value in shown.items()},
            "verdict": said,
            **self._bootstrap(claim, cell, selected, (a, b), task, model),
            "notes": [*self._seeds(found, model), *notes],
            "estimates": found,
        }

    def _bootstrap(
        self, claim: Mapping[str, Any], cell: tuple[str, str], selected: Sequence[Selected], pair: tuple[str, str],
        task: str, model: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Percentile intervals of the hierarchical bootstrap beside a headline comparison: a second opinion."""
        if claim["kind"] != CLAIM or task != ALL:
            return {}
        sides = [runs(self.study, selected, family, task_names(self.study, cell[0]), model) for family in pair]
        result = {}
        for suite in ("new", "prior"):
            strata = strata_of(paired(*(self._observed(side, suite) for side in sides)))
            if strata:
                result[suite] = [round(end, 6) for end in self.draws.hierarchical(strata)]
        return {"bootstrap": result}

    def _seeds(self, found: Mapping[str, Estimate | None], model: Any) -> list[str]:
        value = next((value for value in found.values() if value is not None), None)
        if value is None:
            return []
        expected = len(self.study.spec["model_seeds"] if model == ALL else self.study.spec["seeds"])
        notes = [f"{value.seeds} of {expected} replicates"] if value.seeds < expected else []
        if value.basis == ITEMS_ONLY:
            notes.append("interval over items only: says nothing about other seeds")
        return notes

    # ---- one selected point against another, on test data ---------------------------------------
    def _accuracies(
        self, claim: Mapping[str, Any], cell: tuple[str, str], selected: Sequence[Selected], pair: tuple[str, str],
        tasks: Sequence[str], model: Any,
    ) -> tuple[dict[str, Estimate | None], list[str]]:  # fmt: skip
        notes: list[str] = []
        if claim["condition"].get("equal"):
            sides, notes = self._equal(claim, selected, pair, tasks, model)
        else:
            sides = [runs(self.study, selected, family, tasks, model) for family in pair]
        found = {}
        for suite in ("new", "prior"):
            found[suite] = estimate_of(paired(*(self._observed(side, suite) for side in sides)))
        keys = [{point.key for points in side.values() for point in points} for side in sides]
        if keys[0] and keys[0] == keys[1]:
            notes.append("the same checkpoints were chosen")
        new, prior = found["new"], found["prior"]
        if new is not None and prior is not None and (new.low > 0 > prior.high or prior.low > 0 > new.high):
            notes.append("a trade-off: " + ("new better, prior worse" if new.low > 0 else "prior better, new worse"))
        return found, notes

    def _observed(self, side: Runs, suite: str) -> Any:
        key = suite, tuple((name, tuple(id(point) for point in points)) for name, points in side.items())
        if key not in self._seen:
            self._seen[key] = observations(side, suite)
        return self._seen[key]

    def _equal(
        self, claim: Mapping[str, Any], selected: Sequence[Selected], pair: tuple[str, str], tasks: Sequence[str],
        model: Any,
    ) -> tuple[list[Runs], list[str]]:  # fmt: skip
        """Test points of what validation chooses from the candidates that both can pay for."""
        measure, notes, chosen = claim["condition"]["equal"], [], [{}, {}]
        for task in tasks:
            for m in models_of(self.study, model):
                both = [find(selected, family, task, m) for family in pair]
                if None in both:
                    continue
                budget = min(s.search_cost[measure] for s in both)
                for side, s in enumerate(both):
                    kept = affordable(self.study, s, budget, measure)
                    chosen[side][task, m], best = tested(selected, task, m, kept)
                    if len(kept) < len(s.choice["candidates"]):
                        notes.append(f"{pair[side]}, {task}: {_within(kept, s)}")
                    if kept and not best:
                        notes.append(f"{pair[side]}, {task}: the best of them was not tested; the next best stands in")
        sides = [runs_of(self.study, partial(_get, part), tasks, model) for part in chosen]
        return sides, list(dict.fromkeys(notes))

    # ---- one set of points against another, fixed on validation data -----------------------------
    def _frontier(
        self, claim: Mapping[str, Any], cell: tuple[str, str], selected: Sequence[Selected], pair: tuple[str, str],
        tasks: Sequence[str], model: Any,
    ) -> tuple[dict[str, Estimate | None], list[str]]:  # fmt: skip
        notes, sets, models = [], [], models_of(self.study, model)
        measure = claim["condition"].get("equal")
        for task in tasks:
            ranked: list[list[list[tuple[Any, Mapping[Any, Point]]]]] = [[], []]  # side -> model -> (model, points)
            for m in models:
                found = frontier_of(self.study, cell, task, m)
                both = [find(selected, family, task, m) for family in pair]
                if None in both or found is None:
                    return {claim["statistic"]: None}, [f"{task}: no tested frontier"]
                for side, (family, other) in enumerate((pair, pair[::-1])):
                    kind = (family, measure, other if measure else None)
                    if kind not in found.methods:
                        return {claim["statistic"]: None}, [f"{task}: no tested frontier"]
                    ranked[side].append([(m, found.points[name]) for name in found.methods[kind]])
                    if measure:
                        s = both[side]
                        paid = affordable(self.study, s, min(x.search_cost[measure] for x in both), measure)
                        if len(paid) < len(s.choice["candidates"]):
                            notes.append(f"{family}, {task}: {_within(paid, s)}")
            size = min(len(points) for side in ranked for points in side)
            if size == 0:
                return {claim["statistic"]: None}, [*notes, f"{task}: no point within the budget"]
            sets.append([[_replicates(model, place, side) for place in range(size)] for side in ranked])
        seeds = sorted(set.intersection(*(set(runs_) for pair_ in sets for side in pair_ for runs_ in side)))
        wholes = [tuple(frontier.side(side, seeds) for side in pair_) for pair_ in sets] if seeds else []
        if not wholes or any(whole is None for pair_ in wholes for whole in pair_):
            return {claim["statistic"]: None}, ["no replicate has every point of the frontiers"]
        size = max(len(pair_[0]) for pair_ in sets)
        notes.append(f"{size} point{'s' if size > 1 else ''} per method")
        value = frontier.contrast(claim["statistic"], wholes, self.draws, aligned=len(models) == 1)
        return {claim["statistic"]: value}, list(dict.fromkeys(notes))


def _within(kept: Sequence[Any], selected: Selected) -> str:
    return f"{len(kept)} of {len(selected.choice['candidates'])} candidates are within the budget"


def _replicates(model_seed: Any, place: int, side: Sequence[Sequence[tuple[Any, Mapping[Any, Point]]]]) -> Runs:
    """Replicate -> the points at one place of the frontiers, one frontier per model."""
    result: Runs = {}
    for points in side:
        model, by_seed = points[place]
        for seed, point in by_seed.items():
            result.setdefault(replicate(model_seed, model, seed), []).append(point)
    return result


def _get(chosen: Mapping[tuple[str, Any], Selected | None], task: str, model: Any) -> Selected | None:
    return chosen.get((task, model))


def verdict_with(new: Estimate | None, prior: Estimate | None, threshold: float) -> str:
    """`verdict`, or with a threshold: both above it, or one below."""
    if threshold == 0:
        return verdict(new, prior)
    return combined([verdict_of(new, threshold), verdict_of(prior, threshold)])


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
    """Number of headline comparisons per verdict, tasks included."""
    verdicts = [c["verdict"] for c in claims["comparisons"] if c["kind"] == CLAIM]
    return {name: verdicts.count(name) for name in ("supported", "refuted", "inconclusive", "missing")}
