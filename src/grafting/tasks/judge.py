"""A language model as judge, over an OpenAI-compatible endpoint or in this process; verdicts are kept by content.

What is asked decides a verdict's hash: this file's version, the judge's name, prompt and answer length, and question,
reference and response. Verdicts lie in verdicts/<hash of the judge>.jsonl, which a study commits: a rerun asks
nothing again, and a judge that answers differently tomorrow changes nothing that was judged today.
The endpoint's place is in no hash; a local judge's revision or hash is.
"""

import hashlib
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from grafting.errors import UserError

VERSION = 1
SETTINGS = "GRAFTING_JUDGE"
FOLDER = "GRAFTING_VERDICTS"
#: Settings that decide a verdict; the others say where and how the judge is reached.
DECIDING = ("model", "prompt", "max_tokens")
#: Generates a local judge's replies. Resolved by name: only studies with such a judge hang on that code (see
#: `grafting.plan.scoring`), and this room knows of no model.
LOCAL = "rollouts.judging"
WORD = re.compile(r"\b(INCORRECT|CORRECT)\b")

_kept: dict[Path, dict[str, str]] = {}


def deciding(settings: dict) -> dict:
    """The part of the settings that enters keys and hashes."""
    found, local = {name: settings[name] for name in DECIDING}, settings.get("local")
    if local is None:
        return found
    return {**found, "local": {key: local[key] for key in ("sha256", "hub", "revision") if local.get(key)}}


def ask(text: str, example: dict, options: dict) -> tuple[bool, str]:
    """Whether the judge calls the response right. UserError: no judge, or none that answers."""
    if not text.strip():
        return False, "no answer found"
    settings = _settings()
    verdict = _verdicts(settings).get(_hash(settings, text, example))
    if verdict is None:
        verdict = _ask_here(settings, [(text, example)])[0] if _is_local(settings) else _ask(settings, text, example)
    return verdict == "CORRECT", "correct" if verdict == "CORRECT" else "wrong"


def ask_all(answers: list[tuple[dict, str]], options: dict) -> None:
    """Have all these judged, several at once; what was judged before is not asked again."""
    settings = _settings()
    kept = _verdicts(settings)
    new = {_hash(settings, text, example): (text, example) for example, text in answers if text.strip()}
    open_ones = [pair for key, pair in new.items() if key not in kept]
    if _is_local(settings):
        _ask_here(settings, open_ones)
        return
    with ThreadPoolExecutor(max_workers=settings.get("parallel", 8)) as pool:
        futures = [pool.submit(_ask, settings, text, example) for text, example in open_ones]
        try:
            for future in futures:
                future.result()
        except UserError:
            pool.shutdown(cancel_futures=True)
            raise


def _settings() -> dict:
    given = os.environ.get(SETTINGS)
    if not given:
        raise UserError("a task is scored by a judge, but none is configured: set `judge` (model, endpoint, prompt)")
    return json.loads(given)


def _prompt(settings: dict, text: str, example: dict) -> str:
    question = next(m["content"] for m in reversed(example["messages"]) if m["role"] == "user")
    values = {"question": question, "reference": example["answer"], "response": text}
    # not str.format: responses and prompts may hold braces
    return re.sub(r"\{(question|reference|response)\}", lambda m: values[m.group(1)], settings["prompt"])


def _hash(settings: dict, text: str, example: dict) -> str:
    content = [VERSION, deciding(settings), _prompt(settings, text, example)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file(settings: dict) -> Path:
    name = hashlib.sha256(json.dumps([VERSION, deciding(settings)], sort_keys=True).encode()).hexdigest()[:12]
    return Path(os.environ.get(FOLDER, "verdicts")) / f"{name}.jsonl"


def _verdicts(settings: dict) -> dict[str, str]:
    """All verdicts of this judge by hash, read once per process; the first of two for one hash counts."""
    path = _file(settings)
    if path not in _kept:
        found: dict[str, str] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                entry = json.loads(line)
                found.setdefault(entry["hash"], entry["verdict"])
            except (ValueError, KeyError):
                continue  # the last line of a process that was killed while it wrote
        _kept[path] = found
    return _kept[path]


def _is_local(settings: dict) -> bool:
    return settings.get("local") is not None


def _ask(settings: dict, text: str, example: dict) -> str:
    reply, verdict = _verdict(settings, _prompt(settings, text, example), str(example.get("id")))
    return _keep(settings, text, example, reply, verdict)


def _ask_here(settings: dict, pairs: list[tuple[str, dict]]) -> list[str]:
    """Verdicts of a model in this process. It is asked greedily, so asking again would change nothing."""
    judging = import_module(f"grafting.{LOCAL}")
    prompts = [_prompt(settings, text, example) for text, example in pairs]
    found, silent = [], ""
    for (text, example), reply in zip(
        pairs, judging.replies(prompts, settings["local"], settings["max_tokens"]), strict=True
    ):
        words = set(WORD.findall(reply))
        if len(words) == 1:
            found.append(_keep(settings, text, example, reply, words.pop()))
        else:
            silent = silent or f"example {example.get('id')}: {reply[:80]!r}"
    if silent:
        raise UserError(
            f"the judge {settings['model']} says neither CORRECT nor INCORRECT, or both, on {silent}; take another "
            f"model or prompt: the other verdicts are kept in {_file(settings)}"
        )
    return found


def _keep(settings: dict, text: str, example: dict, reply: str, verdict: str) -> str:
    key, path = _hash(settings, text, example), _file(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"hash": key, "verdict": verdict, "reply": reply[-500:]}, ensure_ascii=True) + "\n"
    # one short write in append mode: lines of several processes do not mix
    with path.open("a+b", buffering=0) as file:
        torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        file.write((b"\n" if torn else b"") + line.encode())
    _verdicts(settings).setdefault(key, verdict)
    return verdict


def _verdict(settings: dict, prompt: str, item: str) -> tuple[str, str]:
    """(reply, CORRECT | INCORRECT), asked again with growing pauses; UserError once all attempts are used up."""
    attempts, pause, reason = settings.get("attempts", 5), settings.get("pause_seconds", 1.0), ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(min(pause * 2 ** (attempt - 1), 60))
        try:
            reply = _post(settings, prompt)
        except urllib.error.HTTPError as error:
            reason = f"HTTP status {error.code}"
            if error.code in (400, 401, 403, 404):
                break
            continue
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        words = WORD.findall(reply)
        if words and len(set(words)) == 1:
            return reply, words[0]
        reason = f"the reply says neither CORRECT nor INCORRECT, or both: {reply[:80]!r}"
        print(f"judge, example {item}: {reason}", file=sys.stderr, flush=True)
    raise UserError(
        f"the judge {settings['model']} at {settings['endpoint']} gave no verdict on example {item}: {reason}; "
        f"mend it and run again: verdicts so far are kept in {_file(settings)}"
    )


def _post(settings: dict, prompt: str) -> str:
    body = {
        "model": settings["model"],
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": settings["max_tokens"],
    }
    headers = {"Content-Type": "application/json"}
    variable = settings.get("api_key_variable")
    if variable and os.environ.get(variable):
        headers["Authorization"] = f"Bearer {os.environ[variable]}"
    url = settings["endpoint"].rstrip("/") + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=settings.get("timeout_seconds", 60)) as answer:
        text = json.loads(answer.read())["choices"][0]["message"]["content"]
    if not isinstance(text, str):
        raise ValueError("the reply holds no text")
    return text
