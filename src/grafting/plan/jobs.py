"""A job is a pure function of (spec, inputs, code); its key is the hash of the three."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grafting.provenance.files import canonical, digest

STAGES = ("data", "models", "rollout", "train", "sensitivity", "merge", "evaluate", "select", "report")
#: What a readable name may consist of: it becomes a file name and a Snakemake wildcard.
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.=+,~-]*$")


def key_of(reference: str) -> str:
    """`<stage>/<name>-<key>[:subfolder]` -> `<key>[:subfolder]`: readable names never enter a key."""
    job_id, colon, subfolder = reference.partition(":")
    return job_id.rpartition("-")[2] + colon + subfolder


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
    """

    stage: str
    name: str
    spec: dict[str, Any]
    inputs: dict[str, list[str]]
    code: str
    entry: tuple[str, ...] = ()
    places: dict[str, str] = field(default_factory=dict)
    alternatives: dict[str, Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not NAME.match(self.name):
            raise ValueError(f"job name {self.name!r} cannot become a file name")

    @cached_property
    def key(self) -> str:
        """12 hex digits that change exactly when spec, inputs or code change."""
        inputs = {role: [key_of(reference) for reference in references] for role, references in self.inputs.items()}
        identity: list[Any] = [self.stage, self.spec, inputs, self.code]
        if self.alternatives:
            identity.append({name: job.key for name, job in self.alternatives.items()})
        return digest(identity)

    @property
    def id(self) -> str:
        """`<stage>/<name>-<key>`."""
        return f"{self.stage}/{self.name}-{self.key}"

    @property
    def threads(self) -> int:
        """CPU threads: part of the spec, since sums of floating-point numbers depend on them; 1 if it says none."""
        return max([self.spec.get("threads", 1), *(way.threads for way in self.alternatives.values())])

    @property
    def spec_string(self) -> str:
        """The spec as canonical JSON."""
        return canonical(self.spec)

    def needs(self) -> list[str]:
        """Ids of all jobs that must be complete before this one starts, without repetition, in order."""
        lists = [*self.inputs.values(), *(refs for job in self.alternatives.values() for refs in job.inputs.values())]
        return list(dict.fromkeys(reference.partition(":")[0] for refs in lists for reference in refs))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; `from_json` undoes it."""
        data = {
            "stage": self.stage,
            "name": self.name,
            "spec": self.spec,
            "inputs": self.inputs,
            "code": self.code,
            "entry": list(self.entry),
        }
        if self.places:
            data["places"] = self.places
        if self.alternatives:
            data["alternatives"] = {name: job.to_json() for name, job in self.alternatives.items()}
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """Inverse of `to_json`."""
        alternatives = {name: cls.from_json(item) for name, item in data.get("alternatives", {}).items()}
        return cls(**{**data, "entry": tuple(data["entry"]), "alternatives": alternatives})
