"""What MissingInstanceError says, and that following it builds what was missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge.codegen import manifest
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, FusedQuant, Norm
from normforge.errors import MissingInstanceError

from ..folders import PLAIN, RMS, instance, write

pytestmark = pytest.mark.usefixtures("strict")


def miss(x: torch.Tensor, **keywords: Any) -> str:
    """The message of a call that the loaded table does not serve."""
    with pytest.raises(MissingInstanceError) as raised:
        normforge.which(x, **keywords)
    return str(raised.value)


def manifest_lines(message: str) -> str:
    """The lines that the message says to add: those indented, between its two sentences about them."""
    _, rest = message.split("add this group to the manifest:\n")
    lines, command = rest.split("and run: ")
    assert command == "python generate.py (or: normforge generate --manifest FILE --out DIR)"
    return lines


X32, X16, XB = (torch.empty(2, 64, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
N = torch.ones(64)

# Each misses the committed table.
MISSES: dict[str, tuple[torch.Tensor, dict[str, Any], str]] = {
    "x_bias": (X16, {"x_bias": N}, "ln_fwd_fp16_xb_n128"),
    "fp32 to fp16": (X32, {"out_dtype": torch.float16}, "ln_fwd_fp32_fp16_n128"),
    "fp8_e5m2": (XB, {"fquant": 2, "out_dtype": torch.float8_e5m2}, "ln_fwd_bf16_fp8_e5m2_dq_n128"),
    "truncation": (X16, {"fquant": 2, "rounding": "truncate", "norm": "rms"}, "rms_fwd_fp16_int8_dq_trunc_n128"),
    "cast": (X16, {"cast": "before_weight"}, "ln_fwd_fp16_cbw_n128"),
    "everything": (
        XB,
        {
            "x_bias": N,
            "residual": XB,
            "fadd": 1,
            "smooth_scale": N,
            "fquant": 1,
            "out_dtype": torch.float8_e4m3fnuz,
            "scale_dtype": torch.float16,
            "save_mv": True,
            "norm": "rms",
        },
        "rms_fwd_bf16_fp8_e4m3fnuz_xb_addst_sdq_sfp16_mv_n128",
    ),
    "long rows": (torch.empty(1, 140000), {"x_bias": torch.ones(140000)}, "ln_fwd_fp32_xb_nbig"),
}


@pytest.mark.parametrize(("x", "keywords", "name"), MISSES.values(), ids=[n.replace(" ", "_") for n in MISSES])
def test_following_the_message_makes_what_was_missing(
    x: torch.Tensor, keywords: dict[str, Any], name: str, tmp_path: Path
) -> None:
    message = miss(x, **keywords)
    mode, n = name.rsplit("_", 1)[0], x.shape[-1]
    assert message.startswith(f"no instance of normforge's own generated/ folder serves {mode} with N = {n}")
    assert "NORMFORGE_ON_MISS=error forbids generating one" in message
    path = tmp_path / "instances.yaml"
    path.write_text("groups:\n" + manifest_lines(message))
    made = manifest.load(path).instances
    assert [instance.name for instance in made] == [name]
    normforge.load_instances(write(tmp_path / "mine", made))
    assert normforge.which(x, **keywords) == name


INT8 = Mode(Norm.RMS, DType.BF16, DType.INT8, fquant=FusedQuant.DYNAMIC)
LINE = "The nearest instance it holds is {}; it differs in {}."
E5M2 = {"fquant": 2, "out_dtype": torch.float8_e5m2, "norm": "rms"}
WIDE = torch.empty(2, 200, dtype=torch.float16)
SEVERAL = [(mode, n) for mode in (RMS, Mode(Norm.LAYER, DType.FP16, DType.FP16), INT8, PLAIN) for n in (64, 200)]
# A filtered build holds the mode, but not every length.
FILTERED = [(PLAIN, n) for n in (64, 400, 1500)]
ALL_ELSE = (
    "norm (it has rms, asked layer), dtype_in (it has fp32, asked fp16), dtype_out (it has fp32, asked fp16), "
    "n (it serves 1..128, asked 5000)"
)
BOTH = "dtype_out (it has fp16, asked fp32), save_mv (it has false, asked true)"
# What a table holds, a call that it lacks, and the instance that is said to be nearest, with what differs.
NEAREST: list[tuple[list[tuple[Mode, int]], torch.Tensor, dict[str, Any], str, str]] = [
    (SEVERAL, X16, {"x_bias": N}, "ln_fwd_fp16_n128", "x_bias (it has false, asked true)"),
    (SEVERAL, XB, E5M2, "rms_fwd_bf16_int8_dq_n128", "dtype_out (it has int8, asked fp8_e5m2)"),
    (SEVERAL, WIDE, {"out_dtype": torch.float32, "save_mv": True}, "ln_fwd_fp16_n256", BOTH),
    (FILTERED, torch.empty(2, 700), {}, "ln_fwd_fp32_n512", "n (it serves 257..512, asked 700)"),
    (FILTERED, torch.empty(2, 9000), {}, "ln_fwd_fp32_n1536", "n (it serves 1025..1536, asked 9000)"),
    # Of those with the fewest differences.
    ([(RMS, 64)], torch.empty(2, 5000, dtype=torch.float16), {}, "rms_fwd_fp32_n128", ALL_ELSE),
]


@pytest.mark.parametrize(("held", "x", "keywords", "name", "differs"), NEAREST)
def test_the_nearest_instance_and_what_differs(
    held: list[tuple[Mode, int]], x: torch.Tensor, keywords: dict[str, Any], name: str, differs: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "mine", [instance(*each) for each in held])
    normforge.load_instances(folder)
    message = miss(x, **keywords)
    assert message.startswith(f"no instance of {folder} serves ")
    assert [line for line in message.splitlines() if "The nearest" in line] == [LINE.format(name, differs)]


def test_a_table_that_holds_nothing_names_no_instance(tmp_path: Path) -> None:
    normforge.load_instances(write(tmp_path / "mine", []))
    assert "That table holds no instance at all." in miss(X32)


BUCKETS = "buckets:\n  n100: 1..100\n  nbig: 101..\n"
GROUP = "groups:\n  mine:\n    norm: layer\n    dtype_in: fp32\n"


def test_the_lines_name_the_buckets_of_the_loaded_table(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    path.write_text(BUCKETS + GROUP)
    normforge.load_instances(write(tmp_path / "mine", manifest.load(path).instances))
    for n, bucket in ((64, "n100"), (5000, "nbig")):
        x = torch.empty(2, n, dtype=torch.float16)
        path.write_text(BUCKETS + GROUP + manifest_lines(miss(x)))
        assert f"ln_fwd_fp16_{bucket}" in [instance.name for instance in manifest.load(path).instances]
