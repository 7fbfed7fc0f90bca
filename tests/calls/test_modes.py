"""The ways to say a mode or a number, and what each returns, whatever the default device and type are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import normforge
from normforge.codegen.values import Cast, FusedAdd, FusedQuant, Norm, Rounding
from normforge.errors import ConflictError, GradientError
from proving.cases import Case, Tensors, cases, operands

from ..calling import BACKWARD, FORWARD, backward_operands, each_norm, printed, same_bits
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


@THOROUGH
def test_which_says_torch_where_no_kernel_runs() -> None:
    program = (
        "import torch, normforge; x = torch.randn(3, 64); "
        "print(normforge.which(x, functional=True), normforge.which(x)); "
        "print(normforge.which(x, norm='rms', functional=True))"
    )
    assert printed(program, TRITON_INTERPRET=None).split() == ["torch", "ln_fwd_fp32_n128", "torch"]


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


def differentiated(case: Case, given: Tensors) -> Any:
    outputs = case.run(given)
    return *outputs, *torch.autograd.grad(outputs[0].square().sum(), list(given.values()))


CALLS: dict[str, Callable[[], Any]] = {
    **{
        function.__name__: partial(function, X, WEIGHT, **FUSED)
        for function in (normforge.layernorm2d_fwd, normforge.rmsnorm2d_fwd, normforge.reference.layernorm2d_fwd)
    },
    **{f"{norm}, backward": partial(BACKWARD[norm], **backward_operands(norm, 3, COLUMNS)) for norm in BACKWARD},
    "no dy": partial(BACKWARD["layer"], **{**backward_operands("layer", 3, COLUMNS), "dy": None}),
    **{str(case): partial(differentiated, case, operands(case)) for case in cases(vary=("norm",))},
    "compile_keys": lambda: [str(key) for key in normforge.compile_keys([COLUMNS, 4096], MODES, arch="sm_90")],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_default_device_and_type_change_nothing(call: Callable[[], Any]) -> None:
    wanted = list(call())
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            actual = list(call())
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(
        *([each for each in of if isinstance(each, torch.Tensor)] for of in (actual, wanted)), rtol=0, atol=0
    )
    assert [each for each in actual if isinstance(each, str)] == [each for each in wanted if isinstance(each, str)]
