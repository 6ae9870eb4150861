"""Logits at chosen positions only: the output head is the dearest part of a small model."""

from grafting.errors import UserError

# Config keys of models that do more to their logits than the output head; at these values they do nothing.
POSTPROCESSING = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
}


def check_head(model) -> None:
    """UserError if the model's logits are not simply output_embeddings(hidden states)."""
    config = model.config.get_text_config()
    for key, harmless in POSTPROCESSING.items():
        value = getattr(config, key, None)
        if value is not None and value != harmless:
            raise UserError(
                f"model type {config.model_type}: config {key} = {value} changes the logits after "
                "the output head, "
                "which is not supported; use a model without it"
            )


def completion_logits(model, input_ids, positions):
    """Logits [n, V] in float32 at the n true positions of the mask, in row-major order.

    input_ids [B, T] int64, padded on the right: with causal attention the padding reaches no earlier
    position, so no attention mask is needed. positions [B, T] bool: where the next token's logits are wanted.
    The hidden states follow the autocast around the call; the head runs in its own precision. Differentiable.
    UserError: see `check_head`.
    """
    check_head(model)
    # a sharded model gathers its weights around methods that it knows (see training/parallel.py)
    sharded = getattr(model, "sharded_logits", None)
    return logits_at(model, input_ids, positions) if sharded is None else sharded(input_ids, positions)


def logits_at(model, input_ids, positions):
    """`completion_logits` without its checks."""
    import torch

    from grafting.models import lean

    head = model.get_output_embeddings()
    if lean.applies(model):
        return head(lean.hidden_states(model, input_ids, positions))
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden[positions].to(head.weight.dtype)).float()


def continued_logits(model, prompts, completions):
    """`completion_logits` of completions (token ids) behind prompts whose pass is there (`lean.Prompts`)."""
    from grafting.models import lean

    return model.get_output_embeddings()(lean.continued(model, prompts, completions))
