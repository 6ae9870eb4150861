"""DVC's cache and lists as this package keeps them, and payloads fetched from them."""

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import dvc_data.hashfile.status as dvc_status
import pytest
import yaml
from artefacts import git, made, snapshot, under_dvc

from grafting.errors import UserError
from grafting.provenance import cache as cache_module
from grafting.provenance import hashing, integrity
from grafting.provenance.cache import Cache, pointed
from grafting.provenance.fetch import bring
from grafting.provenance.files import write_json
from grafting.provenance.merging import main as merge_main
from grafting.provenance.merging import merged
from grafting.provenance.store import Store
from grafting.provenance.versioning import add_payloads, untracked


@pytest.fixture
def store(tmp_path) -> Store:
    return under_dvc(tmp_path / "study")


def pushed(store: Store, folder: Path) -> None:
    """A remote in `folder` that holds all that DVC lists."""
    subprocess.run([*DVC, "remote", "add", "-q", "-d", "storage", str(folder)], cwd=store.root, check=True)
    subprocess.run([*DVC, "push", "-q"], cwd=store.root, check=True)


DVC = [sys.executable, "-m", "dvc"]


def listed(store: Store, stage: str = "train") -> set[str]:
    with Cache(store.root) as cache:
        return set(cache.listing(stage))


# ---- hashes and their notes ------------------------------------------------------------------------
def test_large_files_are_described_as_small_ones(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(100_000))
    whole = hashing.describe_file(path)
    monkeypatch.setattr(hashing, "LARGE", 1000)
    assert hashing.describe_file(path) == whole
    assert len(whole["sha256"]) == 64 and len(whole["md5"]) == 32 and whole["bytes"] == 100_000


def test_unchanged_files_are_hashed_once(store, monkeypatch):
    job_id = made(store, "a")
    calls = []
    monkeypatch.setattr(integrity, "file_digest", lambda path: calls.append(path) or "other")
    store.payload(job_id)
    assert calls == []  # noted when it was published
    os.utime(store.root / "store" / job_id / "file.txt", (1, 1))
    with pytest.raises(UserError, match="altered"):
        store.payload(job_id)
    assert len(calls) == 1


@pytest.mark.parametrize("content", ["", "[1]", '{"file.txt": 3}'])
def test_a_broken_note_only_costs_a_hash(store, content):
    job_id = made(store, "a")
    store.intact(job_id).write_text(content)
    assert store.payload(job_id).is_dir()


def test_a_flipped_byte_is_an_error_that_names_the_file(store):
    job_id, other = made(store, "a"), made(store, "b")
    before = snapshot(store.root)
    path = store.root / "store" / job_id / "file.txt"
    path.write_text("Payload of a")
    with pytest.raises(UserError, match=rf"{path.name}: altered or cut off.*grafting repair"):
        store.payload(job_id)
    path.write_text("payload of a")
    assert store.payload(job_id).is_dir() and store.payload(other).is_dir()
    assert snapshot(store.root) == before


# ---- adding ----------------------------------------------------------------------------------------
def test_payloads_are_stored_once_and_listed_as_dvc_lists_them(store, tmp_path):
    ids = [made(store, "a", **{"file.txt": "one", "deep/er.txt": "two"}), made(store, "b", **{"file.txt": "one"})]
    before = snapshot(store.root)
    assert add_payloads(store).taken == ids
    files = [store.root / "store" / i / "file.txt" for i in ids]
    with Cache(store.root) as cache:
        assert all(os.path.samefile(path, cache.path(hashing.describe_file(path)["md5"])) for path in files)
    assert {path: h for path, h in snapshot(store.root).items() if not path.endswith(".dvc")} == {
        path: h for path, h in before.items() if not path.endswith(".dvc")
    }
    # what DVC itself would say of the same folder
    other = under_dvc(tmp_path / "other")
    shutil.copytree(store.root / "store" / "train", other.root / "store" / "train")
    subprocess.run([*DVC, "add", "-q", "store/train"], cwd=other.root, check=True)
    ours, theirs = ((s.root / "store" / "train.dvc").read_text() for s in (store, other))
    assert yaml.safe_load(ours) == yaml.safe_load(theirs)
    status = subprocess.run([*DVC, "status"], cwd=store.root, capture_output=True, text=True, check=True)
    assert "up to date" in status.stdout
    assert store.payload(ids[0]).is_dir()


def test_a_second_run_adds_only_what_is_new_and_links_stay(store):
    first = made(store, "a")
    add_payloads(store)
    inode = (store.root / "store" / first / "file.txt").stat().st_ino
    second = made(store, "b")
    assert add_payloads(store).taken == [second]
    assert add_payloads(store).taken == []
    path = store.root / "store" / first / "file.txt"
    assert path.stat().st_ino == inode and path.stat().st_nlink == 2
    assert yaml.safe_load((store.root / "store" / "train.dvc").read_text())["outs"][0]["size"] == 24


def test_only_complete_payloads_are_added(store):
    done = made(store, "done")
    (store.root / "store" / "train" / "half-000000000000").mkdir()
    made(store, "short")
    next((store.root / "store" / "train").glob("short-*/file.txt")).unlink()
    store.sentinel(made(store, "broken")).write_text("{")
    with Cache(store.root) as cache:
        assert {stage: list(payloads) for stage, payloads in untracked(store, cache).items()} == {
            "train": [done.partition("/")[2]]
        }


def test_entries_of_absent_payloads_stay(store):
    first = made(store, "a")
    add_payloads(store)
    shutil.rmtree(store.root / "store" / first)
    second = made(store, "b")
    add_payloads(store)
    assert listed(store) == {i.partition("/")[2] for i in (first, second)}


def test_a_list_that_is_nowhere_is_an_error_and_loses_nothing(store):
    made(store, "a")
    add_payloads(store)
    pointer = store.root / "store" / "train.dvc"
    with Cache(store.root) as cache:
        cache.drop(pointed(pointer.read_text()))
    made(store, "b")
    before = snapshot(store.root)
    with pytest.raises(UserError, match="entries would be lost"):
        add_payloads(store)
    assert snapshot(store.root) == before


def test_a_lost_cache_file_is_put_back_from_the_store(store):
    job_id = made(store, "a")
    add_payloads(store)
    md5 = store.read(job_id)["payload"]["file.txt"]["md5"]
    with Cache(store.root) as cache:
        cache.drop(md5)
        assert not cache.has([md5])
    assert add_payloads(store).taken == [job_id]
    with Cache(store.root) as cache:
        assert cache.holds(md5)
    assert yaml.safe_load((store.root / "store" / "train.dvc").read_text())["outs"][0]["size"] == 12


def test_an_altered_payload_is_not_put_under_dvc(store):
    good, bad = made(store, "good"), made(store, "bad")
    (store.root / "store" / bad / "file.txt").write_text("payloaD of bad")
    added = add_payloads(store)
    assert (added.taken, added.refused) == ([good], [bad])
    assert listed(store) == {good.partition("/")[2]}


def test_adding_waits_for_the_lock_of_another_dvc_command(store):
    job_id = made(store, "a")
    script = (
        "import sys, time; from pathlib import Path; from grafting.provenance.cache import Cache\n"
        "with Cache(Path('.')) as cache, cache.lock():\n"
        "    print('held', flush=True); time.sleep(2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=store.root, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        started = time.monotonic()
        assert add_payloads(store).taken == [job_id]
        assert time.monotonic() - started > 0.5
        assert other.wait() == 0


def test_a_folder_without_git_or_without_dvc(store, tmp_path):
    job_id = made(store, "a")
    shutil.rmtree(store.root / ".git")
    assert add_payloads(store).taken == [job_id]
    shutil.rmtree(store.root / ".dvc")
    with pytest.raises(UserError, match="dvc init"):
        add_payloads(store)


def test_cache_on_another_file_system_is_linked_symbolically(store, tmp_path):
    elsewhere = Path("/dev/shm")
    if not os.access(elsewhere, os.W_OK) or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system to write to")
    place = elsewhere / f"cache-{os.getpid()}"
    try:
        subprocess.run([*DVC, "cache", "dir", "--local", str(place)], cwd=store.root, check=True, capture_output=True)
        job_id = made(store, "a")
        add_payloads(store)
        path = store.root / "store" / job_id / "file.txt"
        assert path.is_symlink() and path.resolve().is_relative_to(place)
        assert "type = symlink" in (store.root / ".dvc" / "config.local").read_text()
        assert path.read_text() == "payload of a" and store.payload(job_id).is_dir()
        # and comes back in the same way
        shutil.rmtree(store.root / "store" / job_id)
        assert (store.payload(job_id) / "file.txt").is_symlink()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def test_selected_models_are_under_dvc_at_fixed_places(store):
    chosen, away = made(store, "chosen", "merge"), made(store, "away", "merge")
    add_payloads(store)
    models = store.root / "results" / "models"
    models.mkdir(parents=True)
    for name, job_id in (("wug", chosen), ("zup", away)):
        (models / name).symlink_to(f"../../store/{job_id}", target_is_directory=True)
    shutil.rmtree(store.root / "store" / away)
    with Cache(store.root) as cache:
        lost = store.read(away)["payload"]["file.txt"]["md5"]
        cache.drop(lost)
    for _ in range(2):  # the second time only zup is still a link
        add_payloads(store)
        with Cache(store.root) as cache:
            listing = cache.listed(pointed((store.root / "results" / "models.dvc").read_text()))
            md5 = store.read(chosen)["payload"]["file.txt"]["md5"]
            assert listing == {"wug": {"file.txt": md5}, "zup": {"file.txt": lost}}
            assert os.path.samefile(models / "wug" / "file.txt", cache.path(md5))
    assert not (models / "wug").is_symlink() and (models / "zup").is_symlink()


def test_link_types_are_those_that_work(store):
    with Cache(store.root) as cache:
        cache.objects.makedirs(cache.objects.path)
        usable = cache.links()
    assert usable[0] in ("reflink", "hardlink")
    local = store.root / ".dvc" / "config.local"
    assert local.exists() == (usable[0] == "reflink")  # .dvc/config begins with hardlink
    local.write_text("[cache]\n    type = symlink\n")
    with Cache(store.root) as cache:
        assert cache.links()[0] == "symlink"  # somebody's choice that works stays
    local.write_text("[cache]\n    type = copy\n")
    with Cache(store.root) as cache:
        cache.links()
    with Cache(store.root) as cache:
        assert cache.repo.config["cache"]["type"] == usable


def test_a_file_with_as_many_names_as_it_can_have_is_copied(store, monkeypatch):
    made(store, "a", **{"file.txt": "same"})
    add_payloads(store)
    second = made(store, "b", **{"file.txt": "same"})

    def full(*arguments, links, transfer=cache_module.transfer):
        if "hardlink" in links:
            raise OSError(errno.EMLINK, "Too many links")
        transfer(*arguments, links=links)

    monkeypatch.setattr(cache_module, "transfer", full)
    add_payloads(store)
    path = store.root / "store" / second / "file.txt"
    assert path.read_text() == "same" and path.stat().st_nlink == 1
    assert len(listed(store)) == 2


# ---- fetching --------------------------------------------------------------------------------------
def test_an_absent_payload_comes_from_the_cache(store):
    job_id = made(store, "a", **{"file.txt": "one", "deep/er.txt": "two"})
    add_payloads(store)
    before = snapshot(store.root)
    shutil.rmtree(store.root / "store" / job_id)
    assert (store.payload(f"{job_id}:deep") / "er.txt").read_text() == "two"
    assert snapshot(store.root) == before
    # a payload of which one file is gone is not whole either
    (store.root / "store" / job_id / "file.txt").unlink()
    assert (store.payload(job_id) / "file.txt").read_text() == "one"
    assert not list((store.root / "store" / ".aside").iterdir())


def test_only_the_payload_that_is_read_comes_from_the_remote(store, tmp_path):
    wanted, other = made(store, "a"), made(store, "b")
    add_payloads(store)
    pushed(store, tmp_path / "remote")
    shutil.rmtree(store.root / ".dvc" / "cache")
    shutil.rmtree(store.root / "store" / "train")
    assert (store.payload(wanted) / "file.txt").read_text() == "payload of a"
    assert not (store.root / "store" / other).exists()
    with Cache(store.root) as cache:
        assert [cache.has([store.read(i)["payload"]["file.txt"]["md5"]]) for i in (wanted, other)] == [True, False]


def test_what_another_job_fetched_meanwhile_stays_whole(store, tmp_path, monkeypatch):
    """DVC asks what is lacking, then fetches; a file that came in between is a name of a payload's file."""
    job_id = made(store, "a")
    add_payloads(store)
    pushed(store, tmp_path / "remote")
    about = store.read(job_id)["payload"]["file.txt"]
    with Cache(store.root) as cache:
        place, aside = cache.path(about["md5"]), tmp_path / "aside"
        os.link(place, aside)
        place.unlink()
        inode = aside.stat().st_ino
        ask = dvc_status.compare_status

        def late(*arguments, **named):
            lacking = ask(*arguments, **named)
            os.link(aside, place)
            return lacking

        monkeypatch.setattr(dvc_status, "compare_status", late)
        assert cache.pull([about["md5"]]) is None
        assert cache.holds(about["md5"])
    assert aside.stat().st_ino == inode and hashing.describe_file(aside) == about
    assert not (place.parents[2] / "fetching" / "files").exists()


def test_jobs_that_fetch_the_same_at_once_all_get_it_whole(store, tmp_path):
    job_ids = [made(store, name) for name in "abcdef"]
    add_payloads(store)
    pushed(store, tmp_path / "remote")
    before = snapshot(store.root, "store")
    script = "import sys; from grafting.provenance.store import Store; Store('.').payloads(sys.argv[1:])"
    for _ in range(3):
        for job_id in job_ids:
            store.remove(job_id)
        shutil.rmtree(store.root / ".dvc" / "cache")
        jobs = [
            subprocess.Popen([sys.executable, "-c", script, *ids], cwd=store.root, stderr=subprocess.PIPE, text=True)
            for ids in (job_ids, job_ids[::-1], job_ids)
        ]
        assert [process.communicate()[1].count("altered") for process in jobs] == [0, 0, 0]
        assert [process.returncode for process in jobs] == [0, 0, 0]
        assert snapshot(store.root, "store") == before


def test_an_altered_cache_file_is_replaced_from_the_remote(store, tmp_path):
    job_id = made(store, "a")
    add_payloads(store)
    pushed(store, tmp_path / "remote")
    shutil.rmtree(store.root / "store" / job_id)
    with Cache(store.root) as cache:
        path = cache.path(store.read(job_id)["payload"]["file.txt"]["md5"])
    path.chmod(0o644)
    path.write_text("Payload of a")
    path.chmod(0o444)
    assert (store.payload(job_id) / "file.txt").read_text() == "payload of a"
    assert path.read_text() == "payload of a"


def test_what_is_nowhere_is_an_error_that_says_so(store, tmp_path):
    job_id, kept = made(store, "a"), made(store, "b")
    add_payloads(store)
    shutil.rmtree(store.root / "store" / job_id)
    with Cache(store.root) as cache:
        cache.drop(store.read(job_id)["payload"]["file.txt"]["md5"])
    before = snapshot(store.root)
    with pytest.raises(UserError, match=rf"store/{job_id}.*no DVC remote is configured.*grafting repair"):
        store.payload(job_id)
    pushed(under_dvc(tmp_path / "empty"), tmp_path / "remote")
    subprocess.run([*DVC, "remote", "add", "-q", "-d", "far", str(tmp_path / "remote")], cwd=store.root, check=True)
    with pytest.raises(UserError, match="neither in DVC's cache nor in the DVC remote 'far'"):
        store.payload(job_id)
    assert snapshot(store.root) == before and store.payload(kept).is_dir()


def test_an_altered_file_that_nobody_else_has_is_not_put_in_place(store):
    job_id = made(store, "a")
    add_payloads(store)
    files = store.read(job_id)["payload"]
    shutil.rmtree(store.root / "store" / job_id)
    with Cache(store.root) as cache:
        path = cache.path(files["file.txt"]["md5"])
    path.chmod(0o644)
    path.write_text("Payload of a")
    assert "altered" in bring(store, {job_id: files})[job_id]
    assert not (store.root / "store" / job_id).exists()


def test_a_sentinel_without_md5_cannot_be_fetched(store):
    write_json(store.sentinel("train/old-000000000000"), {"payload": {"f": {"bytes": 1, "sha256": "0"}}})
    with pytest.raises(UserError, match="does not say under which hash"):
        store.payload("train/old-000000000000")


# ---- merging ---------------------------------------------------------------------------------------
def test_lists_merge_three_ways():
    base = {"kept": {"f": "1"}, "dropped": {"f": "2"}, "gone": {"f": "3"}}
    ours = {"kept": {"f": "1"}, "gone": {"f": "3"}, "ours": {"f": "4"}, "both": {"f": "5"}}
    theirs = {"kept": {"f": "1"}, "dropped": {"f": "2"}, "theirs": {"f": "6"}, "both": {"f": "5"}}
    assert merged(base, ours, theirs) == {"kept": {"f": "1"}, "ours": {"f": "4"}, "theirs": {"f": "6"},
                                          "both": {"f": "5"}}  # fmt: skip
    with pytest.raises(UserError, match="both"):
        merged(base, ours, {**theirs, "both": {"f": "7"}})


def test_driver_fetches_lists_and_keeps_every_entry(store, tmp_path, monkeypatch):
    made(store, "a")
    add_payloads(store)
    pointer = store.root / "store" / "train.dvc"
    (tmp_path / "base").write_bytes(pointer.read_bytes())
    git(store.root, "add", "-A")
    git(store.root, "commit", "-qm", "a")
    git(store.root, "checkout", "-qb", "theirs")
    made(store, "b")
    add_payloads(store)
    (tmp_path / "theirs").write_bytes(pointer.read_bytes())
    pushed(store, tmp_path / "remote")
    git(store.root, "checkout", "-q", "main")
    made(store, "c")
    with Cache(store.root) as cache:
        cache.drop(pointed((tmp_path / "theirs").read_text()))
    git(store.root, "checkout", "-q", "main", "--", "store/train.dvc")
    add_payloads(store)
    (tmp_path / "ours").write_bytes(pointer.read_bytes())
    monkeypatch.chdir(store.root)
    assert merge_main([str(tmp_path / name) for name in ("base", "ours", "theirs")]) == 0
    with Cache(store.root) as cache:
        names = cache.listed(pointed((tmp_path / "ours").read_text()))
    assert {name.rpartition("-")[0] for name in names} == {"a", "b", "c"}
    # a list that nobody has: a conflict, and ours as it was
    (tmp_path / "theirs").write_text("outs:\n- md5: 00000000000000000000000000000000.dir\n  path: train\n")
    before = (tmp_path / "ours").read_bytes()
    assert merge_main([str(tmp_path / name) for name in ("base", "ours", "theirs")]) == 1
    assert (tmp_path / "ours").read_bytes() == before
    with pytest.raises(UserError, match="merge conflict"):
        pointed("<<<<<<< ours\nouts:\n")


def test_reports_of_two_branches_are_no_conflict(store):
    """git must not take them for one file that both sides renamed."""
    settings = {"settings": {f"key{n}": n for n in range(100)}}
    git(store.root, "config", "merge.ours.driver", "true")
    store.write("report/smoke-000000000000", settings)
    git(store.root, "add", "-A")
    git(store.root, "commit", "-qm", "first")
    for branch, digit in (("theirs", "1"), ("main", "2")):
        git(store.root, "checkout", "-q", *(["-b"] if branch == "theirs" else []), branch)
        store.write(f"report/smoke-{digit * 12}", {**settings, "branch": branch})
        git(store.root, "add", "-A")
        git(store.root, "commit", "-qm", branch)
    git(store.root, "merge", "-q", "--no-edit", "theirs")
    assert len(list((store.root / "results").glob("report-*.json"))) == 2
    assert store.read(f"report/smoke-{'2' * 12}")["branch"] == "main"
