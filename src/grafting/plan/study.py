"""The experiment as jobs: config -> {id: Job}. One method per stage, in the order in which data flow."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from grafting.config.claims import CLAIMS, Claim, load_claims
from grafting.config.schema import Config
from grafting.errors import UserError
from grafting.plan.aliases import Aliases
from grafting.plan.code import PROJECT, own_digest, project_aliases
from grafting.plan.frontiers import add_frontiers
from grafting.plan.jobs import Job, Texts, joined, key_of, keyed_points, quote, with_terms
from grafting.plan.origins import Origins
from grafting.plan.protocols import Candidate, Family, parallel_families, sequential_families, single_families
from grafting.plan.reporting import report_of
from grafting.plan.scoring import scoring
from grafting.plan.updates import add_updates
from grafting.provenance.files import canonical
from grafting.tasks import tasks_of

#: What an evaluated point may be labelled with, beside its split.
LABELS = (
    "protocol", "style", "family", "method", "task", "seed", "model_seed", "donor", "scale", "mask", "lr", "operator",
    "stage",
)  # fmt: skip


@contextmanager
def without_collection() -> Iterator[None]:
    """No search for garbage while a plan grows, nor in the plan later: nothing of it is garbage, and the search took
    half of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if before:
            gc.enable()


class Study(Origins):
    """All jobs of one configuration. `jobs` maps ids to jobs in an order in which they could run.

    aliases: what is declared equal to something older; the project's `aliases.yaml` by default.
    claims: what the report tests; the project's `claims.yaml` by default.
    """

    def __init__(self, config: Config, aliases: Aliases | None = None, claims: list[Claim] | None = None) -> None:
        self.config = config
        self.claims = load_claims(PROJECT / CLAIMS) if claims is None else claims
        self.jobs: dict[str, Job] = {}
        self.families: list[Family] = []
        self.evaluations, self.selections, self.rollouts = list[dict](), list[dict](), list[dict]()
        self.frontiers, self.deltas = list[dict](), list[dict]()
        self._behind: dict[str, list[str]] = {}
        self._made: dict[tuple, list[str]] = {}
        self._texts = Texts()
        self.aliases = project_aliases() if aliases is None else aliases
        # every scale, mask and family of an update asks for its training again, every point for its labels
        self.train = cache(self.train)
        self._evaluation_settings = cache(self._evaluation_settings)
        self._point_labels = cache(lambda seed, stage: {"seed": seed, "stage": stage})
        self.abouts = tasks_of(config.own_tasks)
        self.scorers = {t: config.task_options.get(t, {}).get("scorer", self.abouts[t]["scorer"]) for t in config.tasks}
        with without_collection():
            self.task_data = {task: self._task(task) for task in config.tasks}
            self.prior_data = self._prior()
            for model_seed in config.model_seeds:
                self._one_lineage(model_seed)
            self.report = self.add("report", config.preset, *report_of(self))

    def add(
        self,
        stage: str,
        name: str,
        spec: dict,
        inputs: dict[str, list[str]],
        code: tuple[str, ...] = (),
        alternatives: dict[str, Job] | None = None,
        places: dict[str, str] | None = None,
        text: str = "",
    ) -> str:
        """Add a job unless it is there; returns its id. `code`: entry and parts for `own_digest`."""
        job = self._job(stage, name, spec, inputs, code or (stage,), alternatives, places, text)
        self.jobs.setdefault(job.id, job)
        return job.id

    def _job(
        self,
        stage: str,
        name: str,
        spec: dict,
        inputs: dict[str, list[str]],
        entry: tuple[str, ...],
        alternatives: dict[str, Job] | None = None,
        places: dict[str, str] | None = None,
        text: str = "",
    ) -> Job:
        """A job that is not added; it takes the older key that its own is declared equal to."""
        inputs = {role: refs for role, refs in inputs.items() if refs}
        job = Job(stage, name, spec, inputs, self._code(*entry), entry, places or {}, alternatives or {}, text=text)
        if not self.aliases:
            return job
        applied = [*self.aliases.steps("code", own_digest(*entry)), *self.aliases.steps("keys", job.own_key)]
        if not applied:
            return job
        known_as = self.aliases.resolve("keys", job.own_key)
        return replace(
            job,
            known_as=known_as if known_as != job.own_key else "",
            aliases=[alias.to_json() for alias in applied],
        )

    def _code(self, *entry: str) -> str:
        return self.aliases.resolve("code", own_digest(*entry))

    # ---- one lineage ----------------------------------------------------------------------------
    def _one_lineage(self, m: int) -> None:
        self.m = m
        self.models = self._models(m)
        self.sensitivity = self._sensitivity()
        self._rollouts()
        self._reference()
        builders = {"single": single_families, "sequential": sequential_families, "parallel": parallel_families}
        for protocol in self.config.protocols:
            for family in (families := builders[protocol](self)):
                self._select(family)
            add_frontiers(self, families)
            add_updates(self, families)

    def _sensitivity(self) -> dict[str, str]:
        masks = self.config.graft.masks
        # a random mask of the coordinates needs no estimate, one of the K-FAC directions needs their basis
        wanted = [c for c in masks.candidates if (c.estimator, c.rank) != ("diagonal", "random")]
        estimators = {c.estimator for c in wanted if masks.donors and masks.scales}
        return {
            estimator: self.add(
                "sensitivity",
                f"{estimator}.m{self.m}",
                {
                    "estimator": estimator,
                    "fisher": {"model": "true", "data": "empirical"}[masks.labels],
                    "seed": 0,
                    "threads": self.config.training.threads,
                },
                {"model": [self.models["deployed"]], "prior": [self.prior_data]},
            )
            for estimator in sorted(estimators)
        }

    def _rollouts(self) -> None:
        settings = self.config.rollout.model_dump() | {
            "split": "val",
            "seed": 0,
            "batch_size": self.config.evaluation.batch_size,
            "threads": self.config.evaluation.threads,
        }
        for task, data in self.task_data.items():
            judged, entry = scoring(self, [task], "rollout")
            # what a model makes itself is shown to nobody: it has no demonstrations on validation data
            for style in [None, *(s for s in self.config.styles if s not in self.config.self_improvement)]:
                shown = style is not None
                name = f"{task}.{'shown-' + style if shown else 'plain'}.m{self.m}"
                job = self.add(
                    "rollout",
                    name,
                    settings | {"with_demonstration": shown, "style": style or self.config.styles[0]} | judged,
                    {"model": [self.models["deployed"]], "data": [data]},
                    entry,
                )
                self.rollouts.append(
                    {
                        "job": job,
                        "task": task,
                        "style": style or self.config.styles[0],
                        "with_demonstration": shown,
                        "model_seed": self.m,
                    }
                )

    # ---- merging, used by the protocols ---------------------------------------------------------
    def merge(self, name: str, recipe: dict, model: str, trained: str, donor: str) -> str:
        """A merge job: the graft of one update onto `model`, written out."""
        return self.add("merge", name, {"recipe": recipe}, {"model": [model], "trained": [trained], "donor": [donor]})

    # ---- evaluation -----------------------------------------------------------------------------
    def _reference(self) -> None:
        for split in ("val", "test"):
            labels = {"family": "deployed", "model_seed": self.m}
            point = {"name": "deployed", "recipe": None, "terms": [], "labels": labels}
            job = self.evaluate(f"reference.m{self.m}", split, [point], {}, list(self.task_data))
            self._record(
                job,
                {**self._labels("none"), "family": "deployed", "method": "deployed", "task": "all", "split": split},
                [],
            )

    def _labels(self, protocol: str) -> dict[str, Any]:
        return {**dict.fromkeys(LABELS), "protocol": protocol, "model_seed": self.m, "mask": "none"}

    def evaluate(
        self, name: str, split: str, points: list[dict], inputs: dict[str, list[str]], tasks: Iterable[str]
    ) -> str:
        """An evaluation job of several points; see `_evaluation` for what enters a point's key."""
        job = self._evaluation(name, split, points, inputs, tasks)
        self.jobs.setdefault(job.id, job)
        return job.id

    def _evaluation(
        self, name: str, split: str, points: list[dict], inputs: dict[str, list[str]], tasks: Iterable[str]
    ) -> Job:
        """A point's key covers what that point reads, not the other points of its sweep."""
        inputs = {
            "model": [self.models["deployed"]],
            **inputs,
            "prior": [self.prior_data],
            "tasks": [self.task_data[task] for task in tasks],
        }
        masks = [p["recipe"]["mask"] for p in points if p["recipe"] and "mask" in p["recipe"]]
        estimators = {mask["estimator"] for mask in masks}
        for estimator, job_id in self.sensitivity.items():
            if estimator in estimators:
                inputs[f"sensitivity_{estimator}"] = [job_id]
        settings, texts, entry = self._evaluation_settings(split, tuple(tasks))
        keyed, written = keyed_points(points, joined(texts), inputs, self._code(*entry), self._texts)
        text = joined({**texts, "points": written})
        return self._job("evaluate", f"{split}.{name}", {**settings, "points": keyed}, inputs, entry, text=text)

    def _evaluation_settings(self, split: str, tasks: tuple[str, ...]) -> tuple[dict, dict[str, str], tuple[str, ...]]:
        """What all points of an evaluation share, the same as canonical JSON by name, and the entry of its code."""
        judged, entry = scoring(self, tasks, "evaluate")
        evaluation = self.config.evaluation.model_dump(exclude={"run_generated_code"}, exclude_none=True)
        settings = {"split": split, **evaluation, **judged}
        return settings, {name: canonical(value) for name, value in settings.items()}, entry

    def _record(self, job_id: str, labels: dict, trained: list[str], point: dict | None = None) -> None:
        """Tell the report which point of which evaluation is what."""
        point = point or self.jobs[job_id].spec["points"][0]
        labels = dict(labels)
        self.evaluations.append(
            {
                "job": job_id,
                "point": point["key"],
                "split": labels.pop("split", "val"),
                "labels": labels,
                "trained": [key_of(job) for job in trained],
            }
        )

    # ---- selection ------------------------------------------------------------------------------
    def sweep(self, candidates: list[Candidate], name: str, tasks: list[str]) -> None:
        """One validation job per seed for candidates that share their inputs; each candidate is told its points."""
        for seed in self.config.seeds:
            points: list[dict] = []
            pairs: dict[tuple[str, str], int] = {}
            for candidate in candidates:
                for stage, (recipe, terms) in enumerate(candidate.stages(seed)):
                    points.append(
                        {
                            "name": candidate.point_name(stage),
                            "recipe": recipe,
                            "terms": [pairs.setdefault(t, len(pairs)) for t in terms],
                            "labels": self._point_labels(seed, candidate.stage_label(stage)),
                        }
                    )
            inputs = {"trained": [trained for trained, _ in pairs], "donor": [donor for _, donor in pairs]}
            job_id = self.evaluate(f"{name}.s{seed}.m{self.m}", "val", points, inputs, tasks)
            for candidate, point, stage in self._in_order(candidates, self.jobs[job_id].spec["points"], seed):
                candidate.found(seed, stage, job_id, point["key"])
                labels = {
                    **self._labels(candidate.protocol),
                    **candidate.label,
                    "seed": seed,
                    "stage": candidate.stage_label(stage),
                }
                self._record(job_id, labels, candidate.trained(seed, stage), point)

    @staticmethod
    def _in_order(candidates: list[Candidate], points: list[dict], seed: int):
        iterator = iter(points)
        for candidate in candidates:
            for stage in range(len(candidate.stages(seed))):
                yield candidate, next(iterator), stage

    def _select(self, family: Family) -> None:
        """Selection on validation data, then the test of what was selected, once, over all seeds."""
        name = f"{family.protocol}.{family.style}.{family.name}.{family.task}.m{self.m}"
        evaluations = list(dict.fromkeys(job for c in family.candidates for job, _, _ in c.final_points()))
        places = {job: n for n, job in enumerate(evaluations)}
        candidates, written = [], []
        for c in family.candidates:
            label, found = c.full_label(self.config.seeds), c.final_points()
            points = [{"evaluation": places[job], "point": key, "seed": seed} for job, key, seed in found]
            candidates.append({"name": c.name, "label": label, "points": points})
            written.append(joined({"name": quote(c.name), "label": self._texts.of(label), "points": canonical(points)}))
        settings = self.config.selection.model_dump()
        text = joined({k: canonical(v) for k, v in settings.items()} | {"candidates": f"[{','.join(written)}]"})
        selection = self.add(
            "select", name, {**settings, "candidates": candidates}, {"evaluations": evaluations}, text=text
        )
        # named after the candidate, not the family: families that choose the same candidate share the artefact
        shared = f"{family.protocol}.{family.style}.{family.task}"
        alternatives = {
            c.name: self._test_of(c, f"{shared}.{c.name}.m{self.m}", family.tasks) for c in family.candidates
        }
        if len(alternatives) != len(family.candidates):
            raise UserError(f"{name}: two candidates have one name; make their settings differ in six digits")
        test = self.add(
            "evaluate",
            f"test.{name}",
            {"split": "test"},
            {"selection": [selection]},
            alternatives=alternatives,
        )
        self.selections.append(
            {
                "family": family.name,
                "protocol": family.protocol,
                "style": family.style,
                "task": family.task,
                "model_seed": self.m,
                "selection": selection,
                "test": test,
            }
        )
        if family.written:
            for seed in self.config.seeds:
                written = {
                    c.name: self._merge_of(c, f"{shared}.{c.name}.s{seed}.m{self.m}", seed) for c in family.candidates
                }
                model = self.add(
                    "merge", f"selected.{name}.s{seed}", {}, {"selection": [selection]}, alternatives=written
                )
                self.selections[-1].setdefault("models", {})[
                    f"{family.protocol}.{family.style}.{family.task}.s{seed}.m{self.m}"
                ] = model

    def _test_of(self, candidate: Candidate, name: str, tasks: list[str]) -> Job:
        """The test of one candidate over all seeds; families share it."""
        if candidate.test is None:
            candidate.test = self._new_test_of(candidate, name, tasks)
        return candidate.test

    def _new_test_of(self, candidate: Candidate, name: str, tasks: list[str]) -> Job:
        points, inputs = [], {"trained": [], "donor": []}
        for seed in self.config.seeds:
            for stage, (recipe, terms) in enumerate(candidate.stages(seed)):
                indices = []
                for trained, donor in terms:
                    indices.append(len(inputs["trained"]))
                    inputs["trained"].append(trained)
                    inputs["donor"].append(donor)
                points.append(
                    {
                        "name": f"s{seed}.{candidate.point_name(stage)}",
                        "recipe": recipe,
                        "terms": indices,
                        "labels": self._point_labels(seed, candidate.stage_label(stage)),
                    }
                )
        return self._evaluation(name, "test", points, inputs, tasks)

    def _merge_of(self, candidate: Candidate, name: str, seed: int) -> Job:
        """The selected model of one candidate, written out."""
        recipe, terms = candidate.stages(seed)[-1]
        inputs = {"model": [self.models["deployed"]], "trained": [t for t, _ in terms], "donor": [d for _, d in terms]}
        mask = recipe.get("mask")
        if mask and mask["estimator"] in self.sensitivity:
            inputs[f"sensitivity_{mask['estimator']}"] = [self.sensitivity[mask["estimator"]]]
        whole, text = with_terms(recipe, list(range(len(terms))), self._texts)
        return self._job("merge", name, {"recipe": whole}, inputs, ("merge",), text=f'{{"recipe":{text}}}')
