"""Finished jobs with invented payloads, and study folders under git and DVC to hold them."""

import hashlib
import shutil
import subprocess
from pathlib import Path

from grafting.plan.jobs import Job
from grafting.provenance.store import Store

PROJECT = Path(__file__).resolve().parents[2]


def artefact(store: Store, job: Job, files: dict[str, str] | None = None) -> str:
    """A finished job with this payload."""
    out = store.aside(job.id)
    for name, text in (files or {"file.txt": "payload"}).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    payload = store.publish(job.id, out)
    store.write(
        job.id,
        {
            "id": job.id,
            "key": job.key,
            "stage": job.stage,
            "name": job.name,
            "spec": job.spec,
            "inputs": job.inputs,
            "code": job.code,
            "payload": payload,
            "finished": "2026-01-01T00:00:00+00:00",
        },
    )
    return job.id


def made(store: Store, name: str, stage: str = "train", **files: str) -> str:
    """A finished job of this name; its payload is `file.txt` with a text of its own unless given."""
    return artefact(store, Job(stage, name, {"name": name}, {}, "c"), files or {"file.txt": f"payload of {name}"})


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def under_dvc(folder: Path) -> Store:
    """An empty study folder under git (without a commit) and DVC."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    for name in (".dvc/config", ".dvc/.gitignore", ".dvcignore", ".gitignore", ".gitattributes", "store/.gitignore"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, folder / name)
    return Store(folder)


def snapshot(folder: Path, *parts: str) -> dict[str, str]:
    """Hash of every file below the given parts of a folder, by path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for part in parts or ("store", "provenance", "results")
        for path in sorted((folder / part).rglob("*"))
        if path.is_file()
    }
