"""Divergences against TRL 1.16's SDFTTrainer: losses, per-token values and gradients of the student's logits."""

import json
from pathlib import Path

import pytest
import torch

from grafting.training.divergences import divergence, log_probabilities, sampled_reverse_kl

VALUES = json.loads((Path(__file__).parent / "fixtures" / "trl_sdft.json").read_text())
NAMES = {0.0: "forward_kl", 1.0: "reverse_kl"}  # TRL's alpha


def per_token(params: dict, teacher: torch.Tensor, student: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Our loss of every token [n] for TRL's parameters."""
    temperature = params.get("temperature", 1.0)
    teacher, student = teacher / temperature, student / temperature
    if params["mode"] == "sampled_token":
        return sampled_reverse_kl(log_probabilities(teacher, tokens), log_probabilities(student, tokens))
    alpha = params["alpha"]
    return divergence(
        NAMES.get(alpha, "jsd"), teacher, student, alpha, top_k=params.get("topk"), tail=params.get("add_tail", True)
    )


@pytest.mark.parametrize("case", VALUES["cases"], ids=[case["case"] for case in VALUES["cases"]])
def test_losses_and_gradients_equal_those_of_trl(case):
    student = torch.tensor(VALUES["student_logits"], requires_grad=True)
    teacher, mask = torch.tensor(VALUES["teacher_logits"]), torch.tensor(VALUES["mask"]).float()
    tokens = torch.tensor(VALUES["completion_ids"])
    batch, length, vocabulary = student.shape
    flat = (teacher.reshape(-1, vocabulary), student.reshape(-1, vocabulary), tokens.reshape(-1))
    values = per_token(case["params"], *flat).reshape(batch, length)
    # TRL means over tokens, then over rows; the loop of this project means over all tokens of the batch
    loss = ((values * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    loss.backward()
    close = {"rtol": 1e-5, "atol": 1e-5}
    assert torch.allclose(values.detach(), torch.tensor(case["per_token"]), **close)
    assert loss.item() == pytest.approx(case["loss"], rel=1e-5)
    assert ((values * mask).sum() / mask.sum()).item() == pytest.approx(case["token_mean"], rel=1e-5)
    assert torch.allclose(student.grad, torch.tensor(case["grad_student_logits"]), rtol=1e-5, atol=1e-6)


def test_average_of_the_weights_equals_that_of_trl():
    ema = VALUES["ema"]
    phi = [torch.tensor(ema["target_before"])]
    torch._foreach_lerp_(phi, [torch.tensor(ema["student"])], ema["rate"])
    assert torch.allclose(phi[0], torch.tensor(ema["target_after"]), atol=1e-7)
