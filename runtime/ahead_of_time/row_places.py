"""The row strides of stand-ins, from the `row_strides` of `compile_keys`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..calls.overlap import rows_overlap
from ..calls.row_layout import MOST_STRIDES
from ..codegen.parameters import FAMILIES
from ..errors import ConflictError, ShapeError

# A stride, or several with the sizes between them, the outermost first: (6144, 32, 128).
Steps = int | tuple[int, ...]
# The strides of x, or of arguments by name; None if all rows adjoin.
Asked = Steps | Mapping[str, Steps] | None

# The arguments that have rows.
NAMES = tuple(
    dict.fromkeys(
        row.name
        for family in FAMILIES
        for row in family.parameters
        if row.kind.has_row_stride and not row.kind.is_shared
    )
)


@dataclass(frozen=True)
class RowPlaces:
    """The shape and the row strides of one call's tensors.

    Attributes:
        shape: the tensors'.
        steps: by the names of arguments, strides and the sizes between them; rows of any other adjoin.
    """

    shape: tuple[int, ...]
    steps: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, asked: Asked, n: int) -> RowPlaces:
        """Return the places that an entry of `row_strides` asks for, with rows of n elements.

        Raises:
            ConflictError: the entry names an argument without rows, or two of conflicting sizes, or holds no strides.
            ShapeError: rows would overlap.
        """
        given = asked if isinstance(asked, Mapping) else {} if asked is None else {"x": asked}
        steps = {name: _checked(name, step) for name, step in given.items()}
        sizes = max((step[1::2] for step in steps.values()), key=len, default=())
        for name, step in steps.items():
            if step[1::2] != sizes[len(sizes) - len(step[1::2]) :]:
                raise ConflictError(
                    f"row_strides has {given!r}, and {name} is of another shape than the tensor of {sizes} rows; "
                    "pass the same sizes for both, from the last"
                )
        # Two rows, because the stride of a single row says nothing.
        found = cls((2, *sizes, n), steps)
        for name, step in steps.items():
            if rows_overlap(found.empty(name, torch.int8)):
                less = f"less than N = {n}" if len(step) == 1 else f"whose rows of N = {n} overlap"
                raise ShapeError(
                    f"row_strides has {', '.join(map(str, step))}, {less}; it takes N or more, or None for N itself"
                )
        return found

    def empty(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the stand-in of an argument that has rows."""
        step = self.steps.get(name, self.shape[-1:])
        strides = list(step[::-2])
        for size in self.shape[-1 - len(strides) : 0 : -1]:
            strides.append(strides[-1] * size)
        outer = strides[::-1]
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, (*outer, 1), strict=True)) + 1
        # On the CPU whatever the caller's default device is: planning takes no tensor without memory.
        return torch.empty(reach, dtype=dtype, device="cpu").as_strided(self.shape, (*outer, 1))


def _checked(name: str, asked: object) -> tuple[int, ...]:
    """Return one argument's strides as a tuple."""
    step = asked if isinstance(asked, tuple) else (asked,)
    whole = all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in step)
    if not whole or len(step) not in range(1, 2 * MOST_STRIDES, 2):
        raise ConflictError(
            f"row_strides has {asked!r}; it takes a stride, or up to {MOST_STRIDES} with the rows between them, "
            "(6144, 32, 128) say, or a mapping from arguments to such"
        )
    if name not in NAMES:
        raise ConflictError(f"row_strides has {name!r}; it takes names of arguments: {', '.join(NAMES)}")
    return step
