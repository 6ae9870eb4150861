"""Candidates and families of the three protocols.

A *candidate* is one way to a final model (method, learning rate, donor, scale, mask, operator), over all seeds;
in a sequence it is a whole chain with constant settings. A *family* is a set of candidates among which
validation data choose one: a row of the result table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from grafting.config.schema import MaskCandidate
from grafting.plan.jobs import key_of

if TYPE_CHECKING:
    from grafting.plan.jobs import Job
    from grafting.plan.study import Study

#: (trained checkpoint, its donor), both references
Term = tuple[str, str]
#: a recipe without its terms, and the terms
Stage = tuple[dict[str, Any], list[Term]]


@dataclass
class Candidate:
    """One way to a final model.

    stages_of: seed -> recipes and terms of the models after each stage (one stage outside sequences).
    trained_of: seed -> for each stage, the training jobs behind the model.
    test:       the job that tests it over all seeds, once a family has asked for it.
    """

    name: str
    protocol: str
    label: dict[str, Any]
    stages_of: Callable[[int], list[Stage]]
    trained_of: Callable[[int], list[list[str]]]
    test: Job | None = None
    _points: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    _stages: dict[int, list[Stage]] = field(default_factory=dict)
    _trained: dict[int, list[list[str]]] = field(default_factory=dict)
    _full: dict[str, Any] = field(default_factory=dict)

    def stages(self, seed: int) -> list[Stage]:
        """Recipes and terms, built once (building one adds its training and merge jobs to the study)."""
        if seed not in self._stages:
            self._stages[seed] = self.stages_of(seed)
        return self._stages[seed]

    def trained(self, seed: int, stage: int = -1) -> list[str]:
        """Ids of the training jobs behind the model after `stage`."""
        if seed not in self._trained:
            self._trained[seed] = self.trained_of(seed)
        return self._trained[seed][stage]

    def full_label(self, seeds: list[int]) -> dict[str, Any]:
        """The label with the training jobs behind the model, by seed and stage; built once. Keys, not ids: a readable
        name must not enter the key of a selection."""
        if not self._full:
            trained = {
                str(seed): [[key_of(i) for i in self.trained(seed, n)] for n in range(len(self.stages(seed)))]
                for seed in seeds
            }
            self._full = {**self.label, "trained": trained}
        return self._full

    def stage_label(self, stage: int) -> int | None:
        """Position in the sequence, or None outside sequences."""
        return stage if self.protocol == "sequential" else None

    def point_name(self, stage: int) -> str:
        """Readable name of one evaluated point."""
        return f"{self.name}.t{stage}" if self.protocol == "sequential" else self.name

    def found(self, seed: int, stage: int, job: str, key: str) -> None:
        """Remember which evaluation job holds a point."""
        self._points[seed, stage] = (job, key)

    def final_points(self) -> list[tuple[str, str, int]]:
        """(evaluation job, point key, seed) of the final model, per seed."""
        last = max(stage for _, stage in self._points)
        return [(*self._points[seed, stage], seed) for seed, stage in sorted(self._points) if stage == last]


@dataclass
class Family:
    """A row of the result table. `written`: the selected model is written out as a model directory."""

    name: str
    protocol: str
    style: str
    task: str
    tasks: list[str]
    candidates: list[Candidate]
    written: bool = False


def mask_name(mask: MaskCandidate | None) -> str:
    """`kfac-fisher-0.01`, `kfac-fisher-0.01-tensor` with the fraction of every tensor, or `none`."""
    if mask is None:
        return "none"
    return f"{mask.estimator}-{mask.rank}-{mask.fraction:g}" + ("" if mask.per == "model" else f"-{mask.per}")


@cache
def _recipe(operator: str, scale: float, mask: MaskCandidate | None = None, density: float | None = None) -> dict:
    # one object per recipe, which nobody changes: its canonical JSON is made once
    recipe: dict[str, Any] = {"operator": operator, "scale": scale}
    if mask is not None:
        recipe["mask"] = {**mask.spec(), "seed": 0}
    if density is not None:
        recipe["density"] = density
    return recipe


def _families(
    rows: Iterable[tuple[str, list[Candidate]]], protocol: str, style: str, task: str, tasks: list[str], written: bool
) -> list[Family]:
    return [
        Family(name, protocol, style, task, tasks, candidates, written and name == "graft")
        for name, candidates in rows
        if candidates
    ]


# ---- single ---------------------------------------------------------------------------------------
def single_families(study: Study) -> list[Family]:
    """Every task by itself, from the deployed model, for every style of demonstrations."""
    families = []
    for style in study.config.styles:
        for task in study.config.tasks:
            families += _single(study, style, task)
    return families


def _single(study: Study, style: str, task: str) -> list[Family]:
    config, graft = study.config, study.config.graft
    main = style == config.styles[0]
    found: list[Candidate] = []

    def update(method: str, donor: str, lr: float, variants: list[tuple[float, MaskCandidate | None]]) -> None:
        """Candidates of one update at several scales and masks, evaluated as one sweep."""
        variants = list(dict.fromkeys(variants))
        candidates = [_single_candidate(study, style, task, method, donor, lr, *variant) for variant in variants]
        study.sweep(candidates, f"single.{style}.{method}-{donor}.lr{lr:g}.{task}", [task])
        found.extend(candidates)

    donors = graft.donors if main else graft.expert_donors
    for donor in dict.fromkeys(["deployed", *donors]):
        for lr in dict.fromkeys(
            [*(config.learners.sft.lrs if donor == "deployed" else []), *(graft.lrs if donor in donors else [])]
        ):
            variants: list[tuple[float, MaskCandidate | None]] = []
            if donor == "deployed" and lr in config.learners.sft.lrs:
                variants.append((1.0, None))
            if donor in donors and lr in graft.lrs:
                variants += [(scale, None) for scale in graft.scales]
                if main and donor in graft.masks.donors:
                    variants += [(s, mask) for mask in graft.masks.candidates for s in graft.masks.scales]
            update("sft", donor, lr, variants)
    opsd = config.learners.opsd
    if opsd is not None and (opsd.styles is None or style in opsd.styles):
        for lr in opsd.lrs:
            update("opsd", "deployed", lr, [(1.0, None), *((scale, None) for scale in graft.control_scales)])

    # who only makes data for others is no row of its own
    teachers = {getattr(way, "teacher", None) for way in config.self_improvement.values()}
    controls = {
        name: learner
        for name, learner in config.learners.controls.items()
        if style in (learner.styles or config.styles[:1]) and name not in teachers
    }
    for name, learner in controls.items():
        for lr in learner.lrs:
            update(name, "deployed", lr, [(1.0, None)])

    def among(test: Callable[[dict], bool]) -> list[Candidate]:
        return [candidate for candidate in found if test(candidate.label)]

    def is_graft(c: dict) -> bool:
        # a random mask is a control: it may not be what is compared with OPSD
        on_grid = c["donor"] in donors and c["lr"] in graft.lrs and (c["mask"] != "none" or c["scale"] in graft.scales)
        return c["method"] == "sft" and on_grid and not is_random(c)

    def is_random(c: dict) -> bool:
        return "-random-" in c["mask"]

    rows = [
        (
            "sft",
            among(
                lambda c: (
                    c["method"] == "sft"
                    and c["donor"] == "deployed"
                    and c["scale"] == 1
                    and c["mask"] == "none"
                    and c["lr"] in config.learners.sft.lrs
                )
            ),
        ),
        ("opsd", among(lambda c: c["method"] == "opsd" and c["scale"] == 1)),
        ("graft", among(is_graft)),
        ("graft_early", among(lambda c: is_graft(c) and c["donor"] != "deployed" and c["mask"] == "none")),
    ]
    if main:
        rows += [
            ("sft_scaled", among(lambda c: c["method"] == "sft" and c["donor"] == "deployed" and c["mask"] == "none")),
            ("opsd_scaled", among(lambda c: c["method"] == "opsd") if graft.control_scales else []),
            ("graft_unmasked", among(lambda c: is_graft(c) and c["mask"] == "none")),
            ("graft_unscaled", among(lambda c: is_graft(c) and c["scale"] == 1 and c["mask"] == "none")),
        ]
        if any(c.label["mask"] != "none" for c in found):
            rows += [
                ("graft_masked", among(lambda c: is_graft(c) and c["mask"] != "none")),
                ("graft_random", among(is_random)),
            ]
    rows += [(name, among(lambda c, name=name: c["method"] == name)) for name in controls]
    return _families(rows, "single", style, task, [task], main)


def _single_candidate(
    study: Study, style: str, task: str, method: str, donor: str, lr: float, scale: float, mask: MaskCandidate | None
) -> Candidate:
    start = study.models[donor]

    def trained(seed: int) -> str:
        return study.train(method, task, style, lr, seed, start, donor)

    name = f"{method}-{donor}.lr{lr:g}.l{scale:g}" + (f".{mask_name(mask)}" if mask else "")
    label = {
        "method": method,
        "style": style,
        "task": task,
        "donor": donor,
        "scale": scale,
        "mask": mask_name(mask),
        "lr": lr,
        "operator": "graft",
    }
    return Candidate(
        name,
        "single",
        label,
        stages_of=lambda seed: [(_recipe("graft", scale, mask), [(trained(seed), start)])],
        trained_of=lambda seed: [study.behind(trained(seed))],
    )


# ---- sequential -----------------------------------------------------------------------------------
def sequential_families(study: Study) -> list[Family]:
    """Tasks in order. A chain trains (and, for re-grafting, merges) on the last result; a sum learns every
    update on one donor and needs no further training."""
    config = study.config
    style, tasks, settings = config.styles[0], config.tasks, config.sequential
    deployed = study.models["deployed"]

    def chain(method: str, lr: float, scale: float) -> Candidate:
        def walk(seed: int) -> tuple[list[Stage], list[list[str]]]:
            current, place, stages, behind = deployed, "deployed", [], []
            for task in tasks:
                trained = study.train(method, task, style, lr, seed, current, place)
                place = f"{task}~{place}" if place != "deployed" else f"{task}~l{scale:g}"
                behind.append([*(behind[-1] if behind else []), *study.behind(trained)])
                if scale != 1:
                    trained = study.merge(
                        f"{place}.{style}.{method}.lr{lr:g}.s{seed}.m{study.m}",
                        {"operator": "graft", "scale": scale, "terms": [0]},
                        current,
                        trained,
                        current,
                    )
                current = trained
                # lambda = 1 onto the donor itself: the checkpoint as it is
                stages.append((_recipe("graft", 1.0), [(current, deployed)]))
            return stages, behind

        label = {
            "method": method,
            "style": style,
            "task": "all",
            "donor": "last",
            "scale": scale,
            "lr": lr,
            "operator": "chain",
        }
        return Candidate(
            f"{method}-chain.lr{lr:g}.l{scale:g}",
            "sequential",
            label,
            stages_of=lambda seed: walk(seed)[0],
            trained_of=lambda seed: walk(seed)[1],
        )

    def summed(donor: str, lr: float, scale: float) -> Candidate:
        start = study.models[donor]

        def terms(seed: int) -> list[Term]:
            return [(study.train("sft", task, style, lr, seed, start, donor), start) for task in tasks]

        label = {
            "method": "sft",
            "style": style,
            "task": "all",
            "donor": donor,
            "scale": scale,
            "lr": lr,
            "operator": "sum",
        }
        return Candidate(
            f"sum-{donor}.lr{lr:g}.l{scale:g}",
            "sequential",
            label,
            stages_of=lambda seed: [(_recipe("sum", scale), terms(seed)[: i + 1]) for i in range(len(tasks))],
            trained_of=lambda seed: [[t for t, _ in terms(seed)[: i + 1]] for i in range(len(tasks))],
        )

    groups: dict[str, list[Candidate]] = {
        "sft": [],
        "opsd": [],
        "opsd_regraft": [],
        "graft_regraft": [],
        "graft_sum": [],
    }
    for lr in config.learners.sft.lrs:
        groups["sft"].append(chain("sft", lr, 1.0))
        groups["graft_regraft"] += [chain("sft", lr, scale) for scale in settings.regraft_scales]
    for lr in config.learners.opsd.lrs if config.learners.opsd else []:
        groups["opsd"].append(chain("opsd", lr, 1.0))
        groups["opsd_regraft"] += [chain("opsd", lr, scale) for scale in settings.regraft_scales]
    for candidates in groups.values():
        for candidate in candidates:
            study.sweep([candidate], f"sequential.{style}.{candidate.name}", tasks)
    for donor in settings.sum_donors:
        for lr in config.graft.lrs:
            candidates = [summed(donor, lr, scale) for scale in settings.sum_scales]
            if candidates:
                study.sweep(candidates, f"sequential.{style}.sum-{donor}.lr{lr:g}", tasks)
            groups["graft_sum"] += candidates
    groups["graft"] = groups["graft_regraft"] + groups["graft_sum"]
    return _families(groups.items(), "sequential", style, "all", tasks, True)


# ---- parallel -------------------------------------------------------------------------------------
def parallel_families(study: Study) -> list[Family]:
    """Updates learned independently and merged at once."""
    config = study.config
    style, tasks = config.styles[0], config.tasks

    def merged(method: str, donor: str, lr: float, operator: str, density: float | None, scale: float) -> Candidate:
        start = study.models[donor]

        def terms(seed: int) -> list[Term]:
            return [(study.train(method, task, style, lr, seed, start, donor), start) for task in tasks]

        label = {
            "method": method,
            "style": style,
            "task": "all",
            "donor": donor,
            "scale": scale,
            "lr": lr,
            "operator": operator if density is None else f"{operator}-{density:g}",
        }
        return Candidate(
            f"{method}-{donor}.{label['operator']}.lr{lr:g}.l{scale:g}",
            "parallel",
            label,
            stages_of=lambda seed: [(_recipe(operator, scale, density=density), terms(seed))],
            trained_of=lambda seed: [[job for t, _ in terms(seed) for job in study.behind(t)]],
        )

    groups: dict[str, list[Candidate]] = {"sft": [], "opsd": [], "opsd_scaled": [], "graft": []}
    sums = [s for c in config.parallel.operators if c.operator == "sum" for s in c.scales]

    def sweep(method: str, donor: str, lr: float, variants: list[tuple[str, float | None, float]]) -> list[Candidate]:
        candidates = [merged(method, donor, lr, *variant) for variant in dict.fromkeys(variants)]
        if candidates:
            study.sweep(candidates, f"parallel.{style}.{method}-{donor}.lr{lr:g}", tasks)
        return candidates

    grafts = [
        (c.operator, c.density if c.operator == "ties" else None, s)
        for c in config.parallel.operators
        for s in c.scales
    ]
    for donor in dict.fromkeys(["deployed", *config.parallel.donors]):
        for lr in dict.fromkeys([*(config.learners.sft.lrs if donor == "deployed" else []), *config.graft.lrs]):
            plain = [("sum", None, 1.0)] if donor == "deployed" and lr in config.learners.sft.lrs else []
            scaled = grafts if donor in config.parallel.donors and lr in config.graft.lrs else []
            for candidate in sweep("sft", donor, lr, plain + scaled):
                label = candidate.label
                if plain and label["operator"] == "sum" and label["scale"] == 1:
                    groups["sft"].append(candidate)
                if scaled and (label["operator"] != "sum" or label["scale"] in sums):
                    groups["graft"].append(candidate)
    for lr in config.learners.opsd.lrs if config.learners.opsd else []:
        candidates = sweep("opsd", "deployed", lr, [("sum", None, s) for s in (1.0, *sums)])
        groups["opsd"] += candidates[:1]
        groups["opsd_scaled"] += candidates
    groups["graft_early"] = [c for c in groups["graft"] if c.label["donor"] != "deployed"]
    return _families(groups.items(), "parallel", style, "all", tasks, True)
