"""The interpreter that tests run kernels in replaces what Triton's does, neither less nor more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec, module_from_spec
from itertools import product
from types import FunctionType, ModuleType
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter as quick

from ..calling import there

PACKAGES: dict[str, Any] = {
    "tl": tl,
    "tl.core": tl.core,
    "tl.math": tl.math,
    "tl.tensor": tl.tensor,
    "tl.dtype": tl.dtype,
    "tl.core.tensor_descriptor_base": tl.core.tensor_descriptor_base,
}
# What a kernel or a device function may know: normforge's the first, Triton's own device functions the second.
KNOWN: list[dict[str, ModuleType]] = [{"tl": tl}, {"core": tl.core}, {"tl": tl, "core": tl.core}]

Attributes = set[tuple[str, str]]


def replaced() -> Attributes:
    """Which attributes of the language are an interpreter's for now."""
    return {(name, key) for name, package in PACKAGES.items() for key, value in vars(package).items() if _is_its(value)}


def _is_its(value: Any) -> bool:
    function = getattr(value, "fget", None) or getattr(value, "func", value)
    return function is print or getattr(function, "__module__", None) == quick.__name__


@pytest.fixture
def plain() -> Iterator[ModuleType]:
    """Triton's interpreter as it comes."""
    spec = there(find_spec("triton.runtime.interpreter"))
    module = module_from_spec(spec)
    there(spec.loader).exec_module(module)
    assert module._patch_lang.__module__ == module.__name__
    assert quick._patch_lang.__module__ != module.__name__
    before = replaced()
    yield module
    assert replaced() == before


def function_that_knows(modules: dict[str, ModuleType]) -> Callable[[], None]:
    def nothing() -> None: ...

    return FunctionType(nothing.__code__, dict(modules))


def replaced_by(interpreter: ModuleType, functions: list[Callable[[], None]]) -> Attributes:
    """What is, once a kernel has been launched and has called device functions; it is put back afterwards."""
    scopes = [interpreter._patch_lang(function) for function in functions]
    seen = replaced()
    for scope in reversed(scopes):
        scope.restore()
    return seen


@pytest.mark.parametrize("known", [*product(KNOWN, KNOWN, KNOWN)], ids=lambda known: "-".join(map("+".join, known)))
def test_as_much_is_replaced(known: tuple[dict[str, ModuleType], ...], plain: ModuleType) -> None:
    functions = [function_that_knows(modules) for modules in known]
    seen = replaced_by(quick, functions)
    assert seen == replaced_by(plain, functions)
    assert len(seen) > 100


def test_element_types_are_triton_s(plain: ModuleType) -> None:
    scalars = [value for value in vars(tl).values() if isinstance(value, tl.dtype) and value != tl.void]
    assert len(scalars) > 15
    for scalar in scalars:
        pointer = tl.pointer_type(scalar)
        for dtype in (scalar, pointer, tl.block_type(scalar, [4]), tl.block_type(pointer, [2, 8])):
            assert quick._get_np_dtype(dtype) == plain._get_np_dtype(dtype), dtype
    with pytest.raises(KeyError):
        quick._get_np_dtype(tl.void)
