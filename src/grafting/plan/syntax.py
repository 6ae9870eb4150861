"""What a module of the package does, as plain values that are equal under every Python from 3.11 on.

The dump of the standard library changes between versions of Python (fields are added, f-strings are cut
differently), and it keeps what has no effect. This one leaves out docstrings, `pass`, annotations of
parameters and variables, imports that only annotations use, and the order of imports. In the body of a class an
annotation makes a field (dataclasses, pydantic), so there it stays.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from grafting.provenance.files import canonical, digest

#: Fields of syntax nodes that carry no behaviour.
IGNORED = {"annotation", "returns", "type_comment", "type_params", "type_ignores", "kind", "ctx", "simple"}
#: Modules whose imports do nothing: the names are seen where they are used.
EFFECTLESS = {"__future__", "typing", "collections.abc"}
#: What `f"{x:}"` has more than `f"{x}"`, in some Pythons.
EMPTY_FORMAT = ("format_spec", ["Constant", {"value": ""}])
#: Names that give a module the place of files beside it.
PLACES = {"__file__", "__path__", "resources", "get_data", "PackageLoader"}


def dump(node: object, in_class: bool = False) -> object:
    """A syntax tree as nested lists of plain JSON values."""
    kind = type(node)
    if kind is ast.JoinedStr:
        return _joined(node)
    if issubclass(kind, ast.AST):
        fields = {}
        for name in kind._fields:
            value = getattr(node, name, None)
            # fields added by later Pythons are empty in older code
            if value is None or value == []:
                continue
            if name in IGNORED and not (in_class and kind is ast.AnnAssign and name == "annotation"):
                continue
            if type(value) is list and isinstance(value[0], ast.stmt):
                value = _statements(value, kind is ast.ClassDef)
            else:
                value = dump(value)
            if value != [] and (name, value) != EMPTY_FORMAT:
                fields[name] = value
        return [kind.__name__, fields]
    if kind is list:
        return [dump(item) for item in node]
    if kind is str and (node.isascii() or not any("\ud800" <= c <= "\udfff" for c in node)):
        return node
    # numbers, bytes, Ellipsis, text that has no UTF-8: 1, 1.0 and "1.0" differ
    return [type(node).__name__, ascii(node)]


def _statements(nodes: list[ast.stmt], in_class: bool) -> list[object]:
    found: list[object] = []
    imports: list[object] = []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            if not (isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in EFFECTLESS):
                node.names.sort(key=lambda alias: (alias.name, alias.asname or ""))
                imports.append(dump(node))
            continue
        found += sorted(imports, key=canonical)
        imports = []
        if isinstance(node, ast.Pass) or _is_text(node):
            continue
        if _for_types_only(node):
            found += _statements(node.orelse, in_class)
        elif isinstance(node, ast.AnnAssign) and not in_class:
            if node.value is not None:
                found.append(dump(ast.Assign(targets=[node.target], value=node.value)))
        else:
            found.append(dump(node, in_class))
    return found + sorted(imports, key=canonical)


def _is_text(node: ast.AST) -> bool:
    return type(node) is ast.Expr and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _for_types_only(node: ast.AST) -> bool:
    if type(node) is not ast.If:
        return False
    test = node.test
    return (test.id if isinstance(test, ast.Name) else getattr(test, "attr", None)) == "TYPE_CHECKING"


def _joined(node: ast.JoinedStr) -> object:
    """An f-string as text and fields, neighbouring pieces of text joined: Pythons cut them differently."""
    parts: list[object] = []
    for value in node.values:
        if not isinstance(value, ast.Constant):
            parts.append(dump(value))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += value.value
        elif value.value:
            parts.append(value.value)
    if not parts or parts == [parts[0]] and isinstance(parts[0], str):
        return dump(ast.Constant(value="".join(parts)))
    return ["JoinedStr", parts]


@dataclass(frozen=True)
class Module:
    """What the code digest needs to know of one module.

    own:     modules of the package that it may import, by full name, existing or not (`from a import b` names a.b).
    others:  top-level names of all other imports.
    lazy:    name -> submodule, where the module offers names that it imports on first use (a literal `_LAZY`).
    texts:   its text constants, docstrings left out.
    places:  it asks where files lie beside it.
    dynamic: it imports modules whose names are not literals.
    """

    digest: str
    own: frozenset[str]
    others: frozenset[str]
    lazy: dict[str, str] = field(default_factory=dict)
    texts: frozenset[str] = frozenset()
    places: bool = False
    dynamic: bool = False


def read(text: str, name: str, is_package: bool, filename: str = "<module>") -> Module:
    """Everything about one module's source. `name`: its full name, which relative imports start from."""
    tree = ast.parse(text, filename=filename)
    nodes = _walk(tree)
    package = name if is_package else name.rpartition(".")[0]
    imported, dynamic = set(), False
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = _absolute("." * node.level + (node.module or ""), package)
            imported |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__") and node.args:
            if isinstance(node.args[0], ast.Constant):
                imported.add(_absolute(node.args[0].value, package))
            else:
                dynamic = True
    root = name.partition(".")[0]
    return Module(
        digest=digest(dump(tree), 64),
        own=frozenset(i for i in imported if i.partition(".")[0] == root),
        others=frozenset(i.partition(".")[0] for i in imported) - {root},
        lazy=_lazy(tree, name),
        texts=frozenset(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)),
        places=bool(PLACES & {_name(node) for node in nodes}) or any(i.rpartition(".")[2] in PLACES for i in imported),
        dynamic=dynamic,
    )


def _walk(root: ast.AST) -> list[ast.AST]:
    """All nodes below one, in no particular order, without bare strings and what only type checkers see."""
    found, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        if _for_types_only(node):
            waiting += node.orelse
        elif not _is_text(node):
            found.append(node)
            waiting += ast.iter_child_nodes(node)
    return found


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _absolute(name: str, package: str) -> str:
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    base = package.rsplit(".", level - 1)[0]
    return ".".join(part for part in (base, name[level:]) if part)


def _lazy(tree: ast.Module, name: str) -> dict[str, str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [_name(target) for target in node.targets] == ["_LAZY"]:
            return {key: f"{name}.{submodule}" for key, submodule in ast.literal_eval(node.value).items()}
    return {}
