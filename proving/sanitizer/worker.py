"""A process that is sanitised: it makes calls, each of tensors that end where their memory does, and says which."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from normforge.codegen.families import Kind, Parameter
from normforge.codegen.parameters import FORWARD, RENORMED, family_of
from normforge.dtypes import TORCH_DTYPES, arguments_of
from normforge.families import public

from .beside import Beside
from .cells import Cell, every, share

STARTS, BROKEN, DONE = "sanitizer cell:", "sanitizer broken:", "sanitizer done:"


def call(cell: Cell | Beside, device: torch.device) -> None:
    """Make a cell's call."""
    if isinstance(cell, Beside):
        cell.call(device)
        return
    function, arguments = call_of(cell, device)
    getattr(public, function)(**arguments)


def call_of(cell: Cell, device: torch.device) -> tuple[str, dict[str, Any]]:
    """Return the function of a cell's call, and the call's arguments."""
    mode, family = cell.mode, family_of(cell.mode)
    arguments = arguments_of(mode, partial(_operand, cell, device))
    if mode.is_backward:
        arguments["wants"] = [row.name for row in family.results if row.is_wanted(mode)]
    if cell.in_place:
        arguments["out"] = arguments["x"]
    name = FORWARD.functions[mode.norm]
    return f"renormed_{name}" if family is RENORMED else family.functions[mode.norm], arguments


def _operand(cell: Cell, device: torch.device, parameter: Parameter) -> torch.Tensor:
    if parameter.kind is Kind.ROWS:
        return _rows(cell, device)
    return torch.ones(cell.shape[:-1], device=device) if parameter.kind is Kind.PER_ROW else _vector(cell, device)


def _rows(cell: Cell, device: torch.device) -> torch.Tensor:
    """Rows whose last element is the last of their memory; what is ahead of the first and between is not written."""
    last = sum((size - 1) * stride for size, stride in zip(cell.shape, cell.strides, strict=True))
    dtype = TORCH_DTYPES[cell.mode.dtype_in]
    memory = torch.empty(cell.offset + last + 1, dtype=dtype, device=device)
    rows = memory.as_strided(cell.shape, cell.strides, cell.offset)
    # By copies alone: what a kernel of torch's reads is not what is looked for.
    return rows.copy_(torch.linspace(-1, 1, cell.n).to(dtype).expand(cell.shape))


def _vector(cell: Cell, device: torch.device) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, cell.n).to(TORCH_DTYPES[cell.mode.dtype_in]).to(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the calls of one share of the cells, or the named calls; report each call that fails."""
    parser = argparse.ArgumentParser(prog="python -m proving.sanitizer.worker", description=__doc__)
    parser.add_argument("--share", default="1/1", metavar="I/K", help="the I-th of K parts of the cells")
    options = parser.parse_args(arguments)
    part, parts = map(int, options.share.split("/"))
    device, made = torch.device("cuda"), 0
    for cell in share(every(), part, parts):
        print(STARTS, cell.name, flush=True)
        try:
            call(cell, device)
            torch.cuda.synchronize()
        except Exception as problem:
            lines = str(problem).splitlines()
            print(BROKEN, f"{type(problem).__name__}: {lines[0] if lines else 'no message'}", flush=True)
        made += 1
    print(DONE, made, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
