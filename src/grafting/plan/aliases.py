"""`aliases.yaml`: what its owner declares equal to something older, so that nothing is computed again.

An entry maps a new code digest, or a new key of a job, to the old one, with a reason. It is resolved in the
plan: the job takes the old key, and the keys of what follows do not move.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from grafting.errors import UserError
from grafting.provenance.files import write_text

if TYPE_CHECKING:
    from grafting.plan.jobs import Job
    from grafting.provenance.store import Store

ALIASES = "aliases.yaml"
KINDS = ("code", "keys")
HASH = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class Alias:
    """`new` (a code digest if `kind` is code, a job's key if it is keys) stands for `old`."""

    kind: str
    new: str
    old: str
    reason: str

    def __str__(self) -> str:
        what = "code" if self.kind == "code" else "key"
        return f"alias: {what} {self.new} counts as {self.old}: {self.reason}"

    def to_json(self) -> dict[str, str]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Aliases:
    """All entries of a file, by kind and by what is new."""

    code: dict[str, Alias] = field(default_factory=dict)
    keys: dict[str, Alias] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.code or self.keys)

    def steps(self, kind: str, new: str) -> list[Alias]:
        """The entries from `new` to the oldest, in order; empty if nothing is declared."""
        entries: dict[str, Alias] = getattr(self, kind)
        found: list[Alias] = []
        while (alias := entries.get(found[-1].old if found else new)) is not None:
            if alias in found:
                chain = " -> ".join([*(step.new for step in found), alias.new])
                raise UserError(f"{ALIASES}: {kind}: the entries run in a circle: {chain}; remove one of them")
            found.append(alias)
        return found

    def resolve(self, kind: str, new: str) -> str:
        """The oldest one that `new` stands for; itself if nothing is declared."""
        steps = self.steps(kind, new)
        return steps[-1].old if steps else new

    def __iter__(self):
        yield from self.code.values()
        yield from self.keys.values()


def read_aliases(path: Path) -> Aliases:
    """The entries of a file, none if there is no file. UserError names an entry that cannot be used."""
    if not path.exists():
        return Aliases()
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(data, dict) or any(not isinstance(entries or [], list) for entries in data.values()):
        raise UserError(f"{path}: must hold a list of entries under each of {', '.join(KINDS)}")
    if unknown := set(data) - set(KINDS):
        raise UserError(f"{path.name}: unknown key {sorted(map(str, unknown))[0]!r}; there are {', '.join(KINDS)}")
    found = {}
    for kind in KINDS:
        found[kind] = {}
        for number, entry in enumerate(data.get(kind) or [], 1):
            alias = _entry(kind, number, entry)
            if alias.new in found[kind]:
                raise UserError(f"{path.name}: {kind}: {alias.new} stands there twice")
            found[kind][alias.new] = alias
    aliases = Aliases(**found)
    for alias in aliases:
        aliases.steps(alias.kind, alias.new)
    return aliases


def _entry(kind: str, number: int, entry: object) -> Alias:
    where = f"{ALIASES}: {kind}, entry {number}"
    if not isinstance(entry, dict) or set(entry) != {"new", "old", "reason"}:
        raise UserError(f"{where}: must have new, old and reason, and nothing else (given: {entry!r})")
    for name in ("new", "old"):
        if not isinstance(entry[name], str) or not HASH.fullmatch(entry[name]):
            raise UserError(f"{where}: {name} must be 12 hex digits in quotes (given: {entry[name]!r})")
    if not isinstance(entry["reason"], str) or not entry["reason"].strip():
        raise UserError(f"{where} ({entry['new']}): say in reason why nothing changes")
    return Alias(kind, entry["new"], entry["old"], entry["reason"].strip())


def check_aliases(aliases: Aliases, jobs: Iterable[Job], store: Store) -> None:
    """UserError for an entry whose old digest or key is in no record, or belongs to something else."""
    old_keys: dict[str, list[str]] = {}
    if aliases.keys:
        for path in sorted((store.root / "provenance").glob("*/*-*.json")):
            old_keys.setdefault(path.stem.rpartition("-")[2], []).append(f"{path.parent.name}/{path.stem}")
    for alias in aliases:
        last = aliases.resolve(alias.kind, alias.new)
        if not (store.code(last).exists() if alias.kind == "code" else last in old_keys):
            place = f"provenance/code/{last}.json" if alias.kind == "code" else f"provenance/*/*-{last}.json"
            raise UserError(
                f"{ALIASES}: {alias.kind}: {alias.new} -> {alias.old}: there is no record of {last} ({place}); "
                "bring it back from git, or remove the entry"
            )
    if not aliases.keys:
        return
    for job in jobs:
        for way in (job, *job.alternatives.values()):
            if way.known_as:
                _check_same_kind(way, old_keys[way.known_as], store)


def _check_same_kind(job: Job, old_ids: list[str], store: Store) -> None:
    where = f"{ALIASES}: keys: {job.own_key} -> {job.known_as}"
    same = [i for i in old_ids if i.partition("/")[0] == job.stage]
    if not same:
        raise UserError(f"{where}: {job.stage}/{job.name} cannot stand for {old_ids[0]}, which is of another stage")
    old = {point["key"] for point in store.read(store.target(same[0])).get("spec", {}).get("points", [])}
    if new := {point["key"] for point in job.spec.get("points", [])} - old:
        raise UserError(
            f"{where}: {same[0]} lacks {len(new)} of the points of {job.stage}/{job.name}, which have keys of their "
            "own; declare the code, or the key of what changed before it, instead"
        )


def with_entry(aliases: Aliases, alias: Alias) -> Aliases:
    """The entries and one more; UserError if that cannot be used, stands there already or closes a circle."""
    known: dict[str, Alias] = getattr(aliases, alias.kind)
    entry = {name: value for name, value in alias.to_json().items() if name != "kind"}
    alias = _entry(alias.kind, len(known) + 1, entry)
    if alias.new in known:
        raise UserError(f"{ALIASES}: {alias.kind}: {alias.new} stands there already")
    more = replace(aliases, **{alias.kind: {**known, alias.new: alias}})
    more.steps(alias.kind, alias.new)
    return more


def write_aliases(path: Path, aliases: Aliases) -> None:
    """Write the file; the comments at its top stay."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    header = [line for line in lines if line.startswith("#")]
    body = {
        kind: [{"new": a.new, "old": a.old, "reason": a.reason} for a in getattr(aliases, kind).values()]
        for kind in KINDS
    }
    write_text(path, "\n".join([*header, yaml.safe_dump(body, sort_keys=False, width=110, allow_unicode=True)]))
