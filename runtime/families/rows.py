"""The rows of the modulated, gated and quantised families, by the word of each."""

from __future__ import annotations

from . import quantised
from .gated import row as gated
from .modulated import row as modulated

CALLS = {"modulated": modulated.CALLS, "gated": gated.CALLS, "quantised": quantised.CALLS}
