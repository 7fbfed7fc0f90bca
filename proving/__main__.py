"""The command `python -m proving WHAT`: hands its arguments to the proof of that name.

Imports nothing beyond Python, because `matrix` runs before there is an environment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from benchmarks.errors import USAGE, UsageError

WHAT = {
    "accuracy": "errors of every kernel against fp64, beside torch's",
    "cold_warm": "calls with the caches that other calls left, against calls without caches",
    "conformance": "the cases of other libraries' test suites, against an fp64 oracle",
    "engines": "vLLM with its norms and with the plug: kernels, tokens, throughput",
    "matrix": "both test suites on several releases of Python and Triton",
    "models": "the norm classes of Hugging Face's transformers that patch takes",
    "mutants": "edits that break the product, and the tests that must notice",
    "sanitizer": "compute-sanitizer's tools over calls that touch every kernel",
    "soak": "random calls from several threads, on streams and in graphs, and whether memory grows",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a proof, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m proving",
        description="Prove at length what the tests check in passing.",
        epilog="\n".join(("WHAT is one of:", *(f"  {name:12} {about}" for name, about in WHAT.items()))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="WHAT", choices=WHAT, help="a proof; WHAT -h lists its options")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the proof")
    asked = parser.parse_args(arguments)
    try:
        status = import_module(f".{asked.what}.command", __package__).main(asked.options)
    except UsageError as error:
        print(error, file=sys.stderr)
        return USAGE
    assert isinstance(status, int)
    return status


if __name__ == "__main__":
    sys.exit(main())
