"""Where a result comes from: the artefact that a path means, and the tree behind it, down to data and code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from grafting.errors import UserError
from grafting.plan.aliases import Alias, Aliases
from grafting.plan.jobs import STAGES
from grafting.provenance.store import Store


def find(target: str, ids: list[str], root: Path = Path(".")) -> str:
    """The one id that `target` means: an id, its name without key, a path of its sentinel, payload, log or result.

    root: the study's folder, whose report says what `results/models/<name>` is.
    """
    text = target.removeprefix("./").rstrip("/")
    if text.startswith("results/models/"):
        text = _selected(root / "results" / "report.json", text.split("/")[2])
    for folder in ("provenance/", "store/", "work/logs/", "work/"):
        text = text.removeprefix(folder)
    for ending in (".json", ".log"):
        text = text.removesuffix(ending)
    if text.startswith("results/report-"):
        text = "report/" + text.removeprefix("results/report-")
    elif text.startswith("results/"):
        text = "report/"
    # a file inside a payload
    inner = "/".join(text.split("/")[:2])
    exact = [i for i in ids if i in (text, inner) or i.rpartition("-")[0] == text]
    found = exact or [i for i in ids if i.startswith(text)] or [i for i in ids if text in i]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(f"{target}: no job of that name; `grafting plan --jobs` lists all")
    shown = "\n  ".join(found[:8])
    more = f"\n  and {len(found) - 8} more" if len(found) > 8 else ""
    raise UserError(f"{target}: means {len(found)} jobs; name one of them:\n  {shown}{more}")


def _selected(report: Path, name: str) -> str:
    """The job that made a selected model, from the report's sidecar."""
    try:
        sidecar = json.loads(report.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{report}: {error}; run snakemake, which makes the report") from None
    entries = sidecar["spec"].get("selections", [])
    places = {name: i for entry in entries for name, i in entry.get("models", {}).items()}
    if name not in places:
        raise UserError(f"results/models/{name}: no such model; the report knows {', '.join(sorted(places)) or 'none'}")
    return sidecar["inputs"]["models"][places[name]].partition(":")[0]


def trace(job_id: str, store: Store, aliases: Aliases | None = None) -> Iterator[str]:
    """The tree below an artefact, down to data and code: one line each, a repeated one only named.

    aliases: entries of `aliases.yaml`, shown where an older key or digest stands for a newer one.
    """
    seen: set[str] = set()
    codes: list[str] = []
    declared = list(aliases or ())

    def walk(reference: str, depth: int) -> Iterator[str]:
        name = reference.partition(":")[0]
        indent = "  " * depth
        if name in seen:
            yield f"{indent}{reference}  (above)"
            return
        seen.add(name)
        side = store.read(name)
        for alias in [a for a in declared if a.old in (side.get("key"), side.get("code"))] + [
            a for a in (Alias(**entry) for entry in side.get("aliases", [])) if a not in declared
        ]:
            yield f"{indent}  {alias}"
        if "link" in side:
            # a job that hangs on a selection, or one whose equal was made under another name
            selections = side.get("inputs", {}).get("selection", [])
            yield f"{indent}{reference}  = {_title(side, selections)}:"
            for below in [*selections, side["link"]]:
                yield from walk(below, depth + 1)
            return
        codes.append(side.get("code"))
        yield f"{indent}{reference}  {_facts(side)}"
        for role in sorted(side.get("inputs", {})):
            for below in side["inputs"][role]:
                yield from walk(below, depth + 1)
        for line in _origin(side):
            yield f"{indent}  {line}"

    yield from walk(job_id, 0)
    for code in dict.fromkeys(codes):
        yield from _code(code, store)


def _title(side: dict, selections: list[str]) -> str:
    return f"the chosen {side.get('choice', '')}".rstrip() if selections else "the equal"


def _facts(side: dict) -> str:
    git, cost, spec = side.get("git", {}), side.get("cost", {}), side.get("spec", {})
    revision = (git.get("revision") or "no commit")[:10] + ("+changes" if git.get("dirty") else "")
    seed = f", seed {spec['seed']}" if "seed" in spec else ""
    return (
        f"code {side.get('code')}, git {revision}{seed}, {cost.get('cpu_seconds', 0):.0f} CPU s, {side.get('finished')}"
    )


def _origin(side: dict) -> Iterator[str]:
    """Where data and models without inputs come from."""
    spec = side.get("spec", {})
    if "builder" in spec:
        options = ", ".join(f"{k} {v}" for k, v in sorted(spec.items()) if k not in ("builder", "files"))
        yield f"built by {spec['builder']}: {options}"
    for entry in spec.get("files", []):
        pinned = f"{entry['hub']}@{entry['revision']}" if "hub" in entry else f"sha256 {entry['sha256']}"
        yield f"file {entry['name']}  {pinned}"
    if "source" in spec:
        yield "source " + ", ".join(f"{k} {v}" for k, v in sorted(spec["source"].items()))


def _code(code: str, store: Store) -> Iterator[str]:
    try:
        manifest = json.loads(store.code(code).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        yield f"code {code}: no record of its modules"
        return
    libraries = ", ".join(f"{name} {version}" for name, version in sorted(manifest["libraries"].items()))
    names = [*manifest["modules"], *manifest.get("files", {})]
    yield f"code {code}: {', '.join(name.removeprefix('grafting.') for name in names)}; {libraries or 'no library'}"


def all_ids(store: Store) -> list[str]:
    """Ids of all complete artefacts at hand."""
    found = [
        f"{stage}/{p.stem}" for stage in STAGES for p in sorted((store.root / "provenance" / stage).glob("*.json"))
    ]
    return found + [f"report/{p.stem.removeprefix('report-')}" for p in (store.root / "results").glob("report-*.json")]
