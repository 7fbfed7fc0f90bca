"""Compiled kernels: one for each key and device, whichever thread asks first, and told no more than the key says."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normforge.errors import FrozenError
from normforge.kernels import binaries
from normforge.kernels import obtain as obtaining
from normforge.kernels.gpu import POINTERS, KernelKey, integer_type, named_target, pointer_type
from normforge.kernels.obtain import obtain

from ..calling import in_threads

KEY = KernelKey(
    "somewhere.ln_fwd_bf16:ln_fwd_bf16_rows",
    (("x_ptr", "*bf16:16"), ("weight_ptr", None), ("x_row_stride", "i32"), ("eps", "fp32"), ("N", 4096)),
    (("num_warps", 4),),
)
OTHER = KernelKey(KEY.kernel, (*KEY.arguments[:-1], ("N", 8192)), KEY.options)
TARGET = named_target("sm_90")


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
    """What Triton's compiler is given of a kernel, without the kernel."""

    __name__ = "ln_fwd_bf16_rows"
    arg_names = tuple(name for name, _ in KEY.arguments)


@pytest.fixture(autouse=True)
def asked(nothing_compiled: None, monkeypatch: pytest.MonkeyPatch) -> list[KernelKey]:
    """The keys that the compiler, another one than Triton's, was given; there is no driver."""
    given: list[KernelKey] = []

    def compile_for(key: KernelKey, *_: Any) -> Kernel:
        given.append(key)
        # Long enough for every other thread to come along.
        time.sleep(0.05)
        return Kernel()

    monkeypatch.setattr(obtaining, "_start_driver", lambda: None)
    monkeypatch.setattr(obtaining, "compile_for", compile_for)
    return given


def test_eight_threads_compile_once_and_agree(asked: list[KernelKey]) -> None:
    def ask(_: int) -> tuple[Kernel, str | None]:
        kernel = obtain(KEY, Function(), TARGET, 0)
        assert kernel.run
        return kernel, kernel.function

    found = in_threads(ask, range(8))
    assert asked == [KEY]
    assert len({id(kernel) for kernel, _ in found}) == 1
    assert {loaded for _, loaded in found} == {"a function"}
    assert obtaining.obtained() == ((KEY, 0),)


def test_two_kernels_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(2)

    def compile_for(*_: Any) -> Kernel:
        # One that waits for the other to be done breaks it.
        barrier.wait(timeout=60)
        return Kernel()

    monkeypatch.setattr(obtaining, "compile_for", compile_for)
    in_threads(lambda key: obtain(key, Function(), TARGET, 0), (KEY, OTHER))
    assert set(obtaining.obtained()) == {(KEY, 0), (OTHER, 0)}


def test_each_device_has_its_own(asked: list[KernelKey]) -> None:
    function = Function()
    assert obtain(KEY, function, TARGET, 0) is not obtain(KEY, function, TARGET, 1)
    assert obtain(KEY, function, TARGET, 1) is obtain(KEY, function, TARGET, 1)
    assert asked == [KEY, KEY]


def test_a_failure_is_not_remembered(asked: list[KernelKey], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(obtaining, "compile_for", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            obtain(KEY, Function(), TARGET, 0)
    obtain(KEY, Function(), TARGET, 0)
    assert asked == [KEY]


def test_a_kernel_compiled_ahead_of_time_is_taken_first(
    asked: list[KernelKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = Kernel()
    monkeypatch.setattr(binaries, "loaded", lambda: SimpleNamespace(find=lambda key, *_: ahead if key == KEY else None))
    assert obtain(KEY, Function(), TARGET, 0) is ahead
    assert ahead.function == "a function"
    assert obtain(OTHER, Function(), TARGET, 0) is not ahead
    assert asked == [OTHER]


def test_a_key_reads_as_a_call() -> None:
    arguments = "(x_ptr=*bf16:16, weight_ptr=None, x_row_stride=i32, eps=fp32, N=4096, num_warps=4)"
    assert str(KEY) == f"somewhere.ln_fwd_bf16:ln_fwd_bf16_rows{arguments}"
    assert KEY.portable == f"ln_fwd_bf16:ln_fwd_bf16_rows{arguments}"
    assert (KEY.symbol, KEY.n) == ("ln_fwd_bf16_rows", 4096)


@pytest.mark.parametrize(("largest", "word"), [(0, "i32"), (2**31 - 1, "i32"), (2**31, "i64"), (2**40, "i64")])
def test_integers_have_the_type_that_triton_gives_them(largest: int, word: str) -> None:
    assert integer_type(largest) == word == specialised(largest)[0]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in POINTERS], ids=str)
def test_pointers_have_the_type_that_triton_gives_a_tensor(dtype: torch.dtype, aligned: bool) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    tensor = memory[memory.data_ptr() % 16 + (0 if aligned else dtype.itemsize) :][: 4 * dtype.itemsize].view(dtype)
    assert (tensor.data_ptr() % 16 == 0) == aligned
    word, _, alignment = pointer_type(dtype, aligned=aligned).partition(":")
    # D is Triton's letter for an address that is a multiple of 16.
    # Triton has no exponents alone; kernels are handed their bytes.
    handed = tensor.view(torch.uint8) if word == "*u8" else tensor
    assert specialised(handed) == (word, "D" if alignment else "")


def specialised(value: Any) -> tuple[str, Any]:
    """What Triton's compiler is told of an argument for an NVIDIA GPU."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    word, fact = native_specialize_impl(CUDABackend, value, False, True, True)
    return word, fact


def test_only_what_is_loaded_is_given_while_no_other_may_be(asked: list[KernelKey]) -> None:
    """As while a CUDA graph is captured; other threads go on compiling."""
    found = obtain(KEY, Function(), TARGET, 0)
    with obtaining.only_compiled():
        assert obtain(KEY, Function(), TARGET, 0) is found
        with pytest.raises(FrozenError, match=r"is not loaded on device 0, and a CUDA graph is being captured"):
            obtain(OTHER, Function(), TARGET, 0)
        in_threads(lambda key: obtain(key, Function(), TARGET, 0), [OTHER])
        obtain(OTHER, Function(), TARGET, 0)
    assert asked == [KEY, OTHER]
