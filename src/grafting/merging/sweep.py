"""Many grafts from one reading: the same updates under many scales, masks and operators."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from grafting.errors import UserError
from grafting.merging.arrays import CHUNK, Arrays, apply
from grafting.merging.planning import require_fitting
from grafting.merging.recipe import Recipe
from grafting.merging.registry import build, find, rows_of
from grafting.models.numerics import Format, has_negative_zero, is_finite, largest_magnitude, narrow, widen
from grafting.models.safefiles import Checkpoint
from grafting.sensitivity.masking import Masking
from grafting.sensitivity.masks import Mask, mask_report, sensitivity_of

_CACHE_BYTES = 2 << 30
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}

#: Elements computed at once when writing: what they take stays in cache. No bit depends on it.
_PIECE = 1 << 15

#: (start, theta_0, out): writes the update of the coordinates from `start` on into `out`; all wide.
Chunked = Callable[[int, np.ndarray, np.ndarray], None]


class _Raw(NamedTuple):
    """A tensor's numbers, flat, in its storage dtype; their largest magnitude; whether a -0 is among them."""

    values: np.ndarray
    magnitude: float
    negative_zero: bool


class Sweep:
    """theta = theta_0 + scale * operator_i(mask(trained_i - donor_i)) for any number of recipes.

    Arithmetic is one precision wider than theta_0 (float64 for float32, float32 for 16-bit), with one
    rounding at the end. Terms are combined in the order of their contents' hashes, so the order in which
    donors are listed changes no bit. A coordinate whose update is 0 keeps theta_0's bits.
    These need no arithmetic, and are exact: scale 0 and a mask of fraction 1 give theta_0; scale 1 of a
    single unmasked term whose donor is the deployed model itself (by path or bytes) gives `trained`.

    The models are mapped into memory, and never copied. For the next scale combined updates are kept while they fit
    into `cache_bytes`; what does not, and what is one difference, is formed anew, so a merge of large models needs
    the memory of one tensor.

    model_path, trained, donors: model directories, `trained` and `donors` aligned; sensitivity:
    estimator -> payload folder. Raises UserError (naming tensor, shapes, file) for what does not fit.
    """

    def __init__(
        self,
        model_path: Path,
        trained: Iterable[Path],
        donors: Iterable[Path],
        sensitivity: Mapping[str, Path] | None = None,
        *,
        cache_bytes: int = _CACHE_BYTES,
    ):
        trained, donors = list(trained), list(donors)
        if len(trained) != len(donors):
            raise UserError(
                f"a merge got {len(trained)} trained models and {len(donors)} donors: every "
                "update is trained_i - donor_i, so give one donor per trained model"
            )
        opened: dict[Path, Checkpoint] = {}  # one donor often serves many terms

        def weights(path: Path) -> Checkpoint:
            key = Path(path).resolve()
            if key not in opened:
                opened[key] = Checkpoint(path)
                require_fitting(self.model, opened[key])
            return opened[key]

        self.model = opened[Path(model_path).resolve()] = Checkpoint(model_path)
        self.trained = [weights(path) for path in trained]
        self.donors = [weights(path) for path in donors]
        self.sensitivity = dict(sensitivity or {})
        self._cache: OrderedDict[str, dict[str, np.ndarray]] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._raws: dict[tuple[Checkpoint, str], _Raw] = {}
        self._maskings: dict[tuple, Masking] = {}

    @classmethod
    def of_job(cls, job) -> Sweep:
        """The sweep of a job: inputs model, trained[], donor[], sensitivity_kfac?, sensitivity_diagonal?."""
        given = {estimator: job.inputs(f"sensitivity_{estimator}") for estimator in ("kfac", "diagonal")}
        return cls(
            job.input("model"),
            job.inputs("trained"),
            job.inputs("donor"),
            {estimator: paths[0] for estimator, paths in given.items() if paths},
        )

    def prepare(self, recipes: Iterable[Recipe | Mapping | None]) -> None:
        """Find the thresholds of all masks that differ only in their fraction in one pass (optional, for speed)."""
        fractions: dict[tuple, list[float]] = {}
        for recipe in recipes:
            recipe = None if recipe is None else self._parse(recipe)
            if recipe is None or recipe.effective_mask is None or self._verbatim(recipe) is not None:
                continue
            for term in recipe.terms:
                fractions.setdefault(self._ranking(term, recipe.mask), []).append(recipe.mask.fraction)
        for ranking, several in fractions.items():
            self._maskings[ranking].prepare(sorted(set(several)))

    def state(self, recipe: Recipe | Mapping | None) -> dict[str, Tensor]:
        """All tensors of the graft, in theta_0's dtypes, by name. None is the deployed model itself."""
        return dict(self.tensors(recipe))

    def tensors(
        self, recipe: Recipe | Mapping | None, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The graft tensor by tensor (all, or those named), each a fresh tensor in theta_0's dtype."""
        names = self.model.names if names is None else names
        write = self._writer(recipe)
        for name in names:
            stored = self.model.tensors[name]
            out = np.empty(stored.size, stored.form.storage)
            write(name, out)
            yield name, as_tensor(out, stored.form).view(stored.shape)

    def into(self, model, recipe: Recipe | Mapping | None) -> None:
        """Copy the graft into a live model of the same architecture, on whatever device it is."""
        live = model.state_dict()
        unknown = sorted(set(self.model.names) - set(live))
        if unknown:
            raise UserError(
                f"{type(model).__name__} has no tensor {unknown[0]}, which "
                f"{self.model.path} holds: write the graft out (stage merge) and load that"
            )
        written = {live[name].data_ptr() for name in self.model.names}
        for name in live:
            if live[name].data_ptr() not in written:
                raise UserError(
                    f"{self.model.path} holds no tensor {name}, which {type(model).__name__} "
                    "needs: load the model from there"
                )
        for name in self.model.names:
            if live[name].shape != self.model.tensors[name].shape:
                raise UserError(
                    f"tensor {name} has shape {tuple(live[name].shape)} in the live model, "
                    f"{self.model.tensors[name].shape} in {self.model.path}: load it from there"
                )
        write = self._writer(recipe)
        with torch.no_grad():
            for name in self.model.names:
                stored, tensor = self.model.tensors[name], live[name]
                direct = tensor.device.type == "cpu" and tensor.is_contiguous()
                if direct and tensor.dtype == _DTYPES[stored.form.code]:
                    write(name, as_array(tensor, stored.form))
                    continue
                out = np.empty(stored.size, stored.form.storage)
                write(name, out)
                tensor.copy_(as_tensor(out, stored.form).view(stored.shape))

    def mask_report(self, recipe: Recipe | Mapping) -> list[dict]:
        """Per term of a masked recipe: what the mask removes of the update, per tensor (see masks.mask_report)."""
        recipe = self._parse(recipe)
        reports = []
        for term in recipe.terms:
            update = {name: self._delta(term, name) for name in self.model.names}
            masked = {name: self._masked(term, recipe.mask, name, delta.copy()) for name, delta in update.items()}
            shapes = {name: self.model.tensors[name].shape for name in update}
            before, after = (
                {name: torch.from_numpy(d).view(shapes[name]) for name, d in deltas.items()}
                for deltas in (update, masked)
            )
            reports.append(mask_report(before, after, recipe.mask, self.sensitivity))
        return reports

    # ---- inside ----

    def _parse(self, recipe: Recipe | Mapping) -> Recipe:
        recipe = Recipe.parse(recipe)
        if max(recipe.terms) >= len(self.trained):
            raise UserError(
                f"recipe.terms: there is no update {max(recipe.terms)}, this merge has "
                f"{len(self.trained)} (numbered from 0)"
            )
        return recipe

    def _verbatim(self, recipe: Recipe | None) -> Checkpoint | None:
        """The directory whose tensors are the graft as they stand, if there is one."""
        mask = recipe.effective_mask if recipe else None
        if recipe is None or recipe.scale == 0 or (mask and mask.fraction == 1):
            return self.model
        if recipe.scale == 1 and recipe.is_plain:
            donor = self.donors[recipe.terms[0]]
            if donor is self.model or donor.digest == self.model.digest:
                return self.trained[recipe.terms[0]]
        return None

    def _writer(self, recipe: Recipe | Mapping | None) -> Callable[[str, np.ndarray], None]:
        """(tensor name, out): writes a tensor of the graft into `out`, flat, in theta_0's storage."""
        recipe = None if recipe is None else self._parse(recipe)
        verbatim = self._verbatim(recipe)
        if verbatim is not None:
            return lambda name, out: self._copy(verbatim, name, out)
        update = self._update(recipe)
        buffers: dict[tuple[int, np.dtype], np.ndarray] = {}

        def write(name: str, out: np.ndarray) -> None:
            form = self.model.tensors[name].form
            (theta, _, zeros), safe = self._looked(self.model, name), self._cannot_overflow(recipe, name)
            chunked, scale = update(name), form.wide.type(recipe.scale)
            first, second = (buffers.setdefault((i, form.wide), np.empty(_PIECE, form.wide)) for i in (0, 1))
            for start in range(0, len(out), _PIECE):
                raw, part = theta[start : start + _PIECE], out[start : start + _PIECE]
                wide, delta = widen(raw, form, first[: len(raw)]), second[: len(raw)]
                chunked(start, wide, delta)
                still = delta == 0 if zeros and has_negative_zero(raw, form) else None  # -0 + 0 would be +0
                delta *= scale
                delta += wide
                if still is not None:
                    np.copyto(delta, wide, where=still)
                narrow(delta, form, part)
                if not safe and not is_finite(part, form):
                    raise UserError(
                        f"tensor {name} overflows {_DTYPES[form.code]} at scale {recipe.scale}: use a smaller one"
                    )

        return write

    def _copy(self, checkpoint: Checkpoint, name: str, out: np.ndarray) -> None:
        form = self.model.tensors[name].form
        if checkpoint.tensors[name].form is form:
            np.copyto(out, self._raw(checkpoint, name))
        else:
            narrow(self._wide(checkpoint, name), form, out)

    def _wide(self, checkpoint: Checkpoint, name: str) -> np.ndarray:
        """A tensor widened, flat."""
        raw, form = self._raw(checkpoint, name), checkpoint.tensors[name].form
        return widen(raw, form, np.empty(raw.size, self.model.tensors[name].form.wide))

    def _looked(self, checkpoint: Checkpoint, name: str) -> _Raw:
        """A tensor as it lies in its file, looked through once. UserError naming it when it holds NaN or infinity."""
        if (found := self._raws.get((checkpoint, name))) is None:
            raw, form = checkpoint.mapped(name), checkpoint.tensors[name].form
            found = _Raw(raw, largest_magnitude(raw, form), has_negative_zero(raw, form))
            if found.magnitude == float("inf"):
                raise UserError(
                    f"{checkpoint.path}: tensor {name} holds NaN or infinity; "
                    "that training run went wrong, repeat it (a smaller learning rate may help)"
                )
            self._raws[checkpoint, name] = found
        return found

    def _raw(self, checkpoint: Checkpoint, name: str) -> np.ndarray:
        """A tensor's raw numbers, flat and read-only."""
        return self._looked(checkpoint, name).values

    def _cannot_overflow(self, recipe: Recipe, name: str) -> bool:
        """Whether theta_0 plus a scaled difference stays far from the largest number that its format holds."""
        mask = recipe.effective_mask
        if not recipe.is_bare or (mask is not None and mask.estimator != "diagonal"):  # a rotation can enlarge some
            return False
        term, form = recipe.terms[0], self.model.tensors[name].form
        theta, trained, donor = (
            self._looked(model, name).magnitude for model in (self.model, self.trained[term], self.donors[term])
        )
        return theta + abs(recipe.scale) * (trained + donor) < form.largest / 2

    def _delta(self, term: int, name: str) -> np.ndarray:
        """trained - donor of one tensor, wide and flat."""
        whole = np.empty(self.model.tensors[name].size, self.model.tensors[name].form.wide)
        for start, delta in self._differences(term, name, CHUNK):
            whole[start : start + len(delta)] = delta
        return whole

    def _differences(self, term: int, name: str, length: int) -> Iterator[tuple[int, np.ndarray]]:
        """(start, trained - donor) in pieces, wide, to be used before the next."""
        difference = self._difference(term, name)
        size, wide = self.model.tensors[name].size, self.model.tensors[name].form.wide
        buffer = np.empty(min(length, size), wide)
        for start in range(0, size, length):
            out = buffer[: min(length, size - start)]
            difference(start, None, out)
            yield start, out

    def _difference(self, term: int, name: str) -> Chunked:
        """trained - donor of one tensor, from the models as they are stored."""
        trained, donor = self.trained[term], self.donors[term]
        (first, second), wide = (self._raw(m, name) for m in (trained, donor)), self.model.tensors[name].form.wide
        forms, buffer = (trained.tensors[name].form, donor.tensors[name].form), np.empty(0, wide)

        def chunked(start: int, theta: np.ndarray | None, out: np.ndarray) -> None:
            nonlocal buffer
            here = slice(start, start + len(out))
            widen(first[here], forms[0], out)
            if donor is self.model and theta is not None:
                out -= theta
                return
            if len(buffer) < len(out):
                buffer = np.empty(len(out), wide)
            out -= widen(second[here], forms[1], buffer[: len(out)])

        return chunked

    def _ranking(self, term: int, mask: Mask) -> tuple:
        """The key of the masking of one update, made on first use."""
        key = (term, mask.estimator, mask.rank, mask.per, mask.seed)
        if key not in self._maskings:
            shapes = {name: stored.shape for name, stored in self.model.tensors.items()}

            def deltas(name: str, step: int) -> Iterator[tuple[int, np.ndarray]]:
                for start, delta in self._differences(term, name, CHUNK):
                    yield start, delta[::step]

            self._maskings[key] = Masking(mask, shapes, deltas, sensitivity_of(mask, self.sensitivity))
        return key

    def _masked(self, term: int, mask: Mask | None, name: str, delta: np.ndarray) -> np.ndarray:
        """One tensor's delta without its masked directions; `delta` may be overwritten."""
        if mask is None or mask.fraction == 0:
            return delta
        if mask.fraction == 1:
            return np.zeros_like(delta)
        masking = self._maskings[self._ranking(term, mask)]
        if name not in masking.ranked_names:
            return delta
        if mask.estimator == "kfac":
            return masking.weight(name, delta.reshape(self.model.tensors[name].shape), mask.fraction).reshape(-1)
        for start in range(0, len(delta), CHUNK):
            masking.coordinates(name, start, delta[start : start + CHUNK], mask.fraction)
        return delta

    def _update(self, recipe: Recipe) -> Callable[[str], Chunked]:
        """The combined update, chunk by chunk: from the cache, kept for the next scale, or formed per tensor."""
        mask = recipe.effective_mask
        if recipe.is_bare and (mask is None or mask.estimator == "diagonal"):
            return self._one_difference(recipe.terms[0], mask)
        terms = sorted(recipe.terms, key=self._identity) if len(recipe.terms) > 1 else recipe.terms
        operator = find(recipe.operator)
        shared, each = recipe.resolved()
        each = {key: [values[recipe.terms.index(term)] for term in terms] for key, values in each.items()}
        identities = None
        if "seed" in shared:  # as the streaming engine names them, so that both draw the same numbers
            identities = [f"{self.trained[term].fingerprint}|{self.donors[term].fingerprint}" for term in terms]

        def formed(name: str) -> np.ndarray:
            shape = self.model.tensors[name].shape
            deltas = [self._masked(term, mask, name, self._delta(term, name)) for term in terms]
            if len(deltas) == 1 and recipe.is_bare:
                return deltas[0]
            inputs = Arrays(self._wide(self.model, name).reshape(shape), deltas, name, identities)
            return apply(inputs, build(operator, inputs, shared, each, False), rows_of(operator, shared, shape))

        return self._kept(recipe.unscaled(), formed)

    def _one_difference(self, term: int, mask: Mask | None) -> Callable[[str], Chunked]:
        """One update, masked by coordinates or not: formed as it is written, so that it is never held."""
        if mask is None:
            return lambda name: self._difference(term, name)
        masking = self._maskings[self._ranking(term, mask)]
        masking.prepare([mask.fraction])

        def of(name: str) -> Chunked:
            difference = self._difference(term, name)

            def chunked(start: int, theta: np.ndarray, out: np.ndarray) -> None:
                difference(start, theta, out)
                masking.coordinates(name, start, out, mask.fraction)

            return chunked

        return of

    def _kept(self, key: str, formed: Callable[[str], np.ndarray]) -> Callable[[str], Chunked]:
        if key not in self._cache and self._fits():
            self._keep(key, {name: formed(name).reshape(-1) for name in self.model.names})
        kept = self._cache.get(key)
        if kept is not None:
            self._cache.move_to_end(key)

        def of(name: str) -> Chunked:
            whole = formed(name).reshape(-1) if kept is None else kept[name]
            return lambda start, _, out: np.copyto(out, whole[start : start + len(out)])

        return of

    def _fits(self) -> bool:
        return sum(s.size * s.form.wide.itemsize for s in self.model.tensors.values()) <= self._cache_bytes

    def _keep(self, key: str, whole: dict[str, np.ndarray]) -> None:
        self._cache[key] = whole
        while len(self._cache) > 1 and sum(map(_bytes, self._cache.values())) > self._cache_bytes:
            self._cache.popitem(last=False)

    def _identity(self, term: int) -> tuple[str, str]:
        return self.trained[term].digest, self.donors[term].digest


def as_tensor(array: np.ndarray, form: Format) -> Tensor:
    """The same memory as a torch tensor."""
    return (
        torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if form.code == "BF16" else torch.from_numpy(array)
    )


def as_array(tensor: Tensor, form: Format) -> np.ndarray:
    """The same memory as a flat array in the format's storage."""
    flat = tensor.detach().view(-1)
    return flat.view(torch.int16).numpy().view(np.uint16) if form.code == "BF16" else flat.numpy()


def _bytes(tensors: Mapping[str, np.ndarray]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
