"""Command lines of `normforge`, run in this process."""

from __future__ import annotations

from normforge.tools.cli import main


def status(*argv: str) -> int:
    """The exit status of a command line, whether it is returned or raised by argparse."""
    try:
        return main(argv)
    except SystemExit as stop:
        return int(str(stop.code))
