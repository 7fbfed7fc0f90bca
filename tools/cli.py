"""The `normforge` command: read a verb's arguments, then import what carries it out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from .. import start
from .._version import __version__
from ..codegen import command
from ..codegen.command import Parser


class Verb(NamedTuple):
    """A verb: what it does, and where its functions are, as "module:function".

    `parser(prog)` returns the `Parser` of the verb's arguments. Its module imports no torch, so that help and refusals
    take no seconds; neither does that of `check(request)`, which raises where there is no GPU. `main(request)` carries
    out what that parser read, and returns the exit status.
    """

    summary: str
    parser: str
    main: str
    makes_calls: bool = True
    check: str | None = None

    def parser_of(self, prog: str) -> Parser:
        """Make the parser of the verb's arguments."""
        parser: Parser = _function(self.parser)(prog)
        return parser


VERBS = {
    "run": Verb("run one problem, check it against the reference and time it", ".run_options:parser", ".run:main"),
    "list": Verb("print the dispatch table in use", ".arguments:listing", ".list_instances:main", makes_calls=False),
    "generate": Verb(
        "generate kernels from a manifest", "..codegen.cli:parser", "..codegen.cli:carry_out", makes_calls=False
    ),
    "tune": Verb(
        "measure which tiles are fastest on this GPU, and write a table",
        ".tune_options:parser",
        ".tune:main",
        check=".driver:check_tune",
    ),
    "warmup": Verb(
        "compile the kernels of a deployment ahead, for this machine's GPU",
        ".arguments:warmup",
        ".compile_ahead:warmup",
        check=".driver:check_warmup",
    ),
    "aot": Verb(
        "compile the kernels of a deployment into a folder, without their GPU", ".arguments:aot", ".compile_ahead:aot"
    ),
    "merge": Verb("merge the recordings of several processes", ".arguments:merge", ".merge:main", makes_calls=False),
    "backendbench": Verb(
        "write torch's norms as operators for BackendBench",
        ".arguments:backendbench",
        ".backendbench:main",
        makes_calls=False,
    ),
    "hub": Verb(
        "write a repository of norm layers for Hugging Face's kernels", ".arguments:hub", ".hub:main", makes_calls=False
    ),
    "demo": Verb("run ten modes and print a table", ".arguments:demo", ".demo:main"),
    "doctor": Verb(
        "report versions, GPU, cache, settings and problems", ".arguments:doctor", ".doctor:main", makes_calls=False
    ),
    "completion": Verb(
        "print a script for shell completion",
        ".arguments:completion",
        ".completion:main",
        makes_calls=False,
    ),
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
        request = verb.parser_of(prog).request(rest)
        if verb.check is not None:
            _function(verb.check)(request)
        if verb.makes_calls:
            start()
        return int(_function(verb.main)(request))

    status = command.run(prog, run)
    if status == command.INTERRUPTED and argv is None:
        # Python's own exit would wait for threads that still compile. What they write is written whole or not at all.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(import_module(module, __package__), name)
    return function
