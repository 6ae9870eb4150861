"""The lock of outside files: written by a verb, held against the files before the first job."""

import hashlib
from pathlib import Path

import pytest
import yaml

from grafting import cli
from grafting.config import resolve
from grafting.errors import UserError
from grafting.plan import front, sources
from grafting.plan.study import Study
from grafting.provenance.store import Store

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """A copy of the project's lock in a project of its own."""
    path = tmp_path / "project" / sources.LOCK
    path.parent.mkdir()
    path.write_text((PROJECT / sources.LOCK).read_text())
    monkeypatch.setattr(sources, "PROJECT", path.parent)
    sources.locked_sources.cache_clear()
    yield path
    sources.locked_sources.cache_clear()


def test_writing_the_lock_keeps_comments_and_other_entries(lock, tmp_path, capsys):
    before, header = yaml.safe_load(lock.read_text()), lock.read_text().split("sciknoweval:")[0]
    folder = tmp_path / "mmlu"
    folder.mkdir()
    (folder / "mmlu.zip").write_bytes(b"other")
    (folder / "more.txt").write_bytes(b"more")
    assert cli.main(["sources", str(folder), "--write"]) == 0
    assert capsys.readouterr().out.splitlines() == ["mmlu/mmlu.zip: changed", "mmlu/more.txt: added"]
    after = yaml.safe_load(lock.read_text())
    assert lock.read_text().startswith(header)
    entry = {"name": "mmlu.zip", "sha256": hashlib.sha256(b"other").hexdigest(), "bytes": 5}
    assert after["mmlu"][0] == entry == sources.files_of("mmlu")[0]
    assert {k: v for k, v in after.items() if k != "mmlu"} == {k: v for k, v in before.items() if k != "mmlu"}
    assert list(after) == list(before)
    assert cli.main(["sources", str(folder), "--write"]) == 0
    assert "nothing has changed" in capsys.readouterr().out


def test_without_write_the_entries_are_printed_and_the_lock_stays(lock, tmp_path, capsys):
    text = lock.read_text()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a.txt").write_bytes(b"a")
    assert cli.main(["sources", str(tmp_path / "new")]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["new"][0]["bytes"] == 1
    assert lock.read_text() == text


def test_altered_data_of_the_right_size_stop_before_the_first_job(lock, tmp_path):
    """One byte flipped: found by hash although name and size are right."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    root = tmp_path / "data"
    entries = {}
    for source, content in (("sciknoweval", b"questions"), ("toolalpaca", b"calls"), ("mmlu", b"archive")):
        (root / source).mkdir(parents=True)
        (root / source / "file").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        entries[source] = [{"name": "file", "sha256": digest, "bytes": len(content)}]
    sources.write_sources(entries)
    overlay = yaml.safe_load((PROJECT / "presets" / "smol.yaml").read_text())
    overlay["lineage"]["deployed"] = {"path": str(model), "sha256": "a" * 64}
    overlay["data_root"] = str(root)
    study = Study(resolve(yaml.safe_load((PROJECT / "config.yaml").read_text()), overlay))
    front.check_at_hand(study, Store(tmp_path))
    (root / "mmlu" / "file").write_bytes(b"archivf")
    with pytest.raises(UserError, match="mmlu/file: sha256 is"):
        front.check_at_hand(study, Store(tmp_path))
