"""`override_torch` on and off: by whom, in what order, in several threads, and with others who do the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional

import normforge
from normforge.errors import InvarianceError
from normforge.override import switch as switches
from normforge.override.served import OPERATORS
from normforge.override.switch import Switch, TorchOverride

from ..calling import printed
from ..thorough import THOROUGH
from .conftest import override


def tables(key: str = "CPU") -> dict[str, str]:
    """What torch's dispatcher has for each operator."""
    dump: Callable[[str], str] = torch._C._dispatch_dump_table
    lines = {operator: dump(f"aten::{operator}").splitlines() for operator in OPERATORS}
    return {operator: next((line for line in of if line.startswith(f"{key}:")), "") for operator, of in lines.items()}


def is_replaced(key: str = "CPU") -> bool:
    replaced = {"torch_internals.py" in line for line in tables(key).values()}
    assert len(replaced) == 1
    return replaced.pop()


def test_it_is_off_until_it_is_called_and_afterwards() -> None:
    before = tables()
    assert not is_replaced()
    with override() as wish:
        assert is_replaced()
        assert wish.active
        assert repr(wish) == (
            "<normforge.TorchOverride of native_layer_norm, native_layer_norm_backward, _fused_rms_norm, "
            "_fused_rms_norm_backward: active on CPU>"
        )
    assert tables() == before
    assert not wish.active
    assert repr(wish).endswith(": restored>")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels serve norms on the GPU that is here")
@pytest.mark.parametrize("interpreted", [pytest.param(False, marks=THOROUGH), True])
def test_kernels_serve_where_they_run(interpreted: bool) -> None:
    """In the interpreter on the CPU, if there is no GPU; what is said to be active there is."""
    code = """
import torch, normforge
with normforge.override_torch() as wish:
    dump = torch._C._dispatch_dump_table("aten::native_layer_norm")
    (line,) = [line for line in dump.splitlines() if line.startswith("CPU:")]
    print(repr(wish).rpartition(": ")[2], "torch_internals.py" in line)
    x = torch.randn(2, 64)
    torch.testing.assert_close(torch.nn.functional.layer_norm(x, (64,)), normforge.reference.layernorm2d_fwd(x).y)
"""
    said = printed(code, TRITON_INTERPRET="1" if interpreted else None)
    assert said == ("active on CPU> True" if interpreted else "active on CUDA> False")


def test_it_ends_with_an_error() -> None:
    with pytest.raises(ZeroDivisionError), override():
        _ = 1 / 0
    assert not is_replaced()


def test_each_wish_counts() -> None:
    first, second = override(), override()
    first.restore()
    first.restore()
    assert is_replaced()
    assert second.active
    with override():
        pass
    assert is_replaced()
    second.restore()
    assert not is_replaced()


def test_the_public_functions_are_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch without CUDA lacks one of the kernels, and what is not there is not replaced."""
    gpus = Switch("CUDA")
    monkeypatch.setattr(switches, "_switch", lambda: gpus)
    torchs, on_cpu = tables("CUDA"), tables()
    with normforge.override_torch():
        normforge.override_torch()
        assert "torch_internals.py" in tables("CUDA")["native_layer_norm"]
        assert tables() == on_cpu
    assert "torch_internals.py" in tables("CUDA")["native_layer_norm"]
    normforge.restore_torch()
    assert tables("CUDA") == torchs
    normforge.restore_torch()
    assert tables("CUDA") == torchs


def test_several_threads_switch_while_others_call() -> None:
    """A call that is under way while its kernel is taken away ends as it began."""
    # No kernel serves float64: its calls are short, and many are under way.
    x = torch.randn(4, 16).double()
    expected = functional.layer_norm(x, (16,))
    switch, over = Switch("CPU"), threading.Event()

    def toggle(_: int) -> None:
        for _ in range(200):
            with TorchOverride(switch):
                pass

    def call(_: int) -> int:
        calls = 0
        while not over.is_set():
            assert torch.equal(functional.layer_norm(x, (16,)), expected)
            calls += 1
        return calls

    with ThreadPoolExecutor(4) as pool:
        calling = [pool.submit(call, place) for place in range(2)]
        try:
            list(pool.map(toggle, range(2)))
        finally:
            over.set()
        assert all(each.result() for each in calling)
    assert not is_replaced()


@pytest.fixture
def torchs_own() -> Iterator[Any]:
    """`torch.backends.python_native` with an override of RMSNorm for CPUs, of inputs with 24 columns."""
    native = getattr(torch.backends, "python_native", None)
    if native is None:
        pytest.skip("this PyTorch has no overrides of its own: they came with 2.13")
    from torch._native import registry

    def ones(x: torch.Tensor, shape: Any, weight: Any, eps: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones_like(x), torch.ones(*x.shape[:-1], 1)

    of_24: dict[str, Any] = {"cond": lambda x, shape, weight, eps: x.shape[-1] == 24, "impl": ones}
    registry.register_op_override("cutedsl", "aten", "_fused_rms_norm", "CPU", **of_24)
    key = ("_fused_rms_norm", "CPU")
    registry._register_overrides_from_graph(*key, registry._graphs[key])
    yield native
    registry._destroy_aten_override(*key)
    del registry._graphs[key]
    for named in (
        registry._dsl_name_to_lib_graph,
        registry._dispatch_key_to_lib_graph,
        registry._op_symbol_to_lib_graph,
    ):
        for places in named.values():
            while key in places:
                places.remove(key)


def is_torchs_own(x: torch.Tensor) -> bool:
    return bool((functional.rms_norm(x, x.shape[-1:]) == 1).all())


def test_torchs_own_override_is_switched_within(torchs_own: Any, ran: list[str]) -> None:
    """Neither holds what the other put there: a kernel that was taken is of no use once that has gone."""
    x, wide, other = torch.randn(3, 24), torch.randn(3, 24).double(), torch.randn(3, 16)
    with override():
        with torchs_own.operations_disabled("_fused_rms_norm"):
            assert not is_torchs_own(x)
            assert not is_torchs_own(wide)
        # Whoever came last is first.
        assert is_torchs_own(x)
        ran.clear()
        assert not is_torchs_own(other)
        assert ran == ["rmsnorm2d_fwd"]
    assert is_torchs_own(x)
    assert not is_torchs_own(other)
    torchs_own.disable_operations("_fused_rms_norm")
    try:
        with override():
            assert not is_torchs_own(x)
        assert not is_torchs_own(x)
    finally:
        torchs_own.enable_operations("_fused_rms_norm")
    assert is_torchs_own(x)


def test_under_batch_invariance_nothing_is_left_to_torch() -> None:
    """Nor does torch's own backward pass, which no `with` reaches, stand behind a forward pass that is invariant."""
    x = torch.randn(257, 131, generator=torch.Generator().manual_seed(2)) + 100.0
    with override(), normforge.batch_invariant():
        batch = functional.layer_norm(x, (131,))
        assert torch.equal(functional.layer_norm(x[3:12], (131,)), batch[3:12])
        with pytest.raises(InvarianceError, match="float64"):
            functional.layer_norm(x.double(), (131,))
        with pytest.raises(InvarianceError, match="NORMFORGE_BATCH_INVARIANT=1"):
            functional.layer_norm(x.clone().requires_grad_(), (131,))
