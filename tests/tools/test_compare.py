"""compare() lets nothing wrong pass: each output of each kind, off by little more than is allowed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from normforge import LayerNormOutput, reference
from normforge.codegen.values import DType, Rounding
from normforge.reference.norms import ReferenceOutput, quantise
from normforge.tools.compare import compare

from ..calling import FLOATS, ORACLE, QUANTISED, each_float, each_norm, each_quantised, quantising

M, N = 4, 50
MIDDLE = (2, 17)

NAMES = ("y", "residual_out", "y_scale", "mean", "rstd")
# Every output of every kind of call; only a quantising one has a scale.
OUTPUTS = [
    (dtype, name)
    for dtype in (torch.float32, torch.float16, *QUANTISED)
    for name in NAMES
    if name != "y_scale" or dtype in QUANTISED
]


def oracle(dtype: torch.dtype = torch.float32, norm: str = "layer", **keywords: Any) -> ReferenceOutput:
    """What a call with every output would return, with y of this dtype."""
    x, residual = torch.randn(M, N), torch.randn(M, N)
    keywords = quantising(dtype) | {"residual": residual, "fadd": "pre_add_store", "save_mv": True} | keywords
    return ORACLE[norm](x, torch.rand(N) + 0.5, **keywords)


def perfect(expected: ReferenceOutput) -> LayerNormOutput:
    """A copy of the oracle's outputs, which may be spoilt."""
    copies: dict[str, Any] = {
        name: tensor if tensor is None else tensor.clone() for name, tensor in expected._asdict().items()
    }
    for name in set(ReferenceOutput._fields) - set(LayerNormOutput._fields):
        del copies[name]
    return LayerNormOutput(**copies)


def refused(actual: LayerNormOutput, expected: ReferenceOutput, rounding: Rounding = Rounding.NEAREST) -> set[str]:
    """The outputs that compare() finds wrong."""
    return {finding.name for finding in compare(actual, expected, rounding) if not finding.ok}


@each_norm
@pytest.mark.parametrize("dtype", FLOATS + QUANTISED, ids=str)
def test_the_oracle_agrees_with_itself(norm: str, dtype: torch.dtype) -> None:
    expected = oracle(dtype, norm)
    findings = compare(perfect(expected), expected)
    assert all(finding.ok and finding.error == 0 for finding in findings)
    assert [finding.name for finding in findings] == [name for name in NAMES if getattr(expected, name) is not None]


@each_float
def test_one_float_off_by_more_than_its_rounding(dtype: torch.dtype) -> None:
    expected = oracle(dtype)
    eps = torch.finfo(dtype).eps
    for factor in (1 + 4 * max(eps, 1e-5), 1 - 4 * max(eps, 1e-5), -1, 0):
        actual = perfect(expected)
        actual.y[0, 3] = 2.0
        expected.y[0, 3] = 2.0
        actual.y[0, 3] *= factor
        assert refused(actual, expected) == {"y"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_row_rounded_the_other_way_is_allowed_where_fp32_leaves_it_open(dtype: torch.dtype) -> None:
    """Of fp16's steps, near 1, one in 50 is so near a boundary."""
    given: dict[str, Any] = quantising(dtype) | {"cast": "before_weight", "weight": torch.full((1000,), 100.0)}
    expected = reference.rmsnorm2d_fwd(torch.randn(20, 1000).half(), **{"out_dtype": dtype} | given)
    assert expected.open is not None
    open_places = (expected.open > 0) & (expected.z.abs() > 50)
    assert 0 < int(open_places.sum()) < open_places.numel() / 10

    def moved(places: torch.Tensor) -> LayerNormOutput:
        step = 2.0**-10 * 100 * places
        y = (expected.z + step).float()
        if expected.y_scale is not None:
            y = quantise((expected.z + step) / expected.y_scale.unsqueeze(-1), DType.INT8)
        return LayerNormOutput(y, None, expected.y_scale, None, None)

    assert refused(moved(torch.zeros_like(open_places)), expected) == set()
    assert refused(moved(~open_places & (expected.open == 0)), expected) == {"y"}
    if dtype is torch.float32:
        up = (expected.z + expected.open).float()
        assert refused(LayerNormOutput(up, None, None, None, None), expected) == set()


@each_float
def test_one_last_place_is_allowed(dtype: torch.dtype) -> None:
    expected = oracle(dtype)
    actual = perfect(expected)
    actual.y.copy_(torch.nextafter(actual.y, torch.full_like(actual.y, 9)))
    assert refused(actual, expected) == set()


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
@pytest.mark.parametrize(("dtype", "name"), OUTPUTS)
def test_one_element_never_written(dtype: torch.dtype, name: str, spoilt: float) -> None:
    expected = oracle(dtype)
    actual = perfect(expected)
    tensor = getattr(actual, name)
    if dtype == torch.int8 and name == "y":
        tensor[MIDDLE] = -128
    else:
        tensor[MIDDLE if tensor.dim() == 2 else 1] = torch.tensor(spoilt).to(tensor.dtype)
    assert name in refused(actual, expected)


def test_int8_off_by_one_at_a_tie_is_allowed() -> None:
    # The RMSNorm of ones with eps 0 is exactly its weight.
    expected = reference.rmsnorm2d_fwd(torch.ones(1, 3), torch.tensor([127.0, 2.5, 1.0]), eps=0.0, fquant="dynamic")
    actual = perfect(expected)
    assert actual.y.tolist() == [[127, 2, 1]]
    actual.y[0, 1] = 3
    assert refused(actual, expected) == set()
    actual.y[0, 2] = 2
    assert refused(actual, expected) == {"y"}


# The last bit of a code, and the sign of fp8.
@pytest.mark.parametrize("bit", [1, 0x80])
@each_quantised
def test_quantised_off_by_one_step_or_of_the_wrong_sign(dtype: torch.dtype, bit: int) -> None:
    expected = oracle(dtype)
    for row, column in product(range(M), range(0, N, 7)):
        assert expected.y[row, column].float() != 0
        actual = perfect(expected)
        actual.y.view(torch.uint8)[row, column] ^= bit
        assert refused(actual, expected) == {"y"}


@pytest.mark.parametrize("dtype", QUANTISED[1:], ids=str)
def test_fp8_off_by_two_steps_where_steps_are_small(dtype: torch.dtype) -> None:
    # The RMSNorm of ones with eps 0 is exactly its weight, and the scale is 1.
    weight = torch.tensor([torch.finfo(dtype).max, 2**-6])
    expected = reference.rmsnorm2d_fwd(torch.ones(1, 2), weight, eps=0.0, fquant="dynamic", out_dtype=dtype)
    for step in (2, -2):
        actual = perfect(expected)
        actual.y.view(torch.uint8)[0, 1] += step
        assert refused(actual, expected) == {"y"}


def test_e5m2_off_by_two_steps_where_fp32_knows_no_more_of_a_sum_that_cancels() -> None:
    """The last place of 1000 in fp32 is 2**-14, four of e5m2's least steps."""
    weight, bias = torch.tensor([57344.0, 1000.0, 1.0]), torch.tensor([0.0, 1000.0, 1.0])
    rows = torch.tensor([[1.0, -1.0, 0.0]]).repeat(2, 1)
    given: dict[str, Any] = {"eps": 1 / 3, "fquant": "dynamic", "out_dtype": torch.float8_e5m2}
    expected = reference.layernorm2d_fwd(rows, weight, bias, **given)
    assert expected.y.float().tolist() == [[57344, 0, 1]] * 2
    for column, allowed in ((1, set()), (2, {"y"})):
        for step in (2, -2):
            actual = perfect(expected)
            # Below 0, e5m2 counts from 128.
            code = int(actual.y.view(torch.uint8)[0, column]) + step
            actual.y.view(torch.uint8)[0, column] = code if code >= 0 else 128 - code
            assert refused(actual, expected) == allowed


@pytest.mark.parametrize("dtype", QUANTISED[1:], ids=str)
def test_nan_is_not_zero_and_negative_zero_is(dtype: torch.dtype) -> None:
    """float8_e4m3fnuz writes NaN as other formats write -0."""
    expected = reference.rmsnorm2d_fwd(torch.zeros(1, N), fquant="dynamic", out_dtype=dtype)
    for value, wrong in ((float("nan"), {"y"}), (0.0 if dtype is torch.float8_e4m3fnuz else -0.0, set())):
        actual = perfect(expected)
        actual.y[0, 3] = torch.tensor(value).to(dtype)
        assert refused(actual, expected) == wrong


def test_truncation_is_not_rounding() -> None:
    nearest, truncated = (oracle(torch.int8, rounding=rounding) for rounding in ("nearest", "truncate"))
    assert refused(perfect(truncated), truncated, Rounding.TRUNCATE) == set()
    assert refused(perfect(truncated), truncated, Rounding.NEAREST) == {"y"}
    assert refused(perfect(nearest), nearest, Rounding.TRUNCATE) == {"y"}


def more(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: value * factor


def next_up(value: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(value, torch.full_like(value, 9))


# The type of y, what else is asked for, the output whose value is off and by how much, and what is found.
OFF: list[tuple[torch.dtype, dict[str, Any], str, Callable[[torch.Tensor], torch.Tensor], set[str]]] = [
    *(
        (torch.int8, {"scale_dtype": dtype}, "y_scale", more(1 + 4 * torch.finfo(dtype).eps), {"y", "y_scale"})
        for dtype in (torch.float16, torch.bfloat16)
    ),
    (torch.int8, {}, "y_scale", more(1 + 4e-5), {"y_scale"}),
    # Values must fit the scale that was stored.
    (torch.int8, {}, "y_scale", more(1.01), {"y", "y_scale"}),
    *(
        (torch.float32, {"residual": torch.ones(M, N, dtype=dtype)}, "residual_out", next_up, {"residual_out"})
        for dtype in FLOATS
    ),
    *((torch.float32, {}, name, lambda value: value + 1e-4, {name}) for name in ("mean", "rstd")),
]


@pytest.mark.parametrize(("dtype", "options", "name", "change", "wrong"), OFF)
def test_one_scale_sum_or_statistic_off(
    dtype: torch.dtype,
    options: dict[str, Any],
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    wrong: set[str],
) -> None:
    expected = oracle(dtype, **options)
    actual = perfect(expected)
    tensor = getattr(actual, name)
    place = MIDDLE if tensor.dim() == 2 else 1
    tensor[place] = change(tensor[place])
    assert refused(actual, expected) == wrong


@pytest.mark.parametrize("name", ["residual_out", "y_scale", "mean", "rstd"])
def test_an_output_that_is_missing_or_was_not_asked_for(name: str) -> None:
    expected, nothing = oracle(torch.int8), dict[str, Any]({name: None})
    assert name in refused(perfect(expected)._replace(**nothing), expected)
    expected = expected._replace(**nothing)
    if name == "y_scale":
        # Without a scale, y is no quantised y.
        expected = expected._replace(y=expected.z.float())
    actual = perfect(expected)._replace(**{name: torch.zeros(M)})
    assert refused(actual, expected) == {name}


@pytest.mark.parametrize("change", ["shape", "dtype"])
@pytest.mark.parametrize(("dtype", "name"), OUTPUTS)
def test_another_shape_or_dtype(dtype: torch.dtype, name: str, change: str) -> None:
    expected = oracle(dtype)
    actual = perfect(expected)
    tensor = getattr(actual, name)
    other = tensor.unsqueeze(0) if change == "shape" else tensor.double()
    assert name in refused(actual._replace(**{name: other}), expected)


def test_a_row_that_should_not_be_finite_and_is() -> None:
    x = torch.randn(M, N)
    x[1, 1] = float("nan")
    for dtype in (torch.float32, torch.int8):
        expected = reference.layernorm2d_fwd(x, **quantising(dtype))
        assert refused(perfect(expected), expected) == set()
        actual = perfect(expected)
        tensor = actual.y if actual.y_scale is None else actual.y_scale
        tensor[1] = 1.0
        assert len(refused(actual, expected)) == 1


def test_nothing_to_compare_is_fine() -> None:
    expected = reference.layernorm2d_fwd(torch.empty(0, N), fquant="dynamic", save_mv=True)
    assert refused(perfect(expected), expected) == set()
