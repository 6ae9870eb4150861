"""What resume state costs: training with default saving against training without.

    python benchmarks/resume.py [--steps 400] [--repeats 3] [--objective sft] [--seconds 60]

Runs the training job of the default experiment (preset tiny: two million parameters, batches of 64), long enough to
be saved, alternately with and without saving, on one thread, from a model made for the purpose. Prints seconds of CPU
and of the clock, their medians' ratio, and what one save takes, from which follows the share in a job of any length.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from accelerate.state import AcceleratorState

from grafting.config import resolve
from grafting.config.load import read_yaml
from grafting.models import save_model
from grafting.models.scratch import new_model, new_tokenizer
from grafting.plan.code import PROJECT
from grafting.plan.jobs import Job
from grafting.plan.study import Study
from grafting.provenance import runner
from grafting.provenance.files import write_json
from grafting.provenance.saving import Saver, Settings
from grafting.provenance.store import Store
from grafting.tasks.tiny import build_task
from grafting.tasks.tiny_language import VOCABULARY
from grafting.training import stage

MODEL, DATA = "models/start-000000000001", "data/wug-000000000002"


class Watched(Saver):
    """Notes what every save takes."""

    taken: list[float] = []

    def save(self, *arguments, **options) -> None:
        start = time.monotonic()
        super().save(*arguments, **options)
        self.taken.append(time.monotonic() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="training steps of one run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--objective", choices=["sft", "opsd"], default="sft")
    parser.add_argument("--seconds", type=float, default=Settings().seconds, help="the interval; default: the default")
    options = parser.parse_args()
    config = resolve(read_yaml(PROJECT / "config.yaml"))
    planned = next(
        job
        for job in Study(config).jobs.values()
        if job.stage == "train" and job.spec["objective"] == options.objective
    )
    runner.saving.Saver = Watched
    kinds = {"with": Settings(seconds=options.seconds), "without": Settings(seconds=None)}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        architecture = config.lineage.architecture.model_dump()
        save_model(
            new_model(architecture, VOCABULARY, 0), new_tokenizer(VOCABULARY, "deployed"), store.root / "store" / MODEL
        )
        (store.root / "store" / DATA).mkdir(parents=True)
        sizes = config.task_defaults.model_dump()
        build_task({"builder": "tiny.task", "task": "wug", **sizes}, store.root / "store" / DATA)
        for job_id in (MODEL, DATA):
            write_json(store.sentinel(job_id), {})
        inputs = {"model": [MODEL], "data": [DATA]} | ({"teacher": [MODEL]} if options.objective == "opsd" else {})
        for repeat in range(options.repeats):
            for kind in sorted(kinds, reverse=bool(repeat % 2)):
                AcceleratorState._reset_state(True)
                job = Job("train", kind, planned.spec | {"steps": options.steps}, inputs, "c")
                started, cpu = time.monotonic(), time.process_time()
                runner.execute(job, store, stage.run, sys.stderr, kinds[kind])
                found[kind].append((time.process_time() - cpu, time.monotonic() - started))
                store.sentinel(job.id).unlink()
                shutil.rmtree(Path(folder) / "store" / job.id)
    for place, what in enumerate(("CPU seconds", "seconds of the clock")):
        medians = {kind: statistics.median(run[place] for run in runs) for kind, runs in found.items()}
        print(
            f"{what}: with saving {medians['with']:.2f}, without {medians['without']:.2f}, "
            f"ratio {medians['with'] / medians['without']:.4f}   ({options.repeats} runs each, "
            f"{options.steps} steps of {options.objective})"
        )
    if Watched.taken:
        took = statistics.median(Watched.taken)
        every = max(options.seconds, took / Settings().share)
        print(
            f"saves: {len(Watched.taken)} in {options.repeats} runs, {took:.3f} s each (median); "
            f"one every {every:.0f} s is {100 * took / every:.2f} % of a long job's time"
        )


if __name__ == "__main__":
    main()
