"""DVC's own commands on a study, clones of it, branches that meet, and the verbs that keep it whole."""

import csv
import hashlib
import io
import json
import subprocess
from pathlib import Path

import pytest
import yaml

from grafting.plan.front import load_study
from grafting.provenance.store import Store

from .conftest import BIN, PROJECT, Folder, copied

GRAFTING = ("python", "-m", "grafting.cli")
SMOKE = ("--configfile", "presets/smoke.yaml")


def tree(folder: Path, *parts: str) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for part in parts
        for path in sorted((folder / part).rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def shared(finished, tmp_path_factory) -> Folder:
    """The finished study as its owner shares it: the smoke preset is its config, all is committed and pushed."""
    folder = copied(finished, root := tmp_path_factory.mktemp("shared") / "study")
    text = folder.run(*GRAFTING, "config", *SMOKE).stdout
    (root / "config.yaml").write_text(text)
    folder.run("dvc", "remote", "add", "-q", "-d", "storage", str(root.parent / "remote"))
    folder.run("dvc", "push", "-q")
    folder.git("add", "-A")
    folder.git("commit", "-qm", "study")
    return folder


@pytest.fixture
def owner(shared, tmp_path) -> Folder:
    """A copy of the owner's folder, cache and payloads included."""
    return set_up(copied(shared, tmp_path / "owner"))


@pytest.fixture
def clone(shared, tmp_path) -> Folder:
    """A clone of it: no payload, an empty cache."""
    shared.git("clone", "-q", str(shared.root), str(tmp_path / "clone"))
    return set_up(Folder(tmp_path / "clone"))


def set_up(folder: Folder) -> Folder:
    """What `make setup` does beside installing."""
    folder.git("config", "user.name", "t")
    folder.git("config", "user.email", "t@example.org")
    folder.git("config", "merge.dvc.driver", f"{BIN}/python -m grafting.provenance.merging %O %A %B")
    folder.git("config", "merge.ours.driver", "true")
    return folder


def complete(folder: Folder) -> bool:
    done = folder.run("snakemake", "-n")
    return "Nothing to be done" in done.stdout + done.stderr


def test_a_clone_needs_no_payload_and_a_new_scale_fetches_only_what_it_reads(clone):
    assert complete(clone)
    status = clone.run(*GRAFTING, "status").stdout
    assert "only in the DVC remote 'storage'" in status
    assert not (clone.root / "store" / "train").exists()
    entries, before = clone.lists(), set(clone.sidecars())

    clone.edit("config.yaml", "control_scales:\n  - 0.5", "control_scales:\n  - 0.25\n  - 0.5")
    clone.run("snakemake")
    sidecars = clone.sidecars()
    fresh = {name: sidecars[name] for name in set(sidecars) - before}
    assert fresh and {name.partition("/")[0] for name in fresh} <= {"evaluate", "select", "merge", "code"}
    swept = [s for n, s in fresh.items() if n.startswith("evaluate/val.")]
    assert swept and all(s["metrics"]["points_computed"] == 1 for s in swept)
    # models and data that the new points combine are here, checkpoints that they do not are not
    assert not list((clone.root / "store").glob("train/*.sft.base.*"))
    assert not list((clone.root / "store").glob("train/*~*"))  # those of sequences
    assert list((clone.root / "store").glob("train/*.opsd.deployed.*"))
    # DVC lists all that it listed before
    now = clone.lists()
    assert all(names <= now[stage] for stage, names in entries.items())
    assert len(now["evaluate"]) > len(entries["evaluate"])
    assert clone.run(*GRAFTING, "status").returncode == 0


def test_pull_brings_everything_and_push_what_is_new(clone, shared, tmp_path):
    clone.run("dvc", "pull", "-q")
    payloads = tree(clone.root, "store/train", "store/evaluate", "store/merge", "store/models")
    assert payloads == tree(shared.root, "store/train", "store/evaluate", "store/merge", "store/models")
    status = clone.run(*GRAFTING, "status", "--deep").stdout
    assert f"present in store/:                   {len(clone.payloads())}" in status
    assert "Everything is up to date" in clone.run("dvc", "push", check=True).stdout
    models = sorted(path.name for path in (clone.root / "results" / "models").iterdir())
    assert models and models == sorted(path.name for path in (shared.root / "results" / "models").iterdir())
    # selected models have fixed places, in any revision, and names once a tag gives them a version
    place = "results/models/single.own.wug.s0.m0"
    clone.git("tag", "-am", "first", "graft-wug@v0.1.0")
    clone.run("dvc", "get", str(clone.root), place, "--rev", "HEAD", "-o", str(tmp_path / "model"))
    clone.run("dvc", "artifacts", "get", str(clone.root), "graft-wug", "-o", str(tmp_path / "named"))
    wanted = sorted(tree(shared.root, place).values())
    assert sorted(tree(tmp_path, "model").values()) == sorted(tree(tmp_path, "named").values()) == wanted


def test_repro_and_its_diffs(owner):
    before = tree(owner.root, "store", "provenance", "results")
    done = owner.run("dvc", "repro")
    assert "Nothing to be done" in done.stdout + done.stderr
    assert tree(owner.root, "store", "provenance", "results") == before
    assert owner.git("status", "--porcelain", "store", "provenance", "results") == ""
    owner.git("add", "dvc.lock")
    owner.git("commit", "-qm", "dvc.lock")

    owner.edit("config.yaml", "protocols:\n- single\n- sequential\n- parallel", "protocols:\n- single")
    assert "training" not in owner.run("dvc", "params", "diff").stdout
    owner.run("dvc", "repro")
    params = json.loads(owner.run("dvc", "params", "diff", "--json").stdout)
    assert params["config.yaml"]["protocols"] == {"old": "['single', 'sequential', 'parallel']", "new": "['single']"}
    metrics = json.loads(owner.run("dvc", "metrics", "diff", "--json").stdout)["results/metrics.json"]
    gone = [name for name, change in metrics.items() if name.startswith("sequential.") and change["new"] is None]
    assert gone and all(not name.startswith("single.") for name in metrics)
    page = owner.run("dvc", "plots", "diff", "HEAD", "--json").stdout
    assert "frontier.svg" in page
    owner.run("dvc", "plots", "diff", "HEAD")
    html = (owner.root / "dvc_plots" / "index.html").read_text()
    assert "frontier" in html


def test_old_revision_comes_back_with_git_and_dvc_checkout(owner):
    before = tree(owner.root, "store", "provenance", "results")
    owner.edit("config.yaml", "control_scales:\n  - 0.5", "control_scales:\n  - 0.25")
    owner.run("snakemake")
    after = tree(owner.root, "store", "provenance", "results")
    owner.git("add", "-A")
    owner.git("commit", "-qm", "other scale")
    assert before != after
    owner.git("checkout", "-q", "HEAD~1")
    owner.run("dvc", "checkout", "-q")
    assert tree(owner.root, "store", "provenance", "results") == before
    assert complete(owner)
    owner.git("checkout", "-q", "-")
    owner.run("dvc", "checkout", "-q")
    assert tree(owner.root, "store", "provenance", "results") == after


@pytest.mark.parametrize("temp", [(), ("--temp",)], ids=["workspace", "temp"])
def test_experiment_carries_its_records_and_shows_its_numbers(owner, temp):
    entries, before = owner.lists(), set(owner.sidecars())
    workspace = tree(owner.root, "store", "provenance", "results")
    owner.run("dvc", "exp", "run", *temp, "-n", "other", "-S", "config.yaml:graft.control_scales=[0.25]")
    names = owner.git("ls-tree", "-r", "--name-only", experiment(owner, "other"), "provenance/").split()
    fresh = {name.removeprefix("provenance/") for name in names} - before
    assert any(name.startswith("evaluate/val.") for name in fresh)
    assert before <= {name.removeprefix("provenance/") for name in names}
    if temp:
        assert tree(owner.root, "store", "provenance", "results") == workspace
    rows = list(csv.DictReader(io.StringIO(owner.run("dvc", "exp", "show", "--csv").stdout)))
    (row,) = [row for row in rows if row["Experiment"] == "other"]
    assert row["graft.control_scales"] == "[0.25]" and float(row["single.own.sft.prior"]) >= 0
    # gc knows what experiments name
    assert "nothing to drop" in owner.run(*GRAFTING, "gc").stdout
    owner.run("dvc", "exp", "apply", "other")
    owner.run("dvc", "checkout", "-q")
    assert complete(owner)
    assert all(known <= owner.lists()[stage] for stage, known in entries.items())
    assert owner.run(*GRAFTING, "status").returncode == 0


def experiment(folder: Folder, name: str) -> str:
    (ref,) = [
        r for r in folder.git("for-each-ref", "--format=%(refname)", "refs/exps").split() if r.endswith("/" + name)
    ]
    return ref


def test_branches_with_different_new_jobs_merge(shared, clone, tmp_path):
    """On two machines: each knows of the other's payloads only what was pushed."""
    shared.git("clone", "-q", str(shared.root), str(tmp_path / "other"))
    other = set_up(Folder(tmp_path / "other"))
    sides = {"ours": (clone, "0.25"), "theirs": (other, "0.75")}
    listed = {}
    for name, (folder, scale) in sides.items():
        folder.git("checkout", "-qb", name)
        overlay = folder.root / f"{name}.yaml"
        overlay.write_text(f"graft: {{control_scales: [{scale}]}}\n")
        folder.run("snakemake", "--configfile", overlay.name)
        folder.run("dvc", "push", "-q")
        folder.git("add", "-A")
        folder.git("commit", "-qm", name)
        listed[name] = folder.lists()
    clone.git("fetch", "-q", str(other.root), "theirs:theirs")
    clone.git("merge", "-q", "--no-edit", "theirs")
    now = clone.lists()
    assert all(now[stage] == listed["ours"][stage] | listed["theirs"][stage] for stage in now)
    for name in sides:  # all is there; only the exported results are to be those of one configuration
        planned = clone.run("snakemake", "-n", "--configfile", f"{name}.yaml").stdout
        rows = [line.split() for line in planned.split("total", 1)[0].splitlines()]
        assert {row[0] for row in rows if len(row) == 2 and row[1].isdigit()} == {"report", "all"}
    assert clone.run(*GRAFTING, "status").returncode == 0


def test_verify_reruns_jobs_and_names_what_differs(study):
    before = tree(study.root, "store", "provenance", "results")
    done = study.run(*GRAFTING, "verify", *SMOKE, "--sample", "4", "--seed", "3")
    assert "4 same bytes" in done.stdout and "0 DIFFERENT" in done.stdout
    victim = next((study.root / "provenance" / "select").glob("single.own.graft.wug.*.json"))
    for path in (study.root / "provenance").glob("*/*.json"):
        side = json.loads(path.read_text())
        if path.parent.name == "select" and "payload" in side:
            side["payload"]["choice.json"]["sha256"] = "0" * 64
            path.write_text(json.dumps(side))
    script = (
        "import sys; from pathlib import Path\n"
        "from grafting.config.load import read_yaml; from grafting.plan.front import load_study\n"
        "from grafting.provenance.store import Store; from grafting.provenance import verify\n"
        "study = load_study(read_yaml(Path('presets/smoke.yaml')))\n"
        "job = verify.finished(study, Store())[sys.argv[1]]\n"
        "verdict = verify.rerun(job, Store()); print(verdict.same, verdict.details)\n"
    )
    said = study.run("python", "-c", script, f"select/{victim.stem}").stdout
    assert said.startswith("no") and f"store/select/{victim.stem}/choice.json: other bytes" in said
    changed = {path for path, h in tree(study.root, "store", "provenance", "results").items() if before.get(path) != h}
    assert all(path.startswith("provenance/select/") for path in changed)


def test_altered_checkpoint_stops_its_readers_and_is_made_again(study):
    before = tree(study.root, "store", "provenance")
    victim = next((study.root / "store" / "train").glob("wug.own.opsd.deployed.*"))
    path = victim / "model.safetensors"
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    study.edit("presets/smoke.yaml", "control_scales: [0.5]", "control_scales: [0.25, 0.5]")
    text = study.snakemake("--cores", "2", "--keep-going", check=False)
    assert f"{victim.name}/model.safetensors: altered or cut off" in text and "Traceback" not in text
    assert study.run(*GRAFTING, "status", check=False).returncode == 1
    assert f"removed: provenance/train/{victim.name}.json" in study.run(*GRAFTING, "repair").stdout
    study.edit("presets/smoke.yaml", "control_scales: [0.25, 0.5]", "control_scales: [0.5]")
    study.snakemake("--cores", "2", str(Path("provenance/train") / f"{victim.name}.json"))
    after = tree(study.root, "store", "provenance")
    record = f"provenance/train/{victim.name}.json"
    assert {p: h for p, h in before.items() if p != record and not p.endswith(".dvc")}.items() <= after.items()
    assert study.run(*GRAFTING, "status", "--deep").returncode == 0


def test_gc_drops_an_abandoned_trial_and_nothing_else(study):
    study.git("add", "-A")
    study.git("commit", "-qm", "results")
    before = tree(study.root, "store", "provenance")
    study.edit("presets/smoke.yaml", "control_scales: [0.5]", "control_scales: [0.25]")
    study.snakemake("--cores", "2")
    assert "nothing to drop" in study.run(*GRAFTING, "gc").stdout  # its records are here
    study.git("checkout", "-q", ".")
    study.git("clean", "-fdq", "provenance", "results")
    listed = study.run(*GRAFTING, "gc").stdout
    assert "store/evaluate/" in listed and "--yes" in listed
    study.run(*GRAFTING, "gc", "--yes")
    assert tree(study.root, "store", "provenance") == before
    assert study.planned() == {}
    assert Store(study.root).payload(next(iter(study.payloads())).removesuffix(".json")).is_dir()


def test_two_runs_at_once(study):
    """Snakemake lets one run into a folder; the other says so and changes nothing."""
    study.edit("presets/smoke.yaml", "control_scales: [0.5]", "control_scales: [0.25]")
    before = tree(study.root, "store", "provenance")
    command = ["snakemake", "--configfile", "presets/smoke.yaml", "--cores", "1"]
    environment = study.environment()
    first = subprocess.Popen(command, cwd=study.root, env=environment, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True)  # fmt: skip
    for line in first.stdout:
        if "Job stats" in line:
            break
    second = study.run(*command, check=False)
    first.communicate()
    assert first.returncode == 0
    assert second.returncode != 0 and "lock" in (second.stdout + second.stderr).lower()
    assert before.items() - {(p, h) for p, h in before.items() if p.endswith(".dvc")} <= tree(
        study.root, "store", "provenance").items()  # fmt: skip
    assert study.planned() == {}


def test_parsing_imports_no_dvc(study):
    done = study.run("python", "-X", "importtime", "-m", "snakemake", "-n", "--configfile", "presets/smoke.yaml")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "grafting.provenance.store" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("dvc", "dvc_data", "torch", "transformers")}


def test_dvc_yaml_names_models_that_the_default_study_makes():
    """Artifacts of dvc.yaml are among the links of the default configuration's report."""
    study = load_study(folder=PROJECT)
    names = {name for entry in study.selections for name in entry.get("models", {})}
    artifacts = yaml.safe_load((PROJECT / "dvc.yaml").read_text())["artifacts"]
    assert {Path(about["path"]).name for about in artifacts.values()} <= names
