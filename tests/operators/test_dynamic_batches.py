"""Public functions, exported and compiled with an open batch, at sizes that code may take for constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge

from ..calling import each_device, same_bits
from ..calls.test_quantised import NVFP4
from ..calls.test_wrong_tensors import E4M3, MXFP8
from ..thorough import THOROUGH

N = 16
W, B = torch.linspace(0.5, 2.0, N), torch.linspace(-1.0, 1.0, N)

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "modulated_layer_norm, (N,)": lambda x: normforge.modulated_layer_norm(x, W, B),
    "gated_rms_norm": lambda x: normforge.gated_rms_norm(x, 2 * x, W),
    "quantised, column_major": lambda x: normforge.quantised_rms_norm(
        x, W, group_size=32, scale_layout="column_major", out_dtype=E4M3
    ),
    "layer_norm": lambda x: normforge.layer_norm(x, (N,), W, B),
    "rms_norm": lambda x: normforge.rms_norm(x, (N,), W, weight_offset=1.0, x_bias=B),
    "add_layer_norm": lambda x: normforge.add_layer_norm(x, 2 * x, W, B),
    "add_rms_norm": lambda x: normforge.add_rms_norm(x, 2 * x, W, weight_offset=1.0, x_bias=B),
    "modulated_rms_norm, (N,)": lambda x: normforge.modulated_rms_norm(x, W, B),
    "modulated_layer_norm, by row": lambda x: normforge.modulated_layer_norm(x, x, 2 * x),
    "gated_layer_norm": lambda x: normforge.gated_layer_norm(x, 2 * x, W, B),
    "group_norm": lambda x: normforge.group_norm(x, 4, W, B),
    "layernorm2d_fwd": lambda x: normforge.layernorm2d_fwd(x, W, B),
    "rmsnorm2d_fwd, quantised": lambda x: normforge.rmsnorm2d_fwd(x, W, fquant="dynamic", out_dtype=E4M3),
    "modulated_layernorm2d_fwd": lambda x: normforge.modulated_layernorm2d_fwd(x, W, B),
    "modulated_rmsnorm2d_fwd, into": lambda x: normforge.modulated_rmsnorm2d_fwd(
        x, W, B, fquant="dynamic", out=torch.empty_like(x, dtype=torch.int8)
    ),
    "gated_rmsnorm2d_fwd": lambda x: normforge.gated_rmsnorm2d_fwd(x, 2 * x, W),
    "gated_layernorm2d_fwd, quantised": lambda x: normforge.gated_layernorm2d_fwd(
        x, 2 * x, group_size=8, fquant="dynamic"
    ),
    "layernorm2d_fwd, of fp8": lambda x: normforge.layernorm2d_fwd(
        x.to(E4M3), x_scale=x[:, 1].clone(), residual=x, fadd="pre_add_store", fquant="dynamic"
    ),
    "quantised_layer_norm": lambda x: normforge.quantised_layer_norm(x, W, B),
    "quantised, packed": lambda x: normforge.quantised_rms_norm(
        x, W, group_size=32, scale_layout="column_major", scale_format="ue8m0_packed", out_dtype=E4M3
    ),
    "quantised, swizzled": lambda x: normforge.quantised_rms_norm(x, W, **MXFP8, scale_layout="swizzled_128x4"),
    "quantised, static": lambda x: normforge.quantised_rms_norm(
        x, W, fquant="static", y_scale=W[:1], out_dtype=E4M3, save_unquant=True
    ),
    "quantised, rounded, into": lambda x: normforge.quantised_rms_norm(
        x.half(), W, residual=x, group_size="32", quantise_rounded=True, out=torch.empty_like(x, dtype=torch.int8)
    ),
    "NVFP4": lambda x: normforge.quantised_rms_norm(x, W, **NVFP4, global_scale=W[:1], scale_layout="column_major"),
    "NVFP4, swizzled": lambda x: normforge.quantised_layer_norm(
        x, W, **NVFP4, global_scale=W[:1], scale_layout="swizzled_128x4"
    ),
}
# Calls that only the graph of all calls has.
BESIDE: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda x: normforge.layer_norm_add(x, 2 * x, W, B),
    lambda x: normforge.modulated_rms_norm(x, W, B, weight=W),
    lambda x: normforge.l2norm2d_fwd(x, W),
    lambda x: normforge.rmsnorm2d_bwd(x, x, W, rstd=x[:, 1].clone()),
)
# A trace starts from one of these sizes, and what it makes serves all the others.
SIZES = (2, 1, 5, N, 0)
_QUICK = ("modulated_layer_norm, (N,)", "quantised, column_major")
each_call = pytest.mark.parametrize("call", [pytest.param(c, marks=[] if c in _QUICK else [THOROUGH]) for c in CALLS])


def leaves(made: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]


class Model(torch.nn.Module):
    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = CALLS[call]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return leaves(self.call(x))


def check(traced: Any, model: Model, x: torch.Tensor) -> None:
    for actual, expected in zip(traced(x), model(x), strict=True):
        assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert same_bits(actual, expected)


@each_call
@pytest.mark.parametrize("start", [2, pytest.param(N, marks=THOROUGH)])
def test_exported(call: str, start: int) -> None:
    model = Model(call)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (torch.randn(start, N),), dynamic_shapes=({0: batch},), strict=False).module()
    assert any("normforge" in str(node.target) for node in program.graph.nodes)
    for size in SIZES:
        check(program, model, torch.randn(size, N))


@each_call
def test_compiled(call: str) -> None:
    model = Model(call)
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=True, backend="aot_eager", fullgraph=True)
    for size in SIZES:
        check(compiled, model, torch.randn(size, N))
    torch._dynamo.reset()


@each_device
@pytest.mark.parametrize("order", [1, pytest.param(-1, marks=THOROUGH)])
def test_each_call_behind_each_other(order: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph reads the table of functions in both ways, by constants and by guards, whichever comes first."""
    for name, vector in (("W", W), ("B", B)):
        monkeypatch.setitem(globals(), name, vector.to(device))
    calls = [*CALLS.values(), *BESIDE][::order]

    def all_of(x: torch.Tensor) -> list[torch.Tensor]:
        return leaves([call(x) for call in calls])

    x = torch.randn(3, N, device=device)
    torch._dynamo.reset()
    assert all(map(same_bits, torch.compile(all_of, backend="eager", fullgraph=True)(x), all_of(x)))
