"""Backward calls whose rows are in parts, of a sample or of a group of columns: planned and launched.

Rows of a part share a modulation, or a group's weight. Each program takes some rows of one part and leaves sums of its
own, which a last kernel adds up in a fixed order. The rows of `codegen.parameters.IN_PARTS` say what launches bring;
`modulated` and `gated` make the gradients of a call's operands from the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ..codegen.families import Family
from ..codegen.model import Mode
from ..codegen.parameters import family_of
from ..dtypes import FLOATS
from ..selection import dispatch, invariance
from ..upstream.torch_internals import eager_only
from . import native
from .check import Call
from .first import copies_of
from .functions import UNCHECKED
from .launch import Ready, run_sized, with_statistics
from .outputs import rounded, unpacked_of
from .plan import LAYOUTS, MISALIGNED, Sized, addresses_of, plan_of, remember
from .record import Arrived, BackwardPass, Gradients, Learnt, arrived_in_memory


class Problem(NamedTuple):
    """The problem that kernels solve for a call.

    Attributes:
        mode: the mode of the kernels.
        parts: how many parts the rows are in.
        inputs: the tensors that kernels read, by name; the last dimension of x is that of all groups.
        dtypes: the dtypes of the results that are due, by name.
        operands: by the names of sums the operands that they are the gradients of, if parts have a row each.
    """

    mode: Mode
    parts: int
    inputs: Mapping[str, torch.Tensor | None]
    dtypes: Mapping[str, torch.dtype]
    operands: Mapping[str, torch.Tensor | None]


class Backward(NamedTuple):
    """The backward pass of one family: by kernels, or by the family's formula.

    Attributes:
        family: the rows.
        of_samples: whether parts are samples, and else groups of columns.
        inputs: picks the inputs in the order of launches from what arrived, the means and rstd.
        saved: makes a named tuple of the tensors that the forward pass saved, of what was normalised first, of the
            means and of rstd.
        serves: from that tuple to True if the parts are as kernels take them.
        formula: from a backward pass, which has that tuple in place of the saved tensors, to gradients.
        laid_out: from the saved tensors and a gradient that arrived to rows that kernels can walk.
        problem: from such a backward pass to what kernels compute.
        of_results: from such a backward pass, and the results by name, to the gradients of the operands.
    """

    family: Family
    of_samples: bool
    inputs: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    saved: Callable[..., Any]
    serves: Callable[[Any], bool]
    formula: Callable[[BackwardPass], Gradients]
    laid_out: Callable[[Any, torch.Tensor], torch.Tensor]
    problem: Callable[[BackwardPass], Problem]
    of_results: Callable[[BackwardPass, Mapping[str, torch.Tensor]], Gradients]

    @classmethod
    def of(cls, family: Family, saved: Any, **own: Callable[..., Any]) -> Backward:
        """Return the backward pass of a family; the last fields of the named tuple `saved` are mean and rstd."""
        names = ("dy", "dresidual_out", *saved._fields[:-2], "statistics", "mean", "rstd")
        of_samples = any(row.name == "sample_rows" for row in family.parameters)
        inputs: Any = itemgetter(*[names.index(row.name) for row in family.inputs])
        return cls(family, of_samples, inputs, saved, **own)

    def takes(self, kept: Any, *arrived: torch.Tensor | None) -> bool:
        """Return True if kernels can compute the gradients of a call: all tensors are in memory, and not empty."""
        there = [tensor for tensor in (*kept, *arrived) if tensor is not None]
        in_memory = arrived_in_memory(there) and all(each.dtype in FLOATS and not each.is_neg() for each in there)
        return in_memory and kept[0].numel() > 0 and self.serves(kept)

    def recorded(self, call: BackwardPass) -> Gradients:
        """Return the gradients of a call that was recorded; see `Recording`."""
        *tensors, statistics = call.saved
        call = call._replace(saved=self.saved(*tensors, *unpacked_of(tensors[0], statistics)))
        if call.dy is None or call.by_formula or not self.takes(call.saved, call.dy, call.dresidual_out):
            return self.formula(call)
        grads: Gradients = self.gradients(call)
        return grads

    @eager_only
    def gradients(self, call: BackwardPass) -> Gradients:
        """Return the gradients of a call's operands, as the formula does, where `takes` has passed the arguments."""
        # Another table may be loaded meanwhile, whose plans must not learn this call.
        plans = dispatch.plans
        arrived = call.dy, call.dresidual_out
        dy, dresidual_out = [None if each is None else self.laid_out(call.saved, each) for each in arrived]
        call = call._replace(dy=dy, dresidual_out=dresidual_out)
        learnt, known = looked_up_again(f"{self.family.name}_gradients", call)
        if known is not None:
            return known
        mode, parts, inputs, dtypes, operands = self.problem(call)
        rows, shape = self.family.inputs, call.saved[0].shape
        n = shape[-1]
        m = shape.numel() // n
        if invariance.is_on():
            inputs = {**inputs, **copies_of(inputs, n, [row.name for row in rows if row.kind.has_row_stride])}
        read = tuple([inputs.get(row.name) for row in rows])
        at = addresses_of(read)
        misaligned = [row.slot for row, each in zip(rows, at, strict=True) if each & MISALIGNED]
        plan = plan_of(call_of(mode, m, n, inputs, dtypes), misaligned)
        of_sums = [_shape_of_sum(operands.get(row.name), parts, n) for row in self.family.results]

        # Plans hold none of a call's tensors.
        weight_offset = call.args.weight_offset

        @lru_cache(LAYOUTS)
        def sizes(shape: torch.Size) -> Sized | None:
            m = shape.numel() // plan.n
            if m == 0:
                return None
            # Kernels tell parts apart by the rows of a sample, or by how many groups there are.
            numbers = m, m // parts if self.of_samples else parts, weight_offset
            return Sized(plan.layout(m, parts), numbers, plan.makes(shape, of_sums))

        sized = sizes(shape)
        assert sized is not None
        results = run_sized(plan, sized, at, read)
        pairs = zip(self.family.results, results, strict=True)
        named = {row.name: result for row, result in pairs if result is not None}
        grads = rounded(self.of_results(call, named), call.args.dtypes, call.due)
        indices = [_index_of(gradient, results) for gradient in grads]
        if learnt is None or None in indices:
            return grads
        key, tensors = learnt
        own = self.inputs(with_statistics(addresses_of(tensors), sized.layout.to_rstd))
        # No call is known whose kernels read copies. Kernels are not given what their mode does not read.
        if all(each == its or not row.is_wanted(mode) for row, each, its in zip(rows, at, own, strict=True)):
            order: Any = itemgetter(*[index for index in indices if index is not None])
            ready = Ready(plan, self.inputs, order, sizes)
            remember(plans, key, tensors, self._free(mode, tensors), addresses_of(tensors), ready)
        return grads

    def _free(self, mode: Mode, arrived: Arrived) -> list[int]:
        """Return how many leading sizes of each tensor may be any in a call of the same kind."""
        if self.of_samples:
            # Which rows share a modulation follows from all sizes.
            return [0] * len(arrived)
        x = arrived[2]
        assert x is not None
        # No more than one, so that a guard holds all strides: rows with gaps between them are read by another stride.
        free = min(x.dim() - 1 - mode.grouped, 1)
        are_rows = [tensor is not None and tensor.shape == x.shape and tensor.dim() > 1 for tensor in arrived[:-1]]
        return [*[free * each for each in are_rows], free]


def call_of(mode: Any, m: int, n: int, inputs: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> Call:
    """Return the call of a backward mode, or of GroupNorm, whose operands are checked elsewhere.

    Args:
        mode: the mode, or a `GroupMode`.
        m: how many rows of n elements there are, those of all parts.
        n: row length.
        inputs: the tensors that kernels read, by name; the last dimension of x is that of all groups.
        dtypes: the dtypes of the results that are due, by name.
    """
    function = UNCHECKED[family_of(mode).functions[mode.norm]]
    args = {f"{name}_dtype": dtype for name, dtype in dtypes.items()}
    return Call(function, mode, m, n, tuple(dtypes), {**dict(function.defaults), **inputs, **args})


def looked_up_again(family: str, call: BackwardPass) -> tuple[Learnt | None, Gradients | None]:
    """Look a call up again whose gradients had to be copied: the copies may be like the gradients of a call before.

    Args:
        family: the name of the look-up among `native.calls`.
        call: the backward pass, with gradients as kernels can walk them.

    Returns:
        The key and tensors of the last look-up, and the gradients if the call is known.
    """
    learnt, laid_out = call.learnt, (call.dy, call.dresidual_out)
    if learnt is None or all(own is passed for own, passed in zip(laid_out, learnt[1], strict=False)):
        return learnt, None
    arrived = (*laid_out, *learnt[1][2:])
    key, known = getattr(native.calls, family).known_gradients(arrived, call.args, tuple(call.due))
    return (key, arrived), known


def _shape_of_sum(operand: torch.Tensor | None, parts: int, n: int) -> Sequence[int]:
    return (parts, n) if operand is None or operand.numel() != parts * n else operand.shape


def _index_of(gradient: torch.Tensor | None, results: Sequence[torch.Tensor | None]) -> int | None:
    """Return the index of a gradient among results, their number for no gradient; None if it is none of them."""
    if gradient is None:
        return len(results)
    for index, result in enumerate(results):
        if result is not None and result.data_ptr() == gradient.data_ptr():
            return index if result.shape == gradient.shape and result.dtype is gradient.dtype else None
    return None


def sum_dtype(operand: torch.Tensor, parts: int) -> torch.dtype:
    """In which type to add up what parts leave of an operand: its own, or fp32 if all parts share it and are added."""
    return operand.dtype if operand.numel() == parts * operand.shape[-1] else torch.float32


def shared_sum(totals: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an operand that each part has a row of, or all parts share, from the sums of parts."""
    return totals.view(operand.shape) if totals.numel() == operand.numel() else totals.sum(0)
