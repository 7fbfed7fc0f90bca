"""Triton's CPU interpreter without what it does again at every call and operation: half to two thirds of its time.

For the time of a launch it makes `triton.language` its own, and looks through all of it for what to replace; at each
call of a device function it does so once more, where nothing is left to replace. To look up one element type it lists
them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Let Triton's module remember what it finds, outside of any launch; what it computes stays as it is."""
    # Looked through before a launch has replaced anything: a device function may know another of them than its kernel.
    for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        _builtins_of(package)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = _get_np_dtype
    builder = interpreter.interpreter_builder
    # Each sum, difference and product of integers is computed again in 64 bits, for an assertion that is only made in
    # debug mode: 30 % of the time that kernels took.
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    _remember_shapes()
    _take_operands_of_one_type()


@cache
def _builtins_of(package: Any) -> tuple[str, ...]:
    """What a module or a class of Triton's language has for an interpreter to replace."""
    return tuple(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))


@cache
def _languages_of(function: Callable[..., Any]) -> tuple[ModuleType, ...]:
    """Under which modules a kernel or a device function finds the language."""
    return tuple(value for value in function.__globals__.values() if value is tl or value is tl.core)


def _is_replaced(language: Any) -> bool:
    return not (tl.core.is_builtin(language.load) or tl.core.is_builtin(language.tensor.__add__))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins_of(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            scope.set_attr(package, name, _interpreted(member))


@cache
def _interpreted(member: Callable[..., Any]) -> Callable[..., Any]:
    """Return a member of the language as the interpreter calls it, which passes what it computes by."""
    function = inspect.unwrap(member)

    def interpreted(*arguments: Any, _semantic: Any = None, **others: Any) -> Any:
        return function(*arguments, **others, _semantic=interpreter.interpreter_semantic)

    return interpreted


_patch_whole_lang, _np_dtype_of_element = interpreter._patch_lang, cache(interpreter._get_np_dtype)


def _patch_lang(function: Callable[..., Any]) -> Any:
    languages = _languages_of(function)
    if languages and all(map(_is_replaced, languages)):
        return interpreter._LangPatchScope()
    return _patch_whole_lang(function)


def _get_np_dtype(dtype: Any) -> Any:
    # A block's type has no hash, and a pointer's is that of its name.
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return _np_dtype_of_element(tl.uint64 if isinstance(element, tl.pointer_type) else element)


def _remember_shapes() -> None:
    """Have blocks and tensors of a shape that was seen share the descriptions that follow from the shape."""
    new_type, new_tensor, unwrap = tl.block_type.__init__, tl.tensor.__init__, tl.core._unwrap_if_constexpr
    types: dict[Any, dict[str, Any]] = {}

    def type_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, tl.tuple) else shape
        # Pointers to elements of one type, and hence of one name, may differ in their address spaces.
        space = (element_ty.address_space, element_ty.const) if isinstance(element_ty, tl.pointer_type) else ()
        key = (element_ty.name, *space, *[size.value if isinstance(size, tl.constexpr) else size for size in sizes])
        if key not in types:
            new_type(self, element_ty, shape)
            types[key] = vars(self) | {"of_tensor": described(self)}
        vars(self).update(types[key])

    def described(type: Any) -> dict[str, Any]:
        tensor = tl.tensor.__new__(tl.tensor)
        new_tensor(tensor, None, type)
        return dict(vars(tensor))

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        if "of_tensor" not in vars(type):
            type.of_tensor = described(type)
        vars(self).update(type.of_tensor, handle=handle, type=type)

    tl.block_type.__init__ = type_init
    tl.tensor.__init__ = tensor_init
    # Most values are neither constants nor sequences of them.
    tl.core._unwrap_if_constexpr = lambda value: value if isinstance(value, (int, float, tl.tensor)) else unwrap(value)


# Two operands of one of these types are computed with in that type; quotients of 16 bits are fp32.
_KEPT = {"fp32", "fp64", "int1", "int32", "int64", "uint32", "uint64"}
_OFFSETS = {"int32", "int64"}
# The most elements of a block of one number that is kept.
_MOST_KEPT = 4096


def _take_operands_of_one_type() -> None:
    """Have binary operators neither convert nor broadcast operands that are alike, and keep blocks of one number."""
    semantic = interpreter.TritonSemantic
    convert = semantic.binary_op_type_checking_impl
    blocks: dict[Any, Any] = {}

    def converted(self: Any, lhs: Any, rhs: Any, *options: bool) -> Any:
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
            one, other = lhs.type.scalar, rhs.type.scalar.name
            offset = one.is_ptr() and options[:1] == (True,) and other in _OFFSETS
            if offset or (one.name == other and other in _KEPT):
                # Blocks of one shape share its description; numbers have none.
                shape, its = vars(lhs.type).get("shape"), vars(rhs.type).get("shape")
                if shape is its:
                    return lhs, rhs
                if its is None and not offset:
                    data = np.full(lhs.handle.data.shape, rhs.handle.data, rhs.handle.data.dtype)
                    return lhs, tl.tensor(interpreter.TensorHandle(data, rhs.handle.dtype), lhs.type)
        elif isinstance(lhs, tl.tensor) or isinstance(rhs, tl.tensor):
            tensor, number, at = (lhs, rhs, 1) if isinstance(lhs, tl.tensor) else (rhs, lhs, 0)
            # Text tells -0.0 from 0.0.
            key = (tensor.type.scalar.name, id(vars(tensor.type).get("shape")), type(number), str(number), options, at)
            if key not in blocks:
                found = convert(self, lhs, rhs, *options)
                if found[1 - at] is not tensor or tensor.numel.value > _MOST_KEPT:
                    return found
                blocks[key] = found[at]
            return (tensor, blocks[key]) if at else (blocks[key], tensor)
        return convert(self, lhs, rhs, *options)

    semantic.binary_op_type_checking_impl = converted
