"""A call like one before takes its kernel unchecked, in several threads too; a bad one is refused all the same."""

from __future__ import annotations

import contextvars
import gc
import sys
import weakref
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch

import normforge
from normforge import errors
from normforge.calls import road
from normforge.calls.outputs import NormGradients
from normforge.errors import ConflictError, ShapeError
from normforge.families.gated import row as gated
from normforge.families.public import layernorm2d_bwd
from normforge.kernels.launcher import Launcher
from normforge.selection import dispatch
from normforge.selection.table import Table, entries_of
from proving.cases import cases, check, operands

from ..calling import FORWARD, ORACLE, agree, each_device, each_norm, in_threads, same_bits

pytestmark = pytest.mark.usefixtures("nothing_known")

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


def test_a_backward_call_without_dy() -> None:
    saved: dict[str, Any] = {"mean": torch.zeros(3), "rstd": torch.ones(3), "wants": ("dx", "dweight", "dbias")}
    for _ in range(2):
        gradients_of_nothing = layernorm2d_bwd(None, torch.randn(3, 64), torch.ones(64), **saved)
        assert all(tensor is not None and not tensor.any() for tensor in gradients_of_nothing[:3])


M, N = 3, 64
# Bytes from a multiple of 16 to where a misaligned tensor starts, a multiple of every element's size.
SHIFT = 8


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launcher]:
    """Every launcher that a call has launched."""
    launchers: list[Launcher] = []
    usual = Launcher.launch_tensors

    def launch(launcher: Launcher, grid: Any, values: Any) -> None:
        launchers.append(launcher)
        usual(launcher, grid, values)

    monkeypatch.setattr(Launcher, "launch_tensors", launch)
    return launchers


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that starts at no multiple of 16 bytes."""
    shift = SHIFT // tensor.element_size()
    memory = torch.empty(tensor.numel() + shift, dtype=tensor.dtype)
    assert memory.data_ptr() % 16 == 0
    return memory[shift:].view(tensor.shape).copy_(tensor)


def test_the_compiler_is_told_which_operands_lie_at_multiples_of_16_bytes(launched: list[Launcher]) -> None:
    usual = {"x": torch.randn(M, N), "weight": torch.randn(N)}
    for name in (*usual, None):
        given: dict[str, Any] = {each: misaligned(tensor) if each == name else tensor for each, tensor in usual.items()}
        normforge.rmsnorm2d_fwd(**given)
        told = dict(launched[-1].key.arguments)
        assert {each: told[f"{each}_ptr"] == "*fp32:16" for each in given} == {each: each != name for each in given}


# For at most 6 rows another kernel than for more, and for at most 12 a third where a table has it; M, and warps.
MANY, FEW, SOME = [("rows", 4, N, warps) for warps in (1, 2, 4)]
TILES: dict[str, tuple[tuple[Any, ...], dict[int, int]]] = {
    "few": ((MANY, FEW), {6: 2, 7: 1, 1: 2, 30: 1}),
    "some": ((MANY, FEW, MANY, SOME), {6: 2, 7: 4, 12: 4, 13: 1, 1: 2}),
}


@pytest.mark.parametrize(("tiles", "warps"), TILES.values(), ids=TILES)
@pytest.mark.parametrize("mode", ["ln_fwd_fp32", "ln_bwd_fp32"])
def test_as_many_rows_as_a_table_calls_few_take_its_kernel_for_few(
    mode: str, tiles: tuple[Any, ...], warps: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And some rows that for some, whichever direction."""
    taken: list[int] = []
    monkeypatch.setattr(
        Launcher, "launch_tensors", lambda launcher, *_: taken.append(dict(launcher.key.options)["num_warps"])
    )
    table = Table("a test", entries_of("normforge.generated", {mode: {"any": ((1, N, "n64", *tiles),)}}, 6, 12))
    with dispatch.using(table):
        for m in warps:
            x = torch.randn(m, N)
            if mode == "ln_fwd_fp32":
                normforge.layernorm2d_fwd(x)
            else:
                layernorm2d_bwd(x, x, mean=torch.zeros(m), rstd=torch.ones(m))
    assert taken == [*warps.values()]


(MODULATED,) = cases("modulated", vary=(), shape=(2, 3, N), without=("weight", "bias"))
(GATED,) = cases("gated", vary=(), shape=(3, N), norm="rms")


def test_a_known_call_whose_groups_do_not_fit_is_refused() -> None:
    x, gate, weight = torch.randn(3, N), torch.randn(3, N), torch.randn(3, N)
    options = road.options_of(
        gated.CALLS, "rms", {"gating": "after_norm", "activation": "silu", "eps": 1e-6, "fquant": "none",
                             "out_dtype": None, "save_mv": False}
    )  # fmt: skip
    for _ in range(2):
        road.launched(gated.CALLS, (x, gate, weight, None), options)
    with pytest.raises(ShapeError, match=r"weight has shape \(3, 64\) and x \(2, 64\)"):
        road.launched(gated.CALLS, (x[:2], gate[:2], weight, None), options)


def test_a_known_call_whose_operands_do_not_fit_is_refused() -> None:
    for case in (MODULATED, MODULATED.but(without=("gate", "residual", "weight", "bias")), GATED):
        given = operands(case)
        for _ in range(2):
            case.run(given)
        for name in set(given) - {"x", "residual", "weight"}:
            # Not one tensor for several operands, and none without a gradient, which are kinds of their own.
            for rows in {4, 3, 1} - {len(given[name])}:
                with pytest.raises(ShapeError, match=name):
                    case.run({**given, name: torch.randn(rows, N, requires_grad=True)})
        with pytest.raises(ConflictError):
            case.function(**given, **{**case.arguments, "eps": float("nan")})


@each_device
def test_a_row_has_the_same_bits_whatever_it_shares_its_modulation_with(device: str) -> None:
    x, scale, shift = torch.randn(6, N, device=device), *torch.randn(2, N, device=device)
    for_all = normforge.modulated_layer_norm(x, scale, shift)
    of_each = normforge.modulated_layer_norm(x, scale.expand(6, N), shift.expand(6, N).contiguous())
    of_samples = normforge.modulated_layer_norm(x.view(2, 3, N), scale.expand(2, N), shift.expand(2, N).contiguous())
    alone = normforge.modulated_layer_norm(x[2], scale, shift)
    assert same_bits(for_all, of_each)
    assert same_bits(for_all, of_samples.view(6, N))
    assert same_bits(for_all[2], alone)


THREADS, CALLS = 4, 10


@pytest.fixture
def _impatient() -> Iterator[None]:
    """Let threads take turns so often that one is stopped within every launch."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs and gradients, of launches with one program a row, with a grid of sums, and of both norms."""
    y, total = normforge.add_rms_norm(normforge.layer_norm(x, (N,), weight, bias), x, weight)
    return (y, total, *torch.autograd.grad((y * total).sum(), (x, weight, bias)))


@pytest.mark.usefixtures("_impatient")
def test_threads_that_call_at_once() -> None:
    given = [
        [tensor.requires_grad_() for tensor in (torch.randn(3 + thread, N), torch.randn(N), torch.randn(N))]
        for thread in range(THREADS)
    ]
    expected = [step(*tensors) for tensors in given]

    def run(thread: int) -> int:
        found = (step(*given[thread]) for _ in range(CALLS))
        return sum(all(map(same_bits, outputs, expected[thread])) for outputs in found)

    assert in_threads(run, range(THREADS)) == [CALLS] * THREADS
