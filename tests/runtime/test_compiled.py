"""Compiled kernels: one for each key and device, whichever thread asks first, and told no more than the key says."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from normforge import compiled, dispatch
from normforge.compiled import KernelKey, integer_type, obtain, pointer_type
from normforge.errors import FrozenError, SettingError

from .calls import check

KEY = KernelKey(
    "somewhere.ln_fwd_bf16:ln_fwd_bf16_rows",
    (("x_ptr", "*bf16:16"), ("weight_ptr", None), ("x_row_stride", "i32"), ("eps", "fp32"), ("N", 4096)),
    (("num_warps", 4),),
)


class Kernel:
    """What Triton compiled, which it loads when the launcher is first asked for; the function comes last."""

    def __init__(self) -> None:
        self.function: str | None = None
        self._run: str | None = None

    @property
    def run(self) -> str:
        if self._run is None:
            self._run = "a launcher"
            time.sleep(0.05)
            self.function = "a function"
        return self._run


class Function:
    """What Triton compiles, counting how often it is asked to."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.started = threading.Event()

    def warmup(self, *arguments: Any, **keywords: Any) -> object:
        self.asked.append((arguments, keywords))
        # Long enough for every other thread to come along.
        self.started.wait(0.05)
        return Kernel()


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.delenv("NORMFORGE_FROZEN", raising=False)


def test_eight_threads_compile_once_and_agree() -> None:
    function, barrier = Function(), threading.Barrier(8)

    def ask(_: int) -> tuple[Kernel, str | None]:
        barrier.wait()
        kernel = obtain(KEY, function, 0)
        assert kernel.run
        return kernel, kernel.function

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert len(function.asked) == 1
    assert len({id(kernel) for kernel, _ in found}) == 1
    assert {loaded for _, loaded in found} == {"a function"}
    assert compiled.obtained() == ((KEY, 0),)


def test_each_device_has_its_own() -> None:
    function = Function()
    assert obtain(KEY, function, 0) is not obtain(KEY, function, 1)
    assert obtain(KEY, function, 1) is obtain(KEY, function, 1)
    assert len(function.asked) == 2


def test_a_failure_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    function = Function()
    with monkeypatch.context() as patched:
        patched.setattr(function, "warmup", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            obtain(KEY, function, 0)
    obtain(KEY, function, 0)
    assert len(function.asked) == 1


def test_nothing_is_compiled_once_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    function = Function()
    warm = obtain(KEY, function, 0)
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    assert obtain(KEY, function, 0) is warm
    with pytest.raises(FrozenError) as raised:
        obtain(KEY, function, 1)
    message = str(raised.value)
    assert f"forbids compiling {KEY} for device 1" in message
    assert "make such a call once before NORMFORGE_FROZEN is set, or unset it" in message
    assert len(function.asked) == 1
    # And a refusal is not remembered.
    monkeypatch.delenv("NORMFORGE_FROZEN")
    obtain(KEY, function, 1)
    assert len(function.asked) == 2


@pytest.mark.parametrize("value", ["", "0"])
def test_not_frozen(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_FROZEN", value)
    function = Function()
    obtain(KEY, function, 0)
    assert len(function.asked) == 1


def test_frozen_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_FROZEN", "yes")
    function = Function()
    with pytest.raises(SettingError, match=r"NORMFORGE_FROZEN='yes' is neither 1 .* nor 0"):
        obtain(KEY, function, 0)
    assert not function.asked


def test_the_interpreter_compiles_nothing_that_could_be_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    monkeypatch.setattr(dispatch, "plans", {})
    check("layer", torch.randn(2, 64))


def test_the_compiler_is_told_what_the_key_says() -> None:
    function = Function()
    obtain(KEY, function, 0)
    ((arguments, keywords),) = function.asked
    x, weight, stride, eps, n = arguments
    assert (x.dtype, x.data_ptr() % 16) == (torch.bfloat16, 0)
    assert weight is None
    assert isinstance(stride, int)
    assert stride % 2 == 1 != stride
    assert isinstance(eps, float)
    assert n == 4096
    assert keywords == {"grid": (1,), "num_warps": 4}


def test_a_key_reads_as_a_call() -> None:
    assert str(KEY) == (
        "somewhere.ln_fwd_bf16:ln_fwd_bf16_rows"
        "(x_ptr=*bf16:16, weight_ptr=None, x_row_stride=i32, eps=fp32, N=4096, num_warps=4)"
    )


@pytest.mark.parametrize(("largest", "word"), [(0, "i32"), (2**31 - 1, "i32"), (2**31, "i64"), (2**40, "i64")])
def test_integers_have_the_type_that_triton_gives_them(largest: int, word: str) -> None:
    assert integer_type(largest) == word == specialised(largest)[0]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", compiled._POINTERS, ids=str)
def test_triton_takes_a_stand_in_for_the_tensor(dtype: torch.dtype, aligned: bool) -> None:
    word = pointer_type(dtype, aligned=aligned)
    memory = torch.zeros(64, dtype=torch.uint8)
    tensor = memory[memory.data_ptr() % 16 + (0 if aligned else dtype.itemsize) :][: 4 * dtype.itemsize].view(dtype)
    assert (tensor.data_ptr() % 16 == 0) == aligned
    stand_in = specialised(compiled._argument(word))
    assert stand_in == specialised(tensor)
    assert stand_in[0] == word.partition(":")[0]


@pytest.mark.parametrize("word", ["i32", "i64", "fp32"])
def test_triton_learns_nothing_of_a_number_but_its_type(word: str) -> None:
    found, fact = specialised(compiled._argument(word))
    assert found == word
    assert not fact


def specialised(value: Any) -> tuple[str, Any]:
    """What Triton's compiler is told of an argument for an NVIDIA GPU."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    word, fact = native_specialize_impl(CUDABackend, value, False, True, True)
    return word, fact
