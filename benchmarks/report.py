"""Time and memory of a report of 5 000 evaluations x 500 items, on invented data.

    python benchmarks/report.py [--evaluations 5000] [--folder FOLDER]

Writes the payloads first (minutes, not counted), then makes the report in a fresh process: tables, statistics,
claims, figures and page. To be kept: at most 60 s on 2 cores, at most 2 GB, torch never imported.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit"))

CHILD = """
import json, pickle, resource, sys, time
start = time.perf_counter()
from grafting.analysis import report
job = pickle.load(open(sys.argv[1], "rb"))
report.run(job)
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"wall": time.perf_counter() - start, "cpu": usage.ru_utime + usage.ru_stime,
                  "memory": usage.ru_maxrss * 1024, "torch": "torch" in sys.modules}))
"""


def build(root: Path, evaluations: int):
    """A study of about that many validation points (and their tests): single tasks, two styles, three seeds."""
    import synthetic_study as synthetic

    builder = synthetic.StudyBuilder(root)
    builder.deployed(0)
    cells = [(task, style) for task in synthetic.TASKS for style in ("own", "expert")]
    per_cell = max(8, round(evaluations / len(cells) / len(builder.seeds)))
    donors = ("deployed", "base", "p80", "p60")
    scales = [round(0.3 + 1.2 * i / (per_cell // 6), 3) for i in range(per_cell // 6)]
    for task, style in cells:

        def make(method, donor, scale, mask="none", task=task, style=style):
            return synthetic.candidate(method, donor, scale, task, style, builder.seeds, mask)

        grafts = [make("sft", donor, scale) for donor in donors for scale in (*scales, 1.0)]
        masked = [make("sft", "base", scale, mask) for mask in ("kfac-fisher-0.01",) for scale in (*scales, 1.0)]
        opsd = [make("opsd", "deployed", scale) for scale in (*scales, 1.0)]
        for candidate in (*grafts, *masked, *opsd):
            builder.validation(candidate, "single", style, task, 0)
        families = {
            "sft": [c for c in grafts if c["donor"] == "deployed" and c["scale"] == 1],
            "sft_scaled": [c for c in grafts if c["donor"] == "deployed"],
            "opsd": opsd[-1:],
            "opsd_scaled": opsd,
            "graft": [*grafts, *masked],
            "graft_early": [c for c in grafts if c["donor"] != "deployed"],
            "graft_unmasked": grafts,
            "graft_masked": masked,
        }
        for name, candidates in families.items():
            builder.family(name, "single", style, task, 0, candidates)
    return builder.job(protocols=("single",))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=5000)
    parser.add_argument("--folder", type=Path, help="where the invented study goes (and stays); else a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = (options.folder or Path(scratch)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        if not (root / "job.pickle").exists():
            import synthetic_study as synthetic

            synthetic.ITEMS["val"] = synthetic.ITEMS["test"] = {"prior": 20, "new": 120}  # 19 skills: 500 items
            (root / "job.pickle").write_bytes(pickle.dumps(build(root, options.evaluations)))
        job = pickle.loads((root / "job.pickle").read_bytes())
        points = len(job.spec["evaluations"]) + 3 * len(job.spec["selections"])
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(root / "job.pickle")], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'unit'}"},
        )  # fmt: skip
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        found = json.loads(done.stdout.splitlines()[-1])
        page = (job.results / "report.html").stat().st_size
    torch = "imported" if found["torch"] else "absent"
    print(f"{points} evaluations x 500 items: {found['wall']:.1f} s ({found['cpu']:.1f} s of CPU)")
    print(f"memory {found['memory'] / 1e9:.2f} GB, page {page / 1e6:.1f} MB, torch {torch}")
    print(f"ratio to the limits: time {found['wall'] / 60:.2f}, memory {found['memory'] / 2e9:.2f}")
    return int(found["wall"] > 60 or found["memory"] > 2e9 or found["torch"])


if __name__ == "__main__":
    sys.exit(main())
