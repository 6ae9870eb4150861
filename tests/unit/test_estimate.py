"""`grafting estimate` and the paper presets: what is null is named, the grid is SDFT's, sums by hand."""

from collections import Counter

import pytest

from grafting import cli
from grafting.config import resolve
from grafting.config.grid import Setting
from grafting.config.load import read_yaml, unknown_settings
from grafting.errors import UserError
from grafting.plan.code import PROJECT
from grafting.plan.estimate import Estimate, read_table
from grafting.plan.study import Study

PRESETS = PROJECT / "presets"
PAPER = (["paper"], ["paper", "paper-think"], ["paper", "paper-sdft"], ["paper", "paper-sdft", "paper-lite"])


def layers(names) -> list[dict]:
    return [read_yaml(PROJECT / "config.yaml"), *(read_yaml(PRESETS / f"{name}.yaml") for name in names)]


@pytest.mark.parametrize("names", PAPER, ids="+".join)
def test_what_nobody_has_seen_stops_the_run_and_is_named(names):
    with pytest.raises(UserError) as error:
        resolve(*layers(names))
    assert "lineage.deployed.revision" in str(error.value)
    for key in ("num_fewshot", "chat_template", "metric"):
        assert f"prior.harness.ifeval.{key}" in str(error.value)
    unknown: list[str] = []
    config = resolve(*layers(names), unknown=unknown)
    assert unknown == unknown_settings(config) and all(key in str(error.value) for key in unknown)
    judged = "medical" in config.tasks
    assert judged == ("judge.prompt" in unknown) == ("data_sources.medical.revision" in unknown)


def test_grid_of_the_paper_preset():
    study = Study(resolve(*layers(["paper"]), unknown=[]))
    trained = [
        j for j in study.jobs.values() if j.stage == "train" and j.name.startswith("traces") and ".s0." in j.name
    ]
    opsd = [j.spec for j in trained if j.spec["objective"] == "opsd"]
    # the two donors differ by what is still null
    assert len(opsd) == 54 and len({j.key for j in trained if ".pretraining." not in j.name}) == len(trained) - 3
    assert Counter(s["opsd"]["ema_rate"] for s in opsd) == {0.01: 18, 0.02: 18, 0.05: 18}
    assert {(s["batch_size"], s["steps"]) for s in opsd} == {
        (16, 99), (16, 197), (32, 50), (32, 99), (64, 25), (64, 50)  # 1571 items, once or twice
    }  # fmt: skip
    sft = [j for j in trained if j.spec["objective"] == "sft" and ".deployed." in j.name]
    assert len(sft) == 18 + 3  # and the grafts' own, at the common batch and steps
    assert all(s["micro_batch_size"] == 4 for s in opsd)


def test_setting():
    plain, twice = Setting(1e-5), Setting(1e-5, epochs=2, batch_size=32)
    assert (
        plain == 1e-5
        and hash(plain) == hash(1e-5)
        and twice != 1e-5
        and twice == Setting(1e-5, batch_size=32, epochs=2)
    )
    assert f"{plain:g}" == "1e-05" and f"{twice:g}" == "1e-05.e2.b32"
    assert len({plain, twice, 1e-5, Setting(1e-5, epochs=1)}) == 3


def test_resolved_config_resolves_again():
    config = resolve(*layers(["paper"]), unknown=[])
    again = resolve(config.model_dump(mode="json"), unknown=[])
    assert again == config and list(Study(again).jobs) == list(Study(config).jobs)


def test_estimate_by_hand():
    study = Study(resolve(*layers(["paper", "paper-sdft", "paper-lite"]), unknown=[]))
    table = read_table()
    estimate = Estimate(study, table)
    assert estimate.parameters == 7e9  # nominal, from the name
    job = next(j for j in study.jobs.values() if j.name.startswith("science.expert.sft.deployed.lr1e-05.e2.b32"))
    steps = -(-2 * 1571 // 32)
    assert job.spec["steps"] == steps
    seconds = 6 * 7e9 * steps * 32 * (200 + 150) / 160e12 + 60
    assert estimate.of(job).seconds == pytest.approx(seconds)
    assert estimate.of(job).disk == 14e9 and estimate.of(job).memory == 7e9 * 16
    stages = estimate.stages()
    assert sum(a.jobs for a in stages.values()) == len(study.jobs)
    assert stages["train"].generated > 0 and stages["data"].seconds == 0


def test_estimate_prints_its_table(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(PROJECT)
    assert cli.main(["estimate", "presets/paper.yaml"]) == 0
    shown = capsys.readouterr().out
    for word in ("train", "GPU hours", "disk GB", "memory GB", "prior.harness.mmlu.num_fewshot", "throughput.yaml"):
        assert word in shown
    table = tmp_path / "mine.yaml"
    table.write_text((PROJECT / "throughput.yaml").read_text().replace("gpu_memory_gb: 80", "gpu_memory_gb: 200"))
    assert cli.main(["estimate", "presets/paper.yaml", "--throughput", str(table)]) == 0
    assert "such devices" not in capsys.readouterr().out
    table.write_text("device: x\n")
    assert cli.main(["estimate", "presets/paper.yaml", "--throughput", str(table)]) == 2
    assert "missing or unknown keys" in capsys.readouterr().err
