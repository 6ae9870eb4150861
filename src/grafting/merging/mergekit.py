"""Reading a mergekit configuration (its common methods) as a recipe of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grafting.errors import UserError
from grafting.merging.mergefile import MergeFile
from grafting.merging.registry import OPERATORS

#: mergekit's methods that are ours under the same name.
METHODS = (
    "linear", "slerp", "nuslerp", "multislerp", "karcher", "task_arithmetic", "ties", "dare_linear", "dare_ties",
    "breadcrumbs", "breadcrumbs_ties", "della", "della_linear", "sce", "model_stock", "nearswap", "passthrough",
)  # fmt: skip
_KEYS = {"merge_method", "models", "base_model", "parameters", "dtype", "out_dtype", "tokenizer_source", "slices"}
_RENAMED = {
    "nuslerp_flatten": "flatten",
    "nuslerp_row_wise": "row_wise",
    "normalize_weights": "normalize",
    "select_topk": "density",
}
#: Settings that change no result of ours: int8_mask only saves memory there, eps only guards divisions.
_IGNORED = {"int8_mask", "eps"}


def from_mergekit(data: Mapping, where: str = "mergekit file") -> MergeFile:
    """The recipe of a mergekit configuration. UserError names every key that is not supported."""
    unknown = sorted(set(data) - _KEYS)
    if unknown:
        raise UserError(f"{where}: not supported: {', '.join(unknown)} (supported: {', '.join(sorted(_KEYS))})")
    method = data.get("merge_method")
    if method not in METHODS:
        raise UserError(f"{where}: merge_method {method!r} is not supported; there are {', '.join(METHODS)}")
    operator, base = OPERATORS[method], data.get("base_model")
    entries = _entries(data, where)
    recipe: dict[str, Any] = {"operator": method, "settings": {}, "models": []}
    if "rescale" in operator.shared and operator.shared["rescale"] != "none":
        recipe["settings"]["rescale"] = "l1"  # mergekit's default where the paper's is another
    for name, value in (data.get("parameters") or {}).items():
        if name in _IGNORED:
            continue
        key, value = _setting(method, name, _value(value, f"{where}: parameters.{name}"))
        if key == "lambda":
            recipe["scale"] = value
        elif key in operator.shared or key in operator.each:
            recipe["settings"][key] = value
        else:
            raise UserError(f"{where}: parameters.{name} is not supported for merge_method {method}")
    for i, entry in enumerate(entries):
        if set(entry) - {"model", "parameters"} or "model" not in entry:
            odd = sorted(set(entry) - {"model", "parameters"}) or ["an entry without `model`"]
            raise UserError(f"{where}: models.{i}: not supported: {', '.join(odd)}")
        if base is not None and entry["model"] == base and operator.base != "none":
            continue  # the base may be listed among the models; it has no settings there
        term = {"model": _model(entry["model"], where)}
        for name, value in (entry.get("parameters") or {}).items():
            if name in _IGNORED:
                continue
            if name not in operator.each:
                raise UserError(f"{where}: models.{i}.parameters.{name} is not supported for merge_method {method}")
            term[name] = _value(value, f"{where}: models.{i}.parameters.{name}")
        recipe["models"].append(term)
    if base is not None:
        recipe["base"] = _model(base, where)
    dtype = data.get("out_dtype") or data.get("dtype")
    if dtype is not None:
        recipe["dtype"] = dtype  # the arithmetic is wider anyway
    source = data.get("tokenizer_source")
    if source == "union":
        raise UserError(f"{where}: tokenizer_source: union is not supported; name the model whose tokenizer to take")
    if source not in (None, "base"):
        recipe["tokenizer"] = _model(source, where)
    return MergeFile.parse(recipe, where)


def _entries(data: Mapping, where: str) -> list[Mapping]:
    """The list of models; one slice over all layers of every model says the same."""
    if ("models" in data) == ("slices" in data):
        raise UserError(f"{where}: exactly one of `models` and `slices` must be given")
    if "models" in data:
        return list(data["models"])
    slices = data["slices"]
    if len(slices) != 1 or set(slices[0]) - {"sources"}:
        raise UserError(f"{where}: slices: only one slice with `sources` over all layers is supported (no stacking)")
    sources = slices[0]["sources"]
    if len({tuple(source.get("layer_range", ())) for source in sources}) != 1 or (
        sources[0].get("layer_range", [0])[0] != 0
    ):
        raise UserError(f"{where}: slices: the sources' layer_range must be the same and begin at 0")
    return [{key: value for key, value in source.items() if key != "layer_range"} for source in sources]


def _setting(method: str, name: str, value: Any) -> tuple[str, Any]:
    if name == "rescale":
        return name, ("l1" if value else "none")
    return _RENAMED.get(name, name), value


def _value(value: Any, where: str) -> Any:
    """mergekit's {filter, value} entries as ours: a filter is a part of the tensor's name."""
    if isinstance(value, Mapping):
        value = [value]
    if not (isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value)):
        return value
    entries = []
    for entry in value:
        if set(entry) - {"filter", "value"}:
            raise UserError(f"{where}: not supported: {', '.join(sorted(set(entry) - {'filter', 'value'}))}")
        part = entry.get("filter")
        glob = {} if part in (None, "*") else {"match": f"*{_escaped(part)}*"}
        entries.append({**glob, "value": entry["value"]})
    return entries


def _escaped(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _model(value: Any, where: str) -> Any:
    """A model as mergekit writes it: a path, or a Hub id with @revision."""
    if isinstance(value, Mapping):
        inner = value.get("model", value)
        if set(value) - {"model"}:
            raise UserError(f"{where}: not supported in a model: {', '.join(sorted(set(value) - {'model'}))}")
        value = inner.get("path") if isinstance(inner, Mapping) else inner
    if not isinstance(value, str):
        raise UserError(f"{where}: a model must be a path or a name (got {value!r})")
    if "+" in value:
        raise UserError(f"{where}: {value}: adapters (model+lora) are not supported: merge the adapter first")
    if "@" in value:
        hub, _, revision = value.partition("@")
        return {"hub": hub, "revision": revision}
    return value
