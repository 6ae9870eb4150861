"""What a sidecar records about the circumstances of a job. No secrets: nothing of the environment's variables."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata

LIBRARIES = ("torch", "transformers", "tokenizers", "accelerate", "safetensors", "numpy", "pandas", "snakemake", "dvc")


def versions() -> dict[str, str]:
    """Installed versions of the libraries that matter, as they report them, and Python's."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, object]:
    """Commit of the work tree and whether tracked files differ from it; nulls outside git."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"revision": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def host() -> dict[str, object]:
    """Machine type: what decides whether bytes can be expected to be equal."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        model = names[0] if names else model
    except OSError:
        pass
    facts = {"system": platform.system(), "machine": platform.machine(), "cpu": model, "cores": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return facts
