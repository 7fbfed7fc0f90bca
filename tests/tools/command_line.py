"""Command lines of `normforge`, run in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from normforge.tools.cli import main

from ..calling import status_of

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("run.yaml").read_text())


def status(*argv: str) -> int:
    """The exit status of a command line."""
    return status_of(main, argv)
