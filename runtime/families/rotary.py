"""Norms of the heads of queries and keys with their rotary embedding: checked, launched, and recorded by autograd.

One module has the kernels of all calls, whose sizes and options are constants: no table of instances lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod
from operator import or_
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from ..call_kinds import FLAGS, MANY, MOST, ROWS
from ..calls import argument_checks as checks
from ..calls.backend import backend, intercepted, left_to_torch
from ..calls.first import resolved
from ..calls.known import MISALIGNED, UNREADABLE, Key, addresses_of, remember
from ..calls.plan import Make, make_of
from ..calls.record import Gradients, Launched, Recording, arrived_in_memory, record_at_once, records
from ..calls.road import Operands, Options
from ..calls.traced import is_dynamo_compiling, operator, unrecorded
from ..codegen.values import Cast, Norm
from ..dtypes import FLOATS, word
from ..errors import ConflictError, DeviceError, LayoutError, ShapeError
from ..kernels.gpu import require_device, target_of
from ..kernels.key import ALIGNMENT
from ..kernels.launcher import Launcher
from ..kernels.rotary import BACKWARD, FORWARD, HEADS, RESULTS, TOTALS, assemble, kernel_named
from ..kernels.strides import kind_of
from ..selection import dispatch
from ..selection.invariance import is_on
from ..upstream.dynamo_guards import Empty, allocator
from ..upstream.torch_internals import constant_in_traces, dispatch_modes, eager_only, is_sharded
from ..upstream.triton_launcher import Grid
from . import eager
from .plain_calls import handed_on, is_handed_on

# The name of the public function and of the operator.
NAME = "qk_norm_rope"
_OPERANDS = ("q", "k", "q_weight", "k_weight", "cos", "sin", "positions")
_OPTIONS = ("norm", "eps", "interleaved", "rotary_dim", "weight_offset", "cast", "out")


def normalise(operands: Operands, options: tuple[Any, ...]) -> Any:
    """Run a call of the public function, whose options are as callers passed them."""
    _, *asked = options
    if is_handed_on(operands):
        args = dict(zip((*_OPERANDS, *_OPTIONS), (*operands, *asked), strict=True))
        return handed_on(NAME, operands, args, positional=6)
    with unrecorded():
        settled, outs = _settled(operands[0], *asked)
    launches = _known(FORWARD, settled, (*operands, *outs))
    if launches is None:
        with unrecorded():
            _check(dict(zip(_OPERANDS, operands, strict=True)), settled)
        if outs:
            _check_outs(operands, outs)
    if launches is None and (backend(operands[0]) != "kernel" or left_to_torch(operands)):
        results = eager.rotary(operands, settled)
    elif launches is None and (is_dynamo_compiling() or intercepted(*operands, *outs)):
        results = operator(NAME)(*operands, *settled)
    else:
        results = launched(operands, settled, outs) if launches is None else launches.run(operands, outs)
        recorded = not outs and records(operands)
        return record_at_once((_RECORDING, (settled, results)), *operands) if recorded else results
    return tuple([own.copy_(each) for own, each in zip(outs, results, strict=True)]) if outs else results


def _settled(
    q: Any, norm: Any, eps: Any, interleaved: Any, rotary_dim: Any, weight_offset: Any, cast: Any, out: Any
) -> tuple[Options, Operands]:
    """Check options, and return them with the tensors that results go to."""
    n = checks.check_tensor("q", q).shape[-1] if q.dim() else 0
    columns = n if rotary_dim is None else rotary_dim
    if not isinstance(columns, (int, torch.SymInt)) or columns % 2 or not 2 <= columns <= n:
        raise ShapeError(f"rotary_dim is {columns!r}; it takes an even number from 2 to {n}, the last dimension of q")
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise ConflictError(f"out is a {type(out).__name__}; it takes a tuple of two tensors")
    number = checks.check_number("eps", eps, least=0.0)
    offset = checks.check_number("weight_offset", weight_offset, least=-checks.LARGEST_FP32)
    norm_word, cast_word = _words(norm, cast)
    return (norm_word, number, checks.check_flag("interleaved", interleaved), columns, offset, cast_word), out or ()


@constant_in_traces
def _words(norm: str | Norm, cast: str | Cast) -> tuple[str, str]:
    kind = word(Norm, "norm", norm)
    if kind.clamps:
        raise ConflictError(f"norm={kind.value!r} has no kernel here; it takes 'rms', 'layer' or 'l2', which adds eps")
    return kind.value, word(Cast, "cast", cast).value


def _check(named: Mapping[str, Any], options: Options) -> None:
    """Check the operands of a call."""
    there = {name: each for name, each in named.items() if each is not None or name in ("k", "cos", "sin")}
    for name, each in there.items():
        checks.check_tensor(name, each)
    q, k, positions = named["q"], named["k"], named["positions"]
    if is_sharded(*there.values()):
        raise DeviceError(f"{NAME} was given a DTensor; pass the to_local() of each tensor, whole heads of each rank")
    if q.dim() < 3:
        raise ShapeError(f"q has shape {tuple(q.shape)}; it takes (..., heads, D), tokens before the heads")
    *leading, _, n = q.shape
    # All tokens in one dimension, or the last dimensions of tokens, of which the others share values.
    of_tokens = [tuple(leading), (prod(leading),), *_shared(leading)]
    rows = of_tokens if positions is None else [tuple(named["cos"].shape[:1])]
    if positions is not None and 0 in named["cos"].shape[:1] and prod(leading):
        raise ShapeError(f"cos has shape {tuple(named['cos'].shape)}; with positions it takes a row or more")
    shapes = {
        "k": [(*leading, *k.shape[-2:-1], n)],
        "q_weight": [(n,)],
        "k_weight": [(n,)],
        "cos": [(*each, width) for each in rows for width in (options[3] // 2, options[3])],
        "sin": [tuple(named["cos"].shape)],
        "positions": of_tokens,
    }
    dtypes = {"k": (q.dtype,), "positions": (torch.int32, torch.int64)}
    for name, each in there.items():
        checks.check_dtype(name, each, dtypes.get(name, (*FLOATS, torch.float64)))
        checks.check_device(name, each, q, "q")
        if tuple(each.shape) not in shapes.get(name, [tuple(q.shape)]):
            takes = " or ".join(map(str, dict.fromkeys(shapes[name])))
            # Three rows of positions, of which pairs of columns take one each.
            also = ": for mRoPE pass each token's own rows of cos and sin, and no positions" * (name == "positions")
            raise ShapeError(f"{name} has shape {tuple(each.shape)} and q {tuple(q.shape)}; it takes {takes}{also}")
    if options[4] and not {"q_weight", "k_weight"}.issubset(there):
        raise ConflictError(f"weight_offset={options[4]} is added to both weights; pass q_weight and k_weight")
    checks.check_no_gradient("has none as an angle of the rotation", cos=named["cos"], sin=named["sin"])


def _shared(leading: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes of values that tokens share: the last leading dimensions of q, also behind dimensions of 1."""
    tails = [tuple(leading[at:]) for at in range(1, len(leading))]
    return [each for tail in tails for each in (tail, (*[1] * (len(leading) - len(tail)), *tail))]


def _check_outs(operands: Operands, outs: Operands) -> None:
    """Check the tensors that are written to, which may be q and k themselves."""
    named: dict[str, Any] = {name: each for name, each in zip(_OPERANDS, operands, strict=True) if each is not None}
    checks.check_no_gradient("has none where out is passed", **named)
    addressed = not (is_dynamo_compiling() or intercepted(*operands, *outs))
    for name, out in zip(("q", "k"), outs, strict=True):
        own = named.pop(name)
        checks.check_output(f"out ({name})", out, own, own.dtype, {"x": own, **named} if addressed else {}, addressed)
        if addressed and out.flatten(0, -3).data_ptr() != out.data_ptr():
            raise LayoutError(f"out ({name}) has strides {out.stride()}; it takes tokens that are one stride apart")
        named |= {name: own, f"out ({name})": out}


@eager_only
def _known(kernel: str, options: Sequence[Any], tensors: Operands) -> Launches | None:
    """Return the launches of calls like one before; None of another call."""
    if is_dynamo_compiling() or forward_ad._current_level >= 0 or dispatch_modes():
        return None
    try:
        for known in dispatch.plans.get(_key(kernel, options, tensors), ()):
            if known.fits(*known.present(tensors)):
                addresses = addresses_of(tensors)
                is_aligned = not reduce(or_, addresses) & MISALIGNED
                launches: Launches | None = known.plan if is_aligned else known.plan_at(*addresses)
                return launches
    except UNREADABLE:
        pass
    return None


def _key(kernel: str, options: Sequence[Any], tensors: Operands) -> Key:
    """Return the key of a call. It says how tensors that are written lie to the others, and a guard holds strides."""
    outs, addresses = tensors[len(_OPERANDS) :] if kernel == FORWARD else (), addresses_of(tensors)
    within = [(at - out.data_ptr(), out.untyped_storage().nbytes()) for out in outs for at in addresses]
    places = [distance if abs(distance) < size else None for distance, size in within]
    # The mode of gradients, because tensors that require one may be refused.
    return (kernel, torch.is_grad_enabled(), *options, *[each is None for each in tensors], *places)


class Launches(NamedTuple):
    """The launches of calls whose tensors are like those of one that was checked, all but where they lie.

    Attributes:
        steps: the kernel that walks the heads, and the kernel that adds partial sums up, if any; each with its grid.
        numbers: what the first one takes behind all tensors.
        empty: makes tensors on the device.
        makes: how to make the results for q and k; of gradients the partial sums and the gradients of weights too.
    """

    steps: tuple[tuple[Launcher, Grid], ...]
    numbers: tuple[float, ...]
    empty: Empty
    makes: tuple[Make | None, ...]

    def run(self, read: Operands, outs: Operands = ()) -> Operands:
        """Launch a call of tensors that kernels can walk, and return all results."""
        increment_version(outs)
        made = outs or tuple([None if make is None else self.empty(*make) for make in self.makes])
        programs, *_ = self.steps[0][1]
        values = ((*read, *made[:4]), self.numbers), ((*made[2:4], None, *made[4:], None), (programs,))
        for (launcher, grid), (tensors, numbers) in zip(self.steps, values, strict=False):
            if launcher.launch is None:
                launcher.launch_tensors(grid, (*tensors, *numbers))
            else:
                launcher.launch(grid, (*addresses_of(tensors), *numbers))
        return made


@eager_only
def launched(operands: Operands, options: Options, outs: Operands = ()) -> Operands:
    """Run a call by its kernel, known or not, and return the results for q and k; outs were checked."""
    q, k, *_ = operands
    launches = _known(FORWARD, options, (*operands, *outs))
    if launches is not None:
        return launches.run(operands, outs)
    _check(dict(zip(_OPERANDS, operands, strict=True)), options)
    require_device(q)
    if not (q.numel() and k.numel()):
        return outs or eager.rotary(operands, options)
    named = dict(zip((*_OPERANDS, "q_out", "k_out"), (*operands, *outs), strict=False))
    return _first(FORWARD, named, options, (), outs)


def _first(
    kernel: str, named: Mapping[str, Any], options: Options, due: tuple[bool, ...], outs: Operands = ()
) -> Operands:
    """Plan a call, make its kind known and launch it."""
    plans, rows = dispatch.plans, {name: _laid_out(name, each) for name, each in named.items()}
    if rows["cos"].stride() != rows["sin"].stride():
        rows |= {name: rows[name].contiguous() for name in ("cos", "sin")}
    tensors, own = tuple(named.values()), tuple(rows.values())
    launches, addresses = _planned(kernel, named, rows, options, due), addresses_of(tensors)
    # No call is known whose kernels read copies.
    if addresses == addresses_of(own):
        remember(plans, _key(kernel, (*options, *due), tensors), tensors, [0] * len(tensors), addresses, launches)
    return launches.run(own[: len(own) - len(outs)], outs)


def _laid_out(name: str, tensor: Any) -> Any:
    """Return a tensor as kernels walk it, copied if need be: heads on two strides, or rows of tables."""
    if tensor is None:
        return None
    if "weight" in name or name == "positions":
        return resolved(tensor).flatten().contiguous()
    rows = resolved(tensor).flatten(0, -2 if name in ("cos", "sin") else -3)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _planned(
    kernel: str, named: Mapping[str, Any], rows: Mapping[str, Any], options: Options, due: tuple[bool, ...]
) -> Launches:
    """Return the launches of a call; `rows` has its tensors as kernels walk them."""
    norm, eps, interleaved, rotary_dim, weight_offset, cast = options
    (m, q_heads, n), device, kind = rows["q"].shape, rows["q"].device, Norm(norm)
    whole = rows["cos"].shape[1] == rotary_dim
    flags = interleaved, kind.centres, kind.row.averages, Cast(cast).comes_first, whole
    sizes = {"n": n, "q_heads": q_heads, "k_heads": rows["k"].shape[1], "rotary_dim": rotary_dim}
    sizes |= dict(zip(FLAGS, map(int, flags), strict=True))
    makes = [make_of(named[own].shape, named[own].dtype) for own in "qk"]
    tensors = dict(rows)
    for name, make in zip(RESULTS[kernel], makes, strict=True):
        # A new result lies at an aligned address, as its stand-in does.
        stand_in = torch.empty(make[0], dtype=make[2], device="meta") if make else None
        tensors.setdefault(name, _laid_out(name, stand_in))
    dtypes = {name: each.dtype for name, each in tensors.items() if each is not None}
    totals = {f"d{own}_weight": dtypes[f"{own}_weight"] for own, is_due in zip("qk", due, strict=False) if is_due}
    dtypes |= totals | {f"{name}_partials": torch.float32 for name in totals}
    strides: dict[str, int] = {"table_row_stride": rows["cos"].stride(0)}
    for name in HEADS[kernel]:
        strides |= {f"{name}_token_stride": tensors[name].stride(0), f"{name}_head_stride": tensors[name].stride(1)}
    misaligned = [f"{name}_ptr" for name, each in tensors.items() if each is not None and each.data_ptr() % ALIGNMENT]
    target = target_of(device)
    recipes = assemble(kernel, sizes, dtypes, strides, misaligned, m, target, invariant=is_on())
    grids = [each.grid(m, 1) for each in recipes.values()]
    if kernel == BACKWARD:
        sums = [totals.get(name) for name in TOTALS]
        makes += [make_of((grids[0][0], n), dtype and torch.float32) for dtype in sums]
        makes += [make_of((n,), dtype) for dtype in sums]
    size = ROWS.index(MANY if recipes[f"rotary:{kernel}"].types["M"] == "i32" else MOST)
    dispatch.tell(lambda: kind_of(kernel, sizes, size, dtypes, strides, misaligned))
    launchers = [Launcher(kernel_named(name), each, target, device) for name, each in recipes.items()]
    by_token = rows["cos"] if rows["positions"] is None else rows["positions"]
    numbers = m, by_token.shape[0], eps, weight_offset
    return Launches(tuple(zip(launchers, grids, strict=True)), numbers, allocator(device), tuple(makes))


@eager_only
def launched_gradients(*arguments: Any) -> list[torch.Tensor]:
    """Return the gradients of q, k and the weights that have one, given all arguments of the operator in order."""
    *options, due = arguments[2 + len(_OPERANDS) :]
    named = dict(zip(("dq_out", "dk_out", *_OPERANDS), arguments, strict=False))
    tensors, asked = tuple(named.values()), (*options, *due)
    if not (named["q"].numel() and named["k"].numel()):
        return [torch.zeros_like(each) for each, is_due in zip(tensors[2:6], (True, True, *due), strict=True) if is_due]
    launches = _known(BACKWARD, asked, tensors)
    results = launches.run(tensors) if launches else _first(BACKWARD, named, tuple(options), tuple(due))
    return [each for each in (*results[:2], *results[4:]) if each is not None]


def gradients(
    saved: Operands,
    options: Options,
    dq_out: torch.Tensor | None,
    dk_out: torch.Tensor | None,
    due: Sequence[bool],
    by_formula: bool,
    *_: object,
) -> Gradients:
    """Return the gradients of a call's operands: by kernels, by the operator, or by the formula."""
    pairs: Any = ((dq_out, saved[0]), (dk_out, saved[1]))
    # A gradient that did not arrive is one row of zeros, which serves as all rows.
    arrived = tuple([x.new_zeros(x.shape[-1:]).expand(x.shape) if each is None else each for each, x in pairs])
    seen = intercepted(*arrived, *saved)
    if by_formula or not (seen or arrived_in_memory(arrived)):
        return eager.differentiated(lambda *operands: eager.rotary(operands, options), saved, due, arrived)
    compute = operator(f"{NAME}_backward") if seen else launched_gradients
    grads = iter(compute(*arrived, *saved, *options, [*due[2:4]]))
    return [*[next(grads) if is_due else None for is_due in (True, True, *due[2:4])], None, None, None]


def _launch_recorded(call: tuple[Options, Operands], operands: Operands) -> Launched:
    options, (q, k) = call
    return q, k, operands, options, is_on()


_RECORDING = Recording(_launch_recorded, gradients, sums=(1, 3))
