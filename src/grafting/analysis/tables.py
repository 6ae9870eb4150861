"""The Markdown of summary.md: verdict first, then one table per protocol and style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grafting.analysis.cells import cells, deployed_estimate, observations, runs, task_names
from grafting.analysis.claims import CLAIM, EQUAL_COST, FRONTIER, counts
from grafting.analysis.collect import ALL, COUNTS, Selected, Study
from grafting.analysis.figures.style import in_order, method_style
from grafting.analysis.sequence import mean as _mean
from grafting.analysis.sequence import sequence_figures, sequence_matrix
from grafting.analysis.statistics import COVERAGE, ITEMS_ONLY, Estimate, Observations, estimate
from grafting.analysis.units import si

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
            *(
                f"{words}: **{claims[kind]['verdict']}** ({claims[kind]['comparisons']} comparisons)."
                for kind, words in (
                    (FRONTIER, "The same of whole frontiers, equal numbers of points fixed on validation data"),
                    (EQUAL_COST, "The same when neither side may spend more FLOPs"),
                )
                if claims[kind]["comparisons"]
            ),
            "",
            f"All comparisons with OPSD and SFT, task by task too: {number['supported']} supported, "
            f"{number['refuted']} refuted, {number['inconclusive']} inconclusive"
            + (f", {number['missing']} missing." if number["missing"] else "."),
            "",
            sentence(claims["definition"]),
            "",
            f"Preset `{spec['preset']}`; learner seeds {joined(spec['seeds'])}; "
            f"model seeds {joined(spec['model_seeds'])}; new tasks {joined(spec['tasks'])}. "
            "Accuracies in per cent, ± half of a 95 % interval over seeds and items.",
            "",
            opsd_sentence(claims["opsd"]),
            "",
            "![prior against new-task accuracy](figures/frontier.svg)",
        ]
    )


def opsd_sentence(setting: Mapping[str, Any] | None) -> str:
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
            rows.append([_title(family), f"{ABSENT}: {joined(lacking or study.spec['seeds'])}"] + [""] * 10)
            continue
        new, prior = (estimate(observations(points, suite)) for suite in ("new", "prior"))
        costs = [_mean([p.cost[name] for seed in points.values() for p in seed]) for name in (*COUNTS, "cpu_seconds")]
        chosen = [s for s in selected if s.labels["family"] == family and s.labels["model_seed"] == model]
        candidates = sorted({len(s.choice["candidates"]) for s in chosen})
        rows.append(
            [
                _title(family), percent(new), percent(prior), sizes(new, prior),
                si(costs[0]), si(costs[2]), si(costs[3]), f"{costs[4]:.1f}",
                si(sum(s.search_cost["flops"] for s in chosen)),
                settings_text(chosen),
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
    found = [deployed_estimate(study, model, suite) for suite in ("new", "prior")]
    return ["deployed", *map(percent, found), sizes(*found), *(["0"] * 5), "", "", ""]


def sizes(new: Estimate | None, prior: Estimate | None) -> str:
    """ "150×3 / 380×3": items × seeds behind the two accuracies."""
    return " / ".join(ABSENT if value is None else f"{value.items}×{value.seeds}" for value in (new, prior))


def _by_task(study: Study, selected: Sequence[Selected], model: Any) -> str:
    """Method x task: new / prior after learning that task alone."""
    rows = []
    for family in _families(selected):
        row = [_title(family)]
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
        rows.append([_title(family), *(percent(_on(seen, task)) for task in study.spec["tasks"])])
    return "New-task accuracy, task by task:\n\n" + markdown(["method", *_task_titles(study)], rows)


def _on(seen: Observations, task: str) -> Estimate | None:
    return estimate({s: own for s, answers in seen.items() if len(own := answers.only(frozenset([task])))})


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
        title = method_style(s.labels["family"])[-1]
        seeds = {p.labels["seed"] for p in s.points}
        if len(seeds) < len(study.spec["seeds"]):
            title += f", only {len(seeds)} of {len(study.spec['seeds'])} seeds"
        blocks.append(f"{title} ({_setting(s)}): {shown}\n\n" + markdown(["", *_task_titles(study), "prior"], rows))
    return "\n\n".join(["Accuracy after every stage, mean over seeds:", *blocks])


def _claims(claims: Mapping[str, Any]) -> str:
    several = len({c["model_seed"] for c in claims["comparisons"]}) > 1
    rows = [
        [
            c["kind"].replace("_", " "), c["protocol"], c["style"], c["task"],
            *([str(c["model_seed"])] if several else []),
            f"{c['a']} − {c['b']}", _difference(c.get("new")) if "new" in c else f"{c['statistic']}:",
            _difference(c["prior"] if "prior" in c else c["value"]), c["verdict"], c["adjusted"] or "",
            "; ".join(c["notes"]),
        ]
        for c in claims["comparisons"]
        if c["kind"] == CLAIM or c["task"] == ALL
    ]  # fmt: skip
    header = ["kind", "protocol", "style", "task", *(["model"] if several else []), "comparison",
              "new, points", "prior, points", "verdict", "Holm", "note"]  # fmt: skip
    text = "Selected on validation, compared on test data: difference in points [95 % interval]. Frontiers and their "
    text += "equal-cost versions are compared on validation data; their one statistic stands in the column *prior*. "
    text += "*Holm*: the verdict at 5 % for all comparisons of one kind together. "
    text += "Controls and ablations task by task: claims.json."
    return f"## Comparisons\n\n{text}\n\n" + markdown(header, rows)


GATE = (
    "Sampled accuracy of the deployed model without and with the demonstration in its prompt. OPSD "
    "learns from the second: where that is low, its result says little about OPSD."
)


def gate_rows(study: Study) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the teacher gate."""
    several = len(study.spec["model_seeds"]) > 1
    plain = {(r.get("model_seed"), r["task"]): r for r in study.rollouts if not r["with_demonstration"]}
    rows = [
        [*([str(r.get("model_seed"))] if several else []), r["task"], r["style"],
         _rollout(plain.get((r.get("model_seed"), r["task"]))), _rollout(r)]
        for r in study.rollouts
        if r["with_demonstration"]
    ]  # fmt: skip
    return [*(["model"] if several else []), "task", "style", "without", "with demonstration"], rows


def _teacher_gate(study: Study) -> str:
    header, rows = gate_rows(study)
    return f"## Teacher gate\n\n{GATE}\n\n" + markdown(header, rows) if study.rollouts else ""


def _rollout(rollout: Mapping[str, Any] | None) -> str:
    return ABSENT if rollout is None else f"{100 * rollout['accuracy']:.1f} (n = {rollout['n']})"


def limits(study: Study, claims: Mapping[str, Any]) -> list[str]:
    """What a reader must know beside the numbers, one sentence or two each."""
    notes = list(study.spec.get("notes", []))
    recall = [task for task, kind in study.kinds().items() if kind == "recall"]
    if recall:
        notes.append(f"† {joined(recall)}: recall of trained items; validation and test are disjoint parts of them.")
    if len(study.spec["model_seeds"]) == 1:
        notes.append("One model seed: every figure is conditional on that model; models differ more than seeds do.")
    if len(study.spec["seeds"]) == 1:
        notes.append("One learner seed: intervals are over items only (marked i) and say nothing about other seeds.")
    notes.append(
        "Families choose among different numbers of candidates (column *of*); selection is by validation "
        "only, so more candidates help a little."
    )
    notes.append(f"Intervals: {COVERAGE} Two methods that tie give `inconclusive`.")
    notes.append(
        "Frontiers are compared on as many points as the method with fewer candidates has; what more points of the "
        "other would add is not tested."
    )
    if claims["untested"]:
        notes.append(
            f"Claims of claims.yaml about methods that this study does not have: {joined(claims['untested'])}."
        )
    for name, text in study.spec.get("reference", {}).items():
        notes.append(f"reference/{name}: {text.splitlines()[0].lstrip('# ')}")
    return [*notes, *(f"Missing: {line}" for line in claims["missing"])]


def _notes(study: Study, claims: Mapping[str, Any]) -> str:
    return "## Notes and limits\n\n" + "\n".join(f"* {note}" for note in limits(study, claims))


def sentence(text: str) -> str:
    """With a capital letter."""
    return text[:1].upper() + text[1:]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def percent(value: Estimate | None) -> str:
    """ "93.1 ± 2.0" in per cent; an i marks an interval over items only."""
    if value is None:
        return ABSENT
    return f"{100 * value.mean:.1f} ± {100 * value.half:.1f}{' i' if value.basis == ITEMS_ONLY else ''}"


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


def settings_text(chosen: Sequence[Selected]) -> str:
    """The settings of several selections; tasks that chose the same are named together."""
    tasks: dict[str, list[str]] = {}
    for selected in chosen:
        tasks.setdefault(_setting(selected), []).append(selected.labels["task"])
    if len(tasks) <= 1:
        return "".join(tasks)
    return "; ".join(f"{'+'.join(names)}: {setting}" for setting, names in tasks.items())


def _families(selected: Sequence[Selected]) -> list[str]:
    """Families in the usual order, unknown ones after them."""
    return in_order([s.labels["family"] for s in selected])


def _title(family: str) -> str:
    name = method_style(family)[-1]
    return f"**{name}**" if family == "graft" else name


def _task_titles(study: Study) -> list[str]:
    kinds = study.kinds()
    return [f"{task} †" if kinds.get(task) == "recall" else task for task in study.spec["tasks"]]


def _plain(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.1f}"


def joined(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))
