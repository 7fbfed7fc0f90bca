"""Swapping the norms of a model for ours, in place, and back."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..compiled import switch
from ..dtypes import FLOATS
from ..errors import PatchError
from ..families.group.functions import GroupNorm, GroupNormSequential, has_activated_norm
from ..families.plain_modules import LayerNorm, RMSNorm, UpcastLayerNorm
from ..families.replaced import ORIGINAL, class_for
from ..locks import fork_safe
from ..settings import fuse_from
from .blocks import FusedBlock
from .blocks import fuse as fuse_block
from .huggingface import ANY_LENGTH, EPSILON, CastOrder, HuggingFaceRMSNorm, T5RMSNorm
from .probing import UnlikeError, calls_only, formula_of, ignores_scale, refused_epsilon
from .report import Bypassed, Fused, Patch, Skipped, Swapped, Unfused

__all__ = ["patch", "unpatch"]


_TORCH: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.RMSNorm: RMSNorm,
    torch.nn.GroupNorm: GroupNorm,
}


# The class a module is to have, and the attributes that class reads and the module lacks.
_Replacement = tuple[type[torch.nn.Module], dict[str, Any]]


@dataclass(frozen=True)
class _Original:
    """The state of a module before `patch`, and the class it was given.

    Attributes:
        cls: the class it had.
        new: the class of normforge's it was given, or that its class was derived from.
        given: the names of the attributes it was given.
        had: the values it had under them.
        asked: the cast_before_weight that patch was called with.
    """

    cls: type[torch.nn.Module]
    new: type[torch.nn.Module]
    given: tuple[str, ...]
    had: dict[str, Any]
    asked: bool


# Two calls at once would each take what the other is changing for the original.
_lock = fork_safe(threading.RLock())


def patch(
    model: torch.nn.Module, *, cast_before_weight: bool = True, fuse: bool = True, compile_passes: bool = True
) -> Patch:
    """Swap every norm in a model that normforge computes for one of its modules, in place, and fuse adds with it.

    A module keeps its identity and everything in it: only its class changes. So parameters stay the same objects
    (optimisers keep working), hooks stay registered, a module shared by several parents is swapped for all of them,
    and state_dicts do not change.

    Swapped are `torch.nn.LayerNorm`, `torch.nn.RMSNorm` and `torch.nn.GroupNorm`; subclasses of them whose forward is
    the one call that torch's is, as timm's, also in fp32, as diffusers' `FP32LayerNorm`; and classes of any name with a
    1-D weight or none, no bias, and `variance_epsilon` or `eps`, if their forward takes one tensor and computes one of
    Hugging Face's formulas: as `LlamaRMSNorm`, `T5LayerNorm`, `Olmo2RMSNorm`, `GemmaRMSNorm` or `Llama4TextL2Norm`.
    Which one is found by trying copies on random numbers, in training and in evaluation; epsilon may be changed
    afterwards, under its own name, and the input may be passed by keyword, as before. Anything else that looks like a
    norm, a subclass with a forward of its own, say, is left alone and reported.

    Fused are blocks, Hugging Face's decoder layers, timm's, torch's or anybody's, that add in their forward and call a
    norm of theirs directly behind the sum: one kernel then makes the sum and its norm. Which sums those are is read
    from the forward's text. The sum is what it was, to the bit, and the norm is that of the sum as it is stored. Where
    the forward adds a norm's input again, as a residual, the norm's backward kernel adds the residual's gradient. A
    norm with a hook is called as without this.

    Fused are also norms whose result a module scales and shifts in its own forward, as transformers for diffusion do
    (AdaLN): `self.norm(x) * (1 + scale) + shift`, or the same by a function, which is found by trying that on random
    numbers. One kernel makes both, and rounds once; see `modulated_layer_norm`. Where it cannot, the norm is called and
    what it returns is modulated, as without this: of x that is not (B, T, N), say, or where a hook is on the norm.

    A `torch.nn.Sequential` in which a `torch.nn.SiLU` follows a GroupNorm becomes a `GroupNormSequential`, which
    computes both in one kernel. Wherever else a model applies SiLU behind a GroupNorm, in a forward of its own, it does
    so still; `GroupNorm(..., activation="silu")` is for those.

    Norms that nothing calls are not computed by kernels: in evaluation without gradients a
    `torch.nn.TransformerEncoderLayer` with batch_first may run as one operator of torch's own. Such layers are
    reported as well; `torch.backends.mha.set_fastpath_enabled(False)` has them call their norms.

    Args:
        model: any module, also a norm itself.
        cast_before_weight: whether norms that round before they multiply by the weight (Llama's and T5's) keep doing
            so. False has the kernel multiply in fp32 and round once: less time and memory, and results that differ
            by a rounding; a Llama norm then returns its input's dtype.
        fuse: whether residual adds are fused with the norms behind them, and modulations with the norms before them,
            wherever torch.compile does not trace; and SiLU with the GroupNorm before it.
        compile_passes: whether they are where it does, in every model of the process: `normforge.compile_passes` is
            switched on if a norm was swapped. False leaves it as it is.

    Returns:
        What was swapped, skipped and fused, and what may pass its norms by; `print` shows it as a table.
    """
    with _lock:
        swapped, skipped, bypassed = [], [], []
        fused: list[Fused] = []
        unfused: list[Unfused] = []
        for path, module in model.named_modules():
            old = type(module)
            original: _Original | None = vars(module).get(ORIGINAL)
            if isinstance(module, HuggingFaceRMSNorm) and original is not None and original.asked != cast_before_weight:
                reason = f"it was patched with cast_before_weight={original.asked} before; unpatch it first"
                skipped.append(Skipped(path, old, reason))
            if not _looks_like_a_norm(module):
                continue
            with warnings.catch_warnings():
                # A forward may warn of what only its trial has, and where warnings are errors would fail by that.
                warnings.simplefilter("ignore")
                replacement = _replacement(module, cast_before_weight)
            if isinstance(replacement, str):
                skipped.append(Skipped(path, old, replacement))
            else:
                swapped.append(_swap(path, module, replacement, cast_before_weight))
        if fuse:
            fuse_from()  # Refuses what it cannot be.
        for path, module in model.named_modules():
            if fuse:
                # Its very class, whose forward is known.
                if type(module) is torch.nn.Sequential and "forward" not in vars(module) and has_activated_norm(module):
                    swapped.append(_swap(path, module, (GroupNormSequential, {}), cast_before_weight))
                found = fuse_block(path, module)
                if isinstance(found, str):
                    unfused.append(Unfused(path, type(module), found))
                elif found is not None:
                    fused.append(found)
            if _bypasses(module):
                bypassed.append(Bypassed(path, _unfused(type(module)), _FAST_PATH))
        if compile_passes and swapped:
            switch.compile_passes()
        return Patch(tuple(swapped), tuple(skipped), tuple(bypassed), tuple(fused), tuple(unfused))


def _unfused(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return the class that a block had before its adds were fused."""
    return cls._normforge_made[0] if issubclass(cls, FusedBlock) else cls


def unpatch(model: torch.nn.Module) -> tuple[Swapped, ...]:
    """Undo `patch`: every module that it swapped gets its class and attributes back. Others are left alone.

    What changed a module's class since stays: `torch.nn.utils.parametrize` and `fully_shard` derive a class from the
    module's, and that is derived anew, from the class that the module had.

    Args:
        model: what was patched, a part of it, or a copy.

    Returns:
        What was swapped back.

    Raises:
        PatchError: something else replaced a module's class or forward since; no module was changed.
    """
    with _lock:
        found = []
        # Modules that share a class go on sharing one, as those under fully_shard do.
        derived: dict[tuple[type, type], type[torch.nn.Module]] = {}
        for path, module in model.named_modules():
            original = _original(module)
            if original is not None:
                old = type(module)
                cls = _class_before(path, module, original)
                found.append((module, original, Swapped(path, old, derived.setdefault((old, original.cls), cls))))
        for module, original, swapped in found:
            attributes = vars(module)
            attributes.update(original.had)
            module.__class__ = swapped.new
            for name in (*original.given, ORIGINAL):
                if name not in original.had:
                    attributes.pop(name, None)
        return tuple(swapped for _, _, swapped in found)


def _original(module: torch.nn.Module) -> _Original | None:
    """Return the state of a module before `patch`, or None if `patch` left the module alone."""
    cls = type(module)
    if issubclass(cls, FusedBlock):
        # Known by its class alone: no reference to such a class can be pickled.
        return _Original(_unfused(cls), cls.fused_class(), (), {}, True)
    original: _Original | None = vars(module).get(ORIGINAL)
    return original


def _class_before(path: str, module: torch.nn.Module, original: _Original) -> type[torch.nn.Module]:
    """Return the class that a module would have without `patch`."""
    what = f"{path or 'the model'}, which patch made a {original.new.__name__} of a {original.cls.__name__},"
    if "forward" in vars(module):
        raise PatchError(
            f"{what} has had its forward overridden on the instance since, and that may call ours; take it away first: "
            f"{next((fix for name, fix in _UNHOOK.items() if name in vars(module)), 'del module.forward')}"
        )
    # Releases before derived no class.
    either = (class_for(original.new, original.cls), original.new)
    made: type[Any] | None = next((cls for cls in type(module).__mro__ if cls in either), None)
    if made is None:
        raise PatchError(f"{what} is a {type(module).__name__} now, which is none; undo first what made it one")
    return _derived(type(module), made, original.cls, what)


# By the attribute under which a library keeps its hook of a module, how it is taken away.
_UNHOOK = {
    "_hf_hook": "accelerate.hooks.remove_hook_from_module(model, recurse=True)",
    "_diffusers_hook": "call remove_hook(name) of each module's _diffusers_hook (group offload, layerwise casting), or "
    "unpatch before the hooks are applied",
}


def _derived(
    cls: type[torch.nn.Module], old: type[torch.nn.Module], new: type[torch.nn.Module], what: str
) -> type[torch.nn.Module]:
    """Return a class as it would be if derived from `new` in place of `old`."""
    if cls is old:
        return new
    module = sys.modules.get(cls.__module__)
    # `super()` in a method means the class that its text stands in.
    codes = (getattr(getattr(value, "__func__", value), "__code__", None) for value in vars(cls).values())
    bound = any(code is not None and "__class__" in code.co_freevars for code in codes)
    if bound or getattr(module, cls.__qualname__, None) is cls:
        raise PatchError(
            f"{what} is a {cls.__name__} now, a class that is derived from {old.__name__} in its text; give the module "
            f"the class {old.__name__} back first"
        )
    namespace = {
        name: value
        for name, value in vars(cls).items()
        # Hugging Face's layers wrap the forward of each class that is derived from them, when it is.
        if name not in ("__dict__", "__weakref__") and getattr(value, "__wrapped__", None) is not old.forward
    }
    bases = tuple(_derived(base, old, new, what) if issubclass(base, old) else base for base in cls.__bases__)
    metaclass: Callable[..., type[torch.nn.Module]] = type(cls)
    return metaclass(cls.__name__.replace(old.__name__, new.__name__), bases, namespace)


def _looks_like_a_norm(module: torch.nn.Module) -> bool:
    """Return True if a user would expect `patch` to swap or report a module; normforge's own are done."""
    cls = type(module)
    if any(base.__module__.partition(".")[0] == __name__.partition(".")[0] for base in cls.__mro__):
        return False
    if isinstance(module, tuple(_TORCH)):
        return True
    # A module that holds others with parameters, or a norm, is a layer: AdaLayerNormZero, Wav2Vec2LayerNormConvLayer.
    children = list(module.children())
    if cls.__module__.startswith("torch.nn.") or any(next(each.parameters(), None) is not None for each in children):
        return False
    if any(isinstance(each, tuple(_TORCH)) or _looks_like_a_norm(each) for each in children):
        return False
    name = cls.__name__.lower().replace("_", "")
    if name.endswith(("rmsnorm", "layernorm")):
        return True
    ignores = None if any(part in name for part in ("batchnorm", "instancenorm")) else ignores_scale(module)
    return "norm" in name if ignores is None else ignores


_FAST_PATH = (
    "in evaluation without gradients torch runs it as one operator, its norms included; "
    "torch.backends.mha.set_fastpath_enabled(False) has it call them"
)


def _bypasses(module: torch.nn.Module) -> bool:
    """Return True if a module is an encoder layer with norms of ours that torch's fast path may bypass.

    The conditions are those of torch.nn.TransformerEncoderLayer.forward that no input and no mode decides.
    """
    return (
        isinstance(module, torch.nn.TransformerEncoderLayer)
        and _unfused(type(module)).forward is torch.nn.TransformerEncoderLayer.forward
        and any(isinstance(norm, LayerNorm) for norm in (module.norm1, module.norm2))
        and module.self_attn.batch_first
        and module.self_attn.in_proj_bias is not None
        and module.self_attn._qkv_same_embed_dim
        and module.self_attn.num_heads % 2 == 0
        and bool(module.activation_relu_or_gelu)
        and module.norm1.eps == module.norm2.eps
    )


def _replacement(module: torch.nn.Module, cast_before_weight: bool) -> _Replacement | str:
    """Return the replacement of a module, or the reason there is none."""
    cls = type(module)
    if "forward" in vars(module):
        return "its forward is overridden on the instance"
    dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
    if not dtypes <= set(FLOATS):
        return f"it has parameters in {', '.join(map(str, dtypes))}, and kernels take {', '.join(map(str, FLOATS))}"
    if (refused := refused_epsilon(module)) is not None:
        return refused
    for base, replacement in _TORCH.items():
        if isinstance(module, base):
            if cls is not base and not calls_only(module, base):
                return f"{cls.__name__} is a subclass of torch's, and its forward may be its own"
            names = getattr(getattr(cls.forward, "__code__", None), "co_names", ())
            if base is torch.nn.LayerNorm and not {"to", "type_as"}.isdisjoint(names):
                replacement = UpcastLayerNorm
            return replacement, _options_of(replacement)
    try:
        formula = formula_of(module)
    except UnlikeError as unlike:
        return str(unlike)
    weight = module._parameters.get("weight")
    attributes = {
        **_options_of(RMSNorm),
        "normalized_shape": (ANY_LENGTH,) if weight is None else tuple(weight.shape),
        "elementwise_affine": weight is not None,
        "cast_before_weight": cast_before_weight and formula.order.rounds_first,
        "weight_offset": formula.order.weight_offset,
        "epsilon_name": formula.epsilon_name,
        "input_name": formula.input_name,
    }
    if formula.epsilon_name == "eps":
        attributes |= {"epsilon_name": EPSILON, EPSILON: vars(module)["eps"]}
    if weight is None:
        attributes["weight"] = None
    is_t5 = formula.order is CastOrder.TO_WEIGHT_BEFORE_WEIGHT
    return T5RMSNorm if is_t5 else HuggingFaceRMSNorm, attributes


def _options_of(cls: type[torch.nn.Module]) -> dict[str, Any]:
    """Return the default options of a class's modules.

    Their class has them too. But for what an instance lacks compiled code looks through the classes that it is of, in
    each call and for each norm: 24 lines of guards, where three options of its own are 6.
    """
    names = ("cast", "weight_offset", "_has_x_bias", "cast_before_weight", "activation")
    return {name: getattr(cls, name) for name in names if hasattr(cls, name)}


def _swap(path: str, module: torch.nn.Module, replacement: _Replacement, asked: bool) -> Swapped:
    cls, given = replacement
    old, attributes = type(module), vars(module)
    had = {name: attributes[name] for name in given if name in attributes}
    attributes[ORIGINAL] = _Original(old, cls, tuple(given), had, asked)
    attributes.update(given)
    module.__class__ = class_for(cls, old)
    return Swapped(path, old, type(module))
