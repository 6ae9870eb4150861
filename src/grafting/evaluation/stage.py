"""Stage evaluate: every point of a sweep (recipes on one deployed model) on every suite, in one process.

Payload, per point: `<pointkey>.json` (name, key, recipe, labels, scores) and `<pointkey>.jsonl.gz` (one
prediction per line); and `protocol.json`, what the scores depend on besides the weights (decoding, prompt
template hash, suites). Points that an earlier job of the same sweep already holds are taken from there:
a point's key covers its recipe, its models, its data and the evaluator. An interrupted job keeps its finished
points, and of the one it was at the finished batches.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from grafting.provenance.files import file_digest
from grafting.tasks import load_info


def run(job: Any) -> None:
    """Evaluates `job.spec["points"]`; see the module's docstring for the payload.

    Errors: UserError from models, merging or suites; a point that combines nothing has recipe null.
    """
    folders = [job.input("prior"), *job.inputs("tasks")]
    _write_json(job.out / "protocol.json", _protocol(job, folders))
    earlier = job.earlier()
    todo = [point for point in job.spec["points"] if not _reuse(point, earlier, job.out)]
    if todo:
        _compute(job, todo, folders)
    job.metrics["points_computed"] = len(todo)
    job.metrics["points_reused"] = len(job.spec["points"]) - len(todo)


def _protocol(job: Any, folders: Sequence[Path]) -> dict[str, Any]:
    """Decoding, template and suites: accuracy moves by points when these differ, so they are kept."""
    template = job.input("model") / "chat_template.jinja"
    infos = [load_info(folder) for folder in folders]
    return {
        "decoding": "greedy",
        "batch_size": job.spec["batch_size"],
        "max_new_tokens": job.spec["max_new_tokens"],
        "chat_template_sha256": file_digest(template) if template.is_file() else None,
        "suites": [{"role": i["role"], "name": i["name"], "kind": i["kind"], "scorer": i["scorer"]} for i in infos],
    }


def _reuse(point: dict[str, Any], earlier: Sequence[Path], out: Path) -> bool:
    """Copies the point from the first earlier payload that has it whole; its labels are always today's."""
    for folder in earlier:
        scores, predictions = folder / f"{point['key']}.json", folder / f"{point['key']}.jsonl.gz"
        if scores.is_file() and predictions.is_file():
            _write_point(out, point, json.loads(scores.read_text())["scores"])
            for file in (predictions, folder / f"{point['key']}.samples.jsonl.gz"):
                if file.is_file():
                    shutil.copyfile(file, out / file.name)
            return True
    return False


def _compute(job: Any, points: Sequence[dict[str, Any]], folders: Sequence[Path]) -> None:
    """Loads the model once, encodes the suites once, then moves the live weights from point to point."""
    from grafting.evaluation.suites import Decoding, load_suite
    from grafting.merging.sweep import Sweep
    from grafting.models import count_parameters, load_model, load_tokenizer
    from grafting.models.chat import stop_ids
    from grafting.rollouts.counting import Counter
    from grafting.rollouts.runtime import device, prepare

    spec = job.spec
    prepare(spec["threads"], 0)
    with job.phase("load"):
        model, tokenizer = load_model(job.input("model")).to(device()), load_tokenizer(job.input("model"))
        native = [folder for folder in folders if load_info(folder)["kind"] != "harness"]
        suites = [load_suite(folder, spec["split"], tokenizer) for folder in native]
        bridged = _bridged(job, [folder for folder in folders if folder not in native])
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        decoding = Decoding(tokenizer, stop_ids(model, tokenizer), pad_id, spec["batch_size"], spec["max_new_tokens"])
        sweep = Sweep.of_job(job) if any(point["recipe"] is not None for point in points) else None
        if sweep is not None:
            sweep.prepare(point["recipe"] for point in points)
    counter, finished = Counter(), job.saving.part("points")
    answers = len(points) * sum(len(suite.examples) for suite in [*suites, *bridged])
    bar = job.progress(answers, "evaluation", unit="answer")
    # The points that are the model itself come first, while its weights are still untouched.
    with job.saving.section():
        for number, point in enumerate(sorted(points, key=lambda point: point["recipe"] is not None), 1):
            done = finished.get(point["key"])
            if done is None:
                done = _evaluate(job, point, model, sweep, suites, bridged, decoding, bar)
                finished.add(point["key"], done, f"point {number} of {len(points)}")
            else:
                bar.skip(len(done["predictions"]))
            counter.add(**done["tokens"])
            _write_point(job.out, point, done["scores"])
            _write_predictions(job.out / f"{point['key']}.jsonl.gz", done["predictions"])
            if spec.get("samples"):
                _write_predictions(job.out / f"{point['key']}.samples.jsonl.gz", done["sampled"])
    bar.close()
    job.add_cost(**counter.cost(count_parameters(model)))


def _evaluate(
    job: Any, point: dict, model: Any, sweep: Any, suites: Any, bridged: Any, decoding: Any, bar: Any
) -> dict:
    """Scores, predictions and token counts of one point, as JSON values."""
    from grafting.evaluation.samples import add_pass_at_k, sample
    from grafting.evaluation.suites import predict, summarise
    from grafting.rollouts.counting import Counter

    if point["recipe"] is not None:
        with job.phase("merge"):
            sweep.into(model, point["recipe"])
    counter, sampled, samples = Counter(), [], job.spec.get("samples")
    with job.phase("rollout"):
        part = lambda name: job.saving.part(f"{point['key']} {name}")  # noqa: E731
        predictions = predict(model, suites, decoding, counter, bar.update, part)
    scores = [row for suite, rows in zip(suites, predictions, strict=True) for row in summarise(suite, rows)]
    for suite in bridged:
        with job.phase("harness"):
            predictions.append(suite.predict(model, decoding.tokenizer))
        scores += suite.summarise(predictions[-1])
        bar.update(len(predictions[-1]))
    if samples:
        with job.phase("rollout"):
            sampled = sample(model, suites, decoding, samples, counter)
        add_pass_at_k(scores, sampled, samples)
    return {
        "scores": scores,
        "predictions": [row for rows in predictions for row in rows],
        "sampled": sampled,
        "tokens": asdict(counter),
    }


def _bridged(job: Any, folders: Sequence[Path]) -> list[Any]:
    """Suites of lm-evaluation-harness. Resolved by name: only studies that use the bridge hang on its code."""
    if not folders:
        return []
    bridge = import_module("grafting.evaluation.harness")
    scratch = job.work / "harness"
    return [bridge.load_suite(f, load_info(f), job.spec["split"], job.spec, scratch) for f in folders]


def _write_point(out: Path, point: dict[str, Any], scores: list[dict[str, Any]]) -> None:
    head = {key: point.get(key) for key in ("name", "key", "recipe", "labels")}
    _write_json(out / f"{point['key']}.json", {**head, "scores": scores})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_predictions(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """JSON lines, gzipped without name and time so that equal predictions are equal bytes."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
        packed.write(text.encode("utf-8"))
