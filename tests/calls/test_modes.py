"""Statistics, ways to say a mode or a number and what each returns, and 2d functions of modulated and gated norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import normforge
from normforge import LayerNormOutput
from normforge.codegen.errors import IllegalCombinationError
from normforge.codegen.model import Mode
from normforge.codegen.values import Cast, DType, FusedAdd, FusedQuant, Norm, Rounding
from normforge.errors import ConflictError, GradientError, ShapeError
from proving.cases import Case, Tensors, cases, operands
from proving.cold_warm.contexts import CONTEXTS

from ..calling import BACKWARD, FORWARD, backward_operands, each_device, each_norm, same_bits
from ..kernels.problems import Problem
from ..operators.registered import step
from ..thorough import THOROUGH, first_of_each

M, N = 3, 100


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(M, N, dtype=torch.float16)


# Ways to say a mode, and what it needs beside it; scales that are given are those of `quantised_layer_norm`.
SPELLINGS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *(
        ("fadd", (mode, mode.value, mode.code), {"residual": torch.ones(M, N)} if mode.adds else {})
        for mode in FusedAdd
        if not mode.renorms
    ),
    *(
        ("fquant", (mode, mode.value, mode.code), {"smooth_scale": torch.ones(N)} if mode.smooths else {})
        for mode in FusedQuant
        if not mode.is_static
    ),
    ("rounding", ("truncate", Rounding.TRUNCATE), {"fquant": 2}),
    ("cast", ("before_weight", Cast.BEFORE_WEIGHT), {}),
    ("save_mv", (1, True), {}),
    ("save_mv", (0, False), {}),
]


@each_norm
@pytest.mark.parametrize(("name", "spellings", "beside"), SPELLINGS)
def test_a_mode_as_word_integer_and_enum(
    norm: str, name: str, spellings: tuple[Any, ...], beside: dict[str, Any], x: torch.Tensor
) -> None:
    given = [{name: spelling, **beside} for spelling in spellings]
    first, *others = [FORWARD[norm](x, **each) for each in given]
    for other in others:
        assert all(map(same_bits, first, other))
    assert len({normforge.which(x, **each, norm=norm) for each in given}) == 1


def test_codes_are_those_of_ck_tile() -> None:
    assert [mode.code for mode in (FusedAdd.NONE, FusedAdd.PRE_ADD_STORE, FusedAdd.PRE_ADD)] == [0, 1, 2]
    assert [mode.code for mode in (FusedQuant.NONE, FusedQuant.SMOOTH_DYNAMIC, FusedQuant.DYNAMIC)] == [0, 1, 2]


def test_which_says_what_the_functional_api_would_run(x: torch.Tensor) -> None:
    trained = x.clone().requires_grad_()
    with pytest.raises(GradientError, match=r"^x requires a gradient and the forward functions compute none"):
        normforge.which(trained)
    assert normforge.which(trained, functional=True) == normforge.which(x, functional=True) == normforge.which(x)


def test_norm_as_word_and_enum(x: torch.Tensor) -> None:
    assert normforge.which(x, norm="rms") == normforge.which(x, norm=Norm.RMS) != normforge.which(x)


NUMBERS: list[Any] = [
    np.float16(0.5),
    np.float32(0.5),
    np.float64(0.5),
    np.int64(1),
    1,
    torch.tensor(0.5),
    torch.tensor(1),
]
NO_NUMBERS = [-1.0, np.nan, 1e39, True, np.bool_(True), *(torch.tensor(each) for each in (True, [1.0]))]


EPS = [
    *cases(vary=()),
    *cases("plain", vary=(), dropout_p=0.5),
    *cases("plain", vary=(), dtype=torch.float64, without=("residual", "x_bias")),
]


# Rows, groups and channels have a look-up each.
@pytest.mark.parametrize(
    "case", first_of_each(EPS, lambda case: case.family if case.family in ("plain", "group", "channels") else None, str)
)
def test_eps_is_what_torch_takes_for_a_number(case: Case) -> None:
    """Cold and warm, and nothing else."""
    given = operands(case)
    for eps in [*NUMBERS, *NUMBERS]:
        assert all(map(same_bits, case.but(eps=eps).run(given), case.but(eps=float(eps)).run(given)))
    for eps in [*NO_NUMBERS, torch.tensor(1.0, requires_grad=True)]:
        with pytest.raises(ConflictError, match="eps"):
            case.but(eps=eps).run(given)


COLUMNS = 32
X, WEIGHT = torch.linspace(-1, 2, 3 * COLUMNS).reshape(3, COLUMNS), torch.linspace(0.5, 1.5, COLUMNS)
FUSED: dict[str, Any] = {"residual": X.flip(0), "fadd": 1, "fquant": 1, "smooth_scale": WEIGHT, "save_mv": True}
MODES = ["ln_fwd_bf16", "rms_fwd_bf16_addst", "rms_bwd_bf16_addst", "ln_fwd_fp16_xb", "ln_bwd_bf16"]


CALLS: dict[str, Callable[[], Any]] = {
    **{
        function.__name__: partial(function, X, WEIGHT, **FUSED)
        for function in (normforge.layernorm2d_fwd, normforge.rmsnorm2d_fwd, normforge.reference.layernorm2d_fwd)
    },
    **{f"{norm}, backward": partial(BACKWARD[norm], **backward_operands(norm, 3, COLUMNS)) for norm in BACKWARD},
    "no dy": partial(BACKWARD["layer"], **{**backward_operands("layer", 3, COLUMNS), "dy": None}),
    **{str(case): partial(step, case, operands(case)) for case in cases(vary=("norm",))},
    "compile_keys": lambda: [str(key) for key in normforge.compile_keys([COLUMNS, 4096], MODES, arch="sm_90")],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_default_device_and_type_change_nothing(call: Callable[[], Any]) -> None:
    wanted = list(call())
    with CONTEXTS["default fp64"](), CONTEXTS["default meta"]():
        actual = list(call())
    torch.testing.assert_close(
        *([each for each in of if isinstance(each, torch.Tensor)] for of in (actual, wanted)), rtol=0, atol=0
    )
    assert [each for each in actual if isinstance(each, str)] == [each for each in wanted if isinstance(each, str)]


BOTH = ("modulated", "gated")
LENGTH = 48
# Each row lies within a longer one; groups are those of gated norms.
USUAL: dict[str, Any] = {"dtype": torch.bfloat16, "layout": "gapped", "shape": (5, 3, LENGTH)}
each_family = pytest.mark.parametrize("case", cases(*BOTH, vary=(), norm="rms", group_size=16, **USUAL), ids=str)


def given_to(case: Case, device: str = "cpu") -> Tensors:
    return {name: tensor.detach() for name, tensor in operands(case, device).items()}


def run(case: Case, given: Tensors, **options: Any) -> LayerNormOutput:
    function: Callable[..., LayerNormOutput] = getattr(normforge, f"{case.family}_{case['norm']}norm2d_fwd")
    return function(**given, **case.arguments, **options)


@each_device
def test_an_offset_of_the_weight(device: str) -> None:
    (case,) = cases("modulated", vary=(), norm="rms", **USUAL)
    given = given_to(case, device)
    wanted = run(case, given | {"weight": given["weight"] + 1.0}, fquant="dynamic")
    assert all(map(same_bits, run(case, given, fquant="dynamic", weight_offset=1.0), wanted))


@each_device
@pytest.mark.parametrize(
    ("mode", "n"),
    [
        *(("ln_fwd_bf16_int8_ga_dq", 700), ("rms_fwd_bf16_int8_gb_dq", 700)),
        *(("ln_fwd_bf16_int8_xg_addst_mod_dq", n) for n in (LENGTH, 700, 33000)),
    ],
)
def test_rows_are_quantised(mode: str, n: int, device: str) -> None:
    """In each pipeline, and a row a program, as pairs of axes need not have them."""
    # Of short rows a program takes several where they are many.
    Problem(Mode.from_name(mode), 300 if n == LENGTH else 4, n).check(device)


@each_device
@each_family
def test_hard_rows_are_quantised(case: Case, device: str) -> None:
    """A closed gate or a scale of -1 leaves zeros, whose y_scale is 1, and a NaN spoils its row or group alone."""
    given = given_to(case, device)
    name, factor = ("gate", -300.0) if case.family == "gated" else ("scale", -1.0)
    given[name][0], given["x"][1, 1, 2] = factor, torch.nan
    if "shift" in given:
        given["shift"].zero_()
    found: Any = run(case, given, fquant="dynamic")
    assert torch.equal(found.y_scale[0], torch.ones_like(found.y_scale[0]))
    assert not found.y[0].any()
    assert (~found.y_scale.isfinite()).nonzero().tolist() == [[1, 1, 0] if case["group_size"] else [1, 1]]


@each_device
@pytest.mark.parametrize("n", [LENGTH, pytest.param(33001, marks=THOROUGH)])
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


def test_none_is_the_eps_of_rms_norm_and_a_known_call_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    x, wanted = torch.zeros(2, 8), torch.full((2,), torch.finfo(torch.float32).eps).rsqrt()
    assert torch.equal(normforge.rms_statistics(x), wanted)
    monkeypatch.delattr("normforge.families.statistics.check_normalised")
    assert torch.equal(normforge.rms_statistics(x), wanted)


@pytest.mark.parametrize(
    ("beside", "message"),
    [({"save_mv": False}, "no save_mv false"), ({"fadd": FusedAdd.PRE_ADD}, "no fadd pre_add"), ({}, "")],
    ids=str,
)
def test_modes_that_write_no_y_lack_what_y_follows_from(beside: dict[str, Any], message: str) -> None:
    axes: dict[str, Any] = {"save_mv": True, "statistics_only": True, **beside}
    if not message:
        assert Mode(Norm.RMS, DType.BF16, DType.BF16, **axes).name == "rms_fwd_bf16_mv_only"
        return
    with pytest.raises(IllegalCombinationError, match=f"writes no y, and has {message}; use another"):
        Mode(Norm.RMS, DType.BF16, DType.BF16, **axes)


@pytest.mark.parametrize("function", [normforge.rms_statistics, normforge.layer_statistics])
def test_rows_without_a_dimension_are_refused(function: Any) -> None:
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"^x has shape \(\); it takes \(\.\.\., N\), one dimension or more$"):
            function(torch.ones(()))
