"""Snapshots of a function: its code, and the globals and cells that the code reads. Compared, not computed.

A function is tried once, and may compute something else later: a flag among its module's globals was set, a cell of its
closure was filled anew, its code was replaced. Functions that read values which can change in place are refused.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch

# Attributes and functions of these modules are assumed not to change.
_TRUSTED = frozenset(("torch", "math", "operator", "einops"))
# Types whose values cannot change in place.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, CodeType)
_CALLED = (BuiltinFunctionType, MethodDescriptorType)

# Marks a missing global (a builtin, say) and an empty cell.
_ABSENT = object()

_WRITES = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF", "IMPORT_NAME"))
_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))


class State:
    """A snapshot of a function, and of the functions that it calls."""

    __slots__ = ("_read",)

    def __init__(self, function: FunctionType) -> None:
        """Take a snapshot of a function, and of the functions that it calls.

        Raises:
            ValueError: the function reads or writes state that may change without a trace.
        """
        # The globals that a function reads, and the values of all that the function reads.
        self._read: dict[FunctionType, tuple[tuple[str, ...], list[Any]]] = {}
        waiting: list[Any] = [function]
        while waiting:
            value = waiting.pop()
            if isinstance(value, FunctionType) and not _is_trusted(value):
                if vars(value):
                    raise ValueError(f"{value.__name__} has attributes")
                if value not in self._read:
                    names = tuple(dict.fromkeys(_globals_of(value.__code__)))
                    self._read[value] = (names, _read_by(value, names))
                    waiting += self._read[value][1]
            elif isinstance(value, tuple):
                waiting += value
            elif not (value is _ABSENT or isinstance(value, (*_CONSTANTS, *_CALLED)) or _is_trusted(value)):
                raise ValueError(f"it reads a {type(value).__name__}")

    def still(self) -> bool:
        """Return True if nothing in the snapshot has changed."""
        for function, (names, read) in self._read.items():
            now = _read_by(function, names)
            if len(now) != len(read) or not all(map(is_, now, read)):
                return False
        return True


def _is_trusted(value: Any) -> bool:
    """Return True if a value is a module, class or function that is assumed not to change."""
    if not isinstance(value, (ModuleType, type, FunctionType)):
        return False
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return module is not None and module.partition(".")[0] in _TRUSTED


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the names of the globals that code reads, and that functions defined in the code read.

    Raises:
        ValueError: the code writes globals or cells, or imports.
    """
    for instruction in dis.get_instructions(code):
        if instruction.opname in _WRITES:
            raise ValueError(f"it has {instruction.opname}")
        if instruction.opname in _READS:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


def _read_by(function: FunctionType, names: tuple[str, ...]) -> list[Any]:
    """Return a function's code, its defaults, and the values that the code reads now."""
    found: list[Any] = [function.__code__, function.__defaults__, *(function.__kwdefaults__ or {}).values()]
    found += [function.__globals__.get(name, _ABSENT) for name in names]
    return [*found, *(content_of(cell, _ABSENT) for cell in function.__closure__ or ())]


def content_of(cell: CellType, empty: Any = None) -> Any:
    """Return what a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty
