"""Why a job is to be run again: what of its key differs from an earlier artefact of the same readable name.

Where an input differs, the inputs behind it are followed to what changed first.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from functools import cached_property

from grafting.errors import UserError
from grafting.plan.code import MANIFESTS
from grafting.plan.jobs import Job, key_of
from grafting.provenance.store import Store

ABSENT = object()
#: Lines of one kind that are shown before the rest is only counted.
SHOWN = 12
_KEY = re.compile(r"[0-9a-f]{12}(:.*)?")


class Past:
    """Records as they lie here, or as they were in a git revision (`since`)."""

    def __init__(self, store: Store, since: str | None = None) -> None:
        self.store, self.since = store, since

    @cached_property
    def _files(self) -> dict[str, bytes]:
        """Path -> content of all records of the revision, by one call of git."""
        present = _git(self.store, "ls-tree", "--name-only", str(self.since), "provenance", "results").decode().split()
        if not present:
            return {}
        with tarfile.open(fileobj=io.BytesIO(_git(self.store, "archive", str(self.since), *present))) as archive:
            members = [m for m in archive if m.isfile() and m.name.endswith(".json")]
            return {m.name: archive.extractfile(m).read() for m in members}

    def _read(self, path: str) -> dict | None:
        if self.since is None:
            file = self.store.root / path
            text = file.read_bytes() if file.exists() else None
        else:
            text = self._files.get(path)
        try:
            return None if text is None else json.loads(text)
        except ValueError:
            return None

    def _record(self, path: str) -> dict | None:
        """The sidecar behind a sentinel: its content; a report's sentinel holds its id only (see `Store.sentinel`)."""
        found = self._read(path)
        if found is None or found.keys() != {"id"}:
            return found
        report = self._read("results/report.json")
        return report if report is not None and report.get("id") == found["id"] else found

    def sidecar(self, job_id: str) -> dict | None:
        """The job's sidecar; None if there is none."""
        return self._record(self.store.sentinel(job_id).relative_to(self.store.root).as_posix())

    def manifest(self, code: str) -> dict | None:
        """What a code digest was made of; None if that is not recorded."""
        return self._read(f"provenance/code/{code}.json")

    def with_name(self, job: Job) -> list[dict]:
        """Sidecars of the same stage and readable name."""
        folder = self.store.sentinel(job.id).parent.relative_to(self.store.root).as_posix()
        prefix = "report-" if job.stage == "report" else ""
        if self.since is None:
            paths = [f"{folder}/{p.name}" for p in (self.store.root / folder).glob(f"{prefix}{job.name}-*.json")]
        else:
            paths = [p for p in self._files if p.rpartition("/")[0] == folder]
        named = [p for p in paths if p.rpartition("/")[2].rpartition("-")[0] == prefix + job.name]
        return [sidecar for path in sorted(named) if (sidecar := self._record(path)) is not None]


def _git(store: Store, *arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=store.root, capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"git {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def differences(old: object, new: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """(dotted path, old value, new value) wherever two nested values differ; list items go by name if they have one."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), f"{path}.{key}" if path else str(key))
    elif isinstance(old, list) and isinstance(new, list) and _named(old) and _named(new):
        befores, afters = ({item["name"]: item for item in items} for items in (old, new))
        for name in dict.fromkeys([*befores, *afters]):
            yield from differences(befores.get(name, ABSENT), afters.get(name, ABSENT), f"{path}[{name}]")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{path}[{i}]")
    elif old != new:
        yield path, old, new


def _named(items: list) -> bool:
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    return bool(items) and None not in names and len(set(names)) == len(names)


def _short(value: object) -> str:
    if value is ABSENT:
        return "(absent)"
    if isinstance(value, list | dict) and len(repr(value)) > 70:
        return f"({len(value)} entries)"
    return repr(value) if len(repr(value)) <= 70 else repr(value)[:67] + "..."


def _title(reference: str) -> str:
    """`<stage>/<name>[:subfolder]`: a reference without its key."""
    job_id, colon, subfolder = reference.partition(":")
    return job_id.rpartition("-")[0] + colon + subfolder


class Explainer:
    """Compares planned jobs with what was recorded; a job that many hang on is compared once."""

    def __init__(self, jobs: Mapping[str, Job], past: Past) -> None:
        self.jobs, self.past = jobs, past
        self._known: dict[tuple[str, str], dict[str, list[str]]] = {}

    def earlier(self, job: Job) -> dict | None:
        """The latest other artefact of the same name."""
        found = [sidecar for sidecar in self.past.with_name(job) if sidecar.get("id") != job.id]
        return max(found, key=lambda sidecar: sidecar.get("finished", ""), default=None)

    def own(self, job: Job, old: dict) -> list[str]:
        """What changed in the job itself: spec, code, candidates."""
        lines, derived = [], []
        for path, before, after in differences(old["spec"], job.spec) if "spec" in old else ():
            both_keys = all(isinstance(value, str) and _KEY.fullmatch(value) for value in (before, after))
            (derived if both_keys else lines).append(f"spec {path}: {_short(before)} -> {_short(after)}")
        if old.get("code") not in (None, job.code):
            lines += self._code(old["code"], job.code)
        if "alternatives" in old:
            lines += [f"candidate {name}: added" for name in job.alternatives if name not in old["alternatives"]]
            lines += [f"candidate {name}: removed" for name in old["alternatives"] if name not in job.alternatives]
        # keys inside a spec follow the inputs and the code; alone they are said all the same
        return lines or ([] if list(self._pairs(job, old)) else derived)

    def _code(self, old: str, new: str) -> list[str]:
        now, before = MANIFESTS.get(new) or self.past.manifest(new), self.past.manifest(old)
        if now is None or before is None:
            return [f"code: {old} -> {new} (no record of the old modules)"]
        lines = []
        for part, word in (("modules", "module"), ("files", "file"), ("libraries", "library")):
            for name, was, is_now in differences(before.get(part, {}), now.get(part, {})):
                change = "added" if was is ABSENT else "removed" if is_now is ABSENT else "changed"
                values = f" ({was} -> {is_now})" if part == "libraries" and change == "changed" else ""
                lines.append(f"{word} {name}: {change}{values}")
        return lines

    @staticmethod
    def _pairs(job: Job, old: dict) -> Iterator[tuple[str, str | None, str | None]]:
        """(role, old reference, new reference) of the inputs that differ, paired by readable name."""
        for role in sorted(old.get("inputs", {}).keys() | job.inputs.keys()):
            before, after = old.get("inputs", {}).get(role, []), job.inputs.get(role, [])
            kept = {key_of(ref) for ref in before} & {key_of(ref) for ref in after}
            gone = {_title(ref): ref for ref in before if key_of(ref) not in kept}
            for ref in after:
                if key_of(ref) not in kept:
                    yield role, gone.pop(_title(ref), None), ref
            for ref in gone.values():
                yield role, ref, None

    def inputs(self, job: Job, old: dict) -> list[str]:
        """One line per role with inputs that differ."""
        roles: dict[str, list[str]] = {}
        for role, was, now in self._pairs(job, old):
            word = "added" if was is None else "removed" if now is None else "changed"
            roles.setdefault(role, []).append(f"{_title(now or was)} {word}")
        return [f"input {role}: {_some(changes)}" for role, changes in roles.items()]

    def causes(self, job: Job, old: dict) -> dict[str, list[str]]:
        """What changed first -> the jobs behind the inputs (and behind the chosen candidate) in which it did."""
        found: dict[str, list[str]] = {}
        for _, was, now in self._pairs(job, old):
            if was is not None and now is not None:
                _add(found, self._roots(was.partition(":")[0], now.partition(":")[0]))
        chosen = job.alternatives.get(old.get("choice", ""))
        target = self.past.sidecar(old["link"]) if chosen is not None and "link" in old else None
        if target is not None:
            _add(found, {line: [_title(chosen.id)] for line in self.own(chosen, target)})
            _add(found, self.causes(chosen, target))
        return found

    def _roots(self, old_id: str, new_id: str) -> dict[str, list[str]]:
        if (old_id, new_id) not in self._known:
            job, old = self.jobs.get(new_id), self.past.sidecar(old_id)
            if job is None or old is None:
                found = {f"no record of {old_id}": [_title(new_id)]}
            else:
                found = {line: [_title(new_id)] for line in self.own(job, old)}
                _add(found, self.causes(job, old))
            self._known[old_id, new_id] = found
        return self._known[old_id, new_id]


def _add(found: dict[str, list[str]], more: dict[str, list[str]]) -> None:
    for cause, titles in more.items():
        found[cause] = list(dict.fromkeys([*found.get(cause, []), *titles]))


def _some(names: list[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _capped(lines: list[str]) -> list[str]:
    return lines[:SHOWN] + ([f"  ... and {len(lines) - SHOWN} more of these"] if len(lines) > SHOWN else [])


def why(job: Job, jobs: Mapping[str, Job], store: Store, since: str | None = None) -> list[str]:
    """What of the job's key differs from an earlier artefact of the same name, as lines for a person.

    jobs: all jobs of the plan. UserError: `since` is no revision of this git repository.
    """
    from grafting.plan.aliases import Alias

    past = Past(store, since)
    if store.sentinel(job.id).exists():
        sidecar = store.read(job.id)
        reason = "was chosen" if "selection" in sidecar.get("inputs", {}) else "has the same key"
        link = f" It is {sidecar['link']}, which {reason}." if "link" in sidecar else ""
        lines = [f"{job.id} is done: nothing to run.{link}"]
    else:
        lines = [f"{job.id} is not done."]
    lines += [f"  {Alias(**alias)}" for alias in job.aliases]
    if job.aliases and job.known_as:
        lines.append(f"  (its own key is {job.own_key})")
    if since is not None and past.sidecar(job.id) is not None:
        return [*lines, f"In {since} it has the same key: nothing that decides it has changed."]
    explainer = Explainer(jobs, past)
    old = explainer.earlier(job)
    if old is None:
        place = f" in {since}" if since else ""
        return [*lines, f"There is no earlier artefact of this name{place} to compare with."]
    lines.append(f"Compared with {old['id']}" + (f" of {since}:" if since else ":"))
    own, inputs = explainer.own(job, old), explainer.inputs(job, old)
    causes = [f"  because {_some(t, 1)} changed: {cause}" for cause, t in explainer.causes(job, old).items()]
    if old.get("code") not in (None, job.code):
        own.append(f"(code {old['code']} -> {job.code})")
    shown = [*_capped([f"  {line}" for line in own]), *_capped([f"  {line}" for line in inputs]), *_capped(causes)]
    return [*lines, *(shown or ["  nothing that is recorded differs"])]
