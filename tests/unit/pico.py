"""A model of a few thousand parameters under Qwen2's architecture that reads any text, and MMLU's archive in small."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, seed: int = 0, dtype: str = "float32", words: tuple[str, ...] = ()) -> Path:
    """A model directory: one layer, a token per byte, ChatML; `words` are tokens of their own."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from grafting.models import save_model

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special[1:2],
    )
    tokenizer.add_tokens(list(words))
    tokenizer.chat_template = CHATML
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192, tie_word_embeddings=False, initializer_range=0.2,
        eos_token_id=2, pad_token_id=0, bos_token_id=None, dtype=dtype,
    )  # fmt: skip
    save_model(Qwen2ForCausalLM(config).to(getattr(torch, dtype)), tokenizer, folder)
    return folder


def write_mmlu(path: Path, items: int = 60) -> Path:
    """An archive with the layout of MMLU's: sums, with the right option in every place."""
    rows = [
        f"What is {i} + {i % 7}?," + ",".join(str(i + i % 7 + k - i % 4) for k in range(4)) + f",{'ABCD'[i % 4]}\n"
        for i in range(items)
    ]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for number, split in enumerate(("dev", "val", "test")):
            archive.writestr(f"data/{split}/sums_{split}.csv", "".join(rows[number::3]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.getvalue())
    return path
