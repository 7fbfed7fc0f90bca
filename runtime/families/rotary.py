"""Norms of the heads of queries and keys with their rotary embedding: checked, launched, and recorded by autograd.

One module has the kernels of all calls, whose sizes and options are constants: no table of instances lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from ..call_kinds import MANY, MOST, ROTARY_SIZES, ROWS
from ..calls import check as checks
from ..calls.backend import backend, intercepted, left_to_torch
from ..calls.first import resolved
from ..calls.plan import UNREADABLE, Key, Make, addresses_of, known_plan, make_of, remember
from ..calls.record import BackwardPass, Gradients, Launched, Recording, arrived_in_memory, record_at_once, records
from ..calls.road import Operands, Options
from ..calls.traced import is_dynamo_compiling, operator, unrecorded
from ..codegen.values import ACROSS_HEADS, Cast, HeadNorm, Norm
from ..dtypes import FLOATS, word
from ..errors import ConflictError, DeviceError, LayoutError, ShapeError
from ..kernels.gpu import ALIGNMENT, require_device, target_of
from ..kernels.launcher import Launcher
from ..kernels.rotary import (
    ACROSS,
    BACKWARD,
    CACHE,
    CACHE_STRIDES,
    FORWARD,
    HEADS,
    RESULTS,
    TOTALS,
    assemble,
    check_across,
    check_columns,
    kernel_named,
    summed,
    weight_lengths,
)
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
_ARRIVED = ("dq_out", "dk_out", *_OPERANDS)
# The tensors that forward kernels read.
_READ = (*_OPERANDS, "slot_mapping", "k_scale")
_OPTIONS = (
    *("norm", "eps", "interleaved", "rotary_dim", "weight_offset", "cast", "mrope_section", "mrope_interleaved", "out"),
)


def normalise(operands: Operands, options: tuple[Any, ...]) -> Any:
    """Run a call of the public function, whose options are as callers passed them."""
    _, *asked = options
    *others, key_cache, slot_mapping, k_scale = operands
    if is_handed_on(operands):
        args = dict(zip((*_OPERANDS, CACHE, *_READ[-2:], *_OPTIONS), (*operands, *asked), strict=True))
        return handed_on(NAME, operands, args, positional=6)
    read = (*others, slot_mapping, k_scale)
    with unrecorded():
        settled, outs = _settled(read[0], asked)
    outs = outs if key_cache is None else (*(outs or (None, None)), key_cache)
    launches = _known(FORWARD, settled, (*read, *outs))
    if launches is None:
        with unrecorded():
            _check(dict(zip(_READ, read, strict=True)), settled, outs)
    if launches is None and (backend(read[0]) != "kernel" or left_to_torch(operands)):
        return _computed(read, settled, outs)
    if launches is None and (is_dynamo_compiling() or intercepted(*operands, *outs)):
        if key_cache is None:
            return _copied(operator(NAME)(*others, *settled), outs)
        return _copied(operator(f"{NAME}_cached")(*read, *settled, key_cache), outs)
    results = launched(read, settled, outs) if launches is None else launches.run(read, outs)
    recorded = not outs and records(others)
    return record_at_once((_RECORDING, (settled, results)), *others) if recorded else results


def differentiate(operands: Operands, options: tuple[Any, ...]) -> Any:
    """Run a call of the public function of the gradients, whose options are as callers passed them."""
    _, *asked = options
    named = dict(zip(_ARRIVED, operands, strict=True))
    if is_handed_on(operands):
        args = named | dict(zip(_OPTIONS, asked, strict=True))
        return handed_on(f"{NAME}_bwd", operands, args, positional=8)
    with unrecorded():
        settled, outs = _settled(named["q"], asked)
    due = (named["q_weight"] is not None, named["k_weight"] is not None)
    launches = _known(BACKWARD, (*settled, *due), (*operands, *outs))
    if launches is not None:
        return launches.run(operands, outs)
    with unrecorded():
        checks.check_no_gradient(f"{NAME}_bwd records none", **named)
        _check(named, settled, outs)
    if backend(named["q"]) != "kernel" or left_to_torch(operands):
        checks.refuse_transformed(**named)
        return _copied(_by_formula(operands, settled, due), outs)
    if is_dynamo_compiling() or intercepted(*operands, *outs):
        grads = iter(operator(f"{NAME}_backward")(*operands, *settled, [*due]))
        return _copied([next(grads) if is_due else None for is_due in (True, True, *due)], outs)
    return _gradients(operands, settled, due, outs)


def _computed(read: Operands, options: Options, outs: Operands) -> Operands:
    """Run a call by torch's operators."""
    *operands, slot_mapping, k_scale = read
    results = eager.rotary(tuple(operands), options)
    for key_cache in outs[2:]:
        eager.write_keys(results[1], key_cache, slot_mapping, k_scale)
    return _copied(results, outs)


def _copied(results: Sequence[Any], outs: Operands) -> Operands:
    """Return results, of which the first are copied into the tensors that were passed for them."""
    pairs = zip_longest(results, outs[:2])
    return tuple([result if own is None else own.copy_(result) for result, own in pairs])


def _settled(q: Any, asked: Sequence[Any]) -> tuple[Options, Operands]:
    """Check options, and return them with the tensors that results go to."""
    norm, eps, interleaved, rotary_dim, weight_offset, cast, section, alternates, out = asked
    n = checks.check_tensor("q", q).shape[-1] if q.dim() else 0
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise ConflictError(f"out is a {type(out).__name__}; it takes a tuple of two tensors")
    number = checks.check_number("eps", eps, least=0.0)
    offset = checks.check_number("weight_offset", weight_offset, least=-checks.LARGEST_FP32)
    norm_word, cast_word = _words(norm, cast)
    flags = checks.check_flag("interleaved", interleaved), checks.check_flag("mrope_interleaved", alternates)
    columns, *axes = check_columns(n, rotary_dim, section, flags[1], (int, torch.SymInt))
    return (norm_word, number, flags[0], columns, offset, cast_word, *axes, flags[1]), out or ()


@constant_in_traces
def _words(norm: str | Norm | HeadNorm, cast: str | Cast) -> tuple[str, str]:
    kind = word(HeadNorm, "norm", norm.value if isinstance(norm, Norm) else norm)
    return kind.value, word(Cast, "cast", cast).value


def _check(named: Mapping[str, Any], options: Options, outs: Operands = ()) -> None:
    """Check the tensors of a call, in either direction."""
    needed = ("k", "cos", "sin", "dq_out", "dk_out")
    there = {name: each for name, each in named.items() if each is not None or name in needed}
    for name, each in there.items():
        checks.check_tensor(name, each)
    q, k, positions, axes = named["q"], named["k"], named["positions"], options[6] + options[7]
    if is_sharded(*there.values(), *outs):
        raise DeviceError(f"{NAME} was given a DTensor; pass the to_local() of each tensor, whole heads of each rank")
    for name, each in (("q", q), ("k", k)):
        if each.dim() < 3 or (each is q and each.shape[-2] == 0):
            raise ShapeError(f"{name} has shape {tuple(each.shape)}; it takes (..., heads, D), tokens before the heads")
    if axes and positions is None:
        raise ConflictError("mrope_section was passed without positions; pass three rows of them")
    *leading, _, n = q.shape
    # All tokens in one dimension, or the last dimensions of tokens, of which the others share values.
    of_tokens = [tuple(leading), (prod(leading),), *_shared(leading)]
    rows = of_tokens if positions is None else [tuple(named["cos"].shape[:1])]
    if positions is not None and 0 in named["cos"].shape[:1] and prod(leading):
        raise ShapeError(f"cos has shape {tuple(named['cos'].shape)}; with positions it takes a row or more")
    of_k, heads = (*leading, *k.shape[-2:-1], n), {"q": q.shape[-2], "k": k.shape[-2]}
    is_across = options[0].endswith(ACROSS_HEADS)
    if is_across:
        check_across(options[0], max(heads.values()), n, options[3])
    shapes = {
        **{name: [of_k] for name in ("k", "dk_out")},
        **{f"{own}_weight": [(n * each if is_across else n,)] for own, each in heads.items()},
        "cos": [(*each, width) for each in rows for width in (options[3] // 2, options[3])[: 1 if axes else 2]],
        "sin": [tuple(named["cos"].shape)],
        "positions": [(3, *each) for each in of_tokens] if axes else of_tokens,
        "slot_mapping": of_tokens[:2],
        "k_scale": [(1,), ()],
    }
    integers = (torch.int32, torch.int64)
    dtypes = {"positions": integers, "slot_mapping": integers, "k_scale": (torch.float32,)}
    dtypes |= dict.fromkeys(("k", "dq_out", "dk_out"), (q.dtype,))
    for name, each in there.items():
        checks.check_dtype(name, each, dtypes.get(name, (*FLOATS, torch.float64)))
        checks.check_device(name, each, q, "q")
        fitting = shapes.get(name, [tuple(q.shape)])
        if tuple(each.shape) not in fitting:
            takes = " or ".join(map(str, dict.fromkeys(fitting)))
            also = "; three rows of them (mRoPE) need mrope_section" * (name == "positions" and not axes)
            raise ShapeError(f"{name} has shape {tuple(each.shape)} and q {tuple(q.shape)}; it takes {takes}{also}")
    if not heads["k"] and "k_weight" in there:
        raise ConflictError("k_weight was passed, and k has no heads; pass None")
    if options[4] and not {"q_weight", "k_weight"}.issubset(there if heads["k"] else (*there, "k_weight")):
        raise ConflictError(f"weight_offset={options[4]} is added to both weights; pass q_weight and k_weight")
    checks.check_no_gradient("has none as an angle of the rotation", cos=named["cos"], sin=named["sin"])
    if (len(outs) == 3) != ("slot_mapping" in there):
        raise ConflictError("one of key_cache and slot_mapping was passed; pass both, or neither")
    if "k_scale" in there and (len(outs) < 3 or outs[2].dtype is not torch.float8_e4m3fn):
        raise ConflictError("k_scale was passed, and key_cache is none of torch.float8_e4m3fn; leave k_scale out")
    if outs:
        _check_outs(there, outs)


def _shared(leading: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes of values that tokens share: the last leading dimensions of q, also behind dimensions of 1."""
    tails = [tuple(leading[at:]) for at in range(1, len(leading))]
    return [each for tail in tails for each in (tail, (*[1] * (len(leading) - len(tail)), *tail))]


def _check_outs(named: dict[str, Any], outs: Operands) -> None:
    """Check the tensors that are written to, which may be q and k themselves, or the gradients that arrived."""
    checks.check_no_gradient("has none where out or key_cache is passed", **named)
    addressed = not (is_dynamo_compiling() or intercepted(*named.values(), *outs))
    for own_name, out in zip([*named][:2], outs[:2], strict=True):
        if out is None:
            continue
        own, name = named.pop(own_name), f"out ({own_name.removesuffix('_out')})"
        checks.check_output(name, out, own, own.dtype, {"x": own, **named} if addressed else {}, addressed)
        if addressed and out.flatten(0, -3).data_ptr() != out.data_ptr():
            raise LayoutError(f"{name} has strides {out.stride()}; it takes tokens that are one stride apart")
        named |= {own_name: own, name: out}
    for cache in outs[2:]:
        *_, heads, n = named["k"].shape
        shape = tuple(checks.check_tensor(CACHE, cache).shape)
        if shape[2:] != (heads, n) or shape[1] == 0:
            raise ShapeError(f"{CACHE} has shape {shape}; it takes (blocks, slots of a block, {heads}, {n}), k's heads")
        checks.check_dtype(CACHE, cache, (named["k"].dtype, torch.float8_e4m3fn))
        checks.check_device(CACHE, cache, named["k"], "k")
        if addressed:
            checks.refuse_transformed(**named)
        checks.check_output(CACHE, cache, cache, cache.dtype, named if addressed else {}, addressed)


@eager_only
def _known(kernel: str, options: Sequence[Any], tensors: Operands) -> Launches | None:
    """Return the launches of calls like one before; None of another call."""
    if is_dynamo_compiling() or forward_ad._current_level >= 0 or dispatch_modes():
        return None
    try:
        launches: Launches | None
        launches, _ = known_plan(dispatch.plans, _key(kernel, options, tensors), tensors)
    except UNREADABLE:
        return None
    return launches


def _key(kernel: str, options: Sequence[Any], tensors: Operands) -> Key:
    """Return the key of a call. It says how tensors that are written lie to the others, and a guard holds strides."""
    outs, addresses = [each for each in tensors[len(_READ) :] if each is not None], addresses_of(tensors)
    within = [(at - out.data_ptr(), out.untyped_storage().nbytes()) for out in outs for at in addresses]
    places = [distance if abs(distance) < size else None for distance, size in within]
    # The mode of gradients, because tensors that require one may be refused.
    return (kernel, torch.is_grad_enabled(), *options, *[each is None for each in tensors], *places)


class Launches(NamedTuple):
    """The launches of calls whose tensors are like those of one that was checked, all but where they lie.

    Attributes:
        steps: the kernel that walks the heads, and the kernels that add partial sums up, if any; each with its grid.
        numbers: what the first one takes behind all tensors.
        sums: of each kernel that adds up, whether it does so for the weight of q, and of k.
        empty: makes tensors on the device.
        makes: how to make the results for q and k; of gradients the partial sums and the gradients of weights too.
    """

    steps: tuple[tuple[Launcher, Grid], ...]
    numbers: tuple[float, ...]
    sums: tuple[list[bool], ...]
    empty: Empty
    makes: tuple[Make | None, ...]

    def run(self, read: Operands, outs: Operands = ()) -> Operands:
        """Launch a call of tensors that kernels can walk, and return all results."""
        increment_version([out for out in outs if out is not None])
        pairs = zip_longest(outs, self.makes)
        made = tuple([self.empty(*make) if own is None and make else own for own, make in pairs])
        programs, *_ = self.steps[0][1]
        values: list[Any] = [((*read, *made[:4]), self.numbers)]
        for due in self.sums:
            tensors = [each if is_due else None for each, is_due in zip(made[2:], due * 2, strict=True)]
            values.append(((*tensors[:2], None, *tensors[2:], None), (programs,)))
        for (launcher, grid), (tensors, numbers) in zip(self.steps, values, strict=True):
            if launcher.launch is None:
                # The interpreter encodes fp8 in bytes.
                fp8 = [each is not None and each.dtype is torch.float8_e4m3fn for each in tensors]
                seen = [each.view(torch.uint8) if is_fp8 else each for each, is_fp8 in zip(tensors, fp8, strict=True)]
                launcher.launch_tensors(grid, (*seen, *numbers))
            else:
                launcher.launch(grid, (*addresses_of(tensors), *numbers))
        # Neither the cache nor partial sums.
        return (*made[:2], *made[4:])


@eager_only
def launched(operands: Operands, options: Options, outs: Operands = ()) -> Operands:
    """Run a call by its kernel, known or not, and return the results for q and k.

    Args:
        operands: what is read.
        options: of the call.
        outs: the tensors for the results, and the cache; None for those that are new; none at all without any.
    """
    q, *_ = operands
    launches = _known(FORWARD, options, (*operands, *outs))
    if launches is not None:
        return launches.run(operands, outs)
    _check(dict(zip(_READ, operands, strict=True)), options, outs)
    require_device(q)
    if not q.numel():
        return _computed(operands, options, outs)
    named = dict(zip((*_READ, *RESULTS[FORWARD], CACHE), (*operands, *outs), strict=False))
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
    if name == CACHE:
        return tensor
    if "weight" in name or name in ("positions", "slot_mapping", "k_scale"):
        return resolved(tensor).flatten().contiguous()
    rows = resolved(tensor).flatten(0, -2 if name in ("cos", "sin") else -3)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _planned(
    kernel: str, named: Mapping[str, Any], rows: Mapping[str, Any], options: Options, due: tuple[bool, ...]
) -> Launches:
    """Return the launches of a call; `rows` has its tensors as kernels walk them."""
    norm, eps, interleaved, rotary_dim, weight_offset, cast, height, width, alternates = options
    (m, q_heads, n), device, kind = rows["q"].shape, rows["q"].device, HeadNorm(norm).norm
    kernel = ACROSS[kernel] if HeadNorm(norm).is_across else kernel
    whole = rows["cos"].shape[1] == rotary_dim
    flags = interleaved, kind.centres, kind.row.averages, Cast(cast).comes_first, whole, alternates
    cache = rows.get(CACHE)
    values = n, q_heads, rows["k"].shape[1], rotary_dim, *flags, height, width, 0 if cache is None else cache.shape[1]
    sizes = dict(zip(ROTARY_SIZES, map(int, values), strict=True))
    makes = [make_of(named[own].shape, named[own].dtype) for own in "qk"]
    tensors = dict(rows)
    for name, make in zip(RESULTS[kernel], makes, strict=True):
        if make and rows.get(name) is None:
            # A new result lies at an aligned address, as its stand-in does.
            tensors[name] = _laid_out(name, torch.empty(make[0], dtype=make[2], device="meta"))
    dtypes = {name: each.dtype for name, each in tensors.items() if each is not None}
    totals = {f"d{own}_weight": dtypes[f"{own}_weight"] for own, is_due in zip("qk", due, strict=False) if is_due}
    dtypes |= totals | {f"{name}_partials": torch.float32 for name in totals}
    strides: dict[str, int] = {"table_row_stride": rows["cos"].stride(0)}
    for name in HEADS[kernel]:
        strides |= {f"{name}_token_stride": tensors[name].stride(0), f"{name}_head_stride": tensors[name].stride(1)}
    if cache is not None:
        strides |= dict(zip(CACHE_STRIDES, cache.stride(), strict=False))
    # One kernel serves these two wherever they lie: each value is read by itself.
    away = {name for name, each in tensors.items() if each is not None and each.data_ptr() % ALIGNMENT}
    misaligned = [f"{name}_ptr" for name in dtypes if name in (*away, "slot_mapping", "k_scale")]
    target = target_of(device)
    recipes = assemble(kernel, sizes, dtypes, strides, misaligned, m, target, invariant=is_on())
    grids = [each.grid(m, 1) for _, each in recipes]
    makes += [None]
    if kernel in (BACKWARD, ACROSS[BACKWARD]):
        lengths = weight_lengths(kernel, sizes)
        makes[2:] = [make_of((grids[0][0], lengths[name]), totals.get(name) and torch.float32) for name in TOTALS]
        makes += [make_of((lengths[name],), totals.get(name)) for name in TOTALS]
    size = ROWS.index(MANY if recipes[0][1].types["M"] == "i32" else MOST)
    dispatch.tell(lambda: kind_of(kernel, sizes, size, dtypes, strides, misaligned))
    launchers = [Launcher(kernel_named(name), each, target, device) for name, each in recipes]
    by_token = rows["cos"] if rows["positions"] is None else rows["positions"]
    numbers = m, by_token.shape[0] // (3 if height + width else 1), eps, weight_offset
    sums = tuple([[name in own for name in TOTALS] for own in summed(kernel, sizes, totals).values()])
    return Launches(tuple(zip(launchers, grids, strict=True)), numbers, sums, allocator(device), tuple(makes))


@eager_only
def launched_gradients(*arguments: Any) -> list[torch.Tensor]:
    """Return the gradients of q, k and the weights that have one, given all arguments of the operator in order."""
    *options, due = arguments[len(_ARRIVED) :]
    results = _gradients(arguments[: len(_ARRIVED)], tuple(options), tuple(due))
    return [each for each in results if each is not None]


def _gradients(operands: Operands, options: Options, due: tuple[bool, ...], outs: Operands = ()) -> Operands:
    """Return the gradients of q, k and both weights by kernels, None of a weight of which none is due."""
    named = dict(zip((*_ARRIVED, *RESULTS[BACKWARD]), (*operands, *outs), strict=False))
    if not named["q"].numel():
        zeros = [
            torch.zeros_like(each) if is_due else None
            for each, is_due in zip(operands[2:], (True, True, *due), strict=False)
        ]
        return _copied(zeros, outs)
    launches = _known(BACKWARD, (*options, *due), (*operands, *outs))
    return launches.run(operands, outs) if launches else _first(BACKWARD, named, options, due, outs)


def _by_formula(operands: Operands, options: Options, due: Sequence[bool]) -> Gradients:
    """Return the gradients of q, k and both weights by torch's operators."""
    dq_out, dk_out, *read = operands
    is_due = (True, True, *due, False, False, False)
    with torch.no_grad():
        grads = eager.differentiated(lambda *each: eager.rotary(each, options), tuple(read), is_due, (dq_out, dk_out))
    return grads[:4]


def gradients(call: BackwardPass) -> Gradients:
    """Return the gradients of a call's operands: by kernels, by the operator, or by the formula."""
    saved, options, dq_out, dk_out, due, *_ = call
    pairs: Any = ((dq_out, saved[0]), (dk_out, saved[1]))
    # A gradient that did not arrive is one row of zeros, which serves as all rows.
    arrived = tuple([x.new_zeros(x.shape[-1:]).expand(x.shape) if each is None else each for each, x in pairs])
    seen = intercepted(*arrived, *saved)
    if call.by_formula or not (seen or arrived_in_memory(arrived)):
        return eager.differentiated(lambda *operands: eager.rotary(operands, options), saved, due, arrived)
    compute = operator(f"{NAME}_backward") if seen else launched_gradients
    grads = iter(compute(*arrived, *saved, *options, [*due[2:4]]))
    return [*[next(grads) if is_due else None for is_due in (True, True, *due[2:4])], None, None, None]


def _launch_recorded(call: tuple[Options, Operands], operands: Operands) -> Launched:
    options, (q, k) = call
    return q, k, operands, options, is_on()


_RECORDING = Recording(_launch_recorded, gradients, sums=(1, 3))
