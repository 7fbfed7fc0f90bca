"""`normforge merge`: recordings of several processes, as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..codegen.command import Parser
from ..selection.recorded import recordings
from ..selection.recording import add

_DESCRIPTION = """\
Add recordings together: those that processes wrote under names of their own, NORMFORGE_RECORD=needed.%p.yaml say.

What the output holds already it keeps, so that it may be one of the recordings, and a command that is repeated changes
nothing. Of what several hold one copy is kept.
"""

_EPILOG = """\
examples:
  {prog} --out needed.yaml needed.*.yaml
"""


def main(argv: Sequence[str], prog: str) -> int:
    """Run `normforge merge`; returns 0.

    Raises:
        RecordError: a recording cannot be read, or the output cannot be written or is no recording.
    """
    parser = Parser(prog, _DESCRIPTION, _EPILOG.format(prog=prog))
    parser.add_argument("recordings", nargs="+", type=Path, metavar="FILE", help="what NORMFORGE_RECORD wrote")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the recording that they are added to")
    given = parser.parse_args(argv)
    found = add(given.out, recordings(given.recordings))
    print(f"{len(found.instances)} instances and {len(found.calls)} kinds of call in {given.out}")
    return 0
