"""Loading and saving ordinary Hugging Face directories: equal models give equal bytes."""

import json
from pathlib import Path

from grafting.errors import UserError

DTYPES = ("float32", "bfloat16", "float16", "as_saved")
WHOLE = "100GB"  # shard size above every model here: one weights file
# What transformers notes about how a tokenizer was loaded; it says nothing about the tokenizer.
LOADING_NOTES = ("is_local", "local_files_only", "name_or_path")


def check_directory(path: str | Path) -> dict:
    """The config.json of a full, unquantised model directory.

    UserError: missing directory, LoRA adapter, no config.json, quantised weights, no safetensors.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"model directory missing: {path}; fetch the payload (dvc pull) or correct the path")
    if (path / "adapter_config.json").is_file():
        raise UserError(
            f"{path} is a LoRA adapter (it has adapter_config.json), a full model is needed: "
            "merge the adapter into its base model and save that"
        )
    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json: not a model directory")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path / 'config.json'}: not valid JSON ({error})") from None
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UserError(
            f"{path} holds quantised weights (config.json: quantization_config, method {method}); "
            "updates need full weights: use the unquantised model"
        )
    if not list(path.glob("*.safetensors")):
        raise UserError(f"{path} has no *.safetensors; convert its weights to safetensors (pickles are not loaded)")
    return config


def load_model(path: str | Path, dtype: str = "float32"):
    """The causal language model in a directory, in eval mode, on the CPU.

    dtype: "float32", "bfloat16", "float16", or "as_saved". Attention is `sdpa_float32` (see attention.py).
    UserError: see `check_directory`; also tensors that are missing, left over or of another shape.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from grafting.models.attention import register

    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    check_directory(path)
    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype="auto" if dtype == "as_saved" else getattr(torch, dtype),
            attn_implementation=register(),
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except SafetensorError as error:
        raise UserError(f"{path}: damaged weights ({error}); fetch or make them again") from None
    # transformers only warns about these, and fills the gaps with random numbers
    if report["mismatched_keys"]:
        name, found, expected = sorted(report["mismatched_keys"], key=str)[0]
        raise UserError(f"{path}: tensor {name} has shape {list(found)}, config.json asks for {list(expected)}")
    for kind in ("missing_keys", "unexpected_keys"):
        if report[kind]:
            names = ", ".join(sorted(report[kind])[:3])
            raise UserError(f"{path}: {kind.replace('_keys', '')} tensors: {names}; weights and config do not fit")
    return model.eval()


def load_tokenizer(path: str | Path):
    """The tokenizer of a model directory. UserError if it has none."""
    from transformers import AutoTokenizer

    path = Path(path)
    if not path.is_dir():
        raise UserError(f"model directory missing: {path}; fetch the payload (dvc pull) or correct the path")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{path} has no tokenizer (tokenizer.json); copy the one of the deployed model there")
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def save_model(model, tokenizer, path: str | Path) -> None:
    """Write a complete model directory, with tokenizer, chat template and generation config.

    Reproducible: equal weights give equal bytes, wherever the model was loaded from. Tied weights are saved
    once; neither the attention implementation nor any path is stored. UserError: a weight is NaN or infinite.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"tensor {name} has NaN or infinite values: not saved; lower the learning rate or scale")
    model.save_pretrained(path, max_shard_size=WHOLE)
    tokenizer.save_pretrained(path)
    _rewrite(path / "config.json", drop=("_name_or_path", "_model_name_or_path", "_attn_implementation"))
    _rewrite(path / "tokenizer_config.json", drop=LOADING_NOTES)


def _rewrite(path: Path, drop: tuple[str, ...]) -> None:
    """Rewrite a JSON file in canonical form without some of its keys."""
    content = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in content.items() if key not in drop}
    path.write_text(json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def count_parameters(model) -> int:
    """Number of parameters; tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())
