"""`status`, `repair`, `gc` and `verify` on small invented studies, and faults of the disk."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from artefacts import artefact, git, made, snapshot, under_dvc
from test_versioning import DVC, listed, pushed

from grafting import cli
from grafting.errors import UserError
from grafting.plan.jobs import Job
from grafting.plan.planfile import write_plan
from grafting.provenance import gc, health, verify
from grafting.provenance.cache import Cache
from grafting.provenance.files import write_json
from grafting.provenance.store import Store
from grafting.provenance.versioning import add_payloads

KEY = "0123456789ab"


@pytest.fixture
def store(tmp_path) -> Store:
    return under_dvc(tmp_path / "study")


def lose(store: Store, job_id: str, cache: bool = True) -> None:
    """Remove a payload, and its file from DVC's cache."""
    shutil.rmtree(store.root / "store" / job_id)
    if cache:
        with Cache(store.root) as dvc:
            dvc.drop(store.read(job_id)["payload"]["file.txt"]["md5"])


def flip(store: Store, job_id: str) -> None:
    """Change one byte in place and put the times back, as a failing disk does."""
    path = store.root / "store" / job_id / "file.txt"
    times = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"P")
    path.chmod(0o444)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


# ---- status and repair -----------------------------------------------------------------------------
def test_status_says_where_everything_is(store, tmp_path):
    names = ("here", "cached", "remote", "nowhere")
    here, cached, remote, nowhere = (made(store, name) for name in names)
    add_payloads(store)
    pushed(store, tmp_path / "remote")
    md5 = store.read(nowhere)["payload"]["file.txt"]["md5"]
    (tmp_path / "remote" / "files" / "md5" / md5[:2] / md5[2:]).unlink()
    lose(store, cached, cache=False)
    lose(store, remote)
    lose(store, nowhere)
    new = made(store, "new")
    store.sentinel(f"train/broken-{KEY}").write_text("{")
    before = snapshot(store.root)
    found = health.examine(store)
    assert (found.present, found.cached, found.remote) == ([here, new], [cached], [remote])
    assert (found.missing, found.damaged, found.unversioned) == ([nowhere], [f"train/broken-{KEY}"], [new])
    assert found.remote_name == "storage" and not found.sound
    assert snapshot(store.root) == before


def test_repair_removes_exactly_the_sentinels_of_what_is_lost(store):
    kept, lost, linked = made(store, "kept"), made(store, "lost"), f"merge/linked-{KEY}"
    write_json(store.sentinel(linked), {"id": linked, "link": lost})
    store.sentinel(f"train/broken-{KEY}").write_text("{")
    shutil.rmtree(store.root / "store" / lost)
    before = snapshot(store.root)
    mended = health.repair(store, health.examine(store))
    assert mended.removed == sorted([lost, linked, f"train/broken-{KEY}"]) and mended.restored == []
    gone = {f"provenance/{job_id}.json" for job_id in mended.removed}
    assert snapshot(store.root) == {path: h for path, h in before.items() if path not in gone}
    assert health.examine(store).present == [kept]


@pytest.mark.parametrize("remote", [True, False])
def test_a_silent_flip_is_found_deep_and_mended_from_the_remote_or_made_again(store, tmp_path, remote):
    job_id, other = made(store, "a"), made(store, "b")
    add_payloads(store)
    before = snapshot(store.root)
    if remote:
        pushed(store, tmp_path / "remote")
    flip(store, job_id)  # through the hard link, so DVC's cache has it too
    assert health.examine(store).sound
    found = health.examine(store, deep=True)
    assert found.altered == {job_id: ["file.txt"]} and found.present == [other]
    assert found.mendable == ([job_id] if remote else [])
    mended = health.repair(store, found)
    if remote:
        assert (mended.restored, mended.removed) == ([job_id], [])
        assert snapshot(store.root) == before
    else:
        assert (mended.restored, mended.removed) == ([], [job_id])
        gone = (f"provenance/{job_id}.json", f"store/{job_id}/file.txt")
        assert snapshot(store.root) == {path: h for path, h in before.items() if path not in gone}
        # made again: the cache gets the right bytes back
        assert made(store, "a") == job_id
        add_payloads(store)
        assert snapshot(store.root).keys() == before.keys()
    with Cache(store.root) as cache:
        assert cache.holds(store.read(job_id)["payload"]["file.txt"]["md5"])
    assert health.examine(store, deep=True).sound


def test_a_cut_file_is_found_without_deep(store):
    job_id = made(store, "a")
    (store.root / "store" / job_id / "file.txt").write_text("cut")
    assert health.examine(store).altered == {job_id: ["file.txt"]}


def test_a_remote_that_cannot_be_asked_is_an_error(store):
    job_id = made(store, "a")
    add_payloads(store)
    subprocess.run([*DVC, "remote", "add", "-q", "-d", "far", "ssh://127.0.0.1:1/x"], cwd=store.root, check=True)
    assert health.examine(store).present == [job_id]  # nothing to ask for
    lose(store, job_id)
    with pytest.raises(UserError, match="'far' cannot be asked"):
        health.examine(store)


def test_status_without_dvc_or_a_commit(tmp_path):
    store = Store(tmp_path)
    here, lost = made(store, "here"), made(store, "lost")
    shutil.rmtree(tmp_path / "store" / lost)
    found = health.examine(store)
    assert (found.present, found.missing, found.unversioned) == ([here], [lost], [here])


def test_command_line(store, monkeypatch, capsys):
    monkeypatch.chdir(store.root)
    lost, kept = made(store, "lost"), made(store, "kept")
    assert cli.main(["add"]) == 0
    assert cli.main(["status"]) == 0
    lose(store, lost)
    assert cli.main(["status"]) == 1
    text = capsys.readouterr().out
    assert f"nowhere: {lost}" in text and "none is configured" in text and "grafting repair" in text
    assert cli.main(["repair"]) == 0
    assert f"removed: provenance/{lost}.json" in capsys.readouterr().out
    assert cli.main(["status", "--deep"]) == 0
    assert cli.main(["repair"]) == 0 and "nothing to repair" in capsys.readouterr().out
    assert store.sentinel(kept).exists()


# ---- garbage collection ----------------------------------------------------------------------------
def test_gc_keeps_what_any_ref_work_tree_or_plan_names(store, tmp_path):
    names = ("branch", "tag", "experiment", "worktree", "here", "planned", "unnamed")
    ids = {name: made(store, name) for name in names}
    add_payloads(store)
    git(store.root, "add", ".dvc", ".gitignore")
    git(store.root, "commit", "-qm", "start")
    sentinels = {name: store.sentinel(job_id).relative_to(store.root).as_posix() for name, job_id in ids.items()}
    for name in ("branch", "tag", "experiment"):
        git(store.root, "checkout", "-q", "--detach", "main")
        git(store.root, "add", sentinels[name])
        git(store.root, "commit", "-qm", name)
        place = {"branch": "refs/heads/b", "tag": "refs/tags/t", "experiment": "refs/exps/ab/cdef/exp-1"}[name]
        git(store.root, "update-ref", place, "HEAD")
        git(store.root, "checkout", "-q", "main")
    git(store.root, "worktree", "add", "-q", "--detach", str(tmp_path / "tree"), "main")
    (tmp_path / "tree" / sentinels["worktree"]).parent.mkdir(parents=True)
    (store.root / sentinels["worktree"]).rename(tmp_path / "tree" / sentinels["worktree"])
    for name in ("planned", "unnamed"):
        (store.root / sentinels[name]).unlink()
    garbage = gc.collect(store, {ids["planned"]})
    assert garbage.here == {ids["unnamed"]: 18} and garbage.listed == [ids["unnamed"]]
    before = snapshot(store.root, "store/train", "provenance")
    assert gc.drop(store, garbage) is None
    gone = f"store/{ids['unnamed']}/file.txt"
    assert snapshot(store.root, "store/train", "provenance") == {p: h for p, h in before.items() if p != gone}
    assert listed(store) == {i.partition("/")[2] for name, i in ids.items() if name != "unnamed"}
    with Cache(store.root) as cache:
        md5s = {p.read_text(): p for p in Path(cache.objects.path).glob("*/*") if p.suffix != ".dir"}
    assert set(md5s) == {f"payload of {name}" for name in names if name != "unnamed"}
    assert not gc.collect(store, {ids["planned"]})


def test_gc_leaves_a_shared_cache_alone(store, tmp_path):
    subprocess.run([*DVC, "cache", "dir", "--local", str(tmp_path / "cache")], cwd=store.root, check=True)
    job_id = made(store, "a")
    add_payloads(store)
    store.sentinel(job_id).unlink()
    files = snapshot(tmp_path, "cache")
    assert "may serve other folders" in gc.drop(store, gc.collect(store, set()))
    assert files.items() <= snapshot(tmp_path, "cache").items()
    assert not (store.root / "store" / job_id).exists()


def test_gc_without_git_or_dvc(tmp_path):
    store = Store(tmp_path)
    kept, gone = made(store, "kept"), made(store, "gone")
    store.sentinel(gone).unlink()
    garbage = gc.collect(store, set())
    assert list(garbage.here) == [gone]
    gc.drop(store, garbage)
    assert [p.name for p in (tmp_path / "store" / "train").iterdir()] == [kept.partition("/")[2]]


def test_gc_command_asks_before_it_drops(store, monkeypatch, capsys):
    monkeypatch.chdir(store.root)
    shutil.copy(Path(__file__).parents[2] / "config.yaml", store.root)
    job_id = made(store, "old")
    store.sentinel(job_id).unlink()
    assert cli.main(["gc"]) == 0
    assert f"store/{job_id}" in (text := capsys.readouterr().out) and "--yes" in text
    assert (store.root / "store" / job_id).exists()
    assert cli.main(["gc", "--yes"]) == 0
    assert not (store.root / "store" / job_id).exists()
    assert cli.main(["gc"]) == 0 and "nothing to drop" in capsys.readouterr().out


# ---- verify ----------------------------------------------------------------------------------------
HOST = {"system": "Linux", "machine": "x86_64", "cpu": "one", "cpu_capability": "AVX2", "cores": 2}


def ran(store: Store, text: str, host: dict = HOST, metrics: dict | None = None, correct: int = 50) -> str:
    """One evaluation's artefact as it was made on this host."""
    scores = {"scores": [{"task": "wug", "correct": correct, "n": 100}]}
    job = Job("evaluate", "e", {}, {}, "c")
    artefact(store, job, {"point.json": json.dumps(scores), "predictions.txt": text})
    side = store.read(job.id) | {"host": host, "versions": {"torch": "2", "dvc": "3"}, "metrics": metrics or {}}
    store.write(job.id, side)
    return job.id


def test_verify_wants_equal_bytes_on_the_same_type_of_machine(tmp_path):
    old, new = Store(tmp_path / "old"), Store(tmp_path / "new")
    job_id = ran(old, "a", metrics={"points_computed": 0})
    ran(new, "a", {**HOST, "cores": 64}, {"points_computed": 9})
    assert verify.compare(job_id, old, new).same == "bytes"
    ran(other := Store(tmp_path / "other"), "b", {k: v for k, v in HOST.items() if k != "cpu_capability"})
    verdict = verify.compare(job_id, old, other)
    assert verdict.same == "no" and verdict.details == [f"store/{job_id}/predictions.txt: other bytes"]


@pytest.mark.parametrize(
    ("metrics", "correct", "same"),
    [({"loss": 1.04}, 52, "figures"), ({"loss": 1.2}, 50, "no"), ({"loss": 1.0}, 47, "no"), ({}, 50, "no")],
)
def test_verify_allows_a_tolerance_on_another_type(tmp_path, metrics, correct, same):
    old, new = Store(tmp_path / "old"), Store(tmp_path / "new")
    job_id = ran(old, "a", metrics={"loss": 1.0})
    ran(new, "b", {**HOST, "cpu": "other"}, metrics, correct)
    verdict = verify.compare(job_id, old, new)
    assert verdict.same == same
    assert "another type of machine (cpu)" in verdict.details[0] and "predictions.txt" in verdict.details[0]
    assert (same == "no") == any(line.startswith(f"store/{job_id}") for line in verdict.details)


def test_sample_is_the_same_for_the_same_seed():
    ids = [f"train/{n}" for n in range(50)]
    assert verify.choose(ids, 5, 0) == verify.choose(ids[::-1], 5, 0) != verify.choose(ids, 5, 1)
    assert verify.choose(ids, None, 0) == verify.choose(ids, 99, 0) == sorted(ids)


# ---- faults of the disk ----------------------------------------------------------------------------
STAGE = """
def run(job):
    with (job.out / "big.bin").open("wb") as file:
        for _ in range(8):
            file.write(bytes(1 << 20))
"""
RUN = "from grafting.provenance.runner import main; main('bigstage:run')"


def in_namespace(folder: Path, mounts: str, *command: str) -> subprocess.CompletedProcess:
    """Run a command where `mounts` (shell) has changed what is mounted, for that command only."""
    unshare = ["unshare", "-rm", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    script = f'{mounts} || exit 99; exec "$@"'
    done = subprocess.run([*unshare, script, "sh", *command], cwd=folder, env=environment, capture_output=True,
                          text=True, check=False)  # fmt: skip
    if done.returncode == 99:
        pytest.skip(f"cannot mount here: {done.stderr}")
    return done


@pytest.mark.parametrize(
    ("mounts", "said"),
    [
        ("mkdir -p store/.aside && mount -t tmpfs -o size=2m tmpfs store/.aside", "No space left on device"),
        ("mount --bind store store && mount -o remount,ro,bind store", "Read-only file system"),
        ("mount --bind provenance provenance && mount -o remount,ro,bind provenance", "Read-only file system"),
    ],
    ids=["full", "read-only store", "read-only provenance"],
)
def test_a_full_or_read_only_disk_is_a_message_and_changes_nothing(store, mounts, said):
    made(store, "kept")
    (store.root / "bigstage.py").write_text(STAGE)
    job = Job("train", "big", {}, {}, "c")
    plan = write_plan({job.id: job}, store.root / "work" / "plans")
    before = snapshot(store.root)
    done = in_namespace(store.root, mounts, sys.executable, "-c", RUN, "--plan", str(plan), "--job", job.id)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and "nothing that is finished is lost" in done.stderr and "Traceback" not in done.stderr
    after = {path: h for path, h in snapshot(store.root).items() if not path.startswith(f"store/{job.id}")}
    assert after == before and not store.sentinel(job.id).exists()
    # with room again, the same command ends well
    environment = {**os.environ, "PYTHONPATH": f"{store.root}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", RUN, "--plan", str(plan), "--job", job.id]
    again = subprocess.run(command, cwd=store.root, env=environment, check=False)
    assert again.returncode == 0 and store.payload(job.id).is_dir()


def test_a_full_cache_disk_is_a_notice_and_changes_nothing(store):
    subprocess.run([*DVC, "cache", "dir", "--local", "small"], cwd=store.root, check=True, capture_output=True)
    (store.root / "small").mkdir()
    made(store, "a", **{"big.bin": "x" * (4 << 20)})
    before = snapshot(store.root)
    mounts = "mount -t tmpfs -o size=1m tmpfs small"
    done = in_namespace(store.root, mounts, sys.executable, "-m", "grafting.provenance.versioning")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr and "safe in store/" in done.stderr
    assert "Traceback" not in done.stderr
    assert snapshot(store.root) == before


ELSEWHERE = """
import os
from pathlib import Path
from grafting.provenance.cache import Cache
from grafting.provenance.store import Store
from grafting.provenance.versioning import add_payloads
store = Store()
job = os.environ["MADE"]
file = Path("store", job, "big.bin")
assert os.stat("small").st_dev != os.stat("store").st_dev
assert not list(Path("small").rglob("*"))
add_payloads(store)
kept = [path for path in Path("small").rglob("*") if path.is_file() and path.stat().st_size == 1 << 20]
assert len(kept) == 1 and kept[0].stat().st_nlink == 1
with Cache(store.root) as cache:
    print("link types:", cache.links())
assert (store.payload(job) / "big.bin").read_bytes() == b"x" * (1 << 20)
file.unlink()  # and comes back from there
assert (store.payload(job) / "big.bin").read_bytes() == b"x" * (1 << 20)
"""


def test_a_cache_on_another_file_system_works_without_hard_links(store, monkeypatch):
    subprocess.run([*DVC, "cache", "dir", "--local", "small"], cwd=store.root, check=True, capture_output=True)
    (store.root / "small").mkdir()
    monkeypatch.setenv("MADE", made(store, "a", **{"big.bin": "x" * (1 << 20)}))
    done = in_namespace(store.root, "mount -t tmpfs -o size=8m tmpfs small", sys.executable, "-c", ELSEWHERE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_exceeded_quota_is_a_message(store):
    text = os.strerror(errno.EDQUOT)
    (store.root / "bigstage.py").write_text(
        "import errno, os\ndef run(job):\n"
        "    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(job.out / 'big.bin'))\n"
    )
    job = Job("train", "big", {}, {}, "c")
    plan = write_plan({job.id: job}, store.root / "work" / "plans")
    environment = {**os.environ, "PYTHONPATH": f"{store.root}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", RUN, "--plan", str(plan), "--job", job.id], cwd=store.root,
                          env=environment, check=False, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2 and f"{text} at " in done.stderr and "big.bin; make room" in done.stderr
    assert "Traceback" not in done.stderr and not store.sentinel(job.id).exists()


def test_two_at_once_make_one_artefact(store):
    (store.root / "bigstage.py").write_text(
        "import time\ndef run(job):\n"
        "    with open('calls', 'a') as file:\n        file.write('x')\n"
        "    time.sleep(1)\n    (job.out / 'out').write_text('made')\n"
    )
    job = Job("train", "big", {}, {}, "c")
    plan = write_plan({job.id: job}, store.root / "work" / "plans")
    command = [sys.executable, "-c", RUN, "--plan", str(plan), "--job", job.id]
    environment = {**os.environ, "PYTHONPATH": f"{store.root}:{os.environ.get('PYTHONPATH', '')}"}
    both = [subprocess.Popen(command, cwd=store.root, env=environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert (store.root / "calls").read_text() == "x"
    assert not list((store.root / "store" / ".aside").iterdir())
