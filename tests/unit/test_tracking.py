"""Live logging: off unless asked for, and never the end of a training."""

import importlib.machinery
import sys
import types

import pytest

from grafting.errors import UserError
from grafting.provenance.tracking import PACKAGES, Tracker, check_tracker


def test_a_tracker_that_is_not_installed_is_named(monkeypatch):
    check_tracker(None)
    monkeypatch.setitem(PACKAGES, "wandb", ("no_such_package_at_all",))
    with pytest.raises(UserError, match="tracking: wandb is not installed"):
        check_tracker("wandb")


def test_no_tracker_imports_nothing_and_writes_nothing(tmp_path):
    tracker = Tracker(None, "job", tmp_path / "t", pytest.fail)
    tracker.log("sft", {"step": 1, "loss": 2.0})
    tracker.close()
    assert not (tmp_path / "t").exists()


def test_a_tracker_that_fails_is_said_once(tmp_path, monkeypatch):
    said = []
    broken = types.ModuleType("wandb")
    broken.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    broken.init = lambda **options: (_ for _ in ()).throw(ConnectionError("no network"))
    monkeypatch.setitem(sys.modules, "wandb", broken)
    tracker = Tracker("wandb", "job", tmp_path, said.append)
    for step in (1, 2):
        tracker.log("sft", {"step": step, "loss": 2.0, "divergence": "forward_kl"})
    tracker.close()
    assert len(said) == 1 and "no network" in said[0]
