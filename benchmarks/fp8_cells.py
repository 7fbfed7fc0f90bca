"""Cells of norms of fp8 rows: x times a scale, y in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

from .cells import DTYPES, Cell


@dataclass(frozen=True)
class Fp8Cell(Cell):
    """A norm of fp8 rows, to bf16; weight and bias are bf16 too.

    Attributes:
        one_scale: whether all of x has one scale, and not each row its own.
    """

    dtype: str = "fp8"
    out_dtype: str = "bf16"
    one_scale: bool = False

    @property
    def kind(self) -> str:
        """Everything but the shape, as in `ln_fp8_bf16_row`."""
        return f"{self.norm.value}_{self.dtype}_{self.out_dtype}_{'tensor' if self.one_scale else 'row'}"

    @property
    def bytes_moved(self) -> int:
        """X and y, each once; scales are 0.4 % of them at most, as rows are of 1024 and more."""
        return self.m * self.n * (DTYPES[self.dtype].itemsize + DTYPES[self.out_dtype].itemsize)
