"""Publishing by rename, sentinels last, links for selected artefacts, the warm process."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from grafting.errors import UserError
from grafting.plan.jobs import Job
from grafting.plan.planfile import write_plan
from grafting.provenance import facts, runner
from grafting.provenance.files import canonical, write_json
from grafting.provenance.store import Store

KEY = "0123456789ab"


def write_number(job):
    (job.out / "number.txt").write_text(str(job.spec["number"]))


def test_job_is_published_and_done_once(tmp_path):
    store, job = Store(tmp_path), Job("train", "a.s0", {"number": 7}, {}, "c")
    runner.execute(job, store, write_number, sys.stderr)
    sidecar = store.read(job.id)
    assert (store.payload(job.id) / "number.txt").read_text() == "7"
    assert sidecar["payload"]["number.txt"]["bytes"] == 1
    assert sidecar["spec"] == {"number": 7} and sidecar["cost"]["cpu_seconds"] >= 0
    runner.execute(job, store, lambda job: pytest.fail("done already"), sys.stderr)
    assert not list((tmp_path / "store" / ".aside").iterdir())


def test_record_is_enough_to_name_the_job_again_and_holds_no_secret(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GRAFTING_DATA_ROOT", "OMP_NUM_THREADS_SECRET"):
        monkeypatch.setenv(name, "hunter2-of-the-environment")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    store = Store(tmp_path)
    inputs = {"model": [f"models/m-{KEY}:p100"]}
    places = {"path": "/home/hunter2-of-the-path/model"}
    job = Job("train", "a.s3", {"number": 7, "seed": 3}, inputs, "c", ("train",), places=places)
    runner.execute(job, store, write_number, sys.stderr)
    sidecar = store.read(job.id)
    assert Job(*(sidecar[name] for name in ("stage", "name", "spec", "inputs", "code"))).id == job.id
    assert sidecar["seed"] == 3
    assert sidecar["environment"]["OMP_NUM_THREADS"] == "1" and sidecar["environment"]["SLURM_JOB_ID"] == "77"
    assert set(sidecar["environment"]) <= set(facts.ENVIRONMENT)
    assert "hunter2" not in store.sentinel(job.id).read_text()
    for name in ("payload", "versions", "git", "host", "cost", "started", "finished"):
        assert sidecar[name], name


def test_failed_job_leaves_nothing(tmp_path):
    store, job = Store(tmp_path), Job("train", "a", {}, {}, "c")

    def fail(job):
        (job.out / "half.txt").write_text("half")
        raise UserError("no")

    with pytest.raises(UserError):
        runner.execute(job, store, fail, sys.stderr)
    assert not store.sentinel(job.id).exists()
    assert not (tmp_path / "store" / job.id).exists()
    assert not list((tmp_path / "store" / ".aside").iterdir())


def test_remains_of_an_interrupted_publication_are_replaced(tmp_path):
    store, job = Store(tmp_path), Job("train", "a", {"number": 1}, {}, "c")
    remains = tmp_path / "store" / job.id
    remains.mkdir(parents=True)
    (remains / "half.txt").write_text("half")
    runner.execute(job, store, write_number, sys.stderr)
    assert sorted(p.name for p in store.payload(job.id).iterdir()) == ["number.txt"]


def selected(store, choice):
    folder = store.root / "store" / "select" / f"s-{KEY}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "choice.json").write_text(json.dumps({"choice": choice}))
    write_json(store.sentinel(f"select/s-{KEY}"), {"id": f"select/s-{KEY}"})


def test_selected_artefact_is_a_link_and_never_computed_twice(tmp_path):
    store = Store(tmp_path)
    selected(store, "one")
    ways = {name: Job("merge", "w", {"number": n}, {}, "c") for n, name in enumerate(("zero", "one"))}
    first = Job("merge", "first", {}, {"selection": [f"select/s-{KEY}"]}, "c", alternatives=ways)
    second = Job("merge", "second", {}, {"selection": [f"select/s-{KEY}"]}, "d", alternatives=ways)
    runner.execute(first, store, write_number, sys.stderr)
    assert (store.payload(first.id) / "number.txt").read_text() == "1"
    runner.execute(second, store, lambda job: pytest.fail("computed twice"), sys.stderr)
    assert store.target(second.id) == ways["one"].id == store.target(first.id)


def test_missing_payload_is_named(tmp_path):
    store = Store(tmp_path)
    write_json(store.sentinel(f"train/x-{KEY}"), {})
    with pytest.raises(UserError, match=f"store/train/x-{KEY}"):
        store.payload(f"train/x-{KEY}")
    store.sentinel(f"train/x-{KEY}").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        store.payload(f"train/x-{KEY}")


def test_full_disk_is_a_message_and_not_a_traceback(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fullstage.py").write_text("import errno\ndef run(job): raise OSError(errno.ENOSPC, 'No space left')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    job = Job("train", "full", {}, {}, "c")
    plan = write_plan({job.id: job}, tmp_path / "plans")
    assert runner.run("fullstage:run", ["--plan", str(plan), "--job", job.id]) == 2
    text = capfd.readouterr().err
    assert "No space left" in text and "Traceback" not in text
    assert not Store(tmp_path).sentinel(job.id).exists()


def test_canonical_json_refuses_nan_and_ignores_order():
    assert canonical({"b": 1, "a": [1.5, "é"]}) == '{"a":[1.5,"é"],"b":1}'
    with pytest.raises(ValueError):
        canonical({"a": float("nan")})


def test_report_replaces_the_marker_of_another(tmp_path):
    store = Store(tmp_path)
    store.write("report/tiny-000000000000", {"spec": 0})
    store.write("report/tiny-111111111111", {"spec": 1})
    assert sorted(p.name for p in (tmp_path / "results").iterdir()) == ["report-tiny-111111111111.json", "report.json"]
    assert store.read("report/tiny-111111111111") == {"spec": 1}


STAGE = """
import os, time
def run(job):
    if job.spec["sleep"]:
        (job.store.root / "pid").write_text(str(os.getpid()))
        time.sleep(job.spec["sleep"])
    (job.out / "out.txt").write_text("made")
"""

SERVER = """
import sys
from grafting.provenance import warm
warm.PRELOADED = ()
warm.serve(sys.argv[1], int(sys.argv[2]))
"""


@pytest.fixture
def warm_server(tmp_path):
    (tmp_path / "mystage.py").write_text(STAGE)
    address = str(tmp_path / "s")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", SERVER, address, str(os.getpid())], env=environment)
    while not os.path.exists(address):
        time.sleep(0.01)
    yield {**environment, "GRAFTING_WARM": address}
    process.terminate()
    process.wait()


def client(folder, environment, job):
    plan = write_plan({job.id: job}, folder / "plans")
    text = "from grafting.provenance.runner import main; main('mystage:run')"
    return subprocess.Popen(
        [sys.executable, "-c", text, "--plan", str(plan), "--job", job.id, "--log", str(folder / "log")],
        cwd=folder,
        env=environment,
    )


def test_warm_process_gives_the_same_as_a_cold_one(tmp_path, warm_server):
    cold = {key: value for key, value in warm_server.items() if key != "GRAFTING_WARM"}
    for n, environment in enumerate((warm_server, cold)):
        job = Job("train", f"n{n}", {"sleep": 0, "n": n}, {}, "c")
        assert client(tmp_path, environment, job).wait() == 0
        assert (Store(tmp_path).payload(job.id) / "out.txt").read_text() == "made"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ending_the_client_ends_its_warm_job(tmp_path, warm_server, number):
    job = Job("train", "long", {"sleep": 600}, {}, "c")
    process = client(tmp_path, warm_server, job)
    while not (tmp_path / "pid").exists():
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=20) != 0
    pid = int((tmp_path / "pid").read_text())
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the job outlived the one who asked for it")
    assert not Store(tmp_path).sentinel(job.id).exists()
