"""`normforge demo`: a handful of modes through their kernels, and how each compares with the reference."""

from __future__ import annotations

import argparse
from dataclasses import replace

from tabulate import tabulate

from ..codegen.model import Mode
from ..codegen.values import DType, FusedAdd, FusedQuant, Norm
from .checked_run import prepare
from .machine import find_machine
from .measured_run import Result, measured
from .problem import Problem, Strides

INTERPRETED_ROWS = 3
WARMUP = 5
REPEAT = 20

_FP16 = Mode(Norm.LAYER, DType.FP16, DType.FP16)
_BF16 = Mode(Norm.RMS, DType.BF16, DType.BF16)
_ADDED = replace(_BF16, fadd=FusedAdd.PRE_ADD_STORE)

# M fills a large GPU; the interpreter takes INTERPRETED_ROWS of them.
PROBLEMS = {
    "fp16 LayerNorm": Problem(8192, 4096, _FP16),
    "bf16 RMSNorm": Problem(8192, 5120, _BF16),
    "short rows": Problem(32768, 256, _FP16),
    "odd N": Problem(8192, 4099, _FP16),
    "long rows": Problem(1024, 40000, replace(_BF16, norm=Norm.LAYER)),
    "row stride 1200": Problem(32768, 1000, _FP16, strides=Strides.all(1200)),
    "mean and rstd saved": Problem(8192, 2048, replace(_FP16, save_mv=True)),
    "residual added, sum stored": Problem(8192, 4096, _ADDED),
    "smooth int8": Problem(8192, 8192, replace(_FP16, dtype_out=DType.INT8, fquant=FusedQuant.SMOOTH_DYNAMIC)),
    "residual added, dynamic fp8": Problem(
        8192, 4096, replace(_ADDED, dtype_out=DType.FP8_E4M3FN, fquant=FusedQuant.DYNAMIC)
    ),
}


def main(given: argparse.Namespace) -> int:
    """Run `normforge demo`.

    Returns:
        0, or 1 if an output differs from the reference.
    """
    machine = find_machine()
    rows, failures = [], 0
    for name, problem in PROBLEMS.items():
        sized = replace(problem, m=INTERPRETED_ROWS) if machine.interpreted else problem
        result = measured(prepare(sized, machine.device), machine, validate=True, warmup=WARMUP, repeat=REPEAT)
        failures += not all(finding.ok for finding in result.findings)
        rows.append(_row(name, sized, result))
    headers = ["mode", "M×N", "instance", "max error", "tolerance", "verdict"]
    if not machine.interpreted:
        headers += ["ms", "GB/s"]
    print(tabulate(rows, headers, disable_numparse=True))
    print(f"\n{len(rows) - failures} of {len(rows)} agree with the fp64 reference, on {machine.name}.")
    return 1 if failures else 0


def _row(name: str, problem: Problem, result: Result) -> list[str]:
    y = result.findings[0]
    amount = _steps if problem.mode.fquant.quantises else "{:.2g}".format
    wrong = [finding.name for finding in result.findings if not finding.ok]
    row = [
        name,
        f"{problem.m}×{problem.n}",
        result.instance,
        amount(y.error),
        amount(y.tolerance),
        f"FAIL: {', '.join(wrong)}" if wrong else "pass",
    ]
    if result.gb_per_s is not None:
        row += [f"{result.ms:.4f}", f"{result.gb_per_s:.0f}"]
    return row


def _steps(count: float) -> str:
    return f"{count:g} step" if count == 1 else f"{count:g} steps"
