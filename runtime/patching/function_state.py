"""Values that a function reads beside its arguments, and that may change after a trial of the function.

A function is tried once, and may compute something else later: a global of some module, an attribute of a class or of a
function, a variable of a closure, an environment variable or a flag of torch's was set. `Reads` watches a trial. A
norm's forward that reads any of these is refused. A function that modulates may read constants and functions: it is
tried again once one of these changed.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Iterable
from functools import cache
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

# Attributes and functions of these modules are assumed not to change.
_TRUSTED = frozenset(("torch", "math", "operator", "einops", "builtins", "contextlib", "functools", "warnings"))
# Modules whose functions are not looked into; os reads the environment, and others have a package "test" too. torch
# 2.11 looks up types in its first backward passes.
_PASSED = (sys.stdlib_module_names - {"os", "test"}) | _TRUSTED | {__name__.partition(".")[0], "typing_extensions"}
# Types whose values cannot change in place.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# Types of values that are no numbers, and neither switches nor words; the last is that of Tensor's methods.
_NAMED = (torch.dtype, torch.device, torch.memory_format, torch.jit.ScriptFunction, type(torch.Tensor.add))
# Types of values that hold others under names which a program may set.
_NAMESPACES = (ModuleType, type, FunctionType)
# Functions that return what a program set, or read what their caller's text does not name.
_SETTINGS = ("get_", "is_autocast", "is_grad", "is_inference", "is_deterministic", "are_deterministic")
_HIDDEN = (type, globals, locals, vars, eval, exec, open, __import__)

# Marks a missing global (a builtin, say) and an empty cell.
_ABSENT = object()

_WRITES = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF", "IMPORT_NAME"))
_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
_CELLS = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "STORE_DEREF", "DELETE_DEREF"))
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))


class Reads:
    """The values that functions read beside their arguments while a `with` runs, where the values may change later.

    Every line that runs is looked at, in each function of Python's but those of libraries. What the caller's module
    holds is not looked at. Functions run unwatched first: a first call may import, and fill caches.

    Attributes:
        names: the names of values whose change would not be seen.
    """

    def __init__(self, *own: type) -> None:
        """Start with no names.

        Args:
            own: the classes that the functions are methods of, which the functions may name.
        """
        self.names: set[str] = set()
        self._own = own
        mine = [value for cls in own if not _is_trusted(cls) for value in vars(cls).values()]
        # Methods are reached by attributes, so that their defaults are not looked at by `_look`.
        self._open = {each.__code__ for each in mine if isinstance(each, FunctionType) and not _is_fixed(each)}
        # Variables of the functions that run, which inner functions read as their cells.
        self._local: dict[CodeType, set[str]] = {}
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._functions: dict[FunctionType, list[Any]] = {}

    def follow(self, function: FunctionType) -> None:
        """Have `still` compare a function, and the constants and functions that are read from here on."""
        self._functions[function] = _parts_of(function)
        if vars(function) or not _is_fixed(function):
            self.names.add(function.__name__)

    def __enter__(self) -> None:
        self._before, self._restore = sys.gettrace(), gc.enable if gc.isenabled() else gc.disable
        # The garbage collector would call its callbacks (JAX has one) within a function that is watched.
        gc.disable()
        sys.settrace(self._enter)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        self._restore()

    def still(self) -> bool:
        """Return True if nothing that is followed has changed."""
        return all(held.get(name, _ABSENT) is value for held, name, value in self._globals) and all(
            len(parts) == len(now := _parts_of(function)) and all(map(is_, now, parts))
            for function, parts in self._functions.items()
        )

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _PASSED:
            return None
        code = frame.f_code
        # Reached otherwise than by its name: through a module, a class or a tuple.
        is_named = code in self._local or any(each.__code__ is code for each in self._functions)
        if code in self._open or (self._functions and not is_named):
            self.names.add(code.co_name)
        variables = {*code.co_cellvars, *self._local.get(code, ())}
        self._local |= {inner: variables for inner in code.co_consts if isinstance(inner, CodeType)}
        return self._look

    def _look(self, frame: FrameType, event: str, arg: object) -> Any:
        for operation, path in _loads_of(frame.f_code).get(frame.f_lineno, ()) if event == "line" else ():
            name, is_cell = path[0], operation in _CELLS
            if is_cell and (name in frame.f_code.co_cellvars or name in self._local.get(frame.f_code, ())):
                continue
            outside = frame.f_locals if is_cell else frame.f_globals
            value = outside.get(name, frame.f_builtins.get(name, _ABSENT))
            # A cell is a part of the function that reads it.
            if self._functions and not is_cell:
                self._globals.append((outside, name, outside.get(name, _ABSENT)))
            if operation in _WRITES or not (self._follows(name, value) or _is_fixed(value, path[1:], self._own)):
                self.names.add(".".join(path))
        return self._look

    def _follows(self, name: str, value: Any) -> bool:
        """Return True if a later change of a value is seen, or the value says what is installed."""
        followed = bool(self._functions) and isinstance(value, (*_CONSTANTS, FunctionType)) and not _is_trusted(value)
        if followed and isinstance(value, FunctionType):
            self.follow(value)
        return followed or (isinstance(value, bool) and "available" in name)


def _is_fixed(value: Any, path: Iterable[str] = (), own: tuple[type, ...] = ()) -> bool:
    """Return True if a value, or an attribute below it, is a function or a class, or is assumed not to change.

    Args:
        value: the value.
        path: the names of the attributes, each of the one before.
        own: classes that may be named.
    """
    trusted = _is_trusted(value)
    for name in path:
        if not isinstance(value, _NAMESPACES):
            break
        value = getattr(value, name, _ABSENT)
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    is_function = isinstance(value, BuiltinFunctionType) or _is_trusted(value)
    if any(value is each for each in _HIDDEN) or (is_function and value.__name__.startswith(_SETTINGS)):
        return False
    if isinstance(value, FunctionType):
        return all(isinstance(each, _CONSTANTS) for each in _defaults_of(value))
    if isinstance(value, MethodType):
        return _is_trusted(value.__func__)
    if isinstance(value, BuiltinFunctionType):
        return isinstance(value.__self__, (type(None), ModuleType, type))
    if isinstance(value, (ModuleType, type)):
        return _is_trusted(value) or value in own
    # Numbers of trusted modules are pi and infinity.
    return isinstance(value, (*_NAMED, float) if trusted else _NAMED)


def _defaults_of(function: FunctionType) -> list[Any]:
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


@cache
def _loads_of(code: CodeType) -> dict[int, list[tuple[str, tuple[str, ...]]]]:
    """Return what each line of code reads or writes outside the function: operations, and the names with attributes."""
    starts, line = dict(dis.findlinestarts(code)), code.co_firstlineno
    loads: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
    reading: list[tuple[str, tuple[str, ...]]] | None = None
    for each in dis.get_instructions(code):
        line = starts.get(each.offset) or line
        if each.opname in _ATTRIBUTES and reading is not None:
            operation, path = reading.pop()
            reading.append((operation, (*path, each.argval)))
        elif each.opname in _READS | _CELLS | _WRITES or each.argval == "__class__":
            reading = loads.setdefault(line, [])
            reading.append((each.opname, (each.argval,)))
        else:
            reading = None
    return loads


def _is_trusted(value: Any) -> bool:
    """Return True if a value is a module, class or function that is assumed not to change."""
    if not isinstance(value, _NAMESPACES):
        return False
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return module is not None and module.partition(".")[0] in _TRUSTED


def _parts_of(function: FunctionType) -> list[Any]:
    """Return a function's code, its defaults, and the contents of its cells."""
    cells = (content_of(cell, _ABSENT) for cell in function.__closure__ or ())
    return [function.__code__, *_defaults_of(function), *cells]


def content_of(cell: CellType, empty: Any = None) -> Any:
    """Return what a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty
