"""Responses of a model to a task's examples, each with its verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from grafting.models.chat import decode, encode_prompt, stop_ids
from grafting.rollouts.engine import check_room, generate
from grafting.rollouts.sampling import example_seed
from grafting.tasks import demonstration_messages, scorers


@dataclass(frozen=True)
class Response:
    """One response: example id, rendered prompt, text, token ids, how it ended, verdict and its reason."""

    id: str
    prompt: str
    text: str
    tokens: list[int]
    finish: str  # "stop" | "length"
    correct: bool
    reason: str  # the scorer's reason; "truncated" for a wrong response that was cut by the length limit
    logprobs: list[float] | None = None  # of its tokens under the sampler, where they were asked for


def verdict(info: dict, example: dict, text: str, finish: str) -> tuple[bool, str]:
    """Correctness of a response and the reason."""
    correct, reason = scorers.score(info, example, text)
    return correct, "truncated" if finish == "length" and not correct and reason != scorers.FAILED else reason


def prompt_ids(tokenizer, info: dict, example: dict, style: str | None) -> list[int]:
    """Prompt of an example; with a style, the prompt that shows the demonstration in this style."""
    messages = example["messages"] if style is None else demonstration_messages(example, info, style)
    return encode_prompt(tokenizer, messages, example["id"])


def respond(
    model,
    tokenizer,
    info: dict,
    examples: list[dict],
    *,
    max_new_tokens: int,
    batch_size: int,
    style: str | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    step: int = 0,
    counter=None,
    progress=None,
    finished=None,
    detail: bool = False,
    backend: str = "native",
) -> list[Response]:
    """Let the model answer the examples (greedily by default) and score the answers.

    `style` None asks plainly; a style shows the demonstration in the prompt. At a temperature every example
    has the seed `example_seed(seed, step, id)`. `counter`, `progress`, `finished`, `detail`, `backend`: see
    `generate`. UserError naming the example that does not fit the context.
    """
    prompts = [prompt_ids(tokenizer, info, example, style) for example in examples]
    for example, prompt in zip(examples, prompts, strict=True):
        check_room(model, len(prompt), max_new_tokens, f"example {example['id']} of {info['name']}")
    rollouts = generate(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids(model, tokenizer),
        pad_id=tokenizer.pad_token_id or 0,
        temperature=temperature,
        seeds=[example_seed(seed, step, example["id"]) for example in examples],
        batch_size=batch_size,
        counter=counter,
        progress=progress,
        finished=finished,
        detail=detail,
        backend=backend,
    )
    responses = []
    for example, prompt, rollout in zip(examples, prompts, rollouts, strict=True):
        text = decode(tokenizer, rollout.tokens)
        correct, why = verdict(info, example, text, rollout.finish)
        shown = tokenizer.decode(prompt)
        responses.append(
            Response(example["id"], shown, text, rollout.tokens, rollout.finish, correct, why, rollout.logprobs)
        )
    return responses


def accuracy(responses: list[Response]) -> float:
    """Share of correct responses."""
    return sum(response.correct for response in responses) / len(responses)


def summary(responses: list[Response]) -> dict:
    """Accuracy with its n, and counts of finish reasons and of the scorer's reasons."""
    return {
        "accuracy": accuracy(responses),
        "n": len(responses),
        "finish": dict(sorted(Counter(response.finish for response in responses).items())),
        "reasons": dict(sorted(Counter(response.reason for response in responses).items())),
    }
