"""Intervals, claims and the report on an invented study; nothing here needs a model."""

from __future__ import annotations

import filecmp
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_study as synthetic

from grafting.analysis import claims, report, sequence, tables
from grafting.analysis.collect import CLOCK, collect
from grafting.analysis.figures import FIGURES
from grafting.analysis.figures import frontier as frontier_figure
from grafting.analysis.published import Comparison, compare, write_published
from grafting.analysis.statistics import ITEMS_ONLY, Answers, Estimate, difference, estimate, interval
from grafting.errors import UserError


# ---- intervals ------------------------------------------------------------------------------------
def test_interval_by_hand():
    """3 seeds x 4 items: seed means 1/4, 1/2, 3/4; item means 1, 2/3, 1/3, 0."""
    answers = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=float)
    found = interval([answers])
    seeds, items = 4.302652729749464**2 * 0.0625 / 3, 1.959963984540054**2 * ((5 / 27) / 4 + 2 / 16)
    assert (found.mean, found.seeds, found.items) == (0.5, 3, 4)
    assert found.half == pytest.approx(math.sqrt(seeds + items))


def test_strata_weigh_equally():
    few, many = np.ones((2, 10)), np.zeros((2, 90))
    assert interval([few, many]).mean == 0.5


def test_one_seed_varies_over_items_only_and_says_so():
    found = interval([np.array([[1.0, 0.0, 1.0, 1.0]])])
    assert (found.basis, found.seeds) == (ITEMS_ONLY, 1)
    assert tables.percent(found).endswith(" i")


def test_agreement_of_all_items_leaves_the_interval_open():
    """Near the rule of three, 3 / n, for the answers of n items that are all right."""
    assert 0.8 < interval([np.ones((3, 60))]).half / (3 / 60) < 1.1


def test_interval_refuses_strata_of_unequal_seeds():
    with pytest.raises(ValueError, match="number of seeds"):
        interval([np.ones((2, 3)), np.ones((3, 3))])


def test_difference_pairs_seeds_and_items():
    """Equal answers differ by nothing, however much the answers themselves vary."""
    answers = np.random.default_rng(0).random((3, 30)) < np.linspace(0, 1, 30)
    a = {s: Answers.of({("t", f"{i:02d}"): float(answers[s, i]) for i in range(30)}) for s in range(3)}
    assert difference(a, a).mean == 0 and difference(a, a).half < estimate(a).half / 1.5
    partly = {s: Answers(own.keys[:20], own.values[:20]) for s, own in a.items() if s != 1}
    assert (difference(a, partly).seeds, difference(a, partly).items) == (2, 20)
    assert difference(a, {}) is None


def test_difference_by_hand():
    """2 seeds x 2 items, a - b = [[1, 0], [1, 1]]: seed means 1/2, 1; item means 1, 1/2."""
    a = {0: {("t", "x"): 1.0, ("t", "y"): 1.0}, 1: {("t", "x"): 1.0, ("t", "y"): 1.0}}
    b = {0: {("t", "x"): 0.0, ("t", "y"): 1.0}, 1: {("t", "x"): 0.0, ("t", "y"): 0.0}}
    found = difference(*({seed: Answers.of(values) for seed, values in side.items()} for side in (a, b)))
    seeds, items = 12.706204736174694**2 * 0.125 / 2, 1.959963984540054**2 * (0.125 / 2 + 2 / 4)
    assert (found.mean, found.seeds, found.items) == (0.75, 2, 2)
    assert found.half == pytest.approx(math.sqrt(seeds + items))


# ---- claims ---------------------------------------------------------------------------------------
def an(low: float, high: float) -> Estimate:
    return Estimate((low + high) / 2, (high - low) / 2, 3, 100, "seeds and items")


@pytest.mark.parametrize(
    ("new", "prior", "expected"),
    [
        (an(0.01, 0.02), an(0.0, 0.04), "supported"),
        (an(0.0, 0.0), an(0.0, 0.0), "inconclusive"),
        (an(-0.01, 0.05), an(0.1, 0.2), "inconclusive"),
        (an(0.1, 0.2), an(-0.2, -0.1), "refuted"),
        (an(-0.2, -0.1), an(-0.1, 0.1), "refuted"),
        (None, an(0.1, 0.2), "missing"),
    ],
)
def test_verdict(new, prior, expected):
    assert claims.verdict(new, prior) == expected


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["supported", "supported"], "supported"),
        (["supported", "inconclusive"], "inconclusive"),
        (["supported", "missing"], "inconclusive"),
        (["inconclusive", "refuted"], "refuted"),
        (["missing"], "missing"),
        ([], "missing"),
    ],
)
def test_combined_verdict(verdicts, expected):
    assert claims.combined(verdicts) == expected


# ---- the report -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def study(tmp_path_factory):
    builder = synthetic.tiny_study(tmp_path_factory.mktemp("study"))
    job = builder.job()
    job.results.mkdir()
    (job.results / "report-abc.json").write_text("{}")  # the sentinel of an earlier report
    report.run(job)
    return builder, job


def test_report_writes_every_file(study):
    _, job = study
    files = {path.relative_to(job.results).as_posix() for path in job.results.rglob("*") if path.is_file()}
    assert files == {
        "accuracies.csv", "accuracies.parquet", "answers.csv", "claims.json", "config.resolved.yaml", "deltas.csv",
        "evaluations.csv", "evaluations.parquet", "metrics.json", "report-abc.json", "report.html", "selections.csv",
        "sequence.csv", "summary.md", *(f"figures/{name}.{suffix}" for name in FIGURES for suffix in ("svg", "pdf")),
        *(f"plots/{name}.csv" for name in ("curves", "sequence", "test", "training", "updates")),
        *(f"tables/{name}.tex" for name in (
            "claims", "parallel_own", "sequence", "sequential_own", "single_expert", "single_own")),
    }  # fmt: skip


def test_answers_are_counted_by_how_they_ended(study):
    _, job = study
    answers = pd.read_csv(job.results / "answers.csv")
    whole = pd.read_csv(job.results / "evaluations.csv").drop_duplicates(["point", "split", "task"])
    ended = answers[answers["kind"] == "finish"].groupby(["point", "split", "task"])["answers"].sum()
    wanted = whole[whole["family"] != "frontier"].set_index(["point", "split", "task"])["n"]
    assert len(ended) and ended.sort_index().to_dict() == wanted[wanted.index.isin(ended.index)].sort_index().to_dict()
    assert set(whole["split"]) == set(answers["split"])


def test_parquet_holds_what_csv_holds(study):
    _, job = study
    for name in ("evaluations", "accuracies"):
        written = pd.read_csv(job.results / f"{name}.csv")
        packed = pd.read_parquet(job.results / f"{name}.parquet")
        assert list(packed.columns) == list(written.columns) and len(packed) == len(written)
        number = "accuracy"
        assert np.allclose(packed[number], written[number])


def test_accuracies_keep_seeds_apart_and_carry_n(study):
    _, job = study
    frame = pd.read_csv(job.results / "accuracies.csv")
    own = frame[
        (frame.protocol == "single") & (frame["style"] == "own") & (frame.method == "opsd") & (frame.task == "zup")
    ]
    own = own[own.suite == "new"].set_index("replicate")
    assert set(own.index) == {"all", "s0", "s1", "s2"}
    seeds = own.drop(index="all")
    assert own.accuracy["all"] == pytest.approx(seeds.accuracy.mean(), abs=1e-6)
    assert set(seeds.n) == {synthetic.ITEMS["test"]["new"]} and own.n["all"] == 3 * synthetic.ITEMS["test"]["new"]
    assert set(seeds.basis) == {ITEMS_ONLY} and own.basis["all"] == "seeds and items"
    assert ((frame.low <= frame.accuracy) & (frame.accuracy <= frame.high)).all()


def test_latex_tables_hold_the_same_numbers(study):
    """Golden line of one table; every line has as many cells as the head."""
    _, job = study
    frame = pd.read_csv(job.results / "accuracies.csv")
    frame = frame[(frame.task == "all") & (frame.replicate == "all")].set_index(
        ["protocol", "style", "method", "suite"]
    )
    new, prior = (frame.loc[("single", "own", "opsd", suite)] for suite in ("new", "prior"))
    cells = [f"${100 * v.accuracy:.1f} \\pm {50 * (v.high - v.low):.1f}$" for v in (new, prior)]
    text = (job.results / "tables" / "single_own.tex").read_text()
    assert f"OPSD & {cells[0]} & {cells[1]} & 3 & " in text
    for path in (job.results / "tables").glob("*.tex"):
        lines = [line for line in path.read_text().splitlines() if line.endswith(r"\\")]
        assert len({line.replace(r"\&", "").count("&") for line in lines}) == 1 and len(lines) > 2


def test_table_is_tidy(study):
    builder, job = study
    frame = pd.read_csv(job.results / "evaluations.csv")
    assert list(frame.columns[-3:]) == list(CLOCK)
    assert (frame.accuracy - frame.correct / frame.n).abs().max() < 1e-6
    tested = frame[(frame.split == "test") & (frame.family == "opsd") & (frame.protocol == "single")]
    assert set(tested.groupby(["style", "trained_task", "seed"]).size()) == {len(synthetic.SKILLS) + 1}
    assert set(tested.tokens_generated) == {30_000} and set(tested.cpu_seconds) == {15.5}
    chain = frame[(frame.split == "test") & (frame.family == "sft") & (frame.protocol == "sequential")]
    by_stage = {stage: set(part.tokens_backpropagated) for stage, part in chain.groupby("stage")}
    assert by_stage == {stage: {(stage + 1) * 61_440} for stage in range(3)}  # not the whole chain's at every stage
    summed = frame[(frame.split == "test") & (frame.family == "graft") & (frame.protocol == "parallel")]
    assert set(summed.tokens_backpropagated) == {3 * 61_440}
    assert len(builder.evaluations) * (len(synthetic.SKILLS) + 1) <= len(frame)


def test_summary_says_the_verdict_first(study):
    _, job = study
    text = (job.results / "summary.md").read_text()
    assert text.startswith("# Verdict: refuted, conditional on one model\n")
    assert "wug †" in text and "An invented study." in text
    assert "OPSD minimises forward KL = KL(teacher || student); teacher: frozen." in text
    assert "the jobs' own records" in text
    items, skills = 3 * synthetic.ITEMS["test"]["new"], len(synthetic.SKILLS) * synthetic.ITEMS["test"]["prior"]
    [row] = [line for line in text.split("## Single")[1].splitlines() if line.startswith("| OPSD |")][:1]
    assert row.split(" | ")[3] == f"{items}×3 / {skills}×3"
    assert f"| {items}×1 / {skills}×1 | 0 |" in text  # the deployed model has no seeds
    for heading in (
        "## Single",
        "## Sequential",
        "## Parallel",
        "## Comparisons",
        "## Teacher gate",
        "## Notes",
    ):
        assert heading in text
    assert "missing" not in text.lower()


def test_claims_agree_with_a_computation_from_the_table(study):
    _, job = study
    frame = pd.read_csv(job.results / "evaluations.csv")
    found = json.loads((job.results / "claims.json").read_text())
    [comparison] = [
        c for c in found["comparisons"]
        if (c["protocol"], c["style"], c["task"], c["name"]) == ("single", "own", "all", "graft_vs_opsd")
    ]  # fmt: skip
    tested = frame[(frame.split == "test") & (frame.protocol == "single") & (frame["style"] == "own")]
    for suite in ("new", "prior"):
        means = tested[tested.suite == suite].groupby("family").accuracy.mean()
        assert comparison[suite]["mean"] == pytest.approx(means["graft"] - means["opsd"], abs=2e-6)
    kinds = {c["kind"] for c in found["comparisons"]}
    assert kinds == {"claim", "frontier", "equal_cost", "control", "ablation"} and found["missing"] == []
    assert set(found["untested"]) == {"one_donor"}  # the invented study has no graft_sum
    ablations = {(c["asks"], c["a"], c["b"]) for c in found["comparisons"] if c["kind"] == "ablation"}
    assert {
        ("the scale", "graft_unmasked", "graft_unscaled"),
        ("the mask", "graft", "graft_unmasked"),
        ("a Fisher mask against a random one of the same size, basis and scales", "graft_masked", "graft_random"),
    } <= ablations
    assert found["opsd"] == {"divergence": "forward KL = KL(teacher || student)", "teacher": "frozen"}


def test_opsd_setting_may_be_absent_and_is_defined_as_in_training():
    assert claims.opsd_setting({"settings": {"learners": {"opsd": None}}}) is None
    divergences = pytest.importorskip("grafting.training.divergences")
    ours, theirs = (
        {k: v.split(" = ", 1)[1] for k, v in names.items()} for names in (claims.DIVERGENCES, divergences.NAMES)
    )
    assert ours == theirs


def test_results_hold_no_local_path(study):
    builder, job = study
    texts = [p for p in job.results.rglob("*") if p.is_file() and p.suffix not in {".pdf", ".parquet"}]
    assert len(texts) > 20 and not [p for p in texts if str(builder.root) in p.read_text()]


def test_metrics_are_nested_numbers(study):
    _, job = study

    def leaves(value):
        return [leaf for v in value.values() for leaf in leaves(v)] if isinstance(value, dict) else [value]

    found = json.loads((job.results / "metrics.json").read_text())
    assert set(found["single"]["own"]["graft"]) == {"new", "prior"}
    assert all(isinstance(leaf, int | float) for leaf in leaves(found))


def test_equal_studies_give_equal_bytes(study, tmp_path):
    builder, job = study
    again = builder.job(results=tmp_path / "results")
    # In another process with other string hashes: an order that comes from a set would show.
    code = "import pickle, sys; from grafting.analysis import report; report.run(pickle.load(sys.stdin.buffer))"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(again), env=environment, check=True)
    names = [p.relative_to(again.results).as_posix() for p in again.results.rglob("*") if p.is_file()]
    assert len(names) > 30
    assert filecmp.cmpfiles(job.results, again.results, names, shallow=False) == (names, [], [])


def test_report_replaces_files_and_never_writes_through_a_link(tmp_path):
    builder = synthetic.StudyBuilder(tmp_path)
    builder.deployed(0)
    job = builder.job()
    (job.results / "figures").mkdir(parents=True)
    cached = tmp_path / "cached"
    cached.write_text("of the DVC cache")
    (job.results / "summary.md").hardlink_to(cached)
    (job.results / "figures" / "masks.svg").write_text("of a study that had masks")
    report.run(job)
    assert cached.read_text() == "of the DVC cache"
    assert (job.results / "summary.md").read_text().startswith("# Verdict: missing")
    assert not [p for p in job.results.iterdir() if p.name.startswith(".report-")]
    assert not (job.results / "figures" / "masks.svg").exists()


def test_selected_models_are_linked(study, tmp_path):
    builder, _ = study
    job = builder.job(results=tmp_path / "results")
    model = tmp_path / "store" / "merge" / "graft-1"
    model.mkdir(parents=True)
    job._inputs = {**job._inputs, "models": [model]}
    entries = [
        {**job.spec["selections"][0], "models": {"single.own.wug.s0.m0": 0}},
        *job.spec["selections"][1:],
    ]
    job.spec = {**job.spec, "selections": entries}
    job.results.mkdir()
    report._link_models(job, job.results / "models")
    link = job.results / "models" / "single.own.wug.s0.m0"
    assert link.resolve() == model and not link.readlink().is_absolute()


def test_a_missing_seed_is_said_and_its_task_is_not_averaged_over(study, tmp_path):
    builder, _ = study
    job = builder.job()
    lost = next(s for s in job.spec["selections"] if (s["family"], s["style"], s["task"]) == ("opsd", "own", "zup"))
    copy = tmp_path / "test"
    shutil.copytree(job.inputs("tests")[lost["test"]], copy)
    for path in copy.glob("*.json"):
        if json.loads(path.read_text()).get("labels", {}).get("seed") == 2:
            path.unlink()
    tests = [copy if i == lost["test"] else path for i, path in enumerate(job.inputs("tests"))]
    job._inputs = {**job._inputs, "tests": tests}
    read = collect(job)
    found = claims.make_claims(read)
    assert found["missing"] == ["single, own, opsd, task zup, model seed 0: no test point for seed(s) 2"]
    [overall] = [
        c for c in found["comparisons"]
        if (c["protocol"], c["style"], c["task"], c["name"]) == ("single", "own", "all", "graft_vs_opsd")
    ]  # fmt: skip
    assert overall["new"]["seeds"] == 2 and overall["notes"][0] == "2 of 3 replicates"
    assert "| 2/3 |" in tables.summary(read, found)


def test_a_missing_task_leaves_the_overall_cell_empty(study, tmp_path):
    builder, _ = study
    job = builder.job(results=tmp_path / "results")
    kept = [s for s in job.spec["selections"] if not (s["family"] == "opsd" and s["task"] == "dax")]
    job.spec = {**job.spec, "selections": kept}
    read = collect(job)
    found = claims.make_claims(read)
    assert "| OPSD | missing: dax |" in tables.summary(read, found)
    lost = [c for c in found["comparisons"] if c["b"] == "opsd" and c["task"] == "dax"]
    assert {c["verdict"] for c in lost} == {"missing"}
    whole = [c for c in found["comparisons"] if c["b"] == "opsd" and (c["protocol"], c["task"]) == ("single", "all")]
    assert {c["verdict"] for c in whole if c["style"] == "own" and c["kind"] != "ablation"} == {"missing"}


def test_a_missing_payload_is_named(study, tmp_path):
    builder, _ = study
    job = builder.job(results=tmp_path / "results")
    job._inputs = {**job._inputs, "evaluations": [tmp_path / "gone"] * len(job.inputs("evaluations"))}
    with pytest.raises(UserError, match=r"gone/reference\.json"):
        report.run(job)


def test_one_seed_is_marked_everywhere(tmp_path):
    job = synthetic.tiny_study(tmp_path, seeds=(0,), donors=("deployed", "base")).job()
    report.run(job)
    assert set(pd.read_csv(job.results / "accuracies.csv").basis) == {ITEMS_ONLY}
    found = json.loads((job.results / "claims.json").read_text())
    tested = [c for c in found["comparisons"] if c["verdict"] != "missing"]
    assert tested and all("interval over items only: says nothing about other seeds" in c["notes"] for c in tested)
    assert "<em>i</em>" in (job.results / "report.html").read_text()
    assert "^{i}" in (job.results / "tables" / "single_own.tex").read_text()
    assert len(list((job.results / "figures").glob("*.svg"))) == len(FIGURES)


@pytest.mark.filterwarnings("error")
def test_a_study_in_which_everything_is_equal_can_be_reported(tmp_path, monkeypatch):
    """Every answer right, no variance anywhere: intervals stay open, nothing is divided by zero."""
    monkeypatch.setattr(synthetic, "expected", lambda *_: (1.0, 1.0))
    every = lambda task: dict.fromkeys([task] if task != "all" else synthetic.TASKS, 1.0)  # noqa: E731
    monkeypatch.setattr(synthetic, "accuracies", lambda c, protocol, style, task, *_: (every(task), 1.0))
    job = synthetic.tiny_study(tmp_path, donors=("deployed", "base")).job()
    report.run(job)
    frame = pd.read_csv(job.results / "accuracies.csv")
    assert set(frame.accuracy) == {1.0} and (frame.low < 1).all()
    found = json.loads((job.results / "claims.json").read_text())
    assert {c["verdict"] for c in found["comparisons"]} == {"inconclusive"} and found["verdict"] == "inconclusive"
    assert all(c[name]["mean"] == 0 for c in found["comparisons"] for name in ("new", "prior", "value") if name in c)
    assert len(list((job.results / "figures").glob("*.svg"))) == len(FIGURES)


def test_several_models_are_the_replicates_of_the_overall_claim(tmp_path):
    job = synthetic.tiny_study(tmp_path, seeds=(0,), model_seeds=(0, 1), donors=("deployed", "base")).job()
    read = collect(job)
    found = claims.make_claims(read)
    assert found["condition"] == "over 2 models"
    bases = {
        (c["model_seed"], e["seeds"], e["basis"])
        for c in found["comparisons"]
        for e in [c.get("new") or c.get("value")]
    }
    assert bases == {(0, 1, ITEMS_ONLY), (1, 1, ITEMS_ONLY), ("all", 2, "seeds and items")}
    assert "### Model seed 1" in tables.summary(read, found)


def test_validation_curves_keep_donors_masks_and_operators_apart(study):
    _, job = study
    read = collect(job)
    single = frontier_figure.curves(read, "single", "own")
    assert [c.name for c in single if not c.masked] == [
        "OPSD, scaled", "SFT, scaled", "graft from base", "graft from p60", "graft from p80",
    ]  # fmt: skip
    masked = sorted(c.name for c in single if c.masked)  # donors x masks
    assert masked == ["graft, masked"] * 2 + ["graft, random mask (control)"] * 2
    assert all(len(c.points) == (2 if c.masked else 3) for c in single)
    base = [p for p in read.points if p.labels["donor"] == "base" and p.labels["scale"] == 0.8]
    base = [p for p in base if p.labels["protocol"] == "single" and p.labels["style"] == "own"]
    curve = next(c for c in single if c.name == "graft from base")
    assert len(base) == 9  # tasks x seeds
    means = (np.mean([p.accuracy(suite) for p in base]) for suite in ("prior", "new"))
    assert curve.points[1] == pytest.approx((0.8, *means))
    assert {c.name for c in frontier_figure.curves(read, "sequential", "own")} == {
        "SFT, merged after each task", "OPSD, merged after each task", "SFT, scaled", "graft from base",
    }  # fmt: skip


def test_figures_of_a_sequence_by_hand(study):
    _, job = study
    read = collect(job)
    selected = next(s for s in read.selected if s.labels["protocol"] == "sequential")
    matrix = {
        0: {"wug": 0.9, "zup": 0.2, "dax": 0.1},
        1: {"wug": 0.6, "zup": 0.8, "dax": 0.3},
        2: {"wug": 0.5, "zup": 0.4, "dax": 0.9},
    }
    found = sequence.sequence_figures(read, selected, matrix)
    start = {t: read.deployed("test", 0, t).accuracy("new", [t]) for t in ("zup", "dax")}
    assert found == pytest.approx(
        {
            "average": 0.6,
            "forgetting": (0.4 + 0.4) / 2,
            "backward transfer": (-0.4 - 0.4) / 2,
            "forward transfer": (0.2 - start["zup"] + 0.3 - start["dax"]) / 2,
        }
    )
    assert sequence.sequence_figures(read, selected, {0: matrix[0]}) == {}


def test_analysis_imports_no_torch():
    code = "import sys, grafting.analysis.report, grafting.analysis.published; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- published figures ----------------------------------------------------------------------------
def test_a_run_agrees_with_its_own_published_figures(study, tmp_path):
    _, job = study
    written = write_published(job.results, tmp_path / "published")
    names = {path.relative_to(tmp_path / "published").as_posix() for path in written}
    assert "evaluations.csv.gz" in names and "figures/frontier.svg" in names  # over 1 MiB: gzipped
    before = {path: path.read_bytes() for path in written}
    write_published(job.results, tmp_path / "published")
    assert before == {path: path.read_bytes() for path in written}
    found = compare(job.results, tmp_path / "published")
    assert found.agrees and found.identical > 10_000 and found.within == found.different == 0
    assert "identical" in found.render()


def test_differences_are_counted_listed_and_clocks_ignored(study, tmp_path):
    _, job = study
    published = tmp_path / "published"
    published.mkdir()
    frame = pd.read_csv(job.results / "evaluations.csv")
    frame["cpu_seconds"] += 100
    frame["point"] = "other"
    few, many, *_ = frame.index[(frame.family == "opsd") & (frame.split == "test")]
    frame.loc[few, "flops"] = round(frame.loc[few, "flops"] * 1.001)
    for row, items in ((few, 2), (many, 3)):  # n is 20: two items are within, three are not
        frame.loc[row, "correct"] += items if frame.loc[row, "correct"] < 10 else -items
        frame.loc[row, "accuracy"] = frame.loc[row, "correct"] / frame.loc[row, "n"]
    frame.drop(index=frame.index[-1]).to_csv(published / "evaluations.csv", index=False)
    found = compare(job.results, published)
    assert (found.within, found.different, found.only_here, found.only_published) == (2, 1, 1, 0)
    [line] = found.differences
    assert ": correct" in line and "opsd" in line and line in found.render()
    figures_here = found.identical + found.within + found.different
    assert f"{found.identical} of {figures_here} figures identical, 2 within tolerance, 1 different" in found.render()
    assert not found.agrees


def test_nothing_published_is_said_kindly(study, tmp_path):
    _, job = study
    found = compare(job.results, tmp_path / "none")
    assert not found.present and "nothing to compare" in found.render()
    with pytest.raises(UserError, match="report"):
        write_published(tmp_path, tmp_path / "published")


def test_only_the_first_differences_are_shown():
    found = Comparison(Path("published/x"))
    for i in range(30):
        found.note(f"row {i}", "score", 0.1, 0.9)
    assert "and 10 more" in found.render()


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "n", "outcome"),
    [
        ("correct", 18, 18, 20, "identical"),
        ("correct", 18, 20, 20, "within"),
        ("correct", 17, 20, 20, "different"),
        ("correct", 900, 920, 1000, "within"),
        ("correct", 900, 921, 1000, "different"),
        ("n", 20, 21, 20, "different"),
        ("flops", 1000, 1019, 20, "within"),
        ("flops", 1000, 1030, 20, "different"),
        ("score", 0.80, 0.84, 0, "within"),
        ("prior", 0.80, 0.86, 0, "different"),
        ("chosen", True, False, 0, "different"),
    ],
)
def test_tolerances(name, ours, theirs, n, outcome):
    found = Comparison(Path("published/x"))
    found.note("row", name, ours, theirs, n)
    assert {k: getattr(found, k) for k in ("identical", "within", "different") if getattr(found, k)} == {outcome: 1}
