"""The `normforge` command: finds the verb's module, imports it, and hands the rest of the line over."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple

from .. import start
from .._version import __version__
from ..codegen import command


class Verb(NamedTuple):
    """A verb's module, whose `main(argv, prog)` returns the exit status, what it does, and whether by calls.

    The module of its options, if it has one, has `parse(argv, prog)` and imports no torch, so that help and refusals
    take no seconds.
    """

    module: str
    summary: str
    makes_calls: bool = True
    options: str | None = None


VERBS = {
    "run": Verb(".run", "run one problem, check it against the reference and time it", options=".run_options"),
    "list": Verb(".list_instances", "print the dispatch table in use", options=".list_options"),
    "generate": Verb("..codegen.cli", "generate kernels from a manifest", makes_calls=False),
    "tune": Verb(".tune", "measure which tiles suit this GPU, and write them down", options=".tune_options"),
    "warmup": Verb(
        ".warmup_command",
        "compile ahead what a deployment touches, for the GPU that is here",
        options=".warmup_options",
    ),
    "aot": Verb(".aot_command", "compile it into a folder, for a GPU that need not be here", options=".aot_options"),
    "merge": Verb(".merge_command", "add up recordings of several processes", makes_calls=False),
    "backendbench": Verb(
        ".backendbench", "write torch's norms as operators that BackendBench tests", makes_calls=False
    ),
    "hub": Verb(".hub_command", "write norms as a repository for Hugging Face's kernels", makes_calls=False),
    "demo": Verb(".demo", "run a handful of modes and print a table", options=".demo_options"),
}

USAGE = "\n".join(
    (
        "usage: normforge VERB [argument ...]",
        "",
        *(f"  {name:<14}{verb.summary}" for name, verb in VERBS.items()),
        "",
        "normforge VERB -h explains a verb; normforge --version prints the version.",
        "Exit status: 0 done, 1 an output differs from the reference or a check found a difference,",
        "2 the request cannot be carried out, 130 interrupted.",
    )
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: what follows `normforge`; the process's own arguments by default.

    Returns:
        The exit status: 0 done, 1 a mismatch, 2 a request that cannot be carried out, 130 interrupted.
    """
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or [""]
    if name in ("-h", "--help", "--version"):
        print(__version__ if name == "--version" else USAGE)
        return 0
    if name not in VERBS:
        problem = f"there is no verb {name!r}" if name else "a verb is needed"
        print(f"normforge: {problem}; the verbs are {', '.join(VERBS)}\n\n{USAGE}", file=sys.stderr)
        return 2
    prog, verb = f"normforge {name}", VERBS[name]

    def run() -> int:
        if verb.options is not None:
            import_module(verb.options, __package__).parse(rest, prog)
        if verb.makes_calls:
            start()
        return int(import_module(verb.module, __package__).main(rest, prog=prog))

    status = command.run(prog, run)
    if status == command.INTERRUPTED and argv is None:
        # Python's own exit would wait for threads that still compile. What they write is written whole or not at all.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status
