"""Lengths drawn by a seed: every length in every size, and every task and norm beside them.

168 lengths: 152 multiples of 8 from 32 to 131072, both ends among them, one of each fourteenth of an octave (below 160
there are fewer multiples than that, and all are in); and one of each 3/4 octave that is no multiple of 8, odd by turns.
Each has eight cells of the 64 that eight classes of rows and eight computations (a task and a norm) make, so 1344 of
bf16, in order so that what comes first is a sample of the whole:

- each length has each class once, and each computation once;
- eight neighbouring lengths have each pair of a class and a computation once;
- a turn, a run's first 168 cells or the next 168, has each length once, and of any eight neighbours each class once
  and each computation once; 21 cells in a row have lengths from all over the range;
- a ninth turn is the first again, of fp16 and fp32 by turns: 1512 cells in all.

A run may thus be cut anywhere (`--minutes`), and at the end of a turn it is even. At 0.3 to 1 s a provider and cell,
beside what is compiled ahead (`--jobs`), six providers take about 5 to 17 minutes a turn, and 45 to 150 in all.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from itertools import cycle, pairwise, product
from typing import TypeVar

from ..cells import Cell, Method, Norm, Suite, Task, rows_of
from .shapes import OTHER_DTYPES

T = TypeVar("T")

SEED = 0

# The most rows that count as some, and not as many.
MOST_SOME = 2048

_SHORTEST, _OCTAVES = 32, 12
_ALIGNED = 8
_AN_OCTAVE = 14
_UNALIGNED = 16

_SIZES = (16, 64, 256)
_ROWS = (64, 256, 512, 1024, MOST_SOME)
_TASKS = (Task.FORWARD, Task.ADD, Task.ADD_QUANT, Task.BACKWARD)
_COMPUTATIONS = tuple(product(_TASKS, Norm))
_CLASSES = (*((f"{size} MiB", size, 0) for size in _SIZES), *((f"M = {m}", 0, m) for m in _ROWS))

# The classes' names, in the order of pictures.
GROUPS = tuple(name for name, _, _ in _CLASSES)

# Both are as many, a power of two: cells are laid out by additions in a field of so many elements.
_SIDE = len(_COMPUTATIONS)


def draw(seed: int) -> tuple[Cell, ...]:
    """Return the cells of a seed, the same on every machine and with every Python."""
    blocks = [
        lengths_[start : start + _SIDE] for lengths_ in [lengths(seed)] for start in range(0, len(lengths_), _SIDE)
    ]
    order = [_shuffled(block, seed, "lengths") for block in blocks]
    computations = [_shuffled(_COMPUTATIONS, seed, "computations", block) for block in range(len(blocks))]
    classes = [_shuffled(_CLASSES, seed, "classes", block) for block in range(len(blocks))]
    # Two Latin squares that are orthogonal, as a place's double, and its triple, are other places for all but 0.
    drawn = tuple(
        (
            order[block][place],
            computations[block][turn ^ _doubled(place)],
            classes[block][turn ^ _doubled(place) ^ place],
        )
        for turn, place, block in product(range(_SIDE), range(_SIDE), range(len(blocks)))
    )
    others = zip(drawn[: len(drawn) // _SIDE], cycle(OTHER_DTYPES), strict=False)
    return (*(_cell(*one) for one in drawn), *(_cell(*one, dtype) for one, dtype in others))


def lengths(seed: int) -> list[int]:
    """Return the lengths of a seed, in order."""
    edges = sorted({_aligned(step / _AN_OCTAVE) for step in range(_OCTAVES * _AN_OCTAVE + 1)})
    drawn = [_one_of(range(low, high, _ALIGNED), seed, "aligned") for low, high in pairwise(edges)]
    others = [_aligned(step * _OCTAVES / _UNALIGNED) for step in range(_UNALIGNED + 1)]
    for odd, (low, high) in enumerate(pairwise(others)):
        unaligned = [n for n in range(low, high) if n % _ALIGNED and n % 2 == odd % 2]
        drawn.append(_one_of(unaligned, seed, "unaligned"))
    return sorted([*drawn, edges[-1]])


def _aligned(octaves: float) -> int:
    return round(_SHORTEST * 2**octaves / _ALIGNED) * _ALIGNED


def _cell(n: int, computation: tuple[Task, Norm], rows: tuple[str, int, int], dtype: str = "bf16") -> Cell:
    (task, norm), (group, size, m) = computation, rows
    out_dtype = "fp8" if task.quantises else ""
    return Cell(task, norm, m or rows_of(size, n, dtype), n, dtype, out_dtype, group=group)


def _doubled(element: int) -> int:
    # In the field of eight elements: polynomials over {0, 1}, modulo x³ + x + 1.
    return element << 1 ^ (0b1011 if element & 4 else 0)


def _one_of(candidates: Iterable[int], seed: int, *what: object) -> int:
    return min(candidates, key=lambda n: _hashed(seed, *what, n))


def _shuffled(items: Iterable[T], seed: int, *what: object) -> list[T]:
    return [item for _, _, item in sorted((_hashed(seed, *what, at), at, item) for at, item in enumerate(items))]


def _hashed(seed: int, *what: object) -> bytes:
    # Draws of `random` for a seed differ between versions of Python, except between -1 and 1.
    return sha256(" ".join(map(str, (seed, *what))).encode()).digest()


SUITE = Suite("sweep", "Drawn lengths", Method.COLD, draw(SEED), draw=draw, seed=SEED)
