"""Where a study starts: its data, and the models of its lineage."""

from __future__ import annotations

from typing import Any

from grafting.config.schema import Source
from grafting.plan.learning import Learning
from grafting.plan.scoring import files_for
from grafting.plan.sources import files_of
from grafting.tasks import known_priors
from grafting.tasks.harness_suites import VERSION, suite_of
from grafting.tasks.stage import BUILDERS


class Origins(Learning):
    """Adds data and models to a study."""

    abouts: dict[str, dict[str, Any]]

    def _task(self, task: str) -> str:
        about = self.abouts[task]
        sizes = self.config.task_defaults.model_dump()
        spec = {
            "builder": about["builder"],
            **sizes,
            **about["option_defaults"],
            **about.get("spec", {}),
            **self.config.task_options.get(task, {}),
        }
        if about["builder"].startswith("tiny."):
            spec |= {"task": task, "max_tokens": self.config.lineage.architecture.context}
        if about["source"]:
            spec["files"] = files_for(self.config, about["source"])
        return self.add("data", task, spec, {}, self._builder(about), places=about.get("places"))

    def _prior(self) -> str:
        about = known_priors()[self.config.prior.kind]
        spec = {"builder": about["builder"], **self.config.prior.model_dump(exclude={"kind", "suite", "harness"})}
        if self.config.prior.kind == "harness":
            suite = suite_of(self.config.prior.suite, self.config.prior.model_dump()["harness"])
            spec |= {"suite": self.config.prior.suite, "tasks": suite, "harness_version": VERSION}
        if about["source"]:
            spec["files"] = files_for(self.config, about["source"])
        return self.add("data", f"prior.{self.config.prior.kind}", spec, {}, self._builder(about))

    @staticmethod
    def _builder(about: dict) -> tuple[str, str]:
        return "data", f"grafting.tasks.{BUILDERS[about['builder']].partition(':')[0]}"

    def _models(self, m: int) -> dict[str, str]:
        """Donor's name -> reference of its model directory; `deployed` is the last."""
        lineage = self.config.lineage
        if lineage.kind == "pretrained":
            return {
                name: self._existing(name, source)
                for name, source in {**lineage.donors, "deployed": lineage.deployed}.items()
            }
        common = {"precision": lineage.precision, "threads": lineage.threads, "seed": m}
        base = self.add(
            "models",
            f"pretrained.m{m}",
            {
                "phase": "pretrain",
                "architecture": lineage.architecture.model_dump(),
                **lineage.pretrain.model_dump(),
                **common,
            },
            {},
            ("lineage",),
        )
        last = f"{base}:checkpoints/p100"
        deployed = self.add(
            "models",
            f"deployed.m{m}",
            {"phase": "posttrain", **lineage.posttrain.model_dump(), "gate": lineage.gate.model_dump(), **common},
            {"model": [last], "prior": [self.prior_data], "tasks": list(self.task_data.values())},
            ("lineage",),
        )
        places = {name: f"{base}:checkpoints/{name}" for name in self.config.donor_names()[:-2]}
        return {**places, "base": last, "deployed": deployed}

    def _existing(self, name: str, source: Source) -> str:
        spec = {key: value for key, value in source.model_dump(exclude={"path"}).items() if value is not None}
        if source.gguf_package is not None:
            spec["sha256"] = files_of(source.gguf_package)[0]["sha256"]
        return self.add(
            "models",
            name,
            {
                "source": spec,
                "dtype": getattr(self.config.lineage, "dtype", "float32"),
                "threads": self.config.lineage.threads,
            },
            {},
            places={} if source.path is None else {"path": source.path},
        )
