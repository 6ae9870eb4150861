"""Tool calls in ReAct form: read with a real JSON decoder, compared by action, type and value, in order.

Some reference answers hold `${name from tool}`: a value that only an earlier call's result would give. Such a
placeholder is read as a value of its own kind. In a reference it matches every value; in a prediction it matches
only a placeholder, since it says nothing that a tool could be called with.
"""

import json
import re
from dataclasses import dataclass

ACTION = re.compile(r"^[ \t]*Action[ \t]*:[ \t]*(.*)$", re.MULTILINE)
INPUT = re.compile(r"^[ \t]*Action[ _]Input[ \t]*:[ \t]*", re.MULTILINE)
MARK = "\u0000placeholder\u0000"


@dataclass(frozen=True)
class Call:
    """One call; `arguments` is None where what stands there is no JSON object (`raw` then tells)."""

    action: str
    arguments: dict | None
    raw: str


def find_placeholders(text: str) -> str:
    """JSON text with every `${...}` that stands outside of a string replaced by a marked string."""
    out, i, inside = [], 0, False
    while i < len(text):
        char = text[i]
        if inside:
            out.append(text[i : i + 2] if char == "\\" else char)
            i += 2 if char == "\\" else 1
            inside = char != '"'
        elif text.startswith("${", i) and "}" in text[i:]:
            i = text.index("}", i) + 1
            out.append(json.dumps(MARK))
        else:
            out.append(char)
            inside = char == '"'
            i += 1
    return "".join(out)


def decode_arguments(text: str) -> dict | None:
    """The JSON object that `text` begins with, placeholders marked; None if it begins with none.

    Duplicate keys and NaN are refused: two readers of such text would not agree.
    """

    def no_duplicates(pairs: list) -> dict:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key is given twice")
        return dict(pairs)

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    decoder = json.JSONDecoder(object_pairs_hook=no_duplicates, parse_constant=no_constant)
    try:
        value, _ = decoder.raw_decode(find_placeholders(text.lstrip()))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def parse(text: str) -> list[Call]:
    """The calls of a response, in order: every `Action:` line with the `Action Input:` behind it.

    An action without an input is a call without arguments (None). Text between calls (thoughts, observations)
    is passed over.
    """
    calls, actions = [], list(ACTION.finditer(text))
    ends = [following.start() for following in actions[1:]] + [len(text)]
    for here, end in zip(actions, ends):
        behind = text[here.end() : end]
        name, found = here.group(1).strip().strip("`\"'"), INPUT.search(behind)
        raw = behind[found.end() :] if found else ""
        if not name:
            continue
        calls.append(Call(name, decode_arguments(raw) if found else None, raw.strip()))
    return calls


def same(given: object, wanted: object) -> bool:
    """Equal by JSON type and value; 1 and 1.0 are both numbers, true is not 1; the order of keys plays no part."""
    if wanted == MARK:
        return True
    if isinstance(wanted, bool) or isinstance(given, bool) or wanted is None or given is None:
        return given is wanted
    if isinstance(wanted, dict):
        return isinstance(given, dict) and set(given) == set(wanted) and all(same(given[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        return isinstance(given, list) and len(given) == len(wanted) and all(map(same, given, wanted))
    if isinstance(wanted, int | float):
        return isinstance(given, int | float) and given == wanted
    return isinstance(given, str) and given == wanted


def compare(text: str, example: dict, options: dict) -> tuple[bool, str]:
    """The calls of a response against example["answer"], a JSON list of {"action", "arguments" | "raw"}.

    A reference whose arguments are no JSON even with placeholders is compared as text, white space aside.
    options["free"] {action: [argument]}: arguments of free wording, where any non-empty string will do.
    Reasons: no answer found, wrong number of calls, wrong action, invalid JSON, wrong arguments, correct.
    """
    wanted, given = json.loads(example["answer"]), parse(text)
    if not given:
        return False, "no answer found"
    if len(given) != len(wanted):
        return False, "wrong number of calls"
    if [call.action for call in given] != [call["action"] for call in wanted]:
        return False, "wrong action"
    for call, reference in zip(given, wanted, strict=True):
        if "arguments" not in reference:
            if "".join(call.raw.split()) != "".join(reference["raw"].split()):
                return False, "wrong arguments"
            continue
        if call.arguments is None:
            return False, "invalid JSON"
        arguments = dict(reference["arguments"])
        for name in options.get("free", {}).get(call.action, ()):
            if name in arguments and isinstance(call.arguments.get(name), str) and call.arguments[name].strip():
                arguments[name] = call.arguments[name]
        if not same(call.arguments, arguments):
            return False, "wrong arguments"
    return True, "correct"
