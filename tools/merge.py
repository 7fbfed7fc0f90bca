"""`normforge merge`: recordings of several processes, as one."""

from __future__ import annotations

import argparse

from ..selection.recorded import recordings
from ..selection.recording import add


def main(given: argparse.Namespace) -> int:
    """Run `normforge merge`; returns 0.

    Raises:
        RecordError: a recording cannot be read, or the output cannot be written or is no recording.
    """
    found = add(given.out, recordings(given.recordings))
    print(f"{len(found.instances)} instances and {len(found.calls)} kinds of call in {given.out}")
    return 0
