"""A process that is sanitised: it makes calls, each of tensors that end where their memory does, and says which."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

import normforge
from normforge.calls.straight import layernorm2d_bwd, rmsnorm2d_bwd
from normforge.codegen.model import Mode
from normforge.dtypes import TORCH_DTYPES

from .cells import Cell, cells, share

STARTS, BROKEN, DONE = "sanitizer cell:", "sanitizer broken:", "sanitizer done:"


def call(cell: Cell, device: torch.device) -> None:
    """Make a cell's call."""
    mode = cell.mode
    if mode.is_backward:
        _backward(cell, device)
        return
    keywords: dict[str, Any] = {
        "fquant": mode.fquant,
        "save_mv": mode.save_mv,
        "scale_dtype": TORCH_DTYPES[mode.scale_dtype],
    }
    keywords |= {"out_dtype": TORCH_DTYPES[mode.dtype_out], "rounding": mode.rounding}
    if mode.fadd.adds:
        keywords |= {"fadd": mode.fadd, "residual": _rows(cell, device)}
    if mode.fquant.smooths:
        keywords["smooth_scale"] = _vector(cell, device)
    if mode.x_bias:
        keywords["x_bias"] = _vector(cell, device)
    if mode.norm.centres:
        normforge.layernorm2d_fwd(_rows(cell, device), _vector(cell, device), _vector(cell, device), **keywords)
    else:
        normforge.rmsnorm2d_fwd(_rows(cell, device), _vector(cell, device), **keywords)


def _backward(cell: Cell, device: torch.device) -> None:
    mode = cell.mode
    mean, rstd = torch.zeros(cell.m, device=device), torch.ones(cell.m, device=device)
    keywords: dict[str, Any] = {"dresidual_out": _rows(cell, device)} if mode.fadd.stores else {}
    wants = wanted(mode)
    if mode.x_bias:
        keywords["x_bias"] = _vector(cell, device)
    dy, x, weight = _rows(cell, device), _rows(cell, device), _vector(cell, device)
    if mode.norm.centres:
        layernorm2d_bwd(dy, x, weight, mean=mean, rstd=rstd, wants=wants, **keywords)
    else:
        rmsnorm2d_bwd(dy, x, weight, rstd=rstd, wants=wants, **keywords)


def wanted(mode: Mode) -> tuple[str, ...]:
    """Every gradient that a mode has."""
    return ("dx", "dweight", *(("dbias",) if mode.norm.centres else ()), *(("dx_bias",) if mode.x_bias else ()))


def _rows(cell: Cell, device: torch.device) -> torch.Tensor:
    """(m, n) whose last element is the last of its memory; what is ahead of the first and between is not written."""
    stride = cell.n if cell.stride is None else cell.stride
    dtype = TORCH_DTYPES[cell.mode.dtype_in]
    memory = torch.empty(cell.offset + (cell.m - 1) * stride + cell.n, dtype=dtype, device=device)
    rows = memory.as_strided((cell.m, cell.n), (stride, 1), cell.offset)
    # By copies alone: what a kernel of torch's reads is not what is looked for.
    return rows.copy_(torch.linspace(-1, 1, cell.n).to(dtype).expand(cell.m, cell.n))


def _vector(cell: Cell, device: torch.device) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, cell.n).to(TORCH_DTYPES[cell.mode.dtype_in]).to(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the calls of one share of the cells, or those that are named; a call that fails is told."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizer.worker", description=__doc__)
    parser.add_argument("--share", default="1/1", metavar="I/K", help="the I-th of K parts of the cells")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    part, parts = map(int, options.share.split("/"))
    device, made = torch.device(options.device), 0
    for cell in share(cells(), part, parts):
        print(STARTS, cell.name, flush=True)
        try:
            call(cell, device)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as problem:
            lines = str(problem).splitlines()
            print(BROKEN, f"{type(problem).__name__}: {lines[0] if lines else 'no message'}", flush=True)
        made += 1
    print(DONE, made, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
