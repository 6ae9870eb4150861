"""Decoding against its own matrix products.

What no engine can avoid at a given batch size is the product of every linear layer with one column per running
response and step, and once with all of the prompt. This script times `grafting.rollouts.generate` and those products
alone, on the same weights, with the same number of threads, and prints the ratio of CPU seconds.

    python benchmarks/decoding.py MODEL_DIRECTORY [--batch 8 32] [--prompt 90] [--new 32] [--repeats 3] [--threads 2]
"""

from __future__ import annotations

import argparse
import time

import torch

from grafting.models import load_model
from grafting.rollouts import generate


def seconds(function, repeats: int) -> float:
    """Least CPU seconds of several runs, after one that is not counted."""
    function()
    found = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return min(found)


@torch.no_grad()
def products(model, batch: int, prompt: int, new: int) -> None:
    """All matrix products of prefill and decoding: for the prompt the head runs at its last token only."""
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {m.in_features: torch.randn(batch * prompt, m.in_features) for m in layers}
    for step in range(new):
        for layer in layers:
            rows = batch if step or layer is head else batch * prompt
            torch.nn.functional.linear(inputs[layer.in_features][:rows], layer.weight)


def main() -> None:
    """Measure and print one line per batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt", type=int, default=90)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="native")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(options.model)
    vocabulary = model.config.vocab_size
    for batch in options.batch:
        prompts = torch.randint(5, vocabulary, (batch, options.prompt), generator=torch.manual_seed(0)).tolist()

        def decode(prompts=prompts, batch=batch) -> None:
            found = generate(
                model, prompts, max_new_tokens=options.new, stop_ids={-1}, pad_id=0, temperature=1.0,
                seeds=list(range(batch)), batch_size=batch, backend=options.backend,
            )  # fmt: skip
            assert all(len(rollout.tokens) == options.new for rollout in found)

        whole = seconds(decode, options.repeats)
        bound = seconds(lambda b=batch: products(model, b, options.prompt, options.new), options.repeats)
        print(
            f"batch {batch}: {batch * options.new} new tokens; decoding {whole:.2f} CPU s, its matrix products "
            f"{bound:.2f} CPU s, ratio {whole / bound:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
