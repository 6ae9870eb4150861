"""The backend `continuous`: transformers' continuous batching, on the live weights.

Requests join and leave the running batch at every step, and the cache is paged: that is what GPUs want for responses
of very different lengths. transformers' own sampler draws from one global generator, so what an example gets would
depend on its neighbours; here a logits processor makes the choice instead (the same inverse CDF with the same
numbers as the backend `native`) and hands on scores in which only the chosen token is possible.
"""

from __future__ import annotations

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

from grafting.errors import UserError
from grafting.rollouts.engine import Rollout
from grafting.rollouts.sampling import choose, details, uniforms

PAGE = 32  # tokens per page of the cache


class _Choice(ContinuousBatchingLogitsProcessor):
    """Chooses the next token of every request from the request's own numbers [requests, max_new_tokens]."""

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, prompts: list[list[int]], room: int, temperature: float, numbers, detail: bool) -> None:
        self.lengths, self.room, self.temperature, self.detail = list(map(len, prompts)), room, temperature, detail
        self.numbers = None if numbers is None else numbers.flatten()
        self.rows = 0
        self.noted: dict[int, tuple[float, float]] = {}

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Padding rows choose by the first number; nobody reads what they choose."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list) -> torch.Tensor:
        """Place in the table of numbers, per request: its row, and the position of the token it is about to get."""
        places = []
        for request in requests_with_new_token:
            state = request.state
            row = int(state.request_id) if state.request_id.isdecimal() else 0  # warm-up requests have other names
            # an evicted request comes back with its own tokens as part of the prompt
            position = len(state.initial_tokens) + state.generated_len() - self.lengths[row]
            places.append(row * self.room + min(max(position, 0), self.room - 1))
        self.rows = len(places)
        return torch.tensor(places, dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Scores [n, V] in which the chosen token has 0 and all others minus infinity."""
        places = tensor_arg[: scores.shape[0]].long()
        number = None if self.numbers is None else self.numbers.to(scores.device)[places]
        chosen = choose(scores, self.temperature, number)
        if self.detail:
            noted = [values.tolist() for values in details(scores, self.temperature, number, chosen)]
            # rows behind those of the requests are padding, with places of an earlier step
            self.noted.update(zip(places.tolist()[: self.rows], zip(*noted, strict=True), strict=False))
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)


def decode(
    model, prompts, max_new_tokens, stop_ids, pad_id, temperature, seeds, batch_size, detail, answered
) -> list[Rollout]:
    """Like `engine.generate`, whose arguments these are; `batch_size` is the largest number of requests at once.

    answered(row, rollout) is called as soon as a prompt is answered, in whatever order; what it raises ends the rest.
    UserError if transformers' generation loop fails.
    """
    numbers = uniforms(seeds, max_new_tokens) if temperature != 0 else None
    longest = max(map(len, prompts)) + max_new_tokens
    blocks = (-(-longest // PAGE) + 1) * min(batch_size, len(prompts))
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=sorted(stop_ids), pad_token_id=pad_id
    )
    settings = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=blocks,
        max_batch_tokens=max(max(map(len, prompts)), batch_size),
        max_requests_per_batch=min(batch_size, len(prompts)),
        allow_block_sharing=False,
        use_async_batching=False,  # the position of a token must be known when it is chosen
        use_cuda_graph=False,  # the choice looks things up, which a captured graph could not
    )
    attention, was_training = model.config._attn_implementation, model.training
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu:
        model.set_attn_implementation("sdpa")
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=settings)
    choice = _Choice(prompts, max_new_tokens, temperature, numbers, detail)
    manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([choice]))
    manager.logit_processor.tensors_required = 1
    try:
        manager.start()
        return _collect(manager, prompts, max_new_tokens, stop_ids, choice, answered)
    finally:
        manager.stop(block=True)
        manager.destroy()
        model.set_attn_implementation(attention)
        model.train(was_training)


def _collect(manager, prompts, max_new_tokens, stop_ids, choice: _Choice, answered) -> list[Rollout]:
    for row, prompt in enumerate(prompts):
        manager.add_request(prompt, request_id=str(row), max_new_tokens=max_new_tokens, eos_token_id=sorted(stop_ids))
    results: dict[int, Rollout] = {}
    while len(results) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                cause = manager.background_thread_status.fatal_error
                raise UserError(f"continuous batching stopped ({cause}); use the backend native")
            continue
        if result.error is not None:
            raise UserError(f"continuous batching failed for prompt {result.request_id}: {result.error}")
        if result.is_finished():
            row = int(result.request_id)
            results[row] = _rollout(row, list(result.generated_tokens), stop_ids, choice)
            answered(row, results[row])
    return [results[row] for row in range(len(prompts))]


def _rollout(row: int, tokens: list[int], stop_ids: set[int], choice: _Choice) -> Rollout:
    finish = "stop" if tokens[-1] in stop_ids else "length"
    if not choice.detail:
        return Rollout(tokens, finish)
    noted = [choice.noted[row * choice.room + t] for t in range(len(tokens))]
    return Rollout(tokens, finish, [p for p, _ in noted], [m for _, m in noted])
