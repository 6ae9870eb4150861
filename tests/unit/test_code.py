"""Digests of code: equal under every Python, blind to what has no effect, and seeing all that has."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grafting.plan import code, syntax
from grafting.plan.facts import Facts
from grafting.provenance.files import digest

#: Syntax whose standard dump differs between Pythons, or that is rare enough to be forgotten.
SAMPLE = '''
import a.b as c, d
from . import e
from .f import g as h, i


@decorator(1, *args, k=2, **options)
class C(Base, metaclass=Meta):
    """Text."""

    field: int = 3
    other: "str"

    async def method(self, x, /, y: int = 1, *rest, z=None, **more) -> str:
        async with self.a as b, self.c:
            return await b
        async for i in x:
            yield [j async for j in i if j]


def strings(x, w):
    a = f"a{x}b" f"c{x!r:>{w}}" "d" f""
    b = f"{x = }{x=!s:^10}{{}}{x:}"
    c = f"{f'{x}' + 'n'}" u"unicode" r"\\x"
    d = f"""{
        x
    }"""
    e = "plain" f"text"
    return a, b, c, d, e, "\\ud800", b"\\xff", 1e-300, 1_000, 0x10, 2j, ..., -1, None, True


def control(x):
    global state
    try:
        pass
    except* (ValueError, TypeError) as group:
        raise RuntimeError from group
    else:
        x += 1
    finally:
        del x
    match x:
        case None | True:
            return
        case {"a": [1, *rest], **others} if (n := len(rest)) > 2:
            return n
        case C(field=3) | [_, _] as whole:
            return whole
    while x[1:2, ..., ::3]:
        break
    else:
        assert x, "message"
    for i, (*j, k) in {**x, "a": 1}.items():
        continue
    return lambda *a, b=1: (yield) if not a else {q for q in b if q} @ x // 2
'''
SAMPLE_DIGEST = "33265bab2ba2"


def dumped(text: str) -> object:
    return syntax.dump(ast.parse(text))


def pythons() -> list[str]:
    """Every Python from 3.11 to 3.13 on this machine that starts."""
    found = []
    for minor in (11, 12, 13):
        versions = Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")
        path = next(map(str, sorted(versions)), None) or shutil.which(f"python3.{minor}")
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            found.append(path)
    return found


def test_digest_of_a_sample_is_the_recorded_one():
    """Recorded once: this Python must find the same as the one that recorded it."""
    assert syntax.read(SAMPLE, "grafting.sample.module", False).digest[:12] == SAMPLE_DIGEST


@pytest.mark.parametrize("python", pythons())
def test_other_pythons_find_the_same_digests(python, tmp_path):
    """The sample, and every module of the package, in a process of another Python."""
    (tmp_path / "sample.py").write_text(SAMPLE)
    files = [str(tmp_path / "sample.py"), *map(str, sorted(code.PACKAGE.rglob("*.py")))]
    text = (
        "import json, sys; from pathlib import Path; from grafting.plan import syntax; "
        "print(json.dumps([syntax.read(Path(f).read_text(encoding='utf-8'), 'a.b', False).digest "
        "for f in json.load(sys.stdin)]))"
    )
    done = subprocess.run(
        [python, "-c", text], input=json.dumps(files), env={"PYTHONPATH": str(code.PACKAGE.parent)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    here = [syntax.read(Path(f).read_text(encoding="utf-8"), "a.b", False).digest for f in files]
    assert json.loads(done.stdout) == here


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1  # comment", "x = 1"),
        ("x = (1 +\n     2)", "x = 1 + 2"),
        ('def f(x):\n    """Text."""\n    return x', "def f(x):\n    return x"),
        ("def f(x: int) -> str:\n    y: int = x\n    z: str\n    return y", "def f(x):\n    y = x\n    return y"),
        ("class E(Exception):\n    pass", 'class E(Exception):\n    """Text."""'),
        ("from __future__ import annotations\nfrom typing import Any\nx = 1", "x = 1"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nx = 1", "x = 1"),
        ("import b\nimport a\nfrom c import e, d", "import a\nimport b\nfrom c import d, e"),
        ("x = f'a' 'b'", "x = 'ab'"),
        ("if x:\n    pass\nelif y:\n    z", "if x:\n    pass\nelse:\n    if y:\n        z"),
    ],
)
def test_what_has_no_effect_is_not_seen(one, other):
    assert dumped(one) == dumped(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("class A:\n    f: float = 1", "class A:\n    f: int = 1"),
        ("class A:\n    f: float", "class A:\n    pass"),
        ("x = 1", "x = 1.0"),
        ("x = '1.0'", "x = 1.0"),
        ("x = b'a'", "x = 'a'"),
        ("x = f'{y}'", "x = f'{y!r}'"),
        ("x = f'{y:.2f}'", "x = f'{y:.3f}'"),
        ("x = f'a{y}'", "x = f'{y}a'"),
        ("x = a - b", "x = b - a"),
        ("f(1)\ng(2)", "g(2)\nf(1)"),
        ("if x:\n    y()", "if x:\n    pass\nelse:\n    y()"),
        ("match x:\n    case None:\n        y()", "match x:\n    case True:\n        y()"),
        ("def f(x=1): pass", "def f(x=2): pass"),
        ("@a\ndef f(): pass", "def f(): pass"),
        ("import a", "import a as b"),
    ],
)
def test_what_has_an_effect_is_seen(one, other):
    assert dumped(one) != dumped(other)


CACHED = (code._file, code.module_facts, code.imports, code.closure, code.data_files, code.files_read, code.own_digest)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An invented package in place of ours; `package(path, text)` writes one of its files."""

    def write(path: str, text: str) -> None:
        file = tmp_path / "grafting" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in [file.parent, *file.parent.parents]:
            if tmp_path in folder.parents and path.endswith(".py") and not (folder / "__init__.py").exists():
                (folder / "__init__.py").write_text("")
        file.write_text(text)
        for function in CACHED:
            function.cache_clear()

    monkeypatch.setattr(code, "PACKAGE", tmp_path / "grafting")
    monkeypatch.setitem(code.ENTRIES, "toy", "grafting.toy.stage")
    yield write
    for function in CACHED:
        function.cache_clear()


def test_closure_follows_lazy_and_relative_imports(package):
    package("toy/stage.py", "def run(job):\n    from grafting.other import deep\n    from . import near\n")
    package("toy/near.py", "import importlib\ny = importlib.import_module('grafting.other.named')\n")
    package("other/deep.py", "from grafting.lazy import thing, here\n")
    package("other/named.py", "")
    package("other/unused.py", "")
    package("lazy/__init__.py", "_LAZY = {'thing': 'far', 'unasked': 'further'}\nhere = 1\n")
    package("lazy/far.py", "import torch\n")
    package("lazy/further.py", "import pandas\n")
    assert code.closure("grafting.toy.stage") == (
        "grafting", "grafting.lazy", "grafting.lazy.far", "grafting.other", "grafting.other.deep",
        "grafting.other.named", "grafting.toy", "grafting.toy.near", "grafting.toy.stage",
    )  # fmt: skip
    code.own_digest("toy")
    (manifest,) = [m for m in code.MANIFESTS.values() if "grafting.toy.stage" in m["modules"]]
    assert set(manifest["libraries"]) == {"torch"}
    assert manifest["libraries"]["torch"] == code.locked_versions()["torch"] != "unlocked"
    code.MANIFESTS.clear()


@pytest.mark.parametrize(
    "reader",
    [
        "from pathlib import Path\ntext = (Path(__file__).parent / 'words' / 'list.txt').read_text()",
        "from pathlib import Path\nfiles = sorted(Path(__file__).parent.glob('words/*'))",
        "from importlib import resources\ntext = resources.files('grafting.toy').joinpath('words').iterdir()",
        "from importlib.resources import files\ntext = files(__package__)",
        "import pkgutil\ntext = pkgutil.get_data('grafting.toy', 'words/list.txt')",
        "from jinja2 import Environment, PackageLoader\nloader = Environment(loader=PackageLoader('grafting.toy'))",
    ],
)
def test_files_that_a_stage_reads_are_seen(package, reader):
    package("toy/stage.py", reader + "\n")
    package("toy/words/list.txt", "one")
    package("elsewhere/list.json", "one")
    before = code.own_digest("toy")
    package("elsewhere/list.json", "two")
    assert code.own_digest("toy") == before
    package("toy/words/list.txt", "two")
    assert code.own_digest("toy") != before
    code.MANIFESTS.clear()


def test_files_that_no_module_reads_are_not_seen(package):
    package("toy/stage.py", "x = 'list'\n")
    before = code.own_digest("toy")
    package("toy/list.txt", "one")
    assert code.own_digest("toy") == before
    code.MANIFESTS.clear()


def modules() -> set[str]:
    """Every module of the package that can decide a payload."""
    names = set()
    for path in code.PACKAGE.rglob("*.py"):
        parts = path.relative_to(code.PACKAGE.parent).with_suffix("").parts
        names.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return {n for n in names if not n.startswith(code.UNCOUNTED) and n != "grafting.cli" and "__main__" not in n}


def test_every_library_that_stages_import_is_counted():
    """A library that decides no byte stands here by name; any other belongs into code.DECIDING."""
    undeciding = {"huggingface_hub"}  # fetches a pinned revision
    found = {name: code.module_facts(name).others for name in modules()}
    unknown = {
        (name, library)
        for name, others in found.items()
        for library in others - set(sys.stdlib_module_names) - code.DECIDING.keys() - undeciding
    }
    assert unknown == set()


def test_modules_are_imported_by_computed_names_only_where_the_plan_names_them():
    """Such an import is invisible to the digest: what it imports must be among the parts of the jobs' code."""
    assert {n for n in modules() if code.module_facts(n).dynamic} == {
        "grafting.tasks",  # its literal _LAZY is read
        "grafting.tasks.stage",  # builders: Study._builder
        "grafting.tasks.scorers",  # plan.scoring
        "grafting.tasks.judge",  # the judge that runs in the job: plan.scoring
        "grafting.rollouts.stage",  # kinds: Learning._collecting
        "grafting.training.objectives",  # Learning.train
    }


def test_manifest_is_what_the_digest_is_made_of():
    found = code.own_digest("select")
    assert digest(code.MANIFESTS[found]) == found
    assert "grafting.evaluation.select" in code.MANIFESTS[found]["modules"]


def test_facts_are_kept_for_the_same_text_only(tmp_path):
    place, text = tmp_path / "facts.json", 'import torch\nfrom grafting.errors import UserError\nNAME = "table.csv"\n'
    first = Facts(place)
    found = first.of(text, "grafting.tasks.new", False, "new.py")
    first.save()
    again = Facts(place)
    assert (
        again.of(text, "grafting.tasks.new", False, "new.py") == found == syntax.read(text, "grafting.tasks.new", False)
    )
    assert again.of(text + "X = 1\n", "grafting.tasks.new", False, "new.py").digest != found.digest
    assert again.of(text, "grafting.tasks.other", True, "other.py") == syntax.read(text, "grafting.tasks.other", True)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"reader": "another", "modules": {}}', '{"modules": 1}'])
def test_broken_or_foreign_facts_are_as_none(tmp_path, content):
    place = tmp_path / "facts.json"
    place.write_text(content)
    facts = Facts(place)
    assert facts.of("X = 1\n", "grafting.x", False, "x.py") == syntax.read("X = 1\n", "grafting.x", False)
    facts.save()
    assert json.loads(place.read_text())["modules"]


def test_facts_of_all_modules_survive_the_file(tmp_path):
    modules = code.closure(*code.ENTRIES.values())
    kept = Facts(tmp_path / "facts.json")
    texts = {name: Path(code._file(name)) for name in modules}
    for name, path in texts.items():
        kept.of(path.read_text(), name, path.name == "__init__.py", str(path))
    kept.save()
    again = Facts(tmp_path / "facts.json")
    for name, path in texts.items():
        assert again.of(path.read_text(), name, path.name == "__init__.py", str(path)) == code.module_facts(name)
