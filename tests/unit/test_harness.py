"""lm-evaluation-harness through the bridge: really run, offline, on a pico model and a local task of JSON lines."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pico import write_mmlu, write_model

from grafting.tasks.harness_suites import VERSION

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs the extra harness: pip install '.[harness]'"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What `harness_run.py` found: the environment is read when libraries are imported, so a process of its own."""
    folder = tmp_path_factory.mktemp("harness")
    write_model(folder / "model")
    digest = hashlib.sha256(write_mmlu(folder / "mmlu" / "mmlu.zip").read_bytes()).hexdigest()
    given = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "GRAFTING_DATA_ROOT": str(folder)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("harness_run.py")), str(folder), json.dumps(digest)],
        env={**given, **offline}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_log_likelihoods_are_those_of_the_harness(found):
    assert len(found["ours"]) == 24 * 4
    for (ours, value), (theirs, wanted) in zip(found["ours"], found["theirs"], strict=True):
        assert ours == theirs and value == pytest.approx(wanted, abs=1e-4)


def test_the_letter_follows_the_opened_answer(found):
    for (context, continuation), _ in found["ours"]:
        assert context.endswith("<|im_end|>\n<|im_start|>assistant\n") and continuation in tuple("ABCD")
        assert context.count("<|im_start|>") == 2


def test_an_item_is_right_where_its_letter_is_the_likeliest(found):
    """The scores follow from the log-likelihoods: the right letter is that of the sum, i % 4."""
    values = [value for _, value in found["theirs"]]
    questions = [context.split("What is ")[1].split(" +")[0] for (context, _), _ in found["theirs"][::4]]
    right = [
        max(range(4), key=values[4 * i : 4 * i + 4].__getitem__) == int(first) % 4 for i, first in enumerate(questions)
    ]
    (score,) = found["scores"]
    assert score["n"] == len(found["rows"]) == 24
    assert score["correct"] == sum(right) == sum(row["correct"] for row in found["rows"])
    p = score["correct"] / 24
    assert score["stderr"] == pytest.approx((p * (1 - p) / 23) ** 0.5)


def test_what_a_score_depends_on_is_kept_with_it(found):
    protocol = found["scores"][0]["protocol"]
    assert protocol["harness"] == VERSION and protocol["num_fewshot"] == 0 and protocol["chat_template"] is True
    assert protocol["metric"] == "acc" and protocol["version"] == {"mmlu_local": 1.0}
    assert len(protocol["prompts_sha256"]) == 64


def test_other_weights_are_scored_without_loading_again(found):
    assert found["again"] != [row["text"] for row in found["rows"]]
