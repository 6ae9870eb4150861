"""What nodes without a network read is fetched before the first job is sent."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from artefacts import made, under_dvc
from test_hub import COMMIT, SNAPSHOT, call, hub, pico  # noqa: F401  (fixtures)

from grafting.errors import UserError
from grafting.plan.jobs import Job
from grafting.provenance import ahead
from grafting.provenance.versioning import add_payloads

DVC = [sys.executable, "-m", "dvc"]


def test_inputs_come_from_the_remote_once_and_then_without_it(tmp_path):
    store, remote = under_dvc(tmp_path / "study"), tmp_path / "remote"
    read, unread = made(store, "read", "data"), made(store, "unread", "data")
    add_payloads(store)
    subprocess.run([*DVC, "remote", "add", "-q", "-d", "storage", str(remote)], cwd=store.root, check=True)
    subprocess.run([*DVC, "push", "-q"], cwd=store.root, check=True)
    for lost in (*(store.root / "store" / job for job in (read, unread)), store.root / ".dvc" / "cache"):
        shutil.rmtree(lost)
    first = Job("train", "first", {}, {"data": [read]}, "c")
    second = Job("evaluate", "second", {}, {"model": [first.id], "data": [read]}, "c")
    jobs = {job.id: job for job in (first, second)}
    assert ahead.lacking_inputs(jobs, list(jobs)) == [read]
    ahead.fetch(jobs, jobs, store)
    remote.rename(tmp_path / "out of reach")
    assert (store.payload(read) / "file.txt").read_text() == "payload of read"
    assert not (store.root / "store" / unread).exists()
    with pytest.raises(UserError, match=f"{unread} is absent"):
        ahead.fetch({first.id: Job("train", "first", {}, {"data": [unread]}, "c")}, [first.id], store)


FETCH = f"""
from grafting.plan.jobs import Job
from grafting.provenance import ahead
from grafting.provenance.store import Store
data = {{"name": "items.jsonl", "hub": "lab/items", "revision": "{COMMIT}", "path": "items.jsonl"}}
jobs = [Job("models", "m", {{"source": {{"hub": "lab/pico", "revision": "{COMMIT}"}}}}, {{}}, "c"),
        Job("data", "d", {{"files": [data, {{"name": "local.txt", "sha256": "0"}}]}}, {{}}, "c")]
ahead.fetch({{job.id: job for job in jobs}}, [job.id for job in jobs], Store())
"""


def test_models_and_data_come_from_the_hub_once_and_then_without_it(hub, tmp_path):  # noqa: F811
    assert call(FETCH, hub, tmp_path / "home").returncode == 0
    hub.close()
    read = SNAPSHOT + f"\nprint(hub.file('lab/items', '{COMMIT}', 'items.jsonl').read_text())"
    done = call(read, hub, tmp_path / "home")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"answer": "A"' in done.stdout
