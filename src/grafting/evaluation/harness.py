"""The bridge to lm-evaluation-harness (extra `harness`): its tasks on the live model, in one process.

The harness builds the prompts and scores the answers; the weights are those that the sweep has just put into the
model, which is loaded once for all points. Log-likelihoods go through `options`. What a score depends on besides
the weights is kept with it: harness version, task version, hash of all prompts, few-shot count, chat template, metric.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grafting.errors import UserError
from grafting.evaluation.options import option_loglikelihoods
from grafting.tasks.harness_suites import LOCAL_TASK

FEWSHOT_SEED = 1234


@dataclass
class HarnessSuite:
    """Harness tasks of one split, made ready once: `loaded` holds the harness's task objects by our task's name."""

    role: str
    info: Mapping[str, Any]
    split: str
    loaded: Mapping[str, Mapping[str, Any]]
    samples: Mapping[str, Mapping[str, list[int]] | None]
    batch_size: int
    max_new_tokens: int
    facts: dict[str, dict] = field(default_factory=dict)

    def predict(self, model, tokenizer) -> list[dict[str, Any]]:
        """See the function of this name."""
        return predict(model, tokenizer, self)

    def summarise(self, predictions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """See the function of this name."""
        return summarise(self, predictions)

    @property
    def examples(self) -> range:
        """As many as will be answered, for progress."""
        return range(sum(_count(self, name) for name in self.loaded))


def _count(suite: HarnessSuite, name: str) -> int:
    chosen = suite.samples[name]
    if chosen is not None:
        return sum(map(len, chosen.values()))
    return sum(len(list(task.eval_docs)) for task in suite.loaded[name]["tasks"].values())


def load_suite(
    folder: Path, info: Mapping[str, Any], split: str, spec: Mapping[str, Any], scratch: Path
) -> HarnessSuite:
    """Loads the tasks that info.json pins; `scratch` takes the task files of local tasks.

    UserError: another version of the harness, a task it does not know or cannot load (its data is not in the cache and
    HF_HUB_OFFLINE is set), a setting that is null.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("lm-evaluation-harness is not installed; run `pip install '.[harness]'`") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    stated = info["harness"]
    version = getattr(lm_eval, "__version__", None) or _installed("lm_eval")
    if version != stated["version"]:
        raise UserError(
            f"lm-evaluation-harness {version} is installed, this study pins {stated['version']}; install that"
        )
    own = _write_local_tasks(folder, split, stated["tasks"], scratch)
    manager = TaskManager(include_path=str(own) if own else None, include_defaults=stated["suite"] != "local")
    loaded, samples = {}, {}
    for name, settings in stated["tasks"].items():
        if missing := [key for key in ("num_fewshot", "chat_template", "metric") if settings[key] is None]:
            raise UserError(f"prior.harness.{name}: {', '.join(missing)} is null; fill in what you have seen")
        try:
            loaded[name] = manager.load(name)
        except Exception as error:
            raise UserError(
                f"harness task {name} cannot be loaded ({type(error).__name__}: {str(error)[:200]}); "
                "its data must be in the cache when HF_HUB_OFFLINE=1"
            ) from None
        for task in loaded[name]["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False) and os.environ.get("GRAFTING_RUN_GENERATED_CODE") != "1":
                raise UserError(
                    f"harness task {name} runs what the model writes, which is off: set "
                    "evaluation.run_generated_code: true if you accept that (the harness does not shut it in)"
                )
            task.set_config(key="num_fewshot", value=settings["num_fewshot"])
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        samples[name] = None if own else choose(loaded[name]["tasks"], name, info, split)
    return HarnessSuite(info["role"], info, split, loaded, samples, spec["batch_size"], spec["max_new_tokens"])


def _installed(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _write_local_tasks(folder: Path, split: str, tasks: Mapping[str, Any], scratch: Path) -> Path | None:
    """A task file per JSON-lines file of this split in the data folder; None if there is none."""
    files = {name: Path(folder) / f"{name}.{split}.jsonl" for name in tasks}
    files = {name: path for name, path in files.items() if path.is_file()}
    if not files:
        return None
    scratch.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        task = {"task": name, **LOCAL_TASK, "dataset_kwargs": {"data_files": {"test": str(path.resolve())}}}
        (scratch / f"{name}.yaml").write_text(yaml.safe_dump(task, sort_keys=False), encoding="utf-8")
    return scratch


def choose(tasks: Mapping[str, Any], name: str, info: Mapping[str, Any], split: str) -> dict[str, list[int]]:
    """Subtask -> indices of its documents that make this split: disjoint, by hash of (seed, subtask, index)."""
    every = [(sub, i) for sub, task in sorted(tasks.items()) for i in range(len(list(task.eval_docs)))]
    every.sort(key=lambda pair: hashlib.sha256(f"{info['seed']}:{name}:{pair[0]}:{pair[1]}".encode()).hexdigest())
    val, test = info["items"]["val"], info["items"]["test"]
    if val >= len(every):
        raise UserError(f"harness task {name} has {len(every)} items, prior.val_items {val} leaves none to test")
    part = every[:val] if split == "val" else every[val : val + test]
    return {sub: sorted(i for s, i in part if s == sub) for sub in {s for s, _ in part}}


def live_model(model, tokenizer, batch_size: int, max_new_tokens: int):
    """The harness's model class around the live one, with log-likelihoods by `options`."""
    from lm_eval.models.huggingface import HFLM

    class LiveModel(HFLM):
        """As HFLM, but options share their context (see `options`)."""

        def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
            longest = self.max_length
            for _, context, continuation in requests:
                if len(context) + len(continuation) > longest + 1:
                    raise UserError(
                        f"a harness prompt of {len(context) + len(continuation)} tokens exceeds the model's context of "
                        f"{longest}; lower num_fewshot (nothing is cut silently)"
                    )
            pairs = [(context, continuation) for _, context, continuation in requests]
            pad_id = self.tokenizer.pad_token_id or 0
            answers = option_loglikelihoods(self.model, pairs, self.batch_size, pad_id)
            for (key, _, _), answer in zip(requests, answers, strict=True):
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, answer)
            return answers

    return LiveModel(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_gen_toks=max_new_tokens)


def predict(model, tokenizer, suite: HarnessSuite) -> list[dict[str, Any]]:
    """One prediction per document: id, task, text, correct, reason, finish. The suite's `facts` are filled."""
    from lm_eval.evaluator import evaluate

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    lm = live_model(model, tokenizer, suite.batch_size, suite.max_new_tokens)
    rows = []
    for name, settings in suite.info["harness"]["tasks"].items():
        found = evaluate(
            lm,
            suite.loaded[name],
            samples=suite.samples[name],
            bootstrap_iters=0,
            apply_chat_template=settings["chat_template"],
            fewshot_as_multiturn=settings.get("fewshot_as_multiturn", False),
            log_samples=True,
            confirm_run_unsafe_code=os.environ.get("GRAFTING_RUN_GENERATED_CODE") == "1",
        )
        rows += _rows(name, settings["metric"], found["samples"])
        suite.facts[name] = {
            **settings,
            "harness": suite.info["harness"]["version"],
            "version": found.get("versions", {}),
            "prompts_sha256": _digest(s["prompt_hash"] for _, part in sorted(found["samples"].items()) for s in part),
        }
    return rows


def _digest(parts) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _rows(name: str, metric: str, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    measure, _, wanted = metric.partition(",")
    rows = []
    for subtask, documents in sorted(samples.items()):
        for document in documents:
            if wanted and document["filter"] != wanted:
                continue
            if measure not in document:
                raise UserError(
                    f"prior.harness.{name}.metric: {measure!r} is not measured; there are {document['metrics']}"
                )
            value = document[measure]
            if isinstance(value, bool) or value in (0, 1):
                correct = bool(value)
            else:
                raise UserError(
                    f"prior.harness.{name}.metric: {measure!r} is no right or wrong ({value!r}); choose another"
                )
            rows.append(
                {
                    "id": hashlib.sha256(f"{subtask}:{document['doc_hash']}:{document['doc_id']}".encode()).hexdigest()[
                        :12
                    ],
                    "task": name,
                    "text": json.dumps(document["filtered_resps"], default=str, ensure_ascii=False)[:2000],
                    "correct": correct,
                    "reason": "correct" if correct else "wrong",
                    "finish": "harness",
                }
            )
    return rows


def summarise(suite: HarnessSuite, predictions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One score per harness task, with n, standard error and what it was run with."""
    scores = []
    for name in suite.loaded:
        rows = [row for row in predictions if row["task"] == name]
        n, correct = len(rows), sum(row["correct"] for row in rows)
        spread = (correct / n * (1 - correct / n) / (n - 1)) ** 0.5 if n > 1 else None
        scores.append(
            {
                "suite": suite.role,
                "task": name,
                "kind": "harness",
                "split": suite.split,
                "n": n,
                "correct": correct,
                "stderr": spread,
                "reasons": dict(sorted(Counter(row["reason"] for row in rows).items())),
                "finish": {"harness": n},
                "protocol": suite.facts[name],
            }
        )
    return scores
