"""Hooks in patched models, on norms alone and fused: called with what they were called with, once each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

import normforge

from .decoders import LlamaLayer
from .models import WIDTH, LlamaRMSNorm
from .test_forms import BetweenNorms, ByFunction, InABranch, Plainly
from .twins import assert_near, results


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(LlamaLayer(), LlamaLayer(), LlamaRMSNorm())


# Models, and modules of theirs: norms, each of which is computed together with something else unless a hook is on it,
# and what is between them.
FUSED: dict[str, tuple[Callable[[], torch.nn.Module], str, tuple[torch.Tensor | None, ...]]] = {
    "alone": (lambda: torch.nn.Sequential(torch.nn.LayerNorm(WIDTH)), "0", ()),
    "with a sum": (InABranch, "norm", (None,)),
    "with the sum behind": (Plainly, "norm", ()),
    "with the norm behind": (BetweenNorms, "norm", ()),
    "with its modulation": (ByFunction, "norm", (torch.randn(2, WIDTH),)),
    "with SiLU": (lambda: torch.nn.Sequential(torch.nn.GroupNorm(3, 9), torch.nn.SiLU()), "0", ()),
    **{
        path: (layers, path, ())
        for path in ("0", "1", "0.self_attn", "0.mlp", "0.post_attention_layernorm", "1.input_layernorm", "2")
    },
}


def written_to(output: Any) -> Any:
    # Not by a factor, which an RMSNorm takes off again.
    (output if isinstance(output, torch.Tensor) else output[0]).add_(1)


def changed(output: Any) -> Any:
    return 1 + output if isinstance(output, torch.Tensor) else (1 + output[0], *output[1:])


# Ways to have a hook called, of which some also change something.
HOOKS: dict[str, Callable[[torch.nn.Module, Any], Any]] = {
    "forward": lambda norm, hook: norm.register_forward_hook(hook),
    "pre": lambda norm, hook: norm.register_forward_pre_hook(hook),
    "backward": lambda norm, hook: norm.register_full_backward_hook(hook),
    "every module": lambda norm, hook: register_module_forward_hook(hook),
    "changing input": lambda norm, hook: norm.register_forward_pre_hook(
        lambda *given: hook(*given) or (changed(given[1]) if given[1] else None)
    ),
    "changing output": lambda norm, hook: norm.register_forward_hook(lambda *given: hook(*given) or changed(given[2])),
    "writing to the output": lambda norm, hook: norm.register_forward_hook(
        lambda *given: hook(*given) or written_to(given[2])
    ),
}


def noting(seen: list[list[torch.Tensor]], norm: torch.nn.Module) -> Callable[..., None]:
    """Return a hook that notes the tensors with which a norm is called."""

    def hook(module: torch.nn.Module, *given: Any) -> None:
        leaves = [each.detach() for each in tree_leaves(given) if each is not None]
        seen.extend([leaves] * (module is norm))

    return hook


@pytest.mark.parametrize("when", ["before", "since"])
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("fused", FUSED)
def test_hooks_are_called(fused: str, kind: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks from before `patch` and since; once a hook is gone, the same is computed without it."""
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", "0")
    make, path, beside = FUSED[fused]
    model, x = make(), torch.randn(2, 9, WIDTH)
    ours = copy.deepcopy(model)
    if when == "since":
        normforge.patch(ours)
        results(ours, x, *beside)
    called, found = [], []
    for each in (model, ours):
        norm = each.get_submodule(path)
        seen: list[list[torch.Tensor]] = []
        handle = HOOKS[kind](norm, noting(seen, norm))
        if when == "before" and each is ours:
            normforge.patch(ours)
        for _ in range(2):
            y, gradients = results(each, x, *beside)
            found.append({"y": y, **gradients})
            handle.remove()
        called.append(seen)
    assert len(called[0]) == len(called[1]) == 1
    torch.testing.assert_close(called[1], called[0], rtol=1e-4, atol=1e-5)
    for wanted, actual in zip(found[:2], found[2:], strict=True):
        assert_near(actual, wanted, 2e-5, 1.0)
