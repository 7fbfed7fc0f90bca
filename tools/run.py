"""`normforge run`: one problem through its kernel, checked and timed, as ck_tile's layernorm2d example does."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from .._version import __version__
from . import checked_run, group_run, rotary_run, several_run
from .group_problem import GroupProblem
from .machine import Machine, find_machine
from .measured_run import Result, Run, measured
from .problem import Problem, SeveralProblem
from .rotary_problem import RotaryProblem
from .run_options import AnyProblem, Request

# By the class of a problem, the function that makes its tensors.
PREPARE: dict[type, Callable[..., Run[Any]]] = {
    Problem: checked_run.prepare,
    GroupProblem: group_run.prepare,
    RotaryProblem: rotary_run.prepare,
    SeveralProblem: several_run.prepare,
}


def main(request: Request) -> int:
    """Run `normforge run`.

    Returns:
        0, or 1 if an output differs from the reference.
    """
    machine = find_machine()
    if machine.interpreted:
        _announce_a_long_wait(request.problem)
    counts: dict[str, Any] = {"validate": request.validate, "warmup": request.warmup, "repeat": request.repeat}
    prepare = PREPARE[type(request.problem)]
    result = measured(prepare(request.problem, machine.device), machine, **counts)
    line = _json_line(request, machine, result)
    if request.json_file is not None:
        with request.json_file.open("a", encoding="utf-8") as records:
            print(line, file=records)
    print(line if request.json else _report(request, machine, result))
    return 0 if all(finding.ok for finding in result.findings) else 1


# The interpreter computes as many elements in 2 s, measured on one core: 128 rows of 4096, 15 ms each.
_LONG_WAIT_ELEMENTS = 2**19


def _announce_a_long_wait(problem: AnyProblem) -> None:
    if problem.elements > _LONG_WAIT_ELEMENTS:
        print(
            f"interpreting {problem.sizes}, which prints nothing until it is done: a row of 4096 takes "
            f"some 15 ms there, and 3328 of them a minute; a smaller {problem.smaller} is done sooner",
            file=sys.stderr,
        )


# Enough for all names of one norm.
_NAMES_WIDTH = 14


def _report(request: Request, machine: Machine, result: Result) -> str:
    timed = "one run" if machine.interpreted else f"median of {request.repeat}, L2 cold"
    lines = [("problem", request.problem.headline)]
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
    width = max(_NAMES_WIDTH, 1 + max(len(name) for name, _ in lines))
    return "\n".join(f"{name:<{width}}{text}" for name, text in lines)


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
