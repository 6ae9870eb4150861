"""How it came about: methods and settings, cost, environment, provenance, limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from grafting.analysis import records as behind
from grafting.analysis import tables
from grafting.analysis.collect import Study
from grafting.analysis.page.markup import amount, anchor, code, html, items, live, plain
from grafting.analysis.statistics import COVERAGE
from grafting.analysis.units import si

STAGES = {
    "data": "tasks and suites",
    "models": "the lineage",
    "rollout": "rollouts of the deployed model",
    "train": "learners",
    "sensitivity": "Fisher information",
    "merge": "models written out",
    "evaluate": "evaluations",
    "select": "selections",
}


def _leaves(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [leaf for i, inner in enumerate(value) for leaf in _leaves(inner, f"{path}[{i}]")]
    text = ", ".join(map(str, value)) if isinstance(value, list) else "null" if value is None else str(value)
    return [(path, text)]


def methods(study: Study, claims: Mapping[str, Any]) -> str:
    """The method in short, and every setting."""
    text = [
        "Grafting fine-tunes a donor checkpoint, θ = θ₀ + λ·Δ with Δ = SFT(θ_d) − θ_d, optionally masking the "
        "directions to "
        "which the deployed model θ₀ is most sensitive. " + tables.opsd_sentence(claims["opsd"]),
        "Learning rate, donor, λ and mask are chosen by validation data, mean over seeds; test data are read "
        "once, for what was chosen and for the points of the frontiers. Old-task (prior) accuracy is the mean over "
        "the capabilities to keep.",
        f"Intervals are over seeds and items (Student's t over seeds and a normal term over items, added in square). "
        f"{COVERAGE} Beside the headline comparisons claims.json holds the percentile interval of a hierarchical "
        "bootstrap "
        "(seeds, then items, 10 000 draws).",
        "Frontier claims compare point sets of equal size on test data: of every method the points that dominate most "
        "on validation data, fixed before test data were read, as many as the method with fewer candidates has.",
    ]
    body = [[key, value] for key, value in _leaves(study.spec["settings"])]
    return (
        "".join(f"<p>{escape(part)}</p>" for part in text)
        + "<h3>Every setting</h3>"
        + live("t-settings", "Settings", ["key", "value"], body, ())
    )


def cost(records: Mapping[str, Mapping[str, Any]]) -> str:
    """What the whole study took, stage by stage."""
    found = behind.costs(records)
    if not found:
        return ""
    names = ("cpu_seconds", "wall_seconds", "tokens_generated", "tokens_forwarded", "tokens_backpropagated", "flops")
    header = ["stage", "jobs", "CPU s", "wall s", "generated", "forwarded", "backpropagated", "FLOPs", "peak MB"]
    body = [
        [f"{row['stage']}: {STAGES[row['stage']]}", str(row["jobs"]), *(amount(row[name]) for name in names),
         (f"{row['peak_memory_bytes'] / 1e6:.0f}", row["peak_memory_bytes"])]
        for row in found
    ]  # fmt: skip
    body.append(
        ["all", str(sum(row["jobs"] for row in found)), *(amount(sum(row[name] for row in found)) for name in names),
         (f"{max(row['peak_memory_bytes'] for row in found) / 1e6:.0f}", None)]
    )  # fmt: skip
    note = "From the jobs' own records; FLOPs count training only (2N per token forward, 4N backward)."
    return f'<p class="note">{note}</p>{plain(header, body)}'


def environment(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Machines, revisions and versions."""
    blocks = []
    for part in behind.environments(records):
        lines = [("jobs", part["jobs"])]
        lines += [(f"host, {name}", value) for name, value in sorted(part["host"].items())]
        git = part["git"]
        if git:
            lines.append(("git", f"{git.get('revision') or 'no commit'}{', with changes' if git.get('dirty') else ''}"))
        lines += [(name, value) for name, value in sorted(part["versions"].items())]
        blocks.append("<dl>" + "".join(f"<dt>{html(n)}</dt><dd>{html(v)}</dd>" for n, v in lines) + "</dl>")
    if not blocks:
        return ""
    rest = "".join(f"<details><summary>Another environment</summary>{block}</details>" for block in blocks[1:])
    return blocks[0] + rest


def provenance(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Every record behind the report: settings, inputs, code, data, cost, and the file itself."""
    if not records:
        return ""
    groups: dict[str, list[str]] = {}
    for job_id, sidecar in records.items():
        groups.setdefault(job_id.partition("/")[0], []).append(_record(job_id, sidecar, records))
    note = (
        "A job is named by the hash of its settings, inputs and code. Each entry leads on to its inputs, to the "
        "record itself "
        "(provenance/) and to what its code digest is made of. <code>grafting trace</code> prints the same tree."
    )
    return f'<p class="note">{note}</p>' + "\n".join(
        f"<details><summary>{stage}: {STAGES.get(stage, '')} ({len(entries)})</summary>{''.join(entries)}</details>"
        for stage, entries in groups.items()
    )


def _record(job_id: str, sidecar: Mapping[str, Any], records: Mapping[str, Any]) -> str:
    file = f'<a class="record" href="../provenance/{escape(job_id)}.json">{escape(job_id)}.json</a>'
    name = job_id.partition("/")[2]
    lines = [("record", file)]
    if "link" in sidecar:
        lines.append(("the same as", _linked([sidecar["link"]], records)))
    if sidecar.get("code"):
        lines.append(
            ("code", f'<a href="../provenance/code/{escape(sidecar["code"])}.json">{escape(sidecar["code"])}</a>')
        )
    git = sidecar.get("git") or {}
    if git.get("revision"):
        lines.append(("git", code(git["revision"][:10]) + (" with changes" if git.get("dirty") else "")))
    for role, references in sorted(sidecar.get("inputs", {}).items()):
        lines.append((f"input: {role}", _linked(references, records)))
    took = sidecar.get("cost") or {}
    if took:
        lines.append(("cost", f"{took.get('cpu_seconds', 0):.1f} CPU s, {si(took.get('flops', 0))} FLOPs"))
    hashes = [
        f"{escape(name)} {code(sha[:16])}" + ("" if size is None else f" ({size} bytes)")
        for name, sha, size in behind.files(sidecar)
    ]
    if hashes:
        shown = hashes[:12] + ([f"and {len(hashes) - 12} more in the record"] if len(hashes) > 12 else [])
        lines.append(("files, sha256", "<br>".join(shown)))
    spec = json.dumps(behind.shown_spec(sidecar.get("spec") or {}), ensure_ascii=False, sort_keys=True)
    if sidecar.get("spec"):
        lines.append(("settings", code(spec)))
    pairs = "".join(f"<dt>{escape(n)}</dt><dd>{v}</dd>" for n, v in lines)
    return f'<details id="{anchor(job_id)}"><summary>{escape(name)}</summary><dl>{pairs}</dl></details>'


def _linked(references: Sequence[str], records: Mapping[str, Any]) -> str:
    parts = []
    for reference in references[:8]:
        job_id, _, rest = reference.partition(":")
        shown = escape(job_id) + (f":{escape(rest)}" if rest else "")
        parts.append(f'<a href="#{anchor(job_id)}">{shown}</a>' if job_id in records else shown)
    if len(references) > 8:
        parts.append(f"and {len(references) - 8} more in the record")
    return "<br>".join(parts)


def limits(study: Study, claims: Mapping[str, Any]) -> str:
    """Known limits."""
    return items(tables.limits(study, claims))
