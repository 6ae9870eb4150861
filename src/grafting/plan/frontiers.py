"""The test of the frontiers that claims compare: one job per protocol, style and task, after the selections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from grafting.config.claims import FRONTIERS, Claim
from grafting.plan.jobs import key_of

if TYPE_CHECKING:
    from grafting.plan.protocols import Candidate, Family
    from grafting.plan.study import Study


def sizes(claims: Iterable[Claim], families: Sequence[Family]) -> list[dict[str, Any]]:
    """The frontiers that the claims need of the families of one protocol, style and task: {"method", "size"}, and of
    those within a budget {"measure", "against"}. A size is what the smaller side has candidates, the most of all
    claims."""
    have = {family.name: len(family.candidates) for family in families}
    found: dict[tuple[str, str | None, str | None], int] = {}
    for claim in claims:
        condition, right = claim.condition, next((name for name in claim.right if name in have), None)
        applies = all(
            allowed is None or value in allowed
            for allowed, value in ((condition.protocols, families[0].protocol), (condition.styles, families[0].style))
        )
        if claim.statistic in FRONTIERS and applies and claim.left in have and right is not None:
            for name, other in ((claim.left, right), (right, claim.left)):
                kind = (name, condition.equal, other if condition.equal else None)
                found[kind] = max(found.get(kind, 0), min(have[claim.left], have[right]))
    return [
        {"method": name, "size": size, **({"measure": measure, "against": other} if measure else {})}
        for (name, measure, other), size in found.items()
    ]


def add_frontiers(study: Study, families: Sequence[Family]) -> None:
    """Adds the jobs, and tells the report of them. The last entries of `study.selections` are those of `families`."""
    cells: dict[tuple[str, str, str], list[tuple[Family, dict[str, Any]]]] = {}
    for family, entry in zip(families, study.selections[len(study.selections) - len(families) :], strict=True):
        cells.setdefault((family.protocol, family.style, family.task), []).append((family, entry))
    for (protocol, style, task), members in cells.items():
        keep = sizes(study.claims, [family for family, _ in members])
        named = {entry["method"] for entry in keep}
        kept = [(family, entry) for family, entry in members if family.name in named]
        if not kept:
            continue
        candidates = {c.name: c for family, _ in kept for c in family.candidates}
        spec, inputs, entry = _together(list(candidates.values()))
        job = study.add(
            "evaluate",
            f"frontier.{protocol}.{style}.{task}.m{study.m}",
            {**spec, "keep": [_placed(entry, [family.name for family, _ in kept]) for entry in keep]},
            {
                **inputs,
                "selections": [chosen["selection"] for _, chosen in kept],
                # what another method's selection may have tested already
                "tests": list(
                    dict.fromkeys(
                        chosen["test"]
                        for family, chosen in members
                        if any(c.name in candidates for c in family.candidates)
                    )
                ),
            },
            ("frontier", *entry[1:]),
        )
        study.frontiers.append(
            {
                "job": job,
                "protocol": protocol,
                "style": style,
                "task": task,
                "model_seed": study.m,
                "candidates": {
                    name: [
                        {"seed": int(s), "point": key, "trained": list(map(key_of, candidates[name].trained(int(s))))}
                        for s, key in by_seed.items()
                    ]
                    for name, by_seed in spec["candidates"].items()
                },
            }
        )


def _placed(entry: dict[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """With the places of the selections."""
    other = {"other": methods.index(entry["against"])} if "against" in entry else {}
    return {**entry, "selection": methods.index(entry["method"]), **other}


def _together(candidates: Sequence[Candidate]) -> tuple[dict[str, Any], dict[str, list[str]], tuple[str, ...]]:
    """Spec, inputs and code entry of the tests of all candidates in one; of a sequence the last stage only."""
    points, pairs, keys = [], {}, {}
    inputs: dict[str, list[str]] = {}
    for candidate in candidates:
        test = candidate.test
        last = max(point["labels"]["stage"] or 0 for point in test.spec["points"])
        terms = list(zip(test.inputs["trained"], test.inputs["donor"], strict=True))
        inputs |= {role: refs for role, refs in test.inputs.items() if role not in ("trained", "donor")}
        for point in test.spec["points"]:
            if (point["labels"]["stage"] or 0) < last:
                continue
            places = [pairs.setdefault(terms[term], len(pairs)) for term in point["recipe"]["terms"]]
            points.append({**point, "recipe": {**point["recipe"], "terms": places}})
            keys.setdefault(candidate.name, {})[str(point["labels"]["seed"])] = point["key"]
    settings = {name: value for name, value in candidates[0].test.spec.items() if name != "points"}
    trained = {"trained": [trained for trained, _ in pairs], "donor": [donor for _, donor in pairs]}
    return {**settings, "points": points, "candidates": keys}, {**inputs, **trained}, candidates[0].test.entry
