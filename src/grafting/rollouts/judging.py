"""A judge in this process: a pinned model that is asked greedily, with the engine that generates all else.

Loaded once per process, in 32 bit on a CPU, in its own precision on an accelerator; it stays beside the model that is
evaluated, so it wants memory of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from grafting import hub
from grafting.errors import UserError
from grafting.models import chat, load_model, load_tokenizer
from grafting.models.stage import directory_digest
from grafting.rollouts.engine import generate
from grafting.rollouts.runtime import device

BATCH = 8


def replies(prompts: Sequence[str], local: Mapping[str, str | None], max_tokens: int) -> list[str]:
    """The judge's reply to every prompt, as the user's only message. local: {path, sha256} or {hub, revision}.

    UserError: a model that cannot be had or is not what it was pinned as, a prompt longer than its context.
    """
    if not prompts:
        return []
    model, tokenizer = _loaded(json.dumps(dict(local), sort_keys=True))
    encoded = [chat.encode_prompt(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.autocast(device().type, enabled=False):
        answers = generate(
            model, encoded, max_new_tokens=max_tokens, stop_ids=chat.stop_ids(model, tokenizer), pad_id=pad_id,
            batch_size=BATCH,
        )  # fmt: skip
    return [chat.decode(tokenizer, answer.tokens) for answer in answers]


@cache
def _loaded(stated: str):
    local = json.loads(stated)
    if local.get("hub"):
        folder = hub.snapshot(local["hub"], local["revision"])
    else:
        folder = Path(local["path"]).expanduser()
        if (found := directory_digest(folder)) != local["sha256"]:
            raise UserError(f"judge.local: {folder} has sha256 {found}, expected {local['sha256']}; pin what is there")
    return load_model(folder, "float32" if device().type == "cpu" else "as_saved").to(device()), load_tokenizer(folder)
