"""Tool use: ToolAlpaca (tangqiaoyu/ToolAlpaca). Several calls in order, as JSON.

With train_data.json among the files, training examples are its instances and tests are the evaluation queries: the
data set's own split. Without it the evaluation queries are split by tool, which info.json calls non-standard;
their answers carry no thoughts, and none are invented.
"""

import hashlib
import json
from collections import Counter

from grafting.errors import UserError
from grafting.tasks.building import cut, in_hash_order, make_example, take_options, write_folder
from grafting.tasks.sources import read_sources
from grafting.tasks.tool_calls import MARK, decode_arguments

FOLDER = "toolalpaca"
TRAIN, EVALUATION = "train_data.json", ("eval_real.json", "eval_simulated.json")
FIELDS = {"Name", "NLDocumentation", "Function_Description"}

# Prompt form after SDFT; the wording around the format is ours. getDetails is ToolAlpaca's own tool: it stands in
# reference answers and in no tool's documentation.
FORMAT = {
    "prompt": (
        "You can call these tools:\n{tools}\n\nUse the following format:\n"
        "Thought: what to do next\nAction: the name of one tool\nAction Input: its arguments as a JSON object\n"
        "If several calls are needed, repeat Action and Action Input in the order of the calls. "
        "Write ${{name from tool}} for a value that only the result of an earlier call gives.\n\n"
        "Begin!\nQuestion: {question}"
    ),
    "ask_user": (
        "getDetails: ask the user for information that is missing and needed.\n"
        'Parameters: {"Question": "Required. string. What to ask."}'
    ),
    "demonstration_prompt": (
        "{question}\n\nThis is an example for a response to the question:\n{demonstration}\n\n"
        "Now answer with a response of your own, including the thinking process:"
    ),
}
FREE = {"getDetails": ["Question"]}


def _read(name: str, data: bytes) -> list[dict]:
    try:
        tools = json.loads(data)
    except ValueError as error:
        raise UserError(f"{FOLDER}/{name}: not valid JSON ({error})") from None
    if not isinstance(tools, list) or not tools:
        raise UserError(f"{FOLDER}/{name}: expected a list of tools")
    return tools


def _reference(where: str, calls: list[dict]) -> tuple[list[dict], str]:
    """The calls as scorer tool_calls wants them, and their type: literal | placeholders | not JSON."""
    found, kind = [], "literal"
    if not calls:
        raise UserError(f"{where}: the reference answer holds no call")
    for call in calls:
        if set(call) != {"Action", "Action_Input"} or not call["Action"].strip():
            raise UserError(f"{where}: a call must have Action and Action_Input, got {sorted(call)}")
        arguments = decode_arguments(call["Action_Input"])
        if arguments is None:
            kind = "not JSON"
            found.append({"action": call["Action"], "raw": call["Action_Input"]})
            continue
        if kind == "literal" and json.dumps(MARK) in json.dumps(arguments):
            kind = "placeholders"
        found.append({"action": call["Action"], "arguments": arguments})
    return found, kind


def _documentation(tool: dict, form: dict) -> str:
    return f"{form['ask_user']}\n{tool['NLDocumentation'].strip()}"


def _response(calls: list[dict]) -> str:
    """The reference as a response: calls only, no invented thought."""
    return "\n".join(f"Action: {call['Action']}\nAction Input: {call['Action_Input']}" for call in calls)


def _queries(name: str, tools: list[dict], form: dict):
    """(tool's name, type of its arguments, example) of every evaluation query."""
    for number, tool in enumerate(tools, 1):
        where = f"{FOLDER}/{name}, tool {number} ({tool.get('Name')})"
        if missing := (FIELDS | {"Instructions", "Golden_Answers"}) - set(tool):
            raise UserError(f"{where}: missing field {sorted(missing)}")
        if len(tool["Instructions"]) != len(tool["Golden_Answers"]):
            raise UserError(
                f"{where}: {len(tool['Instructions'])} instructions for {len(tool['Golden_Answers'])} answers"
            )
        for i, (question, calls) in enumerate(zip(tool["Instructions"], tool["Golden_Answers"], strict=True), 1):
            if not question.strip():
                raise UserError(f"{where}, query {i}: the instruction is empty")
            reference, kind = _reference(f"{where}, query {i}", calls)
            yield tool["Name"], kind, _example(tool, question, reference, _response(calls), form)


def _example(tool: dict, question: str, reference: list[dict], response: str, form: dict) -> dict:
    content = form["prompt"].format(tools=_documentation(tool, form), question=question.strip())
    answer = json.dumps(reference, ensure_ascii=False, sort_keys=True)
    kind = "one call" if len(reference) == 1 else "several calls"
    messages = [{"role": "user", "content": content}]
    return make_example("tooluse", messages, answer, {"expert": response}, subject=kind)


def _instances(tools: list[dict], form: dict, counts: Counter):
    """Training examples: the thoughts and calls that the data set holds. Rules and counts as in its own script:
    at most five steps, not only questions back to the user; instances without steps have nothing to learn."""
    for tool in tools:
        if not tool.get("Function_Description") or not tool.get("NLDocumentation"):
            counts["tools_without_documentation"] += 1
            continue
        for instance in tool.get("Instances", []):
            steps = instance.get("intermediate_steps") or []
            actions = [step[0][0] for step in steps]
            if not steps or len(steps) > 5 or set(actions) == {"getDetails"}:
                counts["instances_left_out"] += 1
                continue
            reference = []
            for action, given, _ in (step[0] for step in steps):
                arguments = decode_arguments(given if isinstance(given, str) else json.dumps(given))
                known = {"arguments": arguments} if arguments is not None else {"raw": str(given)}
                reference.append({"action": action, **known})
            response = "\n".join(step[0][2].strip() for step in steps)
            question = instance["input"].rsplit("\nHint: ", 1)[0]
            yield _example(tool, question, reference, response, form)


def _by_tool(queries: list[tuple[str, str, dict]], sizes: dict[str, int], seed: int) -> dict[str, list[dict]]:
    """Whole tools per split, in the order of the hash of (seed, tool); test is filled first, then val."""
    by_tool: dict[str, list[dict]] = {}
    for tool, _, example in queries:
        by_tool.setdefault(tool, []).append(example)
    tools = sorted(by_tool, key=lambda tool: hashlib.sha256(f"{seed}:{tool}".encode()).hexdigest())
    splits: dict[str, list[dict]] = {"test": [], "val": [], "train": []}
    for tool in tools:
        name = next((n for n in ("test", "val") if len(splits[n]) < sizes[n]), "train")
        splits[name] += by_tool[tool]
    for name, wanted in sizes.items():
        if len(splits[name]) < wanted:
            found = {split: len(examples) for split, examples in splits.items()}
            raise UserError(f"task tooluse: {sizes} items asked for; whole tools per split give {found}: ask for fewer")
        splits[name] = in_hash_order(splits[name], seed)[:wanted]
    return splits


def build(spec: dict, out) -> None:
    """Train, val and test. With the training file: its instances, and the evaluation queries cut into val and test."""
    sizes = {"train_items": int, "val_items": int, "test_items": int}
    options = take_options(spec, {**sizes, "seed": int, "files": list}, {"format": {}})
    if unknown := set(options["format"]) - set(FORMAT):
        raise UserError(f"task tooluse: unknown option format.{sorted(unknown)}; known are {sorted(FORMAT)}")
    form, seed = {**FORMAT, **options["format"]}, options["seed"]
    contents = {name: _read(name, data) for name, data in sorted(read_sources(FOLDER, options["files"]).items())}
    queries = [q for name in EVALUATION if name in contents for q in _queries(name, contents[name], form)]
    wanted = {name: options[f"{name}_items"] for name in ("test", "val", "train")}
    kinds, counts = Counter(kind for _, kind, _ in queries), Counter()
    if TRAIN in contents:
        tested = list({e["id"]: e for _, _, e in queries}.values())
        splits = cut(tested, {name: wanted[name] for name in ("test", "val")}, seed, "task tooluse")
        asked = {e["messages"][-1]["content"] for e in tested}
        trained = {
            e["id"]: e for e in _instances(contents[TRAIN], form, counts) if e["messages"][0]["content"] not in asked
        }
        splits |= cut(list(trained.values()), {"train": wanted["train"]}, seed, "task tooluse")
        notes = ["ToolAlpaca's own split: its instances train, its evaluation queries test"]
    else:
        splits = _by_tool(queries, wanted, seed)
        notes = [
            "non-standard split: the 214 evaluation queries are split by tool, since the training file is not there",
            "the reference answers carry no thoughts; none are invented",
        ]
    notes += [
        "${...} in a reference matches any value; what getDetails asks may be worded freely",
        f"{kinds['not JSON']} references are no JSON and are compared as text",
    ]
    calls = Counter(e["subject"] for _, _, e in queries)
    info = {
        "name": "tooluse",
        "role": "new",
        "kind": "skill",
        "scorer": "tool_calls",
        "scorer_options": {"free": FREE},
        "demonstration_prompt": form["demonstration_prompt"],
        "styles": ["expert"],
        "counts": {
            "read": len(queries),
            "tools": len({tool for tool, _, _ in queries}),
            "one_call": calls["one call"],
            "several_calls": calls["several calls"],
            "arguments_literal": kinds["literal"],
            "arguments_with_placeholders": kinds["placeholders"],
            "arguments_not_json": kinds["not JSON"],
            **dict(sorted(counts.items())),
        },
        "notes": notes,
    }
    write_folder(out, info, {name: splits[name] for name in ("train", "val", "test")})
