"""What a sidecar records about the circumstances of a job.

No secrets: of the environment only the variables of a short list, and neither paths nor the machine's name.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata

LIBRARIES = ("torch", "transformers", "tokenizers", "accelerate", "safetensors", "numpy", "pandas", "snakemake", "dvc")

#: Variables that can move bytes or times: threads, memory, devices, offline modes, the cluster's job.
ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "GOMP_SPINCOUNT",
    "HF_HUB_OFFLINE",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "SLURM_JOB_ID",
    "TOKENIZERS_PARALLELISM",
    "TRANSFORMERS_OFFLINE",
)


def environment() -> dict[str, str]:
    """The variables of `ENVIRONMENT` that are set."""
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}


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
