"""Programmatic dependent launch: asked of the kernels that wait, and of no others, on the GPUs that have it."""

from __future__ import annotations

import pytest

from normforge.ahead_of_time.compile_keys import CompileKey, compile_keys

# A length of each pipeline that tables have, and one whose rows start anywhere.
LENGTHS = (64, 1500, 4099, 20000, 131072)


def listed(arch: str) -> list[CompileKey]:
    return compile_keys(LENGTHS, ["*_bf16", "*_bf16_addst", "*_bf16_int8_sdq"], arch=arch)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_a_kernel_is_launched_early_if_and_only_if_it_waits(arch: str) -> None:
    found = listed(arch)
    early = {key.key.symbol: dict(key.key.options).get("launch_pdl", False) for key in found}
    assert early == {key.key.symbol: dict(key.key.arguments).get("PDL", False) for key in found}
    assert early == {key.key.symbol: not key.key.symbol.endswith("_spread") for key in found}
    assert early["sum_partials"]
    assert not any({"launch_pdl", "launch_cooperative_grid"} <= dict(key.key.options).keys() for key in found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "gfx942"])
def test_a_gpu_without_it_is_not_asked(arch: str) -> None:
    found = listed(arch)
    assert found
    assert not any("launch_pdl" in dict(key.key.options) for key in found)
    assert not any(dict(key.key.arguments).get("PDL") for key in found)
