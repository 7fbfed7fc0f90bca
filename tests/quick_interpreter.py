"""Triton's CPU interpreter without what it does again at every call: half of the time that interpreted tests took.

For the time of a launch it makes `triton.language` its own, and looks through all of it for what to replace; at each
call of a device function it does so once more, where nothing is left to replace. To look up one element type it lists
them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import triton.language as tl


def install(interpreter: Any) -> None:
    """Let Triton's module remember what it finds; what it replaces and what it computes stay as they are.

    Args:
        interpreter: `triton.runtime.interpreter`, outside of any launch.
    """
    # Looked through before a launch has replaced anything: a device function may know another of them than its kernel.
    for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        _builtins_of(package)
    interpreter._patch_builtin = _patch_builtin(interpreter)
    interpreter._patch_lang = _patch_lang(interpreter)
    interpreter._get_np_dtype = _get_np_dtype(interpreter)


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


def _patch_builtin(interpreter: ModuleType) -> Callable[..., None]:
    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in _builtins_of(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    return patch_builtin


def _patch_lang(interpreter: ModuleType) -> Callable[..., Any]:
    patch = interpreter._patch_lang

    def patch_lang(function: Callable[..., Any]) -> Any:
        languages = _languages_of(function)
        if languages and all(map(_is_replaced, languages)):
            return interpreter._LangPatchScope()
        return patch(function)

    return patch_lang


def _get_np_dtype(interpreter: ModuleType) -> Callable[..., Any]:
    of_element = cache(interpreter._get_np_dtype)

    def get_np_dtype(dtype: Any) -> Any:
        # A block's type has no hash, and a pointer's is that of its name.
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return of_element(tl.uint64 if isinstance(element, tl.pointer_type) else element)

    return get_np_dtype
