"""Cells of norms quantised as engines have it: by groups, by rows or by a given scale, in 16 bits too or not."""

from __future__ import annotations

from dataclasses import dataclass

from .cells import DTYPES, Cell


@dataclass(frozen=True)
class QuantisedCell(Cell):
    """A norm of bf16 rows, quantised to fp8_e4m3fn.

    Attributes:
        columns: of a group that has a scale; 0 is a scale a row.
        column_major: whether scales of a group's rows lie side by side.
        packed: whether scales are powers of two, of which four exponents make an int32.
        static: whether one scale is given for all.
        unquantised: whether y is returned in x's dtype too.
    """

    out_dtype: str = "fp8"
    columns: int = 0
    column_major: bool = False
    packed: bool = False
    static: bool = False
    unquantised: bool = False

    @property
    def kind(self) -> str:
        """Everything but the shape, as in `rms_bf16_fp8_g128_column`."""
        scales = "static" if self.static else f"g{self.columns}" if self.columns else "row"
        words = (
            "column" if self.column_major else "",
            "packed" if self.packed else "",
            "two" if self.unquantised else "",
        )
        return "_".join(filter(None, (self.norm.value, self.dtype, self.out_dtype, scales, *words)))

    @property
    def group_columns(self) -> int:
        """How many columns share a scale."""
        return self.columns or self.n

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales that are written."""
        groups = self.m * -(-self.n // self.group_columns)
        return 0 if self.static else groups * (1 if self.packed else 4)

    @property
    def bytes_moved(self) -> int:
        """Whole tensors, each once, and the scales that are written, which are 1 % of them in groups of 128."""
        second = self.m * self.n * DTYPES[self.dtype].itemsize if self.unquantised else 0
        return super().bytes_moved + second + self.scale_bytes
