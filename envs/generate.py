"""Writes the pinned environments from one source.

    python envs/generate.py --lock    requirements.lock from what is installed, then the conda files
    python envs/generate.py           envs/cpu.yaml, envs/cuda.yaml and envs/apptainer.def from pyproject.toml
                                      and the lock

The lock holds every package that the runtime and the extras `dev`, `lora` and `slurm` need, with the versions
installed in the running environment, without build tags (`+cpu`). What torch needs for one kind of
accelerator only (nvidia-*, triton, ...) is left out: its own metadata pins it, and other builds lack it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKED_EXTRAS = ("dev", "lora", "slurm")
FLAVOURS = ("cpu", "cuda")
#: Packages that only some builds of torch need.
BUILD_SPECIFIC = re.compile(r"^(nvidia-|cuda-|triton|pytorch-triton)")
LOCK_HEAD = """\
# Every version of the runtime and of the extras dev, lora and slurm; written by `make lock`, read by `make setup`.
"""


def project(root: Path = ROOT) -> dict:
    """The [project] table of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def direct_requirements(table: dict) -> list[Requirement]:
    """What the project itself asks for: runtime and the locked extras."""
    extras = table["optional-dependencies"]
    lines = [*table["dependencies"], *(line for extra in LOCKED_EXTRAS for line in extras[extra])]
    return [Requirement(line) for line in lines]


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Name -> installed version of the requirements and of all they need, sorted by name.

    Raises SystemExit if a package is not installed or an installed version is not the one asked for.
    """
    versions: dict[str, str] = {}
    visited: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if BUILD_SPECIFIC.match(name):
            continue
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            sys.exit(f"lock: {name} is not installed; run `make setup` first")
        version = installed.version.split("+")[0]
        if not requirement.specifier.contains(version, prereleases=True):
            sys.exit(f"lock: {name} {version} is installed, but {requirement} is asked for: install that first")
        versions[name] = version
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in visited:
                visited.add((name, wanted))
                waiting += [(Requirement(line), wanted) for line in installed.requires or []]
    return dict(sorted(versions.items()))


def lock_text(table: dict) -> str:
    """The content of requirements.lock for the running environment."""
    pins = closure(direct_requirements(table))
    return LOCK_HEAD + "".join(f"{name}=={version}\n" for name, version in pins.items())


def read_lock(text: str) -> dict[str, str]:
    """Name -> version from the text of a lock."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def environment_text(table: dict, pins: dict[str, str], flavour: str) -> str:
    """A conda environment file. `cuda`: torch as its default Linux wheel; `cpu`: conda-forge's CPU build."""
    pins = dict(pins)
    head = [
        f"# {flavour.upper()} environment, written by envs/generate.py from pyproject.toml and the lock.",
        f"# conda env create -f envs/{flavour}.yaml && conda activate grafting-{flavour}",
        "# python -m pip install --no-deps --no-build-isolation -e .",
    ]
    conda = [f"python{table['requires-python']}", "pip"]
    if flavour == "cpu":
        conda.append(f"pytorch-cpu={pins.pop('torch')}")
    lines = [
        *head,
        f"name: grafting-{flavour}",
        "channels:",
        "  - conda-forge",
        "  - nodefaults",
        "dependencies:",
        *(f'  - "{item}"' for item in conda),
        "  - pip:",
        *(f"      - {name}=={version}" for name, version in pins.items()),
    ]
    return "\n".join(lines) + "\n"


def container_text(table: dict, pins: dict[str, str]) -> str:
    """An Apptainer definition with the locked packages (torch as its default Linux wheel) and this project."""
    python = table["requires-python"].removeprefix(">=")
    lines = [
        "# Container, written by envs/generate.py from pyproject.toml and the lock.",
        "# In the project's folder:  apptainer build grafting.sif envs/apptainer.def",
        "# then                      apptainer exec --nv grafting.sif snakemake --cores all",
        "Bootstrap: docker",
        f"From: python:{python}-slim-bookworm",
        "",
        "%files",
        "    pyproject.toml README.md LICENSE /opt/grafting/",
        "    src /opt/grafting/src",
        "",
        "%post",
        "    apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*",
        "    cat >/opt/grafting/requirements.lock <<'END'",
        *(f"{name}=={version}" for name, version in pins.items()),
        "END",
        "    python -m pip install --no-cache-dir --no-deps -r /opt/grafting/requirements.lock",
        "    # what torch's wheel needs for accelerators is pinned by torch itself",
        f"    python -m pip install --no-cache-dir torch=={pins['torch']}",
        "    python -m pip install --no-cache-dir --no-deps --no-build-isolation /opt/grafting",
        "",
        "%environment",
        "    export PYTHONNOUSERSITE=1",
        "",
        "%test",
        "    python -c 'import grafting, torch, transformers'",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the files; see the module's docstring."""
    parser = argparse.ArgumentParser(description="write the pinned environments")
    parser.add_argument("--lock", action="store_true", help="first write the lock, from what is installed")
    lock = ROOT / "requirements.lock"
    table = project()
    if parser.parse_args().lock:
        lock.write_text(lock_text(table), encoding="utf-8")
    pins = read_lock(lock.read_text(encoding="utf-8"))
    for flavour in FLAVOURS:
        text = environment_text(table, pins, flavour)
        (ROOT / "envs" / f"{flavour}.yaml").write_text(text, encoding="utf-8")
    (ROOT / "envs" / "apptainer.def").write_text(container_text(table, pins), encoding="utf-8")


if __name__ == "__main__":
    main()
