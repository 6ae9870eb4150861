"""Sharded training (FSDP2): every process holds a part of weights, gradients and optimiser.

Chosen by `accelerate launch --config_file profiles/fsdp.yaml`. The decoder layers and the rest of the model are the
units that are gathered for a pass and let go after it. As in the loop without shards, gradients are summed over the
processes, not averaged, since every loss is divided by the tokens of the whole batch already.

Objectives that sample within a step are refused: processes whose rollouts end at different lengths would wait for each
other for ever. Use `opsd.rounds`, whose rollouts are jobs of their own.
"""

from __future__ import annotations

import os
from types import MethodType

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from grafting.errors import UserError
from grafting.models.forward import logits_at


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether this run was launched with an FSDP config. Accelerate itself heeds one on accelerators only."""
    launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return accelerator.distributed_type == DistributedType.FSDP or (launched and accelerator.num_processes > 1)


def shard(model, objective, accelerator: Accelerator) -> None:
    """Shard a model in place over all processes. UserError if the objective samples from it within a step."""
    if objective.samples:
        raise UserError("a sharded model cannot be sampled from within a step; use rounds, or do without FSDP")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    # objectives call the model below its head; FSDP must know that method to gather the weights around it
    model.sharded_logits = MethodType(logits_at, model)
    register_fsdp_forward_method(model, "sharded_logits")


def clip(accelerator: Accelerator, parameters: list[torch.Tensor], norm: float) -> float:
    """Clip the gradient to this norm; returns what it was."""
    if not is_sharded(accelerator):
        return accelerator.clip_grad_norm_(parameters, norm).item()
    return torch.nn.utils.clip_grad_norm_(parameters, norm).full_tensor().item()


def whole(model) -> dict[str, torch.Tensor]:
    """Parameters by name, gathered where they are sharded. Every process must call it."""
    return {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
        for name, parameter in model.named_parameters()
    }
