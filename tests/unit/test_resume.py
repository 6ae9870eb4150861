"""Resume state: nothing damaged is believed, signals and budgets end in a saved job, a second run goes on."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grafting.config import resolve
from grafting.config.load import read_yaml
from grafting.plan.jobs import Job
from grafting.plan.planfile import read_settings, write_plan
from grafting.plan.study import Study
from grafting.provenance import runner, saving
from grafting.provenance.resume import Log, States, fault, publish_folder
from grafting.provenance.saving import NOT_YET, SAVE, STOP, Saver, Settings, Stopped
from grafting.provenance.store import Store

PROJECT = Path(__file__).resolve().parents[2]


def tensors(n):
    return {"a": torch.full((3, 2), float(n)), "b": torch.tensor(n), "half": torch.ones(2, dtype=torch.bfloat16)}


@pytest.fixture(autouse=True)
def own_signals():
    """A job that was stopped stays deaf to signals; the tests' process must not."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def said():
    return []


@pytest.fixture
def states(tmp_path, said):
    return States(tmp_path / "states", said.append, "code")


# ---- states -----------------------------------------------------------------------------------------
def test_a_state_comes_back_as_it_was(states, said):
    facts = {"z": 0.1 + 0.2, "a": [1, None, "ü"], "m": {"y": 1, "b": 2}}
    states.write(tensors(7), facts)
    found = states.read()
    assert list(found.facts) == ["z", "a", "m"] and found.facts == facts
    assert found.tensors.keys() == tensors(7).keys()
    assert all(torch.equal(found.tensors[k], v) and found.tensors[k].dtype == v.dtype for k, v in tensors(7).items())
    assert said == []


def test_the_two_newest_are_kept(states):
    for n in range(1, 5):
        states.write(tensors(n), {"n": n})
    assert sorted(p.name for p in states.folder.iterdir()) == ["000003", "000004"]
    assert states.read().facts == {"n": 4}


def flip(path, place=-1):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["tensors.safetensors", "facts.json", "manifest.json"])
def test_a_flipped_bit_in_the_newest_falls_back_to_the_one_before_and_says_so(states, said, name):
    states.write(tensors(1), {"n": 1})
    states.write(tensors(2), {"n": 2})
    flip(states.folder / "000002" / name, 5)
    assert states.read().facts == {"n": 1}
    assert len(said) == 1 and "000002 is not usable" in said[0] and "taking the one before" in said[0]
    states.write(tensors(3), {"n": 3})  # the number is free again
    assert states.read().facts == {"n": 3}


@pytest.mark.parametrize("remains", ["cut", "gone", "no manifest"])
def test_a_torn_newest_falls_back(states, said, remains):
    states.write(tensors(1), {"n": 1})
    states.write(tensors(2), {"n": 2})
    file = states.folder / "000002" / "tensors.safetensors"
    if remains == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    elif remains == "gone":
        file.unlink()
    else:
        (states.folder / "000002" / "manifest.json").unlink()
    assert states.read().facts == {"n": 1} and len(said) == 1


def test_without_a_usable_state_it_starts_from_scratch_and_says_so(states, said):
    assert states.read() is None and said == []  # nothing was saved: nothing to say
    for n in (1, 2):
        states.write(tensors(n), {"n": n})
        flip(states.folder / f"{n:06d}" / "facts.json", 2)
    assert states.read() is None
    assert "starting from the beginning" in said[-1]
    assert list(states.folder.iterdir()) == []


def test_what_a_killed_save_left_is_ignored_and_removed(states, said):
    states.write(tensors(1), {"n": 1})
    (states.folder / ".000002.99").mkdir()
    (states.folder / ".000002.99" / "tensors.safetensors").write_bytes(b"half")
    assert states.read().facts == {"n": 1} and said == []
    assert [p.name for p in states.folder.iterdir()] == ["000001"]


def test_a_state_of_other_code_is_not_taken(states, said):
    states.write(tensors(1), {"n": 1})
    other = States(states.folder, said.append, "other code")
    assert other.read() is None and "another version" in said[0]


def test_a_folder_is_published_whole_and_replaces_the_old_one(tmp_path):
    place = tmp_path / "deep" / "p50"
    for text in ("one", "two"):
        publish_folder(place, lambda folder, text=text: (folder / "x").write_text(text))
        assert (place / "x").read_text() == text and fault(place) is None
    with pytest.raises(RuntimeError):
        publish_folder(place, lambda folder: (_ for _ in ()).throw(RuntimeError))
    assert (place / "x").read_text() == "two" and [p.name for p in place.parent.iterdir()] == ["p50"]


def test_a_disk_that_does_not_take_a_state_costs_a_warning_and_on_a_stop_an_error(tmp_path, said):
    saver = Saver(tmp_path, Settings(), said.append)
    saver.save({"a": torch.ones(3)}, {"n": 1}, must=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # no file may grow further: the disk's own refusal
    try:
        saver.save({"a": torch.ones(100_000)}, {"n": 2}, must=False)
        with pytest.raises(OSError, match="File too large"):
            saver.save({"a": torch.ones(100_000)}, {"n": 2}, must=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(said) == 1 and "could not save (File too large)" in said[0]
    assert Saver(tmp_path).peek().facts["n"] == 1
    assert [p.name for p in (tmp_path / "states").iterdir()] == ["000001"]


# ---- the log ----------------------------------------------------------------------------------------
def logged(path, said):
    log = Log(path, said.append, "code")
    return log, log.entries


def filled(path, said, n=5):
    log, _ = logged(path, said)
    for i in range(n):
        log.add({"i": i, "text": "ü" * i})
    log.flush()


def test_log_comes_back_and_goes_on(tmp_path, said):
    path = tmp_path / "w" / "finished.jsonl"
    filled(path, said)
    log, entries = logged(path, said)
    assert [e["i"] for e in entries] == [0, 1, 2, 3, 4]
    log.add({"i": 5})
    assert len(logged(path, said)[1]) == 5  # not yet flushed
    log.flush()
    assert [e["i"] for e in logged(path, said)[1]] == list(range(6)) and said == []


def test_every_torn_end_of_the_log_is_ignored(tmp_path, said):
    path = tmp_path / "finished.jsonl"
    filled(path, said)
    content = path.read_bytes()
    ends = [i for i in range(len(content) + 1) if content[:i].endswith(b"\n")]
    for length in range(len(content)):
        path.write_bytes(content[:length])
        log, entries = logged(path, said)
        whole = sum(end <= length for end in ends)
        assert len(entries) == max(whole - 1, 0)
        log.add({"i": 99})
        log.flush()
        assert [e["i"] for e in logged(path, said)[1]] == [*range(max(whole - 1, 0)), 99]
    assert said == []


def test_after_a_damaged_line_of_the_log_nothing_is_believed(tmp_path, said):
    path = tmp_path / "finished.jsonl"
    filled(path, said)
    flip(path, path.read_bytes().index(b'{"i":2') + 5)
    assert [e["i"] for e in logged(path, said)[1]] == [0, 1]
    assert "damaged after 2 entries" in said[0]
    assert [e["i"] for e in logged(path, said)[1]] == [0, 1] and len(said) == 1
    other = Log(path, said.append, "other")
    assert other.entries == [] and "another version" in said[-1]


def test_a_log_that_the_disk_does_not_take_is_whole_and_written_later(tmp_path, said):
    path = tmp_path / "finished.jsonl"
    filled(path, said)
    log, _ = logged(path, said)
    log.add({"i": 5, "text": "x" * 40_000})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError):
            log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(logged(path, said)[1]) == 5
    log.flush()
    assert [e["i"] for e in logged(path, said)[1]] == list(range(6)) and said == []


# ---- when -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1"])
@pytest.mark.parametrize("times", [1, 3])
def test_signals_are_remembered_in_a_section_and_only_there(tmp_path, name, times):
    number = getattr(signal, f"SIG{name}")
    before = signal.getsignal(number)
    saver = Saver(tmp_path, Settings(signal="USR1"))
    with saver.section():
        assert saver.due() == NOT_YET
        for _ in range(times):
            os.kill(os.getpid(), number)
        assert saver.due() == STOP
        saver.save({"a": torch.ones(2)}, {"n": 1}, must=True)
        os.kill(os.getpid(), number)
        with pytest.raises(Stopped, match=f"stopped by SIG{name}, saved at step 4; run again"):
            saver.leave("step 4")
    assert signal.getsignal(number) == before
    assert Saver(tmp_path).take().facts["n"] == 1


def test_a_stop_asked_for_in_one_section_is_honoured_in_the_next(tmp_path):
    saver = Saver(tmp_path, Settings())
    with saver.section():
        os.kill(os.getpid(), signal.SIGTERM)
    with saver.section():
        assert saver.due() == STOP


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        saver = Saver(tmp_path)
        with saver.section():
            os.kill(os.getpid(), signal.SIGHUP)
            assert saver.due() == NOT_YET
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def asked(saver, clock, n, seconds=1.0):
    found = []
    for _ in range(n):
        clock.seconds += seconds
        found.append(saver.due())
        if found[-1] == SAVE:
            saver.save({}, {}, must=True)
    return found


def test_interval_in_steps_and_in_seconds(tmp_path, clock):
    saver = Saver(tmp_path / "a", Settings(seconds=None, steps=3))
    assert asked(saver, clock, 7) == [0, 0, SAVE, 0, 0, SAVE, 0]
    saver = Saver(tmp_path / "b", Settings(seconds=4))
    assert asked(saver, clock, 9) == [0, 0, 0, SAVE, 0, 0, 0, SAVE, 0]
    saver = Saver(tmp_path / "c", Settings(seconds=None))
    assert set(asked(saver, clock, 500)) == {NOT_YET}


def test_saving_takes_at_most_its_share(tmp_path, clock, monkeypatch):
    """A save of 3 s at a share of 2 % comes every 150 s, also the first one, whose cost is estimated."""
    saver = Saver(tmp_path, Settings(seconds=10, share=0.02))
    write = saver._states.write

    def slow(*arguments):
        clock.seconds += 3
        write(*arguments)

    monkeypatch.setattr(saver._states, "write", slow)
    saver.expect(int(2 * saving.SLOW_DISK))
    found = asked(saver, clock, 100 + 150 + 149)
    assert [i for i, due in enumerate(found) if due == SAVE] == [99, 249]


def test_budget_leaves_room_for_a_step_and_a_save(tmp_path, clock):
    saver = Saver(tmp_path, Settings(budget_seconds=100), started=clock.seconds - 20)
    saver.expect(int(5 * saving.SLOW_DISK))
    with saver.section():
        found = asked(saver, clock, 8, seconds=10)
    # after 60 s of steps: 80 + 10 (next step) + 5 (save) < 100; after 70 s it no longer fits
    assert found == [0] * 6 + [STOP, STOP]
    with pytest.raises(Stopped, match="its time budget of 100 s"):
        saver.leave("step 7")


def test_without_a_folder_nothing_is_kept():
    saver = Saver()
    before = signal.getsignal(signal.SIGTERM)
    with saver.section():
        assert signal.getsignal(signal.SIGTERM) == before
        assert saver.due() == NOT_YET and saver.take() is None
        saver.save({}, {}, must=True)
        part = saver.part("x")
        part.add("1", 1, "1 of 2")
        assert part.get("1") is None


# ---- configuration and plan -------------------------------------------------------------------------
def test_saving_enters_no_key_and_no_result(tmp_path):
    layers = [read_yaml(PROJECT / "config.yaml"), read_yaml(PROJECT / "presets" / "smoke.yaml")]
    changed = {"seconds": 0.5, "steps": 7, "share": 0.5, "signal": "URG", "budget_seconds": 3600}
    one, other = Study(resolve(*layers)), Study(resolve(*layers, {"saving": changed}))
    assert list(one.jobs) == list(other.jobs)
    path = write_plan(other.jobs, tmp_path, other.config.saving.model_dump())
    assert Settings(**read_settings(path)) == Settings(**changed)
    assert Settings(**one.config.saving.model_dump()) == Settings()  # config.yaml and the code have one default


# ---- processes --------------------------------------------------------------------------------------
STAGE = """
import os, time
def run(job):
    part = job.saving.part("count")
    made = []
    with job.saving.section():
        (job.store.root / "pid").write_text(str(os.getpid()))
        for n in range(job.spec["n"]):
            value = part.get(str(n))
            if value is None:
                time.sleep(0.03)
                value = n * n
                part.add(str(n), value, f"piece {n + 1} of {job.spec['n']}")
            made.append(value)
    if job.spec.get("linger"):
        (job.store.root / "lingers").touch()
        time.sleep(job.spec["linger"])
    (job.out / "out.txt").write_text(str(made))
"""
SERVER = """
import sys
from grafting.provenance import warm
warm.PRELOADED = ("grafting.provenance.runner",)
warm.serve(sys.argv[1], int(sys.argv[2]))
"""
MAIN = "from grafting.provenance.runner import main; main('countstage:run')"


class Folder:
    """A study folder with one long job, run cold or through a warm process."""

    def __init__(self, root, job, settings):
        self.root, self.job, self.store = root, job, Store(root)
        self.plan = write_plan({job.id: job}, root / "plans", settings)
        (root / "countstage.py").write_text(STAGE)
        self.environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        self.server = None

    def warm(self):
        address = str(self.root / "s")
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, address, str(os.getpid())], env=self.environment, cwd=self.root
        )
        self.environment["GRAFTING_WARM"] = address
        wait(lambda: os.path.exists(address))

    def start(self, *more):
        (self.root / "pid").unlink(missing_ok=True)
        command = [sys.executable, "-c", MAIN, "--plan", str(self.plan), "--job", self.job.id, "--log", "log", *more]
        return subprocess.Popen(command, cwd=self.root, env=self.environment, stderr=subprocess.PIPE, text=True)

    def pid(self):
        wait(lambda: (self.root / "pid").exists() and (self.root / "pid").read_text())
        return int((self.root / "pid").read_text())

    def finish(self):
        process = self.start()
        _, text = process.communicate(timeout=60)
        assert process.returncode == 0, text
        made = (self.store.payload(self.job.id) / "out.txt").read_text()
        assert made == str([n * n for n in range(self.job.spec["n"])])
        assert not self.store.work(self.job.id).exists()  # removed after publishing
        return self.store.read(self.job.id), (self.root / "log").read_text()


def wait(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path, Job("train", "long", {"n": 60}, {}, "c"), {"seconds": 0.1, "share": 1.0, "signal": "USR2"})
    yield made
    if made.server is not None:
        made.server.kill()
        made.server.wait()


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", ["TERM", "INT", "USR2"])
def test_a_signal_ends_in_a_saved_job_and_status_75(folder, warm, name):
    if warm:
        folder.warm()
    process = folder.start()
    pid = folder.pid()
    time.sleep(0.3)
    process.send_signal(getattr(signal, f"SIG{name}"))
    time.sleep(0.01)
    process.send_signal(getattr(signal, f"SIG{name}"))  # an impatient person
    _, text = process.communicate(timeout=30)
    assert process.returncode == 75
    assert f"stopped by SIG{name}, saved at piece" in text and "run again to go on" in text
    assert "Traceback" not in text
    wait(lambda: gone(pid))
    sidecar, log = folder.finish()
    assert sidecar["sessions"] == 2 and "going on after" in log


def test_a_budget_on_the_command_line_ends_the_job_again_and_again_until_it_is_done(folder):
    statuses = []
    while 0 not in statuses:
        process = folder.start("--budget", "0.5")
        _, text = process.communicate(timeout=60)
        statuses.append(process.returncode)
        assert process.returncode in (0, 75), text
        assert (process.returncode == 0) or "its time budget of 0.5 s" in text
    assert len(statuses) > 2
    assert folder.store.read(folder.job.id)["sessions"] == len(statuses)


@pytest.mark.parametrize("victim", ["client", "job", "server"])
def test_kill_9_leaves_a_state_to_go_on_from(folder, victim):
    folder.warm()
    process = folder.start()
    pid = folder.pid()
    time.sleep(0.6)
    if victim == "server":
        folder.server.kill()
        assert process.wait(timeout=30) == 0  # the job goes on without it
        folder.store.sentinel(folder.job.id).unlink()
        assert folder.finish()[0]["sessions"] == 1
        return
    os.kill(process.pid if victim == "client" else pid, signal.SIGKILL)
    _, text = process.communicate(timeout=30)
    assert process.returncode == (-9 if victim == "client" else 137)
    wait(lambda: gone(pid))
    sidecar, log = folder.finish()
    assert sidecar["sessions"] == 2 and "going on after" in log


def test_elsewhere_a_signal_keeps_its_default_effect(tmp_path):
    folder = Folder(tmp_path, Job("train", "long", {"n": 2, "linger": 600}, {}, "c"), {"seconds": 0.01, "share": 1.0})
    process = folder.start()
    wait(lambda: (tmp_path / "lingers").exists())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    assert not folder.store.sentinel(folder.job.id).exists()


def test_a_job_outlives_the_reader_of_its_messages(folder):
    process = folder.start()
    folder.pid()
    process.stderr.close()  # the terminal is gone
    assert process.wait(timeout=60) == 0
    assert folder.store.sentinel(folder.job.id).exists()


def test_what_a_resumed_job_cost_is_counted_once(tmp_path):
    def work(job):
        part = job.saving.part("x")
        with job.saving.section(), job.phase("busy"):
            for n in range(3):
                if part.get(str(n)) is None:
                    end = time.process_time() + 0.05
                    while time.process_time() < end:
                        pass
                    part.add(str(n), n, f"{n}")
        job.add_cost(flops=10)
        (job.out / "x").write_text("x")

    store, job = Store(tmp_path), Job("train", "a", {}, {}, "c")
    for session in range(3):
        with pytest.raises(Stopped):
            runner.execute(job, store, work, sys.stderr, Settings(budget_seconds=0))
        assert len((store.work(job.id) / "finished.jsonl").read_text().splitlines()) == session + 2
    runner.execute(job, store, work, sys.stderr)
    sidecar = store.read(job.id)
    assert sidecar["cost"]["flops"] == 10 and sidecar["sessions"] == 4
    assert 0.15 <= sidecar["cost"]["phases"]["busy"] < 0.6
    assert sidecar["cost"]["cpu_seconds"] >= 0.15
    assert json.loads(store.sentinel(job.id).read_text()) == sidecar
