"""A call like one before is launched without being checked again, and a bad one is refused all the same."""

from __future__ import annotations

import contextvars
import gc
import weakref
from itertools import combinations
from typing import Any

import pytest
import torch

import normforge
from normforge import errors
from normforge.calls.outputs import NormGradients
from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd
from normforge.selection import dispatch
from proving.cases import cases, check, operands

from ..calling import FORWARD, ORACLE, agree, each_norm
from .shared import there

pytestmark = pytest.mark.usefixtures("nothing_known")

X, WEIGHT = torch.linspace(-1, 1, 3 * 64).view(3, 64), torch.ones(64)


VECTORS = ("weight", "bias", "x_bias")


def test_a_vector_beside_a_dropout_is_not_another() -> None:
    for without in [VECTORS, *combinations(VECTORS, 2)] * 2:
        (case,) = cases("plain", vary=(), without=without, dropout_p=0.3)
        check(case, operands(case))


@each_norm
@pytest.mark.parametrize("name", ["out", "residual_out"])
def test_rows_between_which_others_stand_are_no_more_than_fit_there(norm: str, name: str) -> None:
    """Two rows and two stand side by side, and the third would be the first of the others."""
    memory = torch.zeros(6 * 3 * 64)

    def call(m: int, strides: tuple[int, int]) -> Any:
        x = torch.randn(m, 3, 64)
        store: dict[str, Any] = {"residual": torch.randn(m, 3, 64), "fadd": 1} if name == "residual_out" else {}
        given = {**store, name: memory.as_strided((m, 3, 64), (*strides, 1))}
        agree(FORWARD[norm](x, **given), ORACLE[norm](x, **store))

    for _ in range(2):
        call(2, (64, 128))
        with pytest.raises(errors.LayoutError, match=rf"the rows of {name} overlap \(row stride 64, 128, N 64\)"):
            call(6, (64, 128))
    for m in (2, 6, 2):
        call(m, (192, 64))


def test_other_strides_are_another_kind_of_call(checked: list[tuple[int, ...]]) -> None:
    wide = torch.randn(6, 100)
    # Of one row the stride does not matter, and says nothing of several.
    flat = (wide[:1, :64], wide[:, :64], wide[:, 3:67], wide[::2, :64])
    # The last has two strides, of which but the outer one is that of rows without gaps.
    for x in (*flat, torch.randn(2, 3, 64), wide.view(2, 3, 100)[..., :64], torch.randn(2, 5, 64)[:, :3]):
        for _ in range(2):
            agree(normforge.layernorm2d_fwd(x), ORACLE["layer"](x))
    assert len(checked) == 7


def test_what_is_known_keeps_no_tensor() -> None:
    x, weight, residual = torch.randn(3, 64), torch.ones(64), torch.randn(3, 64)
    kept = [weakref.ref(tensor) for tensor in (x, weight, residual)]
    for _ in range(3):
        normforge.layernorm2d_fwd(x, weight, residual=residual, fadd=1, fquant=2)
        normforge.add_layer_norm(x, residual, weight)
        with pytest.raises(errors.ConflictError):
            normforge.layernorm2d_fwd(x, weight, eps=-1.0)
        layernorm2d_bwd(residual, x, weight, mean=torch.zeros(3), rstd=torch.ones(3), wants=("dx", "dweight"))
    del x, weight, residual
    gc.collect()
    assert [reference() for reference in kept] == [None, None, None]


def test_what_is_known_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MOST_PLANS", 4)
    for n in range(1, 12):
        normforge.layernorm2d_fwd(torch.randn(2, n))
        assert 1 <= len(dispatch.plans) <= 4


def test_contexts_that_are_gone_cost_nothing() -> None:
    """What is known within `batch_invariant` is looked up apart while a copied context outlives the block."""
    with normforge.batch_invariant():
        context = contextvars.copy_context()
    assert "plans" not in vars(dispatch)
    del context
    with normforge.batch_invariant():
        pass
    assert "plans" in vars(dispatch)


def gradient(**changed: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "dy": X, "x": X.clone(), "weight": WEIGHT, "mean": torch.zeros(3), "rstd": torch.ones(3),
        "wants": ("dx", "dweight", "dbias"),
    }  # fmt: skip
    return usual | changed


@pytest.mark.parametrize("rows", [3, 0])
def test_gradients_have_the_dtypes_that_they_are_said_to_have(rows: int) -> None:
    x, x_bias = torch.ones(rows, 64).bfloat16(), torch.ones(64).bfloat16()
    saved: dict[str, Any] = {"mean": torch.zeros(rows), "rstd": torch.ones(rows)}
    told: dict[str, Any] = {"dx_dtype": torch.float32, "bias_dtype": torch.bfloat16}
    for weight, dtypes, expected in (
        (torch.ones(64).half(), {}, (torch.bfloat16, torch.float16, torch.float16, torch.bfloat16)),
        (torch.ones(64).half(), told, (torch.float32, torch.float16, torch.bfloat16, torch.bfloat16)),
        (None, {}, (torch.bfloat16, None, torch.bfloat16, torch.bfloat16)),
    ):
        wants = tuple(name for name, dtype in zip(NormGradients._fields, expected, strict=False) if dtype)
        found = layernorm2d_bwd(x, x, weight, x_bias=x_bias, wants=wants, **saved, **dtypes)
        assert tuple(None if gradient is None else gradient.dtype for gradient in found[:-1]) == expected
        assert found.ddropped is None


def test_a_backward_call_without_dy_or_rows() -> None:
    arguments = gradient(dy=None)
    for _ in range(2):
        gradients_of_nothing = layernorm2d_bwd(**arguments)
        assert all(tensor is not None and not tensor.any() for tensor in gradients_of_nothing[:3])
    empty = torch.empty(0, 64)
    for _ in range(2):
        found = rmsnorm2d_bwd(empty, empty, WEIGHT, rstd=torch.empty(0), wants=("dx", "dweight"))
        assert there(found.dx).shape == (0, 64)
        assert not there(found.dweight).any()
