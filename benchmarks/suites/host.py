"""Host time of one eager call."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task

_SHAPE = (16, 4096)

_FLOAT = tuple(
    Cell(task, norm, *_SHAPE, group=norm.value)
    for norm, task in product(Norm, (Task.FORWARD, Task.MODULE, Task.ADD, Task.GRAD_FORWARD, Task.GRAD_BOTH))
)
_QUANTISED = tuple(
    Cell(Task.ADD_QUANT, norm, *_SHAPE, out_dtype="int8", smooth=True, group=norm.value) for norm in Norm
)

SUITE = Suite("host", "Host time of one eager call", Method.HOST, (*_FLOAT, *_QUANTISED), unit="µs")
