"""Times the generator on the full manifest: a first run into an empty folder, and one with nothing to change.

python benchmarks/generator.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = 3


def seconds(folder: str) -> float:
    """How long one run of generate.py takes, the start of Python included."""
    command = [sys.executable, "generate.py", "--manifest", "manifests/full.yaml", "--out", folder]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    elapsed = time.perf_counter() - start
    print(f"{elapsed:5.2f} s  {done.stdout.partition(' in ' + folder)[0]}", flush=True)
    return elapsed


def main() -> None:
    """Print every run, and the median of each kind."""
    first, unchanged = [], []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            first.append(seconds(folder))
            unchanged.append(seconds(folder))
    print(f"first run {statistics.median(first):.2f} s, nothing to change {statistics.median(unchanged):.2f} s")


if __name__ == "__main__":
    main()
