"""`unpatch`: what it undoes, what came between and stays, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parametrize

import normforge

from . import models
from .models import WIDTH, Transformer, randomised


class Doubled(torch.nn.Module):
    """A parametrisation."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("unpatched", ["while parametrised", "afterwards"])
@pytest.mark.parametrize("make", [lambda: torch.nn.LayerNorm(WIDTH), models.LlamaRMSNorm], ids=["torch", "Llama"])
def test_parametrising_a_patched_norm(make: Callable[[], torch.nn.Module], unpatched: str) -> None:
    """The class that torch derives from ours stays what it is, on the class that was there before patch."""
    model = torch.nn.Sequential(randomised(make()))
    cls, x = type(model[0]), torch.randn(2, WIDTH)
    wanted, keys = model(x), list(model.state_dict())
    normforge.patch(model)
    parametrize.register_parametrization(model[0], "weight", Doubled())
    assert isinstance(model[0], cls)
    twice = model(x)
    if cls is models.LlamaRMSNorm:
        # By the forward that it had, which takes other dtypes than its weight's.
        torch.testing.assert_close(model(x.double()), twice.double(), rtol=1e-5, atol=1e-5)
    if unpatched == "while parametrised":
        (swapped,) = normforge.unpatch(model)
        assert swapped.new is type(model[0])
        assert type(model[0]).__bases__ == (cls,)
        assert parametrize.is_parametrized(model[0], "weight")
        for each in (model, copy.deepcopy(model)):
            torch.testing.assert_close(each(x), twice)
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
    normforge.unpatch(model)
    assert type(model[0]) is cls
    assert torch.equal(model(x), wanted)
    assert sorted(model.state_dict()) == sorted(keys)


def test_unpatching_leaves_fully_shard_in_place(mesh: DeviceMesh) -> None:
    model = Transformer()
    tokens = torch.randint(17, (2, 5))
    wanted = model(tokens).detach()
    done = normforge.patch(model, fuse=False).swapped
    norms, classes = [swapped.path for swapped in done], [swapped.old for swapped in done]
    for path in norms:
        fully_shard(model.get_submodule(path), mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert normforge.patch(model, fuse=False) == normforge.Patch((), ())
    assert len(normforge.unpatch(model)) == len(norms)
    for path, cls in zip(norms, classes, strict=True):
        module = model.get_submodule(path)
        assert isinstance(module, FSDPModule)
        assert type(module).__bases__ == (FSDPModule, cls)
        module.unshard()
        module.reshard()
    # Modules that shared a class do so still.
    assert len({type(model.get_submodule(path)) for path in norms}) == 2
    actual = model(tokens)
    torch.testing.assert_close(actual, wanted)
    actual.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_norm_under_fully_shard_is_reported(mesh: DeviceMesh) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), models.LlamaRMSNorm())
    for module in model:
        fully_shard(module, mesh=mesh)
    assert [skipped.path for skipped in normforge.patch(model).skipped] == ["0", "1"]
    assert all(isinstance(module, FSDPModule) for module in model)


class Derived(normforge.LayerNorm):
    """Somebody's own class, derived from ours."""


def replaced(module: torch.nn.Module) -> None:
    module.__class__ = torch.nn.Identity


def derived(module: torch.nn.Module) -> None:
    module.__class__ = Derived


def wrapped(module: torch.nn.Module, hook: str) -> None:
    inner = module.forward
    module.forward = lambda *inputs: inner(*inputs)
    setattr(module, hook, object())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced, r"1, which patch made a LayerNorm of a LayerNorm, is a Identity now, which is none"),
        (derived, r"is a Derived now, a class that is derived from LayerNorm in its text"),
        (
            partial(wrapped, hook="other"),
            r"has had its forward overridden on the instance since.* take it away first: del module\.forward$",
        ),
        (partial(wrapped, hook="_hf_hook"), r"accelerate\.hooks\.remove_hook_from_module"),
        (partial(wrapped, hook="_diffusers_hook"), r"remove_hook\(name\) of each module's _diffusers_hook"),
    ],
)
def test_what_was_changed_otherwise_is_not_unpatched(change: Callable[[torch.nn.Module], None], reason: str) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH))
    normforge.patch(model)
    change(model[1])
    before = [dict(vars(module)) for module in model]
    with pytest.raises(normforge.errors.PatchError, match=reason):
        normforge.unpatch(model)
    assert type(model[0]) is normforge.LayerNorm
    assert [dict(vars(module)) for module in model] == before


@pytest.mark.parametrize(
    "model", [None, torch.nn.LayerNorm, [torch.nn.LayerNorm(WIDTH)]], ids=["None", "class", "list"]
)
@pytest.mark.parametrize("function", [normforge.patch, normforge.unpatch], ids=["patch", "unpatch"])
def test_what_is_no_module_is_refused(function: Callable[[Any], Any], model: Any) -> None:
    with pytest.raises(normforge.errors.DTypeError, match=f"^model is a {type(model).__name__}; it takes a torch.nn.M"):
        function(model)
