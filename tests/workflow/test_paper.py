"""The paper's preset from end to end: SDFT's setting, one configuration per method, a pico model in Qwen2.5's place.

Models and the medical data come from a small Hub on loopback, the other data from fixtures with the layout of the
real files, the judge is a small server on loopback. What the preset leaves null is filled here. The prior suite is
lm-evaluation-harness's local one where that is installed (the data sets of its suite `sdft` are on the Hub, and no test
has them); else MMLU natively.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from .conftest import Folder, new_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))  # helpers of the unit tests

from hub_server import HubServer  # noqa: E402
from pico import write_mmlu, write_model  # noqa: E402
from test_judge import Server, by_reference  # noqa: E402

PRESETS = [f"presets/{name}.yaml" for name in ("paper", "paper-sdft", "paper-lite")]
DEPLOYED, BASE, MEDICAL = "a" * 40, "b" * 40, "c" * 40
HARNESS = importlib.util.find_spec("lm_eval") is not None
SIZES = {"train_items": 12, "val_items": 4, "test_items": 4}  # 20 items per task


def write_lines(path: Path, rows: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(root: Path) -> None:
    """Chemistry questions, tool-use queries and MMLU, with the fields of the published files."""
    choices = [{"label": list("ABCD"), "text": [f"{i + k} g/mol" for k in range(4)]} for i in range(24)]
    questions = [
        {
            "prompt": {}, "question": f"What is the molar weight of C{i}H{2 * i}?", "choices": options, "answer": "",
            "answerKey": "ABCD"[i % 4], "type": "mcq-4-choices", "domain": "Chemistry",
            "details": {"level": "L3", "task": "molar_weight", "subtask": "", "source": ""},
        }
        for i, options in enumerate(choices, 1)
    ]  # fmt: skip
    write_lines(root / "sciknoweval" / "molar_weight.jsonl", questions)
    tools = [
        {
            "Name": f"Tool{t}", "NLDocumentation": f"get{t}: Get one.\nParameters: {{\"id\": \"Required. integer.\"}}",
            "Function_Description": {"get": "Get one."},
            "Instructions": [f"Get number {i} from tool {t}." for i in range(4)],
            "Golden_Answers": [[{"Action": f"get{t}", "Action_Input": json.dumps({"id": i})}] for i in range(4)],
        }
        for t in range(6)
    ]  # fmt: skip
    (root / "toolalpaca").mkdir()
    (root / "toolalpaca" / "eval_simulated.json").write_text(json.dumps(tools))
    write_mmlu(root / "mmlu" / "mmlu.zip")


def filled(judge: str) -> dict:
    """What the preset leaves null, and what makes it small."""
    prior = {"kind": "harness", "suite": "local", "harness": {}} if HARNESS else {"kind": "mmlu"}
    return {
        "lineage": {
            "kind": "pretrained", "dtype": "bfloat16", "threads": 1,
            "deployed": {"hub": "Qwen/Qwen2.5-7B-Instruct", "revision": DEPLOYED},
            "donors": {"base": {"hub": "Qwen/Qwen2.5-7B", "revision": BASE}},
        },
        "task_options": dict.fromkeys(("science", "tooluse", "medical"), SIZES),
        "data_sources": {"medical": {"revision": MEDICAL}},
        "judge": {
            "model": "pico-judge", "endpoint": judge, "pause_seconds": 0.01,
            "prompt": "Q: {question}\nReference: {reference}\nResponse: {response}\nCORRECT or INCORRECT?",
        },
        "prior": {**prior, "val_items": 8, "test_items": 8, "retention_items": 4, "seed": 1},
        "training": {"threads": 1, "steps": 3, "batch_size": 4, "micro_batch_size": 2, "warmup_steps": 1},
        "learners": {
            "sft": {"grid": {"epochs": [1], "batch_size": [4]}},
            "opsd": {"grid": {"epochs": [1], "batch_size": [4], "ema_rate": [0.02]}, "max_new_tokens": 8},
        },
        "graft": {"scales": [0.4, 1.0], "control_scales": [0.4]},
        "sequential": {"sum_scales": [0.4]},
        "evaluation": {"batch_size": 16, "max_new_tokens": 8, "threads": 1},
        "rollout": {"items": 4, "max_new_tokens": 8},
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.workflow
def test_paper_preset_from_end_to_end(tmp_path):
    write_data(tmp_path / "data")
    rows = [{"Question": f"Is {i} a dose?", "Complex_CoT": f"Hm {i}.", "Response": f"It is {i}."} for i in range(24)]
    (tmp_path / "medical").mkdir()
    (tmp_path / "medical" / "medical_o1_sft.json").write_text(json.dumps(rows))
    hub = HubServer(
        {
            ("model", "Qwen/Qwen2.5-7B-Instruct", DEPLOYED): write_model(tmp_path / "deployed", 1, "bfloat16"),
            ("model", "Qwen/Qwen2.5-7B", BASE): write_model(tmp_path / "base", 2, "bfloat16"),
            ("dataset", "FreedomIntelligence/medical-o1-reasoning-SFT", MEDICAL): tmp_path / "medical",
        }
    )
    judge = Server(by_reference)
    folder = new_folder(tmp_path / "study")
    (folder.root / "mine.yaml").write_text(yaml.safe_dump(filled(judge.url)))
    sources = [str(tmp_path / "data" / name) for name in ("sciknoweval", "toolalpaca", "mmlu")]
    folder.run("python", "-m", "grafting.cli", "sources", "--write", *sources)
    command = ["snakemake", "--cores", "2", "--config", f"data_root={tmp_path / 'data'}", "--configfile", *PRESETS]
    try:
        # as it stands, the preset stops and names what is null
        stopped = folder.run(*command, check=False)
        assert stopped.returncode == 2 and "lineage.deployed.revision (of Qwen/Qwen2.5-7B-Instruct)" in stopped.stderr
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        folder.run(*command, "mine.yaml", **environment)
        asked, fetched = len(judge.asked), len(hub.log)
        assert asked and fetched
        again = folder.run(*command, "mine.yaml", HF_HUB_OFFLINE="1", **environment)
        assert "Nothing to be done" in again.stdout + again.stderr and len(judge.asked) == asked
    finally:
        hub.close()
        judge.close()
    check(folder)


def check(folder: Folder) -> None:
    """Every method, donor and protocol of the preset is there, measured on the items asked for."""
    table = pd.read_csv(folder.root / "results" / "evaluations.csv")
    assert {"single", "sequential"} <= set(table["protocol"])
    new = table[(table["suite"] == "new") & (table["protocol"] == "single") & (table["split"] == "val")]
    assert set(new["task"]) == {"science", "tooluse", "medical"} and set(new["n"]) == {SIZES["val_items"]}
    assert {("sft", "deployed"), ("sft", "base"), ("opsd", "deployed")} == set(zip(new["method"], new["donor"]))
    prior = table[table["suite"] == "prior"]
    assert set(prior["task"]) == {"mmlu_local" if HARNESS else "mmlu"} and set(prior["n"]) == {8}
    trained = [s["spec"] for name, s in folder.sidecars().items() if name.startswith("train/")]
    (opsd,) = {json.dumps(s["opsd"], sort_keys=True) for s in trained if s["objective"] == "opsd"}
    assert json.loads(opsd) | {"teacher": "ema", "ema_rate": 0.02, "skip_tokens": 3} == json.loads(opsd)
    assert {(s["steps"], s["batch_size"]) for s in trained} == {(3, 4)}
    verdicts = [p for p in (folder.root / "verdicts").glob("*.jsonl") if p.stat().st_size]
    assert len(verdicts) == 1
    claims = json.loads((folder.root / "results" / "claims.json").read_text())
    assert claims
