"""Scorers: verdicts with reasons, references and responses as they come in the wild."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grafting.errors import UserError
from grafting.tasks import code_execution, scorers, tool_calls


def verdict(scorer: str, text: str, answer, **options) -> tuple[bool, str]:
    info = {"name": "made up", "scorer": scorer, "scorer_options": options}
    return scorers.score(info, {"id": "0" * 12, "task": "made up", "answer": answer}, text)


RIGHT, WRONG, NONE = (True, "correct"), (False, "wrong"), (False, "no answer found")


# ---- text -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "answer", "options", "expected"),
    [
        ("The answer is 42.", "42", {}, RIGHT),
        ("about 1,234,567.5 in all", "1234567.5", {}, RIGHT),
        ("first 3, then 4", "4", {}, RIGHT),
        ("x = -2.5e-3", "-0.0025", {}, RIGHT),
        ("it is 6.02 x 10^23", "6.02e23", {}, RIGHT),
        ("it is 6.02 \u00d7 10^{23}", "6.02e23", {}, RIGHT),
        ("\u22123 degrees", "-3", {}, RIGHT),
        ("10\u202f000 people", "10000", {}, RIGHT),
        ("range 5-3", "3", {}, RIGHT),
        ("<answer>7</answer> as shown in 2 steps", "7", {}, RIGHT),
        ("3.1", "3.14159", {"relative": 0.02}, RIGHT),
        ("3.1", "3.14159", {"relative": 0.01}, WRONG),
        ("9.99", "10", {"absolute": 0.02}, RIGHT),
        ("9.99", "10", {}, WRONG),
        ("CO2", "2", {}, NONE),
        ("none of these", "2", {}, NONE),
        ("1.5 kg", "1500 g", {"units": {"g": 1, "kg": 1000}}, RIGHT),
        ("1500", "1500 g", {"units": {"g": 1, "kg": 1000}}, RIGHT),
        ("1500 m", "1500 g", {"units": {"g": 1, "kg": 1000}}, (False, "wrong unit")),
    ],
)
def test_numeric(text, answer, options, expected):
    assert verdict("numeric", text, answer, **options) == expected


@given(st.integers(-(10**12), 10**12))
def test_numbers_with_thousands_separators_read_back(number):
    assert verdict("numeric", f"so {number:,} it is", str(number)) == RIGHT


@pytest.mark.parametrize(
    ("text", "answer", "options", "expected"),
    [
        ("Mira Quel", "Mira Quel", {}, RIGHT),
        ("  Mira\nQuel ", "Mira Quel", {}, RIGHT),
        ("mira quel.", "Mira Quel", {"ignore_case": True, "ignore_punctuation": True}, RIGHT),
        ("mira quel.", "Mira Quel", {}, WRONG),
        ("It was Mira Quel who did.", "Mira Quel", {}, (False, "contains the answer")),
        ("It was Mira Quel who did.", "Mira Quel", {"lenient": True}, (True, "contains the answer")),
        ("Miraquel", "Mira", {"lenient": True}, WRONG),
        ("two", ["2", "two"], {}, RIGHT),
        ("", "x", {}, NONE),
    ],
)
def test_exact(text, answer, options, expected):
    assert verdict("exact", text, answer, **options) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("<answer>b</answer>", "B", RIGHT),
        ("<answer>B: water</answer>", "B", NONE),
        ("<answer>2H2 + O2 =2H2O</answer>", "2H2 + O2 = 2H2O", RIGHT),
        ("<answer>2h2 + O2 = 2H2O</answer>", "2H2 + O2 = 2H2O", WRONG),
        ("<answer> </answer>", "B", NONE),
        ("B", "B", NONE),
    ],
)
def test_tagged(text, answer, expected):
    assert verdict("tagged", text, answer) == expected


def test_regex():
    assert verdict("regex", "a #### 3\n#### 4", "4", pattern=r"#### (\S+)") == RIGHT
    assert verdict("regex", "4", "4", pattern=r"#### (\S+)") == NONE


def test_thinking_is_not_scored():
    tags = ["<think>", "</think>"]
    assert verdict("exact", "<think>Bo</think> Al", "Al", thinking=tags) == RIGHT
    assert verdict("exact", "Bo</think>Al", "Al", thinking=tags) == RIGHT  # the template wrote the opening tag
    assert verdict("exact", "<think>Al", "Al", thinking=tags) == NONE
    assert verdict("exact", "Al", "Al", thinking=tags) == RIGHT


def test_a_scorer_that_raises_is_counted_and_names_the_item(capsys):
    assert verdict("numeric", "4", "four") == (False, "scorer failed")
    assert "000000000000 of made up" in capsys.readouterr().err


# ---- tool calls -------------------------------------------------------------------------------------
def calls(*pairs) -> str:
    return json.dumps([{"action": action, "arguments": arguments} for action, arguments in pairs])


def response(*pairs) -> str:
    return "\n".join(f"Thought: now\nAction: {action}\nAction Input: {given}" for action, given in pairs)


ONE = calls(("weather", {"city": "Oslo", "days": 3}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (response(("weather", '{"days": 3, "city": "Oslo"}')), RIGHT),
        (response(("weather", '{"city": "Oslo", "days": 3.0}')), RIGHT),
        (response(("weather", '{"city":\n "Oslo",\n "days": 3}\nObservation: rain')), RIGHT),
        (response(("weather", '{"city": "Oslo", "days": "3"}')), (False, "wrong arguments")),
        (response(("weather", '{"city": "Oslo"}')), (False, "wrong arguments")),
        (response(("weather", '{"city": "oslo", "days": 3}')), (False, "wrong arguments")),
        (response(("weather", '{"city": "Oslo", "days": 3, "unit": "C"}')), (False, "wrong arguments")),
        (response(("weather", "{'city': 'Oslo', 'days': 3}")), (False, "invalid JSON")),
        (response(("weather", '{"city": "Oslo", "days": 2, "days": 3}')), (False, "invalid JSON")),
        (response(("weather", '{"city": "Oslo", "days": NaN}')), (False, "invalid JSON")),
        (response(("weather", '["Oslo", 3]')), (False, "invalid JSON")),
        ("Action: weather", (False, "invalid JSON")),
        (response(("climate", '{"city": "Oslo", "days": 3}')), (False, "wrong action")),
        (response(("weather", "{}"), ("weather", "{}")), (False, "wrong number of calls")),
        ("I would look out of the window.", NONE),
        (response(("weather", '{"city": ' + "[" * 100_000)), (False, "invalid JSON")),
    ],
)
def test_tool_calls(text, expected):
    assert verdict("tool_calls", text, ONE) == expected


def test_tool_calls_in_order():
    wanted = calls(("find", {"name": "Bo"}), ("send", {"to": 7, "urgent": True}))
    right = response(("find", '{"name": "Bo"}'), ("send", '{"to": 7, "urgent": true}'))
    assert verdict("tool_calls", right, wanted) == RIGHT
    turned = response(("send", '{"to": 7, "urgent": true}'), ("find", '{"name": "Bo"}'))
    assert verdict("tool_calls", turned, wanted) == (False, "wrong action")
    number = response(("find", '{"name": "Bo"}'), ("send", '{"to": 7, "urgent": 1}'))
    assert verdict("tool_calls", number, wanted) == (False, "wrong arguments")


def test_placeholders():
    text = '{"id": ${id from find}, "note": "costs ${5}", "list": [${x}, 2]}'
    arguments = tool_calls.decode_arguments(text)
    assert arguments["note"] == "costs ${5}"  # inside a string it is text
    wanted = json.dumps([{"action": "get", "arguments": arguments}])
    assert verdict("tool_calls", response(("get", text)), wanted) == RIGHT
    literal = '{"id": 12, "note": "costs ${5}", "list": ["a", 2]}'
    assert verdict("tool_calls", response(("get", literal)), wanted) == RIGHT
    vague = response(("get", '{"id": ${id}}'))
    assert verdict("tool_calls", vague, calls(("get", {"id": 12}))) == (False, "wrong arguments")


def test_free_wording_and_references_that_are_no_json():
    wanted = calls(("ask", {"Question": "Which city?"}))
    free = {"ask": ["Question"]}
    assert (
        verdict("tool_calls", response(("ask", '{"Question": "What city do you mean?"}')), wanted, free=free) == RIGHT
    )
    empty = response(("ask", '{"Question": " "}'))
    assert verdict("tool_calls", empty, wanted, free=free) == (False, "wrong arguments")
    raw = json.dumps([{"action": "get", "raw": '{"a": "a": 1}'}])
    assert verdict("tool_calls", response(("get", '{"a":  "a": 1}')), raw) == RIGHT
    assert verdict("tool_calls", response(("get", '{"a": 1}')), raw) == (False, "wrong arguments")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=3))
def test_what_is_written_as_json_is_read_back_equal(arguments):
    read = tool_calls.decode_arguments(json.dumps(arguments))
    assert tool_calls.same(read, arguments) and tool_calls.same(arguments, read)


# ---- code -------------------------------------------------------------------------------------------
HERE = sys.platform == "linux" and os.uname().machine in code_execution.REFUSED
limited = pytest.mark.skipif(not HERE, reason="generated code is shut in on Linux, x86_64 and aarch64, only")
TASK = json.dumps(
    {
        "prompt": "def double(x):\n",
        "test": "def check(f):\n    assert f(2) == 4\n    assert f(0) == 0\n",
        "entry_point": "double",
    }
)


def run(text: str, **options) -> tuple[bool, str]:
    return verdict("code", text, TASK, seconds=2, memory_mb=512, **options)


def test_generated_code_is_off_by_default(monkeypatch):
    monkeypatch.delenv(code_execution.ALLOWED, raising=False)
    with pytest.raises(UserError, match="evaluation.run_generated_code"):
        run("    return 2 * x\n")


@limited
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("    return 2 * x\n", RIGHT),
        ("Sure:\n```python\ndef double(x):\n    return x + x\n```\nDone.", RIGHT),
        ("    return x\n", (False, "wrong")),
        ("    return y\n", (False, "raised an error")),
        ("    return (\n", (False, "syntax error")),
        ("    raise SystemExit(0)\n", (False, "raised an error")),
        ("    import os; os._exit(0)\n", (False, "ended early")),
        ("    while True: pass\n", (False, "timed out")),
        ("    import time; time.sleep(60)\n", (False, "timed out")),
        ("    import os; os.fork()\n", (False, "forbidden operation")),
        ("    import subprocess; subprocess.run(['true'])\n", (False, "forbidden operation")),
        ("    open('full', 'w').write('x' * 10)\n", (False, "forbidden operation")),
        ("    import os; os.mkdir('d')\n", (False, "forbidden operation")),
        ("    import socket; socket.socket()\n", (False, "forbidden operation")),
        ("    import os; os.kill(os.getppid(), 9)\n", (False, "forbidden operation")),
        ("    import os; os.remove(__import__('sys').executable)\n", (False, "forbidden operation")),
        ("    return bytearray(1 << 32)\n", (False, "out of memory")),
        ("", NONE),
    ],
)
def test_generated_code(monkeypatch, text, expected):
    monkeypatch.setenv(code_execution.ALLOWED, "1")
    assert run(text) == expected


@limited
def test_generated_code_may_read_and_import(monkeypatch):
    monkeypatch.setenv(code_execution.ALLOWED, "1")
    assert run("    import math, collections, re\n    return int(math.fsum([x, x]))\n") == RIGHT


@limited
def test_a_program_cannot_claim_to_be_right(monkeypatch):
    """It does not know the word that the verdict is sealed with."""
    monkeypatch.setenv(code_execution.ALLOWED, "1")
    claim = '    import os\n    for fd in range(3, 20):\n        try: os.write(fd, b\'["x", "correct"]\\n\')\n'
    claim += "        except OSError: pass\n    os._exit(0)\n"
    assert run(claim) == (False, "ended early")


@limited
@pytest.mark.slow
def test_humaneval_reference_solutions_pass(monkeypatch):
    import gzip

    root = Path(os.environ.get("GRAFTING_DATA_ROOT") or Path(__file__).parents[3] / "shared" / "data")
    path = root / "humaneval" / "HumanEval.jsonl.gz"
    if not path.is_file():
        pytest.skip("public data sets are not here")
    monkeypatch.setenv(code_execution.ALLOWED, "1")
    items = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()][::8]
    for item in items:
        answer = json.dumps({key: item[key] for key in ("prompt", "test", "entry_point")})
        assert verdict("code", item["canonical_solution"], answer, seconds=10) == RIGHT, item["task_id"]


# ---- light ------------------------------------------------------------------------------------------
def test_text_scorers_import_no_resolved_one():
    resolved = ", ".join(repr(f"grafting.tasks.{m.partition(':')[0]}") for m in scorers.RESOLVED.values())
    code = f"import sys, grafting.tasks.scorers; assert not {{{resolved}}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
