"""NVFP4: two e2m1 values a byte, e4m3 scales of groups of 16 under a global one, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge.reference import quantised as quantisation_reference

from ..calling import same_bits
from .shared import there
from .test_quantised import FUNCTION, NVFP4, blocked, check, rows, scale_of
from .test_wrong_tensors import FP4

pytestmark = pytest.mark.usefixtures("on_each_device")

# What the codes from 0 to 7 stand for; 8 to 15 are the same with a sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nearest(q: torch.Tensor) -> torch.Tensor:
    """The codes of values by distance: of two as near the even one, and beyond 6 that of 6."""
    distance = (q.abs().double().unsqueeze(-1) - torch.tensor(E2M1, dtype=torch.float64, device=q.device)).abs()
    # An odd code is a little further off than an even one.
    code = (distance + torch.arange(8, device=q.device) % 2 * 1e-12).argmin(-1)
    return (code + 8 * q.signbit()).to(torch.uint8)


def quantised(y: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of y and of its scales by the formula, in fp32: what a second kernel would make of y."""
    n = y.shape[-1]
    groups = torch.nn.functional.pad(y, (0, -n % 16)).view(*y.shape[:-1], -1, 16)
    scale = (groups.abs().amax(-1) / 6.0 * global_scale).clamp(max=448.0).to(torch.float8_e4m3fn)
    stored = scale.float()
    inverse = torch.where(stored == 0, 0.0, global_scale / stored)
    codes = nearest((groups * inverse.unsqueeze(-1)).flatten(-2)[..., :n])
    return codes[..., ::2] + 16 * codes[..., 1::2], scale.view(torch.uint8)


def byte(tensor: torch.Tensor | None) -> torch.Tensor:
    return there(tensor).view(torch.uint8)


@pytest.mark.parametrize(
    ("norm", "n", "dtype"),
    [
        ("layer", 2, torch.float16),
        ("rms", 64, torch.bfloat16),
        ("layer", 300, torch.bfloat16),
        ("rms", 2000, torch.float16),
    ],
)
def test_bytes_are_those_of_the_formula(norm: str, n: int, dtype: torch.dtype) -> None:
    """Of y as it is rounded and stored, which leaves nothing open; a few of the largest are cut off."""
    weight, global_scale = rows(n, dtype=dtype), scale_of(900.0)
    x = torch.randn(3, n).mul(torch.exp2(torch.randint(-9, 9, (3, n)))).to(dtype)
    asked: dict[str, Any] = {"quantise_rounded": True, "save_unquant": True, "global_scale": global_scale}
    made = FUNCTION[norm](x, weight, residual=rows(3, n, dtype=dtype), **asked, **NVFP4)
    assert made.y.dtype == FP4
    assert tuple(made.y.shape) == (3, n // 2)
    assert there(made.y_scale).dtype == torch.float8_e4m3fn
    # On the CPU: a GPU's torch multiplies by 1 / 6.
    y, scale = quantised(there(made.unquantised).float().cpu(), global_scale.cpu())
    assert torch.equal(byte(made.y_scale).cpu(), scale)
    assert torch.equal(byte(made.y).cpu(), y)


@pytest.mark.parametrize(
    ("norm", "layout"), [("rms", "row_major"), ("layer", "column_major"), ("layer", "swizzled_128x4")]
)
def test_scales_in_each_layout(norm: str, layout: str) -> None:
    """With all that may be fused in front, in the pipelines of short and of long rows."""
    for shape in ((2, 3, 96), (35, 20) if layout == "swizzled_128x4" else (3, 1250)):
        n = shape[-1]
        asked: dict[str, Any] = {"residual": rows(*shape), "x_bias": rows(n), "smooth_scale": rows(n)}
        asked |= {"fquant": "smooth_dynamic", "global_scale": scale_of(300.0), "scale_layout": layout, **NVFP4}
        x, weight = rows(*shape), rows(n)
        made = check(norm, x, weight, **asked)
        linear = FUNCTION[norm](x, weight, **{**asked, "scale_layout": "row_major"})
        assert same_bits(byte(made.y), byte(linear.y))
        scale, groups = there(made.y_scale), -(-n // 16)
        if layout == "swizzled_128x4":
            assert torch.equal(byte(scale).flatten(), blocked(byte(linear.y_scale).reshape(-1, groups)))
        else:
            assert tuple(scale.shape) == (*shape[:-1], groups)
            assert torch.equal(byte(scale.contiguous()), byte(linear.y_scale))


def of_weight(weight: list[float], global_scale: float) -> tuple[list[int], list[int]]:
    """Codes and bytes of scales of some values: the RMSNorm of ones without epsilon is its weight."""
    asked: dict[str, Any] = {"eps": 0.0, "global_scale": scale_of(global_scale)}
    made = check("rms", torch.ones(1, len(weight)), torch.tensor(weight), **asked, **NVFP4)
    return quantisation_reference.unpacked(made.y)[0].tolist(), byte(made.y_scale)[0].tolist()


# In e4m3.
ONE, LARGEST, NAN = 0x38, 0x7E, 0x7F


def test_ties_go_to_the_even_code() -> None:
    """Of each two neighbours; and what is next to a tie goes where it is nearer."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    codes, scales = of_weight([6.0, *ties, *[-tie for tie in ties], 0.0], 1.0)
    even = [0, 2, 2, 4, 4, 6, 6]
    assert scales == [ONE]
    assert codes == [7, *even, *[8 + code for code in even], 0]
    for side, moved in ((torch.inf, [1, 2, 3, 4, 5, 6, 7]), (0.0, [0, 1, 2, 3, 4, 5, 6])):
        near = torch.nextafter(torch.tensor(ties), torch.tensor(side)).tolist()
        assert of_weight([6.0, *near, *[0.0] * 8], 1.0)[0][1:8] == moved


def test_what_a_scale_that_was_rounded_down_leaves_above_6_is_6() -> None:
    # amax / 6 is halfway between 1 and 1.125, and 1 is even.
    assert of_weight([6.375, -6.375, 1.0, *[0.0] * 13], 1.0) == ([7, 15, 2, *[0] * 13], [ONE])


def test_scales_end_at_448() -> None:
    """Beyond that values are cut off, as they are where the global scale was calibrated with smaller ones."""
    codes, scales = of_weight([6.0, 0.75, *[0.0] * 14, 1.0, *[0.0] * 15], 1792.0)
    assert scales == [LARGEST, 0x79]
    assert codes[:2] == [7, 5]
    assert codes[16] == 7


def test_a_scale_too_small_for_e4m3_is_0_and_so_are_its_values() -> None:
    """The smallest is 2**-9, and half of that is rounded to 0, which divides nothing."""
    half, above = 6 * 2.0**-10, 6 * 2.0**-10 * (1 + 2.0**-20)
    zeros = [0.0] * 15
    codes, scales = of_weight([half, *zeros, above, *zeros, -1e-30, *zeros, 0.0, *zeros], 1.0)
    assert scales == [0, 1, 0, 0]
    # A step is 2**-9, of which values here are half: 3.
    assert [codes[at] for at in (0, 16, 32, 48)] == [0, 5, 8, 0]


def test_what_is_no_number_stays_in_its_group() -> None:
    for spoilt in (float("nan"), float("inf"), -float("inf")):
        weight = [1.0] * 48
        weight[20] = spoilt
        asked: dict[str, Any] = {"eps": 0.0, "global_scale": scale_of(6.0)}
        made = normforge.quantised_rms_norm(torch.ones(1, 48), torch.tensor(weight), **asked, **NVFP4)
        assert byte(made.y_scale).tolist() == [[ONE, NAN, ONE]]
        codes = quantisation_reference.unpacked(made.y)[0]
        assert (codes[:16] == 7).all()
        assert (codes[32:] == 7).all()


@pytest.mark.parametrize(
    "mode", ["ln_fwd_bf16_fp4_e2m1fn_addst_dq_g16_e4m3", "rms_fwd_fp32_fp4_e2m1fn_sdq_g16_e4m3_swz"]
)
def test_modes_are_compiled_ahead(mode: str) -> None:
    """With y and its scales as bytes, whatever the GPU converts to."""
    for arch in ("sm_80", "sm_90", "sm_100"):
        (key, *_) = normforge.compile_keys([4096], [mode], arch=arch)
        types = dict(key.key.arguments)
        assert (types["y_ptr"], types["y_scale_ptr"], types["global_scale_ptr"]) == ("*u8:16", "*u8", "*fp32")
