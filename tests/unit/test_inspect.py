"""`why` and `trace` on small invented studies."""

import pytest
from artefacts import artefact

from grafting.errors import UserError
from grafting.plan import code
from grafting.plan.jobs import Job
from grafting.provenance import inspect
from grafting.provenance.store import Store

KEYS = ("000000000001", "000000000002", "000000000003")


def test_why_names_spec_input_module_and_library(tmp_path, monkeypatch):
    store = Store(tmp_path)
    old = Job("train", "a.s0", {"lr": 1e-4, "opsd": {"beta": 0.5}}, {"model": [f"models/m-{KEYS[0]}"]}, "oldcode")
    new = Job("train", "a.s0", {"lr": 3e-4, "opsd": {"beta": 0.5}}, {"model": [f"models/m-{KEYS[1]}"]}, "newcode")
    artefact(store, old)
    store.keep_code("oldcode", lambda: {"modules": {"grafting.x": "1", "grafting.y": "1"}, "libraries": {"torch": "1"}})
    monkeypatch.setitem(
        code.MANIFESTS, "newcode", {"modules": {"grafting.x": "2", "grafting.y": "1"}, "libraries": {"torch": "2"}}
    )
    text = "\n".join(inspect.why(new, store))
    assert "spec lr: 0.0001 -> 0.0003" in text and "beta" not in text
    assert f"input model: models/m-{KEYS[0]} -> models/m-{KEYS[1]}" in text
    assert "module grafting.x: changed" in text and "grafting.y" not in text
    assert "library torch: changed (1 -> 2)" in text
    assert "nothing to run" in inspect.why(old, store)[0]


def test_find_takes_ids_names_and_paths():
    ids = [f"train/a.s0-{KEYS[0]}", f"train/a.s1-{KEYS[1]}", f"report/tiny-{KEYS[2]}"]
    assert inspect.find(ids[0], ids) == inspect.find("train/a.s0", ids) == ids[0]
    assert inspect.find(f"provenance/{ids[1]}.json", ids) == inspect.find(f"store/{ids[1]}/", ids) == ids[1]
    assert inspect.find("results/summary.md", ids) == ids[2]
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
