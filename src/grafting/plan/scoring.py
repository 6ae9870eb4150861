"""What a task's data and scorer add to jobs: pinned files, the judge, modules for code digests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from grafting.config.schema import Config
from grafting.plan.sources import files_of
from grafting.tasks.judge import deciding
from grafting.tasks.scorers import module_of

if TYPE_CHECKING:
    from grafting.plan.learning import Learning


def files_for(config: Config, source: str) -> list[dict]:
    """What pins a data source: the locked files, or name, path and revision of files on the Hub."""
    given = config.data_sources.get(source)
    if given is None:
        return files_of(source)
    return [
        {"name": name, "hub": given.hub, "revision": given.revision, "path": path}
        for name, path in sorted(given.files.items())
    ]


def scoring(study: Learning, tasks: Iterable[str], stage: str) -> tuple[dict, tuple[str, ...]]:
    """What scoring these tasks adds to a spec (the judge), and the entry for its code digest."""
    names = [study.scorers[task] for task in tasks]
    modules = {module for name in names if (module := module_of(name)) is not None}
    if stage == "evaluate" and study.config.prior.kind == "harness":
        modules.add("grafting.evaluation.harness")
    if "judge" in names and study.config.judge.local is not None:
        modules.add("grafting.rollouts.judging")
    judged = {"judge": deciding(study.config.judge.model_dump())} if "judge" in names else {}
    return judged, (stage, *sorted(modules))
