"""Merging against mergekit 0.1.5, on models that this script makes.

    python benchmarks/merge.py --mergekit /path/to/venv/bin/mergekit-yaml --folder /tmp/bench

A Llama of 1.07 B parameters in bfloat16 and two copies with small changes are written (6.5 GB, random numbers);
mergekit, in an environment of its own (`pip install mergekit==0.1.5`), and `grafting merge` merge them in turn.
Printed are CPU seconds (user + system, of the process and its children), wall seconds and peak memory, medians of
--repeats runs, and the ratios. Without --mergekit only ours run, beside a plain copy of the same bytes.

The parts `sweep`, `fisher` and `masks` use a Llama of 135 M parameters in float32 and need no mergekit but for the
comparison of the sweep. Everything is removed at the end unless --keep.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from grafting.models.numerics import BY_NAME, narrow
from grafting.models.safefiles import Planned, ShardFile

SIZES = {
    # hidden, feed-forward, layers, heads, key-value heads, vocabulary
    "1B": (2048, 5632, 21, 16, 4, 32000),
    "0.1B": (768, 2048, 9, 12, 4, 32000),
    "135M": (576, 1536, 30, 9, 3, 49152),
}
#: What is merged, as mergekit is told and as ours is; a and b are fine-tuned copies of base.
CASES = {
    "task arithmetic": ("task_arithmetic", True, {"weight": 0.6}, {"lambda": 0.8}, 5),
    "linear": ("linear", False, {"weight": 0.6}, {}, 5),
    "slerp": ("slerp", True, {}, {"t": 0.3}, 4),
    "dare_ties": ("dare_ties", True, {"weight": 0.6, "density": 0.5}, {}, 6),
    "ties": ("ties", True, {"weight": 0.6, "density": 0.5}, {}, 8),
}
PARTS = (*CASES, "sweep", "fisher", "masks", "memory")


def shapes(size: str) -> dict[str, tuple[int, ...]]:
    """Tensor shapes of a Llama; that of 135 M has a tied head."""
    hidden, feed, layers, heads, kv, vocabulary = SIZES[size]
    narrow_width = hidden // heads * kv
    named: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if size != "135M":
        named["lm_head.weight"] = (vocabulary, hidden)
    for i in range(layers):
        layer = f"model.layers.{i}"
        for part, shape in (
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (narrow_width, hidden)),
            ("self_attn.v_proj", (narrow_width, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (feed, hidden)),
            ("mlp.up_proj", (feed, hidden)),
            ("mlp.down_proj", (hidden, feed)),
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ):
            named[f"{layer}.{part}.weight"] = shape
    return named


def make_models(folder: Path, size: str, dtype: str, names: tuple[str, ...]) -> None:
    """base: normal numbers times 0.02; the others: base plus normal numbers times 0.002."""
    hidden, feed, layers, heads, kv, vocabulary = SIZES[size]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": feed,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocabulary,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": size == "135M", "dtype": dtype,
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    form, named = BY_NAME[dtype], shapes(size)
    block = 1 << 22
    for m, model in enumerate(names):
        path = folder / model
        if path.exists():
            continue
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config, indent=2))
        file = ShardFile(path / "model.safetensors", [Planned(name, form, shape) for name, shape in named.items()])
        for k, (name, shape) in enumerate(named.items()):
            n = int(np.prod(shape))
            for start in range(0, n, block):
                count = min(block, n - start)
                wide = np.random.default_rng([k, start]).standard_normal(count, dtype=np.float32)
                wide *= 0.02
                if name.endswith("norm.weight"):
                    wide += 1
                if m:
                    change = np.random.default_rng([k, start, m]).standard_normal(count, dtype=np.float32)
                    wide += change * np.float32(0.002)
                out = narrow(wide, form, np.empty(count, form.storage))
                file.write(name, start * form.itemsize, out)
        file.close()


def measured(command: list[str], out: Path | None = None) -> tuple[float, float, float]:
    """CPU seconds, wall seconds and peak memory (MiB) of a command. Its output is shown if it fails."""
    if out is not None:
        shutil.rmtree(out, ignore_errors=True)
    started = time.monotonic()
    log = Path(os.environ.get("TMPDIR", "/tmp")) / f"merge-benchmark-{os.getpid()}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
        raise SystemExit(f"failed: {' '.join(map(str, command))}")
    log.unlink()
    return usage.ru_utime + usage.ru_stime, time.monotonic() - started, usage.ru_maxrss / 1024


def median(command: list[str], out: Path | None, repeats: int) -> tuple[float, float, float]:
    """Medians of the three numbers."""
    runs = [measured(command, out) for _ in range(repeats)]
    return tuple(statistics.median(column) for column in zip(*runs))


COPY = """
import os, sys
buffer = memoryview(bytearray(1 << 20))
out = os.open(sys.argv[1], os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
for i, path in enumerate(sys.argv[2:]):
    file = os.open(path, os.O_RDONLY)
    while count := os.readv(file, [buffer]):
        if i == 0:
            os.write(out, buffer[:count])
"""


def mergekit_yaml(case: str, folder: Path) -> Path:
    """The configuration of a case for mergekit; ours reads the same file."""
    method, based, each, shared, _ = CASES[case]
    models = ["a"] if method == "slerp" else (["a", "b"] if based else ["base", "a", "b"])
    entries = [{"model": str(folder / m), "parameters": each} for m in models]
    if method == "slerp":
        entries.insert(0, {"model": str(folder / "base")})
    config = {"merge_method": method, "models": entries, "parameters": shared, "dtype": "bfloat16"}
    if based:
        config["base_model"] = str(folder / "base")
    path = folder / f"{method}.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def row(name: str, theirs, ours, wanted: str) -> None:
    """One line of the table."""
    left = "   -   " if theirs is None else f"{theirs[0]:7.1f}"
    memory = "   -   " if theirs is None else f"{theirs[2]:7.0f}"
    ratio = "    -" if theirs is None else f"{theirs[0] / ours[0]:5.1f}"
    print(f"{name:18s} {left} {memory}   {ours[0]:7.2f} {ours[1]:7.2f} {ours[2]:7.0f}   {ratio}   {wanted}", flush=True)


def merges(options, folder: Path, cases: list[str]) -> None:
    """The table of whole merges."""
    make_models(folder, "1B", "bfloat16", ("base", "a", "b"))
    files = [folder / m / "model.safetensors" for m in ("base", "a", "b")]
    out = folder / "out"
    copies = {}
    for count in (3, 2):
        target = folder / "copy.bin"
        command = [sys.executable, "-c", COPY, target, *files[:count]]
        copies[count] = median(list(map(str, command)), None, options.repeats)
        target.unlink()
        print(
            f"plain copy, {count} models read, 1 written: CPU {copies[count][0]:.2f} s, wall {copies[count][1]:.2f} s"
        )
    print(f"{'':18s} {'mergekit':>15s}   {'grafting':>23s}")
    print(f"{'':18s} {'CPU s':>7s} {'MiB':>7s}   {'CPU s':>7s} {'wall s':>7s} {'MiB':>7s}   ratio   wanted")
    for case in cases:
        config = mergekit_yaml(case, folder)
        theirs = None
        if options.mergekit:
            command = [options.mergekit, str(config), str(out), "--no-copy-tokenizer", "--quiet"]
            theirs = median(command, out, options.repeats)
        command = [sys.executable, "-m", "grafting.cli", "merge", "--from-mergekit", str(config), "--out", str(out)]
        if options.threads:
            command += ["--threads", str(options.threads)]
        ours = median(command, out, options.repeats)
        shutil.rmtree(out, ignore_errors=True)
        copy = copies[2 if case == "slerp" else 3]
        row(case, theirs, ours, f">= {CASES[case][4]}; {ours[0] / copy[0]:.1f} x the CPU time of a copy")


def memory(options, folder: Path) -> None:
    """Peak memory must not grow with the model."""
    for size in ("0.1B", "1B"):
        here = folder if size == "1B" else folder / size
        make_models(here, size, "bfloat16", ("base", "a", "b"))
        for case in ("task arithmetic", "ties"):
            command = [sys.executable, "-m", "grafting.cli", "merge", "--from-mergekit", str(mergekit_yaml(case, here))]
            ours = measured([*command, "--out", str(here / "out")], here / "out")
            shutil.rmtree(here / "out")
            print(f"peak memory, {case}, {size}: {ours[2]:.0f} MiB")


SWEEP = """
import sys, torch
from pathlib import Path
from grafting.merging.sweep import Sweep
from grafting.models import load_model
folder = Path(sys.argv[1])
torch.set_num_threads(1)
model = load_model(folder / "base")
sweep = Sweep(folder / "base", [folder / "a"], [folder / "base"])
for i in range(10):
    sweep.into(model, {"scale": 0.05 + 0.1 * i})
"""
MASKS = """
import sys, time, torch
from pathlib import Path
from grafting.merging.sweep import Sweep
from grafting.models import load_model
folder = Path(sys.argv[1])
torch.set_num_threads(1)
model = load_model(folder / "base")
sweep = Sweep(folder / "base", [folder / "a"], [folder / "base"], {"diagonal": folder / "fisher"})
sweep.into(model, {"scale": 0.5})
def timed(work):
    start = time.process_time(); work(); return time.process_time() - start
for rank in ("fisher", "fisher_delta2"):
    recipes = [{"scale": 0.7, "mask": {"estimator": "diagonal", "rank": rank, "fraction": f}}
               for f in (.0001, .0003, .001, .002, .003, .005, .01, .02, .05, .1)]
    selection = timed(lambda: sweep.prepare(recipes))
    plain, masked = [], []
    for i, r in enumerate(recipes):  # in turn, so that what else the machine does hits both alike
        plain.append(timed(lambda: sweep.into(model, {"scale": 1.1 + 0.1 * i})))
        masked.append(timed(lambda: sweep.into(model, r)))
    one, both = sorted(plain)[5], sorted(masked)[5]
    print(f"masks by {rank}: selection of 10 fractions CPU {selection:.2f} s, then a pass {both:.2f} s "
          f"= {both / one:.2f} x a scale's {one:.2f} s (wanted <= 2)")
"""
FISHER = """
import sys, time, torch
from pathlib import Path
from grafting.models import load_model
from grafting.sensitivity.diagonal import diagonal_fisher
from grafting.sensitivity.likelihood import Sequence, negative_log_likelihood
torch.set_num_threads(1)
model = load_model(Path(sys.argv[1]) / "base")
g = torch.Generator().manual_seed(0)
ids = torch.randint(0, model.config.vocab_size, (64, 129), generator=g).tolist()
sequences = [Sequence(str(i), row[:64], row[64:]) for i, row in enumerate(ids)]
parameters = list(model.parameters())
def plain(some):
    for s in some:
        loss = negative_log_likelihood(model, [s], "empirical", 0)
        torch.autograd.grad(loss, parameters)
def timed(work):
    start = time.process_time(); work(); return time.process_time() - start
plain(sequences[:2])
halves = [sequences[i::4] for i in range(4)]  # in turn, so that what else the machine does hits both alike
base = ours = empirical = 0.0
for part in halves:
    base += timed(lambda: plain(part))
    empirical += timed(lambda: diagonal_fisher(model, part, fisher="empirical"))
    ours += timed(lambda: diagonal_fisher(model, part, fisher="true"))
print(f"64 backward passes: CPU {base:.1f} s; diagonal Fisher, empirical {empirical:.1f} s = {empirical / base:.2f} x, "
      f"true {ours:.1f} s = {ours / base:.2f} x (wanted <= 1.5)")
"""


def small(options, folder: Path, parts: list[str]) -> None:
    """Sweep, masks and Fisher on 135 M parameters in float32."""
    here = folder / "135M"
    make_models(here, "135M", "float32", ("base", "a"))
    if "sweep" in parts:
        theirs = None
        if options.mergekit:
            config = here / "task_arithmetic.yaml"
            models = [{"model": str(here / "a"), "parameters": {"weight": 0.5}}]
            recipe = {"merge_method": "task_arithmetic", "models": models, "base_model": str(here / "base")}
            config.write_text(json.dumps(recipe | {"dtype": "float32"}))
            command = [options.mergekit, str(config), str(here / "out"), "--no-copy-tokenizer", "--quiet"]
            one = median(command, here / "out", options.repeats)
            shutil.rmtree(here / "out")
            theirs = (10 * one[0], 10 * one[1], one[2])
        ours = median([sys.executable, "-c", SWEEP, str(here)], None, options.repeats)
        row("sweep of 10 scales", theirs, ours, ">= 25 (of 182 s: 7.3 s)")
    if "fisher" in parts:
        subprocess.run([sys.executable, "-c", FISHER, str(here)], check=True)
    if "masks" in parts:
        fisher = here / "fisher"
        if not fisher.exists():
            fisher.mkdir()
            form, named = BY_NAME["float32"], shapes("135M")
            file = ShardFile(fisher / "diagonal.safetensors", [Planned(n, form, s) for n, s in named.items()])
            for k, (name, shape) in enumerate(named.items()):
                file.write(name, 0, np.random.default_rng([k]).standard_normal(int(np.prod(shape)), np.float32) ** 4)
            file.close()
        subprocess.run([sys.executable, "-c", MASKS, str(here)], check=True)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", help="mergekit-yaml of an environment with mergekit 0.1.5")
    parser.add_argument("--folder", type=Path, required=True, help="where the models go (11 GB)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of `grafting merge`")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        if cases := [case for case in CASES if case in options.parts]:
            merges(options, options.folder, cases)
        if "memory" in options.parts:
            memory(options, options.folder)
        if parts := [part for part in ("sweep", "fisher", "masks") if part in options.parts]:
            small(options, options.folder, parts)
    finally:
        if not options.keep:
            shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
