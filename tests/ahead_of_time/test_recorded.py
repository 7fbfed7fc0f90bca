"""What a program was recorded to launch is what is compiled from the recording, kernel by kernel, and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge.ahead_of_time.compile_keys import recorded_keys_for
from normforge.calls import group_plan, plan, row_gradients
from normforge.kernels.gpu import target_of
from normforge.kernels.key import KernelKey
from normforge.kernels.launcher import Launcher
from normforge.selection import dispatch

N, BF16 = 32, torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "plans", {})


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[KernelKey]:
    """The keys of the kernels that calls launch."""
    met: set[KernelKey] = set()

    class Noting(Launcher):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            if given[-1] is not None:
                met.add(self.key)

    for module in (plan, row_gradients, group_plan):
        monkeypatch.setattr(module, "Launcher", Noting)
    return met


def rows(*sizes: int, dtype: torch.dtype = BF16, **options: Any) -> torch.Tensor:
    return torch.randn(*(sizes or (3,)), N, dtype=dtype, **options)


def ones(dtype: torch.dtype = BF16, **options: Any) -> torch.Tensor:
    return torch.ones(N, dtype=dtype, **options)


def leaf(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return rows(*sizes, dtype=dtype, requires_grad=True)


def trained(*outputs: torch.Tensor) -> None:
    torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])


def the_first_program() -> None:
    x, residual = rows(2, 8), rows(2, 8)
    options: dict[str, Any] = {"fadd": "pre_add_store", "fquant": "dynamic", "out_dtype": torch.float8_e4m3fn}
    normforge.rmsnorm2d_fwd(x, torch.ones(N), residual=residual, **options)


def a_patched_model() -> None:
    model = torch.nn.TransformerDecoderLayer(N, 4, norm_first=True)
    normforge.patch(model)
    model(torch.randn(3, 2, N), torch.randn(4, 2, N)).sum().backward()


def scaled() -> None:
    x = rows().to(torch.float8_e4m3fn)
    normforge.rmsnorm2d_fwd(x, ones(), x_scale=torch.ones(3, 1), out_dtype=BF16)
    normforge.rmsnorm2d_fwd(x, None, x_scale=torch.ones(9)[5], out_dtype=BF16)


def dropped() -> None:
    y, total = normforge.add_rms_norm(leaf(), leaf(dtype=torch.float32), ones(requires_grad=True), dropout_p=0.1)
    trained(y, total)


def heads() -> None:
    packed = torch.zeros(5, 8, N, dtype=BF16)
    normforge.rmsnorm2d_fwd(packed[:, :4], ones(), out=packed[:, 4:])
    x = torch.zeros(2, 3, 4, N).transpose(1, 2)
    normforge.layernorm2d_fwd(x, residual=torch.zeros(2, 4, 3, N), fadd=2)


def with_gaps() -> None:
    normforge.rmsnorm2d_fwd(torch.zeros(3, N + 8, dtype=BF16)[:, :N], ones())
    normforge.rmsnorm2d_fwd(
        torch.zeros(3, N + 3, dtype=BF16)[:, :N], ones(), out=torch.zeros(3, N + 5, dtype=BF16)[:, :N]
    )
    normforge.rmsnorm2d_fwd(torch.zeros(3 * N + 1, dtype=BF16)[1:].view(3, N), ones())
    normforge.rmsnorm2d_fwd(torch.zeros(1, N, dtype=BF16).expand(3, N), ones())


def rows_of_any_start() -> None:
    x = torch.zeros(3, 2053, dtype=BF16)
    wide = torch.zeros(3, 2055, dtype=BF16)[:, :2053]
    normforge.rmsnorm2d_fwd(x)
    normforge.rmsnorm2d_fwd(wide)
    normforge.rmsnorm2d_fwd(wide, out=torch.zeros(3, 2055, dtype=BF16)[:, :2053])
    normforge.rmsnorm2d_fwd(wide, out=torch.zeros(3, 2057, dtype=BF16)[:, :2053])


def frozen_weights() -> None:
    trained(normforge.layer_norm(leaf(), (N,), ones(), ones()))
    trained(normforge.rms_norm(rows(), (N,), ones(requires_grad=True)))


def modulated() -> None:
    scale, shift = leaf(2), leaf(2)
    trained(normforge.modulated_layer_norm(leaf(2, 9), scale, shift, eps=1e-6))
    gate, x = leaf(2), leaf(2, 9)
    found = normforge.modulated_layer_norm(x, scale, shift, gate=gate, residual=leaf(2, 9), eps=1e-6)
    trained(*found)


def gated() -> None:
    trained(normforge.gated_rms_norm(leaf(), leaf(), ones(requires_grad=True)))
    x, z = torch.randn(3, 2 * N, requires_grad=True), torch.randn(3, 2 * N, requires_grad=True)
    trained(normforge.gated_rms_norm(x, z, torch.ones(2 * N, requires_grad=True), norm_before_gate=False, group_size=N))


def grouped() -> None:
    x = torch.randn(2, 8, 3, 3, requires_grad=True)
    weight, bias = torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True)
    trained(normforge.group_norm(x, 4, weight, bias, activation="silu"))
    normforge.group_norm(x.detach().to(memory_format=torch.channels_last), 2)


def both_classes() -> None:
    for m in (3, dispatch.loaded().small_m + 1):
        normforge.layernorm2d_fwd(rows(m, dtype=torch.float32))


def by_an_operator() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return normforge.rms_norm(x + 1, (N,), weight)

    trained(program(leaf(), ones(requires_grad=True)))


CALLS = (
    *(the_first_program, a_patched_model, scaled, dropped, heads, with_gaps, rows_of_any_start, frozen_weights),
    *(modulated, gated, grouped, both_classes, by_an_operator),
)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_kernels_are_those_that_were_launched(
    call: Callable[[], None], called: set[KernelKey], tmp_path: Path
) -> None:
    path = tmp_path / "needed.yaml"
    with normforge.record(path):
        call()
    assert called
    launched = {key.portable for key in called}
    found = {key.key.portable for key in recorded_keys_for(path, target_of(CPU), None)}
    assert found == launched
