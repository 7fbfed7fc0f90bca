"""Look-ups of known calls, one for each function and each family: in C where that can be had, by `upstream/native.c`.

C is optional, as the launcher in C is, and switched off with it: `Lookup` of `lookup` does the same in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from .. import settings
from ..codegen.families import Family
from ..codegen.parameters import ADDED, BACKWARD, DROPPED, DROPPED_BWD, FAMILIES, FORWARD, GROUP, GROUP_BWD, IN_PARTS
from ..codegen.tables import Table, table_of
from ..codegen.values import Direction
from ..selection import dispatch
from ..upstream import triton_launcher
from ..upstream.torch_internals import dispatch_modes
from . import first, launch
from .known import MISALIGNED, PLAIN, UNREADABLE
from .lookup import Lookup
from .outputs import LayerNormOutput, NormGradients
from .overlap import may_write
from .randomness import settled

# Records a call: from its operands, its options and what was launched to what the call returns. By look-ups' names.
Records = Mapping[str, Callable[..., Any]]

_FUNCTIONS = [(name, family, norm) for family in (FORWARD, BACKWARD) for norm, name in family.functions.items()]
_FAMILIES = {
    "recorded": FORWARD,
    "added_ahead": FORWARD,
    "gradients": BACKWARD,
    **{family.name: family for family in (DROPPED, ADDED, *FAMILIES, GROUP) if family.name},
    **{f"{family.name}_gradients": family for family in (DROPPED_BWD, *IN_PARTS, GROUP_BWD)},
}


def _first(family: Family, table: Table, key: Any, *arguments: Any) -> Any:
    start()
    assert table.norm is not None
    return first.first(family, table.norm, key, dict(zip(table.names, arguments, strict=True)))


def calls_among(plans_of: Any, make: Callable[..., Any] = Lookup, records: Records = MappingProxyType({})) -> Any:
    """Return the look-ups of calls among the `plans` of an object.

    Each function has an attribute of its name, which is called with all arguments in order. Each family has a look-up
    of its name, for calls of the functional API; those of the norms alone are `recorded`, `added_ahead` and
    `gradients`.

    Args:
        plans_of: the object.
        make: makes a look-up of a table; see `makes`.
        records: record calls.
    """
    calls = SimpleNamespace()
    for name, family, norm in (*_FUNCTIONS, *[(name, family, None) for name, family in _FAMILIES.items()]):
        table, is_forward = table_of(family, norm), family.direction is Direction.FORWARD
        look_up = make(
            table,
            plans_of,
            otherwise=partial(_first, family, table),
            settled=partial(settled, draws=is_forward),
            record=records.get(name),
            output=LayerNormOutput if is_forward else NormGradients,
        )
        setattr(calls, name, look_up if norm is None else look_up.call)
    return calls


def _in_c(make: Callable[..., Any], table: Table, plans_of: Any, **others: Any) -> Any:
    """Make the look-up of a table in C."""
    return make(
        **table._asdict(),
        **others,
        plans_of=plans_of,
        plain=PLAIN,
        unreadable=UNREADABLE,
        forward_ad=forward_ad,
        dispatch_modes=dispatch_modes,
        is_grad_enabled=torch.is_grad_enabled,
        may_write=may_write,
        increment_version=increment_version,
        run=launch.run,
        run_recorded=launch.run_recorded,
        run_backward=launch.run_backward,
        misaligned=MISALIGNED,
    )


_records: dict[str, Callable[..., Any]] = {}
_make: Callable[..., Any] = Lookup
calls = calls_among(dispatch)


def record_by(name: str, record: Callable[..., Any]) -> None:
    """Have a function record the calls of a look-up."""
    global calls
    _records[name] = record
    if _make is Lookup:
        # Making all anew takes 1.5 ms, at each family's import.
        getattr(calls, name).record = record
    else:
        calls = calls_among(dispatch, _make, _records)


@cache
def start() -> None:
    """Have `calls` be in C from now on, if that can be had.

    Raises:
        SettingError: NORMFORGE_NATIVE_LAUNCHER or NORMFORGE_FROZEN is neither 0 nor 1.
    """
    global calls, _make
    _make = makes(build=not settings.frozen())
    calls = calls_among(dispatch, _make, _records)


def makes(*, build: bool) -> Callable[..., Any]:
    """Return what makes look-ups of tables, in C if that can be had; see `triton_launcher.library`."""
    module = triton_launcher.library(build=build)
    return Lookup if module is None else partial(_in_c, module.Lookup)
