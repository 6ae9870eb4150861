"""Stage data: build one task or prior suite into a folder of JSON lines."""

from grafting.errors import UserError
from grafting.tasks import mmlu, science, tiny

BUILDERS = {
    "tiny.task": tiny.build_task,
    "tiny.prior": tiny.build_prior,
    "science": science.build,
    "mmlu": mmlu.build,
}


def run(job) -> None:
    """job.spec: {"builder": name, ...its options...}; writes info.json and the splits into job.out."""
    name = job.spec.get("builder")
    if name not in BUILDERS:
        raise UserError(f"{job.id}: unknown data builder {name!r}; known are {sorted(BUILDERS)}")
    BUILDERS[name](job.spec, job.out)
