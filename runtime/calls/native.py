"""Look-ups of known calls of every function and every family, by tables of their rows: in C, or in Python.

C, by `upstream/native.c`, is optional, as the launcher in C is, and switched off with it. `Lookup` does the same in
Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from .. import settings
from ..codegen.families import Family
from ..codegen.parameters import ADDED, BACKWARD, DROPPED, DROPPED_BWD, FAMILIES, FORWARD, GROUP, GROUP_BWD, IN_PARTS
from ..codegen.tables import ABSENT, FREE, Table, table_of
from ..codegen.values import Direction
from ..selection import dispatch
from ..upstream import triton_launcher
from ..upstream.torch_internals import dispatch_modes, eager_only
from . import first, launch
from .outputs import LayerNormOutput, NormGradients
from .plan import MISALIGNED, PLAIN, UNREADABLE, Key, PlannedCall, Tensors, known_plan, picking
from .randomness import settled
from .row_layout import may_write

# The indices in `LOOKS`.
_ROWS, _PER_ROW, _SCALE, _SAMPLES, _, _FREE = range(FREE + 1)

_SHAPES = frozenset((tuple, torch.Size, list))

# Bound here, because each attribute of torch takes a look-up.
is_grad_enabled = torch.is_grad_enabled


class _Present(NamedTuple):
    """The facts that follow from which operands of a call are present.

    Attributes:
        mask: a bit for each operand that is there.
        pick: picks these operands.
        in_vectors: of each of them, whether kernels are compiled for its alignment.
        spread: from their addresses, and a 0 behind them, to those of all operands.
        sized: the indices of those whose sizes are compared with x's, and how.
        of_rows: picks those whose strides follow from their sizes where they have no gaps.
        scales: the indices of scales, of which one value for all rows is another kind of call than one per row.
    """

    mask: int
    pick: Callable[[Any], Any]
    in_vectors: list[int]
    spread: Callable[[Any], Any]
    sized: list[tuple[int, int]]
    of_rows: Callable[[Any], Any]
    scales: list[int]


class Lookup:
    """Finds the calls of a table that are known, and launches them.

    Attributes:
        table: the rows.
        plans_of: the object whose `plans` calls are looked up among.
        otherwise: from the key and the arguments to what another call of a function returns.
        settled: what `randomness.settled` is, for the function's direction.
        record: records a call, given its operands, its options and what `launch.recorded_of` returns.
    """

    def __init__(self, table: Table, plans_of: Any, *, otherwise: Any, settled: Any, record: Any, output: type) -> None:
        """Take the table, and what else a call of it needs; launches know the class of their outputs themselves."""
        self.table, self.plans_of = table, plans_of
        self.otherwise, self.settled, self.record = otherwise, settled, record
        self._x = table.operands[table.x]
        self._operands = picking([-1 if index == ABSENT else index for index in table.operands])
        self._outs = picking([-1 if index == ABSENT else index for index in table.operands[table.inputs :]])
        self._words, self._coded = picking(table.words), picking(table.coded)
        self._vectors = picking([at for at, is_vector in enumerate(table.in_vectors) if is_vector])
        self._patterns: dict[tuple[bool, ...], _Present] = {}

    def _present(self, pattern: tuple[bool, ...]) -> _Present:
        """Make and keep what follows from which operands are None."""
        looks = self.table.looks
        indices = [at for at, is_absent in enumerate(pattern) if not is_absent]
        present = _Present(
            mask=sum(1 << at for at in indices),
            pick=picking(indices),
            in_vectors=[self.table.in_vectors[at] for at in indices],
            spread=picking([indices.index(at) if at in indices else -1 for at in range(len(pattern))]),
            sized=[(at, looks[at]) for at in indices if looks[at] < _FREE and at != self.table.x],
            of_rows=picking([at for at in indices if looks[at] <= _SCALE]),
            scales=[at for at in indices if looks[at] == _SCALE],
        )
        self._patterns[pattern] = present
        return present

    @eager_only
    def call(self, *arguments: Any) -> Any:
        """Launch a call of a function by all its arguments in order, or leave the call to `otherwise`."""
        table, at = self.table, self.table.dropout
        p, rng = arguments[at : at + 2] if at >= 0 else (0.0, None)
        if p != 0.0 or rng is not None or type(p) is not float:
            arguments = (*arguments[:at], *self.settled(p, rng, arguments[self._x]), *arguments[at + 2 :])
        if table.wants >= 0 and arguments[table.wants].__class__ is list:
            arguments = (*arguments[: table.wants], tuple(arguments[table.wants]), *arguments[table.wants + 1 :])
        key, _, planned = self._look_up(table.norm, arguments, ())
        if planned is not None:
            if table.rstd >= 0:
                return launch.run_backward(planned)
            plan, addresses, tensors, _, m, _ = planned
            out, residual_out = self._outs((*arguments, None))
            if (out is None and residual_out is None) or may_write(
                plan.extents, addresses, tensors, m, out, residual_out
            ):
                return launch.run(planned, out, residual_out)
        return self.otherwise(key, *arguments)

    @eager_only
    def find(self, operands: Sequence[Any], options: Sequence[Any]) -> tuple[Key | None, bool, PlannedCall | None]:
        """Look a call of the functional API up.

        Returns:
            The key of the call, or None if the call cannot be known; whether a gradient is due; and what
            `launch.run` and `launch.run_recorded` take of the call, or None if no call like it is known.
        """
        norm, *others = options
        values, saves = (*operands, *others), self.table.saves
        # Only autograd knows whether a gradient is due.
        is_due = saves >= 0 and (*values, None)[saves] is None
        records = (is_grad_enabled(),) if is_due else ()
        key, known, planned = self._look_up(norm, values, records)
        return key, planned is not None and records == (True,) and known.trains, planned

    @eager_only
    def normalise(self, operands: Sequence[Any], options: Sequence[Any], *normalized_shape: Any) -> Any:
        """Return y of a known call, or y and the sum if there is one, recorded if a gradient is due; else None.

        Arguments need no check before: a call that would copy or refuse something is not known. A call with a
        normalized_shape that is not x's last dimension is not known either.
        """
        _, records, planned = self.find(operands, options)
        if planned is None or not all(is_last(shape, planned[3]) for shape in normalized_shape):
            return None
        if records:
            return self.record(operands, options, launch.recorded_of(planned))
        y, total, *_ = launch.run(planned)
        return y if total is None else (y, total)

    @eager_only
    def gradients(self, operands: Sequence[Any], options: Sequence[Any]) -> tuple[Key | None, NormGradients | None]:
        """Return the key of a backward pass, or None; and the gradients, or None if no pass like it is known."""
        norm, *others = options
        key, _, planned = self._look_up(norm, (*operands, *others), ())
        return key, None if planned is None else launch.run_backward(planned)

    @eager_only
    def known_gradients(self, arrived: Tensors, args: Any, due: tuple[bool, ...]) -> tuple[Key, Any]:
        """Return the key of a backward pass whose rows are in parts; and the gradients, or None if no pass is like it.

        Args:
            arrived: its tensors.
            args: what else a backward pass has to know; it says which operands are there.
            due: which operands have a gradient that is asked for.
        """
        # Which other tensors are there follows from args.
        key = (self.table.head, args, due, arrived[1] is None)
        ready, addresses = known_plan(self.plans_of.plans, key, arrived)
        return key, None if ready is None else ready.run(arrived, addresses)

    def _look_up(self, norm: Any, values: tuple[Any, ...], records: tuple[bool, ...]) -> tuple[Key | None, Any, Any]:
        """Return the key, the kind of call and what launches take; None for what is missing."""
        table, x = self.table, values[self._x]
        cls: type = x.__class__
        # Anything else may answer the same questions: a proxy of torch.fx records what it is asked.
        if cls not in PLAIN:
            return None, None, None
        tensors = self._operands((*values, None))
        pattern = tuple([tensor is None for tensor in tensors])
        present = self._patterns.get(pattern) or self._present(pattern)
        there = present.pick(tensors)
        try:
            shape = x.shape
            n = shape[-1]
            key: Key = (table.head, norm, n, present.mask)
            for at in present.scales:
                key = (*key, tensors[at].numel() == 1)
            key = (*key, *records, *self._words(values), *map(type, self._coded(values)))
            m, gaps = shape[0], False
            if len(shape) != 2:
                m = x.numel() // n
                for tensor in present.of_rows(tensors):
                    gaps = gaps or not tensor.is_contiguous()
            if gaps or present.mask & table.samples:
                # Row strides are then found from all sizes but the first, and strides, together.
                key = (*key, gaps, shape[1:])
            for known in self.plans_of.plans.get(key, ()):
                if known.fits(*there):
                    break
            else:
                return key, None, None
        except UNREADABLE:
            return None, None, None
        if (
            forward_ad._current_level >= 0
            or dispatch_modes()
            or (table.norm is not None and known.trains and is_grad_enabled())
        ):
            return key, None, None
        numbers = []
        for argument, needs, least, most, norms, defaults in table.numbers:
            value = 0.0 if argument == ABSENT else values[argument]
            if value is None:
                value = defaults.get(norm)
            if value.__class__ is not float or not least <= value <= most:
                return key, None, None
            if value != 0.0 and needs != ABSENT and (values[needs] is None or norm not in norms):
                return key, None, None
            if value != 0.0 or argument != table.dropout:
                numbers.append(value)
        for at, look in present.sized:
            if not _is_sized(tensors[at], look, shape):
                return key, None, None
        bits, pointers = 0, []
        for tensor, is_vector in zip(there, present.in_vectors, strict=True):
            at = tensor.data_ptr()
            # A tensor without memory is of no call that is known.
            if not at:
                return key, None, None
            pointers.append(at)
            if is_vector:
                bits |= at
        addresses = present.spread((*pointers, 0))
        plan = known.plan_at(*self._vectors(addresses)) if bits & MISALIGNED else known.plan
        if plan is None:
            return key, None, None
        if table.rstd >= 0 and not addresses[table.mean] and (to_rstd := plan.at(shape).layout.to_rstd):
            # One tensor holds the means, and rstd behind them.
            packed = addresses[table.rstd]
            addresses = (*addresses[: table.mean], packed, packed + to_rstd, *addresses[table.rstd + 1 :])
        return key, known, (plan, addresses[: table.inputs], tensors[: table.inputs], shape, m, tuple(numbers))


def is_last(normalized_shape: Sequence[int], shape: torch.Size) -> bool:
    """Return True if a normalized_shape is the last dimension of a shape."""
    # The class of each size, because 64.0 is equal to 64, and a dictionary has a length too.
    return (
        normalized_shape.__class__ in _SHAPES
        and len(normalized_shape) == 1
        and normalized_shape[0].__class__ is int
        and normalized_shape[0] == shape[-1]
    )


def _is_sized(tensor: torch.Tensor, look: int, shape: torch.Size) -> bool:
    """Return True if the sizes that a guard leaves open are x's."""
    own = tensor.shape
    if look == _ROWS:
        return own == shape
    if look == _PER_ROW:
        return own == shape[:-1]
    if look == _SCALE:
        return tensor.numel() == 1 or own[: len(shape) - 1] == shape[:-1]
    return len(own) == 1 or own[0] == (shape[0] if look == _SAMPLES else shape[-2])


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
