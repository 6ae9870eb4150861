"""Log-likelihoods of options against lm-evaluation-harness, and a sweep of scales against its evaluations' compute.

likelihoods: MMLU's items with 4 options each (suite `local`: zero-shot or with --shots examples, chat template),
scored by the harness's own model class and by this project's, in turns, in one process, with the same model, batch
size and threads. Printed: CPU seconds of each, their ratio, the largest difference of a log-likelihood, accuracies and
how often each letter was chosen.

sweep: the stage evaluate on ten scales of one update (MMLU's option letters and chemistry questions by generation)
against ten times what answering alone costs on the live model; models are loaded once.

    python benchmarks/options.py MODEL_DIRECTORY DATA_ROOT [--parts likelihoods sweep] [--items 200] [--turns 2]

DATA_ROOT holds mmlu/ and sciknoweval/ (docs/tested.md). The part likelihoods needs lm-eval 0.4.13 beside this
project's packages (pip install '.[harness]').
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

SCALES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1]


def cpu(work) -> tuple[float, object]:
    """(CPU seconds of all threads, result)."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def data(out: Path, spec: dict) -> Path:
    """A data folder as the stage data builds it."""
    from grafting.tasks import stage

    out.mkdir()
    stage.run(SimpleNamespace(spec=spec, out=out, id=out.name, places={}))
    return out


def likelihoods(arguments: argparse.Namespace, scratch: Path) -> dict:
    """See the module's docstring."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    from grafting.evaluation import harness
    from grafting.models import load_model, load_tokenizer
    from grafting.plan.sources import files_of
    from grafting.tasks import load_info
    from grafting.tasks.harness_suites import suite_of

    items = {"val_items": arguments.items, "test_items": 40, "retention_items": 4, "seed": 1}
    spec = {"builder": "harness", **items, "suite": "local", "tasks": suite_of("local", {}), "files": files_of("mmlu")}
    folder = data(scratch / "harness", spec)
    suite = harness.load_suite(
        folder, load_info(folder), "val", {"batch_size": arguments.batch_size, "max_new_tokens": 16}, scratch / "tasks"
    )
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)

    def run(lm) -> dict:
        return evaluate(lm, suite.loaded["mmlu_local"], bootstrap_iters=0, apply_chat_template=True, log_samples=True)[
            "samples"
        ]["mmlu_local"]

    sides = {
        "harness": lambda: run(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=arguments.batch_size)),
        "ours": lambda: run(harness.live_model(model, tokenizer, arguments.batch_size, 16)),
    }
    seconds, samples = {side: [] for side in sides}, {}
    for _ in range(arguments.turns):
        for side, work in sides.items():
            used, samples[side] = cpu(work)
            seconds[side].append(round(used, 2))
            print(f"{side}: {used:.1f} CPU s", file=sys.stderr, flush=True)
    values = {
        side: {row["doc_id"]: [float(answer[0][0]) for answer in row["resps"]] for row in rows}
        for side, rows in samples.items()
    }
    pairs = [
        (a, b) for item, ours in values["ours"].items() for a, b in zip(ours, values["harness"][item], strict=True)
    ]
    letters = {
        side: dict(sorted(Counter("ABCD"[row.index(max(row))] for row in found.values()).items()))
        for side, found in values.items()
    }
    answers = Counter("ABCD"[int(row["target"])] for row in samples["ours"])
    return {
        "items": len(values["ours"]),
        "example": samples["ours"][0]["arguments"],
        "cpu_seconds": seconds,
        "ratio": round(min(seconds["ours"]) / min(seconds["harness"]), 3),
        "largest_difference": max(abs(a - b) for a, b in pairs),
        "accuracy": {side: sum(row["acc"] for row in rows) / len(rows) for side, rows in samples.items()},
        "chosen": letters,
        "answers": dict(sorted(answers.items())),
    }


class Job(SimpleNamespace):
    """What the stage evaluate asks of a job."""

    def inputs(self, role: str) -> list[Path]:
        """Folders of this role."""
        return self.given.get(role, [])

    def input(self, role: str) -> Path:
        """The only one."""
        return self.given[role][0]

    def earlier(self) -> list[Path]:
        """Nothing was evaluated before."""
        return []

    def add_cost(self, **numbers: float) -> None:
        """Kept by nobody here."""

    @contextmanager
    def phase(self, name: str):
        """CPU seconds per part of the stage."""
        start = time.process_time()
        yield
        self.phases[name] = self.phases.get(name, 0) + time.process_time() - start

    def progress(self, *arguments, **settings) -> SimpleNamespace:
        """No bar."""
        return SimpleNamespace(update=lambda *a: None, skip=lambda *a: None, close=lambda: None)


def sweep(arguments: argparse.Namespace, scratch: Path) -> dict:
    """See the module's docstring."""
    import torch

    from grafting.evaluation import stage
    from grafting.evaluation.suites import Decoding, load_suite, predict
    from grafting.merging.sweep import Sweep
    from grafting.models import chat, load_model, load_tokenizer, save_model
    from grafting.plan.sources import files_of
    from grafting.provenance.saving import Saver
    from grafting.rollouts.counting import Counter

    sizes = {"val_items": arguments.sweep_items, "test_items": 4, "seed": 1}
    prior = data(scratch / "mmlu", {"builder": "mmlu", **sizes, "retention_items": 4, "files": files_of("mmlu")})
    science = {"builder": "science", **sizes, "train_items": 4, "files": files_of("sciknoweval")}
    tasks = [data(scratch / "science", science)]
    tokenizer = load_tokenizer(arguments.model)
    model = load_model(arguments.model)
    with torch.no_grad():  # an update, small enough that no scale spoils the model
        torch.manual_seed(0)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=1e-4)
    save_model(model, tokenizer, scratch / "trained")
    points = [
        {"name": f"l{s:g}", "key": f"{i:012x}", "labels": {}, "recipe": {"operator": "graft", "scale": s, "terms": [0]}}
        for i, s in enumerate(SCALES)
    ]
    spec = {"split": "val", "points": points, "batch_size": arguments.batch_size, "max_new_tokens": 16}
    given = {"model": [arguments.model], "trained": [scratch / "trained"], "donor": [arguments.model]}
    job = Job(
        out=scratch / "out", work=scratch / "work", spec={**spec, "threads": arguments.threads}, id="evaluate/sweep",
        given={**given, "prior": [prior], "tasks": tasks}, metrics={}, phases={}, saving=Saver(),
    )  # fmt: skip
    job.out.mkdir()
    whole, _ = cpu(lambda: stage.run(job))
    # the same answers again, on a model that is loaded already: what ten evaluations cost by themselves
    suites = [load_suite(folder, "val", tokenizer) for folder in (prior, *tasks)]
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    decoding = Decoding(tokenizer, chat.stop_ids(model, tokenizer), pad_id, arguments.batch_size, 16)
    grafts = Sweep.of_job(job)
    pure = 0.0
    for point in points:
        grafts.into(model, point["recipe"])
        pure += cpu(lambda: predict(model, suites, decoding, Counter()))[0]
    return {
        "points": len(points),
        "items": sum(len(suite.examples) for suite in suites),
        "cpu_seconds": {"stage": round(whole, 1), "answers alone": round(pure, 1)},
        "parts": {name: round(seconds, 1) for name, seconds in job.phases.items()},
        "ratio": round(whole / pure, 3),
    }


def main() -> None:
    """Prints one JSON object per part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data_root", type=Path)
    parser.add_argument("--parts", nargs="+", default=["likelihoods", "sweep"], choices=["likelihoods", "sweep"])
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--sweep-items", type=int, default=12, help="per suite")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "GRAFTING_DATA_ROOT": str(arguments.data_root.resolve())}
    import torch

    torch.set_num_threads(arguments.threads)
    for part in arguments.parts:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps({"part": part, **globals()[part](arguments, Path(scratch))}, indent=1), flush=True)


if __name__ == "__main__":
    main()
