"""Runs `normforge run` over the shapes that CI cannot time and writes what it printed as a table.

    python benchmarks/normforge_run.py OUT.csv [REVISION]

Each row is one process, so that a figure here is the one a user of the command gets.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

SHAPES = ((32768, 1024), (32768, 4096), (16384, 5120), (16384, 8192), (8192, 16384), (4096, 65536))
MODES = {
    "layer": ("-norm=layer",),
    "rms": ("-norm=rms",),
    "layer backward": ("-norm=layer", "-bwd=1"),
    "rms backward": ("-norm=rms", "-bwd=1"),
    "layer, add + smooth fp8": ("-norm=layer", "-fadd=1", "-fquant=1", "-prec_o=fp8"),
}
COLUMNS = ("mode", "m", "n", "instance", "valid", "ms", "gb_per_s")


def main(out: Path, revision: str) -> int:
    """Write the table; the status is 1 if a run was not valid."""
    rows = []
    for (mode, arguments), (m, n) in product(MODES.items(), SHAPES):
        command = [
            sys.executable,
            "-m",
            "normforge",
            "run",
            "-json",
            "-prec_i=bf16",
            f"-m={m}",
            f"-n={n}",
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        line = json.loads(done.stdout)
        rows.append({column: line[column] for column in COLUMNS[3:]} | {"mode": mode, "m": m, "n": n})
        print(rows[-1], flush=True)
    with out.open("w", newline="") as file:
        versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
        file.write(f"# {line['device']}, {versions}, revision {revision}\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return 0 if all(row["valid"] for row in rows) else 1


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) == 3 else "not given"))
