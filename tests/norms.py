"""The norms that tests of every form of a norm go through."""

from __future__ import annotations

from normforge.codegen.values import Norm

# A norm that lacks some forms is tested in the others alone.
FULL = tuple(norm for norm in Norm if not norm.row.lacks)
