"""Plans of checked calls, and the kinds of call that they serve.

A plan holds the kernels, made ready, and the types of their results, forward and backward alike. Which tensors there
are, in what order launches bring them and what types they have follows from the rows of `codegen.parameters`; which
kernels run, with what grids and constants, from those of `kernels.pipelines`.

The key of a call holds its modes, N, and which tensors are present. Under a key are the kinds of call that were checked
before, the newest first. A kind's guard compares class, device, dtype, layout, negation and requires_grad of a call's
tensors with those of the checked call. Each call is checked for whatever no guard can hold: the number of rows,
addresses, numbers, and the overlap of outputs with other tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial, reduce
from itertools import accumulate
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch

from ..call_kinds import ROWS
from ..codegen.families import Family, Kind, Parameter, Result
from ..codegen.values import Reduce
from ..kernels.assembly import SUMS, Assembly, Facts, assemble
from ..kernels.gpu import ALIGNMENT, Target, pointer_type, target_of
from ..kernels.launcher import Launcher
from ..kernels.strides import RowStride, row_alignment
from ..selection import dispatch
from ..upstream.dynamo_guards import Fits, allocator, contiguous_strides, guard
from ..upstream.triton_launcher import Grid, Launch
from .check import Call
from .outputs import aligned_length, packing, y_shape
from .row_layout import REPLACEABLE, Extent, Extents, extent_of, stride_of

# An address with any of these bits is not aligned.
MISALIGNED = ALIGNMENT - 1

# The address of a tensor without memory: no tensor has this address, which is not aligned.
NOWHERE = 1

# Anything else may answer the same questions and be something else: a subclass with a storage of its own kind, say.
PLAIN: frozenset[type] = frozenset((torch.Tensor, torch.nn.Parameter))

# Errors from reading an attribute of something that is no plain tensor, or of a tensor without memory (a sparse one),
# and from looking up a key with an argument that cannot be hashed.
UNREADABLE = (AttributeError, IndexError, RuntimeError, TypeError, ZeroDivisionError)

# The number of kinds under one key before the oldest is forgotten.
_MOST_KINDS = 16

Key = tuple[Any, ...]
Addresses = tuple[int, ...]
Tensors = tuple["torch.Tensor | None", ...]
# Sizes and strides of a tensor, None for those that may be others in a call of the same kind.
Pattern = tuple[list["int | None"], list["int | None"]]
Patterns = list[Pattern]
# A plan, the addresses of what is read, these tensors, x's shape and its rows, and the numbers that launches bring:
# eps, weight_offset and dropout_p, as far as the family has them; dropout_p only if something is dropped.
PlannedCall = tuple[Any, Addresses, Tensors, torch.Size, int, tuple[float, ...]]


class Known:
    """One kind of call.

    Attributes:
        fits: whether the tensors that are there are like those of this kind.
        present: picks them from all that there could be.
        patterns: their sizes and strides, as far as they are settled.
        trains: whether one of them requires a gradient, be gradients enabled or not.
        plan: what calls come to whose addresses are all aligned, or None.
    """

    __slots__ = ("_misaligned", "fits", "patterns", "plan", "present", "trains")

    def __init__(self, tensors: Tensors, patterns: Patterns) -> None:
        """See what some tensors are like.

        Args:
            tensors: all that there could be, None for those that are not there.
            patterns: of those that are there.
        """
        there = [tensor for tensor in tensors if tensor is not None]
        self.present: Callable[[Any], Any] = picking([index for index, each in enumerate(tensors) if each is not None])
        self.fits = _guard(there, patterns)
        self.patterns = patterns
        self.trains = any(tensor.requires_grad for tensor in there)
        self.plan: Any = None
        self._misaligned: dict[tuple[bool, ...], Any] = {}

    def plan_at(self, *addresses: int) -> Any:
        """Return the plan of calls with some misaligned address; None if there is no plan, or no memory."""
        return None if NOWHERE in addresses else self._misaligned.get(_alignment(addresses))

    def learn(self, addresses: Sequence[int], plan: object) -> None:
        """Have `plan` or `plan_at` give a plan."""
        if any(at & MISALIGNED for at in addresses):
            self._misaligned[_alignment(addresses)] = plan
        else:
            self.plan = plan


def remember(
    among: dispatch.Plans,
    key: Key | None,
    tensors: Tensors,
    free: Sequence[int],
    addresses: Sequence[int],
    plan: object,
) -> None:
    """Make calls known that are like one that was checked, if a guard can tell them from others.

    Args:
        among: the `dispatch.plans` that were in use when the call set out.
        key: what the call was looked up by; None for a call that cannot be known.
        tensors: all that it could bring, None for those that are not there.
        free: of each, how many of its leading sizes may be any.
        addresses: of each that is read in vectors, 0 for those that are not there.
        plan: what it came to.
    """
    if key is None or not all(each is None or (each.__class__ in PLAIN and not each.is_neg()) for each in tensors):
        return
    kinds: tuple[Known, ...] = among.get(key, ())
    patterns = [_pattern(tensor, any_) for tensor, any_ in zip(tensors, free, strict=True) if tensor is not None]
    # A single row fits a kind of many. Its stride means nothing, so that its plan is none for them.
    known = (one for one in kinds if one.patterns == patterns and one.fits(*one.present(tensors)))
    kind = next(known, None) or Known(tensors, patterns)
    kind.learn(addresses, plan)
    # The first one that fits is taken.
    dispatch.remember(among, key, (kind, *[one for one in kinds if one is not kind][: _MOST_KINDS - 1]))


def known_plan(among: dispatch.Plans, key: Key, tensors: Tensors) -> tuple[Any, list[int]]:
    """Return the plan of a call like one before, or None, and the addresses of its tensors.

    Args:
        among: the `dispatch.plans` in use.
        key: what the call is looked up by; its kinds were remembered with the addresses of all tensors.
        tensors: all that the call could bring.
    """
    for known in among.get(key, ()):
        if known.fits(*known.present(tensors)):
            addresses = addresses_of(tensors)
            is_aligned = not reduce(or_, addresses) & MISALIGNED
            return known.plan if is_aligned else known.plan_at(*addresses), addresses
    return None, []


def addresses_of(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """Return where tensors lie, 0 for those that are not there."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _alignment(addresses: Sequence[int]) -> tuple[bool, ...]:
    return tuple([not at & MISALIGNED for at in addresses])


def picking(indices: Sequence[int]) -> Callable[[Any], Any]:
    """Return what picks the items at some indices as a tuple."""
    if not indices:
        return lambda items: ()
    # For one index, itemgetter picks the item rather than a tuple.
    return itemgetter(*indices) if len(indices) > 1 else itemgetter(slice(indices[0], indices[0] + 1))


def _guard(tensors: Sequence[torch.Tensor], patterns: Patterns) -> Fits:
    first = [next(index for index, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    once = sorted(set(first))
    fits = guard([tensors[index] for index in once], *zip(*[patterns[index] for index in once], strict=True))
    # An output that is an input, say: a guard takes no tensor twice.
    pick = picking(once)
    twice = [(index, other) for index, other in enumerate(first) if index != other]
    least = 2 if any(map(_is_ragged, tensors)) else 0
    if not twice and not least:
        return fits

    def fits_too(*others: torch.Tensor) -> bool:
        return others[0].shape[0] >= least and all(others[a] is others[b] for a, b in twice) and fits(*pick(others))

    return fits_too


def _is_ragged(tensor: torch.Tensor) -> bool:
    """Return True if a single row, whose stride means nothing, would be read by another kernel than these rows."""
    is_apart = tensor.dim() > 1 < tensor.shape[0] and tensor.stride(-1) == 1 and not tensor.is_contiguous()
    return is_apart and row_alignment(tensor.stride(0)) != row_alignment(tensor.shape[-1])


def _pattern(tensor: torch.Tensor, free: int) -> Pattern:
    """Return the pattern of a tensor of which so many leading sizes may be any."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if strides == contiguous_strides(shape):
        # How far apart dimensions are depends on the sizes of those behind them.
        outer = max(free - 1, 0)
        return [*[None] * free, *shape[free:]], [*[None] * outer, *strides[outer:]]
    if free == 1 and shape[0] > 1:
        return [None, *shape[1:]], [*strides]
    # The stride of one row means nothing, and several depend on the shape.
    return [*shape], [*strides]


# Plans

_BYTES = pointer_type("uint8", aligned=False)

# How many shapes, and M, a plan, or a kind of call, keeps the launches of.
LAYOUTS = 64


class Prepared(NamedTuple):
    """The kernels for one class of M, ready to be launched.

    Attributes:
        assembly: their recipes.
        launchers: of each recipe, in order.
    """

    assembly: Assembly
    launchers: tuple[Launcher, ...]


# How to make a tensor: size, strides and dtype; None for a tensor that is not asked for.
Make = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
Makes = tuple["Make | None", ...]


class Layout(NamedTuple):
    """How a call's kernels are launched for one M and number of parts, and what lies where in their memory.

    Attributes:
        steps: how the kernels that walk the rows are launched, in order, and their grids.
        finish: how the kernel is launched that adds up their partial sums, and its grid; None where there is none.
        adds: picks what that kernel takes from `programs`, what is not there, the sums, and where their parts start.
        programs: how many programs share the rows of a part.
        offsets: where the partial sums of each sum of the family start, in bytes, or for a sum that is not wanted those
            of the next one, which no kernel reads; then where each of the values starts that the first step leaves for
            the next.
        memory: how to make the memory that they start in; None where there is none.
        sums: how many of the results are sums, which follow those that are rows.
        to_rstd: where one tensor holds both statistics, the bytes from the means to rstd; 0 if there are no means.
        by_address: whether launches take addresses, and not tensors.
        exchange: how many int64 the programs exchange values through.
        in_c: whether launches take addresses alone, and no memory to exchange values through.
    """

    steps: tuple[tuple[Launch, Grid], ...] = ()
    finish: tuple[Launch, Grid] | None = None
    adds: Callable[[Any], tuple[Any, ...]] = tuple
    programs: int = 0
    offsets: tuple[int, ...] = ()
    memory: Make | None = None
    sums: int = 0
    to_rstd: int = 0
    by_address: bool = False
    exchange: int = 0
    in_c: bool = False


class Sized(NamedTuple):
    """How calls of one shape are launched.

    Attributes:
        layout: the launches.
        numbers: what the launches bring behind all pointers; the numbers that a look-up reads follow.
        makes: how to make the results.
        recorded: how to make the results of a forward call that autograd records: rstd holds the means too.
    """

    layout: Layout
    numbers: tuple[float, ...]
    makes: Makes
    recorded: Makes = ()


def _adds(sums: int) -> Callable[[Any], tuple[Any, ...]]:
    """Return `Layout.adds` for kernels of some sums: none takes fewer than a plain norm has."""
    absent = [1] * (len(SUMS) - sums)
    indices = [*range(2 + sums, 2 + 2 * sums), *absent, *range(2, 2 + sums), *absent, 0]
    pick: Callable[[Any], tuple[Any, ...]] = itemgetter(*indices)
    return pick


def make_of(size: Sequence[int], dtype: torch.dtype | None) -> Make | None:
    """Return how to make a contiguous tensor."""
    whole = tuple(size)
    return None if dtype is None else (whole, contiguous_strides(whole), dtype)


class Plan:
    """All that launches of one kind of call share, whatever their M. It holds none of a call's tensors.

    Attributes:
        mode: the call's.
        n: row length.
        family: the rows of the call.
        sizes: see `Call`.
        facts: what the kernels depend on besides M, the instance that serves the call among it.
        empty: makes tensors on the device.
        dtypes: of the family's results; None of what is not asked for.
        sum_dtypes: those of the sums over rows among the results; empty forward.
        saves_mean: whether kernels write the rows' means, or read them.
        as_bytes: the names of the tensors that kernels are handed as bytes.
        extents: where the tensors lie that outputs must not meet.
        at: from x's shape to the `Sized` of a call's launches.
        layout: from M, and how many parts the rows are in, to the `Layout` of the launches.
    """

    def __init__(self, call: Call, misaligned: Collection[str], target: Target | None = None) -> None:
        """Find the instance that serves a call; a backward call's dy is there.

        Args:
            call: what was asked.
            misaligned: which pointers, by their slots, are at no multiple of 16 bytes.
            target: the GPU that the call is for, if x, then a stand-in for another tensor, is elsewhere: kernels are
                known then, and not compiled. None is x's device.

        Raises:
            MissingInstanceError: nothing serves the call and nothing may be generated.
        """
        self.family = family = call.function.family
        self._launches_on = call.x.device if target is None else None
        self.empty = allocator(call.x.device)
        dtypes, strides = _dtypes(call), _strides(call)
        self.dtypes = tuple([dtypes[row.name] for row in family.results])
        self.sum_dtypes = tuple([dtypes[row.name] for row in family.results if row.is_sum])
        self.saves_mean = dtypes.get("mean") is not None
        self.n = call.n
        self._take(call.mode, call.sizes, target or target_of(call.x.device), dtypes, strides, misaligned)
        types = self.facts.types
        self.as_bytes = [row.name for row in family.tensors if str(types.get(row.slot)).startswith(_BYTES)]
        self.extents = _extents(family, dtypes, strides, self.n) if family.outs else Extents()

    def _take(self, mode: Any, sizes: Mapping[str, int], *described: Any) -> None:
        """Take the kernels of a mode and sizes, `described` as `Facts` takes them; none is prepared yet."""
        entry = dispatch.find(mode, self.n)
        self.mode, self.sizes, self.is_invariant = mode, sizes, entry.is_invariant
        self.facts = Facts(entry, self.family, mode, self.n, sizes, *described)
        # By class of M.
        self._prepared: list[Prepared | None] = [None] * len(ROWS)
        # Found anew for each call, they took 0.3 us of it.
        self.at: Callable[[torch.Size], Any] = lru_cache(LAYOUTS)(self._at)
        self.layout = lru_cache(LAYOUTS)(self._lay_out)

    def exchanging(self, reduce: Reduce, ranks: int) -> Plan:
        """Return the plan of the same calls whose rows ranks exchange first; `run_sized` takes the exchange."""
        plan, facts, mode = copy(self), self.facts, replace(self.mode, reduce=reduce)
        described = facts.target, facts.dtypes, {**facts.strides, **facts.further}, facts.misaligned
        plan._take(mode, {**self.sizes, "ranks": ranks}, *described)
        return plan

    def prepared(self, m: int) -> Prepared:
        """Return the kernels for m rows; the first call of each class of M compiles them."""
        facts, on = self.facts, self._launches_on
        size: int = facts.entry.size(m)
        prepared = self._prepared[size]
        if prepared is None:
            assembly = assemble(facts, m)
            if on is not None:
                dispatch.tell(partial(facts.kind, m))
            launchers = [Launcher(facts.entry.load(each.part), each, facts.target, on) for each in assembly.recipes]
            self._prepared[size] = prepared = Prepared(assembly, tuple(launchers))
        return prepared

    def _at(self, shape: torch.Size) -> Sized:
        m = shape.numel() // self.n
        # The gradient of what is dropped comes behind the sums, and is no pointer of most kernels.
        makes = self.makes(shape)[: -1 if self.family.results[-1].name == "ddropped" else None]
        statistics = make_of((packing(m, self.saves_mean)[0],), torch.float32)
        if self.family.results[-1].kind is Kind.PER_NORM:
            statistics = makes[-1]
        return Sized(self.layout(m), (m,), makes, (*makes[:2], None, None, statistics))

    def makes(self, shape: Sequence[int], of_sums: Sequence[Sequence[int]] = ()) -> Makes:
        """Return how to make the results of calls on rows of a shape; `of_sums` has a shape for each that is a sum."""
        rows = self.family.results
        of_norms = packing(math.prod(shape[:-1]), self.mode.norm.centres, 2)[:1]
        sizes = {Kind.ROWS: shape, Kind.PER_ROW: shape[:-1], Kind.PER_NORM: of_norms}
        others = of_sums or [shape[-1:]] * len(rows)
        shapes = [sizes.get(row.kind, other) for row, other in zip(rows, others, strict=True)]
        if rows[0].name == "y":
            shapes[0] = y_shape(shape, self.mode)
        return tuple([make_of(size, dtype) for size, dtype in zip(shapes, self.dtypes, strict=True)])

    def _lay_out(self, m: int, parts: int = 1) -> Layout:
        if m == 0:
            # For no rows nothing is to be compiled.
            return Layout()
        assembly, launchers = self.prepared(m)
        by_address = all(launcher.launch is not None for launcher in launchers)
        launches: list[Any] = [each.launch if by_address else each.launch_tensors for each in launchers]
        each = assembly.programs(m, parts)
        programs = parts * each
        columns = self.sizes.get("channels", self.n)
        section, term = aligned_length(programs * columns), aligned_length(assembly.terms(m))
        lengths = [0 if dtype is None else section for dtype in self.sum_dtypes] + [term] * len(assembly.row_terms)
        *starts, length = accumulate(lengths, initial=0)
        exchange = 0 if assembly.exchange is None else assembly.exchange(m)
        steps = [
            (_with_numbers(launch, numbers), grid)
            for launch, recipe in zip(launches, assembly.walkers, strict=False)
            for grid, numbers in (recipe.rounds(m) if recipe.rounds else [(recipe.grid(m, programs), ())])
        ]
        finisher = assembly.finisher
        return Layout(
            steps=tuple(steps),
            finish=None if finisher is None else (launches[-1], self._finishing_grid(finisher.grid(m, each), parts)),
            adds=_adds(len(self.sum_dtypes)),
            programs=each,
            offsets=tuple(start * torch.float32.itemsize for start in starts),
            memory=make_of((length,), torch.float32) if length else None,
            sums=len(self.sum_dtypes),
            to_rstd=packing(m, self.saves_mean)[1],
            by_address=by_address,
            exchange=exchange,
            in_c=by_address and not exchange,
        )

    def _finishing_grid(self, grid: Grid, parts: int) -> Grid:
        if not self.mode.shares:
            return grid
        # Programs of sums behind the last one that is due would have nothing to add up, once for each part.
        due = max(index for index, dtype in enumerate(self.sum_dtypes) if dtype is not None) + 1
        return grid[0], due, parts


def plan_of(call: Call, misaligned: Collection[str]) -> Plan:
    """Return the plan of calls that share their kernels with a call, whatever their M.

    Args:
        call: the call.
        misaligned: see `Plan`.
    """
    facts, plans = [tuple(each.items()) for each in (call.sizes, _dtypes(call), _strides(call))], dispatch.plans
    key = ("parts", call.mode, *facts, frozenset(misaligned), call.x.device)
    known: tuple[Plan, ...] = plans.get(key, ())
    if not known:
        known = (Plan(call, misaligned),)
        dispatch.remember(plans, key, known)
    return known[0]


def _with_numbers(launch: Launch, numbers: tuple[int, ...]) -> Launch:
    return (lambda grid, values: launch(grid, (*values, *numbers))) if numbers else launch


def _dtypes(call: Call) -> dict[str, torch.dtype | None]:
    """Return the dtypes of a call's inputs and results, None of an absent input or a result that is not asked for."""
    family = call.function.family
    inputs = {row.name: _dtype_of_input(row, call) for row in family.inputs}
    return inputs | {row.name: call.dtype_of(row.name) for row in family.results}


def _dtype_of_input(row: Parameter, call: Call) -> torch.dtype | None:
    if row.kind is Kind.PER_ROW:
        # Autograd's are one argument, in one tensor; kernels read two.
        return torch.float32 if row.is_wanted(call.mode) else None
    tensor: torch.Tensor | None = getattr(call, row.name)
    return None if tensor is None else tensor.dtype


def _strides(call: Call) -> dict[str, RowStride]:
    """Return the strides of rows, and how many scales a row has of its own, by slots, of the tensors that there are."""
    family, mode, x = call.function.family, call.mode, call.x
    # The kernels of a plain norm are one, whether dx is due or not.
    new = [row for row in family.results if row.is_wanted(mode) and (row.name in call.wants or not mode.shares)]
    strides: dict[str, RowStride] = {row.row_stride_slot: x.shape[-1] for row in new if row.row_stride_slot}
    for row in family.operands:
        tensor = getattr(call, row.name)
        if tensor is None:
            continue
        if row.row_stride_slot is not None:
            strides[row.row_stride_slot] = stride_of(row.kind, row.name, tensor, x)
        elif row.scale_stride_slot is not None:
            strides[row.scale_stride_slot] = tensor.numel() // max(1, call.m) * (tensor.numel() != 1)
    return strides


def _extents(
    family: Family, dtypes: Mapping[str, torch.dtype | None], strides: Mapping[str, RowStride], n: int
) -> Extents:
    def extent(row: Parameter | Result, dtype: torch.dtype) -> Extent:
        if isinstance(row, Parameter) and row.scale_stride_slot is not None:
            return extent_of(strides[row.scale_stride_slot], 1, dtype.itemsize)
        if row.kind is Kind.RANDOM:
            return extent_of(0, 2, dtype.itemsize)
        return extent_of(strides.get(row.row_stride_slot or "", 0), n, dtype.itemsize)

    each = {row.name: extent(row, dtype) for row in family.tensors if (dtype := dtypes[row.name]) is not None}
    there = [(index, row.name) for index, row in enumerate(family.inputs) if row.name in each]
    return Extents(
        inputs=tuple([(index, *each[name], name in REPLACEABLE) for index, name in there]),
        y=each["y"],
        total=each.get("residual_out", (0, 0)),
    )
