"""What planning costs at the size of a paper: 500 and 5 000 jobs, in seconds and as growth per job.

    python benchmarks/plan_grid.py [--repeat 3] [--profile]

Measured in fresh processes, the fastest of a few: the way from the configuration to the keys (with the digests of
the code, without Python's imports), and whole dry runs of Snakemake in a scratch folder with no job done and with
every job done (sentinels without content: only their existence decides). --profile prints where the time of one
dry run of the large grid goes. Bounds: keys 1 s, dry run 8 s with all present and 15 s with none, for 5 000 jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

PROJECT = Path(__file__).resolve().parents[1]
LARGE_DONORS = [*(f"p{n}" for n in range(10, 100, 10)), "base", "deployed"]
#: Overlays on config.yaml: many donors, learning rates and seeds; scales and masks as in the default study.
GRIDS = {
    500: {"seeds": [0, 1], "lrs": 4, "donors": ["p60", "p80", "base", "deployed"], "tasks": ["wug", "zup", "dax"]},
    5000: {"seeds": [0, 1, 2, 3, 4], "lrs": 9, "donors": LARGE_DONORS, "tasks": ["wug", "zup", "dax", "pim"]},
}
KEYS = """
import sys, time
import yaml
from grafting.plan import front, study
start, used = time.perf_counter(), time.process_time()
jobs = study.Study(front.load_config(yaml.safe_load(open("grid.yaml")))).jobs
print(len(jobs), time.perf_counter() - start, time.process_time() - used)
"""
IDS = """
import json, yaml
from grafting.plan import front, study
from grafting.provenance.store import Store
jobs = study.Study(front.load_config(yaml.safe_load(open("grid.yaml")))).jobs
print(json.dumps([str(Store().sentinel(i)) for i in jobs] + ["results/" + name for name in front.EXPORTED]))
"""


def overlay(grid: dict) -> dict:
    """A grid as a configuration."""
    lrs = [round(1e-4 * (n + 1), 6) for n in range(grid["lrs"])]
    return {
        "preset": "grid",
        "seeds": grid["seeds"],
        "tasks": grid["tasks"],
        "styles": ["own"],
        "learners": {"sft": {"lrs": lrs[:3]}, "opsd": {"lrs": lrs[:3]}},
        "graft": {"lrs": lrs, "donors": grid["donors"], "expert_donors": []},
        "sequential": {"regraft_scales": [0.7, 0.9] if len(lrs) > 3 else [0.7]},
    }


def folder_of(root: Path, grid: dict) -> Path:
    """A study folder with the grid's overlay and no results."""
    for part in ("Snakefile", "rules", "profiles", "envs", "config.yaml"):
        source = PROJECT / part
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, root / part)
    (root / "grid.yaml").write_text(yaml.safe_dump(overlay(grid)))
    return root


def cpu() -> float:
    """CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(folder: Path, *command: str) -> tuple[float, float, str]:
    """Wall seconds, CPU seconds and output of a command in the folder."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT / "src")}
    start, before = time.perf_counter(), cpu()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds, used = time.perf_counter() - start, cpu() - before
    if done.returncode:
        raise SystemExit(f"{command} failed\n{done.stdout}\n{done.stderr}")
    return seconds, used, done.stdout


def measure(folder: Path, repeat: int) -> dict[str, float]:
    """Jobs, and the fastest of `repeat` runs of each kind, in seconds."""
    found: dict[str, float] = {}

    def best(name: str, times: list[tuple[float, float]]) -> None:
        found[f"{name}, wall s"], found[f"{name}, CPU s"] = (min(column) for column in zip(*times, strict=True))

    for name, place in (("keys, first time", None), ("keys", folder / "work")):
        if place:  # from the second command on, what was found in the package's modules is kept there
            place.mkdir()
            run(folder, sys.executable, "-c", KEYS)
        outputs = [run(folder, sys.executable, "-c", KEYS)[2].split() for _ in range(repeat)]
        best(name, [(float(wall), float(used)) for _, wall, used in outputs])
    found["jobs"] = int(outputs[0][0])
    dry = (sys.executable, "-m", "snakemake", "-n", "--configfile", "grid.yaml")
    best("dry run, none", [run(folder, *dry)[:2] for _ in range(repeat)])
    for name in json.loads(run(folder, sys.executable, "-c", IDS)[2]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    done = [run(folder, *dry) for _ in range(repeat)]
    if "Nothing to be done" not in done[0][2]:
        raise SystemExit(f"every job is there, but Snakemake plans some:\n{done[0][2][-2000:]}")
    best("dry run, all", [times[:2] for times in done])
    plan = max((folder / "work" / "plans").glob("*.jsonl"), key=lambda path: path.stat().st_size)
    return {**found, "plan file, MB": plan.stat().st_size / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    rows = {}
    for size, grid in GRIDS.items():
        with tempfile.TemporaryDirectory() as place:
            folder = folder_of(Path(place), grid)
            rows[size] = measure(folder, options.repeat)
            if options.profile and size == max(GRIDS):
                run(folder, sys.executable, "-m", "cProfile", "-o", "profile", "-m", "snakemake", "-n",
                    "--configfile", "grid.yaml")  # fmt: skip
                text = "import pstats; pstats.Stats('profile').sort_stats('cumtime').print_stats(60)"
                print(run(folder, sys.executable, "-c", text)[2])
    small, large = rows[min(rows)], rows[max(rows)]
    print(f"{'':22s} {'small':>8s} {'large':>8s} {'ratio':>8s}")
    for name in ["jobs", *(name for name in small if name != "jobs")]:
        print(f"{name:22s} {small[name]:8.2f} {large[name]:8.2f} {large[name] / small[name]:8.1f}")


if __name__ == "__main__":
    main()
