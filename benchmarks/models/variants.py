"""Changes to a model before it is timed, and their effects beyond the model.

Variants of one model are copies that share its parameters: weights are on the device once, and all start from the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

import normforge

from ..provider import load
from .specs import Spec

LIGER = "liger_kernel.transformers"
TORCH = "torch"

Globals = dict[str, Any]


class NotOfferedError(Exception):
    """A variant has nothing for a model; the text says what is missing."""


@dataclass(frozen=True)
class Variant:
    """One way of having norms computed.

    Attributes:
        name: what `--variants` and tables call it.
        label: what headings and legends call it.
        change: changes a copy of a model, in place.
        passes: whether `normforge.compile_passes` is on while it runs, and so while it is compiled; such a variant is
            run compiled alone, because eagerly there is nothing to rewrite.
    """

    name: str
    label: str
    change: Callable[[nn.Module, Spec], None]
    passes: bool = False


@dataclass(frozen=True)
class Varied:
    """A model as a variant has it, which may be called `within` its own surroundings only.

    Attributes:
        model: the copy.
        home: the module that the model's class comes from.
        replaced: the names there that the variant has set, and their values.
        passes: as of the variant.
    """

    model: nn.Module
    home: Any = None
    replaced: Globals = field(default_factory=dict)
    passes: bool = False

    @contextmanager
    def within(self) -> Iterator[None]:
        """Let hold for a while what reaches beyond the model: Liger's functions reach every model of a family."""
        names = vars(self.home) if self.replaced else {}
        before = {name: names[name] for name in self.replaced}
        names.update(self.replaced)
        try:
            with normforge.compile_passes(self.passes):
                yield
        finally:
            names.update(before)


def vary(model: nn.Module, spec: Spec, variant: Variant) -> Varied:
    """Copy a model, sharing its parameters, and change the copy.

    Raises:
        NotOfferedError: the variant has nothing for this model.
        Exception: whatever the variant raises; the model's module is left as it was.
    """
    home = load(type(model).__module__)
    before = dict(vars(home))
    copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    try:
        variant.change(copied, spec)
        replaced = {name: value for name, value in vars(home).items() if value is not before.get(name)}
    finally:
        vars(home).update(before)
    return Varied(copied, home, replaced, variant.passes)


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that models and variants come from."""
    found = {}
    for distribution in ("transformers", "timm", "liger-kernel"):
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return found


def _leave(model: nn.Module, spec: Spec) -> None:
    pass


def _patch(model: nn.Module, spec: Spec) -> None:
    _require_swapped(normforge.patch(model))


def _patch_unfused(model: nn.Module, spec: Spec) -> None:
    _require_swapped(normforge.patch(model, fuse=False))


def _require_swapped(done: normforge.Patch) -> None:
    if not done.swapped:
        reasons = {f"{one.cls.__name__}: {one.reason}" for one in done.skipped}
        raise NotOfferedError(f"patch takes none of its norms ({'; '.join(sorted(reasons))})")


def _liger_modules(model: nn.Module, spec: Spec) -> None:
    load(LIGER)
    norms: list[tuple[str, Any]] = [
        (path, module) for path, module in model.named_modules() if type(module).__name__ in _LIGER_MODULES
    ]
    fitting = [(path, module) for path, module in norms if module.weight is not None]
    if not fitting:
        raise NotOfferedError("Liger has no module for its norms")
    for path, module in fitting:
        home, name = _LIGER_MODULES[type(module).__name__]
        made = getattr(load(home), name)(module.weight.numel(), eps=_epsilon(module))
        for own, parameter in module.named_parameters(recurse=False):
            setattr(made, own, parameter)
        model.set_submodule(path, made.train(module.training))


# By the names of the classes that these stand in for, as Liger's own functions choose them.
_LIGER_MODULES = {
    "LayerNorm": (LIGER, "LigerLayerNorm"),
    "LlamaRMSNorm": (LIGER, "LigerRMSNorm"),
    "Qwen3RMSNorm": (LIGER, "LigerRMSNorm"),
    "T5LayerNorm": (LIGER, "LigerRMSNorm"),
    "GemmaRMSNorm": (f"{LIGER}.rms_norm", "LigerRMSNormForGemma"),
}


def _epsilon(module: Any) -> float:
    found: float = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return found


def _liger_applied(model: nn.Module, spec: Spec) -> None:
    liger = load(LIGER)
    apply = getattr(liger, f"apply_liger_kernel_to_{spec.liger}", None) if spec.liger else None
    if apply is None:
        raise NotOfferedError(f"Liger has no apply_liger_kernel_to_{spec.liger or spec.name}")
    apply(model=model)


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(TORCH, "torch", _leave),
        Variant("patch", "patch", _patch),
        Variant("patch-passes", "patch, compile_passes", _patch, passes=True),
        Variant("patch-unfused", "patch, fuse=False", _patch_unfused),
        Variant("liger", "Liger's modules", _liger_modules),
        Variant("liger-apply", "Liger's apply", _liger_applied),
        # One code twice: other variants' differences below the difference of these two mean nothing.
        Variant("torch-again", "torch, again", _leave),
    )
}
