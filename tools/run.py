"""`normforge run`: one problem through its kernel, checked and timed, as ck_tile's layernorm2d example does."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from math import prod
from typing import Any

import torch

from .._version import __version__
from ..codegen import prose
from ..codegen.groups import GROUP
from . import group_run
from .checked_run import solve
from .group_problem import GroupProblem
from .machine import Machine, find_machine
from .measured_run import Result
from .problem import Problem
from .run_options import Request


def main(request: Request) -> int:
    """Run `normforge run`.

    Returns:
        0, or 1 if an output differs from the reference.
    """
    machine = find_machine()
    if machine.interpreted:
        _announce_a_long_wait(request.problem)
    counts: dict[str, Any] = {"validate": request.validate, "warmup": request.warmup, "repeat": request.repeat}
    if isinstance(request.problem, GroupProblem):
        result = group_run.solve(request.problem, machine, **counts)
    else:
        result = solve(request.problem, machine, **counts)
    line = _json_line(request, machine, result)
    if request.json_file is not None:
        with request.json_file.open("a", encoding="utf-8") as records:
            print(line, file=records)
    print(line if request.json else _report(request, machine, result))
    return 0 if all(finding.ok for finding in result.findings) else 1


# The interpreter computes as many elements in 2 s, measured on one core: 128 rows of 4096, 15 ms each.
_LONG_WAIT_ELEMENTS = 2**19


def _announce_a_long_wait(problem: Problem | GroupProblem) -> None:
    if isinstance(problem, GroupProblem):
        elements, smaller = prod(problem.shape), "-shape (-shape 1x64x16x16, say)"
    else:
        elements, smaller = problem.m * problem.n, "-m (-m 64, say)"
    if elements > _LONG_WAIT_ELEMENTS:
        print(
            f"interpreting {_size(problem)}, which prints nothing until it is done: a row of 4096 takes "
            f"some 15 ms there, and 3328 of them a minute; a smaller {smaller} is done sooner",
            file=sys.stderr,
        )


def _report(request: Request, machine: Machine, result: Result) -> str:
    problem = request.problem
    timed = "one run" if machine.interpreted else f"median of {request.repeat}, L2 cold"
    title = f"{GROUP.title()}Norm" if isinstance(problem, GroupProblem) else problem.mode.norm.row.title
    lines = [("problem", f"{title} {_what(problem)}, {_size(problem)}{_further(problem)}")]
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


def _size(problem: Problem | GroupProblem) -> str:
    return problem.sizes if isinstance(problem, GroupProblem) else f"m={problem.m} n={problem.n}"


def _further(problem: Problem | GroupProblem) -> str:
    if isinstance(problem, GroupProblem):
        return ", ".join((f" in {problem.groups} groups", *prose.features(problem.mode)))
    return "" if problem.heads == 1 else f" heads={problem.heads}, strides {problem.row_strides.x} and {problem.n}"


def _what(problem: Problem | GroupProblem) -> str:
    if isinstance(problem, GroupProblem):
        backward, out = problem.mode.is_backward, problem.dtype_out or problem.mode.dtype_in
    else:
        backward, out = problem.backward, problem.mode.dtype_out
    return f"{problem.mode.dtype_in.value} " + ("backward" if backward else f"-> {out.value}")


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
