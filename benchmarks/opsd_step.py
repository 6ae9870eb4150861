"""One training step against TRL on the same work: CPU seconds and peak memory, as ratios.

The work: SmolLM2-135M (or any model directory), float32, no checkpointing, batch 8, prompts of 90 tokens, 32 new
tokens (nobody stops early), AdamW, clipping. opsd: a rollout, the frozen teacher with a demonstration of 32 tokens in
its prompt, forward_kl over the whole vocabulary, backward, optimiser; TRL's SDFTTrainer. sft: completions of 32
tokens; TRL's SFTTrainer. Each side runs in a process of its own, in turns; the first step is not counted.
Beside every phase of ours stands what its matrix products alone take (`products`).

    python benchmarks/opsd_step.py MODEL_DIRECTORY [--objective opsd sft] [--steps 3] [--turns 2] [--threads 2]

The Python that runs it needs trl 1.16 beside this project's packages (an environment of its own is best: pip install
--no-deps trl==1.16.0 datasets ...), else only this project's side is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

BATCH, PROMPT, NEW, LR = 8, 90, 32, 1e-5


def texts(tokenizer, steps: int) -> list[tuple[str, str]]:
    """(prompt, demonstration) per example: words that are one token each."""
    rng = random.Random(0)
    vocabulary = tokenizer.get_vocab()
    words = sorted(w[1:] for w in vocabulary if w.startswith("Ġ") and w[1:].isascii() and w[1:].isalpha())
    return [
        tuple(" " + " ".join(rng.choices(words, k=length)) for length in (PROMPT, NEW)) for _ in range(BATCH * steps)
    ]


class Steps:
    """CPU seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = time.process_time()

    def begin(self) -> None:
        """A step begins."""
        self.start = time.process_time()

    def end(self) -> None:
        """A step is done."""
        self.seconds.append(time.process_time() - self.start)


class Job:
    """What the loop asks of a job; phases are summed up."""

    def __init__(self, spec: dict) -> None:
        from grafting.provenance.saving import Saver

        self.id, self.spec, self.phases, self.saving = "benchmark", spec, {}, Saver()

    @contextmanager
    def phase(self, name: str):
        """CPU seconds inside."""
        start = time.process_time()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.process_time() - start

    def progress(self, total, label, unit="step"):
        """Silent."""
        return type("Silent", (), {"update": lambda *a, **k: None, "close": lambda *a: None})()

    def add_cost(self, **numbers) -> None:
        """Not looked at."""

    def track(self, *numbers) -> None:
        """Not looked at."""

    def say(self, line: str) -> None:
        """Print."""
        print(line, file=sys.stderr)


def ours(model_folder: str, objective: str, steps: int) -> dict:
    """This project's loop and objectives."""
    from grafting.models import load_model, load_tokenizer
    from grafting.training import loop
    from grafting.training.batches import Item
    from grafting.training.objectives.base import Setup
    from grafting.training.objectives.on_policy import Question
    from grafting.training.objectives.self_distillation import SelfDistillation
    from grafting.training.objectives.supervised import CrossEntropy

    model, tokenizer = load_model(model_folder), load_tokenizer(model_folder)
    guard = {"threshold": 0.0, "action": "warn", "every": 10**6}
    options = {"divergence": "forward_kl", "teacher": "frozen", "temperature": 1.0, "max_new_tokens": NEW,
               "skip_tokens": 0, "guard": guard}  # fmt: skip
    job = Job({"objective": objective, "style": "own", "seed": 0, "batch_size": BATCH, objective: options})
    examples = []
    for i, (prompt, shown) in enumerate(texts(tokenizer, steps)):
        messages = [{"role": "user", "content": prompt}]
        examples.append({"id": str(i), "task": "words", "messages": messages, "answer": shown,
                         "demonstrations": {"own": shown}})  # fmt: skip

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if objective == "sft":
        learner = CrossEntropy(job, tokenizer.pad_token_id or 0)
        learner.examples = [
            Item(e["id"], ids(e["messages"][0]["content"]), ids(e["answer"]), ids(e["answer"])) for e in examples
        ]
    else:
        info = {"name": "words", "scorer": "tokens", "demonstration_prompt": "{question}\n\n{demonstration}"}
        folder = Path(tempfile.mkdtemp())
        (folder / "info.json").write_text(json.dumps(info))
        (folder / "val.jsonl").write_text("".join(json.dumps(e) + "\n" for e in examples[:1]))
        learner = SelfDistillation(Setup(job, model, tokenizer, info, folder, examples))
        learner.stops = {-1}
        learner.examples = [
            Question(e["id"], e, ids(e["messages"][0]["content"]),
                     ids(e["messages"][0]["content"] + "\n\n" + e["answer"])) for e in examples
        ]  # fmt: skip
    settings = loop.Settings(steps, LR, 0, 0.0, "float32", schedule="constant", betas=(0.9, 0.999))
    batches = (learner.examples[i * BATCH : (i + 1) * BATCH] for i in range(steps))
    clock = Steps()
    phases: list[dict] = []

    def after(step: int) -> None:
        clock.end()
        phases.append(dict(job.phases))
        job.phases.clear()
        clock.begin()

    records = loop.train(model, batches, learner, settings, job, after_step=after)
    best = min(range(1, steps), key=lambda i: clock.seconds[i])
    return {"seconds": clock.seconds, "phases": phases[best], "losses": [r["loss"] for r in records]}


def products(model_folder: str, objective: str, steps: int) -> dict:
    """The matrix products alone that a step of ours consists of, on the same weights: CPU seconds per phase.

    The prompts' pass is shared by rollout and loss, so the student's own part is its response tokens. A backward pass
    is two products per weight.
    """
    import torch

    from grafting.models import load_model

    model = load_model(model_folder)
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    rows = {m.in_features: torch.randn(BATCH * (PROMPT + 2 * NEW), m.in_features) for m in [*layers, head]}

    def forward(body: int, top: int) -> None:
        for layer, n in [*((m, body) for m in layers), (head, top)]:
            torch.nn.functional.linear(rows[layer.in_features][:n], layer.weight)

    def backward(body: int, top: int) -> None:
        for layer, n in [*((m, body) for m in layers), (head, top)]:
            x = rows[layer.in_features][:n]
            gradient = torch.ones(n, layer.out_features)
            gradient @ layer.weight
            gradient.T @ x

    def rollout() -> None:
        forward(BATCH * PROMPT, BATCH)
        for _ in range(NEW - 1):
            forward(BATCH, BATCH)

    answer, whole = BATCH * NEW, BATCH * (PROMPT + NEW - 1)
    if objective == "opsd":
        parts = {
            "rollout": rollout,
            "student": lambda: forward(answer - BATCH, answer),
            "teacher": lambda: forward(whole + answer, answer),
        }
    else:
        parts = {"student": lambda: forward(whole, answer)}
    parts["backward"] = lambda: backward(whole, answer)
    found = {name: [] for name in parts}
    with torch.no_grad():
        for _ in range(steps):
            for name, part in parts.items():
                start = time.process_time()
                part()
                found[name].append(time.process_time() - start)
    least = {name: min(seconds[1:]) for name, seconds in found.items()}
    return {"seconds": [0.0, sum(least.values())], "phases": least}


def theirs(model_folder: str, objective: str, steps: int) -> dict:
    """TRL's trainers."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    rows = texts(tokenizer, steps)
    clock = Steps()

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            # the step's rollouts are made before this is called, so a step begins where the last one ended
            if not clock.seconds and objective == "sft":
                clock.begin()

        def on_step_end(self, args, state, control, **kwargs):
            clock.end()
            clock.begin()

    common = {
        "output_dir": tempfile.mkdtemp(), "max_steps": steps, "per_device_train_batch_size": BATCH,
        "learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "bf16": False, "fp16": False,
        "gradient_checkpointing": False, "use_cpu": True, "report_to": [], "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True, "weight_decay": 0.0, "seed": 0,
    }  # fmt: skip
    if objective == "sft":
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_list([{"prompt": p, "completion": d} for p, d in rows])
        arguments = SFTConfig(**common, completion_only_loss=True, max_length=None)
        trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[Watch()])
    else:
        from trl.experimental.sdft import SDFTConfig, SDFTTrainer

        data = Dataset.from_list([{"prompt": p, "privileged_context": d} for p, d in rows])
        arguments = SDFTConfig(
            **common, distillation_mode="full_logits", distillation_alpha=0.0, distillation_is_clip=None,
            num_generations=1, max_completion_length=NEW, temperature=1.0, teacher_model_kind="base",
            generation_kwargs={"min_new_tokens": NEW},
        )  # fmt: skip
        trainer = SDFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[Watch()])
    clock.begin()
    trainer.train()
    return {"seconds": clock.seconds}


def run(side: str, options) -> dict:
    """One side in a process of its own."""
    command = [sys.executable, __file__, options.model, "--side", side, "--objective", options.objective[0],
               "--steps", str(options.steps), "--threads", str(options.threads)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure both sides in turns and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--objective", nargs="+", default=["opsd", "sft"], choices=["opsd", "sft"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=["ours", "theirs", "products"])
    options = parser.parse_args()
    if options.side:
        import torch

        torch.set_num_threads(options.threads)
        side = {"ours": ours, "theirs": theirs, "products": products}[options.side]
        found = side(options.model, options.objective[0], options.steps)
        found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print("\n" + json.dumps(found))
        return
    both = ["ours", "products", "theirs"] if importlib.util.find_spec("trl") else ["ours", "products"]
    for objective in list(options.objective):
        options.objective = [objective]
        runs = {side: [] for side in both}
        for _ in range(options.turns):
            for side in both:
                runs[side].append(run(side, options))
        least = {side: min(min(r["seconds"][1:]) for r in found) for side, found in runs.items()}
        memory = {side: min(r["memory"] for r in found) for side, found in runs.items()}
        best = min(runs["ours"], key=lambda r: min(r["seconds"][1:]))
        bound = min(runs["products"], key=lambda r: r["seconds"][1])["phases"]
        parts = ", ".join(
            f"{name} {value:.2f}" + (f" ({bound[name]:.2f})" if name in bound else "")
            for name, value in best["phases"].items()
        )
        for side in [side for side in both if side != "products"]:
            print(f"{objective}, {side}: {least[side]:.2f} CPU s per step, peak memory {memory[side] / 2**30:.2f} GiB")
        print(f"{objective}, ours by phase (of it matrix products alone): {parts}")
        if "theirs" in both:
            print(
                f"{objective}: {least['ours'] / least['theirs']:.2f} x the CPU seconds of TRL, "
                f"{memory['ours'] / memory['theirs']:.2f} x its peak memory",
                flush=True,
            )


if __name__ == "__main__":
    main()
