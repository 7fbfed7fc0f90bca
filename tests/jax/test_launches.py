"""What an operation launches: each kernel's arguments and grid, run in Triton's interpreter in place of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from normforge.codegen.values import DType, Norm

from .settled import jax  # first, since it skips

from normforge.jax import launches  # isort: skip
from normforge.jax.formulas import computed
from normforge.jax.launches import Code, launched
from normforge.jax.operation import Operation
from normforge.kernels.assembly import assemble
from normforge.kernels.gpu import Target
from normforge.kernels.key import KernelKey
from normforge.kernels.launcher import interpret
from normforge.selection.table import Source
from normforge.upstream import jaxlib_triton

from ..thorough import THOROUGH
from .operations import backward, forward

# Few, so that a handful of rows makes each program take several in turn.
TARGET = Target("sm_90", 32, 2, compiles=False, plainly=True)


class Interpreter:
    """Stands for jaxlib and a GPU: runs a custom call's kernel on the arrays that it is given."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self._kernels: dict[str, tuple[KernelKey, Source]] = {}
        self._launch: tuple[Sequence[int], Sequence[Any]] = ((), ())

    def code_of(self, key: KernelKey, source: Source, target: Target) -> Code:
        self._kernels[key.symbol] = key, source
        return Code(key.symbol, "", 1, 0)

    def message(self, *about: Any) -> bytes:
        *_, grid, parameters = about
        self._launch = grid, parameters
        return b""

    def ffi_call(self, target: str, results: Sequence[Any]) -> Callable[..., Any]:
        assert target == jaxlib_triton.TARGET

        def call(*arrays: Any, name: str, opaque: bytes) -> list[Any]:
            key, source = self._kernels[name]
            grid, parameters = self._launch
            # What is not written stays what no result is.
            made = [torch.full(result.shape, -77, dtype=getattr(torch, str(result.dtype))) for result in results]
            buffers = iter([*map(_as_torch, arrays), *made])
            told = iter(parameters)
            values = []
            for _, word in key.arguments:
                brought = isinstance(word, str)
                parameter = next(told) if brought else None
                values.append(word if not brought else next(buffers) if parameter is None else parameter[0])
            assert next(told, None) is None
            assert next(buffers, None) is None
            self.ran.append(name)
            interpret(source.load(), tuple(grid), values, {})
            return [_as_jax(tensor) for tensor in made]

        return call


def _as_torch(array: Any) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.asarray(array, np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))


def _as_jax(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bfloat16:
        return jax.numpy.asarray(tensor.float().numpy(), "bfloat16")
    return jax.numpy.asarray(tensor.numpy())


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    found = Interpreter()
    monkeypatch.setattr(launches, "lowered_for", lambda: TARGET)
    monkeypatch.setattr(launches, "code_of", found.code_of)
    monkeypatch.setattr(jaxlib_triton, "message", found.message)
    monkeypatch.setattr(jax.ffi, "ffi_call", found.ffi_call)
    return found


def agree(op: Operation, operands: list[Any], atol: float = 2e-5, rtol: float = 1e-5) -> None:
    """Hold what kernels make against the formula."""
    actual, expected = launched(*operands, op=op), jax.jit(partial(computed, op=op))(*operands)
    for (name, dtype), one, other in zip(op.results, actual, expected, strict=True):
        assert (one.shape, one.dtype.name) == (other.shape, dtype), name
        made, wanted = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(made, wanted, rtol, atol, err_msg=name)


def shapes(*some: tuple[int, ...]) -> list[Any]:
    """The first of some shapes, and the others as thorough ones."""
    return [pytest.param(shape, id=str(shape), marks=[THOROUGH] if shape != some[0] else []) for shape in some]


@pytest.mark.parametrize("shape", shapes((5, 64), (2, 3, 700), (3, 1500)))
@pytest.mark.parametrize("norm", [Norm.RMS, pytest.param(Norm.LAYER, marks=THOROUGH)])
def test_forward(norm: Norm, shape: tuple[int, ...], interpreter: Interpreter) -> None:
    agree(*forward(norm, shape))
    agree(*forward(norm, shape, adds=True, saves=True))
    agree(*forward(norm, shape, affine=False, saves=True))


@pytest.mark.parametrize(
    "quantised", [DType.INT8, *(pytest.param(d, marks=THOROUGH) for d in (DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ))]
)
def test_quantised(quantised: DType, interpreter: Interpreter) -> None:
    """One step of the type's, where fp32 sums differ in the last bit."""
    op, operands = forward(Norm.LAYER, (3, 200), DType.BF16, adds=True, quantised=quantised, smooths=True)
    agree(op, operands, atol=1.0 if quantised.is_int else 0.0, rtol=1e-5 if quantised.is_int else 0.13)


@pytest.mark.parametrize("shape", shapes((7, 64), (2, 2, 1500), (3, 9000)))
@pytest.mark.parametrize("norm", [Norm.LAYER, pytest.param(Norm.RMS, marks=THOROUGH)])
def test_gradients(norm: Norm, shape: tuple[int, ...], interpreter: Interpreter) -> None:
    agree(*backward(norm, shape), atol=1e-4)
    assert interpreter.ran[-1] == "sum_partials"
    agree(*backward(norm, shape, affine=False, adds=True))
    assert interpreter.ran[-1] != "sum_partials"


@THOROUGH
def test_gradients_of_some_operands(interpreter: Interpreter) -> None:
    agree(*backward(Norm.LAYER, (5, 64), biased=False), atol=1e-4)
    assert interpreter.ran[-1] == "sum_partials"
    agree(*backward(Norm.LAYER, (5, 64), DType.BF16, adds=True), atol=4e-2, rtol=1e-2)


@THOROUGH
def test_rows_that_start_anywhere(interpreter: Interpreter) -> None:
    """Rows of 16 bits that no vector starts have a kernel of their own, which has one stride for x and y."""
    agree(*forward(Norm.RMS, (3, 1501), DType.BF16), atol=4e-2, rtol=1e-2)
    assert interpreter.ran[-1].endswith("_window")


def test_programs_share_rows_as_many_as_the_gpu_runs(interpreter: Interpreter) -> None:
    """More rows than programs: each leaves one row of partial sums, and the last kernel adds them up."""
    agree(*backward(Norm.RMS, (40, 64)), atol=1e-4)


@THOROUGH
@pytest.mark.parametrize(("m", "few"), [(256, True), (257, False)])
def test_a_window_of_few_rows_keeps_its_warps(
    m: int, few: bool, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the table calls them few."""
    asked: list[bool] = []

    def heard(*arguments: Any, few: bool) -> Any:
        asked.append(few)
        return assemble(*arguments, few=few)

    monkeypatch.setattr(launches, "assemble", heard)
    op, operands = forward(Norm.RMS, (m, 8), DType.BF16)
    launched(*operands, op=op)
    assert asked == [few]
