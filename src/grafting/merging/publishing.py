"""A merge written out as an ordinary, complete Hugging Face directory, or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import yaml

from grafting import __version__
from grafting.errors import UserError
from grafting.merging.engine import run
from grafting.merging.planning import Plan, index_of
from grafting.models.safefiles import INDEX, ShardFile, content_digest

TOKENIZER = (
    "tokenizer*",
    "chat_template*",
    "additional_chat_templates",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)
# What makes weights a model one can chat with; anything else in the deployed directory (logs) stays there.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    *TOKENIZER,
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "NOTICE*",
)


def copy_companions(source: Path, out: Path, patterns: Iterable[str] = COMPANIONS) -> None:
    """Copy what stands beside the weights and belongs to the model."""
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            if path.is_dir():
                shutil.copytree(path, out / path.name, dirs_exist_ok=True, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(path, out / path.name)


def publish(plan: Plan, out: Path, threads: int, advance: Callable[[int], None], hashes: bool = False) -> None:
    """Compute a planned merge into a folder beside `out` and rename it: `out` is complete or does not exist.

    `hashes`: put sha256 of all weights, in and out, into the model card (they are read once more for that).
    UserError if `out` exists, the disk is full, or anything of the merge is broken.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists already: choose another --out, or remove it first")
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        _write(plan, partial, threads, advance, hashes)
        os.rename(partial, out)
    except OSError as error:
        raise UserError(_explained(error, out, plan)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(plan: Plan, folder: Path, threads: int, advance: Callable[[int], None], hashes: bool) -> None:
    free = shutil.disk_usage(folder).free
    if free < plan.nbytes:
        raise OSError(errno.ENOSPC, f"No space left on device ({free:,} bytes free)")
    shards: list[ShardFile] = []
    where = {}
    try:
        for file, tensors in plan.files.items():
            shards.append(ShardFile(folder / file, tensors, aligned=True))
            where.update((tensor.name, shards[-1]) for tensor in tensors)
        run(plan.merge, where, threads, advance)
    finally:
        for shard in shards:
            shard.close()
    if (index := index_of(plan.files)) is not None:
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    copy_companions(plan.reference.path, folder)
    if plan.recipe.tokenizer is not None:
        for pattern in TOKENIZER:
            for path in folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        copy_companions(plan.models[str(plan.recipe.tokenizer)].path, folder, TOKENIZER)
    _set_dtype(folder / "config.json", plan)
    described = yaml.safe_dump(plan.recipe.described(), sort_keys=False, allow_unicode=True)
    (folder / "recipe.yaml").write_text(described, encoding="utf-8")
    (folder / "README.md").write_text(_card(plan, folder, described, hashes), encoding="utf-8")


def _set_dtype(path: Path, plan: Plan) -> None:
    if plan.recipe.dtype == "as_base":
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = plan.recipe.dtype
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _card(plan: Plan, folder: Path, described: str, hashes: bool) -> str:
    rows = []
    for name, model in sorted(plan.models.items()):
        content = content_digest(model) if hashes else "not computed"
        rows.append(f"| `{Path(name).name}` | `{model.fingerprint}` | {content} |")
    made = ""
    if hashes:
        for file in plan.files:
            with open(folder / file, "rb") as stream:
                made += f"| `{file}` | {hashlib.file_digest(stream, 'sha256').hexdigest()} |\n"
        made = f"\n| weights here | sha256 |\n|---|---|\n{made}"
    return f"""---
tags: [merge, grafting]
---
# {plan.merge.operator.name} merge

Made by `grafting merge` {__version__} from the recipe below ({len(plan.merge.jobs)} tensors). The arithmetic was one
precision wider than the weights, with one rounding.

```yaml
{described.rstrip()}
```

The fingerprint is a sha256 over names, shapes, formats and samples of all tensors, however they are sharded; the
content hash covers every number.

| model | fingerprint | content |
|---|---|---|
{chr(10).join(rows)}
{made}"""


def _explained(error: OSError, out: Path, plan: Plan) -> str:
    reason = f"{out} cannot be written: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason += f"; {plan.nbytes:,} bytes are needed for the weights"
    return f"{reason}. Nothing is left behind"
