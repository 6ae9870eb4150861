"""Reading the weights of a model directory tensor by tensor, without building the model."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from grafting.errors import UserError
from grafting.models.files import check_directory

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Weights:
    """The tensors of one Hugging Face directory, one file or shards with an index.

    Attributes: `path`, `files` (file name -> tensor names in it), `shapes`, `dtypes` (by tensor name).
    A tied output head that was saved beside its embeddings is left out: it is the same tensor twice.
    Raises UserError for a missing directory, a LoRA adapter, quantised weights, missing files.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.files = self._layout()
        self._handles, self._checked = {}, set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for file in list(self.files):
            self._open(file)
        self._where = {name: file for file, names in self.files.items() for name in names}

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._where)

    def tensor(self, name: str) -> Tensor:
        """One tensor in its stored dtype. UserError naming it when it holds NaN or infinity."""
        tensor = self._handles[self._where[name]].get_tensor(name)
        if name not in self._checked:
            if not torch.isfinite(tensor).all():
                raise UserError(
                    f"{self.path}: tensor {name} holds NaN or infinity; "
                    "that training run went wrong, repeat it (a smaller learning rate may help)"
                )
            self._checked.add(name)
        return tensor

    @cached_property
    def digest(self) -> str:
        """sha256 over the weight files' contents; equal for copies and links wherever they lie."""
        whole = hashlib.sha256()
        for file in sorted(self.files):
            with open(self.path / file, "rb") as stream:
                whole.update(hashlib.file_digest(stream, "sha256").digest())
        return whole.hexdigest()

    def _layout(self) -> dict[str, list[str]]:
        path = self.path
        self._tied = bool(check_directory(path).get("tie_word_embeddings"))
        if (path / INDEX).is_file():
            files: dict[str, list[str]] = {}
            for name, file in json.loads((path / INDEX).read_text())["weight_map"].items():
                files.setdefault(file, []).append(name)
        elif (path / SINGLE).is_file():
            files = {SINGLE: []}
        else:
            raise UserError(f"{path} has neither {SINGLE} nor {INDEX}: save the model in safetensors format")
        return files

    def _open(self, file: str) -> None:
        """Open one weight file and note names, shapes and dtypes, reading no tensor."""
        if not (self.path / file).is_file():
            raise UserError(f"{self.path}: {INDEX} names {file}, which is missing: fetch the model again")
        try:
            handle = safe_open(self.path / file, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{self.path}/{file} cannot be read ({error}): fetch the model again") from None
        present = set(handle.keys())
        lost = sorted(set(self.files[file]) - present)
        if lost:
            raise UserError(
                f"{self.path}/{file} lacks tensor {lost[0]}, which {INDEX} says it holds: fetch the model again"
            )
        names = sorted(self.files[file] or present)
        if self._tied and "lm_head.weight" in names:
            names.remove("lm_head.weight")
        for name in names:
            part = handle.get_slice(name)
            if part.get_dtype() not in _DTYPES:
                raise UserError(
                    f"{self.path}: tensor {name} has dtype {part.get_dtype()}: only 16, 32 and "
                    "64 bit floats can be merged; give the unquantised model"
                )
            self.shapes[name] = tuple(part.get_shape())
            self.dtypes[name] = _DTYPES[part.get_dtype()]
        self._handles[file], self.files[file] = handle, names


def require_same_tensors(reference: Weights, other: Weights) -> None:
    """UserError unless both hold the same tensor names and shapes (dtypes may differ)."""
    missing = sorted(set(reference.names) - set(other.names))
    extra = sorted(set(other.names) - set(reference.names))
    if missing or extra:
        what = f"lacks tensor {missing[0]}" if missing else f"has an additional tensor {extra[0]}"
        more = len(missing) + len(extra) - 1
        raise UserError(
            f"{other.path} {what}{f' (and {more} more differ)' if more else ''} compared with "
            f"{reference.path}: donor, trained and deployed must be one architecture"
        )
    for name in reference.names:
        if reference.shapes[name] != other.shapes[name]:
            raise UserError(
                f"tensor {name} has shape {reference.shapes[name]} in {reference.path} and "
                f"{other.shapes[name]} in {other.path}: give checkpoints of one lineage with the "
                "same vocabulary size (resize the embeddings of one of them first)"
            )
