"""A real study on the smoke preset, run once by real Snakemake in a folder of its own; tests work on copies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PARTS = (
    "Snakefile", "rules", "src", "config.yaml", "presets", "profiles", "envs", "requirements.lock",
    "sources.lock.yaml", "aliases.yaml", "claims.yaml", "reference", "dvc.yaml",
    ".dvc", ".dvcignore", ".gitignore", ".gitattributes",
    "store/.gitignore",
)  # fmt: skip


class Folder:
    """A study folder and what one does in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def environment(self) -> dict[str, str]:
        """What commands in this folder inherit: its own code, and this Python's programs first."""
        return {**os.environ, "PYTHONPATH": str(self.root / "src"), "PATH": f"{BIN}:{os.environ['PATH']}"}

    def run(self, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
        done = subprocess.run(command, cwd=self.root, env={**self.environment(), **environment}, capture_output=True,
                              text=True, check=False, stdin=subprocess.DEVNULL)  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def snakemake(self, *arguments: str, check: bool = True) -> str:
        done = self.run("snakemake", "--configfile", "presets/smoke.yaml", *arguments, check=check)
        return done.stdout + done.stderr

    def planned(self, *arguments: str) -> dict[str, int]:
        """Rule -> number of jobs that a dry run plans; empty if there is nothing to do."""
        text = self.snakemake("-n", *arguments)
        if "Nothing to be done" in text:
            return {}
        table = text.split("Job stats:", 1)[1].split("total", 1)[0].splitlines()
        rows = [line.split() for line in table]
        return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit() and row[0] != "all"}

    def grafting(self, verb: str, *arguments: str, check: bool = True, preset: bool = True) -> str:
        """Output of `grafting <verb>`."""
        overlay = ("--configfile", "presets/smoke.yaml") if preset else ()
        done = self.run("python", "-m", "grafting.cli", verb, *arguments, *overlay, check=check)
        return done.stdout + done.stderr

    def open_jobs(self) -> set[str]:
        """Ids of the planned jobs without a record."""
        lines = self.grafting("plan", "--jobs").splitlines()
        return {line.split()[1] for line in lines if line.startswith("  open ")}

    def sidecars(self) -> dict[str, dict]:
        paths = sorted((self.root / "provenance").rglob("*.json"))
        return {path.relative_to(self.root / "provenance").as_posix(): json.loads(path.read_text()) for path in paths}

    def payloads(self) -> dict[str, dict]:
        """Sentinel -> hashes of the payload's files, as recorded."""
        return {name: sidecar["payload"] for name, sidecar in self.sidecars().items() if "payload" in sidecar}

    def contents(self) -> dict[str, dict]:
        """`<stage>/<key>` -> hashes of the payload's files. Of two jobs with one key the first makes it, and the other
        becomes a link: which one that is, and so under which name it lies, is the order of a run."""
        return {f"{n.partition('/')[0]}/{n[-17:-5]}": payload for n, payload in self.payloads().items()}

    def lists(self) -> dict[str, set[str]]:
        """Stage -> payloads that DVC lists."""
        script = (
            "import json; from grafting.provenance.cache import Cache; from grafting.plan.jobs import STAGES\n"
            "with Cache('.') as cache:\n    print(json.dumps({s: sorted(cache.listing(s) or {}) for s in STAGES}))\n"
        )
        return {stage: set(names) for stage, names in json.loads(self.run("python", "-c", script).stdout).items()}

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        return self.run("git", *identity, *arguments).stdout

    def edit(self, path: str, old: str, new: str) -> None:
        file = self.root / path
        text = file.read_text()
        assert old in text, f"{old!r} is not in {path}"
        file.write_text(text.replace(old, new, 1))


def new_folder(root: Path) -> Folder:
    """The project's files, in a fresh git repository without any results."""
    for part in PARTS:
        source, target = PROJECT / part, root / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "cache", "tmp"))
        else:
            shutil.copy2(source, target)
    folder = Folder(root)
    folder.git("init", "-q")
    folder.git("add", "-A")
    folder.git("commit", "-qm", "project")
    return folder


def copied(folder: Folder, root: Path) -> Folder:
    """A copy of a study folder: times of change and hard links into DVC's cache are kept."""
    subprocess.run(["cp", "-a", str(folder.root), str(root)], check=True)
    return Folder(root)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Folder:
    """A finished smoke study. Do not change it: take `study`."""
    folder = new_folder(tmp_path_factory.mktemp("study"))
    folder.log = folder.snakemake("--cores", "2")
    return folder


@pytest.fixture
def study(finished, tmp_path) -> Folder:
    """A copy of the finished study."""
    return copied(finished, tmp_path / "study")
