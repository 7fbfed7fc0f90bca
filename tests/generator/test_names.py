"""A mode and its name say the same."""

from __future__ import annotations

import pytest

from normforge.codegen.errors import IllegalCombinationError
from normforge.codegen.legal import legal_modes
from normforge.codegen.model import Mode

from ..thorough import THOROUGH


@THOROUGH
def test_every_legal_mode_is_read_from_its_name() -> None:
    for mode in legal_modes():
        assert Mode.from_name(mode.name) == mode


NO_NAMES = (
    *("", "ln", "ln_fwd", "ln_fwd_bf61", "ln_fwd_bf16_", " ln_fwd_bf16", "ln_fwd_bf16\n", "ln_fwd_bf16_n128"),
    *("ln_fwd_bf16_mv_xb", "ln_fwd_bf16_bf16", "ln_fwd_bf16_mv_mv", "ln_fwd_bf16_dq", "ln_fwd_int8"),
    *("ln_bwd_bf16_mv", "rms_fwd_fp16_int8_dq_sfp32", "rms_fwd_fp16_fp8_e4m3fn_dq_trunc"),
)


@pytest.mark.parametrize("name", NO_NAMES)
def test_no_other_name_is_one(name: str) -> None:
    with pytest.raises(IllegalCombinationError, match="no mode is called"):
        Mode.from_name(name)
