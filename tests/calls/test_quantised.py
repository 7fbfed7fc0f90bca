"""Norms quantised by groups, scales of the caller, along columns and in NVFP4, rounded first or not, against fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

import normforge
from normforge.calls.check import check as checked
from normforge.calls.functions import FUNCTIONS
from normforge.dtypes import DTYPES
from normforge.errors import LayoutError
from normforge.reference import quantised as quantisation_reference
from normforge.reference.norms import quantise

from ..calling import each_norm, same_bits, there
from ..kernels.problems import check_quantised
from ..thorough import THOROUGH
from .test_wrong_tensors import E4M3, E8M0, FP4, MXFP8

pytestmark = pytest.mark.usefixtures("on_each_device")

E5M2 = torch.float8_e5m2
FUNCTION: dict[str, Callable[..., Any]] = {"layer": normforge.quantised_layer_norm, "rms": normforge.quantised_rms_norm}
# The dtype of scales by their format, and how many share an element.
FORMATS = {
    "float": (torch.float32, 1),
    "ue8m0_float": (torch.float32, 1),
    "ue8m0": (E8M0, 1),
    "ue8m0_packed": (torch.int32, 4),
}
NVFP4: dict[str, Any] = {"group_size": 16, "scale_format": "e4m3", "out_dtype": FP4}
# Three short chunks of one_pass, of which the last group is short too.
N = 300


def check(norm: str, x: torch.Tensor, *args: Any, **asked: Any) -> Any:
    """Make a call, and hold what it returns against the oracle."""
    actual = FUNCTION[norm](x, *args, **asked)
    given = {name: value for name, value in asked.items() if name not in ("y_scale", "out", "residual_out")}
    if asked.get("fquant") == "static":
        is_one = asked["y_scale"].numel() == 1
        given["static_scale" if is_one else "column_scale"] = asked["y_scale"]
        given["fquant"] = "static" if is_one else "static_column"
    size = given.pop("group_size", None)
    further = {"columnwise": given.pop("columnwise", "none"), "save_amax": given.pop("amax_out", None) is not None}
    function = FUNCTIONS[FUNCTION[norm].__name__]
    arguments = {"x": x, **dict(zip(function.passed[1:], args, strict=False)), "fquant": "dynamic", **given}
    arguments |= {"group_size": str(size or "none")}
    mode = checked(FUNCTION[norm].__name__, arguments | further).mode
    returned = (
        actual
        if actual.y_scale is None or actual.y_scale.dim() < x.dim() or size
        else actual._replace(y_scale=actual.y_scale.squeeze(-1))
    )
    check_quantised(mode, arguments, returned)
    return actual


def scale_of(value: float) -> torch.Tensor:
    return torch.tensor([value])


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@each_norm
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("layout", ["row_major", "column_major"])
@pytest.mark.parametrize("kind", FORMATS)
def test_groups(norm: str, size: int, layout: str, kind: str) -> None:
    """Also of what their scales look like in memory."""
    dtype, packs = FORMATS[kind]
    x, asked = rows(2, 3, N), {"group_size": size, "scale_layout": layout, "scale_format": kind, "out_dtype": E4M3}
    scale: Any = check(norm, x, rows(N), **asked).y_scale
    assert scale.dtype == dtype
    columns = -(-N // (size * packs))
    assert tuple(scale.shape) == (2, 3, columns)
    padded = 16 // dtype.itemsize * -(-6 // (16 // dtype.itemsize))
    assert scale.stride() == ((3, 1, padded) if layout == "column_major" else (3 * columns, columns, 1))


def blocked(scales: torch.Tensor) -> torch.Tensor:
    """Bytes of scales, (M, G), as torch's and torchao's `to_blocked` lay them out for block-scaled products, flat."""
    m, groups = scales.shape
    rows, columns = -(-m // 128), -(-groups // 4)
    padded = torch.zeros(128 * rows, 4 * columns, dtype=torch.uint8)
    padded[:m, :groups] = scales
    tiles = padded.view(rows, 128, columns, 4).permute(0, 2, 1, 3)
    return tiles.reshape(-1, 4, 32, 4).transpose(1, 2).reshape(-1)


SWIZZLED: dict[str, Any] = {**MXFP8, "scale_layout": "swizzled_128x4"}


@pytest.mark.parametrize(
    ("norm", "m", "n"), [("layer", 3, 300), ("rms", 128, 128), ("layer", 130, 33), ("rms", 261, 1)]
)
def test_swizzled_scales_are_those_of_rows_in_tiles(norm: str, m: int, n: int) -> None:
    """Byte for byte, zeros where a tile has no row or no group."""
    # Each group of each row has another scale.
    x = torch.randn(m, n) * torch.exp2(torch.randint(-20, 20, (m, n)))
    linear = FUNCTION[norm](x, **{**SWIZZLED, "scale_layout": "row_major"})
    made = check(norm, x, **SWIZZLED)
    scale, groups = there(made.y_scale), -(-n // 32)
    assert scale.dtype == E8M0
    assert tuple(scale.shape) == (-(-m // 128) * 128, -(-groups // 4) * 4)
    assert torch.equal(scale.view(torch.uint8).flatten(), blocked(there(linear.y_scale).view(torch.uint8)))
    assert same_bits(made.y, linear.y)


@pytest.mark.parametrize("shape", [(5, 12), (5 * 128 + 1, 4), (1, 3)])
def test_scale_of_a_row_and_a_group_is_where_cublas_says(shape: tuple[int, int]) -> None:
    """The oracle's places are those of the tiles that `blocked` makes."""
    scales = torch.randint(256, shape).to(torch.uint8)
    assert torch.equal(quantisation_reference.unswizzled(blocked(scales), *shape), scales)


@each_norm
@pytest.mark.parametrize("out_dtype", [torch.int8, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("n", [1, 31, 128, 129, 5000])
def test_groups_of_rows_of_any_length(norm: str, out_dtype: torch.dtype, n: int) -> None:
    asked: dict[str, Any] = {"residual": rows(4, n), "x_bias": rows(n), "smooth_scale": rows(n)}
    check(norm, rows(4, n), rows(n), **asked, fquant="smooth_dynamic", group_size=64, out_dtype=out_dtype)


@each_norm
def test_a_given_scale_of_one_value_or_one_a_column(norm: str) -> None:
    x, weight = rows(3, N), rows(N)
    for scale in (torch.tensor([0.02]), torch.tensor(0.02), torch.rand(N) * 0.02 + 0.01):
        made = check(norm, x, weight, fquant="static", y_scale=scale, out_dtype=E4M3, residual=rows(3, N))
        assert made.y_scale is None
    # A slice of all layers' scales lies anywhere.
    check(norm, x, weight, fquant="static", y_scale=(torch.rand(7) + 0.5)[3:4])


@each_norm
def test_y_in_xs_dtype_too(norm: str) -> None:
    """And before a smooth scale; the same bits whether y is quantised or not, but for a fused multiplication."""
    x, weight, smooth = rows(3, N), rows(N), rows(N)
    there(check(norm, x, weight, save_unquant=True, smooth_scale=smooth, fquant="smooth_dynamic").unquantised)
    plain = (normforge.layer_norm if norm == "layer" else normforge.rms_norm)(x, (N,), weight, eps=1e-5)
    other: Any = FUNCTION[norm](x, weight, save_unquant=True, eps=1e-5)
    assert other.unquantised.dtype == x.dtype
    torch.testing.assert_close(other.unquantised, plain, rtol=2**-7, atol=0.0)


def test_what_is_above_a_bound_saturates() -> None:
    x = rows(4, N)
    bound = torch.tensor([1.0])
    made = check("rms", x, scale_ub=bound, out_dtype=E4M3)
    assert (there(made.y_scale) == 1.0 / 448.0).all()
    assert (made.y.float().abs() == 448.0).sum() > 4
    check("rms", x, scale_ub=bound, out_dtype=E4M3, group_size=128)
    high = check("rms", x, scale_ub=torch.tensor([1e6]), out_dtype=E4M3)
    assert same_bits(high.y_scale, FUNCTION["rms"](x, out_dtype=E4M3).y_scale)


def test_a_bound_hides_no_nan() -> None:
    x = rows(2, N)
    x[1, 5] = float("nan")
    made = normforge.quantised_rms_norm(x, scale_ub=torch.ones(1), out_dtype=E4M3)
    assert there(made.y_scale).isfinite().tolist() == [True, False]


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("columns", [1, None])
@pytest.mark.parametrize(("n", "dtype"), [(N, E4M3), (N, E5M2), (N, torch.int8), (40, E4M3), (20000, E5M2)])
def test_a_given_scale_hides_no_nan(n: int, dtype: torch.dtype, columns: int | None, spoilt: float) -> None:
    x = rows(3, n)
    x[1, 5] = spoilt
    scale = torch.full((columns or n,), 0.01)
    y = normforge.quantised_rms_norm(x, fquant="static", y_scale=scale, out_dtype=dtype).y
    # An infinity's inverse is 0, of which the infinity itself makes NaN.
    lost = torch.ones(n, dtype=torch.bool) if spoilt != spoilt else torch.arange(n) == 5
    if dtype == torch.int8:
        assert (y[1][lost] == -127).all()
        assert (y[1][~lost] == 0).all()
    else:
        assert torch.equal(y[1].float().isnan(), lost)
    apart = normforge.quantised_rms_norm(x[::2], fquant="static", y_scale=scale, out_dtype=dtype).y
    assert same_bits(y[::2].contiguous(), apart)
    assert apart.float().isfinite().all()
    layer = normforge.quantised_layer_norm(x, fquant="static", y_scale=scale, out_dtype=dtype).y[1]
    assert (layer == -127).all() if dtype == torch.int8 else layer.float().isnan().all()


def test_the_largest_value_may_be_at_an_end_of_a_row() -> None:
    """Of long rows that start anywhere: at the first element, in the middle and at the last."""
    x = torch.ones(3, 32771, dtype=torch.bfloat16)
    x[torch.arange(3), torch.tensor([0, 16000, -1])] = 64.0
    assert (normforge.quantised_rms_norm(x, out_dtype=torch.int8).y == 127).sum(1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8])
def test_a_given_scale_is_divided_by_whatever_it_is(dtype: torch.dtype) -> None:
    """NaN makes NaN, 0 saturates and makes NaN of 0, an infinity makes 0, and the sign is the scale's too."""
    x = torch.tensor([[1.0, -1.0, 0.0, 2.0]])
    largest = DTYPES[dtype].qmax
    none = -127.0 if dtype == torch.int8 else float("nan")
    for scale, expected in (
        (float("nan"), [none] * 4),
        (-float("nan"), [none] * 4),
        (0.0, [largest, -largest, none, largest]),
        (-0.0, [-largest, largest, none, -largest]),
        (float("inf"), [0.0] * 4),
    ):
        given = torch.tensor([scale])
        for y_scale in (given, given.expand(4).contiguous()):
            made = normforge.quantised_rms_norm(x, fquant="static", y_scale=y_scale, out_dtype=dtype).y
            torch.testing.assert_close(made.float(), torch.tensor([expected]), rtol=0.0, atol=0.0, equal_nan=True)
    negative, positive = (
        normforge.quantised_rms_norm(x, fquant="static", y_scale=torch.tensor([at]), out_dtype=dtype).y.float()
        for at in (-0.3, 0.3)
    )
    assert torch.equal(negative, -positive)


@pytest.mark.parametrize("size", [None, 32])
@pytest.mark.parametrize("n", [N, 40])
def test_what_is_no_bound(n: int, size: int | None) -> None:
    """A NaN bound makes every scale NaN; one that is not above 0 counts as 0, which is a row of zeros' amax."""
    x = rows(2, n)
    asked: dict[str, Any] = {"out_dtype": E4M3, "group_size": size}
    for bound in (float("nan"), -float("nan")):
        made = normforge.quantised_rms_norm(x, scale_ub=torch.tensor([bound]), **asked)
        assert there(made.y_scale).isnan().all()
        assert made.y.float().isnan().all()
    for bound in (0.0, -0.0, -1e-30, -1.0, -1e38, -float("inf")):
        made = check("rms", x, scale_ub=torch.tensor([bound]), **asked)
        assert (there(made.y_scale) == 1.0).all()
    unbounded = normforge.quantised_rms_norm(x, scale_ub=torch.tensor([float("inf")]), **asked)
    assert same_bits(unbounded.y_scale, normforge.quantised_rms_norm(x, **asked).y_scale)


def of_weight(weight: list[float], **asked: Any) -> Any:
    """The RMSNorm of ones without epsilon is its weight."""
    return check("rms", torch.ones(1, len(weight)), torch.tensor(weight), eps=0.0, **asked)


def test_powers_of_two_are_rounded_up_and_exact() -> None:
    for largest, exponent in ((448.0, 127), (448.5, 128), (896.0, 128), (1e-30, 127 - 108), (0.0, 127)):
        made = of_weight([largest] + [0.0] * 31, group_size=32, scale_format="ue8m0", out_dtype=E4M3)
        assert there(made.y_scale).view(torch.uint8).tolist() == [[exponent]]


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0xAA, dtype=torch.uint8)


@each_norm
@pytest.mark.parametrize(
    ("asked", "places"),
    [
        ({"out_dtype": E4M3}, [lambda: torch.empty(5, 1), lambda: torch.empty(5)]),
        ({"out_dtype": E4M3, "group_size": 128}, [lambda: torch.empty(5, 3), lambda: torch.empty(3, 8).t()[:5]]),
        # Flat or not, whatever stood there.
        (SWIZZLED, [lambda: poisoned(128, 12).view(E8M0), lambda: poisoned(1536).view(E8M0)]),
        (NVFP4, [lambda: poisoned(19, 8).view(E4M3).t()[:5]]),
    ],
    ids=["rows", "groups", "swizzled", "NVFP4"],
)
def test_outputs_of_the_callers(norm: str, asked: dict[str, Any], places: list[Callable[[], torch.Tensor]]) -> None:
    if asked is NVFP4:
        asked = {**NVFP4, "global_scale": scale_of(500.0)}
    x, weight, residual = rows(5, N), rows(N), rows(5, N)
    wanted = FUNCTION[norm](x, weight, residual=residual, **asked)
    for place in places:
        total, scale = residual.clone(), place()
        out = poisoned(*wanted.y.shape).view(wanted.y.dtype)
        given: dict[str, Any] = {"residual": total, "residual_out": total, "out": out, "y_scale": scale}
        version = out._version
        made = FUNCTION[norm](x, weight, **asked, **given)
        assert made.y is out
        assert made.residual_out is total
        assert made.y_scale is scale
        assert out._version > version
        assert same_bits(out, wanted.y)
        assert same_bits(total, wanted.residual_out)
        assert same_bits(scale.reshape(there(wanted.y_scale).shape), wanted.y_scale)


@pytest.mark.parametrize("shape", [(2, 1), (3, 2, 1, 1), (1, 1)])
def test_scales_of_groups_where_a_dimension_is_of_one_row(shape: tuple[int, ...]) -> None:
    """Its stride says nothing: of scales by columns, and of the caller's, which are contiguous whatever it is."""
    x = rows(*shape, 160)
    asked: dict[str, Any] = {"group_size": 64, "out_dtype": E4M3}
    expected: Any = normforge.quantised_rms_norm(x.view(-1, 160), **asked).y_scale
    found = normforge.quantised_rms_norm(x, **asked, scale_layout="column_major").y_scale
    assert torch.equal(there(found).reshape(-1, 3), expected)
    strides = [*torch.empty(*shape, 3).stride()]
    strides[-2] = 999
    place = torch.zeros(4096).as_strided((*shape, 3), strides)
    assert place.is_contiguous()
    normforge.quantised_rms_norm(x, **asked, y_scale=place)
    assert torch.equal(place.reshape(-1, 3), expected)


def test_rows_on_two_strides() -> None:
    check("rms", rows(3, 4, 128)[:, 1:3, :64], rows(64), group_size=32, out_dtype=E4M3)


@each_norm
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
@pytest.mark.parametrize("layout", ["row_major", "column_major"])
@pytest.mark.parametrize("kind", FORMATS)
def test_scales_over_one_another_are_refused(norm: str, strides: tuple[int, int], layout: str, kind: str) -> None:
    """Two of them would be one; where so many rows and groups come to no common place, all are written."""
    asked: dict[str, Any] = {"group_size": 32, "scale_format": kind, "scale_layout": layout, "out_dtype": E4M3}
    x, (dtype, packs) = rows(4, N), FORMATS[kind]
    columns = -(-N // (32 * packs))

    def place(m: int, strides: tuple[int, int]) -> torch.Tensor:
        return torch.zeros(100, dtype=torch.uint8).repeat(4).view(dtype).as_strided((m, columns), strides)

    with pytest.raises(LayoutError) as raised:
        FUNCTION[norm](x, **asked, y_scale=place(4, strides))
    assert str(raised.value) == (
        f"the elements of y_scale overlap (shape (4, {columns}), strides {strides}); pass memory for each, "
        "a contiguous tensor say, or leave y_scale out"
    )
    for m, apart in ((2, (2, 5)), (4, (1, 4)), (4, (columns, 1)), (4, (2, 9)), (1, (1, 1))):
        made = FUNCTION[norm](x[:m], **asked, y_scale=place(m, apart)).y_scale
        assert same_bits(there(made).contiguous(), FUNCTION[norm](x[:m], **asked).y_scale)


@THOROUGH
def test_a_trace_refuses_scales_over_one_another_too() -> None:
    """By sizes that are symbols; torch itself copies over such a tensor without a word."""
    asked: dict[str, Any] = {"group_size": 64, "out_dtype": E4M3}
    torch.compiler.reset()
    compiled = torch.compile(normforge.quantised_rms_norm, backend="aot_eager", fullgraph=True, dynamic=True)
    x = rows(4, N)
    with pytest.raises(Unsupported, match="the elements of y_scale overlap"):
        compiled(x, **asked, y_scale=torch.zeros(40).as_strided((4, 5), (2, 3)))
    for apart in ((9, 1), (1, 4), (3, 7)):
        scale = torch.zeros(40).as_strided((4, 5), apart)
        assert compiled(x, **asked, y_scale=scale).y_scale is scale
        assert same_bits(scale.contiguous(), normforge.quantised_rms_norm(x, **asked).y_scale)


@pytest.mark.parametrize("layout", ["row_major", "column_major"])
def test_bytes_of_groups_that_a_row_has_not_are_0_in_the_callers_memory(layout: str) -> None:
    x = rows(4, N)
    asked: dict[str, Any] = {"group_size": 64, "scale_format": "ue8m0_packed", "out_dtype": E4M3}
    for scale in (torch.full((4, 2), -1, dtype=torch.int32), torch.full((2, 4), -1, dtype=torch.int32).t()):
        assert check("rms", x, **asked, scale_layout=layout, y_scale=scale).y_scale is scale
        # Five groups, and three that there are none of.
        assert (scale.contiguous().view(torch.uint8)[:, 5:] == 0).all()
        assert (scale.contiguous().view(torch.uint8)[:, :5] != 0).all()


def test_scales_at_odd_addresses() -> None:
    """Kernels are compiled for rows that start where vectors do; scales of groups may lie anywhere."""
    x = rows(4, 64)
    scales = torch.empty(9)[1:].view(4, 2)
    assert check("rms", x, y_scale=scales, group_size=32).y_scale is scales
    (key, *_) = normforge.compile_keys([4096], ["rms_fwd_bf16_int8_dq_g32"], arch="sm_90")
    assert dict(key.key.arguments)["y_scale_ptr"] == "*fp32"


def by_formula(y: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of y and of its scales by the formula, in fp32: what a second kernel would make of y."""
    n = y.shape[-1]
    groups = torch.nn.functional.pad(y, (0, -n % 16)).view(*y.shape[:-1], -1, 16)
    scale = (groups.abs().amax(-1) / 6.0 * global_scale).clamp(max=448.0).to(torch.float8_e4m3fn)
    stored = scale.float()
    inverse = torch.where(stored == 0, 0.0, global_scale / stored)
    codes = quantise((groups * inverse.unsqueeze(-1)).flatten(-2)[..., :n], DTYPES[FP4])
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
    y, scale = by_formula(there(made.unquantised).float().cpu(), global_scale.cpu())
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
        scale = there(check(norm, rows(*shape), rows(n), **asked).y_scale)
        swizzles = layout == "swizzled_128x4"
        assert tuple(scale.shape) == ((128, -(-n // 64) * 4) if swizzles else (*shape[:-1], -(-n // 16)))


# In e4m3.
ONE, LARGEST, NAN = 0x38, 0x7E, 0x7F
ZEROS = [0.0] * 15
# Between two neighbours each, and half of the smallest scale but for a step of fp4.
TIES, HALF = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), 6 * 2.0**-10


@pytest.mark.parametrize(
    ("weight", "global_scale", "expected", "scales"),
    [
        (
            [6.0, *TIES.tolist(), *(-TIES).tolist(), 0.0],
            1.0,
            [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14],
            [ONE],
        ),
        ([6.0, *torch.nextafter(TIES, TIES + 1).tolist(), *ZEROS[7:]], 1.0, [7, 1, 2, 3, 4, 5, 6, 7], [ONE]),
        ([6.0, *torch.nextafter(TIES, TIES - 1).tolist(), *ZEROS[7:]], 1.0, [7, 0, 1, 2, 3, 4, 5, 6], [ONE]),
        # amax / 6 is halfway between 1 and 1.125, and 1 is even.
        ([6.375, -6.375, 1.0, *ZEROS[2:]], 1.0, [7, 15, 2], [ONE]),
        # As where the global scale was calibrated with smaller values.
        ([6.0, 0.75, *ZEROS[1:], 1.0, *ZEROS], 1792.0, [7, 5, *[0] * 14, 7], [LARGEST, 0x79]),
        # The smallest scale is 2**-9: half of that is rounded to 0, which divides nothing. Values here are half a step.
        (
            [HALF, *ZEROS, HALF * (1 + 2.0**-20), *ZEROS, -1e-30, *ZEROS, 0.0, *ZEROS],
            1.0,
            [*[0] * 16, 5, *[0] * 15, 8],
            [0, 1, 0, 0],
        ),
    ],
    ids=["ties", "above ties", "below ties", "beyond 6", "beyond 448", "too small"],
)
def test_codes_and_bytes_of_scales(
    weight: list[float], global_scale: float, expected: list[int], scales: list[int]
) -> None:
    """By hand; codes behind those that are expected are 0."""
    made = of_weight(weight, global_scale=scale_of(global_scale), **NVFP4)
    codes = quantisation_reference.unpacked(made.y)[0].tolist()
    assert codes == expected + [0] * (len(codes) - len(expected))
    assert byte(made.y_scale)[0].tolist() == scales


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"group_size": 32}, None),
        (MXFP8, 255),
        ({**MXFP8, "scale_format": "ue8m0_packed"}, 255),
        ({**NVFP4, "global_scale": 6.0}, NAN),
    ],
)
def test_what_is_no_number_stays_in_its_group(asked: dict[str, Any], code: int | None, spoilt: float) -> None:
    """Of three groups the second."""
    given = asked | ({"global_scale": scale_of(asked["global_scale"])} if "global_scale" in asked else {})
    weight = torch.ones(3 * asked["group_size"])
    usual = normforge.quantised_rms_norm(torch.ones(1, len(weight)), weight.clone(), eps=0.0, **given)
    weight[asked["group_size"] + 4] = spoilt
    made = normforge.quantised_rms_norm(torch.ones(1, len(weight)), weight, eps=0.0, **given)
    scales, expected = (
        (there(each.y_scale) if code is None else byte(each.y_scale)).flatten().tolist() for each in (made, usual)
    )
    assert scales[1] == code if code else not math.isfinite(scales[1])
    assert scales[:1] + scales[2:] == expected[:1] + expected[2:]
    assert same_bits(byte(made.y).view(3, -1)[::2], byte(usual.y).view(3, -1)[::2])


@pytest.mark.parametrize(
    "mode", ["ln_fwd_bf16_fp4_e2m1fn_addst_dq_g16_e4m3", "rms_fwd_fp32_fp4_e2m1fn_sdq_g16_e4m3_swz"]
)
def test_modes_are_compiled_ahead(mode: str) -> None:
    """With y and its scales as bytes, whatever the GPU converts to."""
    for arch in ("sm_80", "sm_90", "sm_100"):
        (key, *_) = normforge.compile_keys([4096], [mode], arch=arch)
        types = dict(key.key.arguments)
        assert (types["y_ptr"], types["y_scale_ptr"], types["global_scale_ptr"]) == ("*u8:16", "*u8", "*fp32")
