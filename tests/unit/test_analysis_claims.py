"""Claims as data: the file, what it may name, and what is tested; faults in what a report reads."""

from __future__ import annotations

import gzip
import json
import shutil

import numpy as np
import pytest
import synthetic_study as synthetic
import yaml

from grafting.analysis import claims
from grafting.analysis.cells import affordable
from grafting.analysis.collect import collect, training_curves
from grafting.analysis.report import deltas
from grafting.config.claims import METHODS, check_methods, load_claims
from grafting.errors import UserError
from grafting.evaluation.budget import trained
from grafting.evaluation.frontier import area
from grafting.plan.code import PROJECT


def write(path, *entries):
    path.write_text(yaml.safe_dump({"claims": list(entries)}))
    return path


A_CLAIM = {"name": "mine", "kind": "control", "left": "graft", "right": "opsd", "asks": "mine"}


# ---- the file -------------------------------------------------------------------------------------
def test_default_claims_are_the_headline_and_keep_controls_out_of_it():
    found = load_claims(PROJECT / "claims.yaml")
    head = {(c.left, *c.right) for c in found if c.kind == "claim"}
    assert head == {("graft", "opsd"), ("graft", "sft")}
    assert {c.kind for c in found} == {"claim", "frontier", "equal_cost", "control", "ablation"}
    assert {c.statistic for c in found if c.kind == "frontier"} == {"hypervolume", "prior_at_new", "new_at_prior"}
    assert not any("graft_random" in (c.left, *c.right) for c in found if c.kind == "claim")
    check_methods(found, [])  # a study need not have every method that they name


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**A_CLAIM, "left": "graft", "right": "graft"}, r"claims\.0 \(mine\): compares graft with itself"),
        ({**A_CLAIM, "kind": "frontier"}, r"needs one of the statistics hypervolume"),
        ({**A_CLAIM, "kind": "claim", "threshold": 0.1}, r"kind claim is the headline"),
        ({**A_CLAIM, "statistics": "new"}, r"claims\.0 \(mine\)\.statistics: Extra inputs"),
        ({**A_CLAIM, "condition": {"equal": "tokens"}}, r"condition\.equal: .*\(given: 'tokens'\)"),
        ({k: v for k, v in A_CLAIM.items() if k != "asks"}, r"asks: Field required"),
    ],
)
def test_a_faulty_claim_is_named(tmp_path, entry, message):
    with pytest.raises(UserError, match=message):
        load_claims(write(tmp_path / "claims.yaml", entry))


def test_names_are_distinct_and_methods_known(tmp_path):
    with pytest.raises(UserError, match="two claims are called mine"):
        load_claims(write(tmp_path / "claims.yaml", A_CLAIM, A_CLAIM))
    wrong = load_claims(write(tmp_path / "claims.yaml", {**A_CLAIM, "right": "opsd_scale"}))
    with pytest.raises(
        UserError, match="claim mine: right: no method is called 'opsd_scale'; did you mean 'opsd_scaled'"
    ):
        check_methods(wrong, ["graft", "opsd", "opsd_scaled"])
    check_methods(load_claims(write(tmp_path / "claims.yaml", {**A_CLAIM, "right": "dft"})), ["graft", "dft"])


def test_every_method_of_the_plan_is_known(tmp_path):
    """What the default claims may name without error is what studies are made of."""
    from grafting.plan.front import load_config
    from grafting.plan.study import Study

    study = Study(load_config(folder=PROJECT))
    made = {entry["family"] for entry in study.selections}
    assert made >= set(METHODS)
    spec = study.jobs[study.report].spec
    assert [c["name"] for c in spec["claims"]] == [c.name for c in load_claims(PROJECT / "claims.yaml")]
    assert set(spec["reference"]) == {path.name for path in (PROJECT / "reference").glob("*.csv")}
    wrong = load_claims(write(tmp_path / "claims.yaml", {**A_CLAIM, "left": "grafd"}))
    with pytest.raises(UserError, match="did you mean 'graft'"):
        Study(load_config(folder=PROJECT), claims=wrong)
    other = Study(load_config(folder=PROJECT), claims=load_claims(write(tmp_path / "claims.yaml", A_CLAIM)))
    # only the tests of frontiers hang on the claims
    assert other.report != study.report and other.jobs.keys() - {other.report} <= study.jobs.keys() - {study.report}
    assert {i.partition(".")[0] for i in study.jobs.keys() - other.jobs.keys() - {study.report}} == {
        "evaluate/frontier"
    }


# ---- what is tested -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    return synthetic.tiny_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def read(builder):
    return collect(builder.job())


@pytest.fixture(scope="module")
def found(read):
    return claims.make_claims(read)


def of(found, name, protocol="single", style="own", task="all"):
    return next(
        c
        for c in found["comparisons"]
        if (c["name"], c["protocol"], c["style"], c["task"]) == (name, protocol, style, task)
    )


def test_frontier_claims_are_on_test_data_with_equal_numbers_of_points(found, read):
    for name, statistic in (("frontier_vs_opsd", "hypervolume"), ("frontier_vs_opsd_prior", "prior_at_new")):
        c = of(found, name)
        assert (c["statistic"], c["b"]) == (statistic, "opsd_scaled")
        assert "3 points per method" in c["notes"] and c["value"]["seeds"] == 3
    assert of(found, "frontier_vs_opsd", "sequential")["b"] == "opsd_regraft"
    # by hand, from the scores of the test points
    gaps = []
    for f in (f for f in read.frontiers if (f.labels["protocol"], f.labels["style"]) == ("single", "own")):
        areas = {}
        for method in ("graft", "opsd_scaled"):
            points = [list(f.points[name].values()) for name in f.methods[method, None, None][:3]]
            assert all(p.split == "test" and p.labels["family"] == "frontier" for seeds in points for p in seeds)
            areas[method] = area(
                [tuple(np.mean([p.accuracy(s) for p in seeds]) for s in ("new", "prior")) for seeds in points]
            )
        gaps.append(areas["graft"] - areas["opsd_scaled"])
    assert of(found, "frontier_vs_opsd")["value"]["mean"] == pytest.approx(np.mean(gaps), abs=1e-6) and len(gaps) == 3


def test_frontier_claims_without_their_points_are_missing(builder):
    job = builder.job()
    job.spec = {**job.spec, "frontiers": [f for f in job.spec["frontiers"] if f["task"] != "zup"]}
    found = claims.make_claims(collect(job))
    c = of(found, "frontier_vs_opsd")
    assert (c["verdict"], c["value"], c["notes"]) == ("missing", None, ["zup: no tested frontier"])
    assert of(found, "frontier_vs_opsd", "parallel")["verdict"] != "missing"
    assert found["frontier"]["verdict"] in ("inconclusive", "refuted")  # never supported by what is left


def test_frontiers_of_several_models_are_their_own(tmp_path):
    builder = synthetic.tiny_study(tmp_path, seeds=(0, 1), model_seeds=(0, 1), donors=("deployed", "base"))
    found = claims.make_claims(collect(builder.job(protocols=("single", "sequential", "parallel"))))
    for model in (0, 1, "all"):
        c = next(
            c for c in found["comparisons"]
            if (c["name"], c["protocol"], c["style"], c["model_seed"]) == ("frontier_vs_opsd", "single", "own", model)
        )  # fmt: skip
        assert c["value"]["seeds"] == 2 and c["verdict"] in ("supported", "refuted", "inconclusive")


def test_kinds_have_verdicts_of_their_own(found):
    head = [c for c in found["comparisons"] if c["kind"] == "claim" and c["task"] == "all"]
    assert found["main_comparisons"] == len(head) and found["verdict"] == claims.overall(head)
    for kind in ("frontier", "equal_cost"):
        own = [c for c in found["comparisons"] if c["kind"] == kind and c["task"] == "all"]
        assert found[kind]["verdict"] == claims.overall(own) and found[kind]["comparisons"] == len(own)
    assert all(set(c["bootstrap"]) == {"new", "prior"} for c in head)


def test_holm_never_makes_a_verdict_stronger(found):
    for c in found["comparisons"]:
        if c["adjusted"] is not None and c["verdict"] == "inconclusive":
            assert c["adjusted"] == "inconclusive"
        if c["adjusted"] not in (None, "missing"):
            plain = [c[name] for name in ("new", "prior", "value") if c.get(name)]
            assert len(c["p_holm"]) == len(plain)
            for p, value in zip(c["p_holm"].values(), plain, strict=True):
                # adjusted p at most .05 only where the plain interval leaves the threshold outside
                assert p > 0.05 or value["low"] > c["threshold"] or value["high"] < c["threshold"]


@pytest.mark.parametrize(
    ("plain", "adjusted", "said"),
    [
        (["refuted", "supported"], ["inconclusive", "supported"], "inconclusive"),
        (["refuted", "supported"], ["refuted", "supported"], "refuted"),
        (["supported", "supported"], ["inconclusive", "inconclusive"], "supported"),
        (["supported", "missing"], ["supported", "missing"], "inconclusive"),
    ],
)
def test_overall_verdict(plain, adjusted, said):
    comparisons = [{"verdict": v, "adjusted": a} for v, a in zip(plain, adjusted, strict=True)]
    assert claims.overall(comparisons) == said


def test_equal_cost_drops_updates_until_neither_side_is_dearer(found, read):
    """A graft's search trains on four donors, OPSD's on one: at twice the FLOPs per step that buys two donors."""
    graft, opsd = (
        next(s for s in read.selected if (s.labels["family"], s.labels["style"], s.labels["task"]) == (f, "own", "zup"))
        for f in ("graft", "opsd")
    )
    assert graft.search_cost["flops"] > opsd.search_cost["flops"]
    kept = affordable(read, graft, opsd.search_cost["flops"], "flops")
    assert {c["label"]["donor"] for c in kept} == {"deployed", "base"}
    assert read.cost(trained(kept))["flops"] <= opsd.search_cost["flops"]
    assert affordable(read, graft, 1.0, "flops") == []
    c = of(found, "graft_vs_opsd_equal_flops", task="zup")
    assert any("candidates are within the budget" in note for note in c["notes"])
    front = next(f for f in read.frontiers if (f.labels["style"], f.labels["task"]) == ("own", "zup"))
    within = front.methods["graft", "flops", "opsd_scaled"]
    assert within and set(within) <= {c["name"] for c in kept}
    assert "graft, zup: " in " ".join(of(found, "frontier_vs_opsd_equal_flops")["notes"])
    best = max(kept, key=lambda c: c["score"])
    if best["name"] == graft.choice["choice"]:
        assert c["new"] == of(found, "graft_vs_opsd", task="zup")["new"]


def test_a_threshold_moves_the_verdict(builder):
    job = builder.job(protocols=("single",))
    base = {**synthetic.CLAIMS[0], "kind": "control", "statistic": "prior", "name": "x"}
    sides = {"x": 0.0, "far": 0.9, "below": -0.9}
    job.spec["claims"] = [{**base, "name": name, "threshold": t} for name, t in sides.items()]
    found = claims.make_claims(collect(job))
    assert {of(found, name)["value"]["mean"] for name in sides} == {of(found, "x")["value"]["mean"]}
    assert of(found, "far")["verdict"] == "refuted" and of(found, "below")["verdict"] == "supported"
    assert found["verdict"] == "missing"  # no claim of the headline is left


def test_conditions_limit_where_a_claim_is_tested(builder):
    job = builder.job()
    only = {**synthetic.CLAIMS[0], "condition": {"protocols": ["single"], "styles": ["expert"], "equal": None}}
    job.spec["claims"] = [only]
    places = {(c["protocol"], c["style"]) for c in claims.make_claims(collect(job))["comparisons"]}
    assert places == {("single", "expert")}


def test_all_equal_answers_leave_the_verdict_open(tmp_path):
    """Zero variance over seeds and items, and no difference: inconclusive, with an interval of positive width."""
    builder = synthetic.StudyBuilder(tmp_path)
    builder.deployed(0)
    candidates = [synthetic.candidate("sft", "deployed", 1.0, "wug", "own", builder.seeds)]
    builder.family("graft", "single", "own", "wug", 0, candidates)
    opsd = [synthetic.candidate("opsd", "deployed", 1.0, "wug", "own", builder.seeds)]
    builder.family("opsd", "single", "own", "wug", 0, opsd)
    for path in tmp_path.glob("store/evaluate/tests.*/*.jsonl.gz"):
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        path.write_bytes(gzip.compress("".join(json.dumps({**r, "correct": True}) + "\n" for r in rows).encode()))
    job = builder.job()
    job.spec["tasks"] = ["wug"]
    found = claims.make_claims(collect(job))
    c = of(found, "graft_vs_opsd", task="wug")
    assert c["verdict"] == "inconclusive" and c["new"]["mean"] == 0 and c["new"]["low"] < 0 < c["new"]["high"]


# ---- faults in what is read -----------------------------------------------------------------------
@pytest.fixture
def copied(builder, tmp_path):
    """The job, with one evaluation, one selection and one training log that a test may damage."""
    root = tmp_path / "study"
    shutil.copytree(builder.root / "provenance", root / "provenance")
    shutil.copytree(builder.root / "store", root / "store")
    job = builder.job(results=root / "results")
    job._inputs = {
        role: [root / path.relative_to(builder.root) for path in paths] for role, paths in job._inputs.items()
    }
    job.store.root = root
    return job, root


@pytest.mark.parametrize(
    ("pattern", "old", "new", "message"),
    [
        ("select/*/choice.json", '"score": 0', '"score": NaN, "was": 0', r"choice\.json: holds NaN"),
        ("evaluate/*/p.json", '"correct": 1', '"correct": NaN, "was": 1', r"p\.json: holds NaN"),
        ("rollout/*/summary.json", '"accuracy": 0', '"accuracy": Infinity, "was": 0', r"summary\.json: holds Infinity"),
        ("select/*/choice.json", "{", "", r"choice\.json: not valid JSON"),
        ("evaluate/*/p.json", '"n": 10', '"n": 1', r"correct on skill\d+ is no count"),
    ],
)
def test_a_metric_that_is_no_number_names_its_file(copied, pattern, old, new, message):
    job, root = copied
    path = next(p for p in sorted((root / "store").glob(pattern)) if old in p.read_text())
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=message):
        collect(job)


def test_a_training_log_with_nan_names_file_and_step(copied):
    job, root = copied
    study = collect(job)
    path = sorted((root / "store" / "train").glob("*/training.jsonl"))[0]
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n')
    with pytest.raises(UserError, match=rf"{path.parent.name}/training\.jsonl: loss is nan at step 2"):
        training_curves(job, study)
    path.unlink()
    assert path.parent.name not in training_curves(job, study) and training_curves(job, study)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("relative_norm,0.01", "relative_norm,nan", "a value is no number"),
        ("norm,3", "norm,inf", "a value is no number"),
        ("norm,3", "norm,three", "no table of updates"),
        ("quantity,value", "quantity", "no table of updates"),
    ],
)
def test_a_table_of_updates_without_numbers_is_named(copied, old, new, message):
    job, root = copied
    assert len(deltas(job)) > 100
    path = sorted((root / "store" / "merge").glob("deltas.*/deltas.csv"))[0]
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=rf"{path.parent.name}/deltas\.csv: {message}"):
        deltas(job)


def test_damaged_predictions_are_named(copied):
    job, root = copied
    path = sorted((root / "store" / "evaluate").glob("tests.*/*.jsonl.gz"))[0]
    whole = path.read_bytes()
    for content, message in ((whole[: len(whole) // 2], "damaged predictions"), (gzip.compress(b""), "0 items of the")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{path.parent.name}/{path.name}: {message}"):
            claims.make_claims(collect(job))


def test_values_of_predictions_are_those_of_the_record(read):
    point = read.selected[0].points[0]
    for suite, answers in point.answers.items():
        assert answers.values.sum() == sum(s["correct"] for s in point.scores if s["suite"] == suite)
        assert answers.values.dtype == np.float64
