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
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_CALLED = (BuiltinFunctionType, MethodDescriptorType)

# Marks a missing global (a builtin, say) and an empty cell.
_ABSENT = object()

_WRITES = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF", "IMPORT_NAME"))
_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))


class State:
    """A snapshot of a function, and of the functions that it calls."""

    __slots__ = ("_read", "_sources")

    def __init__(self, function: FunctionType) -> None:
        """Take a snapshot of a function, and of the functions that it calls.

        Raises:
            ValueError: the function reads or writes state that may change without a trace.
        """
        self._sources: list[tuple[FunctionType, tuple[str, ...]]] = []
        self._read: list[Any] = []
        self._add(function)

    def _add(self, function: FunctionType) -> None:
        if any(function is other for other, _ in self._sources):
            return
        if vars(function):
            raise ValueError(f"{function.__name__} has attributes")
        names = tuple(sorted(set(_globals_of(function.__code__))))
        self._sources.append((function, names))
        read = _read_by(function, names)
        self._read += read
        for value in read[1:]:
            self._look_at(value)

    def _look_at(self, value: Any) -> None:
        if isinstance(value, tuple):
            for each in value:
                self._look_at(each)
        elif isinstance(value, FunctionType) and not _is_trusted(value.__module__):
            self._add(value)
        elif not (value is _ABSENT or isinstance(value, (*_CONSTANTS, *_CALLED)) or _is_known(value)):
            raise ValueError(f"it reads a {type(value).__name__}")

    def still(self) -> bool:
        """Return True if nothing in the snapshot has changed."""
        now = [each for function, names in self._sources for each in _read_by(function, names)]
        return len(now) == len(self._read) and all(map(is_, now, self._read))


def _is_known(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return _is_trusted(value.__name__)
    return isinstance(value, (type, FunctionType)) and _is_trusted(value.__module__)


def _is_trusted(module: str | None) -> bool:
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
    found: list[Any] = [function.__code__, function.__defaults__]
    if function.__kwdefaults__:
        found += function.__kwdefaults__.values()
    for name in names:
        found.append(function.__globals__.get(name, _ABSENT))
    return [*found, *(content_of(cell, _ABSENT) for cell in function.__closure__ or ())]


def content_of(cell: CellType, empty: Any = None) -> Any:
    """Return what a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty
