"""`grafting merge`: a merge from a recipe, usable without any workflow."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from grafting.config.load import read_yaml
from grafting.errors import UserError
from grafting.merging.engine import default_threads
from grafting.merging.masked import maskings
from grafting.merging.mergefile import MergeFile
from grafting.merging.mergekit import from_mergekit
from grafting.merging.planning import Plan, plan
from grafting.merging.publishing import publish
from grafting.provenance.heap import keep_heap
from grafting.provenance.progress import Progress, clock


def merge(options: argparse.Namespace) -> int:
    """Merge models as a recipe says and write a complete model directory. UserError for what does not fit."""
    import yaml

    if (options.recipe is None) == (options.from_mergekit is None):
        raise UserError("give either a recipe or --from-mergekit FILE")
    file = options.recipe or options.from_mergekit
    data = read_yaml(file)
    recipe = MergeFile.parse(data, str(file)) if options.recipe else from_mergekit(data, str(file))
    if options.print_recipe:
        print(yaml.safe_dump(recipe.described(), sort_keys=False), end="")
        return 0
    if options.out is None and not options.dry_run and options.diagnostics is None:
        raise UserError("--out names the model directory to make (or use --dry-run or --diagnostics)")
    threads = default_threads() if options.threads is None else options.threads
    if threads < 1:
        raise UserError(f"--threads must be at least 1 (got {threads})")
    if options.out is not None and options.out.exists():
        raise UserError(f"{options.out} exists already: choose another --out, or remove it first")
    # like the workflow's, the paths in a recipe are relative to where one stands
    planned = plan(recipe, Path("."), lambda *found: maskings(*found, Path(".")))
    if options.dry_run:
        print(describe(planned, threads))
        return 0
    if options.diagnostics is not None:
        from grafting.merging.diagnostics import diagnose, write

        bar = Bar(planned.nbytes, "diagnostics")
        for path in write(diagnose(planned, bar.advance), options.diagnostics):
            print(f"written: {path}")
        if options.out is None:
            return 0
    keep_heap()
    bar = Bar(planned.nbytes, recipe.operator)
    publish(planned, options.out, threads, bar.advance, options.hashes)
    bar.close()
    print(f"written: {options.out} ({len(planned.merge.jobs)} tensors, {planned.nbytes / 1e6:,.1f} MB)")
    return 0


def describe(planned: Plan, threads: int) -> str:
    """What a merge will read, write and need."""
    lines = [f"{'tensor':60s} {'shape':>18s} {'dtype':>9s} {'bytes':>14s}"]
    for tensors in planned.files.values():
        for t in tensors:
            lines.append(f"{t.name:60s} {'x'.join(map(str, t.shape)):>18s} {t.form.name:>9s} {t.nbytes:14,d}")
    copied = sum(job.copy is not None for job in planned.merge.jobs)
    models = {id(model) for model in planned.models.values()}
    lines += [
        f"{len(planned.merge.jobs)} tensors in {len(planned.files)} file(s), {copied} of them copied as they stand",
        f"{planned.recipe.operator} of {len(models)} models: "
        f"{planned.read_bytes:,} bytes to read at least once, {planned.nbytes:,} to write",
        f"peak memory about {planned.peak_bytes(threads) / 2**20:,.0f} MiB with {threads} thread(s)",
    ]
    return "\n".join(lines)


class Bar:
    """A progress bar on a terminal; elsewhere a line every ten seconds."""

    def __init__(self, total: int, label: str):
        self._total, self._label, self._done = total, label, 0
        self._started = self._drawn = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._lines = Progress(total >> 20, label, "MiB", lambda line: print(line, file=sys.stderr))

    def advance(self, nbytes: int) -> None:
        """`nbytes` more are written."""
        before, self._done = self._done, self._done + nbytes
        if not self._terminal:
            self._lines.update((self._done >> 20) - (before >> 20))
        elif time.monotonic() - self._drawn > 0.1:
            self._draw()

    def close(self) -> None:
        """End the line."""
        if self._terminal:
            self._draw()
            print(file=sys.stderr)
        else:
            self._lines.close()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        elapsed, share = self._drawn - self._started, self._done / self._total
        left = clock(elapsed / share - elapsed) if share else "?"
        filled = "#" * int(30 * share)
        rate = self._done / 1e6 / max(elapsed, 1e-9)
        print(f"\r{self._label} [{filled:30s}] {share:4.0%}, {rate:,.0f} MB/s, {left} left  ", end="", file=sys.stderr)
