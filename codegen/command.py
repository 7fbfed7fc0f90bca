"""Parse options and report errors in the same way for every command."""

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
# The status that a shell reports for a process that Ctrl-C ended: 128 + SIGINT.
INTERRUPTED = 130


class _Once(argparse.Action):
    """Store a value and refuse a second value, where argparse would silently drop the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        passed = namespace.__dict__.setdefault("_given", set())
        if self.dest in passed:
            raise argparse.ArgumentError(self, "it is given twice; keep one of the two")
        if option_string:
            passed.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """A parser whose options must be spelled out and, unless they say otherwise (`append`), given at most once."""

    def __init__(
        self,
        prog: str,
        description: str,
        epilog: str | None = None,
        resolve: Callable[[Parser, argparse.Namespace], Any] | None = None,
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._resolve = resolve
        for name in (None, "store"):
            self.register("action", name, _Once)

    def request(self, argv: Sequence[str]) -> Any:
        """Read a command line and return what it asks for.

        Returns:
            What `resolve` makes of the arguments; without it the arguments, with `parser` and `argv` beside them.

        Raises:
            SystemExit: --help was asked for, or the arguments are no command; argparse has said so.
        """
        args = self.parse_args(argv)
        args.parser, args.argv = self, tuple(argv)
        return args if self._resolve is None else self._resolve(self, args)


def options_given(namespace: argparse.Namespace) -> frozenset[str]:
    """Return the options with a value that the command line gave to a `Parser`, without defaults."""
    return frozenset(getattr(namespace, "_given", ()))


def run(prog: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit status; print an error as one message on standard error.

    Args:
        prog: the program's name in messages.
        command: returns a status, or raises.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name may hold characters that the terminal's encoding lacks.
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
        # The reader of the pipe, `head` perhaps, has stopped reading.
        _drop_output()
        return DONE
    except OSError as error:
        # Commands raise their own errors, so this one comes from standard output: a full disk, for example.
        _drop_output()
        _say(prog, f"error: {error}; mend that and run again")
        return REFUSED
    return status


def _say(prog: str, message: str) -> None:
    # Some messages have several lines. Within a line, escape everything that a terminal would act on.
    print(f"{prog}: " + "\n".join(map(printable, message.split("\n"))), file=sys.stderr)


def _drop_output() -> None:
    """Redirect standard output to os.devnull, so that the flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
