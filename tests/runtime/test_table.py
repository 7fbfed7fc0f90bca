"""The table that normforge comes with: what it lists is there, and each call finds its row."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import pytest
import torch

import normforge
from normforge import dispatch
from normforge.codegen.model import legal_modes
from normforge.errors import TableError
from normforge.table import Entry

from .calls import LENGTHS

TABLE = import_module("normforge.generated.dispatch").TABLE


def committed() -> tuple[Entry, ...]:
    """The committed table's entries, without what tests have generated on demand."""
    return tuple(dispatch.loaded())


def test_instances_are_what_the_table_says() -> None:
    expected = [f"{mode}_{bucket}" for mode, ladder in TABLE.items() for _, _, bucket, *_ in ladder]
    assert [entry.name for entry in committed()] == expected
    assert len(set(expected)) == len(expected) > 100
    assert normforge.instances()[: len(expected)] == committed()


def test_every_entry_is_its_row() -> None:
    rows = {f"{mode}_{row[2]}": (mode, row) for mode, ladder in TABLE.items() for row in ladder}
    for entry in committed():
        mode, row = rows[entry.name]
        assert (entry.mode, entry.kernel) == (mode, f"{mode}_{entry.pipeline}")
        assert (entry.first, entry.last, entry.bucket, entry.pipeline, entry.rows, entry.block, entry.warps) == row


def test_every_mode_is_a_legal_one() -> None:
    assert {entry.mode for entry in committed()} <= {mode.name for mode in legal_modes()}


def test_every_kernel_exists_in_its_module() -> None:
    loaded = {(entry.mode, entry.kernel): entry.load() for entry in committed()}
    for (_, name), kernel in loaded.items():
        assert kernel.__name__ == name


def test_a_kernel_that_is_not_there() -> None:
    entry = dataclasses.replace(committed()[0], kernel="ln_fwd_none")
    with pytest.raises(TableError, match=r"lists ln_fwd_.*, and its kernel ln_fwd_none cannot be loaded .* generate"):
        entry.load()


@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 1024, 1025, 5120, 32768, 32769, 262144, 2**31 + 1])
def test_each_row_length_has_the_entry_whose_bucket_holds_it(n: int) -> None:
    for mode in TABLE:
        found = dispatch.loaded().find(mode, n)
        assert found is not None
        assert found.first <= n <= (found.last or n)
        assert [entry for entry in committed() if entry.mode == mode and entry.serves(n)] == [found]


def test_a_mode_that_is_not_there() -> None:
    assert dispatch.loaded().find("ln_fwd_nothing", 64) is None


WHICH: dict[str, tuple[torch.dtype, dict[str, Any], str]] = {
    "ln_fwd_fp32": (torch.float32, {}, "layer"),
    "rms_fwd_bf16": (torch.bfloat16, {}, "rms"),
    "ln_fwd_fp16_addst_mv": (torch.float16, {"fadd": 1, "save_mv": True}, "layer"),
    "rms_fwd_fp16_add": (torch.float16, {"fadd": 2}, "rms"),
    "ln_fwd_bf16_int8_dq": (torch.bfloat16, {"fquant": 2}, "layer"),
    "ln_fwd_fp16_fp32_xb": (torch.float16, {"out_dtype": torch.float32, "x_bias": torch.ones(1)}, "layer"),
    "rms_fwd_bf16_fp8_e4m3fn_addst_sdq": (
        torch.bfloat16,
        {"fadd": 1, "fquant": 1, "smooth_scale": torch.ones(1), "out_dtype": torch.float8_e4m3fn},
        "rms",
    ),
    "ln_fwd_fp32_int8_dq_trunc_sfp16": (
        torch.float32,
        {"fquant": 2, "rounding": "truncate", "scale_dtype": torch.float16},
        "layer",
    ),
}
BUCKETS = {"rows": "n128", "one_pass": "n2048", "two_pass": "nbig"}


@pytest.mark.parametrize("pipeline", LENGTHS)
@pytest.mark.parametrize("mode", WHICH)
def test_which(mode: str, pipeline: str) -> None:
    dtype, keywords, norm = WHICH[mode]
    n = LENGTHS[pipeline]
    x = torch.empty(2, n, dtype=dtype)
    keywords = {k: v.expand(n).contiguous() if isinstance(v, torch.Tensor) else v for k, v in keywords.items()}
    if keywords.get("fadd"):
        keywords["residual"] = x.clone()
    before = normforge.instances()
    assert normforge.which(x, **keywords, norm=norm) == f"{mode}_{BUCKETS[pipeline]}"
    assert normforge.instances() == before, "which() generates nothing"


def test_which_takes_what_the_call_takes() -> None:
    x, weight, bias = torch.empty(2, 64), torch.empty(64), torch.empty(64)
    assert normforge.which(x, weight, bias) == normforge.which(x=x, weight=weight, bias=bias) == "ln_fwd_fp32_n128"
    with pytest.raises(TypeError, match="too many positional arguments"):
        normforge.which(x, weight, bias, norm="rms")
    with pytest.raises(TypeError, match="unexpected keyword argument 'fad'"):
        normforge.which(x, fad=1)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        normforge.which()


def test_which_needs_no_rows() -> None:
    assert normforge.which(torch.empty(0, 64)) == "ln_fwd_fp32_n128"
