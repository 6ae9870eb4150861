"""Every fault in a configuration is one message that names the key; nothing starts."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grafting.config import resolve
from grafting.config.load import read_yaml
from grafting.errors import UserError

PROJECT = Path(__file__).resolve().parents[2]
DEFAULT = yaml.safe_load((PROJECT / "config.yaml").read_text())


def with_(**overlay):
    return resolve(DEFAULT, overlay)


def test_default_is_legal():
    config = resolve(DEFAULT)
    assert config.preset == "tiny"
    assert config.donor_names() == ["p10", "p20", "p30", "p40", "p50", "p60", "p70", "p80", "p90", "base", "deployed"]


#: presets that are overlays on others
BELOW = {
    "paper-sdft": ["paper"], "paper-think": ["paper"], "paper-lite": ["paper", "paper-sdft"],
}  # fmt: skip


@pytest.mark.parametrize("preset", sorted(p.stem for p in (PROJECT / "presets").glob("*.yaml")))
def test_presets_are_legal_overlays(preset):
    names = [*BELOW.get(preset, []), preset]
    overlays = [yaml.safe_load((PROJECT / "presets" / f"{name}.yaml").read_text()) for name in names]
    if preset.startswith("paper"):
        # revisions that nobody here has seen stay null, and the preset stops naming them
        with pytest.raises(UserError, match="revision"):
            resolve(DEFAULT, *overlays)
    else:
        assert resolve(DEFAULT, *overlays).preset == preset


@pytest.mark.parametrize(
    ("overlay", "named"),
    [
        ({"seedz": [0]}, "did you mean seeds?"),
        ({"training": {"step": 5}}, "did you mean training.steps?"),
        ({"lineage": {"pretrain": {"stepps": 5}}}, "did you mean lineage.pretrain.steps?"),
        ({"learners": {"opsd": {"guard": {"treshold": 0.5}}}}, "did you mean learners.opsd.guard.threshold?"),
        ({"training": {"steps": "many"}}, "training.steps"),
        ({"training": {"steps": 0}}, "training.steps"),
        ({"seeds": [0, 0]}, "twice"),
        ({"tasks": ["wugg"]}, "did you mean wug?"),
        ({"tasks": ["science"]}, "lineage.kind"),
        ({"learners": {"sdpo2": {}}}, "learners.sdpo2"),
        ({"learners": {"opds": {"lrs": [1e-4]}}}, "did you mean opsd?"),
        ({"learners": {"dft": {}}}, "learners.dft.lrs: this key is missing"),
        ({"learners": {"mine": {"objective": "dft", "lrs": [0]}}}, "learners.mine.lrs"),
        ({"learners": {"sft_kl": {"lrs": [1e-4], "coeficient": 1}}}, "did you mean learners.sft_kl.coefficient?"),
        ({"learners": {"graft": {"objective": "dft", "lrs": [1e-4]}}}, "learners.graft: this name"),
        ({"learners": {"dft": {"lrs": [1e-4], "styles": ["nosuch"]}}}, "learners.dft.styles"),
        ({"learners": {"b": {"objective": "opsd", "max_new_tokens": 64}}}, "learners.b.max_new_tokens"),
        ({"learners": {"opsd": {"vocabulary": "top_k"}}}, "top_k go together"),
        ({"learners": {"opsd": {"vocabulary": "sampled_token"}}}, "divergence: reverse_kl"),
        ({"learners": {"opsd": {"rounds": 2, "teacher": "ema"}}}, "rounds start from the saved model"),
        ({"learners": {"opsd": {"rollouts_per_prompt": 2}}}, "rollouts_per_prompt belongs to rounds"),
        ({"training": {"lora": {"rank": 0, "alpha": 1}}}, "training.lora.rank"),
        (
            {
                "self_improvement": {
                    "own": {"method": "star", "samples": 1, "temperature": 1.0, "max_new_tokens": 9, "lr": 1e-4}
                }
            },
            "self_improvement.own",
        ),
        (
            {
                "self_improvement": {
                    "p": {
                        "method": "pedagogical",
                        "teacher": "sft",
                        "samples": 1,
                        "temperature": 1.0,
                        "max_new_tokens": 9,
                    }
                }
            },
            "self_improvement.p.teacher",
        ),
        ({"graft": {"donors": ["p61"]}}, "p61"),
        ({"preset": "../escape"}, "preset"),
        ({"task_options": {"wug": {"val_itemz": 3}}}, "did you mean val_items?"),
        ({"task_options": {"wug": {"val_items": "many"}}}, "task_options.wug.val_items"),
        ({"styles": ["owm"]}, "did you mean own?"),
        ({"learners": {"sft": {"lrs": [float("inf")]}}}, "learners.sft.lrs"),
        ({"training": {"betas": [1.0, 1.0]}}, "training.betas"),
        ({"seeds": [2**70]}, "seeds"),
        ({"graft": {"lrs": [3.0e-4, 3.0000001e-4]}}, "six digits"),
        ({"learners": {"opsd": {"styles": ["nosuch"]}}}, "opsd: null"),
        ({"learners": {"opsd": {"skip_tokens": 9}}}, "skip_tokens"),
        ({"lineage": {"pretrain": {"checkpoints": 200, "steps": 200}}}, "checkpoints"),
        ({"evaluation": {"max_new_tokens": 100}}, "evaluation.max_new_tokens"),
        ({"lineage": {"pretrain": {"skill_weights": {"factt": 2}}}}, "did you mean fact?"),
        ({"lineage": {"architecture": {"width": 24}}}, "even number"),
        ({"parallel": {"operators": [{"operator": "ties", "density": 0, "scales": [1]}]}}, "density"),
        ({"learners": {"opsd": {"divergence": "jsd", "beta": 1.0}}}, "beta"),
        ({"lineage": {"kind": "pretrained", "deployed": {}}}, "exactly one of"),
    ],
)
def test_fault_names_the_key(overlay, named):
    with pytest.raises(UserError) as caught:
        with_(**overlay)
    assert named in str(caught.value)


def test_a_further_opsd_takes_what_it_does_not_say_from_the_main_one():
    config = with_(learners={"opsd_jsd": {"objective": "opsd", "divergence": "jsd"}, "dft": {"lrs": [1e-4]}})
    main, other = config.learners.opsd, config.learners.controls["opsd_jsd"]
    assert other.options() == main.options() | {"divergence": "jsd"} and other.lrs == main.lrs
    assert set(config.learners.controls) == {"opsd_jsd", "dft"}
    assert with_(learners={"dft": None}).learners.controls == {}


def test_options_that_are_not_used_enter_no_spec():
    """Else an option that is added would make every job anew."""
    assert resolve(DEFAULT).learners.opsd.options() == {
        "divergence": "forward_kl",
        "beta": 0.5,
        "teacher": "frozen",
        "ema_rate": 0.02,
        "temperature": 1.0,
        "max_new_tokens": 9,
        "skip_tokens": 0,
        "guard": {"threshold": 0.5, "action": "warn", "every": 20},
    }
    assert with_(learners={"opsd": {"hint_share": 0.5}}).learners.opsd.options()["hint_share"] == 0.5
    assert not {"lora", "gradient_checkpointing", "processes"} & set(resolve(DEFAULT).training.spec())
    assert with_(training={"processes": 2}).training.spec()["processes"] == 2
    assert with_(training={"gradient_checkpointing": True}).training.spec()["gradient_checkpointing"] is True


def test_numbers_given_as_strings_are_numbers():
    # YAML 1.1 reads 1e-4 as a string
    overlay = yaml.safe_load("learners: {sft: {lrs: [1e-4]}}\ntraining: {steps: '12'}")
    config = resolve(DEFAULT, overlay)
    assert config.learners.sft.lrs == [1e-4]
    assert config.training.steps == 12


def test_a_key_given_twice_is_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("seeds: [1]\nstyles: [own]\nseeds: [2]\n")
    with pytest.raises(UserError, match="line 3: the key 'seeds' is given twice"):
        read_yaml(path)


def test_kind_replaces_the_whole_mapping():
    config = with_(
        tasks=["science"],
        styles=["expert"],
        prior={**DEFAULT["prior"], "kind": "mmlu"},
        lineage={"kind": "pretrained", "deployed": {"path": "models/here", "sha256": "0" * 64}},
        graft={"donors": ["deployed"], "expert_donors": [], "masks": {"donors": [], "scales": [], "candidates": []}},
        sequential={"sum_donors": []},
        parallel={"donors": []},
    )
    assert config.lineage.kind == "pretrained"
    assert config.donor_names() == ["deployed"]


def test_misspelt_key_stops_snakemake_at_once(tmp_path):
    (tmp_path / "config.yaml").write_text((PROJECT / "config.yaml").read_text().replace("seeds:", "sedes:", 1))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "snakemake",
            "--snakefile",
            PROJECT / "Snakefile",
            "--directory",
            tmp_path,
            "--workflow-profile",
            "none",
            "-n",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "did you mean seeds?" in done.stderr
    assert "Traceback" not in done.stderr
    # it stops before any heavy library is loaded: a second of processor time on a quiet machine
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 8
    assert not (tmp_path / "provenance").exists()
