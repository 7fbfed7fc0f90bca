"""Calls, and what the list of their kernels is asked by: of rows, of groups, and of rows in any number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge.ahead_of_time import compile_keys as keys
from normforge.ahead_of_time.compile_keys import compile_keys
from normforge.families import plain_calls
from normforge.families.group import row as group
from normforge.families.operands import GroupOptions
from normforge.kernels.gpu import KernelKey, target_of
from proving.cases import Case, cases, gradients, operands

from ..calling import table_at
from ..nn.groups import innermost
from ..thorough import THOROUGH

N, BF16 = 32, torch.bfloat16
C, GROUPS = 8, 4
CPU = torch.device("cpu")


def listed(*modes: str, **options: Any) -> set[KernelKey]:
    """Return what `compile_keys` lists for the interpreter, where calls can be run."""
    lengths: dict[str, Any] = {} if "shapes" in options else {"n": [options.pop("n", N)]}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(keys, "find_target", lambda *_: target_of(CPU))
        return {key.key for key in compile_keys(modes=modes, **lengths, **options)}


def rows(*sizes: int, dtype: torch.dtype = BF16, **options: Any) -> torch.Tensor:
    return torch.randn(*(sizes or (3,)), N, dtype=dtype, **options)


def ones(dtype: torch.dtype = BF16, **options: Any) -> torch.Tensor:
    return torch.ones(N, dtype=dtype, **options)


def heads() -> torch.Tensor:
    """Four heads of three tokens' eight."""
    return torch.zeros(3, 8, N, dtype=BF16)[:, :4]


def plain(m: int) -> None:
    normforge.layernorm2d_fwd(rows(m), ones(), ones())


def quantised(m: int) -> None:
    words = {"fadd": "pre_add_store", "fquant": "smooth_dynamic", "out_dtype": torch.float8_e4m3fn}
    given: dict[str, Any] = {"residual": rows(m), "smooth_scale": ones(torch.float32), **words}
    normforge.rmsnorm2d_fwd(rows(m), ones(), **given)


def train(case: Case) -> None:
    """Make a training step of a kind of call."""
    given = operands(case)
    outputs = case.run(given)
    gradients(outputs, given, outputs)


def trained(family: str, **at: Any) -> Callable[[int], None]:
    """Return a training step of a kind of call, of any number of rows."""
    (case,) = cases(family, vary=(), dtype=BF16, vectors=BF16, residual=BF16, **at)
    return lambda m: train(case.but(shape=(m, N)))


def dropped_and_trained(m: int) -> None:
    x, residual, weight = rows(m, requires_grad=True), rows(m, requires_grad=True), ones(requires_grad=True)
    # Whatever p is, and wherever the seed, there is one kernel.
    for drops in ({"dropout_p": 0.1}, {"dropout_p": 0.9, "dropout_rng": torch.arange(3)[1:]}):
        options: dict[str, Any] = {**drops}
        y, total = normforge.add_rms_norm(x, residual, weight, **options)
        torch.autograd.backward((y, total), (rows(m), rows(m)))


# By what calls of any number of rows do: such a call, and the modes of its kernels.
DEFAULTS = [
    (plain, ["ln_fwd_bf16"]),
    pytest.param(quantised, ["rms_fwd_bf16_fp8_e4m3fn_addst_sdq"], marks=THOROUGH),
    pytest.param(trained("plain", without=("residual", "x_bias")), ["ln_fwd_bf16_mv", "ln_bwd_bf16"], marks=THOROUGH),
    (trained("renormed", norm="rms"), ["rms_fwd_bf16_postaddnorm_mv", "rms_bwd_bf16_addst", "rms_bwd_bf16"]),
    pytest.param(dropped_and_trained, ["rms_fwd_bf16_drop_addst_mv", "rms_bwd_bf16_drop_addst"], marks=THOROUGH),
]


def of(samples: int, *space: int, **options: Any) -> torch.Tensor:
    return torch.randn(samples, C, *space, dtype=BF16, **options)


def vector(dtype: torch.dtype = BF16, **options: Any) -> torch.Tensor:
    return torch.ones(C, dtype=dtype, **options)


def stepped(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, activation: str = "none") -> None:
    """A training step, and the same call without a gradient."""
    y = normforge.group_norm(x, GROUPS, weight, bias, activation=activation)
    torch.autograd.backward(y, torch.ones_like(y))
    with torch.no_grad():
        normforge.group_norm(x, GROUPS, weight, bias, activation=activation)


def wide(x: torch.Tensor) -> None:
    """As under torch.autocast on a GPU."""
    options = GroupOptions(GROUPS, 1e-5, "none", torch.float32)
    group.launched(x, vector(torch.float32), None, options, saves=x.requires_grad)


def unaligned() -> torch.Tensor:
    return torch.zeros(C * 6 + 1, dtype=BF16)[1:].view(1, C, 6)


CALLS: dict[str, dict[str, Any]] = table_at(
    Path(__file__).with_suffix(".yaml"), {"innermost": innermost, "plain_calls": plain_calls, **globals()}
)
