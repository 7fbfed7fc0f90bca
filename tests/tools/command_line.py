"""Command lines of `normforge`, run in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from normforge.tools.cli import main

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("run.yaml").read_text())


def status(*argv: str) -> int:
    """The exit status of a command line, whether it is returned or raised by argparse."""
    try:
        return main(argv)
    except SystemExit as stop:
        return int(str(stop.code))
