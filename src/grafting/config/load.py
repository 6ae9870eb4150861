"""Reading, merging and checking the configuration. Every fault is one message that names the key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from grafting.config.learners import SECTIONS, Learners
from grafting.config.schema import Config, TaskDefaults
from grafting.errors import UserError


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, where YAML lets the last one win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: the key {key!r} is given twice")
            seen.add(str(key))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict:
    """Read one YAML mapping; UserError if the file is absent, unreadable or no mapping."""
    try:
        data = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{path}: must hold a mapping of keys to values")
    return data


def merge(base: dict, overlay: dict) -> dict:
    """Overlay on base: mappings key by key, lists and values replaced, a mapping with `kind` replaced whole."""
    merged = dict(base)
    for key, value in overlay.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and "kind" not in value:
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def _models_at(path: tuple) -> list[type[BaseModel]]:
    """The schema sections that the keys of `path` lead to, whatever the union."""
    models: list[type[BaseModel]] = [Config]
    for key in path:
        following = []
        for model in models:
            if key in model.model_fields:
                following += _sections(model.model_fields[key].annotation)
        models = following or models
    return models


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections(argument)]


def _nearest(path: tuple, key: str, tags: dict[tuple, str]) -> str:
    models = [SECTIONS[tags[path]]] if tags.get(path) in SECTIONS else _models_at(path)
    known = [name for model in models for name in model.model_fields]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {'.'.join([*map(str, path), close[0]])}?"
    return f"known keys here: {', '.join(dict.fromkeys(known))}"


def _explain(error: ValidationError) -> str:
    lines, tags = [], {}
    for item in error.errors():
        # the tag of a discriminated union is no key of the file
        path = tuple(part for part in item["loc"] if part not in ("scratch", "pretrained"))
        if path[:1] == ("learners",) and len(path) > 2 and path[1] not in Learners.model_fields:
            tags[path[:2]] = path[2]
            path = path[:2] + path[3:]
        where = ".".join(map(str, path)) or "the configuration"
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key; {_nearest(path[:-1], str(path[-1]), tags)}")
        elif item["type"] == "missing":
            lines.append(f"{where}: this key is missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = "" if isinstance(item["input"], dict | BaseModel) else f" (given: {item['input']!r})"
            lines.append(f"{where}: {message}{given}")
    return "\n".join(lines)


def resolve(*layers: dict, unknown: list[str] | None = None) -> Config:
    """Merge the layers in order and validate; UserError lists every fault with its key.

    Settings that nobody has seen yet (null) are an error that names them. With a list `unknown` they are appended
    to it instead, so that a plan or an estimate can be made before they are known.
    """
    data: dict = {}
    for layer in layers:
        data = merge(data, layer)
    try:
        # pydantic turns strings that are numbers into numbers: YAML 1.1 reads 1e-4 as a string
        config = Config.model_validate(data)
    except ValidationError as error:
        raise UserError("the configuration cannot be used:\n  " + _explain(error).replace("\n", "\n  ")) from None
    _check_tasks(config)
    missing = unknown_settings(config)
    if unknown is not None:
        unknown += missing
    elif missing:
        raise UserError(
            "these settings are null because nobody has seen them; fill in what you have seen (a commit hash for a "
            "revision):\n  " + "\n  ".join(missing)
        )
    return config


def resolve_files(*paths: Path, overrides: dict | None = None) -> Config:
    """`resolve` on files, then single overrides."""
    return resolve(*[read_yaml(path) for path in paths], overrides or {})


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def _check_tasks(config: Config) -> None:
    from grafting.tasks import known_priors, tasks_of

    tasks = tasks_of(config.own_tasks)
    for name in config.tasks:
        if name not in tasks:
            raise UserError(f"tasks: no task is called {name!r}; {_suggest(name, tasks)}")
        scratch = config.lineage.kind == "scratch"
        if tasks[name]["builder"].startswith("tiny.") != scratch:
            raise UserError(
                f"tasks: {name!r} does not fit lineage.kind {config.lineage.kind!r}: "
                "the tiny language's tasks go with the model made from it, and no other"
            )
        scorer = config.task_options.get(name, {}).get("scorer", tasks[name]["scorer"])
        if scorer == "judge" and config.judge is None:
            raise UserError(
                f"judge: task {name} is scored by a judge and none is configured; set `judge` (model, endpoint, "
                "prompt), or another scorer in task_options"
            )
        if scorer == "code" and not config.evaluation.run_generated_code:
            raise UserError(
                f"evaluation.run_generated_code: task {name} is scored by running what the model writes, which is "
                "off; set it to true if you accept that"
            )
        for style in config.styles:
            if style in config.self_improvement:
                if style in tasks[name]["styles"]:
                    raise UserError(f"self_improvement.{style}: task {name} has demonstrations of this name already")
                continue
            if style not in tasks[name]["styles"]:
                raise UserError(
                    f"styles: task {name} has no demonstrations in the style {style!r}; "
                    f"{_suggest(style, tasks[name]['styles'])}"
                )
    for name, options in config.task_options.items():
        if name not in tasks:
            raise UserError(f"task_options: no task is called {name!r}; {_suggest(name, tasks)}")
        known = [*TaskDefaults.model_fields, *tasks[name]["option_defaults"]]
        for key, value in options.items():
            if key not in known:
                raise UserError(f"task_options.{name}.{key}: unknown key; {_suggest(key, known)}")
            if key in TaskDefaults.model_fields and (type(value) is not int or value < (key != "seed")):
                raise UserError(f"task_options.{name}.{key}: must be a whole number of at least 1 (given: {value!r})")
    if config.prior.kind not in known_priors():
        raise UserError(
            f"prior.kind: {config.prior.kind!r} is not known; {_suggest(config.prior.kind, known_priors())}"
        )
    if config.lineage.kind == "scratch":
        from grafting.tasks.tiny_language import PRETRAINED_SKILLS, SKILLS

        for phase, skills in (("pretrain", PRETRAINED_SKILLS), ("posttrain", SKILLS)):
            for skill in getattr(config.lineage, phase).skill_weights:
                if skill not in skills:
                    raise UserError(f"lineage.{phase}.skill_weights: no skill {skill!r}; {_suggest(skill, skills)}")


def unknown_settings(config: Config) -> list[str]:
    """The keys that are null because their value has not been seen: revisions, few-shot counts, judge settings."""
    from grafting.tasks import known_priors, tasks_of
    from grafting.tasks.harness_suites import suite_of

    tasks = tasks_of(config.own_tasks)
    read = {tasks[name]["source"] for name in config.tasks} | {known_priors()[config.prior.kind]["source"]}
    found = []
    if config.lineage.kind == "pretrained":
        for name, source in {"deployed": config.lineage.deployed, **config.lineage.donors}.items():
            if source.hub is not None and source.revision is None:
                key = "lineage.deployed" if name == "deployed" else f"lineage.donors.{name}"
                found.append(f"{key}.revision (of {source.hub})")
    for style, way in config.self_improvement.items():
        if way.method == "generated" and way.model.hub is not None and way.model.revision is None:
            found.append(f"self_improvement.{style}.model.revision (of {way.model.hub})")
    for name, source in ((n, s) for n, s in config.data_sources.items() if n in read):
        found += [f"data_sources.{name}.{key}" for key in ("hub", "revision") if getattr(source, key) is None]
    if config.judge is not None:
        found += [f"judge.{key}" for key in ("model", "prompt") if getattr(config.judge, key) is None]
        if (local := config.judge.local) is not None and local.hub is not None and local.revision is None:
            found.append(f"judge.local.revision (of {local.hub})")
    if config.prior.kind == "harness":
        for name, task in suite_of(config.prior.suite, config.prior.model_dump()["harness"]).items():
            missing = [key for key in ("num_fewshot", "chat_template", "metric") if task[key] is None]
            found += [f"prior.harness.{name}.{key}" for key in missing]
    return found
