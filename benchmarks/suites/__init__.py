"""The suites: each module here holds one table of cells."""

from __future__ import annotations

from importlib import import_module

from ..cells import Suite

# The modules, in the order of tables.
_ORDER = """
forward backward quant quantised quantised_decode latents fp8_inputs dropout decode heads rotary rotary_decode gated
modulated renormed groupnorm channels batch_invariant batch_invariant_many ck_tile tutorial steps sweep host
"""
_SUITES: list[Suite] = [import_module(f"{__name__}.{name}").SUITE for name in _ORDER.split()]
SUITES = {suite.name: suite for suite in _SUITES}
