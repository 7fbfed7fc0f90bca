"""How the tensors of a call lie where they are DTensors: each rank has rows, and the whole of each vector.

Rows, and what there is one of a row (statistics, scales), keep x's placements. Vectors are replicated, and a vector's
gradient is a partial sum wherever rows are sharded. So nothing is moved. What lies otherwise is redistributed first, as
torch does before its own norms: rows become whole, and lie as x does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ..codegen.families import Kind
from ..errors import DeviceError
from ..upstream.torch_dtensor import assembled, settled

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


class Frame:
    """The placements of the tensors of one call.

    Attributes:
        like: x, which says it.
        of_rows: the placements of what has rows: x's, but replicated where those are no whole rows.
        of_vectors: those of what all ranks have.
        of_sums: those of what is summed over rows.
    """

    def __init__(self, function: str, tensors: Mapping[str, torch.Tensor | None], dimensions: int = 1) -> None:
        """Look at the tensors of a call.

        Args:
            function: what is called, for errors.
            tensors: what it was given, by name, x among it.
            dimensions: how many of x's last are a row.

        Raises:
            DeviceError: some are plain tensors, or they are on several meshes.
        """
        from torch.distributed.tensor import DTensor

        x: Any = tensors["x"]
        mesh = getattr(x, "device_mesh", None)
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if not isinstance(tensor, DTensor):
                raise DeviceError(
                    f"{name} is a plain tensor and {function} was given DTensors beside it; pass DTensors alone, "
                    f"DTensor.from_local({name}, mesh, [Replicate()]) say, or the to_local() of each"
                )
            if mesh is not None and tensor.device_mesh != mesh:
                raise DeviceError(f"{name} is on {tensor.device_mesh} and x on {mesh}; redistribute one to the other's")
        self.like: DTensor = x
        self.of_rows, self.of_vectors, self.of_sums = _placements(x.placements, x.dim() - dimensions)

    def part(self, kind: Kind, tensor: torch.Tensor | None) -> Any:
        """Return a rank's part of an operand, whose gradient is a part of the operand's; None for an absent operand."""
        if tensor is None:
            return None
        placements, of_gradient = self._lies(kind, tensor)
        whole: Any = tensor
        if whole.placements != placements:
            whole = whole.redistribute(placements=placements)
        return settled(whole).to_local(grad_placements=of_gradient)

    def _lies(self, kind: Kind, tensor: torch.Tensor) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
        """Return the placements that an operand is to have, and those of its gradient."""
        if kind is Kind.SAMPLES and tensor.dim() < self.like.dim():
            return self._of_samples(tensor.dim() == 1)
        if kind.is_shared:
            return self.of_vectors, self.of_sums
        # One scale may serve all rows.
        is_one = kind.is_scale and tensor.numel() == 1
        return self.of_vectors if is_one else self.of_rows, self.of_rows

    def _of_samples(self, is_one: bool) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
        """Return `_lies` for one vector per sample, or one for all: sharded where samples are, not where rows are."""
        both = zip(self.of_rows, self.of_vectors, self.of_sums, strict=True)
        lies = [
            (row, row) if getattr(row, "dim", None) == 0 and not is_one else (vector, total)
            for row, vector, total in both
        ]
        placements, of_gradient = zip(*lies, strict=True)
        return placements, of_gradient

    @property
    def deals(self) -> bool:
        """Return True if ranks have rows of their own."""
        return self.of_rows != self.of_vectors

    def whole(self, kind: Kind, part: torch.Tensor, operand: torch.Tensor | None = None) -> torch.Tensor:
        """Return the whole of a rank's part of a result, or of the gradient of an operand, which has the same kind."""
        x = self.like
        if operand is not None:
            return assembled(part, x, operand.shape, self._lies(kind, operand)[1])
        if kind is Kind.ROWS:
            n = part.shape[-1]
            # Elements of fp4 are pairs: of y there are half as many.
            shape = x.shape if n == x.shape[-1] else torch.Size((*x.shape[:-1], n))
            return assembled(part, x, shape, self.of_rows)
        if kind is Kind.PER_ROW:
            return assembled(part, x, x.shape[:-1], self.of_rows)
        return assembled(part, x, x.shape[-1:], self.of_sums)


@cache
def _placements(of_x: tuple[Placement, ...], first: int) -> tuple[tuple[Placement, ...], ...]:
    """Return the placements of rows, vectors and sums, where rows are the dimensions from the first on."""
    from torch.distributed.tensor import Partial, Replicate

    # Placements that deal out a dimension name it; they are of several classes, private ones of torch's among them.
    sharded = [getattr(placement, "dim", first) < first for placement in of_x]
    of_rows = [placement if deals else Replicate() for placement, deals in zip(of_x, sharded, strict=True)]
    return (
        tuple(of_rows),
        tuple([Replicate() for _ in of_x]),
        tuple([Partial() if deals else Replicate() for deals in sharded]),
    )
