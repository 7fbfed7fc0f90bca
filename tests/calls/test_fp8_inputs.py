"""x and dy of fp8, times their scales: what calls compute, what they refuse, and which of them are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import normforge
from normforge import errors
from normforge.calls.functions import completed
from normforge.dtypes import dequantised

from ..calling import (
    BACKWARD,
    FORWARD,
    FUNCTIONS,
    LENGTHS,
    backward_operands,
    check,
    check_backward,
    each_device,
    each_norm,
    same_bits,
    there,
)
from ..thorough import THOROUGH

M = 5
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
each_format = pytest.mark.parametrize("dtype", FORMATS, ids=str)
SCALES = ("row", "column", "one", "number")
BF16: dict[str, Any] = {"out_dtype": torch.bfloat16}


def rows(dtype: torch.dtype, *shape: int, device: str = "cpu") -> torch.Tensor:
    """Random rows of fp8."""
    return (8 * torch.randn(shape, device=device)).to(dtype)


def scale_of(x: torch.Tensor, form: str) -> torch.Tensor:
    """A scale for x, in one of the forms that it may have."""
    shapes: dict[str, tuple[int, ...]] = {
        "row": x.shape[:-1],
        "column": (*x.shape[:-1], 1),
        "one": (1,),
        "number": (),
        "groups of 32": (*x.shape[:-1], -(-x.shape[-1] // 32)),
        "groups of 128": (*x.shape[:-1], -(-x.shape[-1] // 128)),
    }
    return torch.rand(shapes[form], device=x.device) + 0.1


@each_device
@pytest.mark.parametrize("pipeline", LENGTHS)
@each_format
def test_every_byte_times_its_scale_is_an_fp32_number_before_it_is_added(
    dtype: torch.dtype, pipeline: str, device: str
) -> None:
    """To the bit: a compiler left to itself rounds a product and the sum that it is a term of once."""
    n = LENGTHS[pipeline]
    codes = torch.arange(256, device=device).to(torch.uint8).repeat(-(-n // 64))
    x = codes[: 4 * n].view(4, n).view(dtype)
    x_scale = torch.tensor([1.0, 0.1, 3e-30, 7e30], device=device)
    values = x.float() * x_scale.unsqueeze(-1)
    residual = torch.randn(4, n, device=device) * x_scale.unsqueeze(-1)
    found = normforge.rmsnorm2d_fwd(x, x_scale=x_scale, residual=residual, fadd="pre_add_store", **BF16).residual_out
    # Every byte is in every row but those of `rows`, which are shorter.
    assert n < 256 or len(set(x[0].view(torch.uint8).tolist())) == 256
    torch.testing.assert_close(there(found), values + residual, rtol=0, atol=0, equal_nan=True)


@each_device
@each_format
def test_a_nan_and_an_infinity_stay_in_their_rows(dtype: torch.dtype, device: str) -> None:
    x = rows(dtype, 4, 1500, device=device)
    x[1, 3] = float("nan")
    given: dict[str, Any] = {"x_scale": torch.tensor(0.5, device=device), "fquant": "dynamic"}
    out = normforge.layernorm2d_fwd(x, **given)
    assert there(out.y_scale).isnan().tolist() == [False, True, False, False]
    if dtype is torch.float8_e5m2:
        x[2, 5] = float("inf")
        y = normforge.layernorm2d_fwd(x, x_scale=given["x_scale"], **BF16).y
        assert y.isnan().any(-1).tolist() == [False, True, True, False]


@pytest.mark.usefixtures("nothing_known")
def test_calls_that_differ_in_the_scale_alone_are_told_apart() -> None:
    x = rows(FORMATS[0], M, 64)
    bf16 = x.bfloat16()
    # Beside a small eps a norm is the same whatever x is multiplied by.
    given: dict[str, Any] = {**BF16, "eps": 1.0}
    for _ in range(2):
        for form in SCALES:
            check("layer", x, x_scale=scale_of(x, form), **given)
        check("layer", x.view(torch.float8_e5m2), x_scale=scale_of(x, "row"), **given)
        check("layer", bf16, **given)
        # One row has one scale, and so may have any number of rows.
        check("layer", x[:1], x_scale=torch.rand(1), **given)
        check("layer", x, x_scale=torch.rand(1), **given)


@pytest.mark.usefixtures("nothing_known")
def test_rows_in_several_dimensions_have_scales_in_as_many() -> None:
    x = rows(FORMATS[0], 2, 3, 64)
    for _ in range(2):
        for form in SCALES:
            check("rms", x, x_scale=scale_of(x, form), **BF16)
        check("rms", x.transpose(0, 1), x_scale=torch.rand(3, 2), **BF16)
    with pytest.raises(errors.ShapeError, match=r"^x_scale has shape \(3, 2\); it takes one value a row, \(2, 3\) or"):
        normforge.rmsnorm2d_fwd(x, x_scale=torch.rand(3, 2), **BF16)
    with pytest.raises(errors.LayoutError, match=r"^x_scale has strides \(1, 2\); pass x_scale.contiguous\(\)"):
        normforge.rmsnorm2d_fwd(x, x_scale=torch.rand(3, 2).T, **BF16)


def test_y_may_take_the_place_of_x() -> None:
    x = rows(FORMATS[0], M, 64)
    given: dict[str, Any] = {"x_scale": torch.rand(M), "fquant": "dynamic", "out_dtype": FORMATS[0]}
    expected = normforge.rmsnorm2d_fwd(x, **given)
    del given["out_dtype"]
    for _ in range(2):
        place = x.clone()
        found = normforge.rmsnorm2d_fwd(place, **given, out=place)
        assert found.y is place
        assert same_bits(place, expected.y)
        assert same_bits(found.y_scale, expected.y_scale)


@pytest.mark.usefixtures("nothing_known")
def test_outputs_may_not_lie_where_scales_do() -> None:
    x = rows(FORMATS[0], 4, 64)
    memory = torch.rand(4 * 64 + 4)
    given: dict[str, Any] = {"out_dtype": None, "out": memory[: 4 * 64].view(4, 64)}
    for x_scale in (memory[-5:-1], memory[0], memory[9:10], memory[100:104].view(4, 1)):
        # Known from a scale that lies elsewhere.
        normforge.rmsnorm2d_fwd(x, x_scale=x_scale.clone(), **given)
        with pytest.raises(errors.LayoutError, match=r"^out overlaps x_scale in memory; pass memory of its own"):
            normforge.rmsnorm2d_fwd(x, x_scale=x_scale, **given)
    # Right behind it is not within it.
    normforge.rmsnorm2d_fwd(x, x_scale=memory[-4:], **given)


@each_norm
def test_the_functional_api_says_what_takes_fp8(norm: str) -> None:
    x, x_scale = rows(FORMATS[0], 3, 64), torch.rand(3)
    message = (
        rf"^x has dtype torch.float8_e4m3fn, and is taken with its scale by "
        rf"normforge.{FORWARD[norm].__name__}\(x, x_scale=x_scale, ...\), which has no gradient; pass the dequantised "
        r"x, \(x.float\(\) \* x_scale\).bfloat16\(\)"
    )
    calls: tuple[Callable[[], object], ...] = (
        lambda: FUNCTIONS[norm](x, (64,)),
        lambda: FUNCTIONS[f"add_{norm}"](x, torch.zeros(3, 64)),
        lambda: normforge.which(x, x_scale=x_scale, norm=norm, functional=True, **BF16),
    )
    for call in calls:
        with pytest.raises(errors.DTypeError, match=message):
            call()
    assert normforge.which(x, x_scale=x_scale, norm=norm, **BF16).endswith("_fwd_fp8_e4m3fn_bf16_n128")


def test_an_operator_has_no_gradient() -> None:
    x = rows(FORMATS[1], M, 64)
    operator = torch.ops.normforge.rmsnorm2d_fwd.default
    weight = torch.ones(64, requires_grad=True)
    said = {"x": x, "weight": weight, "x_scale": scale_of(x, "row"), "save_mv": True, "out_dtype": torch.bfloat16}
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict.fromkeys(names), **completed("rmsnorm2d_fwd", said)}
    given = {name: given[name] for name in names}
    with pytest.raises(errors.GradientError, match="a tensor requires a gradient and no kernel computes one of a norm"):
        operator(**given)


def of_gradients(norm: str, dtype: torch.dtype, form: str, m: int, n: int, device: str = "cpu") -> dict[str, Any]:
    """Return the operands of a backward call whose dy is fp8, any byte that is a number."""
    given = {name: each.to(device) for name, each in backward_operands(norm, m, n).items()}
    codes = torch.arange(256, device=device).to(torch.uint8).view(dtype)
    dy = codes[codes.float().isfinite()].repeat(-(-m * n // 200))[: m * n].view(m, n)
    bf16 = {name: given[name].bfloat16() for name in ("x", "weight")}
    return {**given, **bf16, "dy": dy, "dy_scale": scale_of(dy, form)}


FORMS = ("row", "one", "groups of 32", "groups of 128")


@each_device
@each_norm
@pytest.mark.parametrize("n", [64, 1500, pytest.param(LENGTHS["two_pass"], marks=THOROUGH), 1, 33, 128, 300])
def test_gradients_of_fp8(norm: str, n: int, device: str) -> None:
    """Those of the oracle, and to the bit those of the dequantised dy in fp32, by whichever scales."""
    asked = ("dx", "dweight", "dx_bias", *(("dbias",) if norm == "layer" else ()))
    for at, form in enumerate(FORMS):
        given = of_gradients(norm, FORMATS[at % 2], form, M, n, device)
        if at > 2:
            given |= {"dy_scale": given["dy_scale"].to(torch.float8_e8m0fnu), "dresidual_out": None}
        found = check_backward(norm, **given, wants=asked)
        values = {**given, "dy": dequantised(given["dy"], given["dy_scale"]), "dy_scale": None}
        assert all(map(same_bits, found, BACKWARD[norm](**values, wants=asked)))


def test_the_smallest_and_the_largest_exponent_are_read() -> None:
    """2**-127, which is subnormal, and NaN, which stays in its row."""
    given: dict[str, Any] = of_gradients("rms", FORMATS[0], "groups of 32", 2, 64)
    given |= {"dresidual_out": None, "x_bias": None}
    given["dy_scale"] = torch.tensor([[0, 0], [254, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values: dict[str, Any] = {"dy": dequantised(given["dy"], given["dy_scale"]), "dy_scale": None}
    found, expected = (there(BACKWARD["rms"](**given | other).dx) for other in ({}, values))
    assert same_bits(found, expected)
    assert found.isnan().any(-1).tolist() == [False, True]
    assert found[0].abs().max() > 0.0


@each_norm
def test_gradients_cast_before_the_weight_are_rounded_to_xs_bits(norm: str) -> None:
    check_backward(norm, **of_gradients(norm, FORMATS[0], "row", M, 300), cast="before_weight", wants=("dweight",))


@pytest.mark.usefixtures("nothing_known")
def test_gradients_that_differ_in_the_scale_alone_are_told_apart() -> None:
    for _ in range(2):
        for form in (*SCALES, *FORMS[2:]):
            for dtype in FORMATS:
                # One row has one scale, and so may have any number of rows.
                check_backward("rms", **of_gradients("rms", dtype, form, 1, 256))
                given = of_gradients("rms", dtype, form, 2 * M, 256)
                check_backward("rms", **given)
                shared = {name: given.pop(name) for name in ("weight", "x_bias")}
                scale = {"dy_scale": given.pop("dy_scale")} if form in ("one", "number") else {}
                check_backward(
                    "rms", **shared, **scale, **{name: each.unflatten(0, (2, M)) for name, each in given.items()}
                )
        given = of_gradients("rms", FORMATS[0], "row", M, 256)
        check_backward("rms", **given | {"dy": given["dy"].bfloat16(), "dy_scale": None})
        with normforge.batch_invariant():
            check_backward("rms", **given)
    assert there(normforge.rmsnorm2d_bwd(**of_gradients("rms", FORMATS[0], "row", 0, 64)).dx).shape == (0, 64)


def test_operators_of_gradients_of_fp8_are_traced_and_differentiated() -> None:
    """And a program that was saved before there was a dy_scale calls them without."""
    given = of_gradients("rms", FORMATS[0], "groups of 32", M, 64) | {"x_bias": None}
    names = ("dy", "x", "weight", "dresidual_out", "rstd", "dy_scale")

    def run(*tensors: Any) -> Any:
        return normforge.rmsnorm2d_bwd(**dict(zip(names, tensors, strict=True)), wants=("dx", "dweight"))[:2]

    operands = [given[name] for name in names]
    expected = run(*operands)
    for traced in (torch.compile(run, backend="eager", fullgraph=True), make_fx(run)(*operands)):
        assert all(map(same_bits, traced(*operands), expected))
    x, others = given["x"].float().requires_grad_(), (None, None, 0.0, None, "after_weight", None, None, ["dx"])
    found = []
    for dy, scale in ((given["dy"], (given["dy_scale"],)), (dequantised(given["dy"], given["dy_scale"]), ())):
        (dx,) = torch.ops.normforge.rmsnorm2d_bwd(dy, x, given["weight"], given["rstd"], 0.0, *others, *scale)
        found.append((dx, *torch.autograd.grad(dx.square().sum(), x)))
    assert all(map(same_bits, *found))
