"""Norms quantised along columns too, their amax, and the gradient of y in 16 bits, against fp64."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge import errors
from normforge.calls.check import check as checked
from normforge.codegen.model import Mode
from normforge.tools.compare import columns_of, numbers_of

from ..calling import backward_operands, each_norm, each_of, refusals, same_bits, there
from ..covering import few_first
from ..kernels.problems import assert_in_blocks, check_both_ways
from ..thorough import COSTLY, THOROUGH
from .test_quantised import E5M2, FUNCTION, SWIZZLED, check, rows
from .test_wrong_tensors import E4M3, MXFP8

pytestmark = pytest.mark.usefixtures("on_each_device")

FP8: dict[str, Any] = {"group_size": 128, "out_dtype": E4M3}
PACKED: dict[str, Any] = {**FP8, "scale_format": "ue8m0_packed", "scale_layout": "column_major"}
# By name: what quantises, and the size of a block.
BLOCKS: dict[str, tuple[dict[str, Any], int]] = {
    "mxfp8": (MXFP8, 32),
    "swizzled": (SWIZZLED, 32),
    "fp8": (FP8, 128),
    "e5m2": ({**FP8, "out_dtype": E5M2, "scale_format": "ue8m0_float", "group_size": 64}, 64),
    "packed": (PACKED, 128),
}
# The same, and blocks of all rows, for y alone: gradients have none.
WHOLE: dict[str, Any] = {"out_dtype": E4M3}
FORMS = BLOCKS | {"whole": (WHOLE, 0), "whole e5m2": ({"out_dtype": E5M2}, 0)}
PRE = "pre_add_store"
each_format = pytest.mark.parametrize("name", BLOCKS)
each_form = pytest.mark.parametrize("name", FORMS)
each_layout = pytest.mark.parametrize("layout", ["untransposed", "transposed"])


@COSTLY
@each_norm
@each_form
@each_layout
@pytest.mark.parametrize(
    ("m", "n", "fadd"),
    [
        *((m, n, PRE if m % 2 else "") for m, n in ((1, 300), (127, 64), (128, 100), (32, 1), (257, 33), (5, 5000))),
        *((129, 300, "post_add"), (33, 65, "post_add_norm"), (2, 5000, "post_add"), (2, 20000, "post_add_norm")),
    ],
)
def test_both_directions(norm: str, name: str, layout: str, m: int, n: int, fadd: str) -> None:
    """Rows and columns are the oracle's, and rows have the bits of a call without columns.

    Behind a norm, too: a NaN, an infinity and zeros spoil no other row and block.
    """
    asked, _ = FORMS[name]
    x = (torch.randn(m, n) * torch.exp2(torch.randint(-20, 20, (m, 1)))).bfloat16()
    given: dict[str, Any] = {"residual": rows(m, n), "fadd": fadd} if fadd else {}
    given |= {} if m % 2 else {"cast": "before_weight"}
    given |= {"bias": rows(n) * 100} if norm == "layer" else {}
    weight = rows(n)
    if fadd.startswith("post"):
        given["save_unquant"] = True
        x[0, n // 2], x[-1], given["residual"][m // 2, 0] = torch.nan, 0.0, torch.inf
    if fadd == "post_add_norm":
        given |= {f"next_{each}": rows(n) for each in ("weight", "bias")[: 1 + (norm == "layer")]}
    made = check(norm, x, weight, **given, **asked, columnwise=layout)
    alone = FUNCTION[norm](x, weight, **given, **asked)
    assert all(same_bits(one, other) for one, other in zip(alone[:4], made[:4], strict=True))
    assert (made.columnwise is None, made.columnwise_scale is None, made.amax) == (False, False, None)


def modulations(*sizes: int, gates: bool = False) -> dict[str, torch.Tensor]:
    """Return a scale and a shift of some sizes, and, if rows are to be gated, a gate."""
    return {name: rows(*sizes) for name in ("scale", "shift", *["gate"] * gates)}


@COSTLY
@each_norm
@each_form
@each_layout
@pytest.mark.parametrize(
    ("added", "shape", "sizes"),
    [
        # Samples that end within a tile, of one row, as many as rows, in several tiles, and a row for all.
        pytest.param("gate", (3, 43, 300), (3, 300), marks=THOROUGH),
        ("", (130, 1, 64), (130, 64)),
        ("residual", (130, 64), (130, 64)),
        ("gate", (2, 2, 65, 33), (2, 33)),
        ("", (5, 5000), (5000,)),
        pytest.param("residual", (2, 3, 20000), (2, 20000), marks=THOROUGH),
    ],
)
def test_modulated_rows_in_both_directions(
    norm: str, name: str, layout: str, added: str, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    """And their amax; a row of NaN and a sample of zeros with neither bias nor shift spoil no others."""
    (asked, _), n = FORMS[name], shape[-1]
    given: dict[str, Any] = {"residual": rows(*shape) if added else None}
    given |= modulations(*sizes, gates=added == "gate")
    x, weight = rows(*shape) * torch.exp2(torch.randint(-20, 20, (*shape[:-1], 1))).bfloat16(), rows(n)
    x[-1], given["shift"][-1 if len(sizes) > 1 else n // 2 :] = 0.0, 0.0
    x[0].view(-1, n)[-1, n // 2] = torch.nan
    made = check(norm, x, weight, **given, **asked, columnwise=layout, amax_out=torch.zeros(1))
    # On a card a LayerNorm's kernel that stores its mean contracts other products, and some values round otherwise.
    alone = FUNCTION[norm](x, weight, **given, **asked, amax_out=torch.zeros(1)) if norm == "rms" or x.is_cpu else made
    assert all(same_bits(one, other) for one, other in zip(alone[:4], made[:4], strict=True))


@each_norm
@each_form
@each_layout
@pytest.mark.parametrize(("m", "n"), [(130, 96), (1, 33), (5, 300), (128, 40), (300, 7)])
def test_rows_and_columns_are_what_a_reader_of_y_would_quantise(
    norm: str, name: str, layout: str, m: int, n: int
) -> None:
    """To the bit, of a y that is stored: columns are a cast of its transpose, their scales in the same format.

    A NaN or an infinity spoils no other column; zeros, and what is too small, have a scale of 1.
    """
    asked, size = FORMS[name]
    x, weight = rows(1, m, n) * 3.0, rows(n)
    weight[:4] = torch.tensor([torch.nan, torch.inf, 0.0, 1e-40])
    kept: dict[str, Any] = {**asked, "quantise_rounded": True, "save_unquant": True, "columnwise": layout}
    made = check(norm, x, weight, **kept)
    mode = checked(FUNCTION[norm].__name__, {"x": x, **kept, "group_size": str(size or "none"), "fquant": 2}).mode
    y, groups = there(made.unquantised).float().flatten(0, -2), torch.Size((1, m, -(-n // (size or n))))
    assert_in_blocks(mode, y.t(), *columns_of(made, mode))
    assert_in_blocks(mode, y, made.y.flatten(0, -2), numbers_of(there(made.y_scale), mode, groups).flatten(0, -2))
    if name == "packed":
        # Four blocks to an int32, zeros behind the last.
        codes = made.columnwise_scale if layout == "transposed" else made.columnwise_scale.t()
        assert not codes.clone(memory_format=torch.contiguous_format).view(torch.uint8)[:, -(-m // size) :].any()


@pytest.mark.parametrize(
    ("asked", "layout", "m", "strides"),
    [
        (FP8, "untransposed", 130, ((96, 1), (96, 1))),
        (FP8, "transposed", 130, ((144, 1), (2, 1))),
        (FP8, "transposed", 160, ((160, 1), (2, 1))),
        ({**FP8, "scale_layout": "column_major"}, "transposed", 130, ((144, 1), (1, 96))),
        ({**FP8, "scale_layout": "column_major"}, "untransposed", 130, ((96, 1), (1, 4))),
        (PACKED, "transposed", 1000, ((1008, 1), (1, 96))),
        (MXFP8, "untransposed", 64, ((96, 1), (96, 1))),
        (WHOLE, "transposed", 130, ((144, 1), (1, 1))),
        (WHOLE, "untransposed", 130, ((96, 1), (96, 1))),
    ],
)
def test_memory(asked: dict[str, Any], layout: str, m: int, strides: tuple[Any, Any]) -> None:
    """A transposed row starts at a multiple of 16 bytes, as products of matrices need."""
    made = FUNCTION["rms"](rows(m, 96), **asked, columnwise=layout)
    assert (there(made.columnwise).stride(), there(made.columnwise_scale).stride()) == strides
    assert there(made.columnwise).shape == ((96, m) if layout == "transposed" else (m, 96))


@COSTLY
@each_norm
@each_format
def test_a_sum_behind_a_norm_goes_where_the_residual_is(norm: str, name: str) -> None:
    """Of rows on a stride, too, and of operands in other dtypes; a second call is known, and has the same bits."""
    asked, (m, n) = {**BLOCKS[name][0], "columnwise": "transposed"}, (37, 160)
    x, wide, residual = rows(m, 2 * n)[:, :n], torch.randn(m, 2 * n)[:, :n], rows(m, n)
    of_two: dict[str, Any] = {"fadd": "post_add_norm", "next_weight": rows(n).half(), **asked}
    check(norm, x, torch.randn(n), residual=wide, fadd="post_add", save_unquant=True, amax_out=torch.zeros(1), **asked)
    assert check(norm, x, torch.randn(n), residual=wide, **of_two).residual_out.dtype == torch.float32
    expected = FUNCTION[norm](x, residual=residual, **of_two)
    for total in (residual.clone(), residual):
        found = FUNCTION[norm](x, residual=total, residual_out=total, **of_two)
        assert found.residual_out is total
        assert all(map(same_bits, found, expected))


def test_a_mean_far_from_zero_is_subtracted_exactly() -> None:
    """Rows of 1e4 and a little noise: their mean in fp32 is off by a good part of the noise."""
    check("layer", 1e4 + torch.randn(40, 512).mul(1e-2), **FP8, columnwise="transposed")
    # Of a few rows the first values make a pivot that is a good part of the deviation off.
    check("layer", rows(7, 1000), **FP8, columnwise="transposed")


@each_layout
def test_no_rows_have_no_columns(layout: str) -> None:
    for asked in (FP8, SWIZZLED, PACKED):
        made = FUNCTION["layer"](rows(0, 64), **asked, columnwise=layout, amax_out=torch.zeros(1))
        assert there(made.columnwise).shape == ((64, 0) if layout == "transposed" else (0, 64))
        assert there(made.columnwise_scale).numel() == 0
        assert there(made.amax).item() == 0.0
    shape = (64, 1) if layout == "transposed" else (1, 64)
    assert FUNCTION["rms"](rows(0, 64), **WHOLE, columnwise=layout).columnwise_scale.equal(torch.ones(shape))


@each_norm
@pytest.mark.parametrize("n", [40, 600, pytest.param(20000, marks=THOROUGH)])
@pytest.mark.parametrize(
    "asked",
    [
        {"fquant": "static", "y_scale": 0.1, "out_dtype": E4M3},
        {"out_dtype": torch.int8},
        {**FP8, "columnwise": "transposed"},
        {"group_size": 16, "scale_format": "e4m3", "out_dtype": torch.float4_e2m1fn_x2, "global_scale": 1.0},
    ],
    ids=["static", "rows", "columns", "nvfp4"],
)
def test_an_amax_is_that_of_all_rows(norm: str, n: int, asked: dict[str, Any]) -> None:
    """Of a slot in a history, whose neighbours stay; a call raises what an earlier one left, and never lowers it."""
    given = {name: torch.full((1,), each) if isinstance(each, float) else each for name, each in asked.items()}
    history = torch.tensor([7.0, 0.0, 5.0])
    x, weight = rows(5, n), rows(n)
    made = check(norm, x, weight, **given, amax_out=history[1:2])
    assert there(made.amax).data_ptr() == history[1:].data_ptr()
    found = history[1].item()
    for factor, expected in ((0.5, found), (2.0, 2.0 * found)):
        FUNCTION[norm](x, weight * factor, **given, amax_out=history[1])
        assert history.tolist() == [7.0, expected, 5.0]
    x[3, 2] = float("nan")
    FUNCTION[norm](x, weight, **given, amax_out=history[1])
    FUNCTION[norm](x[:3], weight, **given, amax_out=history[1])
    assert history.isnan().tolist() == [False, True, False]


def test_an_infinite_amax() -> None:
    amax = torch.full((), -0.0)
    normforge.quantised_rms_norm(torch.ones(2, 64), torch.full((64,), torch.inf), out_dtype=E4M3, amax_out=amax)
    assert amax.item() == float("inf")


@COSTLY
@pytest.mark.parametrize("how", [PRE, "modulated", "post_add", "post_add_norm"])
@pytest.mark.parametrize("asked", [{**FP8, "columnwise": 2}, {**SWIZZLED, "columnwise": 1}, {**WHOLE, "columnwise": 2}])
def test_traced_calls(asked: dict[str, Any], how: str) -> None:
    """One operator returns both directions, and the amax is accumulated in the tensor that was passed."""
    x, weight, residual = rows(4, 10, 96).requires_grad_(), rows(96), rows(4, 10, 96)
    given: dict[str, Any] = {"residual": residual, "save_unquant": True, **asked}
    operands = modulations(4, 96, gates=True) if how == "modulated" else {}
    if how.startswith("post"):
        given["fadd"], operands["residual"] = how, residual.clone()
        operands |= {"next_weight": rows(96)} if how == "post_add_norm" else {}
    given |= {name: each.requires_grad_() for name, each in operands.items()}
    torch.compiler.reset()
    compiled = torch.compile(FUNCTION["rms"], backend="aot_eager", fullgraph=True)
    eager, traced = torch.full((1,), 1e-3), torch.full((1,), 1e-3)
    one = FUNCTION["rms"](x, weight, **given, amax_out=eager)
    other = compiled(x, weight, **given, amax_out=traced)
    assert all(same_bits(each, its) for each, its in zip(one, other, strict=True))
    due = [x, *operands.values()]
    gradients, its = (torch.autograd.grad(made.unquantised, due, residual) for made in (one, other))
    assert all(map(same_bits, gradients, its))
    assert other.amax is traced
    assert there(other.columnwise).stride() == there(one.columnwise).stride()


# Forms whose y in 16 bits carries a gradient.
STRAIGHT: dict[str, dict[str, Any]] = {
    "rows": {},
    "static": {"fquant": "static", "y_scale": 0.1, "out_dtype": E4M3},
    "columns": {**FP8, "columnwise": "transposed"},
    "swizzled": {**SWIZZLED, "columnwise": "untransposed", "cast": "before_weight"},
    "rounded": {**FP8, "quantise_rounded": True},
    "whole": {**WHOLE, "columnwise": "transposed"},
}


# Each form, and the operands that are added to its rows.
ADDED_STRAIGHT = [
    *product(STRAIGHT, ("", "residual", "x_bias")),
    # Modulated rows, of which no call has a static scale or a cast before the weight.
    *product(("rows", "columns", "rounded"), ("scale shift", "scale shift gate residual")),
    # Sums behind a norm.
    *product(("rows", "static", "swizzled", "whole"), ("residual post_add", "residual next_weight post_add_norm")),
]


def of_doubles(norm: str, operands: dict[str, torch.Tensor], fadd: str = PRE) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the sum of operands in fp64, of which the sum is rounded to 16 bits and differentiated unrounded."""
    if fadd.startswith("post"):
        y, _ = of_doubles(
            norm, {name: operands[name] for name in ("x", "weight", "bias", "x_bias") if name in operands}
        )
        total = y + operands["residual"]
        named = {"x": total, "weight": operands.get("next_weight"), "bias": operands.get("next_bias")}
        second = {name: each for name, each in named.items() if each is not None}
        return (total, total) if fadd == "post_add" else of_doubles(norm, second)
    scale, shift, gate = (operands.get(name, torch.zeros(1, 1)).unsqueeze(1) for name in ("scale", "shift", "gate"))
    added = [operands[name] for name in ("x_bias", "residual") if name in operands]
    total = operands["x"] * (gate if "gate" in operands else 1.0) + sum(added)
    total = total + (total.bfloat16().double() - total).detach()
    vectors = [operands[name] for name in ("weight", "bias") if name in operands]
    y = getattr(torch.nn.functional, f"{norm}_norm")(total, total.shape[-1:], *vectors, eps=1e-5)
    return y * (1.0 + scale) + shift, total


@each_norm
@pytest.mark.parametrize("case", few_first(ADDED_STRAIGHT, tuple, "-".join))
def test_gradients_go_straight_through_y_in_16_bits(norm: str, case: tuple[str, str]) -> None:
    """By kernels, and of the gradients again, as fp64 differentiates the norm alone; columns have no x_bias."""
    form, added = case
    asked = {name: torch.full((1,), each) if isinstance(each, float) else each for name, each in STRAIGHT[form].items()}
    if added == "x_bias":
        asked["columnwise"] = "none"
    names = ["x", "weight", *(["bias"] if norm == "layer" else []), *added.split()]
    fadd = names.pop() if "post" in added else PRE
    names += ["next_bias"] if norm == "layer" and "next_weight" in names else []
    leading = {"x": (2, 9), "residual": (2, 9), "scale": (2,), "shift": (2,), "gate": (2,)}
    given = {name: rows(*leading.get(name, ()), 96).requires_grad_() for name in names}
    wide = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    expected, arrived = of_doubles(norm, wide, fadd), (rows(2, 9, 96), rows(2, 9, 96))
    kept = 2 if "residual" in names and fadd != "post_add" else 1

    def made_of() -> Any:
        return FUNCTION[norm](**given, eps=1e-5, save_unquant=True, fadd=fadd, **asked)

    def gradients(made: Any, again: bool = False) -> tuple[torch.Tensor, ...]:
        outputs = (made.unquantised, made.residual_out)[:kept]
        return torch.autograd.grad(outputs, tuple(given.values()), arrived[:kept], create_graph=again)

    made = made_of()
    recorded = [name for name, each in made._asdict().items() if each is not None and each.requires_grad]
    assert recorded == ["residual_out", "unquantised"][2 - kept :]
    into = [each.double() for each in arrived[:kept]]
    of_wide = torch.autograd.grad(expected[:kept], tuple(wide.values()), into, create_graph=True)
    again = torch.autograd.grad(gradients(made_of(), again=True)[0].float().square().sum(), given["x"])
    of_again = torch.autograd.grad(of_wide[0].square().sum(), wide["x"])
    for got, want in zip((*gradients(made), *again), (*of_wide, *of_again), strict=True):
        step = 2.0**-7 * want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=step)


@each_norm
def test_statistics_are_what_backward_functions_take(norm: str) -> None:
    """Of a function of the caller's, which writes no y in 16 bits, for example."""
    x, weight = rows(40, 96).requires_grad_(), rows(96)
    made = FUNCTION[norm](x, weight, **FP8, save_unquant=True, columnwise="transposed", eps=1e-5)
    with torch.no_grad():
        alone = FUNCTION[norm](x, weight, **FP8, columnwise="transposed", eps=1e-5)
    dy, statistics = rows(40, 96), {"mean": alone.mean} if norm == "layer" else {}
    backward: Any = normforge.layernorm2d_bwd if norm == "layer" else normforge.rmsnorm2d_bwd
    (expected,) = torch.autograd.grad(made.unquantised, x, dy)
    assert same_bits(backward(dy, x.detach(), weight, rstd=alone.rstd, wants=("dx",), **statistics).dx, expected)


BACKWARD: Any = {"layer": normforge.quantised_layernorm2d_bwd, "rms": normforge.quantised_rmsnorm2d_bwd}
UNQUANTISED: Any = {"layer": normforge.layernorm2d_bwd, "rms": normforge.rmsnorm2d_bwd}


def of_gradients(norm: str, name: str, layout: str, m: int, n: int) -> tuple[Mode, dict[str, Any], dict[str, Any]]:
    """Return a backward mode, the operands of a call, and what quantises its dx."""
    asked = {**BLOCKS[name][0], "columnwise": layout}
    given = {each: value for each, value in backward_operands(norm, m, n).items() if each != "x_bias"}
    given = {each: value.bfloat16() if value.dim() > 1 else value for each, value in given.items()}
    mode = checked(BACKWARD[norm].__name__, given | asked | {"group_size": str(asked["group_size"])}).mode
    return mode, given, asked


@each_norm
@each_format
@each_layout
@pytest.mark.parametrize(("m", "n"), [(1, 300), (127, 64), (129, 300), (32, 1), (257, 33), (5, 40000)])
def test_dx_is_quantised_as_it_is_returned(norm: str, name: str, layout: str, m: int, n: int) -> None:
    """In both directions to the bit; gradients have the bits of the function that quantises nothing.

    A row of NaN spoils its groups, and the blocks of columns that it is in; zeros have a scale of 1.
    """
    mode, given, asked = of_gradients(norm, name, layout, m, n)
    given["dresidual_out"][m // 2], given["dy"][m // 3] = torch.nan, 0.0
    given["dresidual_out"][m // 3, : n // 2] = 0.0
    wants = ("dweight", *(["dbias"] if norm == "layer" else []))
    made = BACKWARD[norm](**given, **asked, wants=wants)
    check_both_ways(mode, made)
    alone = UNQUANTISED[norm](**given, wants=("dx", *wants))
    assert all(same_bits(getattr(made, each), getattr(alone, each)) for each in ("dx", "dweight", "dbias"))


def test_an_fp8_dy_has_a_dx_in_fp8() -> None:
    """Of rows that are read twice, on a stride and in three dimensions; a tiny dx, in fp32."""
    mode, given, asked = of_gradients("rms", "mxfp8", "untransposed", 6, 20000)
    given |= {"dy": given["dy"].to(E5M2), "dy_scale": torch.full((6, 1), 1e-30), "dresidual_out": None}
    given["x"] = torch.cat((given["x"], given["x"]), -1)[:, :20000]
    given = {
        each: value.unflatten(0, (2, 3)) if each in ("x", "dy", "dy_scale", "rstd") else value
        for each, value in given.items()
    }
    made = BACKWARD["rms"](**given, **asked, dx_dtype=torch.float32)
    check_both_ways(mode, made)
    assert (made.dx.dtype, made.dweight) == (torch.float32, None)
    assert made.rowwise_scale.shape == (2, 3, 625)


@each_norm
def test_gradients_in_graphs_and_batches(norm: str) -> None:
    """Traced in one operator; under batch invariance rows of dx have the bits that they have in another batch."""
    _, given, asked = of_gradients(norm, "packed", "transposed", 300, 96)
    torch.compiler.reset()
    compiled = torch.compile(BACKWARD[norm], backend="aot_eager", fullgraph=True)
    eager, traced = (call(**given, **asked, wants=["dweight"]) for call in (BACKWARD[norm], compiled))
    assert all(same_bits(one, other) for one, other in zip(eager, traced, strict=True))
    assert traced.columnwise.stride() == eager.columnwise.stride()
    with normforge.batch_invariant():
        few = {
            each: value[:5] if each in ("x", "dy", "dresidual_out", "rstd", "mean") else value
            for each, value in given.items()
        }
        all_rows, some = (BACKWARD[norm](**each, **asked) for each in (given, few))
    assert same_bits(all_rows.rowwise[:5], some.rowwise)
    assert same_bits(all_rows.rowwise_scale[:5], some.rowwise_scale)


def test_no_rows_have_no_gradients() -> None:
    _, given, asked = of_gradients("layer", "swizzled", "transposed", 0, 96)
    made = BACKWARD["layer"](**given, **asked, wants=("dweight", "dbias"))
    assert (made.dx.shape, made.columnwise.shape, made.rowwise_scale.numel()) == ((0, 96), (96, 0), 0)
    assert made.dweight.tolist() == made.dbias.tolist() == [0.0] * 96


def needed(*sizes: int) -> torch.Tensor:
    return torch.ones(*sizes).bfloat16().requires_grad_()


REFUSED = refusals(Path(__file__).with_name("columnwise.yaml"), globals())


@each_of(REFUSED)
def test_refusals(given: dict[str, Any], error: type[errors.NormforgeError], message: str) -> None:
    with pytest.raises(error) as raised:
        normforge.quantised_rms_norm(rows(4, 64), **{name: _here(each) for name, each in given.items()})
    assert message in str(raised.value)


@each_of(refusals(Path(__file__).with_name("quantised_gradients.yaml"), globals()))
def test_refused_gradients(given: dict[str, Any], error: type[errors.NormforgeError], message: str) -> None:
    _, operands, _ = of_gradients("rms", "fp8", "transposed", 4, 64)
    with pytest.raises(error) as raised:
        BACKWARD["rms"](**{name: _here(each) for name, each in (operands | given).items()})
    assert message in str(raised.value)


def _here(value: Any) -> Any:
    return value.to(torch.empty(0).device) if isinstance(value, torch.Tensor) else value


def test_an_amax_in_memory_that_is_read_is_refused() -> None:
    weight = torch.ones(64)
    with pytest.raises(errors.LayoutError, match="amax_out overlaps weight in memory; pass memory of its own"):
        normforge.quantised_rms_norm(rows(4, 64), weight, amax_out=weight[3])


@THOROUGH
def test_several_norms_in_one_launch_have_no_columns() -> None:
    """Each takes launches of its own, with the same results; modulated rows alone take one launch."""
    asked = {**FP8, "columnwise": "transposed"}
    for _ in range(4):
        # Of so many short rows a program has several, and columns have a launch of their own.
        x, other, modulated = rows(2, 150, 64), rows(300, 96), {**FP8, **modulations(2, 64)}
        expected, first = FUNCTION["rms"](other, **asked), FUNCTION["rms"](x, **modulated)
        _, second = normforge.rms_norms([(x, None, FP8), (other, None, asked)])
        assert same_bits(second.columnwise, expected.columnwise)
        found, _ = normforge.rms_norms([(x, None, modulated), (other, None, FP8)])
        assert all(map(same_bits, found, first))
