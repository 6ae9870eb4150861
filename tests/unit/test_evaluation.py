"""Evaluation on live weights with a model of a few thousand parameters, and selection."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from grafting.errors import UserError
from grafting.evaluation import frontier, select, stage
from grafting.plan.jobs import Job as PlannedJob

torch = pytest.importorskip("torch")

from grafting.evaluation import suites  # noqa: E402
from grafting.models import load_model, load_tokenizer, save_model  # noqa: E402
from grafting.models.chat import encode_prompt  # noqa: E402
from grafting.models.scratch import new_model, new_tokenizer  # noqa: E402
from grafting.provenance.runner import execute  # noqa: E402
from grafting.provenance.saving import Saver  # noqa: E402
from grafting.provenance.store import Store  # noqa: E402
from grafting.rollouts.counting import Counter  # noqa: E402

WORDS = ["<pad>", "<eos>", "<user>", "<bot>", "</ans>", "copy", "rev", "a", "b", "c", "d", "A", "B", "C", "D"]
ARCHITECTURE = {
    "layers": 1,
    "width": 16,
    "feed_forward": 16,
    "heads": 2,
    "context": 32,
    "embedding_std": 0.06,
}


class Job(SimpleNamespace):
    """The part of RunningJob that evaluate and select read."""

    def __init__(self, out: Path, spec: dict, inputs: dict, earlier=()) -> None:
        out.mkdir(parents=True)
        super().__init__(out=out, spec=spec, id="evaluate/x-1", name="x", metrics={}, cost={}, saving=Saver())
        self._inputs, self._earlier = inputs, list(earlier)

    def inputs(self, role):
        return self._inputs.get(role, [])

    def input(self, role):
        return self._inputs[role][0]

    def earlier(self):
        return self._earlier

    def add_cost(self, **numbers):
        self.cost.update(numbers)

    @contextmanager
    def phase(self, name):
        yield

    def progress(self, *args, **kwargs):
        return SimpleNamespace(update=lambda *a, **k: None, close=lambda: None)


def write_data(folder: Path, role: str, tasks: dict[str, list[tuple[str, str]]], scorer="tokens", options=None) -> Path:
    """A data folder with one split "val": task -> (question, answer)."""
    folder.mkdir()
    lines = []
    for task, pairs in tasks.items():
        for i, (question, answer) in enumerate(pairs):
            line = {"id": f"{task}{i}", "task": task, "answer": answer, "demonstrations": {}}
            line["messages"] = [{"role": "user", "content": question}]
            lines.append({**line, **({"options": options} if options else {})})
    info = {"name": folder.name, "role": role, "kind": "skill", "scorer": scorer, "scorer_options": {}}
    (folder / "info.json").write_text(json.dumps({**info, "skills": {"rev": "recall"}} if role == "prior" else info))
    (folder / "val.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    for seed, name in enumerate(("deployed", "trained")):
        model = new_model(ARCHITECTURE, WORDS, seed)
        with torch.no_grad():  # livelier than a fresh model, so that answers differ and some stop
            for parameter in model.parameters():
                parameter.mul_(3)
        save_model(model, new_tokenizer(WORDS, "deployed"), root / name)
    words = "abcd"
    prior = {
        "copy": [(f"copy {x} {y}", f"{x} {y}") for x in words for y in words],
        "rev": [(f"rev {x} {y} {z}", f"{z} {y} {x}") for x in words for y in words for z in words[:2]],
    }
    return {
        "model": [root / "deployed"],
        "trained": [root / "trained"],
        "donor": [root / "deployed"],
        "prior": [write_data(root / "prior", "prior", prior)],
        "tasks": [write_data(root / "zup", "new", {"zup": [(f"copy rev {x}", x.upper()) for x in words]})],
    }


def points(*scales) -> list[dict]:
    """One point per scale; None is the model itself."""
    return [
        {"name": f"l{s}", "key": f"key{s}", "labels": {"seed": 0},
         "recipe": None if s is None else {"operator": "graft", "scale": s, "terms": [0]}}
        for s in scales
    ]  # fmt: skip


def evaluate(out: Path, inputs: dict, wanted: list[dict], earlier=(), batch_size=16, split="val") -> Job:
    spec = {"split": split, "points": wanted, "batch_size": batch_size, "max_new_tokens": 4, "threads": 1}
    job = Job(out, spec, inputs, earlier)
    stage.run(job)
    return job


def predictions(folder: Path, key: str) -> list[dict]:
    with gzip.open(folder / f"{key}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def test_a_point_is_scored_on_every_suite(tmp_path, world):
    job = evaluate(tmp_path / "out", world, points(0.5))
    content = json.loads((job.out / "key0.5.json").read_text())
    assert (content["name"], content["key"], content["labels"]) == ("l0.5", "key0.5", {"seed": 0})
    assert [(s["suite"], s["task"], s["kind"], s["n"]) for s in content["scores"]] == [
        ("prior", "copy", "skill", 16), ("prior", "rev", "recall", 32), ("new", "zup", "skill", 4),
    ]  # fmt: skip
    rows = predictions(job.out, "key0.5")
    for score in content["scores"]:
        own = [row for row in rows if row["task"] == score["task"]]
        assert score["correct"] == sum(row["correct"] for row in own)
        assert sum(score["finish"].values()) == sum(score["reasons"].values()) == score["n"] == len(own)
    assert all(row["reason"] == "truncated" for row in rows if row["finish"] == "length" and not row["correct"])
    assert job.cost["tokens_forwarded"] > 0 and job.cost["flops"] % job.cost["tokens_forwarded"] == 0


def test_scale_zero_is_the_model_itself_in_any_order(tmp_path, world):
    job = evaluate(tmp_path / "out", world, points(0.5, 1.0, 0.0, None))
    assert predictions(job.out, "key0.0") == predictions(job.out, "keyNone")
    assert predictions(job.out, "key1.0") != predictions(job.out, "keyNone")
    alone = evaluate(
        tmp_path / "alone", {k: v for k, v in world.items() if k != "donor" and k != "trained"}, points(None)
    )
    assert predictions(alone.out, "keyNone") == predictions(job.out, "keyNone")


def test_earlier_points_are_copied_and_equal_runs_give_equal_bytes(tmp_path, world):
    first = evaluate(tmp_path / "first", world, points(0.5, 1.0))
    relabelled = [{**point, "labels": {"seed": 7}} for point in points(0.5, 1.0, 0.8)]
    second = evaluate(tmp_path / "second", world, relabelled, [first.out])
    assert second.metrics == {"points_computed": 1, "points_reused": 2}
    assert json.loads((second.out / "key0.5.json").read_text())["labels"] == {"seed": 7}
    fresh = evaluate(tmp_path / "fresh", world, relabelled)
    names = sorted(path.name for path in fresh.out.iterdir())
    assert names == sorted(path.name for path in second.out.iterdir())
    assert all((fresh.out / name).read_bytes() == (second.out / name).read_bytes() for name in names)


def test_half_a_point_is_not_reused(tmp_path, world):
    first = evaluate(tmp_path / "first", world, points(0.5))
    (first.out / "key0.5.jsonl.gz").unlink()
    assert evaluate(tmp_path / "second", world, points(0.5), [first.out]).metrics["points_computed"] == 1


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_answers_do_not_depend_on_the_batch_size(tmp_path, world, batch_size):
    one = evaluate(tmp_path / "one", world, points(None), batch_size=16)
    other = evaluate(tmp_path / "other", world, points(None), batch_size=batch_size)
    assert predictions(one.out, "keyNone") == predictions(other.out, "keyNone")


def test_options_take_the_most_likely_letter(tmp_path, world):
    pairs = [(f"copy {x} {y}", "B") for x in "abc" for y in "abcd"] + [("rev a b c", "A")]
    folder = write_data(tmp_path / "quiz", "prior", {"quiz": pairs}, "options", ["A", "B", "C", "D"])
    job = evaluate(tmp_path / "out", {**world, "prior": [folder]}, points(None), batch_size=5)
    model, tokenizer = load_model(world["model"][0]), load_tokenizer(world["model"][0])
    letters = [WORDS.index(letter) for letter in "ABCD"]
    for row, (question, answer) in zip(predictions(job.out, "keyNone"), pairs, strict=False):
        prompt = encode_prompt(tokenizer, [{"role": "user", "content": question}])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        expected = "ABCD"[int(logits[letters].argmax())]
        assert (row["text"], row["correct"], row["finish"]) == (expected, expected == answer, "option")


def test_tokens_shared_by_all_letters_belong_to_the_prompt(monkeypatch):
    answers = {"A": [9, 4, 1], "B": [9, 5, 1], "C": [9, 6, 1]}
    monkeypatch.setattr(suites.chat, "encode_example", lambda tokenizer, messages, text: ([7], answers[text]))
    assert suites.option_tokens(None, [], 3) == ([9], [4, 5, 6])
    answers["C"] = [9, 5, 2]
    with pytest.raises(UserError, match="one token each"):
        suites.option_tokens(None, [], 3)


def test_predict_without_a_generated_suite_decodes_nothing(monkeypatch):
    monkeypatch.setattr(suites, "generate", lambda *a, **k: pytest.fail("generate was called"))
    assert suites.predict(None, [], suites.Decoding(None, {1}, 0, 4, 4), Counter()) == []


# ---- selection ------------------------------------------------------------------------------------
def selection(tmp_path: Path, accuracies: dict[str, list[tuple[int, int]]], weight=0.5, rule="balanced") -> dict:
    """accuracies: candidate -> per seed (new correct of 10, prior correct of 10, in two unequal skills)."""
    folders, candidates = [], []
    for name, seeds in accuracies.items():
        entries = []
        for seed, (new, prior) in enumerate(seeds):
            folder = tmp_path / f"{name}{seed}"
            folder.mkdir(parents=True)
            scores = [
                {"suite": "new", "task": "zup", "n": 10, "correct": new},
                {"suite": "prior", "task": "big", "n": 100, "correct": 10 * prior},
                {"suite": "prior", "task": "small", "n": 10, "correct": prior},
            ]
            (folder / "p.json").write_text(json.dumps({"name": name, "scores": scores}))
            entries.append({"evaluation": len(folders), "point": "p", "seed": seed})
            folders.append(folder)
        candidates.append({"name": name, "label": {"donor": name}, "points": entries})
    job = Job(
        tmp_path / "out",
        {"rule": rule, "prior_weight": weight, "candidates": candidates},
        {"evaluations": folders},
    )
    select.run(job)
    return json.loads((job.out / "choice.json").read_text())


def test_selection_takes_the_best_mean_over_seeds(tmp_path):
    choice = selection(tmp_path, {"a": [(9, 5), (9, 5)], "b": [(8, 9), (6, 9)], "c": [(10, 4), (10, 4)]})
    assert (choice["choice"], choice["label"]) == ("b", {"donor": "b"})
    assert choice["candidates"][1] == {
        "name": "b",
        "label": {"donor": "b"},
        "score": 0.8,
        "new": 0.7,
        "prior": 0.9,
    }


def test_prior_weight_moves_the_choice(tmp_path):
    accuracies = {"learns": [(10, 5)], "keeps": [(5, 10)]}
    assert selection(tmp_path / "new", accuracies, 0.2)["choice"] == "learns"
    assert selection(tmp_path / "prior", accuracies, 0.8)["choice"] == "keeps"


def test_the_first_of_equal_candidates_wins(tmp_path):
    """Sums of tenths are unequal as floats (.1 + .2 > .3), equal as fractions."""
    accuracies = {"first": [(1, 3), (2, 3), (6, 3)], "second": [(3, 3), (3, 3), (3, 3)]}
    assert selection(tmp_path, accuracies, 0.3)["choice"] == "first"


def test_selection_errors_name_what_is_wrong(tmp_path):
    with pytest.raises(UserError, match="selection.rule"):
        selection(tmp_path / "rule", {"a": [(1, 1)]}, rule="best")
    with pytest.raises(UserError, match="no candidates"):
        selection(tmp_path / "none", {})


def test_selection_imports_no_torch():
    code = "import sys, grafting.evaluation.select; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- frontiers ----
def stored(store: Store, stage: str, name: str, folder: Path) -> str:
    """A finished job whose payload is a copy of `folder`."""
    job = PlannedJob(stage, name, {"name": name}, {}, "c")
    out = store.aside(job.id)
    shutil.copytree(folder, out, dirs_exist_ok=True)
    sidecar = {"id": job.id, "key": job.key, "spec": job.spec, "inputs": {}, "payload": store.publish(job.id, out)}
    store.write(job.id, sidecar)
    return job.id


def test_frontier_is_fixed_by_validation_and_takes_over_what_is_tested(tmp_path, world):
    """Of two methods the points that dominate most are tested; the others, and the models behind them, are not read."""
    store = Store(tmp_path / "study")
    for folder in (world["prior"][0], world["tasks"][0]):
        shutil.copytree(folder, tmp_path / folder.name)
        (tmp_path / folder.name / "val.jsonl").rename(tmp_path / folder.name / "test.jsonl")
    inputs = {role: [stored(store, "train", role, world[role][0])] for role in ("model", "trained", "donor")}
    inputs |= {
        "prior": [stored(store, "data", "p", tmp_path / "prior")],
        "tasks": [stored(store, "data", "zup", tmp_path / "zup")],
    }
    settings = {"split": "test", "batch_size": 16, "max_new_tokens": 4, "threads": 1}
    tested = PlannedJob("evaluate", "test", {**settings, "points": points(1.0)}, inputs, "c")
    execute(tested, store, stage.run, sys.stderr)

    dear, cheap, opsd = (
        PlannedJob("train", name, {"name": name}, {}, "c") for name in ("updates.dear", "updates.cheap", "updates.opsd")
    )
    for planned, flops in ((dear, 150), (cheap, 50), (opsd, 120)):
        store.write(planned.id, {"id": planned.id, "key": planned.key, "cost": {"flops": flops}, "payload": {}})
    graft = {
        "l0.5": (0.5, 0.9, dear), "l1.0": (0.9, 0.5, dear), "l0.3": (0.4, 0.9, cheap), "l0.2": (0.45, 0.92, cheap),
        "l0.9": (0.1, 0.1, dear),
    }  # fmt: skip
    chosen = []
    for method, found in {"graft": graft, "opsd": {"l0.8": (0.1, 0.1, opsd)}}.items():
        (tmp_path / method).mkdir()
        candidates = [
            {"name": n, "new": new, "prior": prior, "label": {"trained": {"0": [[update.key]]}}}
            for n, (new, prior, update) in found.items()
        ]
        (tmp_path / method / "choice.json").write_text(json.dumps({"candidates": candidates}))
        chosen.append(stored(store, "select", method, tmp_path / method))
    every = points(0.5, 1.0, 0.3, 0.2, 0.8, 0.9)
    absent = "train/nowhere-000000000000"
    for point in every:
        point["recipe"]["terms"] = [0 if point["name"] == "l0.9" else 1]
    spec = {
        **settings, "points": every, "candidates": {point["name"]: {"0": point["key"]} for point in every},
        "keep": [
            {"method": "graft", "selection": 0, "size": 2},
            {"method": "opsd", "selection": 1, "size": 1},
            {"method": "graft", "selection": 0, "size": 1, "measure": "flops", "against": "opsd", "other": 1},
        ],
    }  # fmt: skip
    inputs |= {"trained": [absent, *inputs["trained"]], "donor": [absent, *inputs["donor"]]}
    inputs |= {"selections": chosen, "tests": [tested.id]}
    job = PlannedJob("evaluate", "frontier", spec, inputs, "c")
    execute(job, store, frontier.run, sys.stderr)

    out = store.payload(job.id)
    # l0.5 and l1.0 dominate .45 each (the first of equals), together .65; l0.5 and l0.2 .459. The dear update costs
    # more than all of OPSD, the cheap one does not; of its points l0.2 dominates more
    found = json.loads((out / "frontier.json").read_text())
    assert [entry["points"] for entry in found] == [["l0.5", "l1.0"], ["l0.8"], ["l0.2"]]
    assert (found[2]["method"], found[2]["measure"], found[2]["against"]) == ("graft", "flops", "opsd")
    assert {p.name for p in out.glob("key*.json")} == {f"key{s}.json" for s in ("1.0", "0.5", "0.8", "0.2")}
    assert store.read(job.id)["metrics"] == {"points_computed": 3, "points_reused": 1}
    before = store.payload(tested.id)
    assert (out / "key1.0.jsonl.gz").read_bytes() == (before / "key1.0.jsonl.gz").read_bytes()
    alone = evaluate(
        tmp_path / "alone",
        {**world, "prior": [tmp_path / "prior"], "tasks": [tmp_path / "zup"]},
        points(0.5),
        split="test",
    )
    assert predictions(out, "key0.5") == predictions(alone.out, "key0.5")
