"""Digest of the code that makes a stage's payloads.

It covers the syntax trees (see `grafting.plan.syntax`) of the stage's entry module and of all it imports inside
the package, imports inside functions too; the other files of the package that these modules read; and the locked
versions of the libraries that decide bytes. The package's provenance, planning and Hub code is left out: it moves
bytes whose hashes or revisions are in the key, it does not make them. A module that is imported by a computed name
must be given as a part.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from grafting.errors import UserError
from grafting.plan import syntax
from grafting.plan.aliases import ALIASES, Aliases, read_aliases
from grafting.plan.facts import Facts
from grafting.provenance.files import digest, file_digest

PACKAGE = Path(__file__).resolve().parents[1]
PROJECT = PACKAGE.parents[1]
#: Libraries whose version can change a payload's bytes: import name -> names in the lock.
DECIDING = {
    "torch": ("torch",),
    # it renders chat templates with jinja2
    "transformers": ("transformers", "tokenizers", "jinja2"),
    "jinja2": ("jinja2",),
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
    "peft": ("peft",),
    "matplotlib": ("matplotlib",),
}
UNCOUNTED = ("grafting.provenance", "grafting.plan", "grafting.config", "grafting.errors", "grafting.hub")
#: This one writes into payloads.
COUNTED = {"grafting.provenance.files"}
#: what this and earlier processes found in the package's modules
FACTS = Facts()
ENTRIES = {
    "data": "grafting.tasks.stage",
    "models": "grafting.models.stage",
    "lineage": "grafting.training.lineage",
    "rollout": "grafting.rollouts.stage",
    "train": "grafting.training.stage",
    "sensitivity": "grafting.sensitivity.stage",
    "merge": "grafting.merging.stage",
    "deltas": "grafting.merging.deltas",
    "evaluate": "grafting.evaluation.stage",
    "frontier": "grafting.evaluation.frontier",
    "select": "grafting.evaluation.select",
    "report": "grafting.analysis.report",
}


@cache
def _file(module: str) -> Path | None:
    path = PACKAGE.parent.joinpath(*module.split("."))
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None


@cache
def module_facts(module: str) -> syntax.Module:
    """What one module of the package does and imports; UserError if there is none of that name."""
    path = _file(module)
    if path is None:
        raise UserError(f"the package has no module {module}; is the installation complete?")
    return FACTS.of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py", str(path))


@cache
def imports(module: str) -> frozenset[str]:
    """The package's modules that a module may import, with the packages around them."""
    found = set()
    for name in module_facts(module).own:
        parts = name.split(".")
        found |= {m for i in range(1, len(parts) + 1) if _file(m := ".".join(parts[:i])) is not None}
        package, _, last = name.rpartition(".")
        if _file(name) is None and _file(package) is not None and last in (lazy := module_facts(package).lazy):
            found.add(lazy[last])
    return frozenset(found)


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
        waiting.extend(imports(module))
    return tuple(sorted(seen))


@cache
def data_files() -> dict[str, str]:
    """Path in the package -> hash of every file in it that is no Python: templates, tables, prompts."""
    found = {}
    for path in sorted(PACKAGE.rglob("*")):
        place = path.relative_to(PACKAGE)
        hidden = any(part.startswith((".", "__pycache__")) for part in place.parts)
        if not hidden and path.suffix not in (".py", ".pyc") and not path.name.endswith("~") and path.is_file():
            found[place.as_posix()] = file_digest(path)[:16]
    return found


@cache
def files_read(module: str) -> frozenset[str]:
    """The package's other files that a module may read: those that it names, and, if it asks where it lies
    (`__file__`, importlib.resources), all below its folder and below the packages that it names."""
    facts, found = module_facts(module), set()
    for path in data_files():
        name = path.rpartition("/")[2]
        if any(text == name or text.endswith("/" + name) for text in facts.texts):
            found.add(path)
    if facts.places and data_files():
        packages = {text for text in facts.texts if text.partition(".")[0] == PACKAGE.name and _file(text) is not None}
        for folder in {_file(m).parent.relative_to(PACKAGE).as_posix() for m in {module, *packages}}:
            found |= {path for path in data_files() if folder == "." or path.startswith(folder + "/")}
    return frozenset(found)


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


@cache
def project_aliases() -> Aliases:
    """What the project's `aliases.yaml` declares equal to something older."""
    return read_aliases(PROJECT / ALIASES)


#: code digest -> what it is made of, for all digests asked for in this process
MANIFESTS: dict[str, dict[str, dict[str, str]]] = {}


@cache
def own_digest(entry: str, *parts: str) -> str:
    """12 hex digits for a stage's entry (a key of ENTRIES) and the modules that it resolves by name."""
    modules = closure(ENTRIES[entry], *parts)
    imported = {name for module in modules for name in module_facts(module).others}
    libraries = sorted({library for name in imported & DECIDING.keys() for library in DECIDING[name]})
    versions = {name: locked_versions().get(name, "unlocked") for name in libraries}
    manifest = {"modules": {module: module_facts(module).digest[:16] for module in modules}, "libraries": versions}
    if files := {path: data_files()[path] for module in modules for path in files_read(module)}:
        manifest["files"] = files
    MANIFESTS[digest(manifest)] = manifest
    FACTS.save()
    return digest(manifest)


@cache
def code_digest(entry: str, *parts: str) -> str:
    """`own_digest`, or the older one that it is declared equal to: what enters a key."""
    return project_aliases().resolve("code", own_digest(entry, *parts))
