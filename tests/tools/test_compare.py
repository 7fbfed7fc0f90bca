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
    outputs = (getattr(expected, name) for name in LayerNormOutput._fields)
    return LayerNormOutput._make(None if output is None else output.clone() for output in outputs)


def refused(actual: LayerNormOutput, expected: ReferenceOutput, rounding: Rounding = Rounding.NEAREST) -> set[str]:
    """The outputs that compare() finds wrong."""
    return {finding.name for finding in compare(actual, expected, rounding) if not finding.ok}


Change = Callable[[torch.Tensor], torch.Tensor]


def middle(tensor: torch.Tensor) -> Any:
    return MIDDLE if tensor.dim() == 2 else 1


def spoilt(expected: ReferenceOutput, name: str, change: Change, at: Any = None) -> set[str]:
    """The outputs that compare() finds wrong where a place of one, the middle by default, is changed."""
    actual = perfect(expected)
    tensor = getattr(actual, name)
    at = middle(tensor) if at is None else at
    tensor[at] = change(tensor[at])
    return refused(actual, expected)


def more(factor: float) -> Change:
    return lambda value: value * factor


def put(value: torch.Tensor) -> Change:
    return lambda _: value


def stepped(step: int) -> Change:
    """Return what moves a quantised value's code by some steps."""
    return lambda value: (value.view(torch.uint8) + step).view(value.dtype)


def next_up(value: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(value, torch.full_like(value, 9))


@each_norm
@pytest.mark.parametrize("dtype", FLOATS + QUANTISED, ids=str)
def test_the_oracle_agrees_with_itself(norm: str, dtype: torch.dtype) -> None:
    expected = oracle(dtype, norm)
    findings = compare(perfect(expected), expected)
    assert all(finding.ok and finding.error == 0 for finding in findings)
    assert [finding.name for finding in findings] == [name for name in NAMES if getattr(expected, name) is not None]


@each_float
def test_one_float_off_by_more_than_its_rounding_and_all_by_one_last_place(dtype: torch.dtype) -> None:
    expected = oracle(dtype)
    assert spoilt(expected, "y", next_up, ...) == set()
    expected.y[MIDDLE] = 2.0
    off = 4 * max(torch.finfo(dtype).eps, 1e-5)
    for factor in (1 + off, 1 - off, -1, 0):
        assert spoilt(expected, "y", more(factor)) == {"y"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_row_rounded_the_other_way_is_allowed_where_fp32_leaves_it_open(dtype: torch.dtype) -> None:
    """Of fp16's steps, near 1, one in 50 is so near a boundary."""
    given: dict[str, Any] = quantising(dtype) | {"cast": "before_weight", "weight": torch.full((1000,), 100.0)}
    expected: Any = reference.rmsnorm2d_fwd(torch.randn(20, 1000).half(), **{"out_dtype": dtype} | given)
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


def never_written(value: float) -> Change:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[middle(tensor)] = -128 if tensor.dtype is torch.int8 else torch.tensor(value).to(tensor.dtype)
        return tensor

    return change


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nan": never_written(float("nan")),
    "inf": never_written(float("inf")),
    "missing": lambda tensor: None,
    "shape": lambda tensor: tensor.unsqueeze(0),
    "dtype": torch.Tensor.double,
}


@pytest.mark.parametrize(("dtype", "name"), OUTPUTS)
def test_an_output_with_an_element_never_written_or_of_another_kind(dtype: torch.dtype, name: str) -> None:
    expected = oracle(dtype)
    for way, change in WAYS.items():
        actual = perfect(expected)
        assert name in refused(actual._replace(**{name: change(getattr(actual, name))}), expected), way


def test_int8_off_by_one_at_a_tie_is_allowed() -> None:
    # The RMSNorm of ones with eps 0 is exactly its weight.
    expected = reference.rmsnorm2d_fwd(torch.ones(1, 3), torch.tensor([127.0, 2.5, 1.0]), eps=0.0, fquant="dynamic")
    assert expected.y.tolist() == [[127, 2, 1]]
    assert spoilt(expected, "y", stepped(1), (0, 1)) == set()
    assert spoilt(expected, "y", stepped(1), (0, 2)) == {"y"}


# The last bit of a code, and the sign of fp8.
@pytest.mark.parametrize("bit", [1, 0x80])
@each_quantised
def test_quantised_off_by_one_step_or_of_the_wrong_sign(dtype: torch.dtype, bit: int) -> None:
    expected = oracle(dtype)
    for row, column in product(range(M), range(0, N, 7)):
        assert expected.y[row, column].float() != 0
        flipped = spoilt(expected, "y", lambda value: (value.view(torch.uint8) ^ bit).view(dtype), (row, column))
        assert flipped == {"y"}


@pytest.mark.parametrize("dtype", QUANTISED[1:], ids=str)
def test_fp8_off_by_two_steps_where_steps_are_small(dtype: torch.dtype) -> None:
    # The RMSNorm of ones with eps 0 is exactly its weight, and the scale is 1.
    weight = torch.tensor([torch.finfo(dtype).max, 2**-6])
    expected = reference.rmsnorm2d_fwd(torch.ones(1, 2), weight, eps=0.0, fquant="dynamic", out_dtype=dtype)
    for step in (2, -2):
        assert spoilt(expected, "y", stepped(step), (0, 1)) == {"y"}


def test_e5m2_off_by_two_steps_where_fp32_knows_no_more_of_a_sum_that_cancels() -> None:
    """The last place of 1000 in fp32 is 2**-14, four of e5m2's least steps."""
    weight, bias = torch.tensor([57344.0, 1000.0, 1.0]), torch.tensor([0.0, 1000.0, 1.0])
    rows = torch.tensor([[1.0, -1.0, 0.0]]).repeat(2, 1)
    given: dict[str, Any] = {"eps": 1 / 3, "fquant": "dynamic", "out_dtype": torch.float8_e5m2}
    expected = reference.layernorm2d_fwd(rows, weight, bias, **given)
    assert expected.y.float().tolist() == [[57344, 0, 1]] * 2
    for column, allowed in ((1, set()), (2, {"y"})):
        for step in (2, -2):
            # Below 0, e5m2 counts from 128.
            code = int(expected.y.view(torch.uint8)[0, column]) + step
            other = torch.tensor(code if code >= 0 else 128 - code, dtype=torch.uint8).view(torch.float8_e5m2)
            assert spoilt(expected, "y", put(other), (0, column)) == allowed


@pytest.mark.parametrize("dtype", QUANTISED[1:], ids=str)
def test_nan_is_not_zero_and_negative_zero_is(dtype: torch.dtype) -> None:
    """float8_e4m3fnuz writes NaN as other formats write -0."""
    expected = reference.rmsnorm2d_fwd(torch.zeros(1, N), fquant="dynamic", out_dtype=dtype)
    for value, wrong in ((float("nan"), {"y"}), (0.0 if dtype is torch.float8_e4m3fnuz else -0.0, set())):
        assert spoilt(expected, "y", put(torch.tensor(value).to(dtype)), (0, 3)) == wrong


def test_truncation_is_not_rounding() -> None:
    nearest, truncated = (oracle(torch.int8, rounding=rounding) for rounding in ("nearest", "truncate"))
    assert refused(perfect(truncated), truncated, Rounding.TRUNCATE) == set()
    assert refused(perfect(truncated), truncated, Rounding.NEAREST) == {"y"}
    assert refused(perfect(nearest), nearest, Rounding.TRUNCATE) == {"y"}


# The type of y, what else is asked for, the output whose value is off and by how much, and what is found.
OFF: list[tuple[torch.dtype, dict[str, Any], str, Change, set[str]]] = [
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
    dtype: torch.dtype, options: dict[str, Any], name: str, change: Change, wrong: set[str]
) -> None:
    assert spoilt(oracle(dtype, **options), name, change) == wrong


@pytest.mark.parametrize("name", ["residual_out", "y_scale", "mean", "rstd"])
def test_an_output_that_was_not_asked_for(name: str) -> None:
    nothing: dict[str, Any] = {name: None}
    expected = oracle(torch.int8)._replace(**nothing)
    if name == "y_scale":
        # Without a scale, y is no quantised y.
        expected = expected._replace(y=expected.z.float())
    assert refused(perfect(expected)._replace(**{name: torch.zeros(M)}), expected) == {name}


def test_a_row_that_should_not_be_finite_and_is() -> None:
    x = torch.randn(M, N)
    x[1, 1] = float("nan")
    for dtype in (torch.float32, torch.int8):
        expected = reference.layernorm2d_fwd(x, **quantising(dtype))
        assert refused(perfect(expected), expected) == set()
        name = "y" if expected.y_scale is None else "y_scale"
        assert len(spoilt(expected, name, torch.ones_like, 1)) == 1


def test_nothing_to_compare_is_fine() -> None:
    expected = reference.layernorm2d_fwd(torch.empty(0, N), fquant="dynamic", save_mv=True)
    assert refused(perfect(expected), expected) == set()
