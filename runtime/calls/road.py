"""The one road of calls, whatever their family: known or checked, launched, and recorded by autograd.

What one family has of its own is a row of data, a `FamilyCalls`, in its file of families/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import torch

from ..codegen.families import Family, Parameter
from ..codegen.values import Cast, FusedQuant
from ..dtypes import word
from ..errors import ConflictError, LayoutError, ShapeError
from ..kernels.gpu import ALIGNMENT, require_device
from ..selection import invariance
from ..upstream.torch_internals import constant_in_traces, eager_only
from . import native
from .check import Call, check, check_output, refuse_gradient
from .first import address_of, as_invariant, resolved
from .first import prepared as planned
from .launch import Recorded, recorded_of, run
from .outputs import LayerNormOutput, dtypes_of, packed_of
from .plan import MISALIGNED, Key, PlannedCall
from .record import Launched, Recording, record, record_at_once, records
from .row_layout import walkable
from .traced import intercepted, is_dynamo_compiling, operated, operated_as, result_dtype

# The tensors of a call, in the order in which launches bring them, None for those that are not there.
Operands = tuple[Any, ...]
# The norm's word, and the other arguments of a call, in the order of the rows; whether statistics are saved comes last.
Options = tuple[Any, ...]
# The tensors that outputs go to, y and the stored sum first; None for new tensors.
Outs = tuple["torch.Tensor | None", ...]


def check_outs(call: Call, outs: Sequence[torch.Tensor | None], addressed: bool) -> dict[str, torch.Tensor]:
    """Check the tensors that y and the stored sum go to, which plans take to be contiguous and aligned.

    Returns:
        All that has an address by name, what is read and these.

    Raises:
        NormforgeError: as `layernorm2d_fwd` lists them.
    """
    others = call.tensors_read() if addressed else {}
    for name, result, out in zip(("out", "residual_out"), ("y", "residual_out"), outs, strict=True):
        dtype = call.dtype_of(result)
        if out is None:
            continue
        if dtype is None:
            raise ConflictError(f"{name} was passed and no residual is added to x; pass residual, or leave {name} out")
        rows, packs = call.x, call.mode.dtype_out.packs
        if result == "y" and packs > 1:
            # Torch has fewer elements for y: each holds several.
            rows = rows[..., ::packs]
            if isinstance(out, torch.Tensor) and out.shape != rows.shape:
                raise ShapeError(
                    f"out has shape {tuple(out.shape)}; it takes {tuple(rows.shape)}, {packs} of y's elements in each"
                )
        check_output(name, out, rows, dtype, others, addressed)
        if not out.is_contiguous():
            raise LayoutError(f"{name} has strides {out.stride()}; it takes a contiguous tensor")
        if addressed:
            if address_of(name, out) & MISALIGNED:
                raise LayoutError(f"{name} starts at no multiple of {ALIGNMENT} bytes; pass a tensor that does")
            others[name] = out
    return others


def _launch(planned: PlannedCall, options: Options, outs: Outs) -> LayerNormOutput:
    return run(planned, *outs[:2])


def _nothing(*_: Any) -> NoReturn:
    """Raise, in place of a function that a family without gradients lacks."""
    raise AssertionError("calls without gradients are never recorded")


def _record(calls: FamilyCalls, operands: Operands, options: Options, recorded: Recorded | None) -> Any:
    return record((calls.recording, (calls, options, recorded)), *operands)


def record_known(calls: FamilyCalls, operands: Operands, options: Options, recorded: Recorded) -> Any:
    """Record a call that was found and launched."""
    return record_at_once((calls.recording, (calls, options, recorded)), *operands)


class FamilyCalls(NamedTuple):
    """The row of a family: everything that the road reads about its calls.

    Fields are plain values, because TorchDynamo follows the code that reads them.

    Attributes:
        name: the name of the family's look-up.
        functions: names of functions, by the norm's word; TorchDynamo of torch 2.11 can make no enum of that word.
        rows: the rows of the tensors that calls bring.
        inputs: their names.
        options: the names of the other arguments, behind the norm.
        output: the class of a call's outputs.
        check: refuse calls whose outputs cannot go to the tensors that were passed.
        launch: from the plan, the options and the outs to a call's outputs.
        eager: the family's formula in torch's operators, from the operands and the options to outputs.
        saved: from the tensors, and the stored sum if there is one, to the tensors that a backward pass needs, the
            first of x's shape; statistics are saved behind them.
        args: from the options, the tensors' dtypes and y's to the other arguments of the backward pass.
        recording: how autograd records the family's calls; None for a family without gradients.
        record: records a call that is not known, given the row, the operands, the options and what was launched, or
            None for a call of an operator.
        looked_up: how many of the operands, and of the options, calls are looked up by; None for all.
    """

    name: str
    functions: Mapping[str, str]
    rows: tuple[Parameter, ...]
    inputs: tuple[str, ...]
    options: tuple[str, ...]
    output: Any = LayerNormOutput
    check: Callable[[Call, Outs, bool], object] = check_outs
    launch: Callable[[PlannedCall, Options, Outs], Any] = _launch
    eager: Callable[[Any, Any], Any] = _nothing
    saved: Callable[[Operands, torch.Tensor | None], tuple[torch.Tensor | None, ...]] = _nothing
    args: Callable[..., Any] = _nothing
    recording: Recording | None = None
    record: Callable[..., Any] = _record
    looked_up: tuple[int | None, int | None] = (None, None)

    def find(self, operands: Operands, options: Options) -> tuple[Key | None, PlannedCall | None]:
        """Return the key of a call, or None; and what `launch.run` takes of a known call, or None of another."""
        rows, count = self.looked_up
        key, _, planned = getattr(native.calls, self.name).find(operands[:rows], options[:count])
        return key, planned if planned is None or rows is None else with_rng(planned, operands[-1])


def with_rng(planned: PlannedCall, rng: Any) -> PlannedCall:
    """Complete what a look-up found of a call with a dropout, whose seed and offset it does not see."""
    plan, addresses, tensors, *others = planned
    complete = (plan, (*addresses[:-1], address_of("dropout_rng", rng)), (*tensors[:-1], rng), *others)
    return cast("PlannedCall", complete)


# The rows of the families that were imported, by their names.
ROWS: dict[str, FamilyCalls] = {}


def calls_of(family: Family, **own: Any) -> FamilyCalls:
    """Return the row of a family; `own` is what the family's parameters do not say."""
    rows = tuple([row for row in family.inputs if row.functional])
    facts = {
        "name": family.name,
        # By the word.
        "functions": {norm.value: name for norm, name in family.functions.items()},
        "rows": rows,
        "inputs": tuple([row.name for row in rows]),
        "options": tuple([row.name for row in family.parameters if row.functional and not row.kind.is_tensor]),
    }
    calls = FamilyCalls(**(facts | own))
    if calls.recording is not None:
        native.record_by(calls.name, partial(record_known, calls))
    return ROWS.setdefault(calls.name, calls)


@constant_in_traces
def function_of(family: str, norm: str) -> tuple[str, tuple[str, ...]]:
    """Return the name of a function, and the names of a call's operands and options."""
    row = ROWS[family]
    return row.functions[norm], (*row.inputs, *row.options)


def named(calls: FamilyCalls, operands: Operands, options: Options) -> dict[str, Any]:
    """Return the arguments of a call by the names of its rows, the norm left out; the last options may be missing."""
    _, names = function_of(calls.name, options[0])
    return dict(zip(names, (*operands, *options[1:]), strict=False))


def operands_of(calls: FamilyCalls, args: Mapping[str, Any]) -> Operands:
    """Return the tensors of a call, given its arguments by name."""
    return tuple([args.get(name) for name in calls.inputs])


def options_of(calls: FamilyCalls, norm: str, args: Mapping[str, Any]) -> Options:
    """Return the options of a call, given its arguments by name; 0 for a number that the norm lacks."""
    return (norm, *[args.get(name, 0.0) for name in calls.options])


def as_operands(operands: Operands, dimensions: int) -> Operands:
    """Return operands that kernels can walk, the last `dimensions` of each as one; each copied once if need be."""
    return tuple([None if operand is None else walkable(operand.flatten(-dimensions)) for operand in operands])


def normalise(calls: FamilyCalls, operands: Operands, options: Options) -> Any:
    """Launch the kernel that serves arguments which were checked, recording it where a gradient is due.

    Where something sees operators the call is an operator, and saves the same tensors for the backward pass.

    Args:
        calls: its family's row.
        operands: its tensors.
        options: its other arguments; whether statistics are saved is None, and follows from the operands.

    Returns:
        y, and residual_out where there is a residual.
    """
    rows, settled, planned = ready(calls, operands, options)
    if settled[-1]:
        return calls.record(calls, rows, settled, None if planned is None else recorded_of(planned))
    y, total, *_ = operate(calls, rows, settled) if planned is None else run(planned)
    return y if total is None else (y, total)


def ready(calls: FamilyCalls, operands: Operands, options: Options) -> tuple[Operands, Options, PlannedCall | None]:
    """Return what `normalise` launches: operands that kernels can walk, complete options, and a plan.

    There is no plan if something has to see operators.
    """
    # Resolved here, where autograd sees it, and not by what launches.
    rows = as_operands(tuple(map(resolved, operands)), 1)
    settled = with_saves(rows, options)
    if intercepted(*rows):
        return rows, settled, None
    # Copies may be like the tensors of a call before.
    key, planned = calls.find(rows, options)
    return rows, settled, planned or prepared(calls, rows, settled, key)


def with_saves(operands: Operands, options: Options) -> Options:
    """Return options that say whether statistics are saved: they are if a gradient is due."""
    return (*options[:-1], records(operands))


def normalise_traced(calls: FamilyCalls, operands: Operands, options: Options) -> Any:
    """Run `normalise` as one operator, and the copies before it."""
    y, total, _ = operate(calls, as_operands(operands, 1), with_saves(operands, options))
    return y if total is None else (y, total)


def run_seen(calls: FamilyCalls, operands: Operands, options: Options) -> Recorded:
    """Return what `launch.recorded_of` returns, computed by an operator."""
    y, total, statistics = operate(calls, operands, options)
    return y, total, packed_of(*statistics), invariance.is_on()


def operate(
    calls: FamilyCalls, operands: Operands, options: Options
) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """Call the operator of a function, and return y, the sum if there is one, and the statistics that it saved."""
    args = named(calls, operands, options)
    args["out_dtype"] = _out_dtype(options[0], args)
    if "cast" in args:
        args["cast"] = word(Cast, "cast", args["cast"]).value
    function, _ = function_of(calls.name, options[0])
    y, *others = operated(function, args)
    sums = args.get("residual") is not None and args.get("fadd") != "post_add"
    return y, others[0] if sums else None, others[sums:]


def _out_dtype(norm: str, args: Mapping[str, Any]) -> torch.dtype | None:
    """Return y's dtype, which autocast has a say in unless y is quantised; None for the default."""
    quantises = "fquant" in args and word(FusedQuant, "fquant", args["fquant"]).quantises
    dtype: torch.dtype | None = args.get("out_dtype")
    return dtype if dtype is not None or quantises else result_dtype(norm, args["x"])


@eager_only
def prepared(calls: FamilyCalls, operands: Operands, options: Options, key: Key | None) -> PlannedCall:
    """Check a call, make its kind known, and return what `launch.run` and `recorded_of` are to be given.

    Args:
        calls: its family's row.
        operands: its tensors.
        options: its other arguments.
        key: what it was looked up by; None if it cannot be known.

    Raises:
        NormforgeError: as `layernorm2d_fwd` lists them.
    """
    native.start()
    args = named(calls, operands, options)
    args["out_dtype"] = _out_dtype(options[0], args)
    call = check(calls.functions[options[0]], args)
    require_device(call.x)
    lies = as_invariant(call)
    # The seed and offset of a mask are settled behind the look-up.
    return planned(lies, key if lies is call else None, {**args, "dropout_rng": None})


def launched(calls: FamilyCalls, operands: Operands, options: Options, outs: Outs = (None, None, None)) -> Any:
    """Return all outputs of a call that autograd does not see, known or not; `outs` are as `launched_2d` takes them."""
    key, planned = calls.find(operands, options)
    return calls.launch(planned or prepared(calls, operands, options, key), options, outs)


def options_2d(operands: Operands, options: Options) -> Options:
    """Return the options of a 2d function as operators take them, y in x's dtype whatever autocast would have."""
    *others, fquant, out_dtype, saves = options
    # A member may be passed for a word, and the operator's schema has words alone.
    quantised = word(FusedQuant, "fquant", fquant).value
    if out_dtype is None and quantised == "none" and isinstance(operands[0], torch.Tensor):
        out_dtype = operands[0].dtype
    return (*others, quantised, out_dtype, saves)


def launched_2d(calls: FamilyCalls, operands: Operands, options: Options, outs: Outs = (None, None)) -> Any:
    """Run a call of a 2d function, as an operator if something sees operators, and return all its outputs.

    Args:
        calls: its family's row.
        operands: its tensors.
        options: its other arguments.
        outs: where outputs go, None for new tensors.

    Raises:
        NormforgeError: as `layernorm2d_fwd` lists them.
    """
    seen = is_dynamo_compiling() or intercepted(*operands, *outs)
    planned = None if seen else calls.find(operands, options)[1]
    if planned is None or records(operands) or any(out is not None for out in outs):
        call = check(calls.functions[options[0]], named(calls, operands, options), addressed=not seen)
        refuse_gradient(call)
        calls.check(call, outs, not seen)
    if seen:
        results: Any = operated_as(calls.functions[options[0]], call, calls.output._fields)
        for at, out in enumerate(outs[:3]):
            if out is not None and results[at] is not None:
                # Scales may be wanted in another shape.
                results[at] = out.copy_(results[at] if at < 2 else results[at].view(out.shape))
        return calls.output(*results)
    if planned is None:
        made = launched(calls, tuple(map(resolved, operands)), options, outs)
    else:
        made = calls.launch(planned, options, outs)
    # Calls that autograd cannot record were refused.
    return calls.record(calls, operands, options, made) if records(operands) else made


def launch_recorded(call: tuple[FamilyCalls, Options, Recorded | None], operands: Operands) -> Launched:
    """Return what a launch computed for autograd, or call the operator; see `Recording.launch`."""
    calls, options, recorded = call
    y, total, statistics, is_invariant = recorded or run_seen(calls, operands, options)
    args = calls.args(options, dtypes_of(operands), y.dtype)
    return y, total, (*calls.saved(operands, total), statistics), args, is_invariant
