"""The streaming engine: merging models of any size, tensor by tensor and chunk by chunk, in a little memory.

Per thread there is one buffer per model for raw bytes and one per model for wide numbers, of a size that stays
in cache, whatever the size of a tensor. Several tensors are worked on at once; every thread reads, computes and
writes its own at their places in the output, so that the system's writing overlaps with the others' arithmetic.
The results depend neither on the number of threads nor on how inputs or output are sharded.

Neither torch nor transformers is imported here: a merge of 135 M parameters takes less time than importing them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grafting.errors import UserError
from grafting.merging.arrays import CHUNK, Inputs, Uniforms
from grafting.merging.registry import Operator, build, rows_of
from grafting.models.numerics import Format, has_negative_zero, is_finite, narrow, widen
from grafting.models.safefiles import Checkpoint, ShardFile, aligned_buffer

#: Chunks that are read at once.
_BLOCK = 2
_NON_FINITE = "that training run went wrong, repeat it (a smaller learning rate may help)"

#: (tensor name, start, delta) -> masked delta, in place; wide and flat.
Masking = Callable[[str, int, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Donor:
    """A model to be merged: delta = trained - donor, masked; `identity` stands for its content in random draws."""

    trained: Checkpoint
    donor: Checkpoint
    identity: str
    mask: Masking | None = None


@dataclass(frozen=True)
class Job:
    """One tensor of the output: its format and shape, the resolved settings, the scale."""

    name: str
    form: Format
    shape: tuple[int, ...]
    shared: dict[str, Any]
    each: dict[str, Sequence]
    scale: float
    copy: Checkpoint | None = None  # the model whose tensor this is, as it stands


@dataclass(frozen=True)
class Merge:
    """A merge, resolved: what is combined into what. `donors` are in canonical order."""

    operator: Operator
    anchor: Checkpoint
    donors: Sequence[Donor]
    points: bool
    jobs: Sequence[Job] = field(default_factory=list)


class Scratch:
    """The buffers of one thread, used again for every tensor."""

    def __init__(self) -> None:
        self._buffers: dict[tuple, np.ndarray] = {}

    def get(self, key: tuple, size: int, dtype: np.dtype) -> np.ndarray:
        """An uninitialised buffer of `size` elements."""
        buffer = self._buffers.get((*key, dtype))
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[(*key, dtype)] = aligned_buffer(size * dtype.itemsize).view(dtype)
        return buffer[:size]


class Stream(Inputs):
    """One tensor of all models, read in chunks; see `Inputs`. Refuses NaN and infinity, naming model and tensor."""

    def __init__(self, merge: Merge, job: Job, scratch: Scratch, checks: bool = True):
        self.shape, self.count, self._merge, self._name = job.shape, len(merge.donors), merge, job.name
        self.wide = job.form.wide
        self._scratch, self._checks = scratch, checks
        self._sound: set[Checkpoint] = set()  # what a whole pass has found to be finite
        self.raw_anchor = np.empty(0)

    def stream(self, donor, seed):
        """See `Inputs`."""
        return Uniforms(seed, self._merge.donors[donor].identity, self._name)

    def chunks(self, which=None, rows=1, step=1, part=None) -> Iterator[tuple[int, np.ndarray, list[np.ndarray]]]:
        """See `Inputs`."""
        donors = range(self.count) if which is None else which
        anchor = self._merge.anchor
        roles = [anchor] + [m for i in donors for m in (self._merge.donors[i].trained, self._merge.donors[i].donor)]
        models = list(dict.fromkeys(roles))
        once = {model for model in models if roles.count(model) == 1}
        length = self.chunk_length(rows)
        block = length * max(1, _BLOCK * CHUNK // length)
        first, last = part or (0, self.size)
        for begin in range(first, last, block):
            count = min(block, last - begin)
            raws = {}
            for place, model in enumerate(models):
                raws[model] = self._read(model, place, begin, count, raws.get(anchor))
            for start in range(0, count, length):
                here = slice(start, min(start + length, count), step)
                self.raw_anchor = raws[anchor][here]
                wide: dict[Checkpoint, np.ndarray] = {}
                base = self._widen(anchor, 0, raws, here, wide)
                deltas = []
                for i in donors:
                    pair = self._merge.donors[i]
                    donor = self._widen(pair.donor, models.index(pair.donor), raws, here, wide)
                    trained = self._widen(pair.trained, models.index(pair.trained), raws, here, wide)
                    # in place, where nobody else needs these numbers
                    delta = trained if pair.trained in once else self._scratch.get(("delta", i), len(base), self.wide)
                    np.subtract(trained, donor, out=delta)
                    if pair.mask is not None:
                        delta = pair.mask(self._name, begin + start, delta)
                    deltas.append(delta)
                yield begin + start, base, deltas
        if part is None:
            self._sound.update(models)

    def _read(self, model: Checkpoint, place: int, begin: int, count: int, fill: np.ndarray | None) -> np.ndarray:
        """A block of raw numbers; where an embedding has fewer rows than the anchor's, the anchor's stand in."""
        stored = model.tensors[self._name]
        present = max(0, min(count, stored.size - begin))
        raw = self._scratch.get(("raw", place), count, stored.form.storage)
        if present:
            model.read_into(self._name, begin, raw[:present])
            if self._checks and model not in self._sound and not is_finite(raw[:present], stored.form):
                raise UserError(f"{model.path}: tensor {self._name} holds NaN or infinity; {_NON_FINITE}")
        if present < count:
            form = self._merge.anchor.tensors[self._name].form
            wide = widen(fill[present:], form, np.empty(count - present, form.wide))
            narrow(wide, stored.form, raw[present:])
        return raw

    def _widen(self, model, place, raws, part, done) -> np.ndarray:
        if model not in done:
            raw = raws[model][part]
            out = self._scratch.get(("wide", place), len(raw), self.wide)
            done[model] = widen(raw, model.tensors[self._name].form, out)
        return done[model]


def run(merge: Merge, shards: dict[str, ShardFile], threads: int, advance: Callable[[int], None]) -> None:
    """Compute and write every tensor. `shards`: tensor name -> the file it goes to; advance(bytes written).

    UserError names the tensor of what is broken or does not fit in; what was written so far is left as it is.
    """
    local, stop, counting = threading.local(), threading.Event(), threading.Lock()

    def count(nbytes: int) -> None:
        with counting:
            advance(nbytes)

    def work(job: Job) -> None:
        if stop.is_set():
            return
        if not hasattr(local, "scratch"):
            local.scratch = Scratch()
        for start, piece in pieces(merge, job, local.scratch):
            if stop.is_set():
                return
            try:
                shards[job.name].write(job.name, start * job.form.itemsize, piece)
            except OSError as error:
                raise UserError(f"writing tensor {job.name} failed: {error.strerror}; nothing is left behind") from None
            count(piece.nbytes)

    largest_first = sorted(merge.jobs, key=lambda job: (-int(np.prod(job.shape, dtype=np.int64)), job.name))
    with ThreadPoolExecutor(max(1, threads)) as pool:
        futures = [pool.submit(work, job) for job in largest_first]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            for future in futures:
                future.cancel()
    failed = [future.exception() for future in done if future.exception() is not None]
    if failed:
        raise sorted(failed, key=str)[0]


def pieces(merge: Merge, job: Job, scratch: Scratch) -> Iterator[tuple[int, np.ndarray]]:
    """(start, numbers in the output's storage) of one tensor, each to be used before the next is asked for."""
    if job.copy is not None:
        yield from _copied(merge, job, scratch)
        return
    inputs = Stream(merge, job, scratch, checks=not merge.operator.transparent)
    rows = rows_of(merge.operator, job.shared, job.shape)
    piece = build(merge.operator, inputs, job.shared, job.each, merge.points)
    stored = merge.anchor.tensors[job.name].form
    scale = job.form.wide.type(job.scale)
    out, filled = scratch.get(("out",), max(inputs.chunk_length(rows), _BLOCK * CHUNK), job.form.storage), 0

    def checked() -> np.ndarray:
        if not is_finite(out[:filled], job.form):
            for _ in Stream(merge, job, Scratch()).chunks():
                pass  # says so if an input is at fault
            raise UserError(f"tensor {job.name} overflows {job.form.name} at scale {job.scale}: use a smaller one")
        return out[:filled]

    for start, anchor, deltas in inputs.chunks(rows=rows):
        update = piece(start, anchor, deltas)
        # -0 + 0 would be +0: where the update is 0, the anchor's bits stay
        still = update == 0 if has_negative_zero(inputs.raw_anchor, stored) else None
        if scale != 1:
            update *= scale
        update += anchor
        if still is not None:
            np.copyto(update, anchor, where=still)
        if filled + len(update) > len(out):
            yield start - filled, checked()
            filled = 0
        spare = scratch.get(("spare",), len(update), np.dtype(np.uint32))
        narrow(update, job.form, out[filled : filled + len(update)], spare)
        filled += len(update)
    yield inputs.size - filled, checked()


def _copied(merge: Merge, job: Job, scratch: Scratch) -> Iterator[tuple[int, np.ndarray]]:
    """One model's own tensor, in the output's format."""
    alone = Merge(merge.operator, job.copy, [], merge.points)
    stored = job.copy.tensors[job.name].form
    for start, anchor, _ in (inputs := Stream(alone, job, scratch)).chunks():
        if stored is job.form:
            yield start, inputs.raw_anchor
            continue
        out = narrow(anchor, job.form, scratch.get(("out",), len(anchor), job.form.storage))
        if not is_finite(out, job.form):
            raise UserError(f"tensor {job.name} of {job.copy.path} does not fit into {job.form.name}")
        yield start, out


def default_threads() -> int:
    """As many as there are cores for this process, at most 4: beyond that memory and disk are the limit."""
    return max(1, min(4, len(os.sched_getaffinity(0))))
