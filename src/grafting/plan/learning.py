"""The training part of a study: learners, rounds of rollouts and training, data that models make themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grafting.config.grid import applied
from grafting.config.learners import Own, Rolling
from grafting.errors import UserError
from grafting.plan.scoring import scoring
from grafting.training.objectives import find

if TYPE_CHECKING:
    from grafting.config.data import Source
    from grafting.config.learners import Improvement
    from grafting.config.schema import Config
    from grafting.plan.jobs import Job


class Learning:
    """Adds training jobs, and what they hang on, to a study."""

    config: Config
    m: int  # the model seed that is being planned
    models: dict[str, str]
    jobs: dict[str, Job]
    scorers: dict[str, str]
    task_data: dict[str, str]
    prior_data: str
    _behind: dict[str, list[str]]
    _made: dict[tuple, list[str]]

    def add(self, *args: Any, **kwargs: Any) -> str:
        """Add a job; see `Study.add`."""
        raise NotImplementedError

    def _existing(self, name: str, source: Source) -> str:
        """A checkpoint that exists already; see `Study`."""
        raise NotImplementedError

    def train(self, method: str, task: str, style: str, lr: float, seed: int, model: str, place: str) -> str:
        """A training job of the learner `method` from `model`; `place` is the readable name of where it starts."""
        learner = self.config.learners.named(method)
        spec = {**self.config.training.spec(), "objective": learner.objective, "style": style, "lr": lr, "seed": seed}
        for key in ("steps", "batch_size"):
            if getattr(learner, key) is not None:
                spec[key] = getattr(learner, key)
        if options := learner.options():
            spec[learner.objective] = options
        # who samples also scores; another judge leaves the others as they are
        judged, entry = scoring(self, [task] if isinstance(learner, Rolling | Own) else [], "train")
        spec = applied(spec | judged, lr, self.jobs[self.task_data[task]].spec["train_items"])
        roles = {"teacher": self.models["deployed"], "prior": self.prior_data}
        data, made_by = self._demonstrations(task, style, seed)
        inputs = {"model": [model], "data": [data]}
        inputs |= {role: [roles[role]] for role in learner.inputs()}
        name = f"{task}.{style}.{method}.{place}.lr{lr:g}.s{seed}.m{self.m}"
        code = (*entry, f"grafting.training.objectives.{find(learner.objective).partition(':')[0]}")
        if (rounds := getattr(learner, "rounds", None)) is None:
            trained = self.add("train", name, spec, inputs, code)
        else:
            trained = self._rounds(rounds, learner.rollouts_per_prompt, task, name, spec, inputs, code)
        if made_by:
            own = [trained] if rounds is None else self._behind[trained]
            self._behind[trained] = [*made_by, *own]
        return trained

    def _demonstrations(self, task: str, style: str, seed: int) -> tuple[str, list[str]]:
        """The data with the demonstrations of a style, and the jobs behind them if models made them (see
        `grafting.rollouts.star`)."""
        way = self.config.self_improvement.get(style)
        if way is None:
            return self.task_data[task], []
        if way.method == "generated":  # once, for all seeds; data that others wrote are no cost of a learner
            writer = self._existing(f"writer.{style}", way.model)
            return self._collecting(way, task, style, way.seed, f"{task}.{style}", writer, False), []
        if (task, style, seed, self.m) not in self._made:
            made = self._star if way.method == "star" else self._pedagogical
            self._made[task, style, seed, self.m] = made(way, task, style, seed)
        behind = self._made[task, style, seed, self.m]
        return behind[-1], behind

    def _collecting(
        self, way: Improvement, task: str, style: str, seed: int, name: str, model: str, shown: bool
    ) -> str:
        judged, entry = scoring(self, [task], "rollout")
        spec = {
            **judged,
            "kind": "star",
            "name": style,
            "rationalise": getattr(way, "rationalise", False),
            "with_demonstration": shown,
            "seed": seed,
            "batch_size": self.config.evaluation.batch_size,
            "threads": self.config.training.threads,
            **way.model_dump(include={"samples", "keep", "temperature", "max_new_tokens"}),
        }
        inputs = {"model": [model], "data": [self.task_data[task]]}
        return self.add("rollout", name, spec, inputs, (*entry, "grafting.rollouts.star"))

    def _star(self, way: Improvement, task: str, style: str, seed: int) -> list[str]:
        """Rounds of collecting and learning; every round learns anew from the deployed model."""
        deployed, code = self.models["deployed"], ("train", "grafting.training.objectives.supervised")
        behind, model = [], deployed
        for r in range(way.rounds):
            name = f"{task}.{style}.r{r + 1}.s{seed}.m{self.m}"
            behind.append(self._collecting(way, task, style, seed, name, model, False))
            if r + 1 < way.rounds:
                spec = {**self.config.training.spec(), "objective": "sft", "style": style, "lr": way.lr, "seed": seed}
                behind.append(self.add("train", name, spec, {"model": [deployed], "data": behind[-1:]}, code))
                model = behind[-1]
        return behind

    def _pedagogical(self, way: Improvement, task: str, style: str, seed: int) -> list[str]:
        """Reinforcement learning of the privileged teacher, then its accepted traces."""
        teacher, own = self.config.learners.named(way.teacher), self.config.styles[0]
        trained = self.train(way.teacher, task, own, teacher.lrs[0], seed, self.models["deployed"], "deployed")
        name = f"{task}.{style}.s{seed}.m{self.m}"
        return [*self.behind(trained), self._collecting(way, task, style, seed, name, trained, True)]

    def _rounds(
        self, rounds: int, samples: int, task: str, name: str, spec: dict, inputs: dict, code: tuple[str, ...]
    ) -> str:
        """Rollouts of the model as it is, and training on them, in turns; the last training job."""
        if spec["steps"] % rounds:
            raise UserError(f"{name}: steps {spec['steps']} is no multiple of rounds {rounds}")
        spec, behind = {**spec, "steps": spec["steps"] // rounds}, []
        judged, entry = scoring(self, [task], "rollout")
        sampling = {
            **judged,
            "split": "train",
            "with_demonstration": False,
            "style": spec["style"],
            "items": None,
            "seed": spec["seed"],
            "batch_size": self.config.evaluation.batch_size,
            "threads": spec["threads"],
            **{key: spec["opsd"][key] for key in ("temperature", "max_new_tokens")},
        }
        for r in range(rounds):
            behind.append(
                self.add(
                    "rollout",
                    f"{name}.r{r + 1}",
                    {**sampling, "samples": samples, "first_sample": r * samples},
                    {"model": inputs["model"], "data": inputs["data"]},
                    entry,
                )
            )
            behind.append(self.add("train", f"{name}.r{r + 1}", spec, {**inputs, "rollouts": behind[-1:]}, code))
            inputs = {**inputs, "model": behind[-1:]}
        self._behind[behind[-1]] = behind
        return behind[-1]

    def behind(self, trained: str) -> list[str]:
        """The jobs whose cost is that of a training job: itself, and in rounds those before it with their rollouts."""
        return self._behind.get(trained, [trained])
