"""Many grafts from one reading: the same updates under many scales, masks and operators."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from grafting.errors import UserError
from grafting.merging.operators import combine
from grafting.merging.recipe import Recipe
from grafting.merging.weights import Weights, require_same_tensors
from grafting.sensitivity.masks import Mask, apply_mask, mask_report

_CACHE_BYTES = 2 << 30


class Sweep:
    """theta = theta_0 + scale * combine_i(mask(trained_i - donor_i)) for any number of recipes.

    Arithmetic is one precision wider than theta_0 (float64 for float32, float32 for 16-bit), with one
    rounding at the end. Terms are combined in the order of their contents' hashes, so the order in which
    donors are listed changes no bit. A coordinate whose update is 0 keeps theta_0's bits.
    These need no arithmetic, and are exact: scale 0 and a mask of fraction 1 give theta_0; scale 1 of a
    single unmasked term whose donor is the deployed model itself (by path or bytes) gives `trained`.

    Combined updates are kept for the next scale while they fit into `cache_bytes` (the newest always,
    when it is masked, since masks rank the whole model); larger unmasked ones are formed tensor by
    tensor from memory-mapped files, so a merge of large models needs the memory of one tensor.

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
        opened: dict[Path, Weights] = {}  # one donor often serves many terms

        def weights(path: Path) -> Weights:
            key = Path(path).resolve()
            if key not in opened:
                opened[key] = Weights(path)
                require_same_tensors(self.model, opened[key])
            return opened[key]

        self.model = opened[Path(model_path).resolve()] = Weights(model_path)
        self.trained = [weights(path) for path in trained]
        self.donors = [weights(path) for path in donors]
        self.sensitivity = dict(sensitivity or {})
        self._cache: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._cache_bytes = cache_bytes

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

    def state(self, recipe: Recipe | Mapping | None) -> dict[str, Tensor]:
        """All tensors of the graft, in theta_0's dtypes, by name. None is the deployed model itself."""
        return dict(self.tensors(recipe))

    def tensors(
        self, recipe: Recipe | Mapping | None, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The graft tensor by tensor (all, or those named), each a fresh tensor in theta_0's dtype."""
        names = self.model.names if names is None else names
        recipe = None if recipe is None else self._parse(recipe)
        verbatim = self._verbatim(recipe)
        update = self._update(recipe) if verbatim is None else None
        for name in names:
            dtype = self.model.dtypes[name]
            if verbatim is not None:
                yield name, verbatim.tensor(name).to(dtype, copy=True)
                continue
            theta, delta = self.model.tensor(name), update(name)
            result = (theta.to(delta.dtype) + delta * recipe.scale).to(dtype)  # not alpha=: fusing varies
            if not torch.isfinite(result).all():
                raise UserError(f"tensor {name} overflows {dtype} at scale {recipe.scale}: use a smaller one")
            yield name, torch.where(delta == 0, theta, result)  # -0 + 0 would be +0

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
        with torch.no_grad():
            for name, tensor in self.tensors(recipe):
                if live[name].shape != tensor.shape:
                    raise UserError(
                        f"tensor {name} has shape {tuple(live[name].shape)} in the live model, "
                        f"{tuple(tensor.shape)} in {self.model.path}: load it from there"
                    )
                live[name].copy_(tensor)

    def mask_report(self, recipe: Recipe | Mapping) -> list[dict]:
        """Per term of a masked recipe: share of the update's squared norm the mask removes, per tensor."""
        recipe = self._parse(recipe)
        reports = []
        for term in recipe.terms:
            update = {name: self._delta(term, name) for name in self.model.names}
            reports.append(mask_report(update, self._masked(update, recipe.mask)))
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

    def _verbatim(self, recipe: Recipe | None) -> Weights | None:
        """The directory whose tensors are the graft as they stand, if there is one."""
        mask = recipe.effective_mask if recipe else None
        if recipe is None or recipe.scale == 0 or (mask and mask.fraction == 1):
            return self.model
        if recipe.scale == 1 and len(recipe.terms) == 1 and mask is None and recipe.density in (None, 1):
            donor = self.donors[recipe.terms[0]]
            if donor is self.model or donor.digest == self.model.digest:
                return self.trained[recipe.terms[0]]
        return None

    def _wide(self, name: str) -> torch.dtype:
        """The dtype of the arithmetic on one tensor: one precision wider than the output."""
        return torch.float64 if self.model.dtypes[name].itemsize >= 4 else torch.float32

    def _delta(self, term: int, name: str) -> Tensor:
        """trained - donor of one tensor, wide."""
        wide = self._wide(name)
        return self.trained[term].tensor(name).to(wide) - self.donors[term].tensor(name).to(wide)

    def _masked(self, update: dict[str, Tensor], mask: Mask | None) -> dict[str, Tensor]:
        return update if mask is None else apply_mask(update, mask, self.sensitivity)

    def _update(self, recipe: Recipe) -> Callable[[str], Tensor]:
        """The combined update, by tensor name: from the cache, kept for the next scale, or streamed."""
        key = recipe.unscaled()
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key].__getitem__
        mask, names = recipe.effective_mask, self.model.names
        terms = sorted(recipe.terms, key=self._identity) if len(recipe.terms) > 1 else recipe.terms

        def streamed(name: str) -> Tensor:
            return combine(recipe.operator, [self._delta(term, name) for term in terms], recipe.density)

        if mask is None:
            size = sum(math.prod(self.model.shapes[name]) * self._wide(name).itemsize for name in names)
            if size > self._cache_bytes:
                return streamed
            whole = {name: streamed(name) for name in names}
        else:
            masked = [self._masked({name: self._delta(term, name) for name in names}, mask) for term in terms]
            whole = {
                name: combine(recipe.operator, [update[name] for update in masked], recipe.density) for name in names
            }
        self._cache[key] = whole
        while len(self._cache) > 1 and sum(map(_bytes, self._cache.values())) > self._cache_bytes:
            self._cache.popitem(last=False)
        return whole.__getitem__

    def _identity(self, term: int) -> tuple[str, str]:
        return self.trained[term].digest, self.donors[term].digest


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
