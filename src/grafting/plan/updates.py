"""The look at the updates themselves, before anything is merged: one small job per learner seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grafting.plan.protocols import Family
    from grafting.plan.study import Study


def add_updates(study: Study, families: Sequence[Family]) -> None:
    """Adds a job per seed that measures every update of the single tasks, main style, and tells the report of it."""
    style = study.config.styles[0]
    for seed in study.config.seeds:
        found: dict[tuple[str, str], dict] = {}
        for family in families:
            if (family.protocol, family.style) != ("single", style):
                continue
            for candidate in family.candidates:
                _, terms = candidate.stages(seed)[-1]
                label = {name: candidate.label[name] for name in ("task", "method", "donor", "lr")}
                found.setdefault(terms[0], label)
        if found:
            job = study.add(
                "merge",
                f"deltas.s{seed}.m{study.m}",
                {"updates": list(found.values())},
                {
                    "model": [study.models["deployed"]],
                    "trained": [trained for trained, _ in found],
                    "donor": [donor for _, donor in found],
                },
                ("deltas",),
            )
            study.deltas.append({"job": job, "seed": seed, "model_seed": study.m})
