"""A call like one before is launched without being checked again, and a bad one is refused all the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import normforge
from normforge import errors
from normforge.calls import plan
from normforge.calls.known import all_plans
from normforge.calls.outputs import NormGradients
from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd
from normforge.kernels.gpu import Target
from normforge.kernels.launcher import Launcher
from normforge.selection import dispatch

from ..calling import FORWARD, ORACLE, agree, each_norm, same_bits
from .shared import there
from .test_bad_arguments import N, X, refusal

pytestmark = pytest.mark.usefixtures("nothing_known")


def test_one_vector_is_not_another() -> None:
    """Of as many tensors, all alike, it is the key that says which operands they are."""
    vector = torch.randn(64)
    for _ in range(2):
        for name in ("weight", "bias", "x_bias"):
            given: dict[str, Any] = {name: vector}
            agree(normforge.layernorm2d_fwd(X, **given), ORACLE["layer"](X, **given))


def test_outputs_that_overlap_are_refused_after_some_that_do_not() -> None:
    memory = torch.randn(8, 64)
    x, residual = memory[:3], memory[3:6]
    store: dict[str, Any] = {"residual": residual, "fadd": 1}
    normforge.layernorm2d_fwd(x, out=torch.empty(3, 64))
    normforge.layernorm2d_fwd(x, **store, out=torch.empty(3, 64), residual_out=torch.empty(3, 64))
    shared = torch.empty(3, 64)
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"out": memory[1:4]}, "out overlaps x"),
        ({**store, "out": memory[4:7], "residual_out": torch.empty(3, 64)}, "out overlaps residual"),
        ({**store, "out": torch.empty(3, 64), "residual_out": memory[2:5]}, "residual_out overlaps x"),
        ({**store, "out": shared, "residual_out": shared[:]}, "residual_out overlaps out"),
        ({"weight": memory[0], "out": memory[:3]}, "out overlaps weight"),
    )
    normforge.layernorm2d_fwd(x, N, out=torch.empty(3, 64))
    for arguments, message in bad:
        for _ in range(2):
            error, said = refusal(partial(normforge.layernorm2d_fwd, x, **arguments))
            assert error is errors.LayoutError
            assert message in said
            assert said == refusal(partial(normforge.which, x, **arguments))[1]


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


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with statistics": {"save_mv": True},
    "fused": {"residual": X, "fadd": 1, "fquant": 2, "x_bias": N},
    "into others": {"residual": X, "fadd": 1, "out": torch.empty(3, 64), "residual_out": torch.empty(3, 64)},
}


ROWS = ("residual", "out", "residual_out")


@pytest.mark.parametrize("name", CALLS)
@each_norm
def test_a_known_call_is_not_checked(norm: str, name: str, checked: list[tuple[int, ...]]) -> None:
    for m in (3, 1, 7, 700, 1):
        x = torch.randn(m, 64)
        given = {key: torch.randn(m, 64) if key in ROWS else value for key, value in CALLS[name].items()}
        inputs = {key: value for key, value in given.items() if key not in ("out", "residual_out")}
        expected = ORACLE[norm](x, N, **inputs)
        agree(FORWARD[norm](x, N, **given), expected)
    assert len(checked) == 1


def test_other_strides_are_another_kind_of_call(checked: list[tuple[int, ...]]) -> None:
    wide = torch.randn(6, 100)
    # Of one row the stride does not matter, and says nothing of several.
    flat = (wide[:1, :64], wide[:, :64], wide[:, 3:67], wide[::2, :64])
    # The last has two strides, of which but the outer one is that of rows without gaps.
    for x in (*flat, torch.randn(2, 3, 64), wide.view(2, 3, 100)[..., :64], torch.randn(2, 5, 64)[:, :3]):
        for _ in range(2):
            agree(normforge.layernorm2d_fwd(x), ORACLE["layer"](x))
    assert len(checked) == 7


def _differentiated(x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    y = normforge.layer_norm(leaf, (x.shape[-1],))
    (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y) + x.detach())
    return dx


def _with_residual(x: torch.Tensor) -> torch.Tensor:
    plain = torch.ones(x.shape, dtype=x.dtype)
    return normforge.rmsnorm2d_fwd(plain, residual=x, fadd="pre_add").y


def _heads(x: torch.Tensor) -> torch.Tensor:
    return normforge.layernorm2d_fwd(x.unsqueeze(1).expand(-1, 2, -1)).y.flatten(0, 1)[::2]


ROWS_APART: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "forward": lambda x: normforge.layernorm2d_fwd(x).y,
    # A call whose eps is no float is checked though its kind is known.
    "checked again": lambda x: normforge.layernorm2d_fwd(x, eps=1 if len(x) == 1 else 1.0).y,
    "quantised": lambda x: normforge.rmsnorm2d_fwd(x, fquant="dynamic").y,
    "differentiated": _differentiated,
    "backward": lambda x: there(rmsnorm2d_bwd(x, x, rstd=torch.ones(len(x)), wants=("dx",)).dx),
    "residual": _with_residual,
    "two strides": _heads,
}


@pytest.mark.parametrize("name", ROWS_APART)
def test_one_row_tells_nothing_of_the_stride_of_several(name: str) -> None:
    """The stride of a single row is any, and a call of it fits the kind that rows of the same stride made known."""
    rows = torch.randn(9, 3, 65)
    rows[:, 1:] = torch.nan
    apart, call = rows[:, 0], ROWS_APART[name]
    # From the second row on addresses are no multiples of 16 bytes, and the first call with them is of one row.
    for x in (apart, apart[1:2], apart[1:6], apart[1:2], apart[2:3], apart[2:]):
        assert same_bits(call(x), call(x.clone()))


def test_a_kind_of_one_row_stays_known_beside_that_of_several(checked: list[tuple[int, ...]]) -> None:
    apart = torch.randn(9, 3, 65)[:, 0]
    for _ in range(3):
        for x in (apart, apart[1:2], apart[1:6], apart[1:2]):
            normforge.layernorm2d_fwd(x)
    assert len(checked) == 3


def launchers() -> list[Launcher]:
    """Everything made ready for the forward calls that are known."""
    plans = [plan for plan in all_plans() if not plan.mode.is_backward]
    return [launcher for plan in plans for ready in plan._prepared if ready is not None for launcher in ready.launchers]


@pytest.mark.parametrize("name", ["x", "out"])
def test_a_single_row_takes_the_same_kernel_after_several_rows_that_are_apart(name: str) -> None:
    """Several rows of stride 17 are read one element at a time, and a single one in vectors, whatever ran before."""
    keys = []
    for rows in ((1,), (4, 1)):
        dispatch.forget()
        for m in rows:
            apart = torch.ones(m, 17)[:, :16]
            if name == "x":
                normforge.layernorm2d_fwd(apart)
            else:
                normforge.layernorm2d_fwd(torch.ones(m, 16), out=apart)
        keys.append(launchers()[-1].key)
    assert keys[0] == keys[1]


def test_what_is_known_keeps_no_tensor() -> None:
    x, weight, residual = torch.randn(3, 64), torch.ones(64), torch.randn(3, 64)
    kept = [weakref.ref(tensor) for tensor in (x, weight, residual)]
    normforge.layernorm2d_fwd(x, weight, residual=residual, fadd=1, fquant=2)
    normforge.layernorm2d_fwd(x, weight)
    layernorm2d_bwd(residual, x, weight, mean=torch.zeros(3), rstd=torch.ones(3), wants=("dx", "dweight"))
    del x, weight, residual
    gc.collect()
    assert [reference() for reference in kept] == [None, None, None]


def test_what_is_known_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MOST_PLANS", 4)
    for n in range(1, 12):
        normforge.layernorm2d_fwd(torch.randn(2, n))
        assert 1 <= len(dispatch.plans) <= 4


class Tagged(torch.Tensor):
    """A subclass that changes nothing."""


def test_a_subclass_is_served_and_not_remembered(checked: list[tuple[int, ...]]) -> None:
    operands: dict[str, Any] = {"x": torch.randn(3, 64), "weight": torch.randn(64)}
    expected = normforge.layernorm2d_fwd(**operands).y
    for name, tensor in (*operands.items(), *operands.items()):
        tagged = normforge.layernorm2d_fwd(**operands | {name: tensor.as_subclass(Tagged)}).y
        assert same_bits(tagged.as_subclass(torch.Tensor), expected)
    assert len(checked) == 5


def gradient(**changed: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "dy": X, "x": X.clone(), "weight": N, "mean": torch.zeros(3), "rstd": torch.ones(3),
        "wants": ("dx", "dweight", "dbias"),
    }  # fmt: skip
    return usual | changed


@pytest.mark.parametrize("n", [64, 1500, 33000])
@pytest.mark.parametrize("wants", [("dx",), ("dweight",), ("dx", "dweight", "dbias"), ()], ids=str)
def test_a_known_backward_call_is_not_checked_and_gives_the_same(
    n: int, wants: tuple[str, ...], checked: list[tuple[int, ...]]
) -> None:
    arguments = gradient(dy=torch.randn(3, n), x=torch.randn(3, n), weight=torch.randn(n), wants=wants)
    first, second = (layernorm2d_bwd(**arguments) for _ in range(2))
    third = layernorm2d_bwd(**arguments | {"wants": list(wants)})
    assert len(checked) == 1
    # A set has no order, is no key, and is checked each time.
    layernorm2d_bwd(**arguments | {"wants": set(wants)})
    assert len(checked) == 2
    for a, b, c in zip(first, second, third, strict=True):
        assert same_bits(a, b)
        assert same_bits(a, c)


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
        found = rmsnorm2d_bwd(empty, empty, N, rstd=torch.empty(0), wants=("dx", "dweight"))
        assert there(found.dx).shape == (0, 64)
        assert not there(found.dweight).any()


def test_backward_calls_of_several_m_share_a_plan_and_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 1100
    monkeypatch.setattr(plan, "_LAYOUTS", 2)
    monkeypatch.setattr(plan, "target_of", lambda device: Target("cpu", 32, 4, compiles=False))
    x = torch.randn(1, n)
    layernorm2d_bwd(x, x, x[0], mean=torch.zeros(1), rstd=torch.ones(1), wants=("dx", "dweight", "dbias"))
    (known,) = all_plans()
    layouts = [known.layout(m) for m in (1, 2, 3, 1000, 2)]
    assert [layout.programs for layout in layouts] == [1, 2, 3, layouts[3].programs, 2]
    assert layouts[3].programs >= 4
    for layout in layouts:
        assert layout.starts == (0, layout.programs * n, None)
        assert layout.memory == ((layout.programs * n * 2,), (1,), torch.float32)
        assert layout.steps[0][1] == (layout.programs, 1, 1)
