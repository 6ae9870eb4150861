"""The Markdown of summary.md: verdict first, then one table per protocol and style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grafting.analysis.claims import ALL, CLAIM, cells, counts, observations, runs, task_names
from grafting.analysis.collect import COUNTS, DEPLOYED, Point, Selected, Study
from grafting.analysis.statistics import ITEMS_ONLY, Estimate, estimate

FAMILIES = {
    "sft": "SFT",
    "sft_scaled": "SFT, scaled",
    "opsd": "OPSD",
    "opsd_scaled": "OPSD, scaled",
    "opsd_regraft": "OPSD, merged after every task",
    "graft": "**graft**",
    "graft_early": "graft, donor before deployed",
    "graft_unmasked": "graft, no mask",
    "graft_masked": "graft, Fisher mask",
    "graft_random": "graft, random mask",
    "graft_unscaled": "graft, λ = 1",
    "graft_regraft": "graft, merged after every task",
    "graft_sum": "graft, sum of updates from one donor",
}
STYLES = {"own": "demonstrations in the model's own style", "expert": "an expert's demonstrations"}
ABSENT = "missing"


def summary(study: Study, claims: Mapping[str, Any]) -> str:
    """The whole of summary.md."""
    parts = [
        _verdict(study, claims),
        *_protocols(study),
        _claims(claims),
        _teacher_gate(study),
        _notes(study, claims),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _verdict(study: Study, claims: Mapping[str, Any]) -> str:
    spec, number = study.spec, counts(claims)
    return "\n".join(
        [
            f"# Verdict: {claims['verdict']}, {claims['condition']}",
            "",
            "The claim: one validation-selected graft is at least as good as validation-selected OPSD "
            "and SFT in new-task *and* prior accuracy, on test data.",
            "",
            markdown(
                ["protocol", "style", "verdict"],
                [[p["protocol"], p["style"], f"**{p['verdict']}**"] for p in claims["protocols"]],
            ),
            "",
            f"All comparisons with OPSD and SFT, task by task too: {number['supported']} supported, "
            f"{number['refuted']} refuted, {number['inconclusive']} inconclusive"
            + (f", {number['missing']} missing." if number["missing"] else "."),
            "",
            f"{claims['definition'][0].upper()}{claims['definition'][1:]}",
            "",
            f"Preset `{spec['preset']}`; learner seeds {_list(spec['seeds'])}; "
            f"model seeds {_list(spec['model_seeds'])}; new tasks {_list(spec['tasks'])}. "
            "Accuracies in per cent, ± half of a 95 % interval over seeds and items.",
            "",
            _opsd(claims["opsd"]),
            "",
            "![prior against new-task accuracy](figures/frontier.svg)",
        ]
    )


def _opsd(setting: Mapping[str, Any] | None) -> str:
    """Which OPSD: "forward" and "reverse" are used both ways in the literature, so the KL is written out."""
    if setting is None:
        return "OPSD is not part of this study."
    return f"OPSD minimises {setting['divergence']}; teacher: {setting['teacher']}."


def _protocols(study: Study) -> list[str]:
    parts = []
    for (protocol, style), selected in cells(study).items():
        parts.append(f"## {protocol.capitalize()}: {STYLES.get(style, style)}")
        for model in study.spec["model_seeds"]:
            if len(study.spec["model_seeds"]) > 1:
                parts.append(f"### Model seed {model}")
            parts.append(_methods(study, protocol, selected, model))
            if protocol == "single":
                parts.append(_by_task(study, selected, model))
            elif protocol == "sequential":
                parts.append(_matrices(study, selected, model))
            else:
                parts.append(_by_task_of_all(study, selected, model))
    return parts


def _methods(study: Study, protocol: str, selected: Sequence[Selected], model: Any) -> str:
    """Method x {new, prior, cost}, mean over the protocol's tasks."""
    tasks = task_names(study, protocol)
    header = ["method", "new task", "prior", "n", "generated", "backpropagated", "FLOPs", "CPU s", "search FLOPs",
              "selected", "of", "seeds"]  # fmt: skip
    rows = [_deployed_row(study, model)]
    for family in _families(selected):
        points = runs(study, selected, family, tasks, model)
        have = {s.labels["task"] for s in selected if s.labels["family"] == family and s.labels["model_seed"] == model}
        lacking = [task for task in tasks if task not in have]
        if not points:
            rows.append(
                [FAMILIES.get(family, family), f"{ABSENT}: {_list(lacking or study.spec['seeds'])}"] + [""] * 10
            )
            continue
        new, prior = (estimate(observations(points, suite)) for suite in ("new", "prior"))
        costs = [_mean([p.cost[name] for seed in points.values() for p in seed]) for name in (*COUNTS, "cpu_seconds")]
        chosen = [s for s in selected if s.labels["family"] == family and s.labels["model_seed"] == model]
        candidates = sorted({len(s.choice["candidates"]) for s in chosen})
        rows.append(
            [
                FAMILIES.get(family, family), percent(new), percent(prior), _sizes(new, prior),
                si(costs[0]), si(costs[2]), si(costs[3]), f"{costs[4]:.1f}",
                si(sum(s.search_cost["flops"] for s in chosen)),
_settings(chosen),
                "–".join(map(str, candidates)), f"{len(points)}/{len(study.spec['seeds'])}",
            ]
        )  # fmt: skip
    note = (
        "\n*n*: test items × seeds behind new / prior. Cost, from the jobs' own records: training of one selected "
        "checkpoint with its rollouts (mean over tasks and seeds), without evaluation and Fisher estimates; "
        "*search FLOPs*: training of all candidates, all tasks and seeds; *of*: their number."
    )
    return markdown(header, rows) + "\n" + note


def _deployed_row(study: Study, model: Any) -> list[str]:
    """The deployed model itself, every new task."""
    new: dict[tuple[str, str], float] = {}
    prior: dict[tuple[str, str], float] = {}
    for point in _deployed_points(study, model):
        seen = observations({"": [point]}, "new"), observations({"": [point]}, "prior")
        new.update(seen[0].get("", {}))
        prior.update(seen[1].get("", {}))
    found = [estimate({"": part}) if part else None for part in (new, prior)]
    return ["deployed", *map(percent, found), _sizes(*found), *(["0"] * 5), "", "", ""]


def _sizes(new: Estimate | None, prior: Estimate | None) -> str:
    """ "150×3 / 380×3": items × seeds behind the two accuracies."""
    return " / ".join(ABSENT if value is None else f"{value.items}×{value.seeds}" for value in (new, prior))


def _deployed_points(study: Study, model: Any) -> list[Point]:
    return [
        p for p in study.points
        if p.labels["family"] == DEPLOYED and p.split == "test" and p.labels["model_seed"] == model
    ]  # fmt: skip


def _by_task(study: Study, selected: Sequence[Selected], model: Any) -> str:
    """Method x task: new / prior after learning that task alone."""
    rows = []
    for family in _families(selected):
        row = [FAMILIES.get(family, family)]
        for task in study.spec["tasks"]:
            points = runs(study, selected, family, [task], model)
            new, prior = (estimate(observations(points, suite)) for suite in ("new", "prior"))
            row.append(ABSENT if new is None else f"{percent(new)} / {percent(prior)}")
        rows.append(row)
    return "New / prior, task by task:\n\n" + markdown(["method", *_task_titles(study)], rows)


def _by_task_of_all(study: Study, selected: Sequence[Selected], model: Any) -> str:
    """Method x task for points that learned every task."""
    rows = []
    for family in _families(selected):
        points = runs(study, selected, family, [ALL], model)
        seen = observations(points, "new")
        rows.append([FAMILIES.get(family, family), *(percent(_on(seen, task)) for task in study.spec["tasks"])])
    return "New-task accuracy, task by task:\n\n" + markdown(["method", *_task_titles(study)], rows)


def _on(seen: Mapping[str, Mapping[tuple[str, str], float]], task: str) -> Estimate | None:
    return estimate({s: own for s, v in seen.items() if (own := {k: x for k, x in v.items() if k[0] == task})})


def _matrices(study: Study, selected: Sequence[Selected], model: Any) -> str:
    """a[i][j]: accuracy on task j after stage i; the usual figures of a sequence from it."""
    blocks = []
    for s in selected:
        if s.labels["model_seed"] != model:
            continue
        matrix = sequence_matrix(study, s)
        tasks = study.spec["tasks"]
        rows = [
            [
                f"after {tasks[stage] if stage < len(tasks) else stage}",
                *(_plain(row.get(t)) for t in (*tasks, "prior")),
            ]
            for stage, row in sorted(matrix.items())
        ]
        figures = sequence_figures(study, s, matrix)
        shown = ", ".join(f"{name} {_plain(value)}" for name, value in figures.items())
        title = FAMILIES.get(s.labels["family"], s.labels["family"]).strip("*")
        seeds = {p.labels["seed"] for p in s.points}
        if len(seeds) < len(study.spec["seeds"]):
            title += f", only {len(seeds)} of {len(study.spec['seeds'])} seeds"
        blocks.append(f"{title} ({_setting(s)}): {shown}\n\n" + markdown(["", *_task_titles(study), "prior"], rows))
    return "\n\n".join(["Accuracy after every stage, mean over seeds:", *blocks])


def sequence_matrix(study: Study, selected: Selected) -> dict[int, dict[str, float]]:
    """stage -> {task or "prior": accuracy}, mean over the seeds at hand."""
    matrix: dict[int, dict[str, float]] = {}
    for stage in sorted({p.labels["stage"] or 0 for p in selected.points}):
        points = [p for p in selected.points if (p.labels["stage"] or 0) == stage]
        row = {
            task: [a for p in points if (a := p.accuracy("new", [task])) is not None] for task in study.spec["tasks"]
        }
        row["prior"] = [a for p in points if (a := p.accuracy("prior")) is not None]
        matrix[stage] = {name: _mean(values) for name, values in row.items() if values}
    return matrix


def sequence_figures(study: Study, selected: Selected, matrix: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Average accuracy, forgetting, backward and forward transfer; each only where the matrix is complete.

    With T stages, task i learned at stage i, a[-1] the deployed model: average = mean_j a[T-1][j];
    forgetting = mean_{j<T-1} max_i a[i][j] - a[T-1][j]; backward = mean_{j<T-1} a[T-1][j] - a[j][j];
    forward = mean_{j>0} a[j-1][j] - a[-1][j] (Lopez-Paz and Ranzato 2017; Chaudhry et al. 2018).
    """
    tasks = study.spec["tasks"]
    last = len(tasks) - 1
    if any(matrix.get(i, {}).get(task) is None for i in range(len(tasks)) for task in tasks):
        return {}
    figures = {"average": _mean([matrix[last][task] for task in tasks])}
    if last > 0:
        before = tasks[:last]
        figures["forgetting"] = _mean([max(matrix[i][t] for i in range(last)) - matrix[last][t] for t in before])
        figures["backward transfer"] = _mean([matrix[last][t] - matrix[j][t] for j, t in enumerate(before)])
        start = {t: study.deployed("test", selected.labels["model_seed"], t) for t in tasks[1:]}
        if all(start.values()):
            figures["forward transfer"] = _mean(
                [matrix[j][t] - start[t].accuracy("new", [t]) for j, t in enumerate(tasks[1:])]
            )
    return figures


def _claims(claims: Mapping[str, Any]) -> str:
    rows = [
        [
            c["kind"], c["protocol"], c["style"], c["task"],
            *([str(c["model_seed"])] if len({x["model_seed"] for x in claims["comparisons"]}) > 1 else []),
            f"{c['a']} − {c['b']}", _difference(c["new"]), _difference(c["prior"]), c["verdict"],
            "; ".join(c["notes"]),
        ]
        for c in claims["comparisons"]
        if c["kind"] == CLAIM or c["task"] == ALL
    ]  # fmt: skip
    several = bool(rows) and len(rows[0]) == 10
    header = ["kind", "protocol", "style", "task", *(["model"] if several else []), "comparison",
              "new, points", "prior, points", "verdict", "note"]  # fmt: skip
    text = "Selected on validation, compared on test data: difference in points [95 % interval]. "
    text += "Controls and ablations task by task: claims.json."
    return f"## Comparisons\n\n{text}\n\n" + markdown(header, rows)


def _teacher_gate(study: Study) -> str:
    if not study.rollouts:
        return ""
    several = len(study.spec["model_seeds"]) > 1
    plain = {(r.get("model_seed"), r["task"]): r for r in study.rollouts if not r["with_demonstration"]}
    rows = [
        [*([str(r.get("model_seed"))] if several else []), r["task"], r["style"],
         _rollout(plain.get((r.get("model_seed"), r["task"]))), _rollout(r)]
        for r in study.rollouts
        if r["with_demonstration"]
    ]  # fmt: skip
    header = [*(["model"] if several else []), "task", "style", "without", "with demonstration"]
    text = (
        "Sampled accuracy of the deployed model without and with the demonstration in its prompt. OPSD "
        "learns from the second: where that is low, its result says little about OPSD."
    )
    return f"## Teacher gate\n\n{text}\n\n" + markdown(header, rows)


def _rollout(rollout: Mapping[str, Any] | None) -> str:
    return ABSENT if rollout is None else f"{100 * rollout['accuracy']:.1f} (n = {rollout['n']})"


def _notes(study: Study, claims: Mapping[str, Any]) -> str:
    notes = list(study.spec.get("notes", []))
    recall = [task for task, kind in study.kinds().items() if kind == "recall"]
    if recall:
        notes.append(f"† {_list(recall)}: recall of trained items; validation and test are disjoint parts of them.")
    if len(study.spec["model_seeds"]) == 1:
        notes.append("One model seed: every figure is conditional on that model; models differ more than seeds do.")
    if len(study.spec["seeds"]) == 1:
        notes.append("One learner seed: intervals are over items only (marked i) and say nothing about other seeds.")
    notes.append(
        "Families choose among different numbers of candidates (column *of*); selection is by validation "
        "only, so more candidates help a little."
    )
    notes.append(
        "Intervals: simulated coverage at 3 seeds is 96 to 99.7 % for paired differences; for single "
        "accuracies whose seeds pile up at 100 % it can be as low as 84 %. "
        "Two methods that tie give `inconclusive`."
    )
    notes += [f"Missing: {line}" for line in claims["missing"]]
    return "## Notes and limits\n\n" + "\n".join(f"* {note}" for note in notes)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def percent(value: Estimate | None) -> str:
    """ "93.1 ± 2.0" in per cent; an i marks an interval over items only."""
    if value is None:
        return ABSENT
    return f"{100 * value.mean:.1f} ± {100 * value.half:.1f}{' i' if value.basis == ITEMS_ONLY else ''}"


def si(number: float) -> str:
    """Three digits and a prefix: 12345 -> 12.3 k."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g}"


def _difference(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return ABSENT
    return f"{100 * value['mean']:+.1f} [{100 * value['low']:+.1f}, {100 * value['high']:+.1f}]"


def _setting(selected: Selected) -> str:
    """What was chosen: "base, λ 0.8, kfac-fisher-0.01, lr 0.0003"."""
    label = selected.choice["label"]
    operator = label.get("operator")
    parts = [
        label.get("donor"),
        operator if operator != "graft" else None,
        f"λ {label['scale']:g}" if label.get("scale") is not None else None,
        label.get("mask") if label.get("mask") != "none" else None,
        f"lr {label['lr']:g}" if label.get("lr") is not None else None,
    ]
    return ", ".join(str(part) for part in parts if part is not None)


def _settings(chosen: Sequence[Selected]) -> str:
    """The settings of several selections; tasks that chose the same are named together."""
    tasks: dict[str, list[str]] = {}
    for selected in chosen:
        tasks.setdefault(_setting(selected), []).append(selected.labels["task"])
    if len(tasks) <= 1:
        return "".join(tasks)
    return "; ".join(f"{'+'.join(names)}: {setting}" for setting, names in tasks.items())


def _families(selected: Sequence[Selected]) -> list[str]:
    """Families in the usual order, unknown ones after them."""
    found = list(dict.fromkeys(s.labels["family"] for s in selected))
    return [*(f for f in FAMILIES if f in found), *(f for f in found if f not in FAMILIES)]


def _task_titles(study: Study) -> list[str]:
    kinds = study.kinds()
    return [f"{task} †" if kinds.get(task) == "recall" else task for task in study.spec["tasks"]]


def _plain(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.1f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _list(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))
