"""The rows of all families with a neighbour, by their families' words."""

from __future__ import annotations

from . import gated, modulated, quantised

CALLS = {"modulated": modulated.CALLS, "gated": gated.CALLS, "quantised": quantised.CALLS}
