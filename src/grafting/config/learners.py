"""The `learners` section: a mapping from a learner's name to its objective and options.

`sft` and `opsd` are the study's two main learners; every other entry is a control, a row of the result table. An entry
whose name is that of an objective needs no `objective` key. An objective without a section here (a file of
one's own under training/objectives) takes whatever stands under `options`.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from grafting.config.base import Distinct, Fraction, Name, Natural, Positive, Rate, Section
from grafting.config.data import Source
from grafting.config.grid import Gridded
from grafting.training.objectives import OBJECTIVES, find

Nonnegative = Annotated[float, Field(ge=0)]


class Learner(Section, Gridded):
    """What all learners have: candidates for the learning rate, and where they differ from `training`."""

    #: inputs of the training job beside model and data
    needs: ClassVar[tuple[str, ...]] = ()
    #: keys that are no options of the objective
    COMMON: ClassVar[tuple[str, ...]] = ("objective", "lrs", "steps", "batch_size", "styles", "rounds", "grid")

    objective: str
    lrs: Annotated[list[Rate], Field(min_length=1), Distinct]
    steps: Positive | None = None
    batch_size: Positive | None = None
    styles: Annotated[list[Name], Field(min_length=1)] | None = None

    def options(self) -> dict[str, Any]:
        """The objective's own options, as they enter a job's spec: `LATER` ones only where they differ from their
        default, so that the keys of jobs that do not use them stay."""
        later = getattr(self, "LATER", ())
        fields = type(self).model_fields
        dump = self.model_dump(mode="json", exclude=set(self.COMMON))
        return {key: value for key, value in dump.items() if key not in later or value != fields[key].default}

    def inputs(self) -> tuple[str, ...]:
        """Roles of the inputs beside model and data."""
        return self.needs


class Sft(Learner):
    """Supervised fine-tuning."""

    objective: Literal["sft"] = "sft"


class Dft(Learner):
    """SFT, each token weighted by its probability."""

    objective: Literal["dft"] = "dft"


class GatedSft(Learner):
    """SFT, surprising tokens weighted down."""

    objective: Literal["gated_sft"] = "gated_sft"
    threshold: Nonnegative
    width: Rate


class SftKl(Learner):
    """SFT held back in what it says."""

    needs = ("teacher",)
    objective: Literal["sft_kl"] = "sft_kl"
    coefficient: Nonnegative


class SftL2(Learner):
    """SFT held back in where it goes."""

    needs = ("teacher",)
    objective: Literal["sft_l2"] = "sft_l2"
    coefficient: Nonnegative


class Rolling(Learner):
    """Learners that sample."""

    LATER: ClassVar[tuple[str, ...]] = ("backend",)
    temperature: Rate
    max_new_tokens: Positive
    backend: Literal["native", "continuous"] = "native"


class Replay(Rolling):
    """SFT with a share of the deployed model's own responses."""

    LATER = ("backend",)
    needs = ("teacher", "prior")
    objective: Literal["replay"] = "replay"
    share: Annotated[float, Field(gt=0, lt=1)]


class Distilling(Rolling):
    """Learners with a divergence."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd"]
    beta: Fraction = 0.5

    @model_validator(mode="after")
    def _beta_is_inside(self) -> Distilling:
        if self.divergence == "jsd" and not 0 < self.beta < 1:
            raise ValueError(f"jsd needs beta between 0 and 1, given {self.beta}; use forward_kl or reverse_kl")
        return self


class Reinvoke(Distilling):
    """SFT, then distillation from the deployed model on general prompts."""

    needs = ("teacher", "prior")
    objective: Literal["reinvoke"] = "reinvoke"
    share: Fraction


class Grpo(Rolling):
    """Reinforcement learning with a verifier."""

    needs = ("teacher",)
    objective: Literal["grpo"] = "grpo"
    samples: Annotated[int, Field(ge=2)]
    scale_advantages: bool = True
    kl: Nonnegative = 0.0
    privileged: bool = False
    spike: Nonnegative = 0.0
    spike_tolerance: Nonnegative = 0.0


class Sdpo(Distilling):
    """Self-distillation policy optimisation."""

    needs = ("teacher",)
    objective: Literal["sdpo"] = "sdpo"
    samples: Annotated[int, Field(ge=2)]
    teacher: Literal["frozen", "ema", "live"]
    ema_rate: Fraction = 0.0


class Guard(Section):
    """What happens when the teacher no longer knows the answer it is shown."""

    threshold: Fraction
    action: Literal["warn", "stop"]
    every: Positive


class Opsd(Distilling):
    """On-policy self-distillation."""

    # also in a sequence the teacher is the deployed model: one frozen anew at each task knows nothing
    needs = ("teacher",)
    LATER = (
        "backend", "vocabulary", "top_k", "support", "tail", "loss_temperature", "importance_clip", "purify",
        "hint_share", "rollouts_per_prompt",
    )  # fmt: skip
    objective: Literal["opsd"] = "opsd"
    teacher: Literal["frozen", "ema", "live"]
    ema_rate: Fraction
    skip_tokens: Natural
    guard: Guard
    vocabulary: Literal["full", "top_k", "sampled_token"] = "full"
    top_k: Positive | None = None
    support: Literal["student", "teacher"] = "student"
    tail: bool = True
    loss_temperature: Rate = 1.0
    importance_clip: Annotated[float, Field(gt=0)] | None = None
    purify: Nonnegative = 0.0
    hint_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    rounds: Positive | None = None
    rollouts_per_prompt: Positive = 1

    @model_validator(mode="after")
    def _modes_fit(self) -> Opsd:
        if self.skip_tokens >= self.max_new_tokens:
            raise ValueError(f"skip_tokens {self.skip_tokens} leaves nothing of max_new_tokens {self.max_new_tokens}")
        if (self.vocabulary == "top_k") != (self.top_k is not None):
            raise ValueError("vocabulary: top_k and the number top_k go together")
        if self.vocabulary == "sampled_token" and self.divergence != "reverse_kl":
            raise ValueError("vocabulary: sampled_token estimates reverse_kl; say divergence: reverse_kl")
        if self.rounds is not None and self.teacher == "ema":
            raise ValueError("rounds start from the saved model, so teacher: ema would begin anew each; use frozen")
        if self.rounds is None and self.rollouts_per_prompt != 1:
            raise ValueError("rollouts_per_prompt belongs to rounds; online there is one rollout per prompt and step")
        return self


class Own(Learner):
    """An objective of one's own: a file under training/objectives without a section here."""

    objective: str
    needs_: Annotated[list[Literal["teacher", "prior"]], Field(alias="needs")] = []
    own: Annotated[dict[str, Any], Field(alias="options")] = {}
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    def options(self) -> dict[str, Any]:
        """Whatever stands under `options`."""
        return dict(self.own)

    def inputs(self) -> tuple[str, ...]:
        """Whatever stands under `needs`."""
        return tuple(self.needs_)


SECTIONS: dict[str, type[Learner]] = {
    section.model_fields["objective"].default: section
    for section in (Sft, Dft, GatedSft, SftKl, SftL2, Replay, Reinvoke, Grpo, Sdpo, Opsd)
}


def _tag(entry: Any) -> str:
    objective = entry.get("objective") if isinstance(entry, dict) else getattr(entry, "objective", None)
    return objective if objective in SECTIONS else "own"


Entry = Annotated[
    Annotated[Sft, Tag("sft")]
    | Annotated[Dft, Tag("dft")]
    | Annotated[GatedSft, Tag("gated_sft")]
    | Annotated[SftKl, Tag("sft_kl")]
    | Annotated[SftL2, Tag("sft_l2")]
    | Annotated[Replay, Tag("replay")]
    | Annotated[Reinvoke, Tag("reinvoke")]
    | Annotated[Grpo, Tag("grpo")]
    | Annotated[Sdpo, Tag("sdpo")]
    | Annotated[Opsd, Tag("opsd")]
    | Annotated[Own, Tag("own")],
    Discriminator(_tag),
]
#: Names of other rows of the result table.
RESERVED = re.compile(r"^(graft.*|.*_scaled|.*_regraft|deployed)$")


class Learners(Section):
    """All learners, by name."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, Entry]

    sft: Sft
    opsd: Opsd | None = None

    @model_validator(mode="before")
    @classmethod
    def _objectives(cls, data: Any) -> Any:
        """Name the objective of every entry; a further `opsd` takes what it does not say from the main one."""
        if not isinstance(data, dict):
            return data
        filled = {}
        for name, entry in data.items():
            if name in ("sft", "opsd") or not isinstance(entry, dict):
                if name not in ("sft", "opsd") and entry is None:
                    continue  # `name: null` in an overlay leaves a learner out
                filled[name] = entry
                continue
            if not re.match(r"^[A-Za-z0-9][A-Za-z0-9_]{0,40}$", str(name)) or RESERVED.match(name):
                raise ValueError(
                    f"learners.{name}: this name cannot be used; letters, digits and _, and no other row's"
                )
            objective = entry.get("objective", name)
            if not isinstance(objective, str) or find(objective) is None:
                close = difflib.get_close_matches(str(objective), OBJECTIVES, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(OBJECTIVES)}"
                raise ValueError(f"learners.{name}: no objective is called {objective!r}; {hint}")
            main = data.get("opsd") if objective == "opsd" else None
            filled[name] = {**(main if isinstance(main, dict) else {}), **entry, "objective": objective}
        return filled

    @property
    def controls(self) -> dict[str, Learner]:
        """All learners but sft and opsd."""
        return dict(self.__pydantic_extra__ or {})

    def named(self, name: str) -> Learner:
        """The learner of this name."""
        return getattr(self, name) if name in ("sft", "opsd") else self.controls[name]


class Improvement(Section):
    """How a model makes demonstrations."""

    samples: Positive
    keep: Positive = 1
    temperature: Rate
    max_new_tokens: Positive


class Star(Improvement):
    """Self-taught reasoning: what the verifier accepts, and rationalisations for the rest."""

    method: Literal["star"]
    rounds: Positive = 1
    rationalise: bool = True
    lr: Rate


class Pedagogical(Improvement):
    """The accepted traces of a privileged teacher that reinforcement learning has taught to be easy to follow."""

    method: Literal["pedagogical"]
    teacher: Annotated[str, Field(min_length=1)]


class Generated(Improvement):
    """What another model writes, once for all seeds: several samples, of which `keep` that the verifier accepts stay.

    rationalise: prompts without any are asked again with the reference answer shown; else they are left out.
    """

    method: Literal["generated"]
    model: Source
    rationalise: bool = False
    seed: int = 0


SelfImprovement = Annotated[Star | Pedagogical | Generated, Field(discriminator="method")]
