"""What the report is told: which point of which evaluation is what, which selection led to which test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafting.config.claims import check_methods
from grafting.plan.code import PROJECT

if TYPE_CHECKING:
    from grafting.plan.study import Study

#: Where things lie on this machine, and how jobs save themselves: in no key and no result.
LOCAL = {
    "data_root": True,
    "own_tasks": True,
    "saving": True,
    "tracking": True,
    "judge": {"endpoint", "local", "api_key_variable", "timeout_seconds", "attempts", "pause_seconds", "parallel"},
    "lineage": {"deployed": {"path"}, "donors": {"__all__": {"path"}}},
}


class Inputs:
    """References by role, each once; a spec names them by their place in the list."""

    def __init__(self, *roles: str) -> None:
        self.roles: dict[str, list[str]] = {role: [] for role in roles}
        self._places: dict[tuple[str, str], int] = {}

    def place(self, role: str, job_id: str) -> int:
        """Index of a job among the inputs of a role; it is added if it is new."""
        if (role, job_id) not in self._places:
            self._places[role, job_id] = len(self.roles[role])
            self.roles[role].append(job_id)
        return self._places[role, job_id]


def report_of(study: Study) -> tuple[dict, dict[str, list[str]]]:
    """Spec and inputs of the report on a study whose jobs are all planned."""
    config, inputs = (
        study.config,
        Inputs("evaluations", "selections", "tests", "rollouts", "models", "frontiers", "deltas", "trained"),
    )

    def located(entry: dict, role: str) -> dict:
        return {"input": inputs.place(role, entry["job"]), **{k: v for k, v in entry.items() if k != "job"}}

    spec = {
        "preset": config.preset,
        "seeds": config.seeds,
        "model_seeds": config.model_seeds,
        "tasks": config.tasks,
        "styles": config.styles,
        "protocols": config.protocols,
        "settings": config.model_dump(mode="json", exclude=LOCAL),
        "evaluations": [located(entry, "evaluations") for entry in study.evaluations],
        "selections": [
            {
                **entry,
                "selection": inputs.place("selections", entry["selection"]),
                "test": inputs.place("tests", entry["test"]),
                "models": {name: inputs.place("models", job) for name, job in entry.get("models", {}).items()},
            }
            for entry in study.selections
        ],
        "rollouts": [located(entry, "rollouts") for entry in study.rollouts],
        "frontiers": [located(entry, "frontiers") for entry in study.frontiers],
        "deltas": [located(entry, "deltas") for entry in study.deltas],
        "notes": notes(study),
        "claims": claims_of(study),
        "reference": published_by_others(),
    }
    # their cost stands in the tables, so their records must be there
    for job in study.jobs.values():
        if job.stage == "train":
            inputs.place("trained", job.id)
    return spec, inputs.roles


def claims_of(study: Study) -> list[dict]:
    """The claims as plain data. UserError when one names a method that does not exist."""
    families = dict.fromkeys(entry["family"] for entry in study.selections)
    check_methods(study.claims, list(families))
    return [claim.model_dump(mode="json") for claim in study.claims]


def published_by_others() -> dict[str, str]:
    """Name -> text of the tables under reference/, which the report shows beside this study's."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted((PROJECT / "reference").glob("*.csv"))}


def notes(study: Study) -> list[str]:
    """What a reader of this study's results must be told."""
    lineage = study.config.lineage
    if lineage.kind == "pretrained" and not lineage.donors:
        return [
            "This lineage holds only the deployed model: no earlier checkpoint is at hand, so no other donor was tried."
        ]
    return []
