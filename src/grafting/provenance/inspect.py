"""Why a job is to be run again, and where a result comes from."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from grafting.errors import UserError
from grafting.plan.code import MANIFESTS
from grafting.plan.jobs import STAGES, Job, key_of
from grafting.provenance.store import Store


def flatten(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Leaves of nested mappings and lists as (dotted path, value)."""
    if isinstance(value, dict) and value:
        for key in sorted(value):
            yield from flatten(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for i, item in enumerate(value):
            yield from flatten(item, f"{path}[{i}]")
    else:
        yield path, value


def find(target: str, ids: list[str]) -> str:
    """The one id that `target` means: an id, its name without key, a path of its sentinel, payload or log."""
    text = target.removeprefix("./").rstrip("/")
    for folder in ("provenance/", "store/", "work/logs/", "work/"):
        text = text.removeprefix(folder)
    for ending in (".json", ".log"):
        text = text.removesuffix(ending)
    if text.startswith("results/report-"):
        text = "report/" + text.removeprefix("results/report-")
    elif text.startswith("results/"):
        text = "report/"
    exact = [i for i in ids if i == text or i.rpartition("-")[0] == text]
    found = exact or [i for i in ids if i.startswith(text)] or [i for i in ids if text in i]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(f"{target}: no job of that name; `grafting plan --jobs` lists all")
    shown = "\n  ".join(found[:8])
    more = f"\n  and {len(found) - 8} more" if len(found) > 8 else ""
    raise UserError(f"{target}: means {len(found)} jobs; name one of them:\n  {shown}{more}")


def _earlier(job: Job, store: Store, since: str | None) -> dict | None:
    """Sentinel of the same readable name with another key: of a git revision, or the latest at hand."""
    if since is None:
        found = [store.read(i) for i in store.with_name(job.stage, job.name) if i != job.id]
    else:
        folder = f"provenance/{job.stage}/"
        names = _git(store.root, "ls-tree", "--name-only", since, folder).split()
        names = [n for n in names if Path(n).stem.rpartition("-")[0] == job.name and Path(n).stem != Path(job.id).name]
        found = [json.loads(_git(store.root, "show", f"{since}:{name}")) for name in names]
    return max(found, key=lambda sidecar: sidecar.get("finished", ""), default=None)


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def why(job: Job, store: Store, since: str | None = None) -> list[str]:
    """What of the job's key differs from an earlier artefact of the same name, as lines for a person."""
    if store.sentinel(job.id).exists() and since is None:
        lines = [f"{job.id} is done: nothing to run."]
    else:
        lines = [f"{job.id} is not done."]
    old = _earlier(job, store, since)
    if old is None:
        return [*lines, "There is no earlier artefact of this name to compare with."]
    lines.append(f"Compared with {old['id']}" + (f" of {since}:" if since else ":"))
    changes = []
    if "spec" in old:
        before, after = dict(flatten(old["spec"])), dict(flatten(job.spec))
        for path in sorted(before.keys() | after.keys()):
            if before.get(path) != after.get(path):
                was = repr(before[path]) if path in before else "(absent)"
                now = repr(after[path]) if path in after else "(absent)"
                changes.append(f"  spec {path}: {was} -> {now}")
    for role in sorted(old.get("inputs", {}).keys() | job.inputs.keys()):
        was, now = old.get("inputs", {}).get(role, []), job.inputs.get(role, [])
        if [key_of(r) for r in was] != [key_of(r) for r in now]:
            gone, new = [r for r in was if r not in now], [r for r in now if r not in was]
            changes.append(f"  input {role}: {', '.join(gone) or '(none)'} -> {', '.join(new) or '(none)'}")
    if old.get("code") not in (None, job.code):
        changes += _code_changes(old["code"], job.code, store)
    return [*lines, *(changes or ["  nothing that is recorded differs"])]


def _code_changes(old: str, new: str, store: Store) -> list[str]:
    now = MANIFESTS.get(new)
    path = store.code(old)
    if now is None or not path.exists():
        return [f"  code: {old} -> {new} (no record of the old modules)"]
    before = json.loads(path.read_text(encoding="utf-8"))
    lines = []
    for part, word in (("modules", "module"), ("libraries", "library")):
        for name in sorted(before[part].keys() | now[part].keys()):
            was, is_now = before[part].get(name), now[part].get(name)
            if was != is_now:
                change = "added" if was is None else "removed" if is_now is None else "changed"
                values = f" ({was} -> {is_now})" if part == "libraries" and was and is_now else ""
                lines.append(f"  {word} {name}: {change}{values}")
    return lines


def trace(job_id: str, store: Store) -> Iterator[str]:
    """The tree below an artefact, down to data: one line each, a repeated one only named."""
    seen: set[str] = set()

    def walk(reference: str, depth: int) -> Iterator[str]:
        name = reference.partition(":")[0]
        indent = "  " * depth
        if name in seen:
            yield f"{indent}{reference}  (above)"
            return
        seen.add(name)
        side = store.read(name)
        if "link" in side:
            yield f"{indent}{reference}  = chosen:"
            yield from walk(side["inputs"]["selection"][0], depth + 1)
            yield from walk(side["link"], depth + 1)
            return
        git, cost = side.get("git", {}), side.get("cost", {})
        revision = (git.get("revision") or "no commit")[:10] + ("+changes" if git.get("dirty") else "")
        seed = f", seed {side['spec']['seed']}" if "seed" in side.get("spec", {}) else ""
        yield (
            f"{indent}{reference}  code {side.get('code')}, git {revision}{seed}, "
            f"{cost.get('cpu_seconds', 0):.0f} CPU s, {side.get('finished')}"
        )
        for role in sorted(side.get("inputs", {})):
            for below in side["inputs"][role]:
                yield from walk(below, depth + 1)
        for entry in side.get("spec", {}).get("files", []):
            yield f"{indent}  file {entry['name']}  sha256 {entry['sha256']}"

    yield from walk(job_id, 0)


def all_ids(store: Store) -> list[str]:
    """Ids of all complete artefacts at hand."""
    found = [
        f"{stage}/{p.stem}" for stage in STAGES for p in sorted((store.root / "provenance" / stage).glob("*.json"))
    ]
    return found + [f"report/{p.stem.removeprefix('report-')}" for p in (store.root / "results").glob("report-*.json")]
