"""Merge operators: mergekit's numbers, a float64 reference, and the identities that must hold bit for bit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from grafting.errors import UserError
from grafting.merging import operators
from grafting.merging.arrays import Arrays, Uniforms, apply
from grafting.merging.engine import run
from grafting.merging.mergefile import MergeFile
from grafting.merging.mergekit import METHODS, from_mergekit
from grafting.merging.planning import plan
from grafting.merging.registry import OPERATORS, table
from grafting.models.numerics import BY_NAME, FORMATS, is_finite, largest_magnitude, narrow, widen
from grafting.models.safefiles import ShardFile
from grafting.sensitivity.selection import Near

MERGEKIT = json.loads((Path(__file__).parent / "fixtures" / "mergekit.json").read_text())
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def write_model(folder, tensors, dtype=torch.float32, files=1):
    """A directory that the engine takes for a model: any tensors, in one file or several."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "test"}))
    tensors = {name: torch.as_tensor(np.asarray(t)).to(dtype).contiguous() for name, t in tensors.items()}
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    where = {name: f"model-{i % files}.safetensors" for i, name in enumerate(sorted(tensors, reverse=True))}
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def merged(recipe, root, threads=1):
    """The tensors of a merge, without the directory around them."""
    planned = plan(recipe if isinstance(recipe, MergeFile) else MergeFile.parse(recipe), root)
    out = root / f"out{len(list(root.glob('out*')))}"
    out.mkdir()
    shards = {file: ShardFile(out / file, tensors) for file, tensors in planned.files.items()}
    where = {t.name: shards[file] for file, tensors in planned.files.items() for t in tensors}
    run(planned.merge, where, threads, lambda n: None)
    for shard in shards.values():
        shard.close()
    return {name: t for file in shards for name, t in load_file(out / file).items()}


def bits(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(bits(one[n]), bits(other[n])) for n in one)


# ---- mergekit's numbers ----


def mergekit_config(case, root):
    """The case as the YAML that mergekit was given."""
    base = case.get("base_model")
    models = [m for m in case["models"] if m != base] if case["method"] != "slerp" else case["models"]
    entries = [{"model": m, "parameters": case.get("model_parameters", {}).get(m, {})} for m in models]
    config = {"merge_method": case["method"], "models": entries, "parameters": case.get("global_parameters", {})}
    return config | ({"base_model": base} if base else {})


def certain(case, tensor):
    """Where mergekit's choice among equal magnitudes at a threshold (which it leaves open) plays no part."""
    base = np.array(MERGEKIT["inputs"]["base"][tensor])
    sure = np.ones(base.shape, bool)
    for model, chosen in case.get("model_parameters", {}).items():
        if "density" not in chosen:
            continue
        size = np.abs(np.array(MERGEKIT["inputs"][model][tensor]) - base)
        ordered, n = np.sort(size.reshape(-1)), size.size
        target = int(chosen["density"] * n)
        top = int(chosen.get("gamma", 0) * n)
        for cut in {n - target - top, n - top} - {0, n}:
            if ordered[cut - 1] == ordered[cut]:
                sure &= size != ordered[cut]
    return sure


@pytest.mark.parametrize("case", MERGEKIT["cases"], ids=lambda case: case["case"])
def test_agrees_with_mergekit(case, tmp_path):
    for name in MERGEKIT["inputs"]:
        write_model(tmp_path / name, MERGEKIT["inputs"][name], DTYPES[case["input_dtype"]])
    config = mergekit_config(case, tmp_path)
    if case["method"] not in METHODS:
        with pytest.raises(UserError, match=f"'{case['method']}' is not supported"):
            from_mergekit(config)
        return
    result = merged(from_mergekit(config), tmp_path)
    stochastic = case["method"].startswith(("dare", "della"))
    for tensor, expected in case["output"].items():
        ours, theirs = result[tensor].double().numpy(), np.array(expected["data"])
        assert result[tensor].dtype == DTYPES[expected["dtype"]]
        if stochastic:
            continue
        sure = certain(case, tensor)
        assert sure.sum() >= 4
        exact = case["input_dtype"] == "float32"
        # mergekit's own arithmetic in bfloat16 loses bits at every step
        tolerance = {"rtol": 1e-6, "atol": 1e-7} if exact else {"rtol": 2.0**-6, "atol": 2.0**-8}
        np.testing.assert_allclose(ours[sure], theirs[sure], **tolerance)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_stochastic_operators_agree_with_mergekit_on_average(method, tmp_path):
    """Each value lies among those a draw can give, and kept shares are as asked, as in mergekit's definition."""
    rng = np.random.default_rng(0)
    base, delta = rng.normal(size=(40, 100)), rng.normal(size=(40, 100))
    write_model(tmp_path / "base", {"m": base})
    write_model(tmp_path / "a", {"m": base + delta})
    parameters = {"weight": 0.5, "density": 0.4} | ({"epsilon": 0.1} if method.startswith("della") else {})
    config = {
        "merge_method": method,
        "base_model": "base",
        "models": [{"model": "a", "parameters": parameters}],
        "parameters": {"normalize": False},
    }
    theta = load_file(tmp_path / "base" / "model.safetensors")["m"].double().numpy()
    change = load_file(tmp_path / "a" / "model.safetensors")["m"].double().numpy() - theta
    kept, means = [], []
    for seed in range(40):
        recipe = from_mergekit(config)
        update = merged(recipe.model_copy(update={"settings": {**recipe.settings, "seed": seed}}), tmp_path)["m"]
        update = update.double().numpy() - theta
        support = np.abs(update) > 1e-9
        kept.append(support)
        means.append(update)
        # the default of mergekit: the L1 norm is that of the whole delta
        assert np.abs(update).sum() == pytest.approx(0.5 * np.abs(change).sum(), rel=1e-5)
        factor = 0.5 * np.abs(change).sum() / np.abs(change * support).sum()
        np.testing.assert_allclose(update[support], 0.5 * factor / 0.5 * change[support], rtol=1e-4)
    share = np.mean(kept, axis=0)
    assert share.mean() == pytest.approx(0.4, abs=0.005)
    if method.startswith("della"):
        ranks = np.argsort(np.argsort(np.abs(change), axis=1), axis=1)
        low, high = share[ranks < 10].mean(), share[ranks >= 90].mean()
        assert low == pytest.approx(0.31, abs=0.02) and high == pytest.approx(0.49, abs=0.02)
    else:
        slope = (np.mean(means, axis=0) * change).sum() / (change**2).sum()
        assert slope == pytest.approx(0.5, rel=0.02)  # unbiased


# ---- a float64 reference ----


def ulp(values, dtype):
    digits = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[dtype]
    least = {torch.float32: -149, torch.bfloat16: -133, torch.float16: -24}[dtype]
    return 2.0 ** np.maximum(np.floor(np.log2(np.maximum(np.abs(values), 1e-300))) + 1 - digits, least)


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("operator", ["graft", "linear", "task_arithmetic", "slerp", "ties", "karcher", "model_stock"])
def test_within_half_a_unit_of_a_float64_reference(operator, dtype, tmp_path):
    rng = np.random.default_rng(1)
    base = rng.normal(size=(70, 1000)) * 0.02
    for i, name in enumerate(("base", "a", "b", "c")):
        tensor = base + (rng.normal(size=base.shape) * 0.004 if i else 0)
        write_model(tmp_path / name, {"layers.0.w": tensor}, dtype)
    v, a, b, c = (
        load_file(tmp_path / n / "model.safetensors")["layers.0.w"].double().numpy() for n in ("base", "a", "b", "c")
    )
    base_and = {"base": "base", "models": [{"model": "a"}, {"model": "b"}]}
    if operator == "graft":
        recipe = {"base": "base", "models": [{"model": "a", "donor": "b"}], "scale": 0.37}
        exact = v + 0.37 * (a - b)
    elif operator == "linear":
        weights = (0.5, 0.3, 1.7)
        recipe = {"models": [{"model": n, "weight": w} for n, w in zip("abc", weights)]}
        exact = (0.5 * a + 0.3 * b + 1.7 * c) / sum(weights)
    elif operator == "task_arithmetic":
        recipe = base_and | {"scale": 0.9, "settings": {"weight": 0.7}}
        exact = v + 0.9 * (0.7 * (a - v) + 0.7 * (b - v))
    elif operator == "slerp":
        recipe = {"base": "base", "models": [{"model": "a"}], "settings": {"t": 0.3}}
        angle = np.arccos((v * a).sum() / np.linalg.norm(v) / np.linalg.norm(a))
        exact = (np.sin(0.7 * angle) * v + np.sin(0.3 * angle) * a) / np.sin(angle)
    elif operator == "ties":
        recipe = base_and | {"settings": {"density": 0.2}, "scale": 0.8}
        parts = []
        for d in (a - v, b - v):
            order = np.argsort(-np.abs(d).reshape(-1), kind="stable")[: int(0.2 * d.size)]
            part = np.zeros(d.size)
            part[order] = d.reshape(-1)[order]
            parts.append(part.reshape(d.shape))
        positive = sum(parts) >= 0
        agree = [(p > 0) & positive | (p < 0) & ~positive for p in parts]
        exact = v + 0.8 * sum(p * g for p, g in zip(parts, agree)) / np.maximum(1, sum(g.astype(int) for g in agree))
    elif operator == "karcher":
        recipe = {"models": [{"model": n} for n in "abc"], "settings": {"tol": 1e-12, "max_iter": 50}}
        units = [x / np.linalg.norm(x) for x in (a, b, c)]
        mean = sum(units) / np.linalg.norm(sum(units))
        for _ in range(50):
            logs = []
            for u in units:
                cosine = (u * mean).sum()
                logs.append(np.arccos(cosine) / np.sqrt(1 - cosine**2) * (u - cosine * mean))
            step = sum(logs) / 3
            size = np.linalg.norm(step)
            mean = np.cos(size) * mean + np.sin(size) * step / max(size, 1e-300)
        exact = mean * np.mean([np.linalg.norm(x) for x in (a, b, c)])
    else:
        recipe = base_and
        cosine = ((a - v) * (b - v)).sum() / np.linalg.norm(a - v) / np.linalg.norm(b - v)
        t = 2 * cosine / (1 + cosine)
        exact = v + t * ((a - v) + (b - v)) / 2
    result = merged({"operator": operator, **recipe}, tmp_path)["layers.0.w"]
    assert result.dtype == dtype
    error = np.abs(result.double().numpy() - exact) / ulp(exact, dtype)
    # where the terms cancel to less than a 500th, the error of the wide arithmetic shows beside one rounding
    whole = np.abs(exact) > np.abs(v) / 500
    assert error[whole].max() <= 0.51
    assert whole.mean() > 0.99


# ---- formats ----


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
@settings(max_examples=200, deadline=None)
def test_formats_round_as_torch_does(values):
    single = np.array(values, np.float32)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        expected = torch.from_numpy(single.copy()).to(dtype)
        out = narrow(single.copy(), BY_NAME[name], np.empty(len(single), BY_NAME[name].storage))
        assert np.array_equal(out.view(np.int16), bits(expected).numpy())
        assert is_finite(out, BY_NAME[name]) == bool(torch.isfinite(expected).all())
        assert largest_magnitude(out, BY_NAME[name]) == float(expected.float().abs().max())
        wide = widen(out, BY_NAME[name], np.empty(len(out), np.float32))
        assert np.array_equal(wide.view(np.int32), expected.float().view(torch.int32).numpy())


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=50))
@settings(max_examples=200, deadline=None)
def test_float64_to_bfloat16_is_one_rounding(values):
    double = np.array(values)
    out = narrow(double.copy(), FORMATS["BF16"], np.empty(len(double), np.uint16))
    near = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).double().numpy()
    step = ulp(double, torch.bfloat16)
    assert (np.abs(near - double) <= step / 2).all()


def test_halfway_cases_of_float64_to_bfloat16():
    """A hair above the middle rounds up, although float32 would call it the middle."""
    middle = 1 + 2.0**-8
    doubles = np.array([middle, middle + 2.0**-40, middle - 2.0**-40, middle + 2.0**-7, -middle - 2.0**-40])
    out = narrow(doubles, FORMATS["BF16"], np.empty(5, np.uint16))
    near = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).tolist()
    assert near == [1.0, 1 + 2.0**-7, 1.0, 1 + 2.0**-6, -1 - 2.0**-7]


# ---- identities, bit for bit ----

NEEDED = {
    "nearswap": {"t": 0.01},
    "slerp": {"t": 0.3},
    "nuslerp": {"weight": 0.7},
    "multislerp": {"weight": 0.7},
    "ema": {"decay": 0.9},
}
SPARSE = {"density": 0.4}


def recipe_of(name, models, based=True, **more):
    operator = OPERATORS[name]
    low, high = operator.models
    models = models[: high or len(models)]
    chosen = dict(NEEDED.get(name, {}))
    if "density" in {**operator.each, **operator.shared}:
        chosen |= SPARSE
    recipe = {"operator": name, "models": [{"model": m} for m in models], "settings": chosen} | more
    if operator.base == "required" or (operator.base == "optional" and based):
        recipe["base"] = "base"
    return recipe


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("name", OPERATORS)
@given(data=st.data())
@settings(max_examples=3, deadline=None)
def test_a_model_merged_with_itself_is_itself(name, dtype, data, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("self")
    if dtype == torch.float16:
        numbers = st.floats(-60000, 60000, width=16)
    else:
        numbers = st.floats(-(2.0**100), 2.0**100, width=32)
    rows = data.draw(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=5))
    tensors = {"layers.0.m": np.array(rows), "v": np.array(rows[0] + [-0.0, 0.0])}
    for model in ("base", "a", "b", "c"):
        write_model(tmp_path / model, tensors, dtype)
    expected = load_file(tmp_path / "a" / "model.safetensors")
    for based in (True, False):
        assert same(merged(recipe_of(name, ["a", "b", "c"], based), tmp_path), expected)


@pytest.mark.parametrize("name", [name for name in OPERATORS if OPERATORS[name].base == "required"])
def test_zero_scale_is_the_base_and_zero_deltas_too(name, tmp_path):
    rng = np.random.default_rng(2)
    for model in ("base", "a", "b", "c"):
        write_model(tmp_path / model, {"layers.0.m": rng.normal(size=(30, 7)), "v": [-0.0, 0.0, 1.0]})
    base = load_file(tmp_path / "base" / "model.safetensors")
    recipe = recipe_of(name, ["a", "b", "c"], scale=0)
    assert same(merged(recipe, tmp_path), base)
    # each model is its own donor: all deltas are zero, at any scale
    for term in recipe["models"]:
        term["donor"] = term["model"]
    assert same(merged(recipe | {"scale": -3.7}, tmp_path), base)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_whole_graft_on_the_deployed_model_is_the_trained_one(dtype, tmp_path):
    """Where the numbers are so far apart that base + (trained - base) would not be it."""
    write_model(tmp_path / "base", {"v": [2.0**15, 1.0, -0.0]}, dtype)
    write_model(tmp_path / "copy", {"v": [2.0**15, 1.0, -0.0]}, dtype)
    write_model(tmp_path / "a", {"v": [2.0**-14 * 1.5, -0.0, 3.0]}, dtype)
    expected = load_file(tmp_path / "a" / "model.safetensors")
    for donor in ({}, {"donor": "base"}, {"donor": "copy"}):
        for name in ("graft", "sum", "task_arithmetic", "ties", "dare_linear", "della", "magmax"):
            recipe = {"operator": name, "base": "base", "models": [{"model": "a"} | donor]}
            assert same(merged(recipe, tmp_path), expected)
    slerp = {"operator": "slerp", "base": "base", "models": [{"model": "a"}]}
    assert same(merged(slerp | {"settings": {"t": 1}}, tmp_path), expected)
    assert same(merged(slerp | {"settings": {"t": 0}}, tmp_path), load_file(tmp_path / "base/model.safetensors"))


@pytest.mark.parametrize("name", OPERATORS)
def test_order_sharding_and_threads_change_no_bit(name, tmp_path):
    rng = np.random.default_rng(3)
    base = rng.normal(size=(130, 300))
    for files in (1, 3):
        rng = np.random.default_rng(4)
        for model in ("base", "a", "b", "c"):
            tensors = {
                "layers.0.m": base + rng.normal(size=base.shape) * 0.1,
                "layers.1.m": rng.normal(size=(3, 5, 4)),
                "v": rng.normal(size=9),
            }
            write_model(tmp_path / str(files) / model, tensors, files=files)
    one, more = tmp_path / "1", tmp_path / "3"
    weights = {"a": 0.3, "b": 0.9, "c": 1.7}
    for based in (True, False):
        recipe = recipe_of(name, ["a", "b", "c"], based, shard_size=200_000)
        if "weight" in OPERATORS[name].each:
            for term in recipe["models"]:
                term["weight"] = weights[term["model"]]
        expected = merged(recipe, one)
        assert same(merged(recipe, more, threads=3), expected)
        assert same(merged(recipe | {"shard_size": "1KB"}, one, threads=2), expected)
        if not OPERATORS[name].ordered:
            assert same(merged(recipe | {"models": recipe["models"][::-1]}, one), expected)
            again = (
                merged(recipe | {"settings": recipe["settings"] | {"seed": 5}}, one)
                if ("seed" in OPERATORS[name].shared)
                else None
            )
            assert again is None or not same(again, expected)


DELTAS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "few values": lambda rng, n: np.round(rng.normal(size=n), 1),
    "mostly zero": lambda rng, n: np.where(rng.random(n) < 0.01, rng.normal(size=n), 0.0),
    "uneven": lambda rng, n: rng.normal(size=n) * np.repeat(rng.random(n // 500) ** 4, 500),
    "constant": lambda rng, n: np.full(n, -0.5),
    "ascending": lambda rng, n: np.arange(n) / n,
}


@pytest.mark.parametrize("kind", DELTAS)
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_trims_of_large_tensors_are_those_of_a_sort(kind, wide, monkeypatch):
    """Above 131 072 entries thresholds come from a sample and one pass; among equal magnitudes the first stay."""
    n, densities = 400_000, [0.5, 0.013]
    deltas = [DELTAS[kind](np.random.default_rng(i), n).astype(wide) for i in range(2)]
    if kind == "constant":  # more near the threshold than are kept: found in further passes
        monkeypatch.setattr(Near, "MOST", 1000)
    inputs = Arrays(np.zeros(n, wide), deltas)
    found = apply(inputs, operators.magnitude(inputs, [1.0, 1.0], densities))
    expected = np.zeros(n, wide)
    for delta, density in zip(deltas, densities):
        kept = np.argsort(-np.abs(delta), kind="stable")[: int(density * n)]
        expected[kept] += delta[kept]
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("density, share", [(0.5, 0.5), (0.1, 6554 / 65536), (1e-9, 1 / 65536)])
def test_dare_keeps_by_16_random_bits_the_same_in_any_order(density, share):
    n = 1 << 20
    inputs = Arrays(np.zeros(n, np.float32), [np.ones(n, np.float32)], "some.weight")
    piece = operators.dare(inputs, [1.0], [density], seed=3)
    whole = piece(0, np.zeros(n, np.float32), [np.ones(n, np.float32)])
    assert set(np.unique(whole)) == {np.float32(0), np.float32(1 / share)}
    assert abs((whole > 0).mean() - share) < 5 * np.sqrt(share / n)
    for start, count in ((70_001, 13), (3, 5), (n - 2, 2), (2, 131_072)):
        assert np.array_equal(piece(start, None, [np.ones(count, np.float32)]), whole[start : start + count])


def test_trajectory_averages_follow_the_listed_order(tmp_path):
    for i, model in enumerate("abcd"):
        write_model(tmp_path / model, {"v": [float(i), 10.0 * i]})
    models = [{"model": m} for m in "abcd"]
    mean = merged({"operator": "lawa", "models": models, "settings": {"window": 2}}, tmp_path)["v"]
    assert mean.tolist() == [2.5, 25.0]
    ema = merged({"operator": "ema", "models": models, "settings": {"decay": 0.5}}, tmp_path)["v"]
    assert ema.tolist() == [((0 * 0.5 + 0.5) * 0.5 + 1) * 0.5 + 1.5, 21.25]
    backwards = merged({"operator": "ema", "models": models[::-1], "settings": {"decay": 0.5}}, tmp_path)["v"]
    assert backwards.tolist() != ema.tolist()


def test_magmax_and_breadcrumbs_by_hand(tmp_path):
    write_model(tmp_path / "base", {"v": [0.0] * 5})
    write_model(tmp_path / "a", {"v": [1.0, -2.0, 3.0, 0.0, 5.0]})
    write_model(tmp_path / "b", {"v": [-2.0, 1.0, 3.5, 0.5, -4.0]})
    both = {"base": "base", "models": [{"model": "a"}, {"model": "b"}]}
    assert merged({"operator": "magmax"} | both, tmp_path)["v"].tolist() == [-2.0, -2.0, 3.5, 0.5, 5.0]
    one = {"base": "base", "models": [{"model": "a"}], "settings": {"density": 0.4, "gamma": 0.2}}
    # the largest entry goes as an outlier, of the rest the two largest stay
    assert merged({"operator": "breadcrumbs"} | one, tmp_path)["v"].tolist() == [0.0, -2.0, 3.0, 0.0, 0.0]


def test_coefficients_by_name_and_depth(tmp_path):
    names = [f"model.layers.{i}.w" for i in range(5)] + ["lm_head.weight", "model.layers.0.b"]
    write_model(tmp_path / "base", {n: [0.0] for n in names})
    write_model(tmp_path / "a", {n: [1.0] for n in names})
    recipe = {"operator": "graft", "base": "base", "models": [{"model": "a"}]}
    result = merged(recipe | {"scale": [{"match": "lm_head*", "value": 7}, {"value": [0, 1, 0.5]}]}, tmp_path)
    assert [float(result[f"model.layers.{i}.w"]) for i in range(5)] == [0.0, 0.5, 1.0, 0.75, 0.5]
    assert float(result["lm_head.weight"]) == 7
    weight = [{"match": "*.b", "value": 3}, {"match": "*layers*", "value": 2}]
    with pytest.raises(UserError, match="no entry fits tensor lm_head.weight"):
        merged(recipe | {"settings": {"weight": weight}}, tmp_path)
    result = merged(recipe | {"settings": {"weight": [*weight, {"value": 0.5}]}}, tmp_path)
    assert [float(result[n]) for n in ("model.layers.0.b", "model.layers.0.w", "lm_head.weight")] == [3, 2, 0.5]


def test_the_documents_table_is_the_registrys():
    page = Path(__file__).parents[2] / "docs" / "reference" / "merging.md"
    assert table() in page.read_text(encoding="utf-8")


# ---- random marks ----


@given(
    sixteenths=st.integers(1, (1 << 16) - 1),
    cut=st.lists(st.integers(0, 1000), min_size=2, max_size=2).map(sorted),
)
@settings(max_examples=60, deadline=None)
def test_marks_depend_on_the_index_alone(sixteenths, cut):
    whole = Uniforms(3, "donor", "tensor").marks(0, 1000, sixteenths)
    begin, end = cut
    again = Uniforms(3, "donor", "tensor")
    again.marks(500, 70, sixteenths)  # whatever was drawn before
    assert np.array_equal(again.marks(begin, end - begin, sixteenths), whole[begin:end])
    assert set(whole.tolist()) <= {0, 1}


@pytest.mark.parametrize("sixteenths", [1, 3, 6554, 32768, 49152, 52429, 65535])
def test_marks_have_their_probability_and_are_independent(sixteenths):
    n, p = 1 << 21, sixteenths / (1 << 16)
    found = Uniforms(5, "donor", "tensor").marks(0, n, sixteenths).astype(float)
    error = np.sqrt(p * (1 - p) / n)
    assert abs(found.mean() - p) < 5 * error
    for lag in (1, 2, 63, 64, 128):  # of one draw, and of neighbouring ones
        product = (found[lag:] - p) * (found[:-lag] - p)
        assert abs(product.mean()) < 5 * p * (1 - p) / np.sqrt(n) + 1e-9
