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
    """Tensors (the live ones, not copies) and JSON values of model, optimiser and objective."""
    tensors = {f"model/{name}": tensor for name, tensor in changing(model).items()}
    for number, parameter in enumerate(_parameters(optimiser)):
        for name, value in optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser/{number}/{name}"] = value
    own, facts = objective.state()
    tensors |= {f"objective/{name}": tensor for name, tensor in own.items()}
    return {name: tensor.detach() for name, tensor in tensors.items()}, facts


@torch.no_grad()
def restore(model, optimiser, objective, tensors: dict[str, torch.Tensor], facts: dict) -> None:
    """Undo `collect`, in place: live tensors keep their memory."""
    live = changing(model)
    for name, tensor in _below("model", tensors).items():
        live[name].copy_(tensor)
    for number, parameter in enumerate(_parameters(optimiser)):
        saved = _below(f"optimiser/{number}", tensors)
        if saved:
            optimiser.state[parameter] = {
                name: torch.empty_like(value, device=parameter.device).copy_(value) for name, value in saved.items()
            }
    objective.restore(_below("objective", tensors), facts)


def changing(model) -> dict[str, torch.Tensor]:
    """The tensors of a model that training may change, each memory once (tied weights share theirs)."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    kept: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if name not in frozen:
            kept.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(kept.values())


def _parameters(optimiser) -> list[torch.Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


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
