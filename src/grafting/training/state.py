"""All that training's next step depends on, as named tensors and JSON values, and back.

Weights, optimiser, what the objective holds (teacher, counters), random generators, records and cost so far. The
position in the data is the number of steps: batches are drawn again up to it, which is cheap and exact.
"""

from __future__ import annotations

import base64
import random

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object


def collect(model, optimiser, objective) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors (the live ones, not copies) and JSON values of model, optimiser and objective.

    Sharded tensors are gathered, so every process must call this.
    """
    tensors = {f"model/{name}": tensor for name, tensor in changing(model).items()}
    for number, (parameter, _) in enumerate(_parameters(optimiser)):
        for name, value in optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser/{number}/{name}"] = value
    own, facts = objective.state()
    tensors |= {f"objective/{name}": tensor for name, tensor in own.items()}
    whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # noqa: E731
    return {name: whole(tensor.detach()) for name, tensor in tensors.items()}, facts


@torch.no_grad()
def restore(model, optimiser, objective, tensors: dict[str, torch.Tensor], facts: dict) -> None:
    """Undo `collect`; live tensors keep their memory and their shards."""
    live = changing(model)
    for name, tensor in _below("model", tensors).items():
        live[name].copy_(_placed(tensor, live[name]))
    for number, (parameter, fused) in enumerate(_parameters(optimiser)):
        saved = _below(f"optimiser/{number}", tensors)
        if saved:
            optimiser.state[parameter] = {
                # the counter of steps lies beside the parameter only where the update is one fused kernel
                name: (value.to(parameter.device) if fused else value).clone()
                if name == "step"
                else torch.empty_like(parameter, dtype=value.dtype).copy_(_placed(value, parameter))
                for name, value in saved.items()
            }
    objective.restore(_below("objective", tensors), facts)


def _placed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, cut into shards where `like` is."""
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def changing(model) -> dict[str, torch.Tensor]:
    """The tensors of a model that training may change: parameters that take a gradient, each once (tied weights
    share theirs), and buffers that are saved with it."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return trained | {name: tensor for name, tensor in model.state_dict().items() if name not in names}


def _parameters(optimiser) -> list[tuple[torch.Tensor, bool]]:
    """Parameters with whether their update is fused."""
    return [(parameter, bool(group.get("fused"))) for group in optimiser.param_groups for parameter in group["params"]]


def _below(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def generators(accelerator: Accelerator) -> list[dict]:
    """State of the global random generators of Python, NumPy and torch (CPU and GPUs) in every process, as JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    mine = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }
    return gather_object([mine]) if accelerator.num_processes > 1 else [mine]


def set_generators(accelerator: Accelerator, states: list[dict]) -> None:
    """Undo `generators` in this process."""
    mine = states[accelerator.process_index % len(states)]
    version, numbers, gauss = mine["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = mine["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(mine["torch"]))
    if mine["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_bytes(text) for text in mine["cuda"]])


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
