"""`grafting compare`: settings, code, verdicts and numbers of two studies, from folders and from git."""

from __future__ import annotations

import json
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
import synthetic_study as synthetic
import yaml

from grafting.analysis import exports
from grafting.analysis.claims import make_claims
from grafting.analysis.collect import collect
from grafting.analysis.compare import Results, compare
from grafting.analysis.report import deltas
from grafting.cli import main
from grafting.errors import UserError
from grafting.plan.code import PROJECT


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Two studies in folders before/ and after/; in the second OPSD's answers to the new task zup are spoilt, and what
    the graft of wug answers to prior skills."""
    root = tmp_path_factory.mktemp("compare")
    builder = synthetic.StudyBuilder(root / "made")
    builder.deployed(0)
    for family, method in (("graft", "sft"), ("opsd", "opsd")):
        for task in synthetic.TASKS:
            candidates = [synthetic.candidate(method, "deployed", 1.0, task, "own", builder.seeds)]
            builder.family(family, "single", "own", task, 0, candidates)
    job = builder.job(protocols=("single",))
    for name in ("before", "after"):
        results = root / name / "results"
        results.mkdir(parents=True)
        shutil.copytree(builder.root / "provenance", root / name / "provenance")
        study = collect(job)
        settings = {"training": {"steps": 80}, "seeds": builder.seeds}
        if name == "after":
            settings["training"]["steps"] = 120
            for selected in study.selected:
                if (selected.labels["family"], selected.labels["task"]) == ("opsd", "zup"):
                    for point in selected.points:
                        point.answers["new"].values[::2] = 0
                if (selected.labels["family"], selected.labels["task"]) == ("graft", "wug"):
                    for point in selected.points:
                        point.answers["prior"].values[::2] = 0
        exports.write_tables(study, deltas(job), results)
        (results / "claims.json").write_text(json.dumps(make_claims(study)))
        (results / "config.resolved.yaml").write_text(yaml.safe_dump(settings))
    code = root / "after" / "provenance"
    for path in code.glob("evaluate/*.json"):
        path.write_text(path.read_text().replace('"c0de"', '"feed"'))
    for digest, version in (("c0de", "1"), ("feed", "2")):
        for name in ("before", "after"):
            folder = root / name / "provenance" / "code"
            folder.mkdir(exist_ok=True)
            content = {"modules": {"grafting.evaluation.stage": version, "grafting.errors": "0"}, "libraries": {}}
            (folder / f"{digest}.json").write_text(json.dumps(content))
    return root


def section(lines, title):
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    rest = lines[start + 1 :]
    return [line.strip() for line in rest[: rest.index("") if "" in rest else len(rest)]]


def test_folders(studies):
    lines = compare(*(Results(str(studies / name / "results")) for name in ("before", "after")))
    assert section(lines, "Settings") == ["training.steps: 80 -> 120"]
    assert section(lines, "Code") == ["evaluate: c0de -> feed", "grafting.evaluation.stage"]
    numbers = section(lines, "Test accuracies")
    spoilt = [line for line in numbers if line.startswith("single, own, opsd, zup, new:")]
    assert len(spoilt) == 1 and spoilt[0].endswith("*") and "(n = 150)" in spoilt[0]
    moved = {tuple(line.partition(":")[0].split(", ")[2:]) for line in numbers[:-1]}
    assert moved >= {("opsd", "zup", "new"), ("graft", "wug", "prior")}
    assert not moved & {("graft", "zup", "new"), ("graft", "zup", "prior"), ("opsd", "wug", "prior")}
    assert numbers[-1].endswith("(--all shows them)")
    whole = compare(*(Results(str(studies / name / "results")) for name in ("before", "after")), everything=True)
    graft = [line for line in section(whole, "Test accuracies") if line.startswith("single, own, graft, dax, prior:")]
    assert len(graft) == 1 and ", +0.0 [" in graft[0]
    verdicts = section(lines, "Verdicts")
    changed = [line for line in verdicts if line.startswith("graft_vs_opsd: graft - opsd, single, own, wug:")]
    assert len(changed) == 1 and changed[0].endswith("-> refuted")


def test_equal_studies_have_nothing_to_say(studies):
    lines = compare(*(Results(str(studies / "before" / "results")) for _ in range(2)))
    for title in ("Settings", "Code", "Verdicts", "Cost"):
        assert section(lines, title) == ["the same"], title
    assert len(section(lines, "Test accuracies")) == 1


def test_git_revisions(studies, tmp_path, monkeypatch, capsys):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=tmp_path, check=True,
                       capture_output=True)  # fmt: skip

    git("init", "-q")
    for name in ("before", "after"):
        shutil.copytree(studies / name, tmp_path, dirs_exist_ok=True)
        git("add", "-A")
        git("commit", "-qm", name)
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "HEAD~1", "HEAD"]) == 0
    by_git = capsys.readouterr().out.splitlines()
    by_folder = compare(*(Results(str(studies / name / "results")) for name in ("before", "after")))
    assert by_git[1:] == by_folder[1:]
    assert main(["compare", "HEAD~7", "HEAD"]) == 2
    assert "neither a folder of results nor a git revision" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: has no evaluations\.csv"):
        Results("empty")


def test_results_without_accuracies_are_compared_by_their_counts(studies, tmp_path):
    """Older results have counts only: the same means, and intervals of about the same width."""
    folder = tmp_path / "results"
    shutil.copytree(studies / "before" / "results", folder)
    known = Results(str(folder)).accuracies()
    (folder / "accuracies.csv").unlink()
    counted = Results(str(folder)).accuracies()
    both = known.join(counted, rsuffix="_counted", how="inner")
    single = both[both.index.get_level_values("task") != "all"]
    assert len(single) == 2 * 3 * 2
    assert np.allclose(single.accuracy, single.accuracy_counted, atol=1e-6)
    ratio = single.half_counted / single.half
    assert ratio.between(0.8, 2.5).all()


def test_published_results_of_this_project_can_be_compared(capsys):
    assert main(["compare", str(PROJECT / "published" / "tiny"), str(PROJECT / "published" / "tiny")]) == 0
    assert "no records at hand" in capsys.readouterr().out


def test_tables_of_the_fixture_are_what_is_compared(studies):
    frame = pd.read_csv(studies / "after" / "results" / "accuracies.csv")
    own = frame[(frame.method == "opsd") & (frame.task == "zup") & (frame.suite == "new") & (frame.replicate == "all")]
    assert own.accuracy.item() < 0.6
