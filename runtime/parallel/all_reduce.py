"""An all-reduce of partial sums, an add and a norm in one kernel, for tensor-parallel inference."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from ..calls import road
from ..calls.backend import backend
from ..calls.check import check, check_dtype, check_no_gradient, check_number, check_tensor
from ..calls.first import resolved
from ..calls.functions import FUNCTIONS
from ..calls.launch import run_sized
from ..calls.outputs import QuantisedOutput, results_of
from ..calls.plan import Plan
from ..calls.traced import intercepted, is_dynamo_compiling
from ..codegen.tiling import INBOX_PADDING, LONGEST_REDUCED
from ..codegen.values import Norm, Reduce
from ..dtypes import FLOATS
from ..errors import ConflictError, DeviceError, DTypeError, InvarianceError, PeerError, ShapeError
from ..families import plain, plain_functions, public, quantised
from ..selection import dispatch, invariance

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# By the number of ranks, the largest x in bytes that every rank adds up by itself; each adds up a share of a larger x.
# Two ranks send as much in one step as in two steps. The other limits are not measured: vLLM's custom all-reduce has
# 512 KiB for 4 ranks and 256 KiB for 8, and reads where ours writes.
_ONE_SHOT_BYTES: Mapping[int, float] = {1: float("inf"), 2: float("inf"), 4: 512 * 1024, 8: 256 * 1024}
# The collectives, and the exchange of each; an all-reduce of many rows is in two steps.
_COLLECTIVES = {"all_reduce": Reduce.ONE_SHOT, "reduce_scatter": Reduce.SCATTER, "all_gather": Reduce.GATHER}
# The norms, and the epsilon of each where none is passed.
_NORMS = {norm.value: float(norm.row.eps) for norm in (Norm.RMS, Norm.LAYER)}


class AllReduceNorm:
    """All-reduce x, add a residual, normalise the sum and quantise it, in one kernel on each rank of a group.

    In tensor-parallel inference each rank has a partial sum of a layer's output. The sum over ranks, in their order and
    in fp32, plus the residual is rounded once, to x's dtype: residual_out, whose norm is y. All ranks get the same
    bits. torch's all-reduce rounds the sum before the residual is added, too.

    Ranks write to one another's memory, so the GPUs of a group are on one host and have peer access, by NVLink or PCIe;
    NVLink multicast is not used. The memory is allocated here, 2 * (ranks + 1) * max_rows * n elements, and never by a
    call. On CPUs, processes of one host share memory, and Triton's interpreter runs the kernels (TRITON_INTERPRET=1).

    All ranks make the same calls of an object, in the same order and with equal numbers of rows, each on one stream.
    CUDA graphs may hold such calls, and are replayed in the same order too. If another rank does not send its rows
    within `timeout`, y is NaN, and the next call raises a `PeerError`, or `check` does.

    torch's all-reduce and the function of the norm serve calls of more than max_rows rows, and CPUs without the
    interpreter. torch.compile takes a call as one operator, in graphs for this process alone.

    Args:
        group: the ranks; None is the default group. All of them create the object together.
        max_rows: the most rows of a call that the kernel serves.
        n: the length of a row, up to 32768.
        dtype: of x and residual: torch.float16, bfloat16 or float32.
        device: of x; None is the current CUDA device, or the CPU without one.
        timeout: seconds that a call waits for other ranks.

    Raises:
        DeviceError: this rank is not in the group.
        ShapeError: max_rows or n is out of range.
        DTypeError: dtype is none of the three.
        ConflictError: timeout is negative.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        max_rows: int,
        n: int,
        dtype: torch.dtype,
        *,
        device: torch.device | str | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Allocate the memory, and wait until all ranks have."""
        if type(max_rows) is not int or max_rows < 1 or type(n) is not int or not 1 <= n <= LONGEST_REDUCED:
            raise ShapeError(
                f"max_rows is {max_rows!r} and n is {n!r}; they take integers from 1, and n up to {LONGEST_REDUCED}"
            )
        if dtype not in FLOATS:
            raise DTypeError(f"dtype is {dtype!r}; it takes one of {', '.join(map(str, FLOATS))}")
        rank = dist.get_rank(group)
        if rank < 0:
            raise DeviceError("this rank is not in the group; create the object on the group's ranks alone")
        patience = check_number("timeout", timeout, least=0.0)
        self.group = dist.group.WORLD if group is None else group
        self.ranks, self.max_rows, self.n, self.dtype = dist.get_world_size(group), max_rows, n, dtype
        here = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(here if device is None else device)
        padded = -(-n // INBOX_PADDING) * INBOX_PADDING
        self._inbox = _Inbox(self.group, 2 * (self.ranks + 1) * max_rows * padded * dtype.itemsize, self.device)
        self._failed = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=self.device.type == "cuda")
        header = [*self._inbox.addresses, rank, max_rows, int(patience * 1e9), self._failed.data_ptr()]
        self._exchange = torch.tensor([*header, *[0] * max_rows], dtype=torch.int64, device=self.device)
        self._inbox.meet()
        self._handle, self._process = next(_handles), os.getpid()
        _objects[self._handle] = self

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        collective: str = "all_reduce",
        norm: str = "rms",
        eps: float | None = None,
        fquant: str = "none",
        **options: Any,
    ) -> QuantisedOutput:
        """Exchange rows with the other ranks, add a residual, and normalise the sums.

        Sequence parallelism takes the collectives "reduce_scatter", by which a rank normalises its share of the sums
        over ranks alone, and "all_gather", by which each normalises the rows of all ranks.

        Args:
            x: this rank's partial sum, (..., n), of the object's dtype and device. With "reduce_scatter" (ranks * S,
                ..., n), of which x[r * S : (r + 1) * S] goes to rank r. With "all_gather" this rank's rows, (S, ...,
                n); S is the same on all ranks.
            residual: None, or of x's dtype and the shape of the rows that this rank has: of x, or (S, ..., n). With
                "all_reduce" it has the same values on all ranks.
            weight: (n,), fp16, bf16 or fp32, or None for 1.
            bias: (n,), with norm "layer" alone, or None for 0.
            collective: "all_reduce", "reduce_scatter" or "all_gather".
            norm: "rms" or "layer".
            eps: see `add_rms_norm`; None is 1e-6, or 1e-5 of LayerNorm.
            fquant: "none", or what `quantised_rms_norm` takes.
            options: other arguments of `add_rms_norm` and `add_layer_norm`, or, with fquant, of `quantised_rms_norm`
                and `quantised_layer_norm`, by name: weight_offset, cast, out_dtype, group_size and so on.

        Returns:
            y, of x's shape, (S, ..., n) with "reduce_scatter" and (ranks * S, ..., n) with "all_gather"; residual_out,
            of residual's shape, None without one; y_scale, None without fquant; and unquantised, with save_unquant.

        Raises:
            PeerError: another rank was late in a call before this one.
            ShapeError: the last dimension of x is not n, or ranks do not divide the first with "reduce_scatter".
            DTypeError: x or residual is not of the object's dtype.
            DeviceError: x is on another device, this process was forked from the object's, or the group was destroyed
                and torch's collectives are needed.
            GradientError: an argument requires a gradient; y has none.
            InvarianceError: under batch invariance, the kernel does not serve the call.
            TypeError: an option is none that the function of the norm takes.
            NormforgeError: one of the errors that this function lists.
        """
        for name, word, words in (("norm", norm, _NORMS), ("collective", collective, _COLLECTIVES)):
            if word not in words:
                raise ConflictError(f"{name} is {word!r}; it takes {' or '.join(map(repr, words))}")
        if bias is not None and norm == "rms":
            raise ConflictError("bias was passed and norm 'rms' adds none; pass norm='layer', or leave bias out")
        named = {**options, "x": x, "residual": residual, "weight": weight, "eps": _NORMS[norm] if eps is None else eps}
        if bias is not None:
            named["bias"] = bias
        if fquant != "none":
            named["fquant"] = fquant
        passed = {name: each for name, each in named.items() if isinstance(each, torch.Tensor)}
        if is_dynamo_compiling() or intercepted(*passed.values()):
            return _traced(self._handle, collective, norm, named)
        self._check(x, residual)
        check_no_gradient("normforge.parallel.AllReduceNorm computes none", **passed)
        scatters, gathers = collective == "reduce_scatter", collective == "all_gather"
        if (gathers and x.dim() < 2) or (scatters and (x.dim() < 2 or x.shape[0] % self.ranks)):
            raise ShapeError(
                f"x has shape {tuple(x.shape)}; {collective} takes a first dimension that ranks share equally"
            )
        rows = x.numel() // self.n * (self.ranks if gathers else 1) // (self.ranks if scatters else 1)
        if rows > self.max_rows or backend(x) != "kernel":
            return self._apart(collective, norm, named)
        if scatters:
            # Kernels find the other ranks' rows behind this rank's: at one stride.
            x = x.contiguous()
            named["x"] = x[: x.shape[0] // self.ranks]
        calls, operands, settled, outs = _arranged(norm, named)
        _, planned = calls.find(operands, settled)
        if planned is None:
            operands = road.as_operands(tuple(map(resolved, operands)), 1)
            key, planned = calls.find(operands, settled)
        if planned is None:
            calls.check(check(calls.functions[norm], road.named(calls, operands, settled)), outs, True)
            planned = road.prepared(calls, operands, settled, key)
        alone, addresses, tensors, shape, m, numbers = planned
        plan = self._exchanging(alone, collective, rows)
        total = None if residual is None or not gathers else residual.new_empty(residual.shape)
        if gathers:
            shape, m = torch.Size((self.ranks * shape[0], *shape[1:])), rows
        if fquant != "none":
            known = plan, addresses, tensors, shape, m, numbers
            found = quantised.launch(known, settled, (None, total, None), exchange=self._exchange)
            # Without columns and an amax, which no option asks for.
            assert isinstance(found, QuantisedOutput)
            return found
        y, total, *_ = run_sized(
            plan, plan.at(shape), addresses, tensors, numbers, (None, total), exchange=self._exchange
        )
        return QuantisedOutput(y, total, None, None)

    def check(self) -> None:
        """Wait for the calls of this device, and raise if other ranks were late in one.

        Raises:
            PeerError: they were; y of that call is NaN, and the object cannot be used any more.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._raise_if_late()

    def _raise_if_late(self) -> None:
        if self._failed.item():
            raise PeerError(
                "another rank sent nothing within the timeout, and y of that call is NaN; see that all ranks make the "
                "same calls, and create a new AllReduceNorm, with a longer timeout if ranks may be so late"
            )

    def _check(self, x: Any, residual: Any) -> None:
        self._raise_if_late()
        for name, tensor in (("x", x), ("residual", residual)):
            if tensor is not None:
                check_dtype(name, check_tensor(name, tensor), (self.dtype,))
        if x.dim() == 0 or x.shape[-1] != self.n:
            raise ShapeError(f"x has shape {tuple(x.shape)}; it takes (..., {self.n}), which this AllReduceNorm is for")
        if x.device != self.device:
            raise DeviceError(f"x is on {x.device} and this AllReduceNorm on {self.device}; create one for each device")
        if os.getpid() != self._process:
            raise DeviceError("this AllReduceNorm was created before a fork, by another process; create one here")

    def _exchanging(self, alone: Plan, collective: str, rows: int) -> Plan:
        reduce = _COLLECTIVES[collective]
        if collective == "all_reduce":
            one_shot = rows * self.n * self.dtype.itemsize <= _ONE_SHOT_BYTES.get(self.ranks, 0)
            reduce = reduce if one_shot else Reduce.TWO_SHOT
        plans, key = dispatch.plans, ("exchange", alone, reduce, self.ranks)
        plan: Plan | None = plans.get(key)
        if plan is None:
            plan = alone.exchanging(reduce, self.ranks)
            dispatch.remember(plans, key, plan)
        return plan

    def _apart(self, collective: str, norm: str, named: dict[str, Any]) -> QuantisedOutput:
        """Compute a call by torch's collectives and the function of the norm."""
        if invariance.is_on():
            raise InvarianceError(
                f"x has {named['x'].numel() // self.n} rows on {self.device}, and the kernel serves {self.max_rows} "
                "on GPUs; torch's all-reduce rounds sums otherwise, and is not used under batch invariance: create an "
                "AllReduceNorm for more rows, or split the batch"
            )
        try:
            rank = dist.get_rank(self.group)
        except ValueError as error:
            # torch's collectives would return x as it is.
            raise DeviceError(
                f"the call has more rows than the {self.max_rows} that the kernel serves, and its group was destroyed; "
                "keep the group, or create an AllReduceNorm for more rows"
            ) from error
        if collective != "all_gather":
            # For a reduce-scatter too: torch 2.13 deprecates the name of the function that 2.11 has.
            total = named["x"].clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=self.group)
            if collective == "reduce_scatter":
                total = total.chunk(self.ranks)[rank]
            return _alone(norm, {**named, "x": total})
        # Ranks gather rounded sums, as the kernel does.
        residual = named.pop("residual")
        kept = named["x"] if residual is None else (named["x"].float() + residual.float()).to(self.dtype)
        named["x"] = kept.new_empty((self.ranks * kept.shape[0], *kept.shape[1:]))
        dist.all_gather_into_tensor(named["x"], kept.contiguous(), group=self.group)
        outputs = _alone(norm, {**named, "residual": None})
        return outputs if residual is None else outputs._replace(residual_out=kept)


def _alone(norm: str, named: dict[str, Any]) -> QuantisedOutput:
    """Compute a norm by its function."""
    stem = Norm(norm).row.function
    if "fquant" in named:
        outputs: QuantisedOutput = getattr(public, f"quantised_{stem}")(**named)
        return outputs
    if named["residual"] is not None:
        y, total = getattr(plain_functions, f"add_{stem}")(**named)
        return QuantisedOutput(y, total, None, None)
    others = {name: each for name, each in named.items() if name != "residual"}
    y = getattr(plain_functions, stem)(normalized_shape=named["x"].shape[-1:], **others)
    return QuantisedOutput(y, None, None, None)


@cache
def _defaults(norm: str, *, quantises: bool) -> tuple[road.FamilyCalls, dict[str, Any]]:
    """Return the road's row of calls, and the arguments that they may have, with their defaults."""
    calls = quantised.CALLS if quantises else plain.CALLS
    takes = FUNCTIONS[calls.functions[norm]]
    # Others follow from these, or kernels behind an all-reduce do not take them.
    names = {*calls.inputs, *calls.options}.intersection(takes.passed, (*_TENSORS, *_OTHERS))
    defaults = {name: each for name, each in takes.defaults if name in names}
    return calls, defaults | ({"y_scale": None} if quantises else {})


def _arranged(norm: str, named: Mapping[str, Any]) -> tuple[road.FamilyCalls, Any, road.Options, road.Outs]:
    """Return a call as the road takes it: the row, the tensors that are read, the options, and nothing to write to."""
    quantises = "fquant" in named
    calls, defaults = _defaults(norm, quantises=quantises)
    for name in named:
        if name not in defaults:
            raise TypeError(f"AllReduceNorm got {name!r}; it takes {', '.join(defaults)}")
    fadd = "none" if named.get("residual") is None else "pre_add_store"
    arguments = {**defaults, **named, "fadd": fadd, "save_mv": False, "columnwise": "none", "save_amax": None}
    operands, settled = road.operands_of(calls, arguments), road.options_of(calls, norm, arguments)
    if not quantises:
        return calls, operands, settled, (None, None)
    operands, settled, outs = quantised.arranged(operands, settled, (None, None, arguments["y_scale"], None))
    if outs[2] is not None:
        raise ConflictError("y_scale was passed and fquant computes it; pass fquant='static', or leave y_scale out")
    return calls, operands, settled, outs


# By their numbers, which traced graphs hold.
_objects: WeakValueDictionary[int, AllReduceNorm] = WeakValueDictionary()
_handles = count()

# The arguments of the operator that tensors are, and the others, in the order of its schema.
_TENSORS = ("x", "residual", "weight", "bias", "smooth_scale", "y_scale", "global_scale", "scale_ub")
_OPTIONS = (
    "float eps, str? fquant, float? weight_offset, ScalarType? out_dtype, str? cast, int? group_size, "
    "str? scale_format, str? scale_layout, bool? quantise_rounded, bool? save_unquant"
)
_OTHERS = tuple([each.split()[1] for each in _OPTIONS.split(", ")])
_SCHEMA = f"Tensor {', Tensor? '.join(_TENSORS)}, int handle, str collective, str norm, {_OPTIONS}"


def _traced(handle: int, collective: str, norm: str, named: Mapping[str, Any]) -> QuantisedOutput:
    """Call the operator, which passes on all arguments but those that are None."""
    for name in named:
        if name not in _TENSORS and name not in _OTHERS:
            raise TypeError(f"AllReduceNorm got {name!r}; it takes {', '.join((*_TENSORS, *_OTHERS))}")
    tensors, others = [named.get(name) for name in _TENSORS], [named.get(name) for name in _OTHERS]
    results = torch.ops.normforge.all_reduce_norm(*tensors, handle, collective, norm, *others)
    measures = named.get("fquant", "none") in ("dynamic", "smooth_dynamic")
    there = (True, named["residual"] is not None, measures, bool(named.get("save_unquant")))
    left = iter(results)
    return QuantisedOutput._make([next(left) if each else None for each in there])


def _arguments(passed: Sequence[Any]) -> tuple[AllReduceNorm, str, str, dict[str, Any]]:
    """Return the object, the collective and the norm of the operator's arguments, and the others by name."""
    count = len(_TENSORS)
    handle, collective, norm = passed[count : count + 3]
    if handle not in _objects:
        raise DeviceError("a compiled graph calls an AllReduceNorm that is gone; keep it as long as the graph")
    named = dict(zip((*_TENSORS, *_OTHERS), (*passed[:count], *passed[count + 3 :]), strict=True))
    return _objects[handle], collective, norm, {name: each for name, each in named.items() if each is not None}


def _run(*passed: Any) -> list[torch.Tensor]:
    kernel, collective, norm, named = _arguments(passed)
    return [each for each in kernel(**named, collective=collective, norm=norm) if each is not None]


def _fake(*passed: Any) -> list[torch.Tensor]:
    kernel, collective, norm, named = _arguments(passed)
    x, residual = named["x"], named.get("residual")
    if collective == "reduce_scatter":
        named["x"] = x[: x.shape[0] // kernel.ranks]
    elif collective == "all_gather":
        named["x"] = x.new_empty((kernel.ranks * x.shape[0], *x.shape[1:]))
        named["residual"] = None if residual is None else torch.empty_like(named["x"])
    calls, operands, settled, _ = _arranged(norm, named)
    call = check(calls.functions[norm], road.named(calls, operands, settled), addressed=False)
    results = [each for each in results_of(call, call.x.new_empty)[:4] if each is not None]
    if collective == "all_gather" and residual is not None:
        results[1] = torch.empty_like(residual)
    return results


_operator = torch.library.custom_op(
    "normforge::all_reduce_norm", _run, mutates_args=(), schema=f"({_SCHEMA}) -> Tensor[]"
)
_operator.register_fake(_fake)


class _Inbox:
    """Memory of this rank that all ranks of a group can write to.

    Attributes:
        addresses: where the memory of each rank starts, as this rank reaches it.
    """

    def __init__(self, group: Any, size: int, device: torch.device) -> None:
        self._group, self._device = group, device
        if device.type == "cuda":
            from torch.distributed import _symmetric_memory as symmetric

            own = symmetric.empty(size, dtype=torch.int8, device=device)
            self._kept: Any = symmetric.rendezvous(own, group)
            self.addresses: Sequence[int] = list(self._kept.buffer_ptrs)
        else:
            own, *_ = self._kept = self._shared(size)
            self.addresses = [each.data_ptr() for each in self._kept[1:]]
        # Nothing has arrived.
        self._own = own.fill_(-1)

    def _shared(self, size: int) -> list[torch.Tensor]:
        """Return the memory of this rank and that of each, in files that all have mapped before they are removed."""
        ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        with tempfile.TemporaryDirectory(prefix="normforge-") as folder:
            names: list[Any] = [None] * ranks
            dist.all_gather_object(names, str(Path(folder) / "inbox"), group=self._group)
            own = torch.from_file(names[rank], shared=True, size=size, dtype=torch.int8)
            dist.barrier(self._group)
            each = [torch.from_file(name, shared=True, size=size, dtype=torch.int8) for name in names]
            dist.barrier(self._group)
        return [own, *each]

    def meet(self) -> None:
        """Wait until all ranks have emptied their memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.barrier(self._group)
