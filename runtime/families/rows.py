"""The rows of the modulated, gated and quantised families, by the word of each."""

from __future__ import annotations

from . import gated, modulated, quantised

CALLS = {"modulated": modulated.CALLS, "gated": gated.CALLS, "quantised": quantised.CALLS}
