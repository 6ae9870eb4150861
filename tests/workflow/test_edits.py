"""What an edit of the code runs again, how it is explained, and how it is declared to change nothing."""

import re

from grafting.config import resolve
from grafting.config.load import read_yaml
from grafting.plan.jobs import Job
from grafting.plan.study import Study

from .conftest import PROJECT

LOSS = "src/grafting/training/objectives/self_distillation.py"


def names(ids) -> set[str]:
    return {i.rpartition("-")[0] for i in ids}


def following(first) -> set[str]:
    """Readable names of the smoke preset's jobs for which `first` holds, and of all that wait for one of them."""
    study = Study(resolve(read_yaml(PROJECT / "config.yaml"), read_yaml(PROJECT / "presets" / "smoke.yaml")))
    found: set[str] = set()
    for job in study.jobs.values():  # in an order in which they could run
        if first(job) or set(job.needs()) & found:
            found.add(job.id)
    return names(found)


def test_comment_docstring_and_layout_in_the_training_loop_run_nothing(study):
    path = study.root / "src/grafting/training/loop.py"
    text = path.read_text()
    assert "def train(\n" in text
    edited = re.sub(r'^"""', '"""Edited. ', text, count=1).replace("def train(\n", "# edited\n\n\ndef train(\n")
    path.write_text(edited + "\n# the end\n")
    assert study.planned() == {}


def test_edited_loss_runs_the_jobs_of_its_objective_and_what_follows(study):
    study.edit(LOSS, "loss = values.sum()", "loss = values.sum() * 2.0")
    opened = names(study.open_jobs())
    trained = {name for name in opened if name.startswith("train/")}
    assert trained and all(".opsd." in name for name in trained)
    assert opened == following(lambda job: job.stage == "train" and job.spec["objective"] == "opsd")
    line = study.grafting("why", "evaluate/val.single.own.opsd-deployed.lr0.0002.wug.s0.m0")
    assert "because train/wug.own.opsd.deployed.lr0.0002.s0.m0 changed: module grafting.training.objectives" in line
    assert study.planned()["train"] == len(trained)


def test_edited_figure_runs_only_the_report(study):
    study.edit("src/grafting/analysis/figures/frontier.py", '"prior accuracy (%)"', '"prior accuracy, %"')
    assert study.planned() == {"report": 1}
    assert "module grafting.analysis.figures.frontier: changed" in study.grafting("why", "results/summary.md")


def test_declared_refactor_runs_nothing_and_is_shown(study):
    """A loss that is written differently and gives the same bytes: one alias, no job."""
    job = "train/wug.own.opsd.deployed.lr0.0002.s0.m0"
    study.git("add", "-A")
    study.git("commit", "-qm", "results")
    study.edit(LOSS, "loss = values.sum()", "loss = torch.sum(values)")
    assert study.planned()["train"] > 0
    old, new = re.search(r"\(code ([0-9a-f]{12}) -> ([0-9a-f]{12})\)", study.grafting("why", job)).groups()
    wrong = study.grafting("alias", "b" * 12, new, "--reason", "same sum", check=False)
    assert "there is no record of bbbbbbbbbbbb" in wrong and "Traceback" not in wrong
    study.grafting("alias", old, new, "--reason", "torch.sum is the same sum")
    assert study.planned() == {}
    for text in (study.grafting("why", job), study.grafting("trace", "results/summary.md", preset=False)):
        assert f"alias: code {new} counts as {old}: torch.sum is the same sum" in text
    # an alias to what nobody has is said before anything starts
    study.edit("aliases.yaml", old, "b" * 12)
    done = study.run("snakemake", "-n", "--configfile", "presets/smoke.yaml", check=False)
    assert done.returncode == 2 and f"aliases.yaml: code: {new} -> bbbbbbbbbbbb" in done.stderr


def test_trace_of_any_result_goes_down_to_data_and_code(study):
    whole = study.grafting("trace", "results/summary.md", preset=False)
    assert study.grafting("trace", "results/evaluations.csv", preset=False) == whole
    assert study.grafting("trace", "results/figures/frontier.svg", preset=False) == whole
    assert "built by tiny.task: " in whole and "built by tiny.prior: " in whole
    for module in ("analysis.report", "training.loop", "tasks.tiny", "merging.sweep"):
        assert module in whole
    assert re.search(r"^code .*; .*torch " + re.escape(_locked(study)) + "(,|$)", whole, re.M)
    assert "no record of its modules" not in whole
    link = next((study.root / "results" / "models").iterdir())
    merged = study.grafting("trace", f"results/models/{link.name}", preset=False)
    assert merged.startswith("merge/") and "training.loop" in merged


def _locked(study) -> str:
    return re.search(r"^torch==(\S+)", (study.root / "requirements.lock").read_text(), re.M).group(1)


def test_every_record_names_its_job_again(finished):
    """From its record alone every job can be planned again: its key is the hash of what stands there."""
    count = 0
    for side in finished.sidecars().values():
        if "payload" in side:
            assert Job(*(side[name] for name in ("stage", "name", "spec", "inputs", "code"))).id == side["id"]
            assert "seed" in side and "environment" in side
            count += 1
    assert count > 50
