"""Low-rank training (peft): what is learned, and that a plain model with full weights comes out of it."""

import json

import pytest
import torch
from test_going_on import INPUTS, inputs, own_signals, twice  # noqa: F401  (fixtures)
from test_training import (  # noqa: F401  (fixtures)
    OPSD,
    SFT,
    Job,
    data,
    fresh_accelerate,
    objective_for,
    start,
    tokenizer,
)

from grafting.models import load_model
from grafting.training import fitting, loop, stage

LORA = {"rank": 3, "alpha": 12, "dropout": 0.0}
TRAINED = SFT | {"lora": LORA, "lr": 0.02, "micro_batch_size": None}


def tensors(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def test_the_merged_update_is_the_product_of_the_small_matrices(start, data, tokenizer):
    spec = TRAINED | {"steps": 4}
    torch.manual_seed(0)
    model = load_model(start)
    before = tensors(model)
    fitting.prepare(model, spec)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
    objective = objective_for(Job(None, spec), model, tokenizer, data)
    loop.train(model, objective.batches(4, 0), objective, loop.Settings.from_spec(spec), objective.job)
    small = {name: p.detach().clone() for name, p in model.named_parameters() if name in trained}
    fitting.finish(model, spec)
    after = tensors(model)
    assert after.keys() == before.keys()
    changed = set()
    for name, tensor in after.items():
        layer = name.removesuffix(".weight")
        a, b = (small.get(f"{layer}.lora_{letter}.default.weight") for letter in "AB")
        if a is None:
            assert tensor.equal(before[name]), f"{name} is no linear layer inside the model and has changed"
            continue
        changed.add(layer.rpartition(".")[2])
        assert a.shape[0] == b.shape[1] == LORA["rank"] and b.abs().max() > 0
        expected = before[name] + b @ a * LORA["alpha"] / LORA["rank"]
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    "spec",
    [TRAINED, OPSD | {"lora": LORA}, OPSD | {"lora": LORA, "opsd": OPSD["opsd"] | {"teacher": "ema", "ema_rate": 0.1}}],
    ids=["sft", "opsd", "opsd with a following teacher"],
)
def test_the_checkpoint_is_a_full_model(spec, start, data, tmp_path):
    stage.run(Job(tmp_path / "out", spec | {"steps": 3}, model=[start], data=[data], teacher=[start]))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in names and not any("adapter" in name for name in names)
    found, origin = load_model(tmp_path / "out"), load_model(start)
    assert found.state_dict().keys() == origin.state_dict().keys()
    assert type(found.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert not found.model.layers[0].mlp.up_proj.weight.equal(origin.model.layers[0].mlp.up_proj.weight)


def test_the_loss_falls(start, data, tmp_path):
    """Not far: embeddings and head of this small model, which nothing has trained, stay as they are."""
    stage.run(Job(tmp_path / "out", TRAINED | {"steps": 40}, model=[start], data=[data]))
    lines = (tmp_path / "out" / "training.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert sum(losses[-5:]) < 0.96 * sum(losses[:5])


def test_an_interrupted_run_gives_the_same_bytes(twice):
    """A state holds the small matrices alone."""
    whole, other = twice("train", stage.run, TRAINED | {"steps": 3}, INPUTS)
    assert other.sessions() == 3 + 1
    assert other.result() == whole.result()
