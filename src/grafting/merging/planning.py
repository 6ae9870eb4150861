"""From a recipe to a merge: opening the models, checking that they fit, settling every tensor's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grafting.errors import UserError
from grafting.merging.arrays import CHUNK
from grafting.merging.coefficients import Depth, resolve
from grafting.merging.engine import Donor, Job, Masking, Merge
from grafting.merging.mergefile import MergeFile, Model, byte_size
from grafting.merging.registry import Operator, check, find, has_points
from grafting.models.numerics import BY_NAME
from grafting.models.safefiles import SINGLE, Checkpoint, Planned, content_digest, same_content
from grafting.sensitivity.selection import HELD

#: With these, one unmasked delta of weight 1 and density 1 is the update itself.
_PLAIN = ("graft", "sum", "task_arithmetic", "magnitude", "ties", "breadcrumbs", "breadcrumbs_ties", "dare_linear",
          "dare_ties", "della", "della_linear", "magmax")  # fmt: skip
_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "embed_in.weight", "embed_out.weight")


@dataclass(frozen=True)
class Plan:
    """A merge ready to run: `files` maps output file names to the tensors in them."""

    merge: Merge
    reference: Checkpoint  # whose config, shapes and formats the output has
    files: Mapping[str, Sequence[Planned]]
    recipe: MergeFile
    models: Mapping[str, Checkpoint]  # as the recipe names them

    @property
    def nbytes(self) -> int:
        """Bytes of weights that will be written."""
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights of all models, read once."""
        return sum(t.nbytes for m in {id(m): m for m in self.models.values()}.values() for t in m.tensors.values())

    def peak_bytes(self, threads: int) -> int:
        """An estimate of the memory that the merge will take, the interpreter's 60 MiB included."""
        longest = max(int(np.prod(job.shape, dtype=np.int64)) for job in self.merge.jobs)
        wide = max(job.form.wide.itemsize for job in self.merge.jobs)
        chunks = (3 * len(self.models) + 6) * CHUNK * 8 * wide
        settings = [value for job in self.merge.jobs for value in job.each.get("density", ())]
        selects = self.recipe.operator.startswith(("ties", "magnitude", "breadcrumbs")) and min(settings) < 1
        selects = selects or (self.recipe.operator == "sce" and self.merge.jobs[0].shared["density"] < 1)
        held = 2 * min(longest, HELD) * wide if selects else 0
        return (60 << 20) + threads * (chunks + held)


def plan(recipe: MergeFile, root: Path = Path("."), masks: Any = None) -> Plan:
    """Open everything a recipe names (relative to `root`) and settle it. UserError for what does not fit.

    `masks`: a function (recipe, merge, reference) -> one `Masking` for every donor, needed if there is a mask.
    """
    operator = find(recipe.operator)
    opened: dict[Path, Checkpoint] = {}
    named: dict[str, Checkpoint] = {}

    def checkpoint(model: Model) -> Checkpoint:
        path = locate(model, root)
        if path.resolve() not in opened:
            opened[path.resolve()] = Checkpoint(path)
        named[str(model)] = opened[path.resolve()]
        return named[str(model)]

    base = checkpoint(recipe.base) if recipe.base is not None else None
    terms = [(checkpoint(term.model), term) for term in recipe.models]
    donors = [checkpoint(term.donor) if term.donor is not None else base for term in recipe.models]
    reference = base or terms[0][0]
    for other in [model for model, _ in terms] + [donor for donor in donors if donor is not None]:
        require_fitting(reference, other, recipe.embedding)
    points = has_points(operator, base is not None)
    order = list(range(len(terms)))
    if not operator.ordered and len(order) > 1:
        order.sort(key=_canonical([model for model, _ in terms], donors, [t.settings() for _, t in terms]))
    if points:
        anchor = terms[order[0]][0]
        pairs = [Donor(terms[i][0], anchor, terms[i][0].fingerprint) for i in order[1:]]
    else:
        anchor = base
        stochastic = "seed" in operator.shared
        pairs = [Donor(terms[i][0], donors[i], _identity(terms[i][0], donors[i]) if stochastic else "") for i in order]
    merge = Merge(operator, anchor, pairs, points)
    if recipe.mask is not None and 0 < recipe.mask.fraction < 1:
        found: list[Masking] = masks(recipe, merge, reference)
        merge = Merge(
            operator, anchor, [Donor(p.trained, p.donor, p.identity, m) for p, m in zip(pairs, found)], points
        )
    jobs = _jobs(recipe, operator, merge, reference, [terms[i][1] for i in order])
    planned = [Planned(job.name, job.form, job.shape) for job in jobs]
    files = _shards(planned, byte_size(recipe.shard_size))
    return Plan(Merge(operator, anchor, merge.donors, points, jobs), reference, files, recipe, named)


def locate(model: Model, root: Path) -> Path:
    """The folder of a model. UserError says how to get it if it is not here."""
    if model.path is not None:
        return root / model.path.expanduser()
    if model.store is not None:
        folder = root / "store" / model.store
        if not folder.is_dir():
            raise UserError(
                f"store/{model.store} is not here: `dvc pull` fetches it, `grafting status` says where it is"
            )
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*"]
        return Path(snapshot_download(model.hub, revision=model.revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UserError(f"{model} cannot be fetched from the Hub: {str(error).splitlines()[0]}") from None


def require_fitting(reference: Checkpoint, other: Checkpoint, embedding: str = "error") -> None:
    """UserError unless both hold the same tensors in the same shapes; embeddings may differ in rows by policy."""
    for key in ("model_type",):
        ours, theirs = reference.config.get(key), other.config.get(key)
        if ours != theirs and None not in (ours, theirs):
            raise UserError(f"{other.path} is a {theirs}, {reference.path} a {ours}: they must be one architecture")
    missing = sorted(set(reference.tensors) - set(other.tensors))
    extra = sorted(set(other.tensors) - set(reference.tensors))
    if missing or extra:
        what = f"lacks tensor {missing[0]}" if missing else f"has an additional tensor {extra[0]}"
        more = len(missing) + len(extra) - 1
        raise UserError(
            f"{other.path} {what}{f' (and {more} more differ)' if more else ''} compared with {reference.path}: "
            "donor, trained and deployed must be one architecture"
        )
    for name in reference.names:
        ours, theirs = reference.tensors[name].shape, other.tensors[name].shape
        if ours == theirs:
            continue
        rows = name.endswith(_EMBEDDINGS) and len(ours) == len(theirs) and ours[1:] == theirs[1:]
        if rows and ((embedding == "crop" and theirs[0] > ours[0]) or (embedding == "pad" and theirs[0] < ours[0])):
            continue
        advice = (
            "`embedding: crop` cuts a model with more rows, `embedding: pad` lets a model with fewer rows leave the "
            "others as they are; be sure that the tokens mean the same"
            if rows
            else "give checkpoints of one lineage"
        )
        raise UserError(f"tensor {name} has shape {ours} in {reference.path} and {theirs} in {other.path}: {advice}")


# ---- inside ----


def _identity(trained: Checkpoint, donor: Checkpoint) -> str:
    return f"{trained.fingerprint}|{donor.fingerprint}"


def _canonical(models: list[Checkpoint], donors: list[Checkpoint | None], settings: list[dict]):
    """A key that puts models in an order of their contents, wherever they lie and however they were listed."""
    prints = {model.fingerprint: model.path.resolve() for model in models}
    full = len(prints) < len({model.path.resolve() for model in models})  # alike in all samples: read everything

    def key(i: int) -> tuple:
        content = content_digest(models[i]) if full else models[i].fingerprint
        donor = donors[i]
        return content, donor.fingerprint if donor is not None else "", repr(sorted(settings[i].items()))

    return key


def _jobs(recipe: MergeFile, operator: Operator, merge: Merge, reference: Checkpoint, terms: list) -> list[Job]:
    depth = Depth(reference.names)
    plain = operator.name in _PLAIN and len(merge.donors) == 1 and (recipe.mask is None or recipe.mask.fraction == 0)
    removed = recipe.mask is not None and recipe.mask.fraction == 1
    jobs = []
    for name in reference.names:
        at = depth.of(name)

        def settled(setting: str, value: Any, where: str, name=name, at=at) -> Any:
            return check(operator, setting, resolve(value, name, at, where), where)

        shared = {
            key: settled(key, recipe.settings.get(key, default), f"settings.{key}")
            for key, default in operator.shared.items()
        }
        each = {
            key: [
                settled(key, term.settings().get(key, recipe.settings.get(key, default)), f"{term.model}: {key}")
                for term in terms
            ]
            for key, default in operator.each.items()
        }
        if operator.name.startswith("della"):
            _check_epsilon(each)
        scale = check(operator, "scale", resolve(recipe.scale, name, at, "scale"), "scale")
        form = reference.tensors[name].form if recipe.dtype == "as_base" else BY_NAME[recipe.dtype]
        shape = reference.tensors[name].shape
        copy = _verbatim(operator, merge, each, shared, scale, plain, removed)
        if copy is not None and copy.tensors[name].shape != shape:
            copy = None
        jobs.append(Job(name, form, shape, shared, each, scale, copy))
    if merge.points and any(job.scale != 1 for job in jobs):
        raise UserError(f"scale: operator {operator.name} combines models, not updates: it has no scale")
    return jobs


def _check_epsilon(each: Mapping[str, Sequence]) -> None:
    for density, epsilon in zip(each["density"], each["epsilon"]):
        if density < 1 and not (0 <= epsilon < density and density + epsilon < 1):
            raise UserError(f"epsilon {epsilon}: density {density} - epsilon and + epsilon must lie in (0, 1)")


def _verbatim(operator, merge: Merge, each, shared, scale: float, plain: bool, removed: bool) -> Checkpoint | None:
    """The model whose tensor the result is, where that is so in mathematics."""
    if scale == 0 or removed:
        return merge.anchor
    if operator.name == "slerp" and shared["t"] in (0.0, 1.0) and scale == 1:
        return merge.anchor if shared["t"] == 0 else merge.donors[0].trained
    if not merge.donors and not merge.points:
        return merge.anchor
    if plain and scale == 1 and set(each.get("weight", [1.0])) == {1.0} and set(each.get("density", [1.0])) == {1.0}:
        pair = merge.donors[0]
        if same_content(pair.donor, merge.anchor):
            return pair.trained
    return None


def _shards(tensors: Sequence[Planned], limit: int) -> dict[str, list[Planned]]:
    """Tensors in the order of their names, in files of at most `limit` bytes (a larger tensor stands alone)."""
    groups: list[list[Planned]] = [[]]
    for tensor in sorted(tensors, key=lambda t: t.name):
        if groups[-1] and sum(t.nbytes for t in groups[-1]) + tensor.nbytes > limit:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    n = len(groups)
    return {f"model-{i:05d}-of-{n:05d}.safetensors": group for i, group in enumerate(groups, 1)}


def index_of(files: Mapping[str, Sequence[Planned]]) -> dict | None:
    """The content of the index file, None for a single file."""
    if set(files) == {SINGLE}:
        return None
    where = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
