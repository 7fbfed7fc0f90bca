"""The plug of SGLang, beside a stand-in of its registry and norms and, where it is installed, beside SGLang's own.

What SGLang's CUDA forwards call wants a GPU; where the plug serves, they are not called.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from normforge.integrations import serving
from normforge.integrations import sglang as plug
from normforge.selection import invariance

from ..calling import captured
from .engines import Leaves, N, alike, rows
from .stand_ins import of_sglang


def plain(norm: str, **options: Any) -> Any:
    """A norm as it is without hooks."""
    return of_sglang.modules()[of_sglang.LAYERS][norm](N, **options)


def twins(sglangs: Any, norm: str, **options: Any) -> tuple[Any, Any]:
    """A norm under hooks and one without, of the same random parameters."""
    hooked, bare = getattr(sglangs, norm)(N, **options), plain(norm, **options)
    for parameter, other in zip(hooked.parameters(), bare.parameters(), strict=True):
        parameter.data = other.data = torch.randn_like(parameter)
    return hooked, bare


def of_the_stored_sum(norm: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum that is stored, and the sum; SGLang's own is of the sum before it is rounded."""
    total = norm(x, residual)[1]
    return norm(total), total


NORMS = [
    ("RMSNorm", {}),
    ("RMSNorm", {"has_weight": False}),
    ("RMSNorm", {"cast_x_before_out_mul": True, "weight_dtype": torch.bfloat16}),
    ("GemmaRMSNorm", {}),
    ("Gemma3RMSNorm", {}),
    ("LayerNorm", {}),
    ("LayerNorm", {"bias": False, "dtype": torch.bfloat16}),
    ("LayerNorm", {"elementwise_affine": False, "bias": False}),
]


@pytest.mark.parametrize(("norm", "options"), NORMS)
def test_a_norm_is_served(sglangs: Any, ran: list[str], norm: str, options: dict[str, Any]) -> None:
    hooked, bare = twins(sglangs, norm, **options)
    x, residual = rows(), rows()
    calls = 1
    with torch.inference_mode():
        alike(hooked(x), bare(x))
        if norm in ("RMSNorm", "GemmaRMSNorm"):
            alike(hooked(x, residual=residual), of_the_stored_sum(bare, x, residual))
            calls = 2
    assert ran == ["layernorm2d_fwd" if norm == "LayerNorm" else "rmsnorm2d_fwd"] * calls


def test_what_is_not_served_goes_to_the_original(sglangs: Any, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual = rows(), rows()
    for options in (
        {"var_hidden_size": N // 2},
        {"fp32_residual": True},
        {"cast_x_before_out_mul": True, "weight_dtype": torch.float32},
    ):
        hooked, bare = twins(sglangs, "RMSNorm", **options)
        alike(hooked(x, residual), bare(x, residual))
    hooked, bare = twins(sglangs, "RMSNorm")
    alike(hooked(x, residual, x), bare(x, residual, x))
    alike(hooked(x, residual, quant_linear=torch.nn.Linear(N, N)), bare(x, residual))
    alike(hooked(x, residual.float()), bare(x, residual.float()))
    assert hooked(x[:0]).shape == (0, 3, N)
    hooked.double()
    bare.double()
    alike(hooked(x.double()), bare(x.double()))
    # Its original takes nothing but x.
    hooked, bare = (each.double() for each in twins(sglangs, "Gemma3RMSNorm"))
    alike(hooked(x.double()), bare(x.double()))
    layer, other = twins(sglangs, "LayerNorm", dtype=torch.bfloat16)
    alike(layer(x.float()), other(x.float()))
    with_gradient = rows(torch.float32).requires_grad_()
    assert twins(sglangs, "RMSNorm")[0](with_gradient).requires_grad
    # Rows are to have the bits of a trainer's, or nobody says of what.
    monkeypatch.setattr(sglangs, "is_batch_invariant_mode_enabled", lambda: True)
    monkeypatch.setattr(sglangs, "get_exec", partial(of_sglang.executed, "fsdp"))
    twins(sglangs, "RMSNorm")[0](x)
    monkeypatch.delattr(sglangs, "get_exec")
    twins(sglangs, "RMSNorm")[0](x)
    assert ran == []
    assert not invariance.is_on()


def test_a_kernel_that_may_not_be_compiled_leaves_the_call_to_sglang(sglangs: Any, leaves: Leaves) -> None:
    hooked, bare = twins(sglangs, "RMSNorm")
    x = rows()
    leaves(serving, "rmsnorm2d_fwd", lambda: (hooked(x), bare(x)), "calls to SGLang's own norms")


@pytest.mark.parametrize(
    ("named", "missing", "hooks", "says"),
    [
        *((named, (), 0, "SGLANG_PLUGINS does not name it") for named in (None, "", "another")),
        # A release without these norms starts all the same.
        ("normforge", ("GemmaRMSNorm", "LayerNorm"), 3, "normforge serves in SGLang: RMSNorm, Gemma3RMSNorm"),
    ],
)
def test_what_is_hooked(
    named: str | None, missing: tuple[str, ...], hooks: int, says: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Nothing is unless SGLang's list names us."""
    of_sglang.stand_in(monkeypatch)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if named is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", named)
    for norm in missing:
        monkeypatch.delattr(sys.modules[of_sglang.LAYERS], norm)
    with caplog.at_level(logging.INFO, "normforge"):
        plug.register()
    registry: Any = sys.modules["sglang.srt.plugins.hook_registry"]
    assert len(registry.HookRegistry.hooks) == hooks
    assert says in caplog.text


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's own module of norms, hooked by its own registry."""
    registry = pytest.importorskip("sglang.srt.plugins.hook_registry", reason="SGLang is not installed").HookRegistry
    module = pytest.importorskip(of_sglang.LAYERS, reason="SGLang is not installed")
    classes = [getattr(module, name) for name in ("RMSNorm", "GemmaRMSNorm", "Gemma3RMSNorm", "LayerNorm")]
    before = [vars(cls)["forward_cuda"] for cls in classes]
    registry.reset()
    monkeypatch.setenv("SGLANG_PLUGINS", "normforge")
    plug.register()
    registry.apply_hooks()
    assert len(registry._patched) == 6
    yield module
    registry.reset()
    for cls, forward in zip(classes, before, strict=True):
        cls.forward_cuda = forward


def test_sglangs_own_norms_are_hooked_by_its_own_registry(own: Any, ran: list[str]) -> None:
    x, residual = rows(), rows()
    with torch.inference_mode():
        for norm in (own.RMSNorm(N), own.GemmaRMSNorm(N), own.Gemma3RMSNorm(N)):
            norm.weight.data = torch.randn(N)
            alike(norm.forward_cuda(x), norm.forward_native(x))
            alike(norm.forward_cuda(x, residual), of_the_stored_sum(norm.forward_native, x, residual))
        rounded = own.RMSNorm(N, cast_x_before_out_mul=True, weight_dtype=x.dtype)
        alike(rounded.forward_cuda(x), rounded.forward_native(x))
        layer = own.LayerNorm(N)
        alike(layer.forward_cuda(x), layer.forward_native(x))
        assert ran == ["rmsnorm2d_fwd"] * 7 + ["layernorm2d_fwd"]
        # Which the original hands to its native form.
        narrow = own.RMSNorm(N, var_hidden_size=N // 2)
        alike(narrow.forward_cuda(x, residual, x), narrow.forward_native(x, residual, x))
    assert len(ran) == 8


@pytest.mark.gpu
def test_a_graph_of_sglangs_own_norms_holds_kernels(own: Any, ran: list[str]) -> None:
    """Beside SGLang's own kernels, which overwrite what they add."""
    pytest.importorskip("sgl_kernel", reason="SGLang's kernels are not installed")
    x, residual = torch.randn(2, 64, 4096, device="cuda", dtype=torch.bfloat16)

    def run(forward: Any, norm: Any) -> Any:
        return forward(norm, x.clone()), *forward(norm, x.clone(), residual.clone())

    with torch.inference_mode():
        for name in ("RMSNorm", "GemmaRMSNorm", "Gemma3RMSNorm"):
            cls = getattr(own, name)
            norm = cls(4096).to(x)
            norm.weight.data.normal_()
            hooked = partial(run, cls.forward_cuda, norm)
            y, _, total = run(cls.forward_cuda.__wrapped__, norm)
            assert ran == []
            hooked()
            graph, found = captured(hooked)
            graph.replay()
            alike(found, (y, cls.forward_cuda.__wrapped__(norm, total.clone()), total))
            assert ran == ["rmsnorm2d_fwd"] * 4
            ran.clear()
        layer = own.LayerNorm(4096).cuda()
        alike(layer(x), own.LayerNorm.forward_cuda.__wrapped__(layer, x))
        assert ran == ["layernorm2d_fwd"]
