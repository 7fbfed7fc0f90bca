"""The 2d functions of modulated and gated norms: quantised rows, the sum and statistics, against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import normforge
from normforge import LayerNormOutput
from normforge.codegen.values import Norm
from normforge.errors import (
    ConflictError,
    IllegalCombinationError,
    LayoutError,
    NormforgeError,
)
from normforge.reference.gated import FORWARD as GATED
from normforge.reference.modulated import FORWARD as MODULATED
from proving.cases import EPS, Case, Tensors, cases, operands

from ..calling import QUANTISED, agree, each_device, same_bits
from ..thorough import THOROUGH
from .shared import there

BOTH = ("modulated", "gated")
ORACLES: Mapping[str, Mapping[Norm, Callable[..., Any]]] = {"modulated": MODULATED, "gated": GATED}
N = 48
# Each row lies within a longer one; groups are those of gated norms.
USUAL: dict[str, Any] = {"dtype": torch.bfloat16, "layout": "gapped", "shape": (5, 3, N)}
IN_GROUPS = [case.but(group_size=16) for case in cases("gated", vary=("norm", "norm_before_gate"), **USUAL)]
MIXES = [(kind,) * 3 for kind in ("sample", "row", "all")] + [("sample", "all", "row"), ("row", "sample", "all")]
BARE = ("gate", "residual", "weight", "bias")
each_family = pytest.mark.parametrize("case", cases(*BOTH, vary=(), norm="rms", group_size=16, **USUAL), ids=str)


def of_one_case(family: str, **at: Any) -> Case:
    (case,) = cases(family, vary=(), **{**USUAL, "norm": "rms", **at})
    return case


def given_to(case: Case, device: str = "cpu") -> Tensors:
    return {name: tensor.detach() for name, tensor in operands(case, device).items()}


def run(case: Case, given: Tensors, **options: Any) -> LayerNormOutput:
    function: Callable[..., LayerNormOutput] = getattr(normforge, f"{case.family}_{case['norm']}norm2d_fwd")
    return function(**given, **case.arguments, **options)


def check(case: Case, device: str = "cpu", **options: Any) -> None:
    """Run a call twice, known and not, and hold every output against the oracle."""

    def in_groups(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(*rows.shape[:-1], -1, case["group_size"]) if case["group_size"] else rows

    given = given_to(case, device)
    asked = {"eps": EPS, **options}
    if case.family == "gated":
        asked |= {"gating": "after_norm" if case["norm_before_gate"] else "before_norm"}
        asked |= {"activation": case["activation"]}
    wanted = ORACLES[case.family][Norm(case["norm"])](
        **{name: in_groups(each) for name, each in given.items()}, **asked
    )
    for _ in range(2):
        found = run(case, given, **options)
        assert found.y.shape == case["shape"]
        agree(found._replace(y=in_groups(found.y)), wanted)


@each_device
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        *cases(*BOTH, vary=("norm", "norm_before_gate"), **USUAL),
        *cases("modulated", vary=("norm",), without=BARE, **USUAL),
        *IN_GROUPS,
    ],
    ids=str,
)
def test_rows_are_quantised(case: Case, dtype: torch.dtype, device: str) -> None:
    check(case, device, fquant="dynamic", out_dtype=dtype)


@each_device
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {"save_mv": True}),
        (torch.bfloat16, {"save_mv": True, "out_dtype": torch.float32}),
        (torch.float16, {"save_mv": True, "fquant": 2}),
        (torch.float32, {"fquant": "dynamic", "out_dtype": torch.float8_e4m3fn}),
    ],
    ids=str,
)
def test_statistics_and_every_option(dtype: torch.dtype, options: dict[str, Any], device: str) -> None:
    at = {**USUAL, "dtype": dtype}
    for case in cases("modulated", vary=("norm",), **at):
        check(case.but(without=("gate",)) if "fquant" in options else case, device, **options)
    for case in cases("gated", vary=("norm",), activation="sigmoid", **at):
        check(case.but(group_size=24) if "fquant" in options else case.but(norm_before_gate=False), device, **options)


@each_device
def test_an_offset_of_the_weight(device: str) -> None:
    check(of_one_case("modulated"), device, fquant="dynamic", weight_offset=1.0)


@each_device
@pytest.mark.parametrize("mix", MIXES, ids="-".join)
@pytest.mark.parametrize("shape", [(2, 3, 51), (2, 151, 24)], ids=str)
def test_short_rows_are_quantised(shape: tuple[int, ...], mix: tuple[str, str, str], device: str) -> None:
    """A few, and so many that a program takes several and samples end within one."""
    for case in cases("modulated", vary=("norm",), **{**USUAL, "shape": shape}, sharing=mix):
        check(case, device, fquant="dynamic")


# one_pass and two_pass.
@each_device
@pytest.mark.parametrize("n", [700, pytest.param(33001, marks=THOROUGH)])
@pytest.mark.parametrize("family", BOTH)
def test_long_rows_are_quantised(family: str, n: int, device: str) -> None:
    for case in cases(*BOTH, vary=("norm", "norm_before_gate"), **{**USUAL, "shape": (2, 3, n)}):
        if case.family == family:
            check(case, device, fquant="dynamic")


@each_device
@each_family
def test_hard_rows_are_quantised(case: Case, device: str) -> None:
    """A closed gate or a scale of -1 leaves zeros, whose y_scale is 1, and a NaN spoils its row or group alone."""
    given = given_to(case, device)
    name, factor = ("gate", -300.0) if case.family == "gated" else ("scale", -1.0)
    given[name][0], given["x"][1, 1, 2] = factor, torch.nan
    if "shift" in given:
        given["shift"].zero_()
    found = run(case, given, fquant="dynamic")
    assert found.y_scale is not None
    assert torch.equal(found.y_scale[0], torch.ones_like(found.y_scale[0]))
    assert not found.y[0].any()
    assert (~found.y_scale.isfinite()).nonzero().tolist() == [[1, 1, 0] if case["group_size"] else [1, 1]]


@each_device
@pytest.mark.parametrize("case", cases(*BOTH, vary=("norm", "norm_before_gate"), **USUAL), ids=str)
def test_an_unquantised_call_is_the_differentiable_one(case: Case, device: str) -> None:
    given = given_to(case, device)
    found, made = run(case, given), case.run(given)
    assert all(map(same_bits, found, made))
    assert not any(each is not None for each in found[len(made) :])


@each_device
@pytest.mark.parametrize("n", [N, pytest.param(33001, marks=THOROUGH)])
def test_outputs_are_written_where_the_caller_says(n: int, device: str) -> None:
    for case in cases("modulated", vary=("norm",), dtype=torch.bfloat16, shape=(2, 3, n)):
        given = given_to(case, device)
        wanted = run(case, given, fquant="dynamic")
        out, before = torch.empty(2, 3, n, dtype=torch.int8, device=device), given["residual"].clone()
        # In place of the residual, and beside it.
        for total in (given["residual"], torch.empty_like(before)):
            given["residual"].copy_(before)
            version = total._version
            found = run(case, given, fquant="dynamic", out=out, residual_out=total)
            assert found.y is out
            assert found.residual_out is total
            assert total._version > version
            assert same_bits(out, wanted.y)
            assert same_bits(total, wanted.residual_out)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("norm", [pytest.param("layer", marks=THOROUGH), "rms"])
@each_family
def test_a_compiled_call_is_the_eager_one(case: Case, norm: str) -> None:
    case = case.but(norm=norm)
    given = given_to(case)

    def call(tensors: Tensors, **places: torch.Tensor) -> list[torch.Tensor]:
        return [each for each in run(case, tensors, fquant="dynamic", **places) if each is not None]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    wanted = call(given)
    out = torch.empty(case["shape"], dtype=torch.int8)
    for places in ({}, {"out": out}) if case.family == "modulated" else ({},):
        assert all(map(torch.equal, compiled(given, **places), wanted))
    assert case.family == "gated" or torch.equal(out, wanted[0])


X = torch.randn(5, 3, N)
INT8 = torch.empty(5, 3, 2 * N, dtype=torch.int8)
UNQUANTISED = {"fquant": "none", "out_dtype": torch.int8}
REFUSED: list[tuple[str, dict[str, Any], type[NormforgeError], str]] = [
    ("modulated", {"fquant": "smooth_dynamic"}, IllegalCombinationError, "modulated norms have no fquant smooth_dy"),
    ("modulated", {"fquant": "static"}, IllegalCombinationError, "modulated norms have no fquant static"),
    ("modulated", {"fquant": "int8"}, ConflictError, "fquant='int8' is no mode"),
    ("modulated", UNQUANTISED, IllegalCombinationError, "fquant none"),
    ("modulated", {"out_dtype": torch.float16}, IllegalCombinationError, "out_dtype fp16 is not a quantised type"),
    ("modulated", {"residual": None}, ConflictError, "gate scales x before residual is added to it, and none was"),
    ("modulated", {"residual_out": X, "residual": None, "gate": None}, ConflictError, "no residual is added; pass"),
    ("gated", {"fquant": "smooth_dynamic"}, IllegalCombinationError, "gated norms have no fquant smooth_dynamic"),
    ("gated", UNQUANTISED, IllegalCombinationError, "fquant none"),
    ("gated", {"activation": "gelu"}, ConflictError, "activation='gelu' is no mode"),
]


@pytest.mark.parametrize(("family", "asked", "error", "message"), REFUSED)
def test_what_there_is_no_kernel_for_is_refused(
    family: str, asked: dict[str, Any], error: type[Exception], message: str
) -> None:
    function: Any = getattr(normforge, f"{family}_rmsnorm2d_fwd")
    given: dict[str, Any] = {**given_to(of_one_case(family)), "fquant": "dynamic"}
    for _ in range(2):
        with pytest.raises(error, match=message):
            function(**{**given, **asked})
        function(**given)


def test_outputs_overlap_nothing_else() -> None:
    case = of_one_case("modulated", sharing=("row",) * 3)
    given = {**given_to(case), "scale": X.clone()}
    with pytest.raises(LayoutError, match="residual_out overlaps scale in memory"):
        run(case, given, fquant="dynamic", residual_out=given["scale"])
    with pytest.raises(LayoutError, match="out starts at no multiple of 16 bytes"):
        run(case, given, fquant="dynamic", out=INT8.flatten()[1 : 1 + X.numel()].view(X.shape))


@each_family
def test_no_rows(case: Case) -> None:
    found = run(case, given_to(case.but(shape=(0, 3, N))), fquant="dynamic")
    assert (found.y.shape, there(found.y_scale).shape) == ((0, 3, N), (0, 3, 3) if case["group_size"] else (0, 3))
