"""Sampled answers and pass@k by the unbiased estimator (Chen et al. 2021, equation 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import comb
from typing import Any

from grafting.evaluation.suites import Decoding, Suite, cut_at
from grafting.rollouts import generate
from grafting.rollouts.sampling import example_seed
from grafting.rollouts.scoring import verdict
from grafting.tasks import scorers


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of n samples drawn without replacement hold a right one."""
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {correct} right ones among {n} samples is not defined")
    return float(1 - Fraction(comb(n - correct, k), comb(n, k)))


def sample(
    model: Any, suites: Sequence[Suite], decoding: Decoding, settings: Mapping[str, Any], counter: Any
) -> list[dict[str, Any]]:
    """settings["n"] sampled answers per example of every generated suite of new tasks, scored.

    Sample s of an example has the seed of (s, id), so that it depends on neither batch nor order.
    """
    rows = []
    for suite in suites:
        if suite.role != "new" or suite.letters is not None:
            continue
        pairs = [(e, prompt, s) for e, prompt in zip(suite.examples, suite.prompts) for s in range(settings["n"])]
        rollouts = generate(
            model,
            [prompt for _, prompt, _ in pairs],
            max_new_tokens=decoding.max_new_tokens,
            stop_ids=decoding.stop_ids,
            pad_id=decoding.pad_id,
            temperature=settings["temperature"],
            top_p=settings["top_p"],
            seeds=[example_seed(s, 0, e["id"]) for e, _, s in pairs],
            batch_size=decoding.batch_size,
            counter=counter,
        )
        stops = suite.info.get("stops", ())
        texts = [cut_at(decoding.text(rollout.tokens), stops, rollout.finish) for rollout in rollouts]
        scorers.prepare(suite.info, [(e, text) for (e, _, _), (text, _) in zip(pairs, texts, strict=True)])
        for (e, _, s), (text, finish) in zip(pairs, texts, strict=True):
            correct, reason = verdict(suite.info, e, text, finish)
            rows.append(
                {
                    "id": e["id"],
                    "task": e["task"],
                    "sample": s,
                    "text": text,
                    "correct": bool(correct),
                    "reason": reason,
                    "finish": finish,
                }
            )
    return rows


def add_pass_at_k(scores: list[dict[str, Any]], rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    """Adds {"samples": {n, temperature, top_p, "pass@k"...}} to the score of every task that was sampled."""
    right: dict[str, dict[str, int]] = {}
    for row in rows:
        of_task = right.setdefault(row["task"], {})
        of_task[row["id"]] = of_task.get(row["id"], 0) + row["correct"]
    for score in scores:
        found = right.get(score["task"])
        if score["suite"] != "new" or not found:
            continue
        score["samples"] = {key: settings[key] for key in ("n", "temperature", "top_p")} | {
            f"pass@{k}": sum(pass_at_k(settings["n"], c, k) for c in found.values()) / len(found) for k in settings["k"]
        }
