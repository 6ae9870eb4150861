"""What is done to a model before it is trained, and undone after: checks, gradient checkpointing, LoRA."""

from __future__ import annotations

from grafting.errors import UserError


def check_vocabulary(model, tokenizer, where: str) -> None:
    """UserError if the tokenizer has ids for which the model has no embedding."""
    rows = model.get_input_embeddings().num_embeddings
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= rows)
    if beyond:
        shown = ", ".join(f"{token!r} ({i})" for i, token in beyond[:5])
        raise UserError(
            f"{where}: the model embeds {rows} tokens, its tokenizer has ids beyond: {shown}"
            + (f" and {len(beyond) - 5} more" if len(beyond) > 5 else "")
            + "; take the tokenizer that belongs to the model, or resize its embeddings"
        )


def prepare(model, spec: dict) -> None:
    """Change the model in place as the spec asks.

    gradient_checkpointing: activations are computed again in the backward pass instead of kept.
    lora {rank, alpha, dropout}: small matrices beside every linear layer but the output head are trained in place of
    the weights (arXiv 2106.09685); `finish` merges them. UserError if peft is not installed.
    """
    if spec.get("lora"):
        _add_lora(model, spec["lora"])
    if spec.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if spec.get("lora"):
            model.enable_input_require_grads()


def _add_lora(model, options: dict) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("training.lora needs the package peft: pip install '.[lora]', or lora: null") from None
    head = model.get_output_embeddings()
    import torch

    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    config = LoraConfig(
        r=options["rank"],
        lora_alpha=options["alpha"],
        lora_dropout=options["dropout"],
        target_modules=sorted(names),
        bias="none",
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    inject_adapter_in_model(config, model)


def finish(model, spec: dict) -> None:
    """Undo `prepare`: a plain model with full weights is left."""
    if spec.get("gradient_checkpointing"):
        model.gradient_checkpointing_disable()
    if spec.get("lora"):
        from peft.tuners.lora import LoraLayer

        for name, module in list(model.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge()
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, module.get_base_layer())
        if hasattr(model, "peft_config"):
            del model.peft_config
