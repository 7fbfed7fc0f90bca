"""Swap the norms of a model for ours, in place, and back."""

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
from ..errors import DTypeError, PatchError
from ..families.group.functions import GroupNorm, GroupNormSequential
from ..families.plain_modules import LayerNorm, RMSNorm, UpcastLayerNorm
from ..families.replaced import ORIGINAL, class_for
from ..locks import fork_safe
from ..settings import fuse_from
from .blocks import FusedBlock, block_class
from .blocks import fuse as fuse_block
from .calling import CallingNorm, calls_torch
from .huggingface import (
    ANY_LENGTH,
    EPSILON,
    CastOrder,
    HuggingFaceGatedRMSNorm,
    HuggingFaceLayerNorm,
    HuggingFaceRMSNorm,
    T5RMSNorm,
)
from .probing import calls_only, epsilons_of, formula_of, ignores_scale
from .report import Bypassed, Fused, LeftAloneError, Patch, Skipped, Swapped, Unfused

__all__ = ["patch", "unpatch"]


_TORCH: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.RMSNorm: RMSNorm,
    torch.nn.GroupNorm: GroupNorm,
}


# A module's new class, and the attributes that the new class reads and the module lacks.
_Replacement = tuple[type[torch.nn.Module], dict[str, Any]]


@dataclass(frozen=True)
class _Original:
    """The state of a module before `patch`, and the class that `patch` set.

    Attributes:
        cls: the class it had.
        new: the class of normforge's that `patch` set, or derived the module's class from.
        given: the names of the attributes that `patch` set. Pickles hold this name.
        had: the module's own values of these attributes.
        asked: the cast_before_weight that patch was called with.
    """

    cls: type[torch.nn.Module]
    new: type[torch.nn.Module]
    given: tuple[str, ...]
    had: dict[str, Any]
    asked: bool


# Two concurrent calls would each record the other's half-changed module as the original.
_lock = fork_safe(threading.RLock())


def patch(
    model: torch.nn.Module, *, cast_before_weight: bool = True, fuse: bool = True, compile_passes: bool = True
) -> Patch:
    """Swap every norm in a model that normforge computes for one of its modules, in place, and fuse adds with it.

    A module keeps its identity and its contents: only its class changes. Parameters stay the same objects (optimisers
    keep working), hooks stay registered, a module shared by several parents is swapped for all of them, and
    state_dicts do not change.

    `patch` swaps:

    - `torch.nn.LayerNorm`, `torch.nn.RMSNorm` and `torch.nn.GroupNorm`;
    - subclasses of these whose forward only calls torch's function, as timm's do, also in fp32, as diffusers'
      `FP32LayerNorm` does;
    - other norms whose forward calls `torch.nn.functional.layer_norm`, `rms_norm` or `group_norm`, on permuted rows or
      with a weight of its own making, say: the forward stays, and calls normforge's function instead;
    - classes of any name with a 1-D weight or none, no bias, and `variance_epsilon` or `eps`, if their forward takes
      one tensor and computes one of Hugging Face's formulas: `LlamaRMSNorm`, `T5LayerNorm`, `Olmo2RMSNorm`,
      `GemmaRMSNorm`, `Llama4TextL2Norm` and others. The formula is identified by running copies on random inputs, in
      training and in evaluation. Epsilon may be changed afterwards, under its own name, and the input may be passed by
      keyword, as before.

    Other modules that look like norms, subclasses with a forward of their own for example, are left alone and reported.

    `patch` fuses residual adds with norms. In any block (Hugging Face's decoder layers, timm's, torch's, your own)
    whose forward adds and calls one of its norms directly behind the sum, one kernel computes both. The sums are found
    in the forward's text. The sum has the same bits as before, and the norm reads the sum as it is stored. Where the
    forward adds a norm's input again, as a residual, the norm's backward kernel adds the residual's gradient. Where the
    forward adds a norm's result and reads it nowhere else, as Gemma 2 and OLMo 2 do, one kernel computes both and
    rounds once; see `rms_norm_add`. A norm with a hook is called as before.

    `patch` fuses norms with the scale and shift that a module's forward applies to their result, as diffusion
    transformers do (AdaLN): `self.norm(x) * (1 + scale) + shift`, or a function that computes the same, which is
    identified by running it on random inputs. One kernel computes both and rounds once; see `modulated_layer_norm`.
    Where no kernel can, the norm is called and its result is modulated as before: if x is not (B, T, N), for example,
    or if the norm has a hook.

    `patch` fuses the norms of queries and keys with their rotary embedding, if the forward calls `rotate(q, k, cos,
    sin)` on their results, on transposes of them, or on heads that they are viewed as; or of one tensor, if it calls
    `rotate(self.norm(q), cos, sin)`. The function is identified by running it on random inputs. One kernel computes
    both and rounds once; see `qk_norm_rope`.

    A `torch.nn.Sequential` in which a `torch.nn.SiLU` follows a GroupNorm becomes a `GroupNormSequential`, which
    computes both in one kernel. A SiLU that a model applies to a GroupNorm's result in its own forward is not fused;
    use `GroupNorm(..., activation="silu")` there.

    Kernels compute only norms that are called. In evaluation without gradients a `torch.nn.TransformerEncoderLayer`
    with batch_first may run as one operator of torch, which bypasses its norms. Such layers are reported;
    `torch.backends.mha.set_fastpath_enabled(False)` makes them call their norms.

    Args:
        model: any module, also a norm itself.
        cast_before_weight: whether norms that round before they multiply by the weight (Llama's and T5's) keep doing
            so. With False the kernel multiplies in fp32 and rounds once: this takes less time and memory, and results
            differ by a rounding; a Llama norm then returns its input's dtype.
        fuse: whether to fuse residual adds with the norms behind them, and modulations and rotary embeddings with the
            norms before them, wherever torch.compile does not trace; and SiLU with the GroupNorm before it.
        compile_passes: whether to fuse where torch.compile traces, in every model of the process: switches
            `normforge.compile_passes` on if a norm was swapped. False leaves the passes unchanged.

    Returns:
        A report of the modules that were swapped, skipped and fused, and of those that may bypass their norms; `print`
        shows the report as a table.

    Raises:
        DTypeError: the model is no torch.nn.Module.
    """
    _check_model(model)
    rows: list[Any] = []
    with _lock:
        with warnings.catch_warnings():
            # A trial's inputs may make a forward warn, and fail where warnings are errors.
            warnings.simplefilter("ignore")
            for path, module in model.named_modules():
                try:
                    if (replacement := _replacement(module, cast_before_weight)) is not None:
                        rows.append(_swap(path, module, replacement, cast_before_weight))
                except LeftAloneError as left:
                    rows.append(Skipped(path, type(module), str(left)))
        if fuse:
            fuse_from()  # Refuses what it cannot be.
        for path, module in model.named_modules():
            # Its very class, whose forward is known.
            is_sequential = type(module) is torch.nn.Sequential and "forward" not in vars(module)
            if fuse and is_sequential and GroupNormSequential.serves(module):
                rows.append(_swap(path, module, (GroupNormSequential, {}), cast_before_weight))
            try:
                if fuse and (fused := fuse_block(path, module)) is not None:
                    rows.append(fused)
            except LeftAloneError as left:
                rows.append(Unfused(path, type(module), str(left)))
            if _bypasses(module):
                rows.append(Bypassed(path, block_class(type(module)), _FAST_PATH))
    groups: list[tuple[Any, ...]] = [
        tuple(row for row in rows if type(row) is kind) for kind in (Swapped, Skipped, Bypassed, Fused, Unfused)
    ]
    if compile_passes and groups[0]:
        switch.compile_passes()
    return Patch(*groups)


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}; it takes a torch.nn.Module")


def unpatch(model: torch.nn.Module) -> tuple[Swapped, ...]:
    """Undo `patch`: give every swapped module its class and attributes back, and leave other modules alone.

    Later changes of a module's class stay: `torch.nn.utils.parametrize` and `fully_shard` derive a class from the
    module's, and `unpatch` derives that class anew from the module's original class.

    Args:
        model: the patched model, a part of the model, or a copy.

    Returns:
        The modules that were swapped back.

    Raises:
        DTypeError: the model is no torch.nn.Module.
        PatchError: other code replaced a module's class or forward since; no module was changed.
    """
    _check_model(model)
    with _lock:
        patched = []
        # Modules that share a class keep sharing a class, as under fully_shard.
        derived: dict[tuple[type, type], type[torch.nn.Module]] = {}
        for path, module in model.named_modules():
            original = _original(module)
            if original is not None:
                old = type(module)
                cls = _class_before(path, module, original)
                patched.append((module, original, Swapped(path, old, derived.setdefault((old, original.cls), cls))))
        for module, original, swapped in patched:
            attributes = vars(module)
            module.__class__ = swapped.new
            for name in (*original.given, ORIGINAL):
                attributes.pop(name, None)
            attributes.update(original.had)
        return tuple(swapped for _, _, swapped in patched)


def _original(module: torch.nn.Module) -> _Original | None:
    """Return the state of a module before `patch`, or None if `patch` left the module alone."""
    cls = type(module)
    if issubclass(cls, FusedBlock):
        # Known by its class alone: no reference to such a class can be pickled.
        fused = next(base for base in cls.__mro__ if "_normforge_fuses" in vars(base))
        return _Original(block_class(cls), fused, (), {}, True)
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
    ours = class_for(original.new, original.cls)
    if not isinstance(module, ours):
        raise PatchError(f"{what} is a {type(module).__name__} now, which is none; undo first what made it one")
    return _derived(type(module), ours, original.cls, what)


# How to remove a library's hook of a module, by the attribute that holds the hook.
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
    # `super()` in a method means the class that contains the method's text.
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
        and block_class(type(module)).forward is torch.nn.TransformerEncoderLayer.forward
        and any(isinstance(norm, LayerNorm) for norm in (module.norm1, module.norm2))
        and module.self_attn.batch_first
        and module.self_attn.in_proj_bias is not None
        and module.self_attn._qkv_same_embed_dim
        and module.self_attn.num_heads % 2 == 0
        and bool(module.activation_relu_or_gelu)
        and module.norm1.eps == module.norm2.eps
    )


def _replacement(module: torch.nn.Module, cast_before_weight: bool) -> _Replacement | None:
    """Return the replacement of a module, or None if the module is no norm.

    Raises:
        LeftAloneError: the module is a norm that is left as it is.
    """
    cls = type(module)
    original: _Original | None = vars(module).get(ORIGINAL)
    if (
        isinstance(module, (HuggingFaceRMSNorm, HuggingFaceGatedRMSNorm))
        and original is not None
        and original.asked != cast_before_weight
    ):
        raise LeftAloneError(f"it was patched with cast_before_weight={original.asked} before; unpatch it first")
    if not _looks_like_a_norm(module):
        return None
    if "forward" in vars(module):
        raise LeftAloneError("its forward is overridden on the instance")
    dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
    if not dtypes <= set(FLOATS):
        raise LeftAloneError(
            f"it has parameters in {', '.join(map(str, dtypes))}, and kernels take {', '.join(map(str, FLOATS))}"
        )
    epsilons_of(module)
    try:
        return _by_class(module, cast_before_weight)
    except LeftAloneError:
        if not calls_torch(cls):
            raise
    return CallingNorm, {}


def _by_class(module: torch.nn.Module, cast_before_weight: bool) -> _Replacement:
    """Return the replacement of a norm by its class or its formula.

    Raises:
        LeftAloneError: it is no class of torch's, and its forward computes another formula.
    """
    cls = type(module)
    for base, replacement in _TORCH.items():
        if isinstance(module, base):
            if cls is not base and not calls_only(module, base):
                raise LeftAloneError(f"{cls.__name__} is a subclass of torch's, and its forward may be its own")
            names = getattr(getattr(cls.forward, "__code__", None), "co_names", ())
            if base is torch.nn.LayerNorm and not {"to", "type_as"}.isdisjoint(names):
                replacement = UpcastLayerNorm
            return replacement, _options_of(replacement)
    formula = formula_of(module)
    weight = module._parameters.get("weight")
    by_order = {CastOrder.TO_WEIGHT_BEFORE_WEIGHT: T5RMSNorm, CastOrder.CENTRED: HuggingFaceLayerNorm}
    replacement = HuggingFaceGatedRMSNorm if formula.activation else by_order.get(formula.order, HuggingFaceRMSNorm)
    attributes = {
        **_options_of(replacement),
        "normalized_shape": (ANY_LENGTH,) if weight is None else tuple(weight.shape),
        "elementwise_affine": weight is not None,
        "cast_before_weight": cast_before_weight and formula.order.rounds_first,
        "weight_offset": formula.order.weight_offset,
        "epsilon_name": formula.epsilon_name,
        "input_name": formula.input_names[0],
    }
    if formula.epsilon_name == "eps":
        attributes |= {"epsilon_name": EPSILON, EPSILON: vars(module)["eps"]}
    if weight is None:
        attributes["weight"] = None
    if formula.activation:
        attributes |= {"activation": formula.activation, "norm_before_gate": not formula.gates_first}
    if formula.order is CastOrder.CENTRED:
        attributes["bias"] = None
    return replacement, attributes


def _options_of(cls: type[torch.nn.Module]) -> dict[str, Any]:
    """Return the default options of a class's modules.

    The class has them too. For an attribute that an instance lacks, compiled code searches the instance's classes, in
    each call and for each norm: 24 lines of guards, against 6 for three attributes of the instance.
    """
    names = ("cast", "weight_offset", "_has_x_bias", "cast_before_weight", "activation")
    return {name: getattr(cls, name) for name in names if hasattr(cls, name)}


def _swap(path: str, module: torch.nn.Module, replacement: _Replacement, asked: bool) -> Swapped:
    cls, options = replacement
    old, attributes = type(module), vars(module)
    had = {name: attributes[name] for name in options if name in attributes}
    attributes[ORIGINAL] = _Original(old, cls, tuple(options), had, asked)
    attributes.update(options)
    module.__class__ = class_for(cls, old)
    return Swapped(path, old, type(module))
