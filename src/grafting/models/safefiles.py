"""Reading and writing safetensors files without torch: by plain reads at positions, or mapped into memory.

Read once, a file is read into buffers that are used again, which was three times faster here than a map of it; what
is looked at many times is mapped, since memory for a copy of it costs more than all of the arithmetic on it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from grafting.errors import UserError
from grafting.models.files import check_directory
from grafting.models.numerics import FORMATS, Format

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # the format's own limit
_SAMPLE = 256  # bytes at each of three places of a tensor


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    file: str
    form: Format
    shape: tuple[int, ...]
    offset: int  # in the file
    nbytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.nbytes // self.form.itemsize


def read_header(path: Path) -> dict[str, Stored]:
    """Where the tensors of one safetensors file lie; UserError if it is damaged, cut off or of unknown dtype."""
    total = path.stat().st_size

    def damaged(why: str) -> UserError:
        return UserError(f"{path} cannot be read ({why}): fetch the model again")

    with open(path, "rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, total - 8):
            raise damaged("it has no safetensors header")
        try:
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
        except (ValueError, AttributeError):
            raise damaged("its header is not valid JSON") from None
    found, ends = {}, []
    for name, entry in entries.items():
        try:
            code, shape, (begin, end) = entry["dtype"], tuple(map(int, entry["shape"])), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise damaged(f"the entry of tensor {name} is incomplete") from None
        if code not in FORMATS:
            raise UserError(
                f"{path.parent}: tensor {name} has dtype {code}: only 16, 32 and 64 bit floats can be merged; "
                "give the unquantised model"
            )
        nbytes = int(np.prod(shape, dtype=np.int64)) * FORMATS[code].itemsize
        if not 0 <= begin <= end or end - begin != nbytes:
            raise damaged(f"the entry of tensor {name} says {end - begin} bytes, its shape needs {nbytes}")
        if 8 + length + end > total:
            raise damaged(f"it ends inside tensor {name}: {total} bytes, {8 + length + end} needed")
        found[name] = Stored(path.name, FORMATS[code], shape, 8 + length + begin, nbytes)
        ends.append((begin, end))
    ends.sort()
    if any(a[1] > b[0] for a, b in zip(ends, ends[1:])):
        raise damaged("its tensors overlap")
    return found


class TensorFile:
    """One safetensors file, read by positions. `path`, `tensors` (name -> Stored)."""

    def __init__(self, path: Path):
        self.path, self.tensors = Path(path), read_header(Path(path))
        self._opened: int | None = None
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        """Fill the contiguous buffer `out` (the tensor's storage dtype) with elements from index `start` on."""
        stored = self.tensors[name]
        with self._lock:
            if self._opened is None:
                self._opened = os.open(self.path, os.O_RDONLY)
        view, at = memoryview(out).cast("B"), stored.offset + start * stored.form.itemsize
        while len(view):
            count = os.preadv(self._opened, [view], at)
            if count == 0:
                raise UserError(f"{self.path} ends inside tensor {name}: fetch the model again")
            view, at = view[count:], at + count

    def mapped(self, name: str) -> np.ndarray:
        """A whole tensor in its storage dtype, flat and read-only: the file itself, mapped into memory."""
        stored = self.tensors[name]
        with self._lock:
            if self._map is None:
                with self.path.open("rb") as file:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._map, stored.form.storage, stored.size, stored.offset)

    def __del__(self):
        if getattr(self, "_opened", None) is not None:
            os.close(self._opened)


class Checkpoint:
    """The tensors of one Hugging Face directory, one file or shards with an index; nothing is read but headers.

    `path`, `config` (of config.json), `tensors` (name -> Stored), `files` (file name -> tensor names). A tied
    output head that was saved beside its embeddings is left out: it is the same tensor twice. UserError for a
    missing directory, an adapter, quantised weights, missing or damaged files, an index that does not fit,
    a dtype that is not a 16, 32 or 64 bit float.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.config = check_directory(self.path)
        tied = bool(self.config.get("tie_word_embeddings"))
        self.tensors: dict[str, Stored] = {}
        self.files: dict[str, list[str]] = {}
        self._parts: dict[str, TensorFile] = {}
        for file, listed in self._layout().items():
            self._parts[file] = TensorFile(self.path / file)
            found = self._parts[file].tensors
            lost = sorted(set(listed or found) - set(found))
            if lost:
                raise UserError(
                    f"{self.path}/{file} lacks tensor {lost[0]}, which {INDEX} says it holds: fetch the model again"
                )
            names = [n for n in sorted(listed or found) if not (tied and n == "lm_head.weight")]
            self.files[file] = names
            self.tensors.update((name, found[name]) for name in names)

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self.tensors)

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        """Fill the contiguous buffer `out` (the tensor's storage dtype) with elements from index `start` on."""
        self._parts[self.tensors[name].file].read_into(name, start, out)

    def mapped(self, name: str) -> np.ndarray:
        """A whole tensor in its storage dtype, flat and read-only: its file, mapped into memory."""
        return self._parts[self.tensors[name].file].mapped(name)

    @cached_property
    def digest(self) -> str:
        """sha256 over the weight files' contents; equal for copies and links wherever they lie."""
        whole = hashlib.sha256()
        for file in sorted(self.files):
            with open(self.path / file, "rb") as stream:
                whole.update(hashlib.file_digest(stream, "sha256").digest())
        return whole.hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of names, shapes, formats and samples of every tensor, the same however it is sharded.

        It costs milliseconds where a digest of everything costs seconds. Equal fingerprints do not prove equal
        models (`same_content` does); different ones prove different models.
        """
        whole = hashlib.sha256()
        for name in self.names:
            stored = self.tensors[name]
            whole.update(f"{name}|{stored.form.code}|{stored.shape}|".encode())
            length = max(1, _SAMPLE // stored.form.itemsize)
            for start in sorted({0, max(0, stored.size // 2 - length), max(0, stored.size - length)}):
                part = np.empty(min(length, stored.size - start), stored.form.storage)
                self.read_into(name, start, part)
                whole.update(part.tobytes())
        return whole.hexdigest()

    def _layout(self) -> dict[str, list[str] | None]:
        """File name -> the tensors that the index says it holds, None without an index."""
        if not (self.path / INDEX).is_file():
            if not (self.path / SINGLE).is_file():
                raise UserError(f"{self.path} has neither {SINGLE} nor {INDEX}: save the model in safetensors format")
            return {SINGLE: None}
        try:
            listed = json.loads((self.path / INDEX).read_text(encoding="utf-8"))["weight_map"].items()
        except (ValueError, KeyError, AttributeError, TypeError):
            raise UserError(f"{self.path}/{INDEX} has no readable weight_map: fetch the model again") from None
        files: dict[str, list[str] | None] = {}
        for name, file in listed:
            files.setdefault(file, []).append(name)
        if not files:
            raise UserError(f"{self.path}/{INDEX} lists no tensor: fetch the model again")
        for file in files:
            if not (self.path / file).is_file():
                raise UserError(f"{self.path}: {INDEX} names {file}, which is missing: fetch the model again")
        return files


def same_content(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether two checkpoints hold the same bits. Reads them only where fingerprints agree."""
    if one is other or one.path.resolve() == other.path.resolve():
        return True
    return one.fingerprint == other.fingerprint and content_digest(one) == content_digest(other)


def content_digest(checkpoint: Checkpoint) -> str:
    """sha256 over all tensors in the order of their names: the same however the model is sharded."""
    whole, buffer = hashlib.sha256(), bytearray(1 << 20)
    for name in checkpoint.names:
        stored = checkpoint.tensors[name]
        whole.update(f"{name}|{stored.form.code}|{stored.shape}|".encode())
        step = len(buffer) // stored.form.itemsize
        for start in range(0, stored.size, step):
            part = np.frombuffer(buffer, stored.form.storage, min(step, stored.size - start))
            checkpoint.read_into(name, start, part)
            whole.update(part.data)
    return whole.hexdigest()


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    form: Format
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.form.itemsize


#: The order in which the safetensors library lays out formats, widest alignment first.
_RANK = {"F64": 0, "F32": 1, "BF16": 2, "F16": 3}


_PAGE = 4096


class ShardFile:
    """A safetensors file whose tensors are written at their positions, in any order, by any thread.

    Its bytes are those of `safetensors.torch.save_file(..., metadata={"format": "pt"})`, but for spaces at the
    end of the header when `aligned`. Whole pages go past the page cache (O_DIRECT) where the file system can
    do that: copying into the cache cost more processor time here than a merge's arithmetic.
    """

    def __init__(self, path: Path, tensors: Sequence[Planned], aligned: bool = False):
        self.path = path
        self._offsets: dict[str, int] = {}
        entries: dict[str, Mapping] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in sorted(tensors, key=lambda t: (_RANK[t.form.code], t.name)):
            entries[tensor.name] = {
                "dtype": tensor.form.code,
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.nbytes],
            }
            self._offsets[tensor.name] = at
            at += tensor.nbytes
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        header += b" " * (-(8 + len(header)) % (_PAGE if aligned else 8))
        self._begin, self.nbytes = 8 + len(header), 8 + len(header) + at
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        self._direct = _open_direct(path)
        try:
            os.posix_fallocate(self._file, 0, self.nbytes)  # a full disk shows now, not after an hour
            _write_all(self._file, memoryview(struct.pack("<Q", len(header)) + header), 0)
        except OSError:
            self.close()
            raise

    def write(self, name: str, nbytes_before: int, data: np.ndarray) -> None:
        """Write a piece of a tensor behind its first `nbytes_before` bytes. OSError when the disk is full."""
        view, at = memoryview(data).cast("B"), self._begin + self._offsets[name] + nbytes_before
        first, last = -(-at // _PAGE) * _PAGE, (at + len(view)) // _PAGE * _PAGE
        if self._direct is not None and last - first >= 16 * _PAGE:
            _write_all(self._file, view[: first - at], at)
            if self._write_direct(view[first - at : last - at], first):
                view, at = view[last - at :], last
            else:
                view, at = view[first - at :], first
        _write_all(self._file, view, at)

    def _write_direct(self, pages: memoryview, at: int) -> bool:
        """Write whole pages; False if this file system refuses after all."""
        if np.frombuffer(pages, np.uint8).ctypes.data % _PAGE:
            copy = aligned_buffer(len(pages))
            copy[:] = np.frombuffer(pages, np.uint8)
            pages = memoryview(copy)
        try:
            _write_all(self._direct, pages, at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
        if self._direct is not None:
            os.close(self._direct)


def aligned_buffer(nbytes: int) -> np.ndarray:
    """Uninitialised memory at the beginning of a page: uint8 [nbytes]."""
    whole = np.empty(nbytes + _PAGE, np.uint8)
    begin = -whole.ctypes.data % _PAGE
    return whole[begin : begin + nbytes]


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except (OSError, AttributeError):  # not on this file system (tmpfs), not on this platform
        return None


def _write_all(file: int, view: memoryview, at: int) -> None:
    while len(view):
        count = os.pwrite(file, view, at)
        view, at = view[count:], at + count
