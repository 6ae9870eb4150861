"""Set-up, lock, conda files, presets and the table of assumptions agree with each other."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import grafting
from grafting.config.load import merge

ROOT = Path(__file__).resolve().parents[2]


def _generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "envs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _generator()
PINS = generate.read_lock((ROOT / "requirements.lock").read_text(encoding="utf-8"))
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))


def _leaves(value, path=""):
    """Dotted keys of all values that are no non-empty mappings."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}".lstrip("."))
    else:
        yield path


def _covers(key: str, leaf: str) -> bool:
    return leaf == key or leaf.startswith(key + ".")


# ---- pins ------------------------------------------------------------------------------------------
def test_every_dependency_is_pinned_and_locked_at_that_version():
    for requirement in generate.direct_requirements(generate.project()):
        (pin,) = list(requirement.specifier)
        assert pin.operator == "==", requirement
        assert PINS[generate.canonicalize_name(requirement.name)] == pin.version


def test_harness_extra_is_pinned():
    (line,) = generate.project()["optional-dependencies"]["harness"]
    assert line == "lm-eval==0.4.13"


def test_lock_holds_plain_versions_only():
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins == sorted(pins, key=lambda line: line.split("==")[0])
    for line in pins:
        # no build tags, hosts, paths or options
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9A-Za-z.]*", line), line


def test_environment_is_what_the_lock_says():
    # a newer Python may need fewer of the locked packages, but no other one
    needed = generate.closure(generate.direct_requirements(generate.project()))
    assert needed.items() <= PINS.items()


@pytest.mark.parametrize("flavour", generate.FLAVOURS)
def test_conda_files_agree_with_the_lock(flavour):
    text = (ROOT / "envs" / f"{flavour}.yaml").read_text(encoding="utf-8")
    assert text == generate.environment_text(generate.project(), PINS, flavour)
    data = yaml.safe_load(text)
    assert data["name"] == f"grafting-{flavour}"
    assert len(data["dependencies"][-1]["pip"]) == len(PINS) - (flavour == "cpu")


def test_container_agrees_with_the_lock_and_the_conda_files():
    text = (ROOT / "envs" / "apptainer.def").read_text(encoding="utf-8")
    assert text == generate.container_text(generate.project(), PINS)
    inside = text.split("<<'END'\n", 1)[1].split("\nEND\n", 1)[0]
    assert generate.read_lock(inside) == PINS
    for flavour in generate.FLAVOURS:
        conda = yaml.safe_load((ROOT / "envs" / f"{flavour}.yaml").read_text(encoding="utf-8"))
        pins = dict(line.split("==") for line in conda["dependencies"][-1]["pip"])
        assert pins.items() <= PINS.items()


def test_version_is_the_same_everywhere():
    assert generate.project()["version"] == grafting.__version__
    assert f"## {grafting.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# ---- set-up ----------------------------------------------------------------------------------------
@pytest.fixture
def checkout(tmp_path):
    """What set-up reads, in a folder of its own."""
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "envs").mkdir()
    shutil.copy(ROOT / "envs" / "setup.sh", tmp_path / "envs" / "setup.sh")
    return tmp_path


def _setup(checkout, **environment):
    return _make(checkout, "setup", **environment)


def _make(checkout, *arguments, **environment):
    # MAKEFLAGS of a surrounding `make test` must not reach the inner make
    clean = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "PYTHON")}
    return subprocess.run(
        ["make", *arguments],
        cwd=checkout,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    path.chmod(0o755)


def test_setup_installs_once(checkout):
    # stands in for the environment's Python; says what it is asked to do
    _script(checkout / ".venv" / "bin" / "python", 'echo "python $*" >> calls\n')
    first = _setup(checkout)
    assert first.returncode == 0, first.stderr
    calls = (checkout / "calls").read_text()
    assert "-r requirements.lock" in calls and "--no-deps --no-build-isolation -e ." in calls
    (checkout / "calls").unlink()
    second = _setup(checkout)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert not (checkout / "calls").exists()
    # another lock: installed again
    (checkout / "requirements.lock").write_text("numpy==1\n")
    assert "installing" in _setup(checkout).stdout


def test_setup_tells_git_how_to_merge_in_a_repository_of_our_own(checkout):
    _script(checkout / ".venv" / "bin" / "python", "")

    def setting(name):
        command = ["git", "config", "--local", f"merge.{name}"]
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False).stdout.strip()

    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    for _ in range(2):
        assert _setup(checkout).returncode == 0
        assert setting("dvc.driver") == ".venv/bin/python -m grafting.provenance.merging %O %A %B"
        assert setting("ours.driver") == "true"
    attributes = (ROOT / ".gitattributes").read_text().split("\n")
    assert "*.dvc merge=dvc" in attributes and "/results/** merge=ours" in attributes


def test_failed_installation_leaves_no_stamp(checkout):
    _script(checkout / ".venv" / "bin" / "python", 'case "$*" in *pip*) exit 1;; esac\n')
    assert _setup(checkout).returncode != 0
    assert not (checkout / ".venv" / ".stamp").exists()


def test_old_python_is_named(checkout, tmp_path):
    _script(tmp_path / "old" / "python3", 'case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac\n')
    result = _setup(checkout, PYTHON=str(tmp_path / "old" / "python3"))
    assert result.returncode != 0
    assert "Python 3.11 or newer" in result.stderr and "Python 3.9.2" in result.stderr
    assert not (checkout / ".venv").exists()


# stands in for a Python that makes an environment, and says how
MAKES_VENV = """
case "$*" in
  *.venv)
    echo "$*" > how
    mkdir -p .venv/bin
    printf '#!/bin/sh\\n' > .venv/bin/python
    chmod +x .venv/bin/python;;
esac
"""


def test_newer_python_under_another_name_is_found(checkout, tmp_path):
    tools = tmp_path / "tools"
    for old in ("python3", "python3.11"):
        _script(tools / old, "exit 1\n")
    _script(tools / "python3.12", MAKES_VENV)
    result = _setup(checkout, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert result.returncode == 0, result.stderr
    assert (checkout / "how").read_text() == "-m venv .venv\n"
    assert (checkout / ".venv" / ".stamp").exists()


def test_moved_environment_is_made_anew(checkout, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    python = elsewhere / "python3"
    _script(python, MAKES_VENV)
    assert _setup(checkout, PYTHON=str(python)).returncode == 0
    moved = checkout.rename(elsewhere / "moved")
    assert _setup(moved, PYTHON=str(python)).returncode == 0
    assert (moved / "how").read_text() == "-m venv --clear .venv\n"


@pytest.mark.parametrize("finishes", [True, False])
def test_reproduce_says_how_it_ended(checkout, finishes):
    tools = checkout / ".venv" / "bin"
    _script(tools / "python", "")
    _script(tools / "snakemake", f'echo "study $*"; exit {0 if finishes else 1}\n')
    _script(tools / "grafting", 'echo "grafting $*"\n')
    result = _make(checkout, "reproduce", "ARGS=--config 'seeds=[0]'")
    assert "study --config seeds=[0]" in result.stdout
    assert ("grafting show" in result.stdout) == finishes
    assert (result.returncode == 0) == finishes
    assert ("did not finish" in result.stderr) != finishes


# ---- presets and assumptions -----------------------------------------------------------------------
def _preset(name: str) -> dict:
    return yaml.safe_load((ROOT / "presets" / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted((ROOT / "presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_preset_names_itself_and_no_local_path(path):
    overlay = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert overlay["preset"] == path.stem
    assert "data_root" not in overlay


def test_tiny_is_the_default():
    assert merge(CONFIG, _preset("tiny")) == CONFIG


@pytest.mark.parametrize("name", ["smoke", "tiny", "tiny-full", "smol"])
def test_preset_is_valid(name):
    from grafting.config import resolve

    assert resolve(CONFIG, _preset(name)).preset == name


def test_paper_preset_stops_at_unknown_revisions():
    from grafting.config import resolve
    from grafting.errors import UserError

    with pytest.raises(UserError, match=r"lineage\.deployed\.revision.*\n.*lineage\.donors\.pretraining"):
        resolve(CONFIG, _preset("paper"))


def test_assumptions_cover_the_config_and_nothing_else():
    text = (ROOT / "docs" / "assumptions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_.]+)` \|.*\| \[([AR?])\] \|", text, flags=re.MULTILINE)
    keys = [key for key, _ in rows]
    leaves = list(_leaves(CONFIG))
    unknown = [key for key in keys if not any(_covers(key, leaf) for leaf in leaves)]
    assert unknown == []
    exempt = {"preset", "data_root", "tracking"}
    missing = [
        leaf
        for leaf in leaves
        if leaf not in exempt
        and not leaf.startswith("saving.")
        and not leaf.endswith(("threads", "processes"))
        and not any(_covers(key, leaf) for key in keys)
    ]
    assert missing == []


def test_links_in_the_documents_exist():
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if not target.startswith("http") and not target.startswith("published/"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_ci_script_is_a_valid_shell_script():
    for shell, script in (("bash", ".ci/run"), ("sh", "envs/setup.sh")):
        assert os.access(ROOT / script, os.X_OK)
        assert subprocess.run([shell, "-n", ROOT / script], check=False).returncode == 0


def test_default_profile_leaves_the_decision_to_existence():
    profile = yaml.safe_load((ROOT / "profiles" / "default" / "config.yaml").read_text(encoding="utf-8"))
    assert profile["rerun-triggers"] == ["mtime"]
    assert profile["ignore-incomplete"] is True and "rerun-incomplete" not in profile
    assert "retries" not in profile


@pytest.mark.parametrize("profile", ["default", "slurm", "local-gpu"])
def test_profile_is_accepted_by_snakemake(profile, tmp_path):
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    (tmp_path / "Snakefile").write_text('rule all:\n    output: "a"\n    shell: "touch a"\n', encoding="utf-8")
    command = [sys.executable, "-m", "snakemake", "-n"]
    result = subprocess.run(
        command if profile == "default" else [*command, "--profile", f"profiles/{profile}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "workflow specific profile profiles/default" in output
    assert (f"profiles/{profile}" if profile != "default" else "") in output
