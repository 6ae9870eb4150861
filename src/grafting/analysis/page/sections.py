"""What came out: verdict, results, claims, sequence, figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from grafting.analysis import rows, tables
from grafting.analysis.cells import overall_model
from grafting.analysis.claims import CLAIM, EQUAL_COST, FRONTIER, counts
from grafting.analysis.collect import ALL, Study, selection_table
from grafting.analysis.figures import FIGURES
from grafting.analysis.figures.style import method_style
from grafting.analysis.page.markup import (
    Raw,
    accuracy,
    amount,
    anchor,
    gap,
    items,
    live,
    percent,
    plain,
)
from grafting.analysis.page.markup import verdict as shown
from grafting.analysis.sequence import NAMES

KINDS = {
    CLAIM: "one selected graft against the selected OPSD and SFT; test data",
    FRONTIER: "whole frontiers, equal numbers of points fixed on validation data; test data",
    EQUAL_COST: "neither side may spend more FLOPs than the other",
}
#: What a data URL holds as it is, inside an attribute in double quotes.
IN_ATTRIBUTE = " !$'()*+,-./:;<=>?@[]^_`{|}~"
TWO_SIDED = ("new task, points", "prior, points")


def _title(family: str) -> str:
    return method_style(family)[-1]


def _versus(c: Mapping[str, Any]) -> str:
    return f"{_title(c['a'])} − {_title(c['b'])}"


def _several(study: Study) -> bool:
    return len(study.spec["model_seeds"]) > 1


def verdict(study: Study, said: Mapping[str, Any]) -> str:
    """The verdict, per protocol and style, and the headline comparisons."""
    cells = [(p["protocol"], p["style"]) for p in said["protocols"]]
    body = []
    for kind, words in KINDS.items():
        part = said if kind == CLAIM else said[kind]
        if kind == CLAIM or part["comparisons"]:
            body.append([words, *(shown(p["verdict"]) for p in part["protocols"]), shown(part["verdict"])])
    header = ["what is compared", *(f"{protocol}, {style}" for protocol, style in cells), "overall"]
    main = [
        c for c in said["comparisons"]
        if c["kind"] == CLAIM and c["task"] == ALL and c["model_seed"] == overall_model(study)
    ]  # fmt: skip
    lines = plain(
        ["protocol", "style", "comparison", *TWO_SIDED, "verdict"],
        [
            [c["protocol"], c["style"], _versus(c), gap(c["new"])[0], gap(c["prior"])[0], shown(c["verdict"])]
            for c in main
        ],
    )
    number = counts(said)
    tally = ", ".join(f"{n} {name}" for name, n in number.items() if n or name != "missing")
    opsd = tables.opsd_sentence(said["opsd"])
    absent = (
        f"<p><strong>Missing, and not averaged over:</strong></p>{items(said['missing'])}" if said["missing"] else ""
    )
    return (
        '<p class="lead">The claim, that one validation-selected graft is at least as good as '
        "validation-selected OPSD and "
        f"SFT in new-task <em>and</em> prior accuracy, is {shown(said['verdict'])}, {escape(said['condition'])}.</p>\n"
        f"{plain(header, body)}\n{absent}<p>Left minus right on test data, in points of accuracy, with 95 % "
        "intervals:</p>\n"
        f'{lines}\n<p class="note">{escape(tables.sentence(said["definition"]))} All comparisons with OPSD and '
        "SFT, task by "
        f"task too: {tally}. {escape(opsd)}</p>"
    )


def results(study: Study, records: Mapping[str, Any]) -> str:
    """Test results, candidates, and whether a teacher exists."""
    several = _several(study)
    header = ["protocol", "style", "method", "task", *(["model"] if several else []), "new task, %", "prior, %",
              "n", "setting", "of", "seeds", "generated", "backpropagated", "FLOPs", "search FLOPs", "CPU s",
              "records"]  # fmt: skip
    body: list[list[Any]] = []
    for row in rows.deployed_rows(study):
        body.append(
            ["", "", "deployed", ALL, *([str(row["model_seed"])] if several else []), accuracy(row["new"]),
             accuracy(row["prior"]), tables.sizes(row["new"], row["prior"]), "", ("", None), "", *[("0", 0)] * 5, ""]
        )  # fmt: skip
    for row in rows.method_rows(study):
        cost = row["cost"]
        numbers = [cost[name] for name in ("tokens_generated", "tokens_backpropagated", "flops")]
        body.append(
            [
                row["protocol"], row["style"], _title(row["method"]), row["task"],
                *([str(row["model_seed"])] if several else []), accuracy(row["new"]), accuracy(row["prior"]),
                tables.sizes(row["new"], row["prior"]), row["setting"],
                ("–".join(map(str, row["candidates"])), float(max(row["candidates"], default=0))),
                f"{row['seeds']}/{row['expected']}", *map(amount, numbers), amount(row["search_flops"]),
                amount(cost["cpu_seconds"]), _links([*row["records"], *row["selections"]], records),
            ]
        )  # fmt: skip
    note = (
        "Accuracy on test data ± half of a 95 % interval; <em>i</em>: over items only. <em>n</em>: items × seeds "
        "behind new / "
        "prior. Cost: training of one selected checkpoint with its rollouts, mean over tasks and seeds; search: "
        "training of "
        "all candidates. <em>of</em>: number of candidates. The last column leads to the records of test and selection."
    )
    table = selection_table(study)
    names = [c for c in table.columns if c != "model_seed" or several]
    listed = [
        [("yes" if v else "") if n == "chosen" else percent(v) if n in ("score", "new", "prior") else str(v)
         for n, v in zip(names, row, strict=True)]
        for row in table[names].itertuples(index=False)
    ]  # fmt: skip
    numeric = {"new task, %", "prior, %", "n", "of", "generated", "backpropagated", "FLOPs", "search FLOPs", "CPU s"}
    return (
        f'<p class="note">{note}</p>{live("t-results", "Results", header, body, numeric)}'
        '<h3>All candidates, validation data</h3><p class="note">Accuracies in per cent; score is what was '
        "maximised.</p>"
        f"{live('t-candidates', 'Candidates', names, listed, {'score', 'new', 'prior'})}"
        f"{_frontiers(study, records)}{_gate(study)}"
    )


def _frontiers(study: Study, records: Mapping[str, Any]) -> str:
    """The points that frontier claims compare."""
    several = _several(study)
    header = ["protocol", "style", "task", *(["model"] if several else []), "method", "within the cost of", "place",
              "candidate", "new task, %", "prior, %", "seeds", "records"]  # fmt: skip
    body = []
    for f in study.frontiers:
        place = [f.labels["protocol"], f.labels["style"], f.labels["task"]]
        place += [str(f.labels["model_seed"])] if several else []
        for (method, measure, other), names in f.methods.items():
            limit = "" if measure is None else f"{_title(other)} ({measure})"
            for number, name in enumerate(names, 1):
                points = list(f.points[name].values())
                means = [np.mean([p.accuracy(suite) for p in points]) for suite in ("new", "prior")]
                body.append(
                    [*place, _title(method), limit, (str(number), number), name, *map(percent, means),
                     str(len(points)), _links(list(dict.fromkeys(p.record for p in points)), records)]
                )  # fmt: skip
    if not body:
        return ""
    note = (
        "The points that dominate most on validation data, fixed before test data were read; here their accuracy on "
        "test data, mean over seeds. A comparison uses as many places as the smaller side has."
    )
    numeric = {"place", "new task, %", "prior, %"}
    return (
        f'<h3>Points of the frontiers, test data</h3><p class="note">{note}</p>'
        f"{live('t-frontiers', 'Points of the frontiers', header, body, numeric)}"
    )


def _links(ids: Sequence[str], records: Mapping[str, Any]) -> Raw | str:
    """Numbered links to the records at hand."""
    known = [job_id for job_id in ids if job_id in records]
    return Raw(" ".join(f'<a href="#{anchor(i)}" title="{escape(i)}">{n}</a>' for n, i in enumerate(known, 1)))


def _gate(study: Study) -> str:
    header, body = tables.gate_rows(study)
    if not body:
        return ""
    return f'<h3>Teacher gate</h3><p class="note">{tables.GATE}</p>{plain(header, body)}'


def claims(study: Study, said: Mapping[str, Any]) -> str:
    """Every comparison."""
    several = _several(study)
    header = ["kind", "protocol", "style", "task", *(["model"] if several else []), "comparison", "statistic",
              *TWO_SIDED, "verdict", "Holm", "what it asks, notes"]  # fmt: skip
    body = [
        [
            c["kind"].replace("_", " "), c["protocol"], c["style"], c["task"],
            *([str(c["model_seed"])] if several else []), _versus(c), c["statistic"].replace("_", " "),
            gap(c["new"]) if "new" in c else ("", None), gap(c["prior"] if "new" in c else c["value"]),
            shown(c["verdict"]), c["adjusted"] or "", "; ".join([c["asks"], *c["notes"]]),
        ]
        for c in said["comparisons"]
    ]  # fmt: skip
    note = (
        "Claims are data: claims.yaml. Difference in points [95 % interval]; a statistic that is one number "
        "stands in the "
        "column <em>prior</em> (hypervolume: points of the unit square). <em>Holm</em>: the verdict at 5 % for all "
        "comparisons of one kind together."
    )
    untested = (
        f'<p class="note">Not tested, since this study lacks a method: {escape(tables.joined(said["untested"]))}.</p>'
        if said["untested"]
        else ""
    )
    return f'<p class="note">{note}</p>{live("t-claims", "Claims", header, body, set(TWO_SIDED))}{untested}'


def sequence(study: Study) -> str:
    """Figures of the sequential protocol; nothing without one."""
    found = list(rows.sequence_rows(study))
    if not found:
        return ""
    several = _several(study)
    stages = [f"normalised after {task}" for task in study.spec["tasks"]]
    header = ["method", *(["model"] if several else []), *(f"{name}, %" for name in NAMES), *stages, "seeds"]
    body = []
    for row in found:
        curve = [(f"{value:.2f}", value) for value in row["normalised"]]
        body.append(
            [_title(row["method"]), *([str(row["model_seed"])] if several else []),
             *(percent(row["figures"].get(name)) for name in NAMES),
             *curve, *[("", None)] * (len(stages) - len(curve)), str(row["seeds"])]
        )  # fmt: skip
    note = (
        "From a[i][j], test accuracy on task j after stage i, mean over seeds. Forgetting: best earlier minus "
        "last accuracy; "
        "backward transfer: last minus first; forward transfer: before learning minus the deployed model. Normalised: "
        "0 = the deployed model, 1 = the best that any method reached, mean over the tasks learned so far."
    )
    return f'<p class="note">{note}</p>{live("t-sequence", "Sequence", header, body, set(header[1:]))}'


def figures(names: Sequence[str], folder: Path) -> str:
    """The figures, inside the page. The script draws one when it comes near the window: drawing all of them at once
    took most of the time until the page was there, and browsers load what is inline at once whatever `loading` says."""
    blocks = []
    for name in names:
        title, text = FIGURES[name]
        svg = (folder / f"{name}.svg").read_bytes()
        width, height = _size(svg)
        # as text: a third smaller than base64
        data = quote(svg.decode("utf-8").replace("\n", " "), safe=IN_ATTRIBUTE)
        blocks.append(
            f'<figure id="figure-{name}"><h3>{title}</h3><div class="figure-scroll" tabindex="0">'
            f'<img decoding="async" alt="{escape(title)}: {escape(text)}" width="{width}" height="{height}" '
            f'data-src="data:image/svg+xml,{data}">'
            f'<noscript>Drawn by a script: see <a href="figures/{name}.svg">figures/{name}.svg</a></noscript></div>'
            f'<figcaption>{escape(text)} <a href="figures/{name}.svg">SVG</a>, <a href="figures/{name}.pdf">PDF</a>'
            "</figcaption></figure>"
        )
    return "\n".join(blocks)


def _size(svg: bytes) -> tuple[int, int]:
    """Width and height of a picture in CSS pixels, so that nothing moves when it is drawn; the file has points."""
    width, height = re.search(rb'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', svg).groups()
    return round(float(width) * 4 / 3), round(float(height) * 4 / 3)
