"""What a scheduler costs: the smoke study through SLURM and without it, on the same cores.

    python benchmarks/scheduler.py [--repeat 1] [-- ARGUMENTS FOR SNAKEMAKE]

Needs a SLURM that answers here (`bash tests/cluster/cluster.sh install && bash tests/cluster/cluster.sh start`).
Both runs start in a fresh clone of the committed state and put the same payloads under version control. Prints one
line per run and the ratio; to be reached: at most 2.0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
LIMIT = 2.0


def run(folder: Path, *arguments: str) -> float:
    """Wall seconds of Snakemake on the smoke preset in a fresh clone."""
    subprocess.run(["git", "clone", "-q", str(PROJECT), str(folder)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    command = [sys.executable, "-m", "snakemake", "--configfile", "presets/smoke.yaml", *arguments]
    started = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-4000:]}")
    return seconds


def payloads(folder: Path) -> dict[str, dict]:
    """`<stage>/<key>` -> hashes of the payload's files. Of two jobs with one key the first makes it and the other
    becomes a link; which one that is, and so under which name it lies, is the order of a run."""
    found = {path: json.loads(path.read_text()) for path in (folder / "provenance").rglob("*.json")}
    made = {path: side["payload"] for path, side in found.items() if "payload" in side}
    return {f"{path.parent.name}/{path.stem[-12:]}": payload for path, payload in made.items()}


def main() -> int:
    """Run both, print the ratio; exit status 1 if the results differ or the ratio is above the limit."""
    parser = argparse.ArgumentParser(description="SLURM against local, smoke preset")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("arguments", nargs="*", help="more arguments for Snakemake under SLURM")
    options = parser.parse_args()
    cores = str(os.cpu_count())
    worst = 0.0
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory() as scratch:
            local, remote = Path(scratch, "local"), Path(scratch, "slurm")
            alone = run(local, "--cores", cores)
            print(f"local, {cores} cores: {alone:.1f} s", flush=True)
            sent = run(remote, "--profile", "profiles/slurm", *options.arguments)
            print(f"SLURM, {cores} cores: {sent:.1f} s, ratio {sent / alone:.2f}", flush=True)
            if payloads(local) != payloads(remote):
                sys.exit("the payloads differ")
            worst = max(worst, sent / alone)
    print(f"ratio {worst:.2f} (at most {LIMIT})")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
