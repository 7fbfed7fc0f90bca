"""Tables of rows that the look-up of known calls walks, for each function and each family.

The runtime has one loop in Python and one in C. Both take a table and know nothing about norms.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from .families import Family, Kind, Parameter
from .values import Direction, Norm

# The operands whose sizes each call compares with x's, because a guard leaves the first sizes open. All but the last
# two have a row for each row of x, whose stride follows from the sizes only if the rows have no gaps.
LOOKS = (Kind.ROWS, Kind.PER_ROW, Kind.SCALE, Kind.SAMPLES, Kind.GROUPS)

# The kinds whose sizes are compared as those of another: the number of groups is in the guard.
_LOOKS_LIKE = {Kind.OUT: Kind.ROWS, Kind.SCALES: Kind.SCALE}

# The index in `LOOKS` of all other operands.
FREE = len(LOOKS)

# The index of an argument that a function lacks.
ABSENT = 255

# The largest finite fp32 number; kernels take numbers as fp32.
(LARGEST_FP32,) = struct.unpack("<f", bytes.fromhex("ffff7f7f"))

# The numbers of `Parameter.torchs`, which are Python expressions with torch.
_TORCHS = {"torch.finfo(torch.float32).eps": 2.0**-23}


class Number(NamedTuple):
    """A number of a table.

    Attributes:
        argument: the number's index in the arguments, or `ABSENT`.
        needs: the index of the tensor that a number other than 0 requires, or `ABSENT`.
        least: the smallest value that kernels take.
        most: the largest value that kernels take.
        norms: the words of the norms that have the number.
        defaults: the value that None means, by the norm's word.
    """

    argument: int
    needs: int
    least: float
    most: float
    norms: tuple[str, ...]
    defaults: dict[str, float]


class Table(NamedTuple):
    """The rows of a function, or of a family's calls of the functional API, as a look-up walks them.

    Attributes:
        head: the first element of every key.
        norm: the word of the function's norm; None where the options of a call begin with it.
        names: the names of the arguments, in order.
        arguments: the number of arguments.
        looks: for each operand, in the family's order, its index in `LOOKS`, or `FREE`.
        operands: for each operand, its index in the arguments, or `ABSENT`.
        in_vectors: for each operand, whether kernels are specialised for its alignment.
        words: the indices of the arguments that are part of the key.
        coded: those of `words` whose class is part of the key too.
        numbers: eps, weight_offset and dropout_p, as far as the family has them.
        inputs: the number of operands that are read; the operands after them are written.
        x: the operand whose rows are normalised.
        samples: the bits of the operands with which the key holds the sizes of x, because a plan then depends on the
            rows or positions per sample.
        mean: the operand that holds the rows' means, or -1 in a forward call.
        rstd: the operand that holds the rows' rstd, or both where the means are not passed; or -1.
        dropout: the index of dropout_p, which dropout_rng follows, or -1.
        wants: the index of the argument that may be a list of names, or -1.
        saves: the index of save_mv, which is None if statistics are saved where a gradient is due; `arguments` if there
            is no such argument and a due gradient alone decides; -1 if autograd records no such call.
    """

    head: str
    norm: str | None
    names: tuple[str, ...]
    arguments: int
    looks: bytes
    operands: bytes
    in_vectors: bytes
    words: bytes
    coded: bytes
    numbers: tuple[Number, ...]
    inputs: int
    x: int
    samples: int
    mean: int
    rstd: int
    dropout: int
    wants: int
    saves: int


def table_of(family: Family, norm: Norm | None = None) -> Table:
    """Return the table of a norm's function, or of the family's calls of the functional API."""
    rows: Sequence[Parameter] = family.of(norm) if norm is not None else _functional(family)
    every = (*family.inputs, *family.outs)
    names = tuple(row.name for row in rows)
    words = [row for row in rows if not row.kind.is_tensor and row.kind is not Kind.NUMBER]
    # Launches of a norm without a weight_offset bring 0, and those without a dropout_p nothing.
    brought = ("eps", "weight_offset") if norm is not None else ()
    numbers = [row for row in family.parameters if row.kind is Kind.NUMBER and row.name in (*names, *brought)]

    def indices(of: Sequence[Parameter]) -> bytes:
        return bytes(names.index(row.name) if row.name in names else ABSENT for row in of)

    def index(of: Sequence[str], name: str, holds: bool = True) -> int:
        return of.index(name) if holds and name in of else -1

    operands = [row.name for row in every]
    saves = index(names, "save_mv", norm is None)
    if norm is None and family.direction is Direction.FORWARD and not family.name:
        saves = len(names)
    return Table(
        head=family.functions[norm] if norm else f"{family.name or 'recorded'} {family.direction.value}",
        norm=norm and norm.value,
        names=names,
        arguments=len(names),
        looks=bytes(_look(row, packed=norm is None) for row in every),
        operands=indices(every),
        in_vectors=bytes(row.is_read_in_vectors for row in every),
        words=indices(words),
        # Arguments of different classes may be equal: True, 1 and 1.0.
        coded=indices([row for row in words if row.kind in (Kind.FLAG, Kind.COUNT) or row.takes_codes]),
        numbers=tuple(_number(row, names, is_functional=norm is None) for row in numbers),
        inputs=len(family.inputs),
        x=operands.index("x"),
        samples=sum(1 << at for at, row in enumerate(every) if row.kind in (Kind.SAMPLES, Kind.IMAGES)),
        mean=index(operands, "mean"),
        rstd=index(operands, "rstd"),
        dropout=index(names, "dropout_p"),
        wants=index(names, "wants"),
        saves=saves,
    )


def _functional(family: Family) -> list[Parameter]:
    """Return the rows of calls of the functional API, tensors first.

    A forward call draws and checks the seed and offset of a dropout after the look-up, because a refused call must draw
    nothing.
    """
    drawn = Kind.RANDOM if family.direction is Direction.FORWARD else None
    rows = [row for row in family.parameters if row.functional and row.kind not in (Kind.OUT, drawn)]
    return sorted(rows, key=lambda row: not row.kind.is_tensor)


def _look(row: Parameter, *, packed: bool) -> int:
    # In calls that autograd records, one tensor holds both statistics.
    if packed and row.kind is Kind.PER_ROW:
        return FREE
    kind = _LOOKS_LIKE.get(row.kind, row.kind)
    return LOOKS.index(kind) if kind in LOOKS else FREE


def _number(row: Parameter, names: Sequence[str], *, is_functional: bool) -> Number:
    # Torch's functions accept None for a number; among ours, only the functional API does.
    torchs = row.torchs if is_functional else {}
    return Number(
        names.index(row.name) if row.name in names else ABSENT,
        names.index(row.needs) if row.needs in names else ABSENT,
        max(row.least, -LARGEST_FP32),
        min(row.most, LARGEST_FP32),
        tuple(norm.value for norm in row.default),
        {norm.value: _TORCHS[value] for norm, value in torchs.items()},
    )
