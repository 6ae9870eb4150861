"""Merging: operators against mergekit's numbers, the sweep's bit identities, complete directories."""

import contextlib
import csv
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grafting.errors import UserError
from grafting.merging import deltas, stage
from grafting.merging.arrays import Arrays, apply
from grafting.merging.materialise import materialise
from grafting.merging.operators import magnitude, ties
from grafting.merging.recipe import Recipe
from grafting.merging.sweep import Sweep
from grafting.models.safefiles import Checkpoint

RANDOM_MASK = {"estimator": "diagonal", "rank": "random", "fraction": 0.5}


def pico(seed: int, dtype=torch.float32, vocab: int = 11, tied: bool = True):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    ).to(dtype)


@pytest.fixture(scope="module")
def lineage(tmp_path_factory):
    """Directories base, deployed, two models trained from each, as a lineage would leave them."""
    root = tmp_path_factory.mktemp("lineage")
    for seed, name in enumerate(["base", "deployed", "from_base", "from_deployed", "other"]):
        pico(seed).save_pretrained(root / name)
    (root / "deployed" / "tokenizer.json").write_text("{}")
    (root / "deployed" / "chat_template.jinja").write_text("{{ messages }}")
    (root / "deployed" / "training.jsonl").write_text("a log")
    return root


def bits(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def same(state, other):
    assert state.keys() == other.keys()
    return all(torch.equal(bits(state[name]), bits(other[name])) for name in state)


def weights_of(path):
    return load_file(path / "model.safetensors")


# ---- operators ----


def combined(operator, updates, *settings, **named):
    arrays = [np.asarray(delta, dtype=np.float64) for delta in updates]
    inputs = Arrays(np.zeros_like(arrays[0]), arrays)
    return apply(inputs, operator(inputs, *settings, **named))


def test_ties_by_hand():
    a, b = [4.0, -1.0, 3.0, 0.5], [-1.0, 2.0, 5.0, -0.5]
    # trimmed to two entries: a -> [4, 0, 3, 0], b -> [0, 2, 5, 0]
    assert combined(ties, [a, b], [1, 1], [0.5, 0.5]).tolist() == [4.0, 2.0, 4.0, 0.0]
    # untrimmed: signs of the sums +, +, +, and a sum of 0 elects +
    assert combined(ties, [a, b], [1, 1], [1, 1]).tolist() == [4.0, 2.0, 4.0, 0.5]


@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=30), density=st.floats(0.01, 1))
@settings(max_examples=60, deadline=None)
def test_trim_keeps_exactly_k(values, density):
    count = len(values) if density == 1 else max(1, int(density * len(values)))
    kept = combined(magnitude, [values], [1], [density])
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[:count]
    assert kept.tolist() == [float(v) if i in order else 0.0 for i, v in enumerate(values)]


# ---- recipes ----


@pytest.mark.parametrize(
    "recipe, word",
    [
        ({"scale": 1.0, "lambda": 2}, "lambda"),
        ({"operator": "ties", "scale": 1.0}, "density"),
        ({"scale": 1.0, "density": 0.3}, "density"),
        ({"scale": float("nan")}, "scale"),
        ({}, "scale"),
        ({"scale": 1.0, "terms": [0, 1]}, "one term"),
        ({"operator": "sum", "scale": 1.0, "terms": [0, 0]}, "distinct"),
        ({"scale": 1.0, "mask": {"estimator": "kfac", "rank": "fisher", "fraction": 2}}, "mask.fraction"),
        ({"scale": 1.0, "mask": {"estimator": "random", "rank": "random", "fraction": 0.1}}, "mask.estimator"),
    ],
)
def test_recipe_refuses(recipe, word):
    with pytest.raises(UserError, match=word):
        Recipe.parse(recipe)


# ---- the sweep ----


@pytest.mark.parametrize("mask", [None, RANDOM_MASK])
def test_graft_is_the_formula(lineage, mask):
    sweep = Sweep(lineage / "deployed", [lineage / "from_base"], [lineage / "base"])
    state = sweep.state({"scale": 0.7, "mask": mask})
    theta, trained, donor = (weights_of(lineage / n) for n in ("deployed", "from_base", "base"))
    kept = total = 0
    for name in theta:
        update = trained[name].double() - donor[name].double()
        exact = (theta[name].double() + 0.7 * update).float()
        assert torch.equal(state[name], exact) or mask
        moved = state[name] != theta[name]
        assert torch.equal(state[name][moved], exact[moved])
        kept, total = kept + int(moved.sum()), total + int((update != 0).sum())
    assert kept == total if mask is None else abs(kept / total - 0.5) < 0.02


def test_bit_identities(lineage, tmp_path):
    copy = shutil.copytree(lineage / "deployed", tmp_path / "copy")
    deployed, trained = weights_of(lineage / "deployed"), weights_of(lineage / "from_deployed")
    trained_ones = [lineage / name for name in ("from_deployed", "from_base", "from_deployed")]
    sweep = Sweep(lineage / "deployed", trained_ones, [lineage / "deployed", lineage / "base", copy])
    assert same(sweep.state(None), deployed)
    assert same(sweep.state({"scale": 0.0, "terms": [1]}), deployed)
    assert same(sweep.state({"scale": 1.0}), trained)
    assert same(sweep.state({"scale": 1.0, "terms": [2]}), trained)  # its donor is a copy
    assert not same(sweep.state({"scale": 1.0, "terms": [1]}), weights_of(lineage / "from_base"))
    for estimator, rank in (
        ("diagonal", "random"),
        ("kfac", "random"),
        ("kfac", "fisher"),
        ("diagonal", "fisher_delta2"),
    ):
        whole = {"estimator": estimator, "rank": rank, "fraction": 1}
        assert same(sweep.state({"scale": 1.3, "terms": [1], "mask": whole}), deployed)
        assert same(
            sweep.state({"scale": 1.3, "terms": [1], "mask": whole | {"fraction": 0}}),
            sweep.state({"scale": 1.3, "terms": [1]}),
        )
        assert same(sweep.state({"scale": 1.0, "mask": whole | {"fraction": 0}}), trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_update_changes_no_bit(tmp_path, dtype):
    """A model grafted with nothing keeps every bit, negative zeros too."""
    model = pico(0, dtype)
    model.model.layers[0].mlp.up_proj.weight.data[0, :4] = -0.0
    model.save_pretrained(tmp_path / "a")
    pico(1, dtype).save_pretrained(tmp_path / "b")
    sweep = Sweep(tmp_path / "a", [tmp_path / "b"] * 2, [tmp_path / "b"] * 2)
    for recipe in ({"scale": 0.3}, {"operator": "sum", "scale": -2.0, "terms": [0, 1]}):
        state = sweep.state(recipe)
        assert same(state, weights_of(tmp_path / "a")) and next(iter(state.values())).dtype == dtype


def test_sixteen_bit_rounds_once(tmp_path):
    for seed, name in enumerate("abc"):
        pico(seed, torch.bfloat16).save_pretrained(tmp_path / name)
    state = Sweep(tmp_path / "a", [tmp_path / "b"], [tmp_path / "c"]).state({"scale": 0.6})
    a, b, c = (weights_of(tmp_path / n) for n in "abc")
    for name in a:
        expected = (a[name].float() + (b[name].float() - c[name].float()) * 0.6).to(torch.bfloat16)
        assert torch.equal(state[name], expected)


@pytest.mark.parametrize("operator, density", [("sum", None), ("ties", 0.3)])
def test_order_of_donors_changes_no_bit(lineage, operator, density):
    pairs = [("from_base", "base"), ("from_deployed", "deployed"), ("other", "base")]
    states = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        trained, donors = ([lineage / pairs[i][side] for i in order] for side in (0, 1))
        states.append(
            Sweep(lineage / "deployed", trained, donors).state(
                {"operator": operator, "density": density, "scale": 0.9, "terms": [0, 1, 2]}
            )
        )
    assert same(states[0], states[1]) and same(states[0], states[2])


@pytest.mark.parametrize(
    "recipe",
    [
        {"scale": 0.8},
        {"operator": "ties", "density": 0.3, "scale": 1.5, "terms": [1, 0]},
        {"scale": 1.1, "mask": RANDOM_MASK},
    ],
)
def test_cache_and_streaming_agree(lineage, recipe):
    arguments = (lineage / "deployed", [lineage / "from_base", lineage / "other"], [lineage / "base"] * 2)
    sweep, streaming = Sweep(*arguments), Sweep(*arguments, cache_bytes=0)
    sweep.state(recipe | {"scale": 0.1})
    assert same(sweep.state(recipe), streaming.state(recipe))
    assert len(sweep._cache) == (recipe.get("operator") is not None)  # one difference is formed anew each time
    assert not streaming._cache


def test_into_a_live_model(lineage):
    sweep = Sweep(lineage / "deployed", [lineage / "from_base"], [lineage / "base"])
    live = pico(7)
    for recipe in ({"scale": 0.6}, {"scale": 1.0}, None):
        sweep.into(live, recipe)
        state = sweep.state(recipe)
        assert same({n: live.state_dict()[n] for n in state}, state)
        assert live.lm_head.weight is live.model.embed_tokens.weight
    with pytest.raises(UserError, match="holds no tensor lm_head.weight"):
        sweep.into(pico(7, tied=False), None)
    with pytest.raises(UserError, match=r"\(13, 8\).*\(11, 8\)"):
        sweep.into(pico(7, vocab=13), None)


# ---- what does not fit is refused ----


def broken(lineage, tmp_path, change):
    path = shutil.copytree(lineage / "from_base", tmp_path / "broken")
    change(path)
    return path


def rewrite(edit):
    def change(path):
        state = weights_of(path)
        edit(state)
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})

    return change


EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: (p / "config.json").rename(p / "adapter_config.json"), "LoRA adapter"),
        (lambda p: (p / "config.json").unlink(), "no config.json"),
        (lambda p: (p / "model.safetensors").unlink(), "has no .*safetensors"),
        (lambda p: (p / "model.safetensors").rename(p / "model-1.safetensors"), "neither model.safetensors"),
        (lambda p: (p / "model.safetensors").write_bytes(b"short"), "cannot be read"),
        (lambda p: (p / "config.json").write_text('{"quantization_config": {"bits": 4}}'), "quantised"),
        (rewrite(lambda s: s.update({EMBED: s[EMBED].to(torch.int8)})), "dtype I8"),
        (rewrite(lambda s: s.pop(EMBED)), f"lacks tensor {EMBED}"),
        (rewrite(lambda s: s.update({"more.weight": torch.ones(2)})), "additional tensor more.weight"),
        (rewrite(lambda s: s.update({EMBED: torch.ones(13, 8)})), rf"{EMBED} has shape \(11, 8\).*\(13, 8\)"),
        (rewrite(lambda s: s[EMBED].__setitem__((0, 0), float("nan"))), f"{EMBED} holds NaN"),
        (rewrite(lambda s: s[EMBED].__setitem__((0, 0), float("inf"))), f"{EMBED} holds NaN or infinity"),
    ],
)
def test_refusals(lineage, tmp_path, change, message):
    path = broken(lineage, tmp_path, change)
    with pytest.raises(UserError, match=message):
        Sweep(lineage / "deployed", [path], [lineage / "base"]).state({"scale": 0.5})


def test_more_refusals(lineage, tmp_path):
    pair = [lineage / "from_base"], [lineage / "base"]
    with pytest.raises(UserError, match="directory missing"):
        Sweep(lineage / "deployed", [tmp_path / "nowhere"], [lineage / "base"])
    with pytest.raises(UserError, match="one donor per trained"):
        Sweep(lineage / "deployed", pair[0], [])
    sweep = Sweep(lineage / "deployed", *pair)
    with pytest.raises(UserError, match="no update 3"):
        sweep.state({"scale": 0.5, "terms": [3]})
    with pytest.raises(UserError, match="sensitivity_kfac"):
        sweep.state({"scale": 0.5, "mask": {"estimator": "kfac", "rank": "fisher", "fraction": 0.01}})
    for scale in (1e42, -1e42):
        with pytest.raises(UserError, match="overflows"):
            sweep.state({"scale": scale})


def test_overflow_is_found_as_soon_as_one_number_does_not_fit(lineage, tmp_path):
    """Most scales are so small that no result is looked at again; the bound on that must not let one through."""
    names = ("deployed", "from_base")
    for name, number in zip(names, (40000.0, 64992.0), strict=True):
        shutil.copytree(lineage / name, tmp_path / name)
        state = {n: t.to(torch.float16) for n, t in load_file(lineage / name / "model.safetensors").items()}
        state[EMBED][3, 2] = number
        save_file(state, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    sweep = Sweep(tmp_path / "deployed", [tmp_path / "from_base"], [tmp_path / "deployed"])
    assert sweep.state({"scale": 1.02})[EMBED][3, 2] == 65504.0
    with pytest.raises(UserError, match=f"{EMBED} overflows"):
        sweep.state({"scale": 1.03})
    assert sweep.state({"scale": -1.5})[EMBED][3, 2] == 2512.0
    with pytest.raises(UserError, match=f"{EMBED} overflows"):
        sweep.state({"scale": -5})


# ---- directories ----


def test_materialise_is_complete_and_exact(lineage, tmp_path):
    sweep = Sweep(lineage / "deployed", [lineage / "from_base"], [lineage / "base"])
    materialise(sweep, {"scale": 0.0}, tmp_path / "zero")
    zero = (tmp_path / "zero/model.safetensors").read_bytes()
    assert zero == (lineage / "deployed/model.safetensors").read_bytes()
    materialise(sweep, {"scale": 0.8}, tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    state = sweep.state({"scale": 0.8})
    assert same({n: loaded.state_dict()[n] for n in state}, state)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_shards_give_the_same_graft(lineage, tmp_path):
    for name in ("deployed", "from_base", "base"):
        model = AutoModelForCausalLM.from_pretrained(lineage / name)
        model.save_pretrained(tmp_path / name, max_shard_size="2KB")
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
    sharded = Sweep(tmp_path / "deployed", [tmp_path / "from_base"], [tmp_path / "base"])
    single = Sweep(lineage / "deployed", [lineage / "from_base"], [lineage / "base"])
    state = single.state({"scale": 0.8})
    assert same(sharded.state({"scale": 0.8}), state)
    materialise(sharded, {"scale": 0.8}, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert same({n: loaded[n] for n in state}, state)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(state)
    next((tmp_path / "base").glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="which is missing"):
        Checkpoint(tmp_path / "base")


def test_tied_head_saved_twice_is_one_tensor(lineage, tmp_path):
    path = broken(lineage, tmp_path, rewrite(lambda s: s.update({"lm_head.weight": s[EMBED].clone()})))
    twice, once = (
        Sweep(lineage / "deployed", [trained], [lineage / "base"]).state({"scale": 0.5})
        for trained in (path, lineage / "from_base")
    )
    assert same(twice, once)


class FakeJob(SimpleNamespace):
    """What a stage reads of a running job."""

    def __init__(self, out, spec, paths):
        super().__init__(
            out=out,
            spec=spec,
            paths=paths,
            metrics={},
            cost={},
            input_keys={role: [p.name for p in ps] for role, ps in paths.items()},
        )
        out.mkdir()

    def inputs(self, role):
        return self.paths.get(role, [])

    def input(self, role):
        (path,) = self.inputs(role)
        return path

    def progress(self, *_, **__):
        return SimpleNamespace(update=lambda *a, **k: None, close=lambda: None)

    def phase(self, _):
        return contextlib.nullcontext()


def test_stage_writes_the_same_bytes_twice(lineage, tmp_path):
    recipe = {"operator": "sum", "scale": 0.7, "terms": [0, 1], "mask": RANDOM_MASK}
    jobs = [
        FakeJob(
            tmp_path / name,
            {"recipe": recipe},
            {
                "model": [lineage / "deployed"],
                "trained": [lineage / "from_base", lineage / "other"],
                "donor": [lineage / "base"] * 2,
            },
        )
        for name in ("one", "two")
    ]
    for job in jobs:
        stage.run(job)
    files = sorted(p.name for p in jobs[0].out.iterdir())
    assert files == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "mask.json",
        "model.safetensors",
        "recipe.yaml",
        "tokenizer.json",
    ]
    assert all((jobs[0].out / f).read_bytes() == (jobs[1].out / f).read_bytes() for f in files)
    described = yaml.safe_load((jobs[0].out / "recipe.yaml").read_text())
    assert Recipe.parse(described["recipe"]) == Recipe.parse(recipe)
    assert described["inputs"]["donor"] == ["base", "base"]
    assert 0.4 < jobs[0].metrics["mask_removed"] < 0.6


def test_deltas_of_a_study_are_measured_layer_by_layer(lineage, tmp_path):
    """Against plain torch; pairs share the task, or all but the task."""
    updates = [
        {"task": "a", "method": "sft", "donor": "base", "lr": 0.1},
        {"task": "a", "method": "opsd", "donor": "deployed", "lr": 0.1},
        {"task": "b", "method": "sft", "donor": "base", "lr": 0.1},
    ]
    trained, donors = ["from_base", "from_deployed", "other"], ["base", "deployed", "base"]
    paths = {"model": ["deployed"], "trained": trained, "donor": donors}
    paths = {role: [lineage / name for name in names] for role, names in paths.items()}
    jobs = [FakeJob(tmp_path / name, {"updates": updates}, paths) for name in ("one", "two")]
    for job in jobs:
        deltas.run(job)
    assert (jobs[0].out / "deltas.csv").read_bytes() == (jobs[1].out / "deltas.csv").read_bytes()
    with (jobs[0].out / "deltas.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert jobs[0].metrics == {"updates": 3, "rows": len(rows)}
    found = {(r["layer"], r["task"], r["method"], r["other"], r["quantity"]): float(r["value"]) for r in rows}
    states = {name: weights_of(lineage / name) for name in ("base", "deployed", *trained)}
    for layer in ("0", "1", "all"):
        names = [n for n in states["base"] if layer == "all" or f".layers.{layer}." in n]
        flat = {m: torch.cat([state[n].double().reshape(-1) for n in names]) for m, state in states.items()}
        a, b, c = (flat[t] - flat[d] for t, d in zip(trained, donors))
        whole = flat["deployed"].norm()
        assert found[layer, "a", "sft", "", "relative_norm"] == pytest.approx(float(a.norm() / whole), rel=1e-5)
        distance = float((flat["base"] - flat["deployed"]).norm() / whole)
        assert found[layer, "b", "sft", "", "donor_distance"] == pytest.approx(distance, rel=1e-5)
        assert found[layer, "a", "opsd", "", "donor_distance"] == 0
        for one, other, key in ((a, b, ("a", "sft", "a opsd deployed 0.1")), (a, c, ("a", "sft", "b sft base 0.1"))):
            cosine = float(one @ other / one.norm() / other.norm())
            assert found[layer, *key, "cosine"] == pytest.approx(cosine, rel=1e-4)
            product = one * other
            agree = float((product > 0).sum() / (product != 0).sum())
            assert found[layer, *key, "sign_agreement"] == pytest.approx(agree, rel=1e-5)
    # neither the task nor the learner is shared
    assert not any("b sft" in r["other"] and r["method"] == "opsd" for r in rows)


def test_deltas_need_no_torch():
    code = "import sys; import grafting.merging.deltas; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
