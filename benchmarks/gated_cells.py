"""Cells of gated norms: rows times an activated gate of their own shape."""

from __future__ import annotations

from dataclasses import dataclass

from .cells import Cell


@dataclass(frozen=True)
class GatedCell(Cell):
    """A gated norm, activated by SiLU.

    Attributes:
        gate_first: whether what is normalised was gated, as Mamba2 has it.
        columns: of a group that is normalised by itself; 0 is all.
        projected: whether x and the gate are halves of one tensor, and so rows on a stride of twice their length.
    """

    gate_first: bool = False
    columns: int = 0
    projected: bool = False

    @property
    def kind(self) -> str:
        """Everything but the shape, as in `rms_bf16_first_g1024`."""
        words = (
            "first" if self.gate_first else "",
            f"g{self.columns}" if self.columns else "",
            "projected" if self.projected else "",
        )
        return "_".join(filter(None, (super().kind, *words)))
