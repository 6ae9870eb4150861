"""Suites: a data folder made ready for one tokenizer once, then scored on any number of live models.

Two kinds. *Generation* suites decode greedily (through `grafting.rollouts`) and hand the text to the
task's scorer. *Option* suites (scorer "options") take the option letter with the largest next-token
logit, so that no answer can fail to parse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from grafting.errors import UserError
from grafting.models import chat
from grafting.rollouts import generate
from grafting.rollouts.scoring import verdict
from grafting.tasks import load_examples, load_info, scorers

Prediction = dict[str, Any]  # id, task, text, correct, reason, finish: one line of <pointkey>.jsonl.gz


@dataclass(frozen=True)
class Suite:
    """One split of one data folder, encoded.

    role: "prior" or "new"; prompts: token ids per example, ending where the answer begins;
    letters: for option suites, per example the token id of each option letter; else None.
    """

    role: str
    info: Mapping[str, Any]
    split: str
    examples: Sequence[Mapping[str, Any]]
    prompts: Sequence[list[int]]
    letters: Sequence[Sequence[int]] | None = None


@dataclass
class Decoding:
    """What decoding needs besides the model. `texts` remembers decoded answers: points repeat each other."""

    tokenizer: Any
    stop_ids: set[int]
    pad_id: int
    batch_size: int
    max_new_tokens: int
    texts: dict[tuple[int, ...], str] = field(default_factory=dict)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of answer tokens, without end tokens."""
        key = tuple(tokens)
        if key not in self.texts:
            self.texts[key] = chat.decode(self.tokenizer, list(tokens))
        return self.texts[key]


def load_suite(folder: Path, split: str, tokenizer: Any) -> Suite:
    """Reads and encodes one split of a data folder. UserError when it is missing or empty."""
    info, examples = load_info(folder), load_examples(folder, split)
    if info["scorer"] != "options":
        prompts = [chat.encode_prompt(tokenizer, example["messages"], example["id"]) for example in examples]
        return Suite(info["role"], info, split, examples, prompts)
    count = max(len(example["options"]) for example in examples)
    lead, ids = option_tokens(tokenizer, examples[0]["messages"], count)
    prompts = [chat.encode_prompt(tokenizer, example["messages"], example["id"]) + lead for example in examples]
    letters = [ids[: len(example["options"])] for example in examples]
    return Suite(info["role"], info, split, examples, prompts, letters)


def option_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]], count: int) -> tuple[list[int], list[int]]:
    """How the first `count` option letters are written as an answer: (shared leading ids, one id per letter).

    Some tokenizers or templates open every answer with the same tokens (a lone space mark, an empty
    thinking block): those belong to the prompt. The ids after them must differ from letter to letter.
    """
    letters = ascii_uppercase[:count]
    answers = [chat.encode_example(tokenizer, messages, letter)[1] for letter in letters]
    shared = 0
    while all(len(answer) > shared + 1 for answer in answers) and len({answer[shared] for answer in answers}) == 1:
        shared += 1
    ids = [answer[shared] for answer in answers]
    if len(set(ids)) != count:
        raise UserError(
            f"the tokenizer does not give the option letters {', '.join(letters)} one token each "
            f"(it gives the ids {ids}), so options cannot be compared by a next-token logit; "
            "use a prior suite that is scored by generation with this model"
        )
    return list(answers[0][:shared]), ids


def predict(
    model: Any,
    suites: Sequence[Suite],
    decoding: Decoding,
    counter: Any,
    progress: Callable[[int], object] = lambda answers: None,
    part: Callable[[str], Any] = lambda name: None,
) -> list[list[Prediction]]:
    """The predictions of every suite, in example order. All generated answers come from one generate call.

    `progress(n)` is told when n more examples are answered. `part(name)` gives the finished pieces of a part
    (`grafting.provenance.saving.Part`), so that an interrupted evaluation goes on after its last batch.
    """
    generated = [suite for suite in suites if suite.letters is None]
    rollouts = iter(
        generate(
            model,
            [prompt for suite in generated for prompt in suite.prompts],
            max_new_tokens=decoding.max_new_tokens,
            stop_ids=decoding.stop_ids,
            pad_id=decoding.pad_id,
            batch_size=decoding.batch_size,
            counter=counter,
            progress=progress,
            finished=part("generated"),
        )
        if generated
        else ()
    )
    return [
        _score_generated(suite, rollouts, decoding.text)
        if suite.letters is None
        else _score_options(suite, model, decoding, counter, progress, part(f"options {place}"))
        for place, suite in enumerate(suites)
    ]


def _score_generated(suite: Suite, rollouts: Any, text_of: Callable[[Sequence[int]], str]) -> list[Prediction]:
    """Scores the next len(suite.examples) rollouts; a wrong answer cut by the length limit is "truncated"."""
    stops = suite.info.get("stops", ())
    answers = []
    for example in suite.examples:
        rollout = next(rollouts)
        answers.append((example, *cut_at(text_of(rollout.tokens), stops, rollout.finish)))
    scorers.prepare(suite.info, [(example, text) for example, text, _ in answers])
    return [
        _prediction(example, text, *verdict(suite.info, example, text, finish), finish)
        for example, text, finish in answers
    ]


def cut_at(text: str, stops: Sequence[str], finish: str) -> tuple[str, str]:
    """The text before the first of the format's stop strings, and "stop_string" if one was found, else as it ended.

    Stops belong to a format (info.json): those of a base model's code would cut a chat model's answer short.
    """
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], "stop_string") if places else (text, finish)


def _score_options(
    suite: Suite, model: Any, decoding: Decoding, counter: Any, progress: Callable[[int], object], finished: Any
) -> list[Prediction]:
    """Argmax of the next-token logit over each example's option letters."""
    predictions: list[Prediction | None] = [None] * len(suite.examples)
    order = sorted(range(len(suite.examples)), key=lambda i: len(suite.prompts[i]))
    for start in range(0, len(order), decoding.batch_size):
        rows = order[start : start + decoding.batch_size]
        known = None if finished is None else finished.get(str(start))
        letters = known
        if known is None:
            logits = _next_token_logits(model, [suite.prompts[i] for i in rows], decoding.pad_id)
            letters = [ascii_uppercase[int(logits[row, list(suite.letters[i])].argmax())] for row, i in enumerate(rows)]
        counter.add(tokens_generated=0, tokens_forwarded=sum(len(suite.prompts[i]) for i in rows))
        for chosen, i in zip(letters, rows, strict=True):
            example = suite.examples[i]
            correct = chosen == example["answer"]
            predictions[i] = _prediction(example, chosen, correct, "correct" if correct else "wrong", "option")
        progress(len(rows))
        if finished is not None and known is None:
            finished.add(str(start), letters, f"answer {start + len(rows)} of {len(order)}")
    return predictions


def _next_token_logits(model: Any, prompts: Sequence[list[int]], pad_id: int) -> Any:
    """float32 logits [len(prompts), V] after the last token of each prompt (right padding, causal)."""
    import torch

    from grafting.models.forward import completion_logits

    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.long)
    wanted = torch.zeros((len(prompts), longest), dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        wanted[row, len(prompt) - 1] = True
    device = next(model.parameters()).device
    with torch.inference_mode():
        return completion_logits(model, ids.to(device), wanted.to(device)).float()


def _prediction(example: Mapping[str, Any], text: str, correct: bool, reason: str, finish: str) -> Prediction:
    return {
        "id": example["id"],
        "task": example["task"],
        "text": text,
        "correct": bool(correct),
        "reason": reason,
        "finish": finish,
    }


def summarise(suite: Suite, predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Scores per task (per skill of a prior suite), in order of first appearance."""
    kinds = suite.info.get("skills", {})
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(prediction["task"], []).append(prediction)
    return [
        {
            "suite": suite.role,
            "task": task,
            "kind": kinds.get(task, suite.info["kind"]),
            "split": suite.split,
            "n": len(rows),
            "correct": sum(row["correct"] for row in rows),
            "reasons": dict(sorted(Counter(row["reason"] for row in rows).items())),
            "finish": dict(sorted(Counter(row["finish"] for row in rows).items())),
        }
        | _by_subject(suite, rows)
        for task, rows in groups.items()
    ]


def _by_subject(suite: Suite, rows: Sequence[Prediction]) -> dict[str, Any]:
    """{"subjects": {subject: {n, correct, reasons}}} where the examples have one: forms of questions, fields."""
    subjects = {example["id"]: example.get("subject") for example in suite.examples}
    if suite.letters is not None or not all(subjects.values()):
        return {}
    found: dict[str, list[Prediction]] = {}
    for row in rows:
        found.setdefault(subjects[row["id"]], []).append(row)
    return {
        "subjects": {
            subject: {
                "n": len(part),
                "correct": sum(row["correct"] for row in part),
                "reasons": dict(sorted(Counter(row["reason"] for row in part).items())),
            }
            for subject, part in sorted(found.items())
        }
    }
