"""Allocates what a call returns, and launches its kernels: in Python, what `upstream/native.c` does in C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ..kernels.launcher import new_exchange
from .outputs import LayerNormOutput, NormGradients
from .plan import Layout, Plan, PlannedCall, Sized, Tensors, addresses_of, make_of

# The values of launches that one launch is to make; None for a call that is launched by itself.
Held = list[tuple[Any, ...]] | None

# Without the Python function that a named tuple's constructor is: 0.2 us of every call.
make_output = tuple.__new__


def run(
    planned: PlannedCall,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    *,
    packed: bool = False,
    held: Held = None,
) -> LayerNormOutput:
    """Allocate what a forward call returns and launch the kernel of its plan, unless there are no rows.

    Args:
        planned: the call, looked up or prepared.
        out: where y goes, or None for a new tensor.
        residual_out: where the stored sum goes, or None for a new tensor.
        packed: whether mean and rstd are in one tensor, which is returned as rstd.
        held: see `run_sized`.

    Returns:
        The results of the family's rows; GroupNorm has y, mean and rstd alone.
    """
    plan, addresses, tensors, shape, _, numbers = planned
    outs = out, residual_out
    results = run_sized(plan, plan.at(shape), addresses, tensors, numbers, outs, packed=packed, held=held)
    return make_output(LayerNormOutput, results)


# Launches a call that autograd records: rstd is one tensor with the means.
run_recorded = partial(run, packed=True)

# y, the stored sum or None, the statistics of the rows in one tensor, and whether the call is batch invariant.
Recorded = tuple[torch.Tensor, "torch.Tensor | None", torch.Tensor, bool]


def recorded_of(planned: Any, held: Held = None) -> Recorded:
    """Launch a call that was looked up or planned, for autograd to record; `held` is as in `run_sized`."""
    y, total, *_, statistics = run_recorded(planned, held=held)
    assert statistics is not None
    return y, total, statistics, planned[0].is_invariant


def run_backward(planned: PlannedCall) -> NormGradients:
    """Allocate what a backward call of some rows returns and launch the kernels of its plan.

    rstd may be in one tensor with the means, if there are any, and mean None; the addresses are each one's own.
    """
    plan, addresses, tensors, shape, _, numbers = planned
    sized, ddropped = plan.at(shape), None
    _, *dropout_p = numbers
    brought: tuple[Any, ...] = numbers
    if dropout_p:
        of_dropped = make_of(shape, plan.dtypes[-1])
        ddropped = None if of_dropped is None else plan.empty(*of_dropped)
        (further,) = addresses_of((ddropped,)) if sized.layout.by_address else (ddropped,)
        brought = (*numbers, further)
    return make_output(NormGradients, (*run_sized(plan, sized, addresses, tensors, brought), ddropped))


class Ready(NamedTuple):
    """The launches of backward calls whose tensors are like those of one that was checked, all but where they lie.

    Attributes:
        plan: the kernels.
        inputs: picks what launches bring from what arrived, the means and rstd.
        order: picks the gradients of a call's operands from the results, behind which None stands.
        at: from the shape of what was normalised to how calls are launched; None if there are no rows.
    """

    plan: Plan
    inputs: Callable[[Any], tuple[Any, ...]]
    order: Callable[[Any], Sequence[torch.Tensor | None]]
    at: Callable[[torch.Size], Sized | None]

    def run(self, arrived: Tensors, addresses: Sequence[int]) -> Sequence[torch.Tensor | None] | None:
        """Launch a call and return the gradients of its operands; None if there are no rows."""
        x = arrived[2]
        assert x is not None
        sized = self.at(x.shape)
        if sized is None:
            return None
        inputs = self.inputs(with_statistics(addresses, sized.layout.to_rstd))
        tensors = self.inputs((*arrived, None, arrived[-1]))
        return self.order((*run_sized(self.plan, sized, inputs, tensors), None))


def with_statistics(addresses: Sequence[int], to_rstd: int) -> tuple[int, ...]:
    """Return the addresses of what arrived, of the means and of rstd; the last tensor holds both statistics."""
    at = addresses[-1]
    return *addresses, at if to_rstd else 0, at + to_rstd


def run_sized(
    plan: Plan,
    sized: Sized,
    addresses: Sequence[int],
    tensors: Tensors,
    numbers: tuple[Any, ...] = (),
    outs: Tensors = (),
    *,
    packed: bool = False,
    held: Held = None,
    exchange: torch.Tensor | None = None,
) -> list[Any]:
    """Allocate the results for which no tensor was passed, and launch the kernels, unless there are no rows.

    Args:
        plan: the call's.
        sized: how calls of the shape are launched.
        addresses: of the tensors that are read, in the family's order; 0 where there is none.
        tensors: these themselves; rstd may hold the means too, and mean be None.
        numbers: what launches bring behind the numbers of `sized`.
        outs: where the first results go, None for new tensors.
        packed: see `run`.
        held: takes what a launch of the forward kernel would bring; None launches the kernel.
        exchange: memory that GPUs exchange values through; None for kernels that need none, or a new one.
    """
    layout, own, makes, recorded = sized
    empty = plan.empty
    results: list[torch.Tensor | None] = []
    for make, out in zip_longest(recorded if packed else makes, outs):
        if make is None:
            results.append(None)
        elif out is None:
            results.append(empty(*make))
        else:
            # A tensor that autograd saved has changed: autograd finds out by the version.
            increment_version(out)
            results.append(out)
    if not layout.steps:
        return results
    work = None if layout.memory is None else empty(*layout.memory)
    if layout.exchange:
        exchange = new_exchange(empty, layout.exchange)
    read: Sequence[Any]
    written: list[Any]
    pieces: list[Any]
    if layout.by_address:
        read, written = addresses, addresses_of(results)
        if packed:
            at = written[-1]
            written[-2:] = at if layout.to_rstd else 0, at + layout.to_rstd
        base, behind = addresses_of((work, exchange))
        pieces, absent = [*[base + offset for offset in layout.offsets], behind], 0
    else:
        read, written = _as_tensors(plan, layout, tensors, results)
        wanted = [*plan.sum_dtypes, *layout.offsets[layout.sums :]]
        starts = [
            None if each is None else at // torch.float32.itemsize
            for each, at in zip(wanted, layout.offsets, strict=True)
        ]
        pieces = [None if start is None or work is None else work[start:] for start in starts]
        pieces, absent = [*pieces, exchange], None
    rows = len(written) - layout.sums
    inputs = (*read, *written[:rows], *pieces, *own, *numbers)
    if held is not None:
        held.append(inputs)
        return results
    for launch, grid in layout.steps:
        launch(grid, inputs)
    if layout.finish is not None:
        launch, grid = layout.finish
        launch(grid, layout.adds((layout.programs, absent, *written[rows:], *pieces)))
    return results


def _as_tensors(
    plan: Plan, layout: Layout, tensors: Sequence[Any], results: Sequence[Any]
) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the tensors that are read and the results, as kernels that take tensors need them."""
    names = [*[row.name for row in plan.family.inputs], *[row.name for row in plan.family.results[: len(results)]]]
    by_name = dict(zip(names, (*tensors, *results), strict=True))
    packed = by_name.get("rstd")
    if packed is not None and by_name["mean"] is None and layout.to_rstd:
        packed = packed.view(-1)
        rstd = packed[layout.to_rstd // packed.itemsize :]
        by_name["mean"], by_name["rstd"] = packed[: rstd.numel()], rstd
    for name in plan.as_bytes:
        tensor = by_name[name]
        # Kernels read only the address, and a tensor of wider elements with gaps has no view of bytes.
        by_name[name] = None if tensor is None else tensor.as_strided((1,), (1,)).view(torch.uint8)
    ordered = tuple(by_name.values())
    return ordered[: len(tensors)], list(ordered[len(tensors) :])
