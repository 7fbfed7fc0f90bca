"""The suites: each module here holds one table of cells."""

from __future__ import annotations

from ..cells import Suite
from . import (
    backward,
    batch_invariant,
    batch_invariant_many,
    ck_tile,
    decode,
    dropout,
    forward,
    fp8_inputs,
    gated,
    groupnorm,
    heads,
    host,
    modulated,
    quant,
    quantised,
    quantised_decode,
    steps,
    sweep,
    tutorial,
)

SUITES: dict[str, Suite] = {
    module.SUITE.name: module.SUITE
    for module in (
        forward,
        backward,
        quant,
        quantised,
        quantised_decode,
        fp8_inputs,
        dropout,
        decode,
        heads,
        gated,
        modulated,
        groupnorm,
        batch_invariant,
        batch_invariant_many,
        ck_tile,
        tutorial,
        steps,
        sweep,
        host,
    )
}
