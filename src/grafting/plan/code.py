"""Digest of the code that makes a stage's payloads.

It covers the syntax trees of the stage's entry module and of all it imports inside the package (imports
inside functions too), without comments, docstrings, formatting and annotations, and the locked versions of
the libraries that decide bytes. The dump is our own: that of the standard library changes between versions
of Python. The package's provenance, planning and Hub code is left out: it moves bytes whose hashes or revisions
are in the key, it does not make them.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from grafting.errors import UserError
from grafting.provenance.files import digest

PACKAGE = Path(__file__).resolve().parents[1]
PROJECT = PACKAGE.parents[1]
#: Libraries whose version can change a payload's bytes: import name -> names in the lock.
DECIDING = {
    "torch": ("torch",),
    # it renders chat templates with jinja2
    "transformers": ("transformers", "tokenizers", "jinja2"),
    "tokenizers": ("tokenizers",),
    "safetensors": ("safetensors",),
    "numpy": ("numpy",),
    "accelerate": ("accelerate",),
    "gguf": ("gguf",),
    "yaml": ("pyyaml",),
    "pydantic": ("pydantic",),
    "pandas": ("pandas",),
    "scipy": ("scipy",),
    "lm_eval": ("lm-eval",),
    "matplotlib": ("matplotlib",),
}
UNCOUNTED = ("grafting.provenance", "grafting.plan", "grafting.config", "grafting.errors", "grafting.hub")
#: This one writes into payloads.
COUNTED = {"grafting.provenance.files"}
#: Fields of syntax nodes that carry no behaviour.
IGNORED = {"annotation", "returns", "type_comment", "type_params", "type_ignores", "kind", "ctx"}

ENTRIES = {
    "data": "grafting.tasks.stage",
    "models": "grafting.models.stage",
    "lineage": "grafting.training.lineage",
    "rollout": "grafting.rollouts.stage",
    "train": "grafting.training.stage",
    "sensitivity": "grafting.sensitivity.stage",
    "merge": "grafting.merging.stage",
    "evaluate": "grafting.evaluation.stage",
    "select": "grafting.evaluation.select",
    "report": "grafting.analysis.report",
}


def _file(module: str) -> Path | None:
    path = PACKAGE.parent.joinpath(*module.split("."))
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None


def _dump(node: object, in_class: bool = False) -> object:
    if isinstance(node, ast.AST):
        fields = {}
        for name, value in ast.iter_fields(node):
            # in the body of a class an annotation makes a field (dataclasses, pydantic): it is behaviour
            if name in IGNORED and not (in_class and isinstance(node, ast.AnnAssign) and name == "annotation"):
                continue
            if name == "body" and isinstance(value, list):
                value = [item for item in value if not _is_text(item)]
            if value is None or value == []:
                # fields added by later Pythons are empty in older code
                continue
            fields[name] = _dump(value, isinstance(node, ast.ClassDef) and name == "body")
        return [type(node).__name__, fields]
    if isinstance(node, list):
        return [_dump(item, in_class) for item in node]
    if isinstance(node, str):
        return node
    # numbers, bytes, Ellipsis: 1, 1.0 and "1.0" differ
    return [type(node).__name__, repr(node)]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@cache
def _module(module: str) -> tuple[str, frozenset[str], frozenset[str]]:
    """Digest of one module, the package's modules it imports, the top-level names of the others."""
    path = _file(module)
    if path is None:
        raise UserError(f"the package has no module {module}; is the installation complete?")
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    own, others = set(), set()

    def found(name: str) -> None:
        if name.split(".")[0] != "grafting":
            others.add(name.split(".")[0])
            return
        parts = name.split(".")
        own.update(m for i in range(1, len(parts) + 1) if _file(m := ".".join(parts[:i])) is not None)

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found(alias.name)
        elif isinstance(node, ast.ImportFrom):
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            found(source)
            for alias in node.names:
                found(f"{source}.{alias.name}")
    return digest(_dump(tree), 64), frozenset(own), frozenset(others)


@cache
def closure(*entries: str) -> tuple[str, ...]:
    """Modules of the package that decide the output of the entries, sorted."""
    seen: set[str] = set()
    waiting = list(entries)
    while waiting:
        module = waiting.pop()
        if module in seen or (module.startswith(UNCOUNTED) and module not in COUNTED):
            continue
        seen.add(module)
        waiting.extend(_module(module)[1])
    return tuple(sorted(seen))


@cache
def locked_versions() -> dict[str, str]:
    """Name -> version of the project's lock; empty build tags, never the environment."""
    path = PROJECT / "requirements.lock"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: the lock of library versions is missing; restore it from git") from None
    pairs = [re.match(r"^([A-Za-z0-9_.-]+)==([^\s;+]+)", line) for line in lines]
    return {m.group(1).lower().replace("_", "-"): m.group(2) for m in pairs if m}


#: code digest -> what it is made of, for all digests asked for in this process
MANIFESTS: dict[str, dict[str, dict[str, str]]] = {}


@cache
def code_digest(entry: str, *parts: str) -> str:
    """12 hex digits for a stage's entry (a key of ENTRIES) and the modules that it resolves by name."""
    modules = closure(ENTRIES[entry], *parts)
    imported = {name for module in modules for name in _module(module)[2]}
    libraries = sorted({library for name in imported & DECIDING.keys() for library in DECIDING[name]})
    versions = {name: locked_versions().get(name, "unlocked") for name in libraries}
    manifest = {"modules": {module: _module(module)[0][:16] for module in modules}, "libraries": versions}
    MANIFESTS[digest(manifest)] = manifest
    return digest(manifest)
