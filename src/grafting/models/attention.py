"""Attention in float32 on the CPU, also under bfloat16 autocast.

torch's CPU flash attention is about eight times slower backward in bfloat16 than in float32 (measured), so
queries, keys and values are cast up for attention alone. On a GPU this is transformers' own `sdpa`.
"""

NAME = "sdpa_float32"


def register() -> str:
    """Make the implementation known to transformers; returns its name, for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, sdpa_float32)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # no mask where plain causal attention will do
    return NAME


def sdpa_float32(module, query, key, value, attention_mask, **kwargs):
    """Query [B, H, T, D], key and value [B, H_kv, S, D] -> (output [B, T, H, D], None)."""
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    # Also for float32 arguments (rotated queries are): under autocast SDPA itself would cast them down.
    with torch.autocast("cpu", enabled=False):
        output, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, **kwargs)
    return output.to(value.dtype), None
