"""`why` and `trace` on small invented studies."""

import json
import shutil
import subprocess
import sys

import pytest
from artefacts import artefact

from grafting.errors import UserError
from grafting.plan import code
from grafting.plan.aliases import Alias, Aliases
from grafting.plan.jobs import Job
from grafting.provenance import inspect, runner
from grafting.provenance.files import write_json
from grafting.provenance.store import Store
from grafting.provenance.why import differences, why

KEYS = ("000000000001", "000000000002", "000000000003")


def test_why_names_spec_input_module_library_and_file(tmp_path, monkeypatch):
    store = Store(tmp_path)
    old = Job("train", "a.s0", {"lr": 1e-4, "opsd": {"beta": 0.5}}, {"model": [f"models/m-{KEYS[0]}"]}, "oldcode")
    new = Job("train", "a.s0", {"lr": 3e-4, "opsd": {"beta": 0.5}}, {"model": [f"models/m-{KEYS[1]}"]}, "newcode")
    artefact(store, old)
    before = {"modules": {"grafting.x": "1", "grafting.y": "1"}, "libraries": {"torch": "1"}, "files": {"a.txt": "1"}}
    after = {"modules": {"grafting.x": "2", "grafting.y": "1"}, "libraries": {"torch": "2"}, "files": {"a.txt": "2"}}
    store.keep_code("oldcode", lambda: before)
    monkeypatch.setitem(code.MANIFESTS, "newcode", after)
    text = "\n".join(why(new, {new.id: new}, store))
    assert "spec lr: 0.0001 -> 0.0003" in text and "beta" not in text
    assert "input model: models/m changed" in text
    assert "module grafting.x: changed" in text and "grafting.y" not in text
    assert "library torch: changed (1 -> 2)" in text
    assert "file a.txt: changed" in text
    assert "(code oldcode -> newcode)" in text
    assert "nothing to run" in why(old, {old.id: old}, store)[0]


def chain(lr: float, seed: int = 0) -> dict[str, Job]:
    """A model, two trainings on it, a selection between them, and the test of what it selects."""
    model = Job("models", "m", {"lr": lr, "threads": 1}, {}, "c")
    trained = [Job("train", f"t{n}", {"seed": seed, "n": n}, {"model": [model.id]}, "c") for n in range(2)]
    points = [{"name": f"p{n}", "key": trained[n].key} for n in range(2)]
    evaluation = Job("evaluate", "e", {"points": points}, {"trained": [job.id for job in trained]}, "c")
    select = Job("select", "s", {"candidates": []}, {"evaluations": [evaluation.id]}, "c")
    ways = {job.name: Job("evaluate", f"w.{job.name}", {}, {"trained": [job.id]}, "c") for job in trained}
    test = Job("evaluate", "test.s", {}, {"selection": [select.id]}, "c", alternatives=ways)
    return {job.id: job for job in (model, *trained, evaluation, select, test)}


def finish(store: Store, jobs: dict[str, Job]) -> None:
    for job in jobs.values():
        if not job.alternatives:
            artefact(store, job, {"choice.json": json.dumps({"choice": "t1"})} if job.stage == "select" else None)
    (test,) = (job for job in jobs.values() if job.alternatives)
    runner.execute(test, store, lambda job: (job.out / "x").write_text("made"), sys.stderr)


def named(jobs: dict[str, Job], name: str) -> Job:
    return next(job for job in jobs.values() if job.name == name)


def test_why_follows_a_changed_input_to_what_changed_first(tmp_path):
    store, before, after = Store(tmp_path), chain(0.1), chain(0.2)
    finish(store, before)
    text = "\n".join(why(named(after, "e"), after, store))
    assert "input trained: train/t0 changed, train/t1 changed" in text
    assert "because models/m changed: spec lr: 0.1 -> 0.2" in text
    assert text.count("because") == 1
    assert "key" not in text.partition("input")[0], "keys inside the spec only follow"


def test_why_of_what_hangs_on_a_selection(tmp_path):
    store, before, after = Store(tmp_path), chain(0.1), chain(0.1, seed=1)
    finish(store, before)
    done = "\n".join(why(named(before, "test.s"), before, store))
    assert "is done" in done and "It is evaluate/w.t1-" in done
    text = "\n".join(why(named(after, "test.s"), after, store))
    assert "input selection: select/s changed" in text
    assert "because train/t0 and 1 more changed: spec seed: 0 -> 1" in text


def test_why_says_which_candidates_came_and_went(tmp_path):
    store, before = Store(tmp_path), chain(0.1)
    finish(store, before)
    test = named(before, "test.s")
    ways = {"t1": test.alternatives["t1"], "t9": Job("evaluate", "w.t9", {}, {}, "c")}
    other = Job("evaluate", "test.s", {}, test.inputs, "c", alternatives=ways)
    text = "\n".join(why(other, before, store))
    assert "candidate t9: added" in text and "candidate t0: removed" in text and "because" not in text


def test_why_since_reads_sentinels_and_code_from_git(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    store, before = Store(tmp_path), chain(0.1)
    after = {i: Job(j.stage, j.name, j.spec, j.inputs, "d") if j.stage == "models" else j for i, j in before.items()}
    finish(store, before)
    store.keep_code("c", lambda: {"modules": {"grafting.x": "1"}, "libraries": {}})
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "results")
    shutil.rmtree(tmp_path / "provenance")
    monkeypatch.setitem(code.MANIFESTS, "d", {"modules": {"grafting.x": "2"}, "libraries": {}})
    model = next(job for job in after.values() if job.stage == "models")
    train = Job("train", "t0", {"seed": 0, "n": 0}, {"model": [model.id]}, "c")
    text = "\n".join(why(train, {model.id: model, train.id: train}, store, "HEAD"))
    assert "of HEAD:\n  input model: models/m changed\n  because models/m changed: module grafting.x: changed" in text
    same = why(named(before, "t1"), before, store, "HEAD")
    assert "same key" in same[-1]
    with pytest.raises(UserError, match="git ls-tree"):
        why(train, {train.id: train}, store, "nowhere")


def test_differences_go_by_name_where_there_are_names():
    old = {"points": [{"name": "a", "x": 1}, {"name": "b", "x": 2}], "seeds": [0], "gone": None}
    new = {"points": [{"name": "c", "x": 9}, {"name": "b", "x": 3}], "seeds": [0, 1]}
    found = {path: (before, after) for path, before, after in differences(old, new)}
    assert set(found) == {"points[a]", "points[b].x", "points[c]", "seeds", "gone"}
    assert found["points[b].x"] == (2, 3) and found["seeds"] == ([0], [0, 1])
    assert list(differences(old, json.loads(json.dumps(old)))) == []


def test_find_takes_ids_names_and_paths():
    ids = [f"train/a.s0-{KEYS[0]}", f"train/a.s1-{KEYS[1]}", f"report/tiny-{KEYS[2]}"]
    assert inspect.find(ids[0], ids) == inspect.find("train/a.s0", ids) == ids[0]
    assert inspect.find(f"provenance/{ids[1]}.json", ids) == inspect.find(f"store/{ids[1]}/", ids) == ids[1]
    assert inspect.find("results/summary.md", ids) == inspect.find("results/figures/frontier.svg", ids) == ids[2]
    assert inspect.find(f"store/{ids[0]}/model.safetensors", ids) == ids[0]
    with pytest.raises(UserError, match="means 2 jobs"):
        inspect.find("train/a", ids)
    with pytest.raises(UserError, match="no job of that name"):
        inspect.find("train/zz", ids)


def test_trace_goes_down_to_data_and_names_repeated_ones_once(tmp_path):
    store = Store(tmp_path)
    data = artefact(store, Job("data", "d", {"files": [{"name": "f.jsonl", "sha256": "ab"}]}, {}, "c"))
    model = artefact(store, Job("models", "m", {}, {"data": [data]}, "c"))
    train = artefact(store, Job("train", "t", {"seed": 4}, {"data": [data], "model": [model]}, "c"))
    lines = list(inspect.trace(train, store))
    assert "seed 4" in lines[0]
    assert sum("sha256 ab" in line for line in lines) == 1
    assert any("(above)" in line for line in lines)


def test_trace_ends_in_code_and_shows_what_was_declared_equal(tmp_path):
    store, jobs = Store(tmp_path), chain(0.1)
    finish(store, jobs)
    store.keep_code(
        "c", lambda: {"modules": {"grafting.x": "1"}, "libraries": {"torch": "2.0"}, "files": {"a.txt": "3"}}
    )
    train = named(jobs, "t1")
    declared = Aliases(keys={"a" * 12: Alias("keys", "a" * 12, train.key, "only moved")})
    text = "\n".join(inspect.trace(named(jobs, "test.s").id, store, declared))
    assert "= the chosen t1:" in text
    assert f"alias: key aaaaaaaaaaaa counts as {train.key}: only moved" in text
    assert "code c: x, a.txt; torch 2.0" in text


def test_trace_and_why_of_a_job_whose_equal_has_another_name(tmp_path):
    store = Store(tmp_path)
    made, equal = Job("select", "graft", {}, {}, "c"), Job("select", "graft_early", {}, {}, "c")
    artefact(store, made)
    runner.execute(equal, store, lambda job: pytest.fail("there is an equal one"), sys.stderr)
    lines = list(inspect.trace(equal.id, store))
    assert lines[0] == f"{equal.id}  = the equal:" and made.id in lines[1]
    assert f"It is {made.id}, which has the same key." in why(equal, {equal.id: equal}, store)[0]


def test_find_knows_the_job_of_a_selected_model(tmp_path):
    job_id = f"merge/g-{KEYS[0]}"
    spec = {"selections": [{"models": {"graft.s0": 1}}, {}]}
    write_json(tmp_path / "results" / "report.json", {"spec": spec, "inputs": {"models": ["merge/other", job_id]}})
    for target in ("results/models/graft.s0", "results/models/graft.s0/model.safetensors"):
        assert inspect.find(target, [job_id], tmp_path) == job_id
    with pytest.raises(UserError, match=r"no such model; the report knows graft\.s0"):
        inspect.find("results/models/other", [job_id], tmp_path)
