"""Programmatic dependent launch: asked of the kernels that wait, and of no others, on the GPUs that have it."""

from __future__ import annotations

import pytest

from normforge.ahead_of_time.compile_keys import compile_keys

# A length of each pipeline that tables have, and one whose rows start anywhere.
LENGTHS = (64, 1500, 4099, 20000, 131072)


@pytest.mark.parametrize(
    ("arch", "launches_early"),
    [("sm_80", False), ("sm_89", False), ("sm_90", True), ("sm_100", True), ("gfx942", False)],
)
def test_a_kernel_is_launched_early_if_and_only_if_it_waits(arch: str, launches_early: bool) -> None:
    found = compile_keys(LENGTHS, ["*_bf16", "*_bf16_addst", "*_bf16_int8_sdq"], arch=arch)
    early = {key.key.symbol: dict(key.key.options).get("launch_pdl", False) for key in found}
    assert early == {key.key.symbol: dict(key.key.arguments).get("PDL", False) for key in found}
    assert early == {symbol: launches_early and not symbol.endswith("_spread") for symbol in early}
    assert "sum_partials" in early
    assert not any({"launch_pdl", "launch_cooperative_grid"} <= dict(key.key.options).keys() for key in found)
