"""A user's own task as the plan sees it: read from one YAML or Python file, with the content of all files as hashes."""

import ast
import hashlib
from functools import cache
from pathlib import Path

import yaml

from grafting.errors import UserError
from grafting.tasks.records import SPLITS, options_of
from grafting.tasks.scorers import ANSWERS, RESOLVED

#: What the plan sets, not the user's file.
SET = {"name", "folder", "files", "builder"}
SIZES = ("train_items", "val_items", "test_items", "seed")


@cache
def _entry(path: Path, stamp: tuple[int, int]) -> dict:
    """{"name", "sha256", "bytes"} of a file; read once while its size and time stay as they are."""
    data = path.read_bytes()
    return {"name": path.name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def _file(path: Path, where: str) -> dict:
    try:
        stat = path.stat()
        return dict(_entry(path.resolve(), (stat.st_size, stat.st_mtime_ns)))
    except OSError as error:
        raise UserError(f"{where}: the file {path} cannot be read: {error.strerror}") from None


def describe(name: str, path: str) -> dict:
    """What `registry.known_tasks` says of a task, with "spec" (options and hashes) and "places" beside it.

    UserError: the file is absent, neither .yaml nor .py, or says something that no task can.
    """
    where, file = f"own_tasks.{name}", Path(path).expanduser()
    if file.suffix not in (".yaml", ".yml", ".py"):
        raise UserError(f"{where}: {path} must be a .yaml or a .py file")
    entry = _file(file, where)
    about = _python(name, file, entry, where) if file.suffix == ".py" else _yaml(name, file, where)
    if about["scorer"] not in ANSWERS and about["scorer"] not in RESOLVED:
        raise UserError(
            f"{where}: {path}: unknown scorer {about['scorer']!r}; known are {sorted({*ANSWERS, *RESOLVED})}"
        )
    # where the files lie is no part of the spec: moving them moves no key
    places = {"root": str(file.resolve().parent)}
    return {"summary": f"from {file.name}", "source": None, "option_defaults": {}, "places": places, **about}


def _yaml(name: str, file: Path, where: str) -> dict:
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: {file} is not valid YAML: {error}") from None
    if not isinstance(given, dict) or "data" not in given:
        raise UserError(f"{where}: {file} must be a mapping with `data`: a file name, or one per split")
    data = given.pop("data")
    splits = data if isinstance(data, dict) else {}
    if unknown := set(splits) - set(SPLITS):
        raise UserError(f"{where}: {file}: data names {sorted(unknown)}; splits are {', '.join(SPLITS)}")
    if taken := set(given) & (SET | {"splits"}):
        raise UserError(f"{where}: {file}: {sorted(taken)} cannot be set there")
    names = list(dict.fromkeys(splits.values())) if splits else [data]
    if any(not isinstance(n, str) or "/" in n for n in names):
        raise UserError(f"{where}: {file}: data files must lie beside it, got {names}")
    if splits and len(names) != len(splits):
        raise UserError(f"{where}: {file}: two splits name one file; say `data: {names[0]}` to have it cut")
    spec = {
        **given,
        "name": name,
        "folder": ".",
        "files": [_file(file.parent / n, where) for n in names],
        "splits": splits,
    }
    options = options_of({**dict.fromkeys(SIZES, 1), **spec})
    return {
        "builder": "records",
        "kind": options["kind"],
        "styles": ["expert"],
        "scorer": options["scorer"],
        "spec": spec,
    }


def _python(name: str, file: Path, entry: dict, where: str) -> dict:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: {file} is not valid Python: {error}") from None
    task = None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "TASK" for t in node.targets):
            try:
                task = ast.literal_eval(node.value)
            except ValueError:
                raise UserError(f"{where}: {file}: TASK must be a literal dict") from None
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if not isinstance(task, dict) or "examples" not in functions:
        raise UserError(f"{where}: {file} must state TASK = {{...}} and define examples(options, files)")
    known = {"kind", "styles", "scorer", "scorer_options", "demonstration_prompt", "notes", "files", "options"}
    if unknown := set(task) - known:
        raise UserError(f"{where}: {file}: TASK has unknown keys {sorted(unknown)}; known are {sorted(known)}")
    spec = {
        "name": name,
        "folder": ".",
        "file": entry,
        "files": [_file(file.parent / n, where) for n in task.get("files", [])],
        "task": {key: value for key, value in task.items() if key not in ("files", "options")},
        "options": task.get("options", {}),
    }
    return {
        "builder": "python",
        "kind": task.get("kind", "skill"),
        "styles": task.get("styles", ["expert"]),
        "scorer": "python" if "score" in functions else task.get("scorer", "exact"),
        "spec": spec,
    }
