"""The run that is active in a study folder: who started it, where, on which plan. For people, and for `watch`."""

from __future__ import annotations

import getpass
import json
import os
import socket
import uuid
from datetime import UTC, datetime
from pathlib import Path

from grafting.provenance.files import write_json
from grafting.provenance.store import RUN


def record(root: Path) -> Path:
    """Path of the record of the last run in this folder."""
    return root / "work" / "run.json"


def read(root: Path) -> dict | None:
    """The record of the last run here; None if there was none."""
    try:
        return json.loads(record(root).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def begin(root: Path, plan: str, cluster: bool) -> None:
    """Record that this process runs the study; on a cluster its jobs inherit the run's name."""
    name = uuid.uuid4().hex[:12]
    if cluster:
        os.environ[RUN] = name
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without names for its users
        user = str(os.getuid())
    write_json(
        record(root),
        {
            "run": name,
            "plan": plan,
            "executor": "slurm" if cluster else "local",
            "user": user,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )


def end(root: Path, succeeded: bool) -> None:
    """Record how this process's run ended."""
    about = read(root)
    if about is not None and about["pid"] == os.getpid() and about["host"] == socket.gethostname():
        write_json(record(root), {**about, "ended": datetime.now(UTC).isoformat(timespec="seconds"), "ok": succeeded})


def alive(about: dict) -> bool | None:
    """Whether the run of a record still goes on; None if it was started on another machine and has not ended there."""
    if "ended" in about:
        return False
    if about["host"] != socket.gethostname():
        return None
    try:
        command = Path(f"/proc/{about['pid']}/cmdline").read_bytes()
    except OSError:
        return False
    return b"snakemake" in command


def describe(about: dict) -> str:
    """`ann on login1, process 4711, since 2026-12-02T03:04:05+00:00`."""
    return f"{about['user']} on {about['host']}, process {about['pid']}, since {about['started']}"


def notice(root: Path) -> str | None:
    """What to tell the one who starts a second run in this folder; None if no other run is active."""
    about = read(root)
    if about is None or about["pid"] == os.getpid() or alive(about) is False:
        return None
    doubt = "" if alive(about) else " (it did not end there; if that machine died: `snakemake --unlock`)"
    return (
        f"notice: a run is active in this folder, started by {describe(about)}{doubt}. Watch it with `grafting watch`; "
        "a second run has to wait until it has ended."
    )
