"""Calls of no known kind: an operator if something sees operators, and else checked, launched and made known."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..codegen.families import Family, Kind, Parameter
from ..codegen.parameters import BACKWARD, FORWARD
from ..codegen.values import Direction, Norm
from ..errors import DTypeError, LayoutError
from ..kernels.gpu import require_device
from ..kernels.strides import row_alignment, starts_aligned
from ..selection import dispatch, invariance
from ..upstream.torch_internals import dispatch_modes, eager_only
from .backend import sees_operators
from .check import Call, check, refuse_gradient
from .launch import run, run_backward
from .outputs import LayerNormOutput, NormGradients, results_of, unpacked
from .plan import MISALIGNED, Key, Plan, PlannedCall, Tensors, remember
from .randomness import settled
from .traced import function_traced, is_dynamo_compiling

Args = Mapping[str, Any]


def first(family: Family, norm: str, key: Key | None, args: Args) -> Any:
    """Run a call of a function of a norm alone that is not known.

    Args:
        family: the rows of the function, `FORWARD` or `BACKWARD`.
        norm: the norm's word.
        key: the key that the call was looked up by; None if the call cannot be known.
        args: the arguments by name.

    Raises:
        NormforgeError: as `layernorm2d_fwd` and `layernorm2d_bwd` list them.
    """
    # An operator may take what no kernel does.
    if dispatch_modes() or any(sees_operators(args.get(row.name)) for row in family.operands):
        return function_traced(family, norm, args)
    return launched(family, norm, key, args)


def traced_forward(norm: str, **args: Any) -> LayerNormOutput:
    """Run a forward call that TorchDynamo follows, as an operator."""
    outputs: LayerNormOutput = function_traced(FORWARD, norm, _with_mask(args, draws=True))
    return outputs


def traced_backward(norm: str, **args: Any) -> NormGradients:
    """Run a backward call that TorchDynamo follows, as an operator."""
    gradients: NormGradients = function_traced(BACKWARD, norm, _with_mask(args, draws=False))
    return gradients


def _with_mask(args: dict[str, Any], *, draws: bool) -> dict[str, Any]:
    """Return the arguments, what the mask of a dropout follows from being settled."""
    p, rng = args.get("dropout_p", 0.0), args.get("dropout_rng")
    if p != 0.0 or rng is not None or type(p) is not float:
        args["dropout_p"], args["dropout_rng"] = settled(p, rng, args["x"], draws=draws)
    return args


@eager_only
def launched(family: Family, norm: str, key: Key | None, args: Args, *, packed: bool = False) -> Any:
    """Launch a call that nothing sees; of a backward call that is packed, rstd holds the means too, if any."""
    inputs = {row.name: resolved(args.get(row.name)) for row in family.inputs}
    call = check(family.functions[Norm(norm)], {**args, **inputs}, packed=packed)
    refuse_gradient(call)
    require_device(call.x)
    if family.direction is Direction.FORWARD:
        lies = as_invariant(call)
        results = run(prepared(lies, key if lies is call else None, args), lies.out, lies.residual_out)
        return results if lies is call else _landed(call, results)
    if call.m == 0:
        # Sums of nothing.
        return NormGradients(*results_of(call, call.x.new_zeros))
    x = call.x
    if call.dy is None:
        # One row of zeros, of stride 0, serves as all rows.
        key, call = None, call.with_args(dy=torch.zeros(call.n, dtype=x.dtype, device=x.device).expand(x.shape))
    if packed:
        mean, rstd = unpacked(call.rstd, call.m)
        call = call.with_args(mean=mean, rstd=rstd)
    lies = as_invariant(call)
    return run_backward(prepared(lies, key if lies is call else None, args))


def _landed(passed: Call, results: LayerNormOutput) -> LayerNormOutput:
    """Return the results of a call of copies, copied to the tensors that were passed as `out`."""
    for out, result in passed.function.outs:
        own, computed = passed.args[out], getattr(results, result)
        if own is not None and own is not computed:
            results = results._replace(**{result: own.copy_(computed)})
    return results


def as_invariant(call: Call) -> Call:
    """Return a call as batch invariance wants its tensors to lie; the very call if its own do, or none is asked for."""
    if not (invariance.is_on() and call.m):
        return call
    rows = [row for row in call.function.family.operands if row.is_read_in_vectors]
    of_rows = [row.name for row in rows if row.kind.has_row_stride]
    # The copy of `out` is written to, and the results are copied from there to the tensor that was passed.
    copies = copies_of({row.name: getattr(call, row.name) for row in rows}, call.n, of_rows)
    return call.with_args(**copies) if copies else call


def copies_of(tensors: Mapping[str, torch.Tensor | None], n: int, of_rows: Collection[str]) -> dict[str, torch.Tensor]:
    """Return copies of those tensors that do not lie as N says, by name; `of_rows` names those that have rows."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        for name, tensor in tensors.items()
        if tensor is not None and not lies_so(tensor, n, of_rows=name in of_rows)
    }


def lies_so(tensor: torch.Tensor, n: int, *, of_rows: bool) -> bool:
    """Return True if a tensor, of rows of n or a vector, lies as N alone says, so that one kernel serves every row.

    How Triton cuts a row among threads, and so in what order the row is added up, follows from what the address of the
    row is a multiple of. Of rows that adjoin N says that. Batch-invariant calls copy a tensor that lies otherwise.
    """
    if of_rows and not starts_aligned(n):
        return True
    if tensor.data_ptr() & MISALIGNED:
        return False
    leading = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return not of_rows or all(stride % row_alignment(n) == 0 for size, stride in leading if size > 1)


def prepared(call: Call, key: Key | None, args: Args) -> PlannedCall:
    """Plan a call that was checked, make calls like it known, and return what launches take.

    Args:
        call: the call, of tensors that kernels read and write.
        key: the key that the call was looked up by; None for a call that cannot be known.
        args: the arguments that the call was looked up with, by name.

    Raises:
        LayoutError: a tensor has no memory.
    """
    plans, family = dispatch.plans, call.function.family
    rows = (*family.inputs, *family.outs)
    tensors: Tensors = tuple([getattr(call, row.name) for row in rows])
    addresses = tuple([address_of(row.argument or row.name, tensor) for row, tensor in zip(rows, tensors, strict=True)])
    plan = Plan(call, [row.slot for row, at in zip(rows, addresses, strict=True) if at & MISALIGNED])
    passed: Tensors = tuple([args.get(row.name) for row in rows])
    if call.m:
        vectors = tuple([at for row, at in zip(rows, addresses, strict=True) if row.is_read_in_vectors])
        remember(plans, key, passed, _free(rows, passed, call.x), vectors, plan)
    inputs = len(family.inputs)
    numbers = {row.name: float(getattr(call, row.name)) for row in family.parameters if row.kind is Kind.NUMBER}
    brought = tuple([number for name, number in numbers.items() if number or name != "dropout_p"])
    return plan, addresses[:inputs], tensors[:inputs], call.x.shape, call.m, brought


def refuse_foreign(family: Family, args: Args) -> None:
    """Refuse tensors that an operator can be given, and a kernel not.

    Raises:
        DTypeError: there is one.
    """
    for row in family.operands:
        if sees_operators(tensor := args.get(row.name)):
            raise DTypeError(
                f"{row.name} is a {type(tensor).__name__}, and kernels read memory; pass the tensor that it wraps"
            )


def resolved(tensor: Any) -> Any:
    """Return the argument itself, or a copy of a tensor whose memory holds negated values."""
    # TorchDynamo follows no is_neg, and a transform of torch.func wraps the tensor that resolve_neg returns.
    is_asked = isinstance(tensor, torch.Tensor) and (is_dynamo_compiling() or tensor.is_neg())
    return tensor.resolve_neg() if is_asked else tensor


def _free(rows: Sequence[Parameter], tensors: Tensors, x: torch.Tensor) -> list[int]:
    """Return how many leading sizes of each tensor may be any in a call of the same kind; 0 for one that all share."""
    leading = x.dim() - 1
    of_rows = [None if row.kind.is_shared else tensor for row, tensor in zip(rows, tensors, strict=True)]
    there = [(row, tensor) for row, tensor in zip(rows, of_rows, strict=True) if tensor is not None]
    # Any number of samples; and where tensors are not contiguous any first size. The key holds the other sizes then.
    if any(row.kind is Kind.SAMPLES or not tensor.is_contiguous() for row, tensor in there):
        leading = min(leading, 1)
    if any(row.kind is Kind.OUT and _widens(tensor) for row, tensor in there):
        # The checked rows do not overlap, and more of them might.
        leading = 0
    return [
        0 if tensor is None else min(leading, tensor.dim() - row.kind.has_row_stride)
        for row, tensor in zip(rows, of_rows, strict=True)
    ]


def _widens(tensor: torch.Tensor) -> bool:
    """Return True if rows of other dimensions lie between those of the first, whose size is then fixed."""
    if tensor.is_contiguous():
        return False
    first, *others = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return any(size > 1 and stride > first[1] for size, stride in others)


def address_of(name: str, tensor: torch.Tensor | None) -> int:
    """Return the address of a checked tensor; 0 for an absent or empty one.

    Raises:
        LayoutError: it has no memory of its own.
    """
    if tensor is None:
        return 0
    try:
        at = tensor.data_ptr()
    except RuntimeError:
        at = 0
    if not at and tensor.numel():
        raise LayoutError(
            f"{name} (shape {tuple(tensor.shape)}, {type(tensor).__name__}) has no memory that a kernel could use: its "
            "storage was freed, a transform of torch.func wraps it, or its class keeps its values elsewhere; pass a "
            "plain tensor, or call normforge.layer_norm or rms_norm, which run torch's own operator in a transform"
        )
    return at
