"""`normforge run`: one problem through its kernel, checked and timed, as ck_tile's layernorm2d example does."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version

import torch

from .._version import __version__
from .checked_run import Result, solve
from .machine import Machine, find_machine
from .problem import Problem
from .run_options import Request, parse


def main(argv: Sequence[str], prog: str) -> int:
    """Run `normforge run`.

    Returns:
        0, or 1 if an output differs from the reference.
    """
    request = parse(argv, prog)
    machine = find_machine()
    if machine.interpreted:
        _announce_a_long_wait(request.problem)
    result = solve(request.problem, machine, validate=request.validate, warmup=request.warmup, repeat=request.repeat)
    line = _json_line(request, machine, result)
    if request.json_file is not None:
        with request.json_file.open("a", encoding="utf-8") as records:
            print(line, file=records)
    print(line if request.json else _report(request, machine, result))
    return 0 if all(finding.ok for finding in result.findings) else 1


# What the interpreter computes in 2 s, measured on one core: 128 rows of 4096, each of which takes 15 ms.
_LONG_WAIT_ELEMENTS = 2**19


def _announce_a_long_wait(problem: Problem) -> None:
    if problem.m * problem.n > _LONG_WAIT_ELEMENTS:
        print(
            f"interpreting m={problem.m} n={problem.n}, which prints nothing until it is done: a row of 4096 takes "
            "some 15 ms there, and 3328 of them a minute; a smaller -m (-m 64, say) is done sooner",
            file=sys.stderr,
        )


def _report(request: Request, machine: Machine, result: Result) -> str:
    problem = request.problem
    timed = "one run" if machine.interpreted else f"median of {request.repeat}, L2 cold"
    lines = [
        (
            "problem",
            f"{problem.mode.norm.title} {_what(problem)}, m={problem.m} n={problem.n}{_heads(problem)}",
        )
    ]
    if request.print_names:
        lines += [("instance", result.instance), ("kernel", result.kernel)]
    lines += [
        (
            finding.name,
            f"max error {finding.error:.3g}, tolerance {finding.tolerance:.3g}: {'pass' if finding.ok else 'FAIL'}",
        )
        for finding in result.findings
    ]
    lines += [("device", machine.name), ("time", f"{result.ms:.4f} ms ({timed})")]
    if result.gb_per_s is not None:
        lines.append(("rate", f"{result.gb_per_s:.1f} GB/s"))
    lines.append(("valid", _verdict(request, result)))
    return "\n".join(f"{name:<14}{text}" for name, text in lines)


def _heads(problem: Problem) -> str:
    return "" if problem.heads == 1 else f" heads={problem.heads}, strides {problem.row_strides.x} and {problem.n}"


def _what(problem: Problem) -> str:
    mode = problem.mode
    return f"{mode.dtype_in.value} " + ("backward" if problem.backward else f"-> {mode.dtype_out.value}")


def _verdict(request: Request, result: Result) -> str:
    if not request.validate:
        return "not checked (-v 0)"
    wrong = [finding.name for finding in result.findings if not finding.ok]
    return f"no: {', '.join(wrong)} differ from the reference" if wrong else "yes"


def _json_line(request: Request, machine: Machine, result: Result) -> str:
    return json.dumps(
        {
            "arguments": request.problem.words
            | {"warmup": request.warmup, "repeat": request.repeat, "v": int(request.validate)},
            "device": machine.name,
            "interpreted": machine.interpreted,
            "versions": {
                "normforge": __version__,
                "torch": torch.__version__,
                "triton": version("triton"),
                "python": platform.python_version(),
            },
            "instance": result.instance,
            "kernel": result.kernel,
            "errors": {
                finding.name: {"error": finding.error, "tolerance": finding.tolerance, "ok": finding.ok}
                for finding in result.findings
            },
            "ms": result.ms,
            "gb_per_s": result.gb_per_s,
            "valid": all(finding.ok for finding in result.findings) if request.validate else None,
        }
    )
