"""`grafting merge`: complete directories, bad input, nothing left behind."""

import json
import re
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grafting import cli
from grafting.errors import UserError
from grafting.merging.diagnostics import diagnose
from grafting.merging.mergefile import MergeFile
from grafting.merging.mergekit import from_mergekit
from grafting.merging.planning import plan
from grafting.merging.sweep import Sweep
from grafting.models.numerics import BY_NAME
from grafting.models.safefiles import Planned, ShardFile
from grafting.models.scratch import new_tokenizer

EMBED, UP = "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"
WORDS = ["<pad>", "<eos>", "</ans>", "<user>", "<bot>", *"abcdef"]


def pico(seed):
    torch.manual_seed(seed)
    shape = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=1, **shape)
    )


@pytest.fixture
def models(tmp_path, monkeypatch):
    for seed, name in enumerate(["base", "a", "b"]):
        pico(seed).save_pretrained(tmp_path / name)
    new_tokenizer(WORDS, "deployed").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "training.log").write_text("a log")
    monkeypatch.chdir(tmp_path)
    return tmp_path


GRAFT = {"operator": "graft", "base": "base", "models": [{"model": "a", "donor": "b"}], "scale": 0.7}


def merge(recipe, out="out", *more):
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    return cli.main(["merge", "recipe.yaml", "--out", out, *more])


def bits(state):
    return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in state.items()}


def test_directory_is_complete_and_chats(models, capsys):
    assert merge(GRAFT, "out", "--hashes") == 0
    assert "written: out" in capsys.readouterr().out
    names = {path.name for path in Path("out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "README.md", "recipe.yaml"} <= names
    assert "training.log" not in names and not list(models.glob(".out*"))
    loaded = AutoModelForCausalLM.from_pretrained("out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained("out")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a b"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    assert loaded.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
    card = Path("out/README.md").read_text()
    assert "operator: graft" in card and "not computed" not in card
    assert MergeFile.parse(yaml.safe_load(Path("out/recipe.yaml").read_text())) == MergeFile.parse(GRAFT)


def test_equals_the_sweep_bit_for_bit(models):
    assert merge(GRAFT) == 0
    sweep = Sweep(models / "base", [models / "a"], [models / "b"])
    assert bits(load_file("out/model.safetensors")) == bits(sweep.state({"scale": 0.7}))
    settings = {"seed": 4, "weight": 0.8, "density": 0.3}
    dare = {"operator": "dare_linear", "base": "base", "models": [{"model": "a"}], "settings": settings, "scale": 2}
    assert merge(dare, "dare") == 0
    live = Sweep(models / "base", [models / "a"], [models / "base"]).state(
        {"operator": "dare_linear", "scale": 2.0, "settings": settings}
    )
    assert bits(load_file("dare/model.safetensors")) == bits(live)


@pytest.mark.parametrize("estimator", ["diagonal", "kfac"])
@pytest.mark.parametrize("rank", ["fisher", "fisher_delta2", "random"])
def test_masks_equal_the_sweeps(models, estimator, rank):
    generator, sensitivity = torch.Generator().manual_seed(0), {}
    for name, p in pico(0).named_parameters():
        if estimator == "diagonal":
            sensitivity[name] = torch.rand(p.shape, generator=generator)
        elif "_proj" in name:
            for letter, n in zip("GA", p.shape):
                basis, _ = torch.linalg.qr(torch.randn(n, n, generator=generator))
                sensitivity[f"{name[:-7]}.{letter}.vectors"] = basis.contiguous()
                sensitivity[f"{name[:-7]}.{letter}.values"] = torch.rand(n, generator=generator)
    (models / "s").mkdir()
    save_file(sensitivity, models / "s" / f"{estimator}.safetensors")
    mask = {"estimator": estimator, "rank": rank, "fraction": 0.1}
    for per in ("model", "tensor"):
        assert merge(GRAFT | {"mask": mask | {"per": per, "sensitivity": "s"}}, per) == 0
        sweep = Sweep(models / "base", [models / "a"], [models / "b"], {estimator: models / "s"})
        state = sweep.state({"scale": 0.7, "mask": mask | {"per": per}})
        assert bits(load_file(f"{per}/model.safetensors")) == bits(state)
    assert merge(GRAFT | {"mask": mask | {"fraction": 1, "sensitivity": "s"}}, "whole") == 0
    assert bits(load_file("whole/model.safetensors")) == bits(load_file("base/model.safetensors"))
    assert merge(GRAFT | {"mask": mask | {"fraction": 0, "sensitivity": "s"}}, "none") == 0
    assert merge(GRAFT, "plain") == 0
    assert bits(load_file("none/model.safetensors")) == bits(load_file("plain/model.safetensors"))


def test_shards_dtype_and_tokenizer(models):
    new_tokenizer(WORDS[::-1], "base").save_pretrained(models / "b")
    assert merge(GRAFT | {"dtype": "bfloat16", "shard_size": "1KB", "tokenizer": "b"}) == 0
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in Path("out").glob("*.safetensors"))
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    loaded = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    exact = Sweep(models / "base", [models / "a"], [models / "b"]).state({"scale": 0.7})
    assert torch.equal(loaded.state_dict()[UP], exact[UP].to(torch.bfloat16))
    assert AutoTokenizer.from_pretrained("out").get_vocab()["a"] == WORDS[::-1].index("a")


def test_dry_run_writes_nothing(models, capsys):
    assert merge(GRAFT, "out", "--dry-run") == 0
    said = capsys.readouterr().out
    assert UP in said and "peak memory" in said and "bytes to read" in said
    assert not Path("out").exists()


# ---- bad input: exit status 2, the tensor's name, nothing left behind ----


def edited(name, change, folder="a"):
    def edit(root):
        path = root / folder / "model.safetensors"
        state = load_file(path)
        state[name] = change(state[name])
        save_file({n: t for n, t in state.items() if t is not None}, path, metadata={"format": "pt"})

    return edit


def cut(root):
    path = root / "a" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def index(**where):
    def edit(root):
        (root / "a" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

    return edit


def config(**changes):
    def edit(root):
        path = root / "a" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def poison(value):
    def change(tensor):
        tensor[-1, -1] = value
        return tensor

    return change


@pytest.mark.parametrize(
    "edit, word",
    [
        (edited(UP, lambda t: t[:-1].contiguous()), rf"{UP} has shape \(12, 8\).*\(11, 8\)"),
        (edited(EMBED, lambda t: torch.cat([t, t])), rf"{EMBED} has shape \(11, 8\).*\(22, 8\).*crop"),
        (edited(UP, lambda t: None), f"lacks tensor {UP}"),
        (edited(UP, poison(float("nan"))), f"{UP} holds NaN"),
        (edited(UP, poison(float("-inf"))), f"{UP} holds NaN or infinity"),
        (edited(UP, poison(float("nan")), "b"), f"b: tensor {UP} holds NaN"),
        (edited(UP, lambda t: t.to(torch.int8)), "dtype I8"),
        (cut, "ends inside tensor"),
        (index(**{EMBED: "model.safetensors", "gone": "model.safetensors"}), "lacks tensor gone"),
        (index(**{EMBED: "absent.safetensors"}), "absent.safetensors, which is missing"),
        (index(), "lists no tensor"),
        (config(quantization_config={"quant_method": "gptq"}), "quantised"),
        (config(model_type="gpt2"), "one architecture"),
        (lambda root: (root / "a" / "adapter_config.json").write_text("{}"), "LoRA adapter"),
        (lambda root: shutil.rmtree(root / "a"), "directory missing"),
        (lambda root: (root / "out").mkdir(), "out exists already"),
    ],
)
@pytest.mark.parametrize("recipe", [GRAFT, {"operator": "ties", "settings": {"density": 0.5}} | {
    k: v for k, v in GRAFT.items() if k != "operator"}], ids=["graft", "ties"])  # fmt: skip
def test_bad_input(models, capsys, edit, word, recipe):
    edit(models)
    before = set(models.iterdir())
    assert merge(recipe) == 2
    assert re.search(word, capsys.readouterr().err)
    assert set(models.iterdir()) - before == {models / "recipe.yaml"}


def test_overlapping_tensors_are_refused(models, capsys):
    path = models / "a" / "model.safetensors"
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    norm = "model.norm.weight"
    header[norm]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert merge(GRAFT) == 2
    assert "overlap" in capsys.readouterr().err


def test_full_disk_leaves_nothing_behind(models):
    """A limit on file sizes stands in for the disk: the system refuses in the same place."""
    Path("recipe.yaml").write_text(yaml.safe_dump(GRAFT))
    result = subprocess.run(
        [sys.executable, "-m", "grafting.cli", "merge", "recipe.yaml", "--out", "deep/out"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2, result.stderr
    assert "cannot be written" in result.stderr and "bytes are needed" in result.stderr
    assert list(Path("deep").iterdir()) == []


def test_overflow_names_the_tensor(models, capsys):
    assert merge(GRAFT | {"scale": 1e9, "dtype": "float16"}) == 2
    assert "overflows float16" in capsys.readouterr().err


@pytest.mark.parametrize("more", [1, -1])
def test_embedding_policies(models, capsys, more):
    """Rows that a model lacks keep the base's; rows that the base lacks are cut."""
    policy = "crop" if more > 0 else "pad"
    grown = torch.randn(len(WORDS) + more, 8)
    edited(EMBED, lambda t: grown)(models)
    recipe = {"operator": "task_arithmetic", "base": "base", "models": [{"model": "a"}], "scale": 0.5}
    assert merge(recipe | {"embedding": "pad" if more > 0 else "crop"}) == 2
    assert EMBED in capsys.readouterr().err
    assert merge(recipe | {"embedding": policy}) == 0
    base, out = (load_file(f"{name}/model.safetensors")[EMBED] for name in ("base", "out"))
    common = min(len(base), len(grown))
    assert torch.equal(out[common:], base[common:])
    exact = (base[:common].double() + 0.5 * (grown[:common].double() - base[:common].double())).float()
    assert torch.equal(out[:common], exact)
    assert merge(recipe | {"embedding": policy, "scale": 1}, "whole") == 0
    whole = load_file("whole/model.safetensors")[EMBED]
    assert whole.shape == base.shape and torch.equal(whole[common:], base[common:])


@pytest.mark.parametrize(
    "change, word",
    [
        ({"operator": "tie"}, "operator 'tie' is not known"),
        ({"lambda": 2}, "lambda: unknown key"),
        ({"settings": {"density": 0.5}}, "settings.density: operator graft has no such setting"),
        ({"models": [{"model": "a", "density": 1}]}, "models.0.density"),
        ({"models": []}, "models"),
        ({"models": [{"model": "a"}, {"model": "b"}]}, "exactly 1"),
        ({"base": None}, "needs `base`"),
        ({"base": {"hub": "owner/name"}}, "revision"),
        ({"scale": "much"}, "scale must be a number"),
        ({"scale": float("nan")}, "finite"),
        ({"dtype": "int8"}, "dtype"),
        ({"shard_size": "big"}, "shard_size"),
        ({"operator": "linear"}, "combines models, not updates"),
        ({"operator": "slerp"}, "settings.t: operator slerp needs it"),
        ({"operator": "ties", "settings": {"density": 0}}, r"density must be in \(0, 1\]"),
        ({"operator": "della", "settings": {"density": 0.1, "epsilon": 0.2}}, "epsilon 0.2"),
        ({"operator": "dare_linear", "settings": {"rescale": "twice"}}, "rescale must be one of"),
        ({"mask": {"estimator": "kfac", "rank": "fisher", "fraction": 0.1}}, "mask.sensitivity"),
    ],
)
def test_bad_recipes(models, change, word):
    recipe = GRAFT | change
    with pytest.raises(UserError, match=word):
        plan(MergeFile.parse({k: v for k, v in recipe.items() if v is not None}), models)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"modules": {}}, "not supported: modules"),
        ({"merge_method": "arcee_fusion"}, "'arcee_fusion' is not supported"),
        ({"parameters": {"swing": 1}}, "parameters.swing is not supported"),
        ({"models": [{"model": "a+lora"}]}, "adapters"),
        ({"models": [{"model": "a", "parameters": {"t": 1}}]}, "models.0.parameters.t"),
        ({"tokenizer_source": "union"}, "union"),
        ({"models": None, "slices": [{"sources": []}, {"sources": []}]}, "only one slice"),
    ],
)
def test_unsupported_parts_of_mergekit_files_are_named(change, word):
    config = {"merge_method": "ties", "base_model": "base", "models": [{"model": "a"}]} | change
    with pytest.raises(UserError, match=word):
        from_mergekit({k: v for k, v in config.items() if v is not None})


def test_mergekit_file_as_a_recipe(models, capsys):
    sources = [{"model": m, "layer_range": [0, 2]} for m in ("base", "a")]
    value = [{"filter": "mlp", "value": [0, 1]}, {"value": 0.5}]
    Path("mk.yml").write_text(
        yaml.safe_dump(
            {
                "merge_method": "slerp",
                "base_model": "base",
                "slices": [{"sources": sources}],
                "parameters": {"t": value},
            }
        )
    )
    assert cli.main(["merge", "--from-mergekit", "mk.yml", "--print-recipe"]) == 0
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert recipe["settings"]["t"][0] == {"match": "*mlp*", "value": [0, 1]}
    assert cli.main(["merge", "--from-mergekit", "mk.yml", "--out", "out"]) == 0
    out, base, a = (load_file(f"{name}/model.safetensors") for name in ("out", "base", "a"))
    assert torch.equal(out[UP], a[UP])
    assert torch.equal(out[UP.replace("1", "0")], base[UP.replace("1", "0")])


# ---- files and diagnostics ----


@pytest.mark.parametrize("aligned", [False, True])
def test_shard_files_are_those_of_the_library(tmp_path, aligned):
    """In pieces that begin and end anywhere, across the direct and the buffered way of writing."""
    rng = np.random.default_rng(0)
    tensors = {"b": rng.normal(size=(70_001, 3)), "a": rng.normal(size=7), "c.é": rng.normal(size=(100, 2000))}
    tensors = {name: t.astype(np.float32) for name, t in tensors.items()}
    tensors["h"] = rng.normal(size=5).astype(np.float16)
    planned = [Planned(n, BY_NAME[t.dtype.name], t.shape) for n, t in tensors.items()]
    file = ShardFile(tmp_path / "ours", planned, aligned)
    for name, t in tensors.items():
        flat, at = t.reshape(-1), 0
        for size in (1, 50_000, 1_000, t.size):
            part = flat[at : at + size]
            file.write(name, at * t.itemsize, part)
            at += len(part)
    file.close()
    save_file({n: torch.from_numpy(t) for n, t in tensors.items()}, tmp_path / "library", metadata={"format": "pt"})
    if not aligned:
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()
    assert bits(load_file(tmp_path / "ours")) == bits(load_file(tmp_path / "library"))


def test_diagnostics(models, capsys):
    recipe = {"operator": "sum", "base": "base", "models": [{"model": "a", "donor": "b"}, {"model": "b"}]}
    rows = diagnose(plan(MergeFile.parse(recipe), models))
    base, a, b = (load_file(models / name / "model.safetensors") for name in ("base", "a", "b"))
    values = {(r["layer"], r["model"], r["other"], r["quantity"]): r["value"] for r in rows}
    layer = [n for n in base if ".layers.1." in n]

    def flat(one, other, names):
        return torch.cat([(one[n].double() - other[n].double()).reshape(-1) for n in names])

    for key, names in (("1", layer), ("all", list(base)), (EMBED, [EMBED])):
        whole = torch.cat([base[n].double().reshape(-1) for n in names]).norm()
        first, second = flat(a, b, names), flat(b, base, names)
        assert values[key, "a", "", "norm"] == pytest.approx(float(first.norm()))
        assert values[key, "a", "", "donor_distance"] == pytest.approx(float(second.norm() / whole))
        assert values[key, "b", "", "relative_norm"] == pytest.approx(float(second.norm() / whole))
        assert values[key, "b", "", "donor_distance"] == 0
        pair = ("a", "b") if (key, "a", "b", "cosine") in values else ("b", "a")
        cosine = float(first @ second / first.norm() / second.norm())
        assert values[key, *pair, "cosine"] == pytest.approx(cosine)
        both = first * second
        agree = float((both > 0).sum() / (both != 0).sum())
        assert values[key, *pair, "sign_agreement"] == pytest.approx(agree)
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    for folder in ("d", "e"):
        assert cli.main(["merge", "recipe.yaml", "--diagnostics", folder]) == 0
    assert [p.name for p in sorted(Path("d").iterdir())] == ["deltas.csv", "deltas.svg"]
    assert all((Path("e") / p.name).read_bytes() == p.read_bytes() for p in Path("d").iterdir())


def test_no_torch_on_the_way():
    code = "import sys, grafting.cli, grafting.merging.command; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
