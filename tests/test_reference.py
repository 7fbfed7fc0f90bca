"""The oracles against the formula in fp64 and its autograd, and quantisation against formulas written another way."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from normforge import reference
from normforge.calls.outputs import NormGradients
from normforge.codegen.groups import Span
from normforge.codegen.values import QUANTISED_DTYPES, DType, Norm, Rounding
from normforge.dtypes import TORCH_DTYPES
from normforge.reference import gated, grouped, modulated
from normforge.reference.norms import quantise
from normforge.tools.compare import compare_gradients
from proving.cases import EPS, IMAGES, Case, Tensors, cases, formula, gradients, operands

from .calling import FORWARD, ORACLE, each_norm, there

SHAPE = (2, 3, 50)
M, N = SHAPE[1:]


def close(actual: torch.Tensor | None, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    """Fail unless two tensors are equal but for rounding in fp64."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


EXACT: dict[str, Any] = dict.fromkeys(("dtype", "vectors", "residual"), torch.float64) | {"layout": "contiguous"}
CASES = [
    *cases("plain", weight_offset=0.0, dropout_p=0.0, **EXACT),
    *cases("plain", norm="rms", dropout_p=0.0, **EXACT),
    *(case for norm in FORWARD for case in cases("modulated", norm=norm, **EXACT)),
    *(case for norm in FORWARD for case in cases("gated", norm=norm, without=(), group_size=None, **EXACT)),
    *cases("group", **EXACT),
    *(case for norm in Norm for case in cases("channels", norm=norm.value, **EXACT)),
    # About as long as rows are.
    cases("channels", norm="l2_clamped", **EXACT)[0].but(eps=3.5),
]
Gradients = reference.gradients.ReferenceGradients


def oracle(case: Case, given: Tensors, dy: torch.Tensor, *ds: torch.Tensor) -> tuple[list[Any], Gradients]:
    """Return what the oracles say of a case: the output, the sum if there is one, and the gradients."""
    norm, x = Norm(case["norm"]), given["x"]
    operands = {name: tensor for name, tensor in given.items() if name not in ("x", "residual")}
    if case.family in IMAGES:
        span = case["num_groups"] or Span.over(norm).num_groups
        told = {**operands, "num_groups": span, "eps": case["eps"] or EPS, "activation": case["activation"]}
        return [grouped.group_norm(x, **told)], grouped.group_norm_bwd(dy, x, **told)
    if case.family == "gated":
        gating = "after_norm" if case["norm_before_gate"] else "before_norm"
        told = {**operands, "gating": gating, "eps": EPS, "activation": case["activation"]}
        return [gated.FORWARD[norm](x, **told).z], gated.gradients(dy, x, **told)
    if case.family == "modulated":
        forward = modulated.FORWARD[norm](**given, eps=EPS)
    else:
        told = {} if norm.centres else {"weight_offset": case["weight_offset"]}
        fadd = "pre_add_store" if "residual" in given else "none"
        forward = ORACLE[norm.value](**given, fadd=fadd, eps=EPS, save_mv=True, **told)
    rows = x + given.get("x_bias", 0.0) if forward.residual_out is None else forward.residual_out
    statistics: dict[str, Any] = {"mean": rows.mean(-1)} if norm.centres else {}
    spread = rows - rows.mean(-1, keepdim=True) if norm.centres else rows
    statistics |= {"rstd": (spread.square().mean(-1) + EPS).rsqrt()}
    if case.family == "plain":
        # Statistics that a call saves are fp32.
        assert (forward.mean is None, there(forward.rstd).dtype) == (not norm.centres, torch.float32)
        for name, statistic in statistics.items():
            close(getattr(forward, name), statistic, 1e-6)
    statistics["dresidual_out"] = ds[0] if ds else None
    if case.family == "modulated":
        found = modulated.gradients(dy, rows, **operands, gated=x, **statistics)
    else:
        backward = reference.layernorm2d_bwd if norm.centres else reference.rmsnorm2d_bwd
        found = backward(dy, rows, given.get("weight"), **statistics, **told)
        found = found._replace(dresidual=found.dx, magnitudes={**found.magnitudes, "dresidual": found.magnitudes["dx"]})
    return [each for each in (forward.z, forward.residual_out) if each is not None], found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_formula(case: Case) -> None:
    """And a gradient is at most as large as the sum of its terms' magnitudes, which gated norms only estimate."""
    given = operands(case)
    wanted = formula(case, given)
    arriving = [torch.randn_like(output) for output in wanted]
    outputs, found = oracle(case, {name: tensor.detach() for name, tensor in given.items()}, *arriving)
    for output, its in zip(outputs, wanted, strict=True):
        close(output, its)
    for name, gradient in gradients(wanted, given, arriving).items():
        close(getattr(found, f"d{name}"), gradient)
        if case.family != "gated":
            assert bool((found.magnitudes[f"d{name}"] * (1 + 1e-12) >= gradient.abs()).all())


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "out"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.float16, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_cast_before_weight_is_what_llama_and_t5_compute(
    norm: str, dtype: torch.dtype, weight_dtype: torch.dtype, out: torch.dtype
) -> None:
    """LlamaRMSNorm: `weight * hidden.to(input_dtype)`; T5LayerNorm: `weight * hidden.to(weight.dtype)`, if of 16 bits.

    So what they multiply with the weight has the type of the result, or x's where the weight makes the result fp32.
    """
    x, weight = (torch.randn(5, 64) * 3 + 1).to(dtype), torch.randn(64).to(weight_dtype)
    function = reference.layernorm2d_fwd if norm == "layer" else reference.rmsnorm2d_fwd
    hidden = function(x, eps=1e-5).z
    # fp64 goes to 16 bits by way of fp32 in torch, and so does what Llama and T5 have.
    product = weight * hidden.float().to(out if out is not torch.float32 else dtype)
    actual = function(x, weight, eps=1e-5, out_dtype=out, cast="before_weight")
    assert product.dtype is out
    assert torch.equal(actual.y, product)
    if dtype is torch.float32:
        assert torch.equal(function(x, weight, eps=1e-5, cast="before_weight").y, function(x, weight, eps=1e-5).y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arithmetic_is_done_in_the_dtype_asked(dtype: torch.dtype) -> None:
    assert reference.layernorm2d_fwd(torch.randn(SHAPE).half(), dtype=dtype).z.dtype == dtype


@each_norm
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_of_zeros_and_one_that_is_not_finite(norm: str, bad: float) -> None:
    x = torch.randn(3, N)
    x[0] = 0.0
    x[1, 7] = bad
    actual: Any = ORACLE[norm](x, fquant="dynamic")
    assert actual.y[0].tolist() == [0] * N
    assert actual.y_scale[0] == 1.0
    assert actual.y_scale.isfinite().tolist() == [True, False, True]


def ratios(out: DType) -> torch.Tensor:
    """Ratios through and beyond the range of a type, with every tie among them."""
    end = out.qmax * 1.1
    if out.is_int:
        return torch.cat((torch.arange(-140, 140) / 2, torch.linspace(-end, end, 501))).double()
    codes = torch.arange(256).to(torch.uint8).view(TORCH_DTYPES[out]).double()
    values = codes[codes.isfinite()].sort().values
    return torch.cat((values, (values[1:] + values[:-1]) / 2, torch.linspace(-end, end, 501).double()))


@pytest.mark.parametrize("rounding", Rounding)
def test_quantise_to_int8(rounding: Rounding) -> None:
    values = ratios(DType.INT8)
    # Python's round() takes ties to even, and its int() cuts toward zero.
    whole = round if rounding is Rounding.NEAREST else int
    expected = [max(-127, min(127, whole(value))) for value in values.tolist()]
    assert quantise(values, DType.INT8, rounding).tolist() == expected
    assert quantise(torch.tensor([float("nan"), 1.0]), DType.INT8, rounding).tolist() == [-127, 1]


@pytest.mark.parametrize("out", QUANTISED_DTYPES[1:])
def test_quantise_to_fp8(out: DType) -> None:
    """The nearest of all values there are; of two as near, the one whose last bit is 0."""
    table = sorted(
        (value, code & 1)
        for code, value in enumerate(torch.arange(256).to(torch.uint8).view(TORCH_DTYPES[out]).double().tolist())
        if abs(value) <= out.qmax
    )
    values = ratios(out)
    expected = [min(table, key=lambda entry: (abs(entry[0] - value), entry[1]))[0] for value in values.tolist()]
    assert quantise(values, out).double().tolist() == expected


def test_values_are_divided_by_the_scale_as_stored() -> None:
    actual: Any = reference.layernorm2d_fwd(torch.randn(4, N), fquant="dynamic", scale_dtype=torch.bfloat16)
    assert actual.y_scale.dtype == torch.bfloat16
    by_stored = [
        [max(-127, min(127, round(value / scale))) for value in row]
        for row, scale in zip(actual.z.tolist(), actual.y_scale.tolist(), strict=True)
    ]
    assert actual.y.tolist() == by_stored


@pytest.mark.parametrize(
    ("dy_dtype", "x_dtype", "to"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
        (torch.float16, torch.float32, torch.float16),
        (torch.float32, torch.float32, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_dweight_is_of_rows_rounded_first_and_nothing_else_is(
    norm: str, dy_dtype: torch.dtype, x_dtype: torch.dtype, to: torch.dtype | None
) -> None:
    x, dy = (torch.randn(M, N) * 2 + 1).to(x_dtype), torch.randn(M, N).to(dy_dtype)
    operands: dict[str, Any] = {"dy": dy, "x": x, "weight": torch.randn(N).double()}
    mean = x.double().mean(-1).float() if norm == "layer" else torch.zeros(M)
    rstd = torch.rand(M)
    statistics: dict[str, Any] = {"mean": mean, "rstd": rstd} if norm == "layer" else {"rstd": rstd}
    backward = reference.layernorm2d_bwd if norm == "layer" else partial(reference.rmsnorm2d_bwd, weight_offset=0.5)
    actual = backward(**operands, **statistics, cast="before_weight")
    once = backward(**operands, **statistics)
    h = (x.double() - mean.double().unsqueeze(-1)) * rstd.double().unsqueeze(-1)
    rounded = h if to is None else h.to(to).double()
    close(actual.dweight, (dy.double() * rounded).sum(0))
    assert torch.equal(actual.dx, once.dx)
    assert (actual.open is None) == (to is None)


def test_a_gradient_that_fp16_holds_as_a_subnormal_is_rounded_to_its_step() -> None:
    step, rows = 2.0**-24, torch.randn(M, N).double()
    expected = reference.rmsnorm2d_bwd(torch.zeros(M, N), rows, rstd=torch.ones(M))
    for off, ok in ((0.4, True), (0.6, False)):
        found = NormGradients(torch.full((M, N), 5 * step, dtype=torch.float16), None, None, None)
        (finding,) = compare_gradients(found, expected._replace(dx=torch.full_like(rows, (5 + off) * step)))
        assert finding.ok == ok


def test_x_and_x_bias_are_added_in_fp32() -> None:
    """1 + 2**-24 is 1 in fp32: a column that is the mean there has no weight gradient, whatever fp64 makes of it."""
    operands: dict[str, Any] = {
        "dy": torch.ones(1, 3),
        "x": torch.tensor([[1.0, 2.0, 0.0]]),
        "x_bias": torch.tensor([2.0**-24, 0.0, 0.0]),
        "mean": torch.tensor([1.0]),
        "rstd": torch.tensor([1.0]),
    }
    assert reference.layernorm2d_bwd(**operands).dweight.tolist() == [0.0, 1.0, -1.0]
    exact = {name: tensor.double() for name, tensor in operands.items()}
    assert reference.layernorm2d_bwd(**exact).dweight.tolist() == [2.0**-24, 1.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NormGradients._fields)
def test_a_gradient_that_is_off_is_told(name: str, dtype: torch.dtype) -> None:
    x, dy = torch.randn(M, N), torch.randn(M, N)
    mean, rstd = x.mean(-1), (x.var(-1, correction=0) + EPS).rsqrt()
    given: dict[str, Any] = {"x_bias": torch.zeros(N), "dropout_p": 0.25, "dropout_rng": torch.tensor([1, 2])}
    expected = reference.layernorm2d_bwd(dy, x, torch.randn(N), mean=mean, rstd=rstd, **given)
    perfect = NormGradients(*(getattr(expected, field).to(dtype) for field in NormGradients._fields))
    assert all(finding.ok for finding in compare_gradients(perfect, expected))
    spoilt = getattr(perfect, name).clone()
    spoilt.view(-1)[5] += 0.02 * (1 + spoilt.view(-1)[5].abs())
    for wrong in (spoilt, None):
        findings = compare_gradients(perfect._replace(**{name: wrong}), expected, due=NormGradients._fields)
        assert [finding.name for finding in findings if not finding.ok] == [name]
