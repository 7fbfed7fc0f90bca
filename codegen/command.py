"""What every command does alike: options are given once, and whatever cannot be done is a message and a status."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .errors import NormforgeError
from .words import printable

DONE, DIFFERS, REFUSED = 0, 1, 2
# What a shell reports of a process that Ctrl-C ended: 128 + SIGINT.
INTERRUPTED = 130


class _Once(argparse.Action):
    """Store a value, and refuse a second one: argparse itself would drop the first in silence."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = namespace.__dict__.setdefault("_given", set())
        if self.dest in given:
            raise argparse.ArgumentError(self, "it is given twice; keep one of the two")
        if option_string:
            given.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """A parser whose options are spelled out and, unless they say otherwise (`append`), given at most once."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        refuse_twice(self)


def refuse_twice(parser: argparse.ArgumentParser) -> None:
    """Have a parser refuse an option that is given twice; to be called before options are added."""
    for name in (None, "store"):
        parser.register("action", name, _Once)


def options_given(namespace: argparse.Namespace) -> frozenset[str]:
    """Which options that take a value a `Parser` was given, and did not have by default."""
    return frozenset(getattr(namespace, "_given", ()))


def run(prog: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit status; what it cannot do is said in one message on standard error.

    Args:
        prog: what messages call the program.
        command: returns a status, or raises.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name of a file need not be text that a terminal can show.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = command()
        sys.stdout.flush()
    except NormforgeError as error:
        _say(prog, f"error: {error}")
        return REFUSED
    except KeyboardInterrupt:
        _say(prog, "interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe, `head` perhaps, has all it wanted.
        _drop_output()
        return DONE
    except OSError as error:
        # What is left to fail is standard output, on a full disk say.
        _drop_output()
        _say(prog, f"error: {error}; mend that and run again")
        return REFUSED
    return status


def _say(prog: str, message: str) -> None:
    # Some messages have lines of their own; within one nothing is left that a terminal would act on.
    print(f"{prog}: " + "\n".join(map(printable, message.split("\n"))), file=sys.stderr)


def _drop_output() -> None:
    """Keep the flush at exit from complaining about what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
