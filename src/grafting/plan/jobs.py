"""A job is a pure function of (spec, inputs, code); its key is the hash of the three."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from json.encoder import encode_basestring as quote
from typing import Any

from grafting.provenance.files import canonical, text_digest

STAGES = ("data", "models", "rollout", "train", "sensitivity", "merge", "evaluate", "select", "report")
#: What a readable name may consist of: it becomes a file name and a Snakemake wildcard.
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.=+,~-]*$")


@cache
def key_of(reference: str) -> str:
    """`<stage>/<name>-<key>[:subfolder]` -> `<key>[:subfolder]`: readable names never enter a key."""
    job_id, colon, subfolder = reference.partition(":")
    return job_id.rpartition("-")[2] + colon + subfolder


def quoted(texts: Iterable[str]) -> str:
    """Canonical JSON of a list of texts, several times faster than `canonical`; `quote` is that of one text."""
    return "[" + ",".join(map(quote, texts)) + "]"


def joined(fields: dict[str, str]) -> str:
    """Canonical JSON of an object whose values are canonical JSON already, and whose names need no escapes."""
    return "{" + ",".join(f'"{name}":{fields[name]}' for name in sorted(fields)) + "}"


class Texts:
    """Canonical JSON of small values that a study repeats tens of thousands of times, made once per value.

    Values are told apart by who they are, not by what they hold: the caller keeps them and does not change them.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, str]] = {}

    def of(self, value: object) -> str:
        """Canonical JSON of a value."""
        if (known := self._known.get(id(value))) is None:
            self._known[id(value)] = known = (value, canonical(value))
        return known[1]


def with_terms(recipe: dict, terms: list[int], texts: Texts) -> tuple[dict, str]:
    """A recipe with the places of its terms, and its canonical JSON: of all names in a recipe `terms` is the last."""
    return {**recipe, "terms": terms}, f'{texts.of(recipe)[:-1]},"terms":[{",".join(map(str, terms))}]}}'


def keyed_points(
    points: list[dict], settings: str, inputs: dict[str, list[str]], code: str, texts: Texts
) -> tuple[list[dict], str]:
    """The points of an evaluation with their keys, and canonical JSON of the list, put together from pieces.

    A key is the hash of the canonical JSON of ["point", recipe, settings, what it reads, code].
    settings: canonical JSON. points: `{"name", "recipe", "terms", "labels"}`; a recipe's terms stand beside it, as
    places in the inputs, since many points share one recipe.
    """
    keys = {role: [key_of(ref) for ref in refs] for role, refs in inputs.items()}
    model, prior, tasks = (quoted(keys[role]) for role in ("model", "prior", "tasks"))
    terms = [quoted(pair) for pair in zip(keys.get("trained", []), keys.get("donor", []), strict=True)]
    tail = f'{settings},{{"model":{model},"prior":{prior}'
    end, plain = f"{quote(code)}]", f'"tasks":{tasks}'
    found, written = [], []
    for point in points:
        recipe, places = point["recipe"], point["terms"]
        content = full = texts.of(recipe)
        read, whole = plain, recipe
        if recipe is not None:
            read = f'{plain},"terms":[{",".join([terms[i] for i in places])}]'
            if (mask := recipe.get("mask")) and (role := f"sensitivity_{mask['estimator']}") in keys:
                read = f'"sensitivity":{quoted(keys[role])},{read}'
            whole, full = with_terms(recipe, places, texts)
        key = text_digest(f'["point",{content},{tail},{read}}},{end}')
        name = point["name"]
        found.append({"name": name, "recipe": whole, "labels": point["labels"], "key": key})
        labels = texts.of(point["labels"])
        written.append(f'{{"key":"{key}","labels":{labels},"name":{quote(name)},"recipe":{full}}}')
    return found, f"[{','.join(written)}]"


@dataclass(frozen=True)
class Job:
    """One artefact to be made.

    spec:          exactly what the stage's function reads; plain JSON values.
    inputs:        role -> references `<id>[:subfolder]` of other jobs' payloads, in a canonical order.
    code:          digest of the code that makes it.
    entry:         what `code` is the digest of: a key of `code.ENTRIES` and modules resolved by name.
    places:        where outside things lie on this machine (a model's folder); never part of the key.
    alternatives:  only for a job that hangs on a selection (role `selection`): candidate's name -> the
                   concrete job to do if that candidate is chosen.
    known_as:      the older key that its own is declared equal to (`aliases.yaml`); empty if there is none.
    aliases:       the entries of `aliases.yaml` that apply to it, for the record.
    text:          canonical JSON of the spec, where it was made along with it.
    """

    stage: str
    name: str
    spec: dict[str, Any]
    inputs: dict[str, list[str]]
    code: str
    entry: tuple[str, ...] = ()
    places: dict[str, str] = field(default_factory=dict)
    alternatives: dict[str, Job] = field(default_factory=dict)
    known_as: str = ""
    aliases: list[dict[str, str]] = field(default_factory=list)
    text: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        if not NAME.match(self.name):
            raise ValueError(f"job name {self.name!r} cannot become a file name")

    @property
    def key(self) -> str:
        """12 hex digits that change exactly when spec, inputs or code change; the older key of an equal job."""
        return self.known_as or self.own_key

    @cached_property
    def own_key(self) -> str:
        """The key without regard to `known_as`."""
        # canonical JSON of [stage, spec, inputs, code, alternatives' keys], put together from pieces: a study has
        # tens of thousands of jobs and alternatives
        inputs = joined({role: quoted([key_of(ref) for ref in refs]) for role, refs in self.inputs.items()})
        identity = [quote(self.stage), self.spec_string, inputs, quote(self.code)]
        if self.alternatives:
            identity.append(joined({name: quote(job.key) for name, job in self.alternatives.items()}))
        return text_digest(f"[{','.join(identity)}]")

    @cached_property
    def id(self) -> str:
        """`<stage>/<name>-<key>`."""
        return f"{self.stage}/{self.name}-{self.key}"

    @property
    def processes(self) -> int:
        """Processes that make it together: part of the spec, as threads are; 1 if it says none."""
        return max([self.spec.get("processes", 1), *(way.processes for way in self.alternatives.values())])

    @property
    def threads(self) -> int:
        """CPU threads of all its processes. Those of one are part of the spec, since sums of floating-point numbers
        depend on them; 1 if it says none."""
        own = self.spec.get("threads", 1) * self.spec.get("processes", 1)
        return max([own, *(way.threads for way in self.alternatives.values())])

    @cached_property
    def spec_string(self) -> str:
        """The spec as canonical JSON."""
        return self.text or canonical(self.spec)

    def needs(self) -> list[str]:
        """Ids of all jobs that must be complete before this one starts, without repetition, in order."""
        lists = [*self.inputs.values(), *(refs for job in self.alternatives.values() for refs in job.inputs.values())]
        return list(dict.fromkeys(reference.partition(":")[0] for refs in lists for reference in refs))

    def to_json(self) -> str:
        """As canonical JSON without the alternatives, of which only names and ids are given."""
        fields = {
            "stage": canonical(self.stage),
            "name": canonical(self.name),
            "spec": self.spec_string,
            "inputs": "{" + ",".join(f'"{role}":{quoted(self.inputs[role])}' for role in sorted(self.inputs)) + "}",
            "code": canonical(self.code),
            "entry": quoted(self.entry),
        }
        if self.places:
            fields["places"] = canonical(self.places)
        if self.aliases:
            fields |= {"known_as": canonical(self.known_as), "aliases": canonical(self.aliases)}
        if self.alternatives:
            fields["alternatives"] = canonical({name: job.id for name, job in self.alternatives.items()})
        return joined(fields)

    @classmethod
    def from_json(cls, text: str, alternative: Callable[[str], Job]) -> Job:
        """Inverse of `to_json`; `alternative` finds the job behind an alternative's id."""
        data = json.loads(text)
        alternatives = {name: alternative(job_id) for name, job_id in data.get("alternatives", {}).items()}
        return cls(**{**data, "entry": tuple(data["entry"]), "alternatives": alternatives})
