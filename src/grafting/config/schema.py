"""The configuration as pydantic models. `config.yaml` documents every key; this file says what is legal."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from grafting.config.base import Decay, Distinct, Fraction, Name, Natural, Positive, Rate, Scale, Section, Seed
from grafting.config.data import DataSource, Judge, Prior, Samples, Source
from grafting.config.grid import Gridded
from grafting.config.learners import Learners, SelfImprovement


class Architecture(Section):
    """Shape of the model made from scratch."""

    layers: Positive
    width: Positive
    feed_forward: Positive
    heads: Positive
    context: Positive
    embedding_std: Rate

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Architecture:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.width // self.heads % 2:
            raise ValueError(f"width / heads is {self.width // self.heads}; rotary positions need an even number")
        return self


class Pretrain(Section):
    """How the base model is made."""

    steps: Positive
    batch_size: Positive
    lr: Rate
    warmup_steps: Natural
    weight_decay: Decay
    demonstration_share: Fraction
    skill_weights: dict[str, Rate]
    checkpoints: Annotated[int, Field(ge=1, le=100)]

    @model_validator(mode="after")
    def _enough_steps(self) -> Pretrain:
        if self.steps % self.checkpoints:
            raise ValueError(f"steps {self.steps} is not a multiple of checkpoints {self.checkpoints}")
        return self


class Posttrain(Section):
    """How the base model becomes the deployed one."""

    steps: Positive
    batch_size: Positive
    lr: Rate
    warmup_steps: Natural
    weight_decay: Decay
    demonstration_share: Fraction
    skill_weights: dict[str, Rate]


class Gate(Section):
    """What the deployed model must show before the study starts."""

    prior: Fraction
    demonstrated: Fraction
    new: Fraction
    extra_steps: Positive
    attempts: Natural


class ScratchLineage(Section):
    """A lineage made by the pipeline itself."""

    kind: Literal["scratch"]
    architecture: Architecture
    pretrain: Pretrain
    posttrain: Posttrain
    gate: Gate
    precision: Literal["float32", "bfloat16"]
    threads: Positive


class PretrainedLineage(Section):
    """A lineage whose checkpoints exist. `donors` are earlier checkpoints, in time order."""

    kind: Literal["pretrained"]
    deployed: Source
    donors: dict[Name, Source] = {}
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Positive = 1


class TaskDefaults(Section):
    """Sizes and seed of a new task, unless `task_options` says otherwise."""

    train_items: Positive
    val_items: Positive
    test_items: Positive
    seed: int


class Lora(Section):
    """Low-rank matrices in place of full fine-tuning."""

    rank: Positive
    alpha: Rate
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Training(Section):
    """What all learners share."""

    steps: Positive
    batch_size: Positive
    micro_batch_size: Positive | None
    warmup_steps: Natural
    schedule: Literal["cosine", "constant", "linear"]
    final_lr_ratio: Fraction
    weight_decay: Decay
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]
    clip_norm: Rate
    precision: Literal["float32", "bfloat16"]
    threads: Positive
    processes: Positive = 1
    gradient_checkpointing: bool = False
    lora: Lora | None = None

    def spec(self) -> dict[str, Any]:
        """What of it enters a job's spec: all, but not what is switched off, so that keys stay."""
        dump = self.model_dump(mode="json")
        off = {"gradient_checkpointing": False, "lora": None, "processes": 1}
        return {key: value for key, value in dump.items() if key not in off or value != off[key]}

    @model_validator(mode="after")
    def _micro_batch_fits(self) -> Training:
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(f"micro_batch_size {self.micro_batch_size} exceeds batch_size {self.batch_size}")
        if self.processes > self.batch_size:
            raise ValueError(f"processes {self.processes} exceeds batch_size {self.batch_size}: each needs an example")
        return self


class MaskCandidate(Section):
    """One way of masking an update."""

    estimator: Literal["kfac", "diagonal"]
    rank: Literal["fisher", "fisher_delta2", "random"]
    fraction: Fraction
    per: Literal["model", "tensor"] = "model"

    def spec(self) -> dict[str, Any]:
        """What of it enters a recipe: a mask over the whole model is described as it was before there were others."""
        return {key: value for key, value in self.model_dump().items() if (key, value) != ("per", "model")}


class Masks(Section):
    """Which masks are tried, on which donors, at which scales."""

    donors: list[Name]
    scales: Annotated[list[Scale], Distinct]
    candidates: Annotated[list[MaskCandidate], Distinct]
    labels: Literal["model", "data"]


class Graft(Section, Gridded):
    """Donor, scale and mask."""

    lrs: Annotated[list[Rate], Field(min_length=1), Distinct]
    donors: Annotated[list[Name], Field(min_length=1)]
    scales: Annotated[list[Scale], Field(min_length=1), Distinct]
    masks: Masks
    expert_donors: list[Name] = []
    control_scales: Annotated[list[Scale], Distinct] = []


class Sequential(Section):
    """Tasks one after the other."""

    regraft_scales: Annotated[list[Scale], Distinct]
    sum_donors: list[Name]
    sum_scales: Annotated[list[Scale], Distinct]


class Combination(Section):
    """One way of combining the updates of several tasks."""

    operator: Literal["sum", "ties"]
    density: Annotated[float, Field(gt=0, le=1)] = 1.0
    scales: Annotated[list[Scale], Field(min_length=1), Distinct]


class Parallel(Section):
    """Updates learned independently and merged at once."""

    donors: list[Name]
    operators: list[Combination]


class Evaluation(Section):
    """How answers are generated and scored."""

    batch_size: Positive
    max_new_tokens: Positive
    threads: Positive
    samples: Samples | None = None
    run_generated_code: bool = False


class Rollout(Section):
    """Rollouts of the deployed model as an artefact of their own."""

    items: Positive
    temperature: Annotated[float, Field(ge=0)]
    max_new_tokens: Positive


class Selection(Section):
    """How one candidate is chosen, on validation data only."""

    rule: Literal["balanced"]
    prior_weight: Fraction


class Saving(Section):
    """When a running job saves its work, and what makes it stop. It changes no result and enters no key."""

    seconds: Rate | None = 60.0
    steps: Positive | None = None
    share: Annotated[float, Field(gt=0, le=1)] = 0.02
    signal: Literal["USR1", "USR2", "URG", "XCPU"] | None = None
    budget_seconds: Rate | None = None


Tracking = Literal["tensorboard", "wandb"]


class Config(Section):
    """The whole experiment."""

    preset: Name
    seeds: Annotated[list[Seed], Field(min_length=1)]
    model_seeds: Annotated[list[Seed], Field(min_length=1)]
    data_root: str | None
    lineage: Annotated[ScratchLineage | PretrainedLineage, Field(discriminator="kind")]
    data_sources: dict[Name, DataSource] = {}
    tasks: Annotated[list[Name], Field(min_length=1)]
    own_tasks: dict[Name, str] = {}
    task_options: dict[Name, dict[str, Any]]
    task_defaults: TaskDefaults
    styles: Annotated[list[Name], Field(min_length=1)]
    judge: Judge | None = None
    prior: Prior
    training: Training
    learners: Learners
    self_improvement: dict[Name, SelfImprovement] = {}
    graft: Graft
    protocols: Annotated[list[Literal["single", "sequential", "parallel"]], Field(min_length=1)]
    sequential: Sequential
    parallel: Parallel
    evaluation: Evaluation
    rollout: Rollout
    selection: Selection
    saving: Saving = Saving()
    tracking: Tracking | None = None

    @field_validator("seeds", "model_seeds", "tasks", "styles", "protocols")
    @classmethod
    def _distinct(cls, values: list) -> list:
        if len(set(values)) != len(values):
            raise ValueError(f"{values} names something twice")
        return values

    @model_validator(mode="after")
    def _names_exist(self) -> Config:
        known = self.donor_names()
        for key, names in (
            ("graft.donors", self.graft.donors),
            ("graft.masks.donors", self.graft.masks.donors),
            ("graft.expert_donors", self.graft.expert_donors),
            ("sequential.sum_donors", self.sequential.sum_donors),
            ("parallel.donors", self.parallel.donors),
        ):
            for name in names:
                if name not in known:
                    raise ValueError(f"{key}: no donor is called {name!r}; this lineage has {', '.join(known)}")
        for key, names in (
            ("graft.masks.donors", self.graft.masks.donors),
            ("sequential.sum_donors", self.sequential.sum_donors),
            ("parallel.donors", self.parallel.donors),
        ):
            missing = [name for name in names if name not in self.graft.donors]
            if missing:
                raise ValueError(f"{key}: {', '.join(missing)} must be in graft.donors too: no update is learned there")
        opsd = self.learners.opsd
        for style in (opsd.styles or []) if opsd else []:
            if style not in self.styles:
                raise ValueError(f"learners.opsd.styles: {style!r} is not in styles; to leave OPSD out say opsd: null")
        for name, way in self.self_improvement.items():
            if way.method == "pedagogical":
                teacher = self.learners.controls.get(way.teacher)
                if teacher is None or teacher.objective != "grpo" or not teacher.privileged:
                    raise ValueError(
                        f"self_improvement.{name}.teacher: {way.teacher!r} must be a learner of objective grpo that is "
                        "privileged: true"
                    )
        for name, learner in self.learners.controls.items():
            for style in learner.styles or []:
                if style not in self.styles:
                    raise ValueError(f"learners.{name}.styles: {style!r} is not in styles")
        if self.lineage.kind == "scratch":
            limits = {"evaluation": self.evaluation, "rollout": self.rollout, "learners.opsd": opsd}
            controls = self.learners.controls.items()
            limits |= {f"learners.{name}": c for name, c in controls if hasattr(c, "max_new_tokens")}
            for key, section in limits.items():
                if section is not None and section.max_new_tokens >= self.lineage.architecture.context:
                    raise ValueError(
                        f"{key}.max_new_tokens {section.max_new_tokens} fills lineage.architecture.context"
                    )
        if self.lineage.kind == "pretrained" and self.prior.kind == "skills":
            raise ValueError("prior.kind: skills are the tiny language's; a pretrained lineage needs another suite")
        if self.lineage.kind == "pretrained" and "deployed" in self.lineage.donors:
            raise ValueError("lineage.donors: the name deployed is that of the deployed model itself")
        if self.lineage.kind == "pretrained" and len(self.model_seeds) > 1:
            raise ValueError("model_seeds: a pretrained lineage has exactly one")
        return self

    def donor_names(self) -> list[str]:
        """Names of the lineage's checkpoints in time order; the last is `deployed`."""
        if self.lineage.kind == "scratch":
            n = self.lineage.pretrain.checkpoints
            # base is another name of the last pretraining checkpoint, so that one is not listed twice
            return [f"p{round(100 * i / n)}" for i in range(1, n)] + ["base", "deployed"]
        return [*self.lineage.donors, "deployed"]
