"""The judge, against a small server on loopback that speaks the OpenAI-compatible protocol."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grafting.errors import UserError
from grafting.tasks import judge, scorers

PROMPT = "Q: {question}\nReference: {reference}\nResponse: {response}\nCORRECT or INCORRECT?"
INFO = {"name": "medical", "scorer": "judge", "scorer_options": {}}


class Server:
    """Answers by `reply(prompt)`: a text, a status code, or bytes as they are; keeps what it was asked."""

    def __init__(self, reply):
        self.asked, outer = [], self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, body, self.headers.get("Authorization")))
                given = reply(body["messages"][0]["content"])
                status, data = (given, b"{}") if isinstance(given, int) else (200, given)
                if isinstance(data, str):
                    data = json.dumps({"choices": [{"message": {"content": data}}]}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Start a server with a reply function and point the judge at it; verdicts lie in a folder of the test."""
    servers = []
    monkeypatch.setenv(judge.FOLDER, str(tmp_path / "verdicts"))
    monkeypatch.setattr(judge, "_kept", {})

    def start(reply, **settings):
        server = Server(reply)
        servers.append(server)
        given = {"model": "m", "endpoint": server.url, "prompt": PROMPT, "max_tokens": 8, "pause_seconds": 0.01}
        monkeypatch.setenv(judge.SETTINGS, json.dumps({**given, **settings}))
        return server

    yield start
    for server in servers:
        server.close()


def example(i: int) -> dict:
    messages = [{"role": "user", "content": f"What {{is}} {i}?"}]
    return {"id": f"{i:012x}", "task": "medical", "messages": messages, "answer": f"it is {i}"}


def by_reference(prompt: str) -> str:
    reference = prompt.split("Reference: ")[1].split("\n")[0]
    return "CORRECT" if f"Response: {reference}" in prompt else "This is INCORRECT."


def test_verdicts_and_their_reuse(serve, monkeypatch):
    server = serve(by_reference)
    assert scorers.score(INFO, example(1), "it is 1") == (True, "correct")
    assert scorers.score(INFO, example(1), "it is 2") == (False, "wrong")
    assert scorers.score(INFO, example(1), " ") == (False, "no answer found")
    assert len(server.asked) == 2
    path, body, _ = server.asked[0]
    assert (
        path == "/v1/chat/completions" and body["temperature"] == 0 and "What {is} 1?" in body["messages"][0]["content"]
    )
    monkeypatch.setattr(judge, "_kept", {})  # another process
    assert scorers.score(INFO, example(1), "it is 1") == (True, "correct")
    assert len(server.asked) == 2  # a rerun costs nothing


def test_another_model_or_prompt_is_another_judge(serve, tmp_path):
    serve(by_reference)
    scorers.score(INFO, example(1), "it is 1")
    server = serve(by_reference, model="other")
    scorers.score(INFO, example(1), "it is 1")
    assert len(server.asked) == 1 and len(list((tmp_path / "verdicts").iterdir())) == 2


def test_another_endpoint_is_the_same_judge(serve):
    serve(by_reference)
    scorers.score(INFO, example(1), "it is 1")
    server = serve(by_reference, timeout_seconds=3)
    assert scorers.score(INFO, example(1), "it is 1") == (True, "correct")
    assert server.asked == []


def test_many_at_once(serve):
    server = serve(by_reference, parallel=4)
    answers = [(example(i), f"it is {i % 3}") for i in range(12)]
    scorers.prepare(INFO, answers)
    assert len(server.asked) == 12
    assert [scorers.score(INFO, e, text)[0] for e, text in answers] == [i < 3 for i in range(12)]
    assert len(server.asked) == 12


def test_nonsense_and_failures_are_asked_again(serve):
    replies = iter([500, b"<html>", "Maybe.", "CORRECT, or INCORRECT?", "CORRECT"])
    server = serve(lambda prompt: next(replies))
    assert scorers.score(INFO, example(1), "it is 1") == (True, "correct")
    assert len(server.asked) == 5


def test_a_judge_that_never_answers_stops_the_run_and_keeps_what_was_judged(serve):
    def reply(prompt):
        return "Maybe." if "What {is} 5?" in prompt else "CORRECT"

    serve(reply, attempts=2, parallel=1)
    answers = [(example(i), f"it is {i}") for i in range(8)]
    with pytest.raises(UserError, match=r"no verdict on example 000000000005.*neither.*verdicts so far are kept"):
        scorers.prepare(INFO, answers)
    server = serve(by_reference)
    scorers.prepare(INFO, answers)
    assert 1 <= len(server.asked) <= 3  # the five before it are not asked again


def test_refused_key_is_not_asked_again(serve):
    server = serve(lambda prompt: 401)
    with pytest.raises(UserError, match="HTTP status 401"):
        scorers.score(INFO, example(1), "it is 1")
    assert len(server.asked) == 1


def test_timeout(serve, monkeypatch):
    import time

    serve(lambda prompt: time.sleep(2) or "CORRECT", timeout_seconds=0.2, attempts=2)
    with pytest.raises(UserError, match="no verdict"):
        scorers.score(INFO, example(1), "it is 1")


def test_key_from_the_environment(serve, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    server = serve(by_reference, api_key_variable="MY_KEY")
    scorers.score(INFO, example(1), "it is 1")
    assert server.asked[0][2] == "Bearer secret"


def test_no_judge(monkeypatch):
    monkeypatch.delenv(judge.SETTINGS, raising=False)
    with pytest.raises(UserError, match="set `judge`"):
        scorers.score(INFO, example(1), "it is 1")


def test_damaged_verdict_file(serve, tmp_path):
    server = serve(by_reference)
    scorers.score(INFO, example(1), "it is 1")
    path = next((tmp_path / "verdicts").iterdir())
    path.write_text(path.read_text() + '{"hash": "cut o')
    judge._kept.clear()
    assert scorers.score(INFO, example(1), "it is 1") == (True, "correct")
    assert len(server.asked) == 1


# ---- a model in this process --------------------------------------------------------------------------
@pytest.fixture(scope="module")
def saying(tmp_path_factory) -> dict[str, dict]:
    """Judges that always say one thing: pico models whose output depends on the last token only."""
    import torch
    from pico import write_model

    from grafting.models import load_model, load_tokenizer, save_model
    from grafting.models.stage import directory_digest

    found = {}
    for said in ("CORRECT", "INCORRECT", "maybe"):
        folder = write_model(tmp_path_factory.mktemp("judge") / "model", words=(said,))
        model, tokenizer = load_model(folder), load_tokenizer(folder)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            codes = model.model.embed_tokens.weight
            model.lm_head.weight.zero_()
            word, (newline,) = tokenizer.convert_tokens_to_ids(said), tokenizer.encode("\n", add_special_tokens=False)
            for before, after in ((newline, word), (word, tokenizer.eos_token_id)):
                model.lm_head.weight[after] = codes[before] / codes[before].norm()
        save_model(model, tokenizer, folder)
        found[said] = {"path": str(folder), "sha256": directory_digest(folder)}
    return found


def judged_by(monkeypatch, folder, local: dict) -> None:
    monkeypatch.setenv(judge.FOLDER, str(folder))
    monkeypatch.setattr(judge, "_kept", {})
    settings = {"model": "m", "local": local, "endpoint": None, "prompt": PROMPT, "max_tokens": 8}
    monkeypatch.setenv(judge.SETTINGS, json.dumps(settings))


@pytest.mark.parametrize("said", ["CORRECT", "INCORRECT"])
def test_a_local_model_judges_many_and_is_not_asked_twice(saying, monkeypatch, tmp_path, said):
    from grafting.rollouts import judging

    judged_by(monkeypatch, tmp_path, saying[said])
    scorers.prepare(INFO, [(example(i), f"it is {i}") for i in range(10)])
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["reply"] for line in lines] == [said] * 10
    monkeypatch.setattr(judging, "generate", None)  # whoever generates again fails
    right = said == "CORRECT"
    assert scorers.score(INFO, example(1), "it is 1") == (right, "correct" if right else "wrong")


def test_a_local_model_without_a_verdict_stops_the_run(saying, monkeypatch, tmp_path):
    judged_by(monkeypatch, tmp_path, saying["maybe"])
    with pytest.raises(UserError, match="neither CORRECT nor INCORRECT.*example 000000000001: 'maybe'"):
        scorers.score(INFO, example(1), "it is 1")


def test_a_local_model_that_is_not_the_pinned_one_is_refused(saying, monkeypatch, tmp_path):
    judged_by(monkeypatch, tmp_path, {**saying["CORRECT"], "sha256": "0" * 64})
    with pytest.raises(UserError, match="judge.local.*expected 0000"):
        scorers.score(INFO, example(1), "it is 1")


def test_what_pins_a_local_judge_enters_keys_and_where_it_lies_does_not(saying):
    here = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "endpoint": None, "local": saying["CORRECT"]}
    moved = {**here, "local": {**saying["CORRECT"], "path": "/elsewhere"}}
    other = {**here, "local": saying["maybe"]}
    assert judge.deciding(here) == judge.deciding(moved) != judge.deciding(other)
    assert "local" not in judge.deciding({**here, "local": None, "endpoint": "http://x"})
