"""A user's own scorer: the function `score` of the Python file that defines the task.

The file's text is part of the built data (scorer_options["source"]), so that its content is in every key.
"""

from functools import cache

from grafting.errors import UserError


@cache
def _function(source: str, name: str):
    namespace: dict = {"__name__": f"grafting_task_{name}"}
    exec(compile(source, f"<task {name}>", "exec"), namespace)
    if not callable(namespace.get("score")):
        raise UserError(f"the file of task {name} defines no function score(text, example)")
    return namespace["score"]


def run(text: str, example: dict, options: dict) -> tuple[bool, str]:
    """`score(text, example)` of the task's file: a truth value, or a pair of it and a reason."""
    given = _function(options["source"], example["task"])(text, example)
    if isinstance(given, tuple):
        correct, reason = given
        return bool(correct), str(reason)
    return bool(given), "correct" if given else "wrong"
