"""`normforge merge`: recordings of several processes, as one."""

from __future__ import annotations

import argparse

from ..selection.recording import add, recordings


def main(args: argparse.Namespace) -> int:
    """Run `normforge merge`; returns 0.

    Raises:
        RecordError: a recording cannot be read, or the output cannot be written or is no recording.
    """
    merged = add(args.out, recordings(args.recordings))
    print(f"{len(merged.instances)} instances and {len(merged.calls)} kinds of call in {args.out}")
    return 0
