"""Cells of modulated norms: rows of samples, scaled and shifted by sample."""

from __future__ import annotations

from dataclasses import dataclass

from .cells import DTYPES, Cell, Task


@dataclass(frozen=True)
class ModulatedCell(Cell):
    """A modulated norm without a weight, as DiT has it.

    Attributes:
        samples: of which the rows are, as many of each.
        gated: whether x is gated by sample and a residual added first, and the sum returned too.
    """

    samples: int = 32
    gated: bool = False

    @property
    def kind(self) -> str:
        """Everything but the shape, as in `ln_bf16_gated`."""
        return "_".join(filter(None, (super().kind, "gated" if self.gated else "")))

    @property
    def leading(self) -> tuple[int, ...]:
        """The shape of x but for its columns."""
        samples = min(self.samples, self.m)
        return samples, self.m // samples

    @property
    def bytes_moved(self) -> int:
        """Whole tensors only, each once.

        Forward x and y, and of a gated cell the residual and the sum. Backward x, dy and dx; of a gated cell the sum
        and its gradient are read too, and the residual's gradient is written.
        """
        whole = 3 if self.task is Task.MODULATED_BACKWARD else 2
        gated = 3 if self.task is Task.MODULATED_BACKWARD else 2
        rows = self.leading[0] * self.leading[1]
        return rows * self.n * DTYPES[self.dtype].itemsize * (whole + (gated if self.gated else 0))
