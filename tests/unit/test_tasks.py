"""Tasks: the tiny language, builders, splits, scorers, and errors a user can mend."""

import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from grafting.errors import UserError
from grafting.plan.sources import files_of
from grafting.tasks import (
    check_sources,
    demonstration_messages,
    known_priors,
    known_tasks,
    load_examples,
    load_info,
    scorers,
    stage,
)
from grafting.tasks import tiny_language as tiny

PUBLIC = Path(os.environ.get("GRAFTING_DATA_ROOT") or Path(__file__).parents[3] / "shared" / "data")
SIZES = {"train_items": 40, "val_items": 10, "test_items": 20, "seed": 11}
PRIOR = {"builder": "tiny.prior", "val_items": 5, "test_items": 10, "retention_items": 5, "seed": 123}


def build(out: Path, places: dict | None = None, **spec) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    stage.run(SimpleNamespace(spec=spec, out=out, id="data/test-0", places=places or {}))
    return out


def ids(folder: Path, split: str) -> set:
    return {example["id"] for example in load_examples(folder, split)}


def entry(path: Path) -> dict:
    data = path.read_bytes()
    return {"name": path.name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


# ---- the tiny language ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("task", "x", "y"),
    [
        ("zup", "a b c", "C B A"),
        ("dax", "2 9 1", "9 1"),
        ("pim", "a b c d", "B A C D"),
        ("nextswap", "a b l", "c b a"),
        ("add", "7 + 5", "1 2"),
        ("dblup", "a b c", "A A B B C C"),
        ("second", "a b c", "b"),
    ],
)
def test_skills_by_hand(task, x, y):
    assert " ".join(tiny.ANSWERS[task](x.split())) == y


def test_vocabulary_and_facts():
    assert len(tiny.VOCABULARY) == len(set(tiny.VOCABULARY)) == 160
    assert len(tiny.SKILLS) == 19 and set(tiny.ANSWERS) == {*tiny.SKILLS, *tiny.NEW_TASKS}
    assert len(tiny.FACTS) == 100 and len(tiny.NEW_FACTS) == 60


@pytest.mark.parametrize(
    ("phase", "share", "weights", "golden"),
    [
        ("pretrain", 0.3, {"fact": 1.5, "add": 1.5, "sort": 1.5, "rev": 1.5}, "0cb487e8593aed36"),
        ("posttrain", 0.4, {"second": 2.0, "min": 2.0}, "d9fefb4af99d519e"),
    ],
)
def test_training_stream_is_the_measured_one(phase, share, weights, golden):
    """Recorded when it was equal, draw by draw, to the stream of the scripts of the first trials."""
    stream = tiny.training_stream(random.Random(0), phase, 8, share, weights)
    batches = list(itertools.islice(stream, 50))
    assert hashlib.sha256(json.dumps(batches).encode()).hexdigest()[:16] == golden


def test_weights_of_unknown_skills_are_refused():
    for phase, skill in (("pretrain", "revv"), ("pretrain", "second"), ("posttrain", "zup")):
        with pytest.raises(UserError, match=f"{phase}.skill_weights: unknown skill '{skill}'; known are copy, rev"):
            next(tiny.training_stream(random.Random(0), phase, 8, 0.3, {"rev": 2.0, skill: 1.5}))


def test_training_stream_shares():
    stream = tiny.training_stream(random.Random(1), "pretrain", 100, 0.3, {})
    examples = [e for batch in itertools.islice(stream, 80) for e in batch]
    share = Counter()
    for prompt, given, labels in examples:
        assert len(given) == len(labels) and labels[-1] == tiny.ID["<eos>"] and tiny.ID["</ans>"] not in labels
        share["chat"] += prompt[0] == tiny.ID["<user>"]
        share["shown"] += tiny.ID["<ex>"] in prompt
        share["noisy"] += given != labels
    assert share["chat"] / len(examples) == pytest.approx(0.15, abs=0.02)
    assert share["shown"] / len(examples) == pytest.approx(0.30, abs=0.02)
    assert 0.3 * 0.3 * 0.4 < share["noisy"] / len(examples) < 0.3 * 0.3


def test_new_tasks_are_never_answered_in_training():
    """A new task's keyword comes with a demonstration only, and that is random."""
    for phase in ("pretrain", "posttrain"):
        stream = tiny.training_stream(random.Random(2), phase, 50, 0.4, {})
        for prompt, _, _ in (e for batch in itertools.islice(stream, 40) for e in batch):
            assert tiny.VOCABULARY[prompt[1]] not in tiny.NEW_TASKS or tiny.ID["<ex>"] in prompt


# ---- builders ---------------------------------------------------------------------------------------
def test_task_splits_are_disjoint_and_reproducible(tmp_path):
    folder = build(tmp_path / "a", builder="tiny.task", task="zup", **SIZES)
    again = build(tmp_path / "b", builder="tiny.task", task="zup", **SIZES)
    more = build(tmp_path / "c", builder="tiny.task", task="zup", **{**SIZES, "test_items": 30})
    for name in ("info.json", "train.jsonl", "val.jsonl", "test.jsonl"):
        assert (folder / name).read_bytes() == (again / name).read_bytes()
    splits = [ids(folder, split) for split in ("train", "val", "test")]
    assert [len(s) for s in splits] == [40, 10, 20]
    assert not splits[0] & splits[1] and not splits[0] & splits[2] and not splits[1] & splits[2]
    assert ids(more, "val") == splits[1] and ids(more, "test") >= splits[2]  # sizes move no other items
    held_out = [e["messages"][0]["content"].split()[1:] for e in load_examples(folder, "test")]
    assert all(tiny.is_held_out(x) for x in held_out)


def test_demonstration_goes_into_the_prompt(tmp_path):
    folder = build(tmp_path, builder="tiny.task", task="zup", **SIZES)
    example, info = load_examples(folder, "train")[0], load_info(folder)
    question, answer = example["messages"][0]["content"], example["answer"]
    shown = demonstration_messages(example, info, "expert")
    assert shown == [{"role": "user", "content": f"{question} <ex> so {answer} . </ex>"}]
    assert example["messages"][0]["content"] == question  # the example itself stays
    with pytest.raises(UserError, match=f"{example['id']}.*demonstration missing.*poet"):
        demonstration_messages(example, info, "poet")


def test_recall_task_tests_trained_items(tmp_path):
    folder = build(tmp_path, builder="tiny.task", task="wug", train_items=300, val_items=60, test_items=100, seed=11)
    train, val, test = (ids(folder, split) for split in ("train", "val", "test"))
    info = load_info(folder)
    assert (len(train), len(val), len(test)) == (60, 22, 38) and info["kind"] == "recall"
    assert val < train and test < train and not val & test
    assert any("subsets of train" in note for note in info["notes"])


def test_prior_has_all_skills_and_retention_apart(tmp_path):
    folder = build(tmp_path, **PRIOR)
    assert not ids(folder, "retention") & (ids(folder, "val") | ids(folder, "test"))
    assert not ids(folder, "val") & ids(folder, "test")
    per_skill = Counter(example["task"] for example in load_examples(folder, "test"))
    assert per_skill == dict.fromkeys(tiny.SKILLS, 10)


def test_too_long_an_example_is_named(tmp_path):
    with pytest.raises(UserError, match=r"example [0-9a-f]{12} .*context is 8;"):
        build(tmp_path, builder="tiny.task", task="zup", max_tokens=8, **SIZES)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"builder": "poem"}, "unknown data builder 'poem'"),
        ({"builder": "tiny.task", "task": "zap", **SIZES}, "unknown task 'zap'"),
        ({"builder": "tiny.task", "task": "zup"}, "missing option"),
        ({"builder": "tiny.task", "task": "zup", **SIZES, "shots": 3}, "unknown option.*shots"),
        ({"builder": "tiny.task", "task": "zup", **SIZES, "val_items": 0}, "val_items must be at least 1"),
        ({"builder": "tiny.task", "task": "dax", **SIZES, "test_items": 5000}, "only .* distinct ones exist"),
    ],
)
def test_bad_specs(tmp_path, spec, message):
    with pytest.raises(UserError, match=message):
        build(tmp_path, **spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "is empty"),
        (lambda text: text.replace('"answer"', '"anser"', 1), "line 1: missing field"),
        (lambda text: text.replace('"answer"', '"note": 1, "answer"', 1), "unknown field.*note"),
        (lambda text: text + text.split("\n")[0] + "\n", "comes twice"),
        (lambda text: text[: text.index("\n") + 1], "has 1 examples, info.json says"),
        (lambda text: text[:-20], "not valid JSON"),
    ],
)
def test_damaged_data(tmp_path, change, message):
    folder = build(tmp_path, builder="tiny.task", task="zup", **SIZES)
    path = folder / "val.jsonl"
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=message):
        load_examples(folder, "val")


# ---- scorers ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("C B A", (True, "correct")),
        ("so C B A . </ans>", (True, "correct")),
        ("C B", (False, "wrong")),
        ("so .", (False, "no answer found")),
        ("", (False, "no answer found")),
    ],
)
def test_token_scorer(text, verdict):
    info = {"name": "zup", "scorer": "tokens", "scorer_options": {"ignore": tiny.STYLE_WORDS}}
    assert scorers.score(info, {"answer": "C B A"}, text) == verdict


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("<reasoning>\n...\n</reasoning>\n<answer>B</answer>", (True, "correct")),
        ("<answer>A</answer> no: <answer> b </answer>", (True, "correct")),
        ("<answer>A</answer>", (False, "wrong")),
        ("<answer>B: water</answer>", (False, "no answer found")),
        ("The answer is B", (False, "no answer found")),
    ],
)
def test_letter_scorer(text, verdict):
    assert scorers.score({"name": "science", "scorer": "letter"}, {"answer": "B"}, text) == verdict


def test_unknown_scorer():
    with pytest.raises(UserError, match="unknown scorer 'oracle'"):
        scorers.score({"name": "x", "scorer": "oracle"}, {"answer": ""}, "")


# ---- public data ------------------------------------------------------------------------------------
def science_item(i: int, **change) -> dict:
    item = {
        "prompt": {"default": ""}, "question": f"Question {i}?", "answer": "", "answerKey": "ABCD"[i % 4],
        "choices": {"label": list("ABCD"), "text": [f"{i}{x}" for x in "wxyz"]},
        "type": "mcq-4-choices", "domain": "Chemistry", "details": {"task": "made up"},
    }  # fmt: skip
    return {**item, **change}


def science(root: Path, items: list[dict], monkeypatch, **sizes) -> Path:
    (root / "sciknoweval").mkdir(parents=True, exist_ok=True)
    path = root / "sciknoweval" / "retrosynthesis.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    monkeypatch.setenv("GRAFTING_DATA_ROOT", str(root))
    sizes = {"train_items": 4, "val_items": 1, "test_items": 2, "seed": 11, **sizes}
    return build(root / "out", builder="science", files=[entry(path)], **sizes)


def test_science_splits_counts_and_format(tmp_path, monkeypatch):
    items = [science_item(i) for i in range(7)] + [
        science_item(3),
        science_item(8, type="filling", answerKey=""),
    ]
    folder = science(tmp_path, items, monkeypatch)
    info, train = load_info(folder), load_examples(folder, "train")
    assert info["counts"] == {
        "train": 4, "val": 1, "test": 2, "read": 9,
        "multiple_choice": 8, "filling": 1, "filling_left_out": 1, "repeated_questions_left_out": 1,
        "by_subject": {"made up": 8},
    }  # fmt: skip
    system, user = train[0]["messages"]
    assert "<reasoning>" in system["content"] and "\nA: " in user["content"] and "\nD: " in user["content"]
    assert all(scorers.score(info, e, e["demonstrations"]["expert"]) == (True, "correct") for e in train)
    shown = demonstration_messages(train[0], info, "expert")[-1]["content"]
    assert shown.startswith(user["content"]) and train[0]["demonstrations"]["expert"] in shown


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (science_item(1, answerKey=""), "line 1: demonstration missing"),
        (science_item(1, type="essay"), "unknown type 'essay'"),
        (science_item(1, extra=1), "unknown field.*extra"),
        ({k: v for k, v in science_item(1).items() if k != "question"}, "missing field.*question"),
    ],
)
def test_science_refuses_odd_records(tmp_path, monkeypatch, item, message):
    with pytest.raises(UserError, match=message):
        science(tmp_path, [item, *(science_item(i) for i in range(2, 9))], monkeypatch)


def test_science_refuses_more_than_there_is(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="there are 7"):
        science(tmp_path, [science_item(i) for i in range(7)], monkeypatch, train_items=40)


def test_sources(tmp_path, monkeypatch):
    monkeypatch.delenv("GRAFTING_DATA_ROOT", raising=False)
    (tmp_path / "sciknoweval").mkdir()
    path = tmp_path / "sciknoweval" / "a.jsonl"
    path.write_text("{}")
    right = entry(path)
    assert check_sources("sciknoweval", [right], tmp_path) == [path]
    with pytest.raises(UserError, match="sciknoweval/a.jsonl.*set data_root"):
        check_sources("sciknoweval", [right])
    with pytest.raises(UserError, match="missing.*b.jsonl.*set data_root"):
        check_sources("sciknoweval", [{**right, "name": "b.jsonl"}], tmp_path)
    with pytest.raises(UserError, match="has 2 bytes.*says 3"):
        check_sources("sciknoweval", [{**right, "bytes": 3}], tmp_path)
    monkeypatch.setenv("GRAFTING_DATA_ROOT", str(tmp_path))
    with pytest.raises(UserError, match="sha256 is .* says 00"):
        build(tmp_path / "out", builder="science", files=[{**right, "sha256": "00"}], **SIZES)
    path.write_text("")
    with pytest.raises(UserError, match="empty"):
        check_sources("sciknoweval", [right], tmp_path)


def test_mmlu(tmp_path, monkeypatch):
    (tmp_path / "mmlu").mkdir()
    path = tmp_path / "mmlu" / "mmlu.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for part in ("dev", "val", "test"):
            rows = "".join(f'"{part}, {i}?",w,x,y,z,{"ABCD"[i % 4]}\n' for i in range(4))
            archive.writestr(f"data/{part}/high_school_biology_{part}.csv", rows)
    monkeypatch.setenv("GRAFTING_DATA_ROOT", str(tmp_path))
    sizes = {"val_items": 3, "test_items": 6, "retention_items": 3, "seed": 1}
    folder = build(tmp_path / "out", builder="mmlu", files=[entry(path)], **sizes)
    parts = [ids(folder, split) for split in ("val", "test", "retention")]
    assert [len(p) for p in parts] == [3, 6, 3] and len(set.union(*parts)) == 12
    example, info = load_examples(folder, "retention")[0], load_info(folder)
    assert example["options"] == ["A", "B", "C", "D"] and example["subject"] == "high_school_biology"
    assert example["demonstrations"][info["styles"][0]] == example["answer"]
    assert scorers.score(info, example, example["answer"]) == (True, "correct")


@pytest.mark.skipif(not (PUBLIC / "sciknoweval").is_dir(), reason="public data sets are not here")
def test_real_data(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFTING_DATA_ROOT", str(PUBLIC))
    sizes = {"train_items": 1571, "val_items": 105, "test_items": 419, "seed": 11}
    options = known_tasks()["science"]["option_defaults"]
    folder = build(tmp_path / "s", builder="science", files=files_of("sciknoweval"), **sizes, **options)
    counts = load_info(folder)["counts"]
    assert (counts["read"], counts["multiple_choice"], counts["filling_left_out"]) == (2400, 2100, 300)
    assert sum(len(ids(folder, split)) for split in ("train", "val", "test")) == 2095
    sizes = {"val_items": 200, "test_items": 400, "retention_items": 100, "seed": 123}
    folder = build(tmp_path / "m", builder="mmlu", files=files_of("mmlu"), **sizes)
    assert load_info(folder)["counts"]["read"] == 15858


# ---- registry ---------------------------------------------------------------------------------------
def test_registry_names_builders():
    for about in [*known_tasks().values(), *known_priors().values()]:
        assert about["builder"] in stage.BUILDERS
        assert set(about) - {"option_defaults"} == {"kind", "builder", "summary", "styles", "source", "scorer"}
    assert all("option_defaults" in about for about in known_tasks().values())
    known_tasks()["science"]["option_defaults"].clear()
    assert known_tasks()["science"]["option_defaults"]  # a copy was changed, not the registry


def test_no_torch_for_tasks():
    modules = "grafting.tasks.stage, grafting.tasks.registry"
    code = f"import sys, {modules}; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
