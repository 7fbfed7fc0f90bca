"""The command: python -m proving soak --minutes 10."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..evidence import conclude, parser_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak; the exit status is 1 if a call failed or something held grew."""
    about = "Random legal calls from several threads, on several streams and in graphs, checked by chance; "
    parser = parser_of("soak", about + "and whether memory or plans grow.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, compilation aside (default: 10)")
    parser.add_argument("--seed", type=int, help="of kinds and calls (default: of the clock; it is printed)")
    parser.add_argument("--device", help="cuda:0, say (default: the current GPU, or the interpreter without one)")
    options = parser.parse_args(argv)

    import torch

    compiles = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    device = torch.device(options.device or ("cuda" if compiles else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu":
        # Before Triton is imported, which reads it once.
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        torch.cuda.set_device(device)

    from benchmarks.environment import describe
    from normforge.tools.machine import Machine
    from tests.properties import seed as seeds

    from .report import summary, table
    from .soak import soak

    seed = seeds.fresh() if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    result = soak(options.minutes, seed, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's CPU interpreter"
    machine = Machine(device, name, interpreted=device.type == "cpu")
    header = {**describe(machine, (), options.revision), "seed": str(seed)}
    conclude(options, "soak", table(result, header), summary)
    print(*result.failures, sep="\n\n")
    return 0 if result.ok else 1
