"""The way from a module that `patch` swapped back to the module it was: its class, and its forward.

A swapped module has a class of normforge's that is also derived from the class it had, so that `isinstance` holds as
before. Kernels take dense tensors of three element types. For all else the module calls the forward that it had.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch

from ..errors import TransformError
from ..selection.invariance import is_on, refuse_torch
from ..upstream.torch_internals import is_forward_ad_on

# The attribute of a swapped module with the data for unpatch; deep copies and pickles include the attribute.
ORIGINAL = "_normforge_original"


class Derived:
    """The base of classes that `derived` makes: their modules keep their class through copies and pickles."""

    # The function that makes a module of such a class, and its arguments.
    _normforge_recipe: tuple[Callable[..., Any], tuple[Any, ...]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the recipe of the class: no reference to the class itself can be pickled."""
        reduced: Any = super().__reduce_ex__(protocol)
        recipe = vars(type(self)).get("_normforge_recipe")
        return reduced if recipe is None or reduced[1][:1] != (type(self),) else (*recipe, *reduced[2:])


def derived(first: Any, cls: Any, recipe: tuple[Callable[..., Any], tuple[Any, ...]], **namespace: Any) -> Any:
    """Return a class that is derived from `first`, a `Derived`, and from the class of a module.

    The name stays: by it models initialise parameters, optimisers decay weights, and accelerate splits a model.
    """
    kept = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls)(cls.__name__, (first, cls), kept | namespace | {"_normforge_recipe": recipe})


class Replacing(Derived, torch.nn.Module):
    """A module that may stand in the place of another."""

    def __init_subclass__(cls, **options: Any) -> None:
        # A class that `class_for` makes is no subclass that the author of the replaced class has to hear of.
        if "_normforge_serves" not in vars(cls):
            super().__init_subclass__(**options)

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, name_of(type(self)), 1)

    # torch.jit asks a module for this before it compiles it.
    def __prepare_scriptable__(self) -> NoReturn:
        raise TransformError(
            f"torch.jit.script cannot compile normforge.{type(self).__name__}; use torch.compile or torch.export, or "
            "torch.jit.trace, or script the model with torch's own norms (normforge.unpatch(model) restores them)"
        )

    def forward_before(self, x: torch.Tensor) -> Callable[..., Any] | None:
        """Return the forward this module had before `patch`, to be called with x; None if it had none."""
        original = self.__dict__.get(ORIGINAL)
        # A norm of normforge's, which `patch` has follow an add, has no other.
        if original is None or issubclass(original.cls, Replacing):
            return None
        # The second tangents of torch's LayerNorm are wrong; see `eager`.
        is_dense = type(x) is torch.Tensor and x.layout is torch.strided and not x.is_nested and x.is_floating_point()
        if is_forward_ad_on() and issubclass(original.cls, torch.nn.LayerNorm) and is_dense:
            return None
        if is_on() and x.device.type != "meta":
            refuse_torch(f"{original.cls.__name__} of {x.dtype} on {x.device}")
        forward: Callable[..., Any] = original.cls.forward
        return forward


def _new(ours: type[torch.nn.Module], replaced: type[torch.nn.Module]) -> torch.nn.Module:
    module_class = class_for(ours, replaced)
    return module_class.__new__(module_class)


def own(module: torch.nn.Module, name: str) -> Any:
    """Return a parameter from torch.nn.Module's own dict, which saves 0.3 us of attribute look-up.

    What parametrisations and FSDP put in its place is an attribute. Of attributes TorchDynamo knows which are
    parameters, so that forwards it traces read those.
    """
    kept = module._parameters
    return kept[name] if name in kept else getattr(module, name)


def class_for(ours: type[torch.nn.Module], replaced: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return the class that a module of class `replaced` gets to be one of `ours`: derived from both."""
    both: Any = (ours, replaced)
    return ours if issubclass(ours, replaced) else _derived(*both)


@cache
def _derived(ours: Any, replaced: Any) -> type[torch.nn.Module]:
    both = (ours, replaced)
    derived_class: type[torch.nn.Module] = derived(*both, (_new, both), _normforge_serves=both)
    return derived_class


def class_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class of normforge's that a module is of; any other module's own class."""
    cls = type(module)
    classes: tuple[type[torch.nn.Module], ...] = vars(cls).get("_normforge_serves", (cls,))
    return classes[0]


def name_of(cls: type) -> str:
    """Return the name of a class in printed models and tables: ours, often called as torch's is, with normforge's."""
    ours, _, _ = __name__.partition(".")
    is_ours = cls.__module__.partition(".")[0] == ours or "_normforge_serves" in vars(cls)
    return f"{ours}.{cls.__name__}" if is_ours else cls.__name__
