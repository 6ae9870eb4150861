"""Scorers: from a response text to (correct, reason). Whether it was cut off, the caller knows."""

import re

from grafting.errors import UserError


def score(info: dict, example: dict, text: str) -> tuple[bool, str]:
    """Score one response by info["scorer"]; reason is "correct", "wrong" or "no answer found"."""
    name = info.get("scorer")
    if name not in SCORERS:
        raise UserError(f"data {info.get('name')}: unknown scorer {name!r}; known are {sorted(SCORERS)}")
    found = SCORERS[name](text, example, info.get("scorer_options") or {})
    if found is None:
        return False, "no answer found"
    correct = found == example["answer"]
    return correct, "correct" if correct else "wrong"


def tokens(text: str, example: dict, options: dict) -> str | None:
    """Whitespace tokens without those in options["ignore"] (markers of a style), joined by one space."""
    ignore = set(options.get("ignore", ()))
    return " ".join(word for word in text.split() if word not in ignore) or None


def letter(text: str, example: dict, options: dict) -> str | None:
    """The letter of the last <answer>X</answer>; only a single letter counts as an answer."""
    found = re.findall(r"<answer>\s*([A-Za-z])\s*</answer>", text)
    return found[-1].upper() if found else None


def option(text: str, example: dict, options: dict) -> str | None:
    """The chosen option (of the highest log-likelihood), as the evaluation found it."""
    return text.strip() or None


SCORERS = {"tokens": tokens, "letter": letter, "options": option}
