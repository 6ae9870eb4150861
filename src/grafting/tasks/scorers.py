"""Scorers: from a response text to a verdict and its reason. Whether it was cut off, the caller knows.

Text scorers live here. Those that need more (a JSON decoder, a judge, a process of their own, a user's file) are
modules of their own, resolved by name: a change in one of them leaves the results of the others as they are.
"""

import re
import sys
from importlib import import_module

from grafting.errors import UserError

#: name -> module of this package and function (text, example, options) -> (correct, reason).
RESOLVED = {
    "tool_calls": "tool_calls:compare",
    "judge": "judge:ask",
    "code": "code_execution:check",
    "python": "custom_scorer:run",
}


#: The reason given where the scorer itself raised.
FAILED = "scorer failed"


def score(info: dict, example: dict, text: str) -> tuple[bool, str]:
    """Score one response by info["scorer"].

    Reasons: "correct", "wrong", "no answer found", and what the scorer's own text names. A scorer that raises
    gives "scorer failed" and names the item on standard error: one odd response must not end a study.
    info["scorer_options"]["thinking"] = [open, close]: only what follows the last close tag is scored.
    UserError: unknown scorer, or what a user must mend (no judge, ...).
    """
    name, options = info.get("scorer"), info.get("scorer_options") or {}
    if name not in ANSWERS and name not in RESOLVED:
        known = sorted({*ANSWERS, *RESOLVED})
        raise UserError(f"data {info.get('name')}: unknown scorer {name!r}; known are {known}")
    visible = without_thinking(text, options["thinking"]) if options.get("thinking") else text
    if visible is None:
        return False, "no answer found"
    try:
        if name in RESOLVED:
            module, _, function = RESOLVED[name].partition(":")
            return getattr(import_module(f"grafting.tasks.{module}"), function)(visible, example, options)
        return ANSWERS[name](visible, example, options)
    except UserError:
        raise
    except Exception as error:
        item = f"example {example.get('id')} of {info.get('name')}"
        print(f"scorer {name} failed on {item}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return False, FAILED


def module_of(scorer: str) -> str | None:
    """The module that a scorer is resolved from, for code digests; None for text scorers."""
    return f"grafting.tasks.{RESOLVED[scorer].partition(':')[0]}" if scorer in RESOLVED else None


def prepare(info: dict, answers: list[tuple[dict, str]]) -> None:
    """Tell a slow scorer which (example, text) pairs come, so that it can work on several at once."""
    if info.get("scorer") == "judge":
        # by name, as the other scorers: a change in it leaves studies without a judge as they are
        judge = import_module(f"grafting.tasks.{RESOLVED['judge'].partition(':')[0]}")
        options = info.get("scorer_options") or {}
        thinking = options.get("thinking")
        seen = [(e, without_thinking(text, thinking) if thinking else text) for e, text in answers]
        judge.ask_all([(example, text) for example, text in seen if text is not None], options)


def without_thinking(text: str, tags: list[str]) -> str | None:
    """What follows the last close tag; None if thinking was opened and never closed."""
    opened, closed = tags
    head, found, rest = text.rpartition(closed)
    if found:
        return rest
    return None if opened in text else text


def _compared(found: str | None, answer: str) -> tuple[bool, str]:
    if found is None:
        return False, "no answer found"
    return (True, "correct") if found == answer else (False, "wrong")


def tokens(text: str, example: dict, options: dict) -> tuple[bool, str]:
    """Whitespace tokens without those in options["ignore"] (markers of a style), joined by one space."""
    ignore = set(options.get("ignore", ()))
    return _compared(" ".join(word for word in text.split() if word not in ignore) or None, example["answer"])


def letter(text: str, example: dict, options: dict) -> tuple[bool, str]:
    """The letter of the last <answer>X</answer>; only a single letter counts as an answer."""
    found = re.findall(r"<answer>\s*([A-Za-z])\s*</answer>", text)
    return _compared(found[-1].upper() if found else None, example["answer"])


def option(text: str, example: dict, options: dict) -> tuple[bool, str]:
    """The chosen option (of the highest log-likelihood), as the evaluation found it."""
    return _compared(text.strip() or None, example["answer"])


def tagged(text: str, example: dict, options: dict) -> tuple[bool, str]:
    """The last <answer>...</answer>: a single letter by letter, anything else by its text without white space."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if not found or not found[-1].strip():
        return False, "no answer found"
    given, wanted = "".join(found[-1].split()), "".join(example["answer"].split())
    if len(wanted) == 1 and wanted.isalpha():
        given, wanted = given.upper(), wanted.upper()
        if len(given) != 1 or not given.isalpha():
            return False, "no answer found"
    return _compared(given, wanted)


def normal(text: str, options: dict) -> str:
    """White space collapsed; with options["ignore_case"] folded, with options["ignore_punctuation"] words only."""
    if options.get("ignore_punctuation"):
        text = re.sub(r"[^\w\s]", " ", text)
    text = " ".join(text.split())
    return text.casefold() if options.get("ignore_case") else text


def exact(text: str, example: dict, options: dict) -> tuple[bool, str]:
    """The whole response equals the answer, or one of several if the answer is a list; see `normal`.

    options["lenient"]: also correct if the answer stands in the response as whole words. Without it such a
    response has the reason "contains the answer", so that both accuracies can be read from one run.
    """
    given = normal(text, options)
    if not given:
        return False, "no answer found"
    answers = example["answer"] if isinstance(example["answer"], list) else [example["answer"]]
    wanted = [normal(answer, options) for answer in answers]
    if given in wanted:
        return True, "correct"
    if any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", given) for answer in wanted):
        return bool(options.get("lenient")), "contains the answer"
    return False, "wrong"


NUMBER = re.compile(
    r"(?<![\w.,])[-+\u2212]?(?:\d{1,3}(?:[,\u00a0\u202f']\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:\s?(?:[eE]|[x\u00d7*]\s?10\s?\^?)\s?\{?[-+\u2212]?\d+\}?)?"
)


def to_number(text: str) -> float:
    """The value of one match of `NUMBER`: thousands separators dropped, `3 x 10^4` and the minus sign understood."""
    plain = re.sub(r"[,\u00a0\u202f'\s{}^]", "", text).replace("\u2212", "-")
    return float(re.sub(r"[x\u00d7*]10|E", "e", plain))


def numeric(text: str, example: dict, options: dict) -> tuple[bool, str]:
    """The last number of the response (of its last <answer> if it has one) against the reference.

    options: "relative" and "absolute" tolerance (default 0: equal), "units" {unit: factor to the first unit}.
    With units, a number without one counts in the first unit, and another word behind it is "wrong unit".
    """
    boxed = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    found = list(NUMBER.finditer(boxed[-1] if boxed else text))
    if not found:
        return False, "no answer found"
    given, reference = found[-1], NUMBER.search(str(example["answer"]))
    if reference is None:
        raise ValueError(f"the reference {example['answer']!r} holds no number")
    units = options.get("units")
    value, wanted = to_number(given.group()), to_number(reference.group())
    if units:
        factors = [_factor(match, units) for match in (given, reference)]
        if None in factors:
            return False, "wrong unit"
        value, wanted = value * factors[0], wanted * factors[1]
    margin = max(options.get("absolute", 0.0), options.get("relative", 0.0) * abs(wanted))
    return (True, "correct") if abs(value - wanted) <= margin else (False, "wrong")


def _factor(match: re.Match, units: dict[str, float]) -> float | None:
    """Factor of the unit behind a number; the first unit's if no word follows, None for an unknown one."""
    unit = re.match(r"\s?([A-Za-z\u00b5\u03bc%\u00b0][\w/^\u00b7.%\u00b0-]*)", match.string[match.end() :])
    if unit is None:
        return next(iter(units.values()))
    return units.get(unit.group(1).rstrip(".-"))


def regex(text: str, example: dict, options: dict) -> tuple[bool, str]:
    """The last match of options["pattern"] (its group 1, if it has one) equals the answer; see `normal`."""
    found = [m.group(1 if m.re.groups else 0) for m in re.finditer(options["pattern"], text, re.DOTALL)]
    if not found or not found[-1].strip():
        return False, "no answer found"
    return _compared(normal(found[-1], options), normal(str(example["answer"]), options))


ANSWERS = {
    "tokens": tokens,
    "letter": letter,
    "options": option,
    "tagged": tagged,
    "exact": exact,
    "numeric": numeric,
    "regex": regex,
}
