"""Task families beyond the tiny language: tool use, knowledge, records, a user's own; hygiene of all."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from test_tasks import PUBLIC, build, entry, ids

from grafting.config import resolve
from grafting.config.load import read_yaml
from grafting.errors import UserError
from grafting.plan.code import PROJECT
from grafting.plan.sources import files_of
from grafting.plan.study import Study
from grafting.tasks import building, knowledge, known_tasks, load_examples, load_info, own, scorers
from grafting.tasks.building import make_example

SIZES = {"train_items": 3, "val_items": 1, "test_items": 2, "seed": 11}


def defaults(task: str, **changes) -> dict:
    about = known_tasks()[task]
    return {"builder": about["builder"], **SIZES, **about["option_defaults"], **changes}


def write(path: Path, content) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
    path.write_text(lines)
    return path


# ---- tool use ---------------------------------------------------------------------------------------
def tool(name: str, *queries, **more) -> dict:
    return {
        "Name": name,
        "NLDocumentation": f"get{name}: Get it.\nParameters: {{}}",
        "Function_Description": {"components": ""},
        "Instructions": [question for question, *_ in queries],
        "Golden_Answers": [[{"Action": a, "Action_Input": i} for a, i in calls] for _, *calls in queries],
        **more,
    }


TOOLS = [
    tool("A", ("a1", ("getA", '{"n": 1}')), ("a2", ("getA", '{"n": 2}'), ("getA", '{"n": ${n from getA}}'))),
    tool("B", ("b1", ("getB", '{"n": "n": 1}')), ("b2", ("getDetails", '{"Question": "Which?"}'))),
    tool("C", ("c1", ("getC", "{}")), ("c2", ("getC", "{}"))),
    tool("D", ("d1", ("getD", "{}")), ("d2", ("getD", '{"x": [1, "a", null]}'))),
]


def tooluse(root: Path, monkeypatch, files: dict, **sizes) -> Path:
    paths = [write(root / "toolalpaca" / name, json.dumps(content)) for name, content in files.items()]
    monkeypatch.setenv("GRAFTING_DATA_ROOT", str(root))
    return build(root / "out", **defaults("tooluse", files=[entry(p) for p in paths], **sizes))


def test_tooluse_splits_by_tool(tmp_path, monkeypatch):
    folder = tooluse(tmp_path, monkeypatch, {"eval_real.json": TOOLS[:2], "eval_simulated.json": TOOLS[2:]})
    info = load_info(folder)
    assert info["scorer"] == "tool_calls" and any("non-standard" in note for note in info["notes"])
    assert {k: v for k, v in info["counts"].items() if k not in ("train", "val", "test")} == {
        "read": 8, "tools": 4, "one_call": 7, "several_calls": 1,
        "arguments_literal": 6, "arguments_with_placeholders": 1, "arguments_not_json": 1,
    }  # fmt: skip
    tools = [
        {e["messages"][0]["content"].split("get")[2].split(":")[0] for e in load_examples(folder, split)}
        for split in ("train", "val", "test")
    ]
    assert not tools[0] & tools[1] and not tools[0] & tools[2] and not tools[1] & tools[2]
    for split in ("train", "val", "test"):
        for example in load_examples(folder, split):
            assert scorers.score(info, example, example["demonstrations"]["expert"]) == (True, "correct")
            assert "Thought" not in example["demonstrations"]["expert"]  # none is invented
            prompt = example["messages"][0]["content"]
            assert "Use the following format:\nThought:" in prompt and "Begin!\nQuestion: " in prompt


def test_tooluse_with_its_training_file(tmp_path, monkeypatch):
    def instance(question, *steps, **more):
        made = [[[a, i, f" I call it.\nAction: {a}\nAction Input: {i}"], "done"] for a, i in steps]
        return {"input": question, "output": "o", "Final Thought": "t", "intermediate_steps": made, **more}

    trained = tool("T")
    trained["Instances"] = [
        instance("t1", ("getT", '{"n": 1}')),
        instance("t2\nHint: no", ("getT", '{"n": 2}'), ("getT", "{}")),
        instance("t3", ("getT", "{}")),
        instance("t4"),
        instance("t5", ("getDetails", '{"Question": "?"}')),
    ]
    files = {"train_data.json": [trained, {"Name": "bare"}], "eval_real.json": TOOLS}
    folder = tooluse(tmp_path, monkeypatch, files)
    info = load_info(folder)
    assert info["counts"]["instances_left_out"] == 2 and info["counts"]["tools_without_documentation"] == 1
    train = load_examples(folder, "train")
    assert len(train) == 3 and all("I call it." in e["demonstrations"]["expert"] for e in train)
    assert all("Hint" not in e["messages"][0]["content"] for e in train)
    assert all(scorers.score(info, e, e["demonstrations"]["expert"])[0] for e in train)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Instructions": ["one"]}, "tool 1 .A.: 1 instructions for 2 answers"),
        ({"Golden_Answers": [[], []]}, "query 1: the reference answer holds no call"),
        ({"Instructions": [" ", "x"]}, "query 1: the instruction is empty"),
        ({"Golden_Answers": [[{"Action": "x"}], []]}, "a call must have Action and Action_Input"),
    ],
)
def test_tooluse_refuses_odd_tools(tmp_path, monkeypatch, change, message):
    with pytest.raises(UserError, match=message):
        tooluse(tmp_path, monkeypatch, {"eval_real.json": [TOOLS[0] | change, *TOOLS[1:]]})


@pytest.mark.skipif(not (PUBLIC / "toolalpaca").is_dir(), reason="public data sets are not here")
def test_real_tool_queries(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFTING_DATA_ROOT", str(PUBLIC))
    sizes = {"train_items": 120, "val_items": 20, "test_items": 50}
    folder = build(tmp_path, **defaults("tooluse", files=files_of("toolalpaca"), **sizes))
    info = load_info(folder)
    counts = info["counts"]
    assert (counts["read"], counts["tools"], counts["one_call"], counts["several_calls"]) == (214, 21, 151, 63)
    assert counts["arguments_literal"] + counts["arguments_with_placeholders"] + counts["arguments_not_json"] == 214
    for split in ("train", "val", "test"):
        for e in load_examples(folder, split):
            assert scorers.score(info, e, e["demonstrations"]["expert"]) == (True, "correct"), e["answer"]


@pytest.mark.skipif(not (PUBLIC / "sciknoweval").is_dir(), reason="public data sets are not here")
def test_real_science_with_filling_items(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFTING_DATA_ROOT", str(PUBLIC))
    sizes = {"train_items": 1700, "val_items": 119, "test_items": 470}
    folder = build(tmp_path, **defaults("science", files=files_of("sciknoweval"), filling="keep", **sizes))
    info = load_info(folder)
    assert info["counts"]["read"] == 2400 and info["counts"]["filling_left_out"] == 0
    assert sum(info["counts"]["by_subject"].values()) == 2400
    assert info["counts"]["by_subject"]["balancing_chemical_equation"] == 300
    for e in load_examples(folder, "test"):
        assert scorers.score(info, e, e["demonstrations"]["expert"]) == (True, "correct")


# ---- knowledge --------------------------------------------------------------------------------------
def test_facts_are_unique_and_reproducible():
    facts = knowledge.make_facts(1125, 11)
    assert facts == knowledge.make_facts(1125, 11) and facts != knowledge.make_facts(1125, 12)
    assert len({f["value"] for f in facts}) == 1125 and len({f["entity"] for f in facts}) == 125
    assert not {f["value"] for f in facts} & {f["entity"] for f in facts}
    assert set(Counter(f["relation"] for f in facts).values()) == {125}


def test_knowledge(tmp_path):
    folder = build(tmp_path, **defaults("knowledge", train_items=18, val_items=4, test_items=6))
    info, train, val, test = load_info(folder), *(load_examples(folder, s) for s in ("train", "val", "test"))
    assert info["kind"] == "recall" and len(train) == 18 * 3 and (len(val), len(test)) == (12, 18)
    assert Counter(e["subject"] for e in test) == {"direct": 6, "reversed": 6, "rephrased": 6}
    trained = ids(folder, "train")
    assert all((e["id"] in trained) == (e["subject"] == "direct") for e in [*val, *test])
    assert not ids(folder, "val") & ids(folder, "test")
    for e in [*val, *test]:
        assert scorers.score(info, e, e["answer"].lower() + ".") == (True, "correct")
        assert scorers.score(info, e, f"That is {e['answer']}.") == (False, "contains the answer")
    for e in train:
        assert e["subject"] != "document" or e["answer"] in e["demonstrations"]["expert"]
    assert known_tasks()["knowledge"]["option_defaults"]["train_items"] == 1125


def test_articles(tmp_path, monkeypatch):
    root = tmp_path / "articles"
    questions = [{"article": "a.md", "question": f"Q{i}?", "answer": ["A", "a"], "ood": i > 3} for i in range(6)]
    paths = [write(root / "a.md", "Text."), write(root / "questions.jsonl", questions)]
    monkeypatch.setenv("GRAFTING_DATA_ROOT", str(tmp_path))
    spec = {"builder": "articles", "train_items": 9, "val_items": 2, "test_items": 4, "seed": 1}
    folder = build(tmp_path / "out", **spec, files=[entry(p) for p in paths])
    assert len(load_examples(folder, "train")) == 5 and load_info(folder)["counts"]["questions_never_trained"] == 2
    asked = [e for split in ("val", "test") for e in load_examples(folder, split)]
    assert Counter(e["subject"] for e in asked) == {"direct": 4, "rephrased": 2}
    write(paths[1], [{"article": "b.md", "question": "Q?", "answer": "A"}])
    with pytest.raises(UserError, match="line 1: no article 'b.md'"):
        build(tmp_path / "out2", **spec, files=[entry(p) for p in paths])


# ---- records: traces, medical ------------------------------------------------------------------------
def records(root: Path, monkeypatch, task: str, rows: list, **changes) -> Path:
    path = write(root / task / "data.jsonl", rows)
    monkeypatch.setenv("GRAFTING_DATA_ROOT", str(root))
    return build(root / "out", **defaults(task, files=[entry(path)], **changes))


def traces(n: int) -> list:
    return [
        {"prompt": f"P{i}", "response": f"<think>so {i}</think>\nIt is {i}", "answer": f"It is {i}"} for i in range(n)
    ]


def test_traces_keep_or_strip_thinking(tmp_path, monkeypatch):
    kept = records(tmp_path / "k", monkeypatch, "traces", traces(8))
    stripped = records(tmp_path / "s", monkeypatch, "traces", traces(8), thinking="strip")
    assert all(e["demonstrations"]["expert"].startswith("<think>so") for e in load_examples(kept, "train"))
    assert all(e["demonstrations"]["expert"].startswith("It is") for e in load_examples(stripped, "train"))
    for folder in (kept, stripped):
        info = load_info(folder)
        assert all(scorers.score(info, e, e["demonstrations"]["expert"])[0] for e in load_examples(folder, "test"))
        splits = [ids(folder, split) for split in ("train", "val", "test")]
        assert list(map(len, splits)) == [3, 1, 2] and len(set.union(*splits)) == 6


def test_medical_fixture(tmp_path, monkeypatch):
    rows = [{"Question": f"Q{i}?", "Complex_CoT": f"Hm {i}.", "Response": f"R{i}"} for i in range(7)]
    folder = records(tmp_path, monkeypatch, "medical", rows + rows[:1])
    info, train = load_info(folder), load_examples(folder, "train")
    assert info["scorer"] == "judge" and info["counts"]["repeated_left_out"] == 1
    assert train[0]["demonstrations"]["expert"].startswith("<think>Hm")


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"prompt": "P"}, {}, "line 1: no field 'response'"),
        ({"prompt": " ", "response": "r", "answer": "a"}, {}, "line 1: the field 'prompt' is empty"),
        ({"prompt": "p", "response": "<think>x</think>", "answer": "a"}, {"thinking": "strip"}, "all thinking"),
        (["p"], {}, "line 1: expected an object"),
        ({"prompt": "p", "response": "r", "answer": "a"}, {"thinking": "hide"}, "keep or strip"),
        ({"prompt": "p", "response": "r", "answer": "a"}, {"shots": 3}, "unknown option"),
    ],
)
def test_records_refuse(tmp_path, monkeypatch, row, changes, message):
    with pytest.raises(UserError, match=message):
        records(tmp_path, monkeypatch, "traces", [row, *traces(8)], **changes)


# ---- a user's own -----------------------------------------------------------------------------------
def own_yaml(folder: Path, rows: list, **changes) -> Path:
    write(folder / "data.jsonl", rows)
    content = {
        "data": "data.jsonl",
        "prompt": "{q}",
        "answer": "{a}",
        "response": "{a}",
        "scorer": "numeric",
        **changes,
    }
    return write(folder / "mine.yaml", yaml.safe_dump(content))


ROWS = [{"q": f"{i} + {i}?", "a": str(2 * i)} for i in range(8)]
PYTHON = """
TASK = {"kind": "skill", "files": ["data.jsonl"], "options": {"sign": 1}}

import json

def examples(options, files):
    rows = [json.loads(line) for line in files["data.jsonl"].splitlines()]
    made = [{"question": r["q"], "answer": r["a"], "demonstration": r["a"]} for r in rows]
    return {"train": made[:4], "val": made[4:5], "test": made[5:]}

def score(text, example):
    return (text.strip() == example["answer"], "right" if text.strip() == example["answer"] else "off")
"""


def study_with(path: Path, **changes) -> Study:
    overlay = {
        "lineage": {"kind": "pretrained", "deployed": {"hub": "a/b", "revision": "0" * 40}, "donors": {}},
        "tasks": ["mine"], "own_tasks": {"mine": str(path)}, "styles": ["expert"],
        "prior": {"kind": "mmlu", "val_items": 2, "test_items": 2, "retention_items": 2, "seed": 1},
        "graft": {"donors": ["deployed"], "masks": {"donors": ["deployed"]}, "expert_donors": []},
        "sequential": {"sum_donors": ["deployed"]}, "parallel": {"donors": ["deployed"]}, "protocols": ["single"],
        "task_defaults": SIZES, **changes,
    }  # fmt: skip
    return Study(resolve(read_yaml(PROJECT / "config.yaml"), overlay))


def make(study: Study, out: Path) -> Path:
    job = study.jobs[study.task_data["mine"]]
    return build(out, places=job.places, **job.spec)


def test_own_task_from_yaml(tmp_path):
    study = study_with(own_yaml(tmp_path / "x", ROWS))
    folder = make(study, tmp_path / "out")
    info = load_info(folder)
    assert info["name"] == "mine" and info["counts"]["read"] == 8
    for e in load_examples(folder, "test"):
        assert scorers.score(info, e, f"That makes {e['answer']}.") == (True, "correct")


def test_own_task_key_holds_content_and_no_path(tmp_path):
    first = study_with(own_yaml(tmp_path / "x", ROWS)).task_data["mine"]
    assert study_with(own_yaml(tmp_path / "elsewhere" / "y", ROWS)).task_data["mine"] == first
    assert study_with(own_yaml(tmp_path / "z", [*ROWS, {"q": "9?", "a": "9"}])).task_data["mine"] != first
    assert study_with(own_yaml(tmp_path / "w", ROWS, scorer="exact")).task_data["mine"] != first


def test_own_task_changed_after_planning_is_refused(tmp_path):
    study = study_with(own_yaml(tmp_path / "x", ROWS))
    write(tmp_path / "x" / "data.jsonl", ROWS[::-1])
    with pytest.raises(UserError, match="sha256 is"):
        make(study, tmp_path / "out")


def test_own_task_with_a_file_per_split(tmp_path):
    for split, rows in (("train", ROWS[:4]), ("val", ROWS[4:6]), ("test", ROWS[6:])):
        write(tmp_path / f"{split}.jsonl", rows)
    path = own_yaml(tmp_path, [], data={s: f"{s}.jsonl" for s in ("train", "val", "test")})
    folder = make(study_with(path), tmp_path / "out")
    assert {e["answer"] for e in load_examples(folder, "test")} == {"12", "14"}
    write(tmp_path / "test.jsonl", ROWS[3:6])
    with pytest.raises(UserError, match="the same prompt is in split"):
        make(study_with(path), tmp_path / "out2")


def test_own_task_from_python(tmp_path):
    write(tmp_path / "data.jsonl", ROWS)
    study = study_with(write(tmp_path / "mine.py", PYTHON))
    folder = make(study, tmp_path / "out")
    info, test = load_info(folder), load_examples(folder, "test")
    assert info["scorer"] == "python" and len(test) == 3
    assert scorers.score(info, test[0], test[0]["answer"]) == (True, "right")
    assert scorers.score(info, test[0], "?") == (False, "off")
    evaluations = [job for job in study.jobs.values() if job.stage == "evaluate" and not job.alternatives]
    assert all("grafting.tasks.custom_scorer" in job.entry for job in evaluations)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mine.yaml", "- a", "must be a mapping with `data`"),
        ("mine.yaml", "data: absent.jsonl", "absent.jsonl cannot be read"),
        ("mine.yaml", "data: ../data.jsonl", "must lie beside it"),
        ("mine.yaml", "{data: data.jsonl, scorer: oracle}", "unknown scorer 'oracle'"),
        ("mine.yaml", "{data: data.jsonl, promt: x}", "unknown option.*promt"),
        ("mine.yaml", "{data: {train: data.jsonl, dev: data.jsonl}}", "names .'dev'."),
        ("mine.yaml", "{data: [", "not valid YAML"),
        ("mine.py", "x = 1", "must state TASK"),
        ("mine.py", "TASK = dict(a=1)\ndef examples(o, f): ...", "literal"),
        ("mine.py", "TASK = {'shots': 1}\ndef examples(o, f): ...", "unknown keys"),
        ("mine.py", "def (", "not valid Python"),
        ("mine.txt", "", "must be a .yaml or a .py file"),
    ],
)
def test_own_task_faults_are_found_before_anything_starts(tmp_path, name, content, message):
    write(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(UserError, match=message):
        own.describe("mine", str(write(tmp_path / name, content)))


# ---- checks before anything starts -------------------------------------------------------------------
def test_a_judge_is_needed_before_training(tmp_path):
    path = own_yaml(tmp_path, ROWS, scorer="judge")
    with pytest.raises(UserError, match="judge: task mine is scored by a judge and none is configured"):
        study_with(path)
    judge = {"model": "m", "endpoint": "http://localhost:1/v1", "prompt": "{question}{reference}{response}"}
    study = study_with(path, judge=judge)
    of = [job for job in study.jobs.values() if job.stage == "evaluate" and not job.alternatives]
    assert all(job.spec["judge"]["model"] == "m" and "endpoint" not in job.spec["judge"] for job in of)
    moved = study_with(path, judge=judge | {"endpoint": "http://other:2/v1"})
    assert list(moved.jobs) == list(study.jobs)
    other = study_with(path, judge=judge | {"model": "n"})
    trained = {job.id for job in study.jobs.values() if job.stage == "train" and job.spec["objective"] == "sft"}
    assert other.task_data == study.task_data and trained and trained <= set(other.jobs)
    assert not {job.id for job in of} & set(other.jobs)


def test_generated_code_must_be_allowed(tmp_path):
    with pytest.raises(UserError, match="run_generated_code"):
        study_with(own_yaml(tmp_path, ROWS, scorer="code"))


# ---- hygiene ----------------------------------------------------------------------------------------
def item(i: int, **more) -> dict:
    return make_example("t", [{"role": "user", "content": f"Q{i}"}], more.pop("answer", "A"), {"expert": "A"}, **more)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [item(1)], "test": [item(1, answer="B")]}, "same prompt is in split train"),
        ({"train": [item(1, answer="")]}, "the answer is empty"),
        ({"train": [item(1, answer="E", options=["A", "B"])]}, "'E' is none of"),
        (
            {"train": [make_example("t", [{"role": "user", "content": " "}], "A", {"expert": "A"})]},
            "a message is empty",
        ),
    ],
)
def test_hygiene(tmp_path, splits, message):
    with pytest.raises(UserError, match=message):
        building.write_folder(tmp_path, {"name": "t", "kind": "skill"}, splits)


def test_recall_may_test_what_it_trains(tmp_path):
    building.write_folder(tmp_path, {"name": "t", "kind": "recall"}, {"train": [item(1), item(2)], "val": [item(1)]})
    assert (tmp_path / "val.jsonl").is_file()
    with pytest.raises(UserError, match="split test.*same prompt is in split val"):
        building.write_folder(tmp_path, {"name": "t", "kind": "recall"}, {"val": [item(1)], "test": [item(1)]})
