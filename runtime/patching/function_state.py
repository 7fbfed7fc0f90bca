"""Snapshots of a function: its code, and the globals and cells that the code reads. Compared, not computed.

A function is tried once, and may compute something else later: a flag among its module's globals was set, a cell of its
closure was filled anew, its code was replaced. Functions that read values which can change in place are refused.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch

# Attributes and functions of these modules are assumed not to change.
_TRUSTED = frozenset(("torch", "math", "operator", "einops"))
# Types whose values cannot change in place, or whose contents are looked at.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, tuple, torch.dtype, torch.device, CodeType)
_CALLED = (BuiltinFunctionType, MethodDescriptorType)

# Marks a missing global (a builtin, say) and an empty cell.
_ABSENT = object()

_WRITES = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF", "IMPORT_NAME"))
_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))


class State:
    """A snapshot of a function, and of the functions that it calls."""

    __slots__ = ("_function", "_read")

    def __init__(self, function: FunctionType) -> None:
        """Take a snapshot of a function, and of the functions that it calls.

        Raises:
            ValueError: the function reads or writes state that may change without a trace.
        """
        self._function = function
        self._read = list(_reached(function, set()))
        for value in self._read:
            if isinstance(value, FunctionType):
                if vars(value) and not _is_trusted(value):
                    raise ValueError(f"{value.__name__} has attributes")
            elif not (value is _ABSENT or isinstance(value, (*_CONSTANTS, *_CALLED)) or _is_trusted(value)):
                raise ValueError(f"it reads a {type(value).__name__}")

    def still(self) -> bool:
        """Return True if nothing in the snapshot has changed."""
        try:
            now = list(_reached(self._function, set()))
        except ValueError:
            return False
        return len(now) == len(self._read) and all(map(is_, now, self._read))


def _reached(value: Any, seen: set[FunctionType]) -> Iterator[Any]:
    """Yield a value that a function reads, and all values that are read through it."""
    yield value
    within: tuple[Any, ...] = value if isinstance(value, tuple) else ()
    if isinstance(value, FunctionType) and value not in seen and not _is_trusted(value):
        seen.add(value)
        read = (value.__globals__.get(name, _ABSENT) for name in _globals_of(value.__code__))
        cells = (content_of(cell, _ABSENT) for cell in value.__closure__ or ())
        within = (value.__code__, value.__defaults__, *(value.__kwdefaults__ or {}).values(), *read, *cells)
    for each in within:
        yield from _reached(each, seen)


def _is_trusted(value: Any) -> bool:
    """Return True if a value is a module, class or function that is assumed not to change."""
    if not isinstance(value, (ModuleType, type, FunctionType)):
        return False
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return module is not None and module.partition(".")[0] in _TRUSTED


@lru_cache(256)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of the globals that code reads, and that functions defined in the code read.

    Raises:
        ValueError: the code writes globals or cells, or imports.
    """
    names = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in _WRITES:
            raise ValueError(f"it has {instruction.opname}")
        if instruction.opname in _READS:
            names.append(instruction.argval)
    inner = (_globals_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return tuple(dict.fromkeys((*names, *chain.from_iterable(inner))))


def content_of(cell: CellType, empty: Any = None) -> Any:
    """Return what a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty
