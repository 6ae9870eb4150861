"""`report.html`: one self-contained page. Verdict first, then tables, figures, methods, cost, provenance, limits.

No request leaves the file: style, script and pictures are inside, and a content security policy forbids the rest.
Without its script the page still shows every table and names the figures' files; the script sorts, filters, draws
figures and opens what a link points at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from grafting.analysis.collect import Study
from grafting.analysis.page import background, sections
from grafting.analysis.page.markup import code
from grafting.analysis.page.parts import CSS, SCRIPT
from grafting.analysis.tables import joined

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"


def write_page(
    path: Path, study: Study, claims: Mapping[str, Any], figures: Sequence[str], folder: Path,
    records: Mapping[str, Mapping[str, Any]],
) -> None:  # fmt: skip
    """Writes the page. figures: names of the SVG files in `folder`; records: those of `records.behind`."""
    parts = {
        "verdict": ("Verdict", sections.verdict(study, claims)),
        "results": ("Results", sections.results(study, records)),
        "claims": ("Claims", sections.claims(study, claims)),
        "sequence": ("Sequence", sections.sequence(study)),
        "figures": ("Figures", sections.figures(figures, folder)),
        "methods": ("Methods", background.methods(study, claims)),
        "cost": ("Cost", background.cost(records)),
        "environment": ("Environment", background.environment(records)),
        "provenance": ("Provenance", background.provenance(records)),
        "limits": ("Limits", background.limits(study, claims)),
    }
    parts = {name: part for name, part in parts.items() if part[1]}
    body = "\n".join(
        f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{title}</h2>\n{content}\n</section>'
        for name, (title, content) in parts.items()
    )
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, (title, _) in parts.items())
    spec = study.spec
    path.write_text(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape('grafting, ' + spec['preset'] + ': ' + claims['verdict'])}</title>\n"
        f"<style>{CSS}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#verdict">Skip to the verdict</a>\n'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<header class="top">'
        "<h1>Grafting against on-policy self-distillation</h1>"
        f'<p class="soft">Preset {code(spec["preset"])}, learner seeds {joined(spec["seeds"])}, model seeds '
        f"{joined(spec['model_seeds'])}, new tasks {escape(joined(spec['tasks']))}</p></header>\n"
        f"<main>\n{body}\n</main>\n<footer>Made by the workflow from the records and payloads it names. "
        "Links to records work where the page lies in the study's folder (results/).</footer>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n",
        encoding="utf-8",
    )
