"""Stage data: build one task or prior suite into a folder of JSON lines."""

from importlib import import_module

from grafting.errors import UserError

#: builder -> module of this package and its function. Resolved on use: a new builder leaves the others' code
#: digests, and so all that was built with them, as they are.
BUILDERS = {
    "tiny.task": "tiny:build_task",
    "tiny.prior": "tiny:build_prior",
    "science": "science:build",
    "tooluse": "tooluse:build",
    "knowledge": "knowledge:build_facts",
    "articles": "knowledge:build_articles",
    "records": "records:build",
    "python": "python_task:build",
    "mmlu": "mmlu:build",
    "harness": "harness_suites:build",
}


def run(job) -> None:
    """job.spec: {"builder": name, ...its options...}; writes info.json and the splits into job.out.

    job.places: where a user's own files lie ("root"); empty for all other tasks.
    """
    name = job.spec.get("builder")
    if name not in BUILDERS:
        raise UserError(f"{job.id}: unknown data builder {name!r}; known are {sorted(BUILDERS)}")
    module, _, function = BUILDERS[name].partition(":")
    getattr(import_module(f"grafting.tasks.{module}"), function)(job.spec, job.out, **job.places)
