"""The small model made from scratch, and its word-level tokenizer."""

from grafting.errors import UserError

PAD, EOS, CLOSE = "<pad>", "<eos>", "</ans>"
DEFAULT_STD = 0.02  # transformers' initial standard deviation
KEYS = {"layers", "width", "feed_forward", "heads", "context", "embedding_std"}

_TEMPLATE = """\
{%- for message in messages -%}
{%- if not loop.first %} {% endif -%}
{%- if message['role'] == 'user' -%}<user> {{ message['content'] }}
{%- elif message['role'] == 'assistant' -%}<bot> {{ message['content'] }} ENDING
{%- else -%}{{ raise_exception('the tiny language has user and assistant messages only') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %} <bot>{% endif -%}
"""
# What post-training adds is a suffix, so the first answer token stands in the same place in both formats.
TEMPLATES = {
    "base": _TEMPLATE.replace("ENDING", EOS),
    "deployed": _TEMPLATE.replace("ENDING", f"{CLOSE} {EOS}"),
}


def new_model(architecture: dict, vocabulary: list[str], seed: int):
    """A randomly initialised Llama in float32, training mode.

    architecture: layers, width, feed_forward, heads, context (tokens), embedding_std (of the tied
    embeddings). Equal seeds give equal weights; torch's global generator is left as it was. UserError:
    unknown or missing key, width not divisible by heads.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from grafting.models.attention import register

    if set(architecture) != KEYS:
        odd = sorted(set(architecture) ^ KEYS)
        raise UserError(f"lineage.architecture: missing or unknown {odd}; it takes {sorted(KEYS)}")
    if architecture["width"] % (2 * architecture["heads"]):
        raise UserError(
            f"lineage.architecture: width {architecture['width']} must be a multiple of twice the heads "
            f"({architecture['heads']}): rotary positions need an even head size"
        )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=architecture["width"],
        intermediate_size=architecture["feed_forward"],
        num_hidden_layers=architecture["layers"],
        num_attention_heads=architecture["heads"],
        num_key_value_heads=architecture["heads"],
        max_position_embeddings=architecture["context"],
        tie_word_embeddings=True,
        pad_token_id=vocabulary.index(PAD),
        eos_token_id=vocabulary.index(EOS),
        bos_token_id=None,
        attn_implementation=register(),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(architecture["embedding_std"] / DEFAULT_STD)
    return model


def new_tokenizer(vocabulary: list[str], template: str):
    """Word-level tokenizer over words separated by spaces; ids in the vocabulary's order. No BOS, no unknown.

    template: "base" `<user> q <bot> y <eos>`, or "deployed" `<user> q <bot> y </ans> <eos>`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=EOS,
        extra_special_tokens=[CLOSE],
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer
