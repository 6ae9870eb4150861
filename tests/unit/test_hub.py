"""The door to the Hub, against a server on loopback that speaks its protocol: a pico model and a data set."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import LARGE, HubServer

COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def pico(tmp_path_factory) -> Path:
    """A model folder: a pico model of the tiny language."""
    from grafting.models import save_model
    from grafting.models.scratch import new_model, new_tokenizer
    from grafting.tasks.tiny_language import VOCABULARY

    folder = tmp_path_factory.mktemp("pico")
    shape = {"layers": 1, "width": 16, "feed_forward": 32, "heads": 2, "context": 64, "embedding_std": 0.02}
    save_model(new_model(shape, VOCABULARY, 0), new_tokenizer(VOCABULARY, "deployed"), folder)
    assert (folder / "model.safetensors").stat().st_size >= LARGE
    return folder


@pytest.fixture
def hub(pico, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "items.jsonl").write_text('{"prompt": "P", "response": "R", "answer": "A"}\n')
    server = HubServer({("model", "lab/pico", COMMIT): pico, ("dataset", "lab/items", COMMIT): data})
    yield server
    server.close()


def call(code: str, server: HubServer, home: Path, **environment) -> subprocess.CompletedProcess:
    """Runs code in a process of its own: the library reads its environment when it is imported."""
    prelude = "from grafting import hub\nfrom grafting.errors import UserError\nimport sys\ntry:\n"
    body = "".join(f"    {line}\n" for line in code.splitlines())
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(home),
        **environment,
    }
    program = f"{prelude}{body}except UserError as error:\n    print(error)\n    sys.exit(2)\n"
    return subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=120)


SNAPSHOT = f"print(hub.snapshot('lab/pico', '{COMMIT}'))"


def test_download_then_offline(hub, pico, tmp_path):
    done = call(SNAPSHOT, hub, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (pico / name).read_bytes()
    asked = len(hub.log)
    again = call(SNAPSHOT, hub, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert again.stdout == done.stdout and len(hub.log) == asked


def test_offline_and_not_in_the_cache(hub, tmp_path):
    done = call(SNAPSHOT, hub, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and "HF_HUB_OFFLINE forbids" in done.stdout and hub.log == []


def test_broken_connection_is_resumed(hub, tmp_path):
    (tmp_path / "large").mkdir()
    content = os.urandom(24 << 20)  # the library writes blocks of ten megabytes
    (tmp_path / "large" / "model.safetensors").write_bytes(content)
    hub.repositories["model", "lab/large", COMMIT] = tmp_path / "large"
    hub.faults["model.safetensors"] = "cut"
    done = call(f"print(hub.snapshot('lab/large', '{COMMIT}'))", hub, tmp_path / "home")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == content
    ranges = [r for method, path, r in hub.log if method == "GET" and path.endswith("model.safetensors")]
    assert ranges == [None, f"bytes={10 << 20}-"]  # not from the beginning


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])  # by SHA-256, and by git's hash
def test_wrong_checksum(hub, tmp_path, name):
    hub.faults[name] = "corrupt"
    done = call(SNAPSHOT, hub, tmp_path / "home")
    assert done.returncode == 2 and name in done.stdout and "do not have the hash" in done.stdout
    del hub.faults[name]
    assert call(SNAPSHOT, hub, tmp_path / "home").returncode == 0  # the damaged file was removed


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"hub.snapshot('lab/pico', '{OTHER}')", "no such revision"),
        (f"hub.snapshot('lab/none', '{COMMIT}')", "no such repository"),
        ("hub.snapshot('lab/pico', 'main')", "not a full commit hash"),
        ("hub.snapshot('lab/pico', None)", "not a full commit hash"),
        (f"hub.file('lab/items', '{COMMIT}', 'absent.jsonl')", "has no file 'absent.jsonl'"),
    ],
)
def test_what_is_not_there(hub, tmp_path, code, message):
    done = call(code, hub, tmp_path / "home")
    assert done.returncode == 2 and message in done.stdout, done.stdout + done.stderr


def test_gated_repository(hub, tmp_path):
    hub.gated.add("lab/pico")
    done = call(SNAPSHOT, hub, tmp_path / "home")
    assert done.returncode == 2 and "gated" in done.stdout and "HF_TOKEN" in done.stdout
    assert call(SNAPSHOT, hub, tmp_path / "home", HF_TOKEN="hf_x").returncode == 0


@pytest.mark.slow
def test_a_server_that_fails(hub, tmp_path):
    hub.close()
    done = call(SNAPSHOT, hub, tmp_path / "home")
    assert done.returncode == 2 and "cannot be reached" in done.stdout and "Traceback" not in done.stderr


def test_model_stage_and_data_from_the_hub(hub, pico, tmp_path):
    code = f"""
from types import SimpleNamespace
from pathlib import Path
from grafting.models import stage
from grafting.tasks.sources import read_sources
out = Path({str(tmp_path / "out")!r}); out.mkdir()
source = {{"hub": "lab/pico", "revision": "{COMMIT}"}}
spec = {{"source": source, "dtype": "float32"}}
stage.run(SimpleNamespace(spec=spec, places={{}}, id="models/x", out=out, metrics={{}}))
files = [{{"name": "data.jsonl", "hub": "lab/items", "revision": "{COMMIT}", "path": "items.jsonl"}}]
print(read_sources("traces", files)["data.jsonl"].decode())"""
    done = call(code, hub, tmp_path / "home")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == {"prompt": "P", "response": "R", "answer": "A"}
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (pico / "model.safetensors").read_bytes()
