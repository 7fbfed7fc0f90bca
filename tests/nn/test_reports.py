"""What `patch` says that it did, and which blocks it left alone, and why."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge

from .decoders import LlamaLayer
from .models import WIDTH, BiasedRMSNorm, written
from .test_forms import ByFunction, Parts, Plainly, form, modulated

# Two branches modulate the result of one norm.
InBranches = modulated(
    "InBranches",
    "if self.training:",
    "    return self.last(modulate(self.norm(x), shift, scale))",
    "return self.last(self.norm(x) * (1 + scale[:, None]) + shift[:, None])",
)


def test_what_patch_did_is_a_table() -> None:
    made = (LlamaLayer, BiasedRMSNorm, ByFunction, ByFunction, InBranches, Plainly)
    model = torch.nn.ModuleList([make() for make in made])
    assert str(normforge.patch(model)).splitlines() == [
        "swapped  2 x LlamaRMSNorm   -> normforge.LlamaRMSNorm [0.input_layernorm]",
        "swapped  8 x LayerNorm      -> normforge.LayerNorm [2.norm]",
        "fused    1 x LlamaLayer     sums with post_attention_layernorm; gradients of residuals with those of "
        "input_layernorm, post_attention_layernorm [0]",
        "fused    2 x ByFunction     norm with the modulation [2]",
        "fused    1 x InBranches     norm with the modulation [4]",
        "fused    1 x Plainly        norm with the sum behind [5]",
        "skipped  1 x BiasedRMSNorm  it lacks a 1-D weight as its only parameter, or a number under variance_epsilon "
        "or eps [1]",
    ]
    assert str(normforge.patch(torch.nn.Identity())) == "nothing to swap or to fuse"
    assert "sums with post_attention_layernorm; gradients of residuals with those of input_layernorm" in repr(model)
    assert repr(model[4]).count("norm with the modulation") == 1


def test_what_holds_a_modulated_norm_is_no_norm_that_was_skipped() -> None:
    """Called a norm, it holds one; all that it adds is the modulation."""
    named = modulated("AdaLayerNormZero", "x = self.norm(x) * (1 + scale[:, None]) + shift[:, None]", "return x")
    done = normforge.patch(named())
    assert [each.modulated for each in done.fused] == [("norm",)]
    assert (done.skipped, done.unfused) == ((), ())


def decorated_unknown(function: Callable[..., Any]) -> Callable[..., Any]:
    kept = [function]

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return kept[0](*args)

    return wrapper


class Decorated(Parts):
    """Under a decorator that keeps it where nobody looks."""

    @decorated_unknown
    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x + self.part(x))


def without_text() -> Any:
    namespace: dict[str, Any] = {"Parts": Parts}
    text = "class Typed(Parts):\n    def forward(self, x):\n        return self.norm(x + self.part(x))\n"
    exec(compile(text, "<typed>", "exec"), namespace)
    return namespace["Typed"]()


def on_the_instance() -> Any:
    layer: Any = LlamaLayer()
    layer.forward = functools.partial(layer.forward)
    return layer


class PoolFormerLayer(torch.nn.Module):
    """A block whose norms no sum is fused with: transformers' of this name."""

    def __init__(self) -> None:
        super().__init__()
        self.before_norm, self.linear = torch.nn.GroupNorm(1, WIDTH), torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = x + self.linear(self.before_norm(x))
        return total


class ModulesToSaveWrapper(torch.nn.Module):
    """Holds a module and a copy that is trained, as PEFT's does beside adapters."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = torch.nn.ModuleDict({"default": copy.deepcopy(module)})


def wrapped_layer() -> Any:
    layer: Any = LlamaLayer()
    for name in ("input_layernorm", "post_attention_layernorm"):
        setattr(layer, name, ModulesToSaveWrapper(getattr(layer, name)))
    return layer


UNFUSED: dict[str, Callable[[], Any]] = {
    "no norm is called directly behind a sum, or with what is added later": form(
        "x = x * 1", "Unfollowed", "return (x + self.part(self.norm(x * 2))) * 2"
    ),
    "its forward is decorated by Decorated.forward, which is not known": Decorated,
    "the text of its forward cannot be read (OSError: could not get source code)": without_text,
    "its forward is overridden on the instance": on_the_instance,
    "it adds by add(), and patch sees sums written as a + b": form(
        "x = x * 1", "Adding", "return torch.add(x, self.part(self.norm(x)))"
    ),
    # As Bloom's and Falcon's.
    "it adds by dropout_add(), and patch sees sums written as a + b": form(
        "x = x * 1", "AddsInAFunction", "return dropout_add(self.part(self.norm(x)), x)"
    ),
    "before_norm is a GroupNorm, and a sum is fused with a plain LayerNorm or RMSNorm": PoolFormerLayer,
    "input_layernorm is a ModulesToSaveWrapper around norms, and a sum is fused with a norm that the block itself "
    "holds; take the wrapper away before patch (PEFT: merge_and_unload)": wrapped_layer,
}


@pytest.mark.parametrize("reason", UNFUSED)
def test_what_is_left_alone_is_told(reason: str) -> None:
    model = torch.nn.ModuleList([UNFUSED[reason]()])
    cls = type(model[0])
    done = normforge.patch(model)
    assert done.swapped
    assert done.fused == ()
    assert [(each.path, each.cls, each.reason) for each in done.unfused] == [("0", cls, reason)]
    assert type(model[0]) is cls


@pytest.mark.parametrize(
    ("base", "returned", "fused"),
    [
        # The modulation is fused, and no norm is called directly behind the sum.
        (Parts, "x + self.part(self.norm(x) * (1 + scale) + shift)", ["0"]),
        (PoolFormerLayer, "self.before_norm(self.linear(x).sin()) + self.linear(x)", []),
    ],
)
def test_what_is_not_reported_as_unfused(base: Any, returned: str, fused: list[str]) -> None:
    block = written(base, "Block", "def forward(self, x, scale, shift):", f"return {returned}", names={})()
    done = normforge.patch(torch.nn.Sequential(block))
    assert [each.path for each in done.fused] == fused
    assert done.unfused == ()
