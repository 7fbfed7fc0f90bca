"""The host's share of an operator: by torch's dispatcher, and in code that torch.compile wrote, beside eager functions.

All are RMSNorm of a few rows, with no gradient recorded. A norm of a compiled graph is a graph of many in a row less a
graph of one, by how many more there are. Where kernels are interpreted, calls launch nothing: what is timed then is all
but the launch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from tabulate import tabulate
from torch.nn import functional as F

import normforge
from normforge.errors import DeviceError
from normforge.tools.machine import find_machine

from .call_parts import Part
from .environment import describe
from .errors import UsageError
from .parts import NOTHING, Times, measure
from .take_apart import launching_nothing
from .timing import Call, summarise

EAGER, COMPILED = "an eager call", "a norm of a compiled graph"

_NORMS, _EPS = 32, 1e-6
_CALLS, _FEWEST_PASSES = 5, 5
# A CPU's allocator takes longer for more.
_SHAPE, _INTERPRETED_SHAPE = (16, 4096), (16, 64)


def operators(options: argparse.Namespace, _: list[str]) -> int:
    """Run the verb: measure, and print what ran and a table.

    Raises:
        UsageError: there is no device.
    """
    try:
        machine = find_machine()
    except DeviceError as error:
        raise UsageError(str(error)) from None
    shape = _INTERPRETED_SHAPE if machine.interpreted else _SHAPE
    header = describe(machine, (), options.revision) | {"shape": "×".join(map(str, shape))}
    if machine.interpreted:
        header["launches"] = "none: kernels are interpreted"
    with torch.no_grad():
        found = ways(shape, machine.device)
        for part in found:
            # Compiled, and known.
            part.call()
        with launching_nothing() if machine.interpreted else nullcontext():
            times = measure(found, _CALLS, options.seconds, _FEWEST_PASSES)
    print("\n".join(f"{name}: {value}" for name, value in header.items()))
    print(table(times))
    return 0


def ways(shape: tuple[int, int], device: torch.device) -> list[Part]:
    """Every call to time; graphs of one norm, and after them graphs of many, each less its graph of one."""
    n = shape[-1]
    x, residual = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(n, device=device, dtype=torch.bfloat16)
    operator = torch.ops.normforge.rmsnorm2d_fwd.default
    names = [argument.name for argument in operator._schema.arguments]
    plain = {**dict.fromkeys(names), "eps": _EPS, "weight_offset": 0.0, "dropout_p": 0.0, "save_mv": False}
    plain |= {"x": x, "weight": weight, "fadd": "none", "fquant": "none", "scale_dtype": torch.float32}
    plain |= {"rounding": "nearest", "cast": "after_weight"}
    added = plain | {"residual": residual, "fadd": "pre_add_store"}
    by_name = {"operator": tuple(plain.values()), "operator, residual added": tuple(added.values())}
    eager: dict[str, Call] = {
        "F.rms_norm": lambda: F.rms_norm(x, (n,), weight, _EPS),
        "rms_norm": lambda: normforge.rms_norm(x, (n,), weight, eps=_EPS),
        "rmsnorm2d_fwd": lambda: normforge.rmsnorm2d_fwd(x, weight, eps=_EPS),
        "rmsnorm2d_fwd, residual added": lambda: normforge.rmsnorm2d_fwd(
            x, weight, eps=_EPS, residual=residual, fadd="pre_add_store"
        ),
        **{name: partial(operator, *values) for name, values in by_name.items()},
    }
    parts = [Part(EAGER, name, call) for name, call in eager.items()]
    for name, dynamic in (("M fixed", False), ("M varies", True)):
        one, many = (_graph(count, dynamic, x, weight) for count in (1, _NORMS + 1))
        parts += [Part(COMPILED, f"{name}, one", one), Part(COMPILED, name, many, less=f"{name}, one")]
    return parts


def _graph(norms: int, dynamic: bool, x: torch.Tensor, weight: torch.Tensor) -> Call:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(norms):
            x = normforge.rmsnorm2d_fwd(x, weight, eps=_EPS).y
        return x

    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(run, fullgraph=True, dynamic=dynamic or None)
    return lambda: compiled(x)


def table(times: dict[Part, Times]) -> str:
    """Return the time per call, or per norm of a graph, in microseconds, and of eager calls of `rmsnorm2d_fwd`."""
    raw = {part: (summarise(of_part).median, min(of_part)) for part, of_part in times.items()}
    by_name = {(part.group, part.name): part for part in times}
    own = {}
    for part, figures in raw.items():
        if part.less or part.group == EAGER:
            others, norms = (raw[by_name[part.group, part.less]], _NORMS) if part.less else (raw[NOTHING], 1)
            own[part] = [(figure - other) / norms for figure, other in zip(figures, others, strict=True)]
    plain = own[by_name[EAGER, "rmsnorm2d_fwd"]]
    headers = ["µs on the host", "", "median", "of rmsnorm2d_fwd", "least", "of its least"]
    rows = [
        (part.group, part.name, *(text for us, of in zip(figures, plain, strict=True) for text in _shown(us, of)))
        for part, figures in own.items()
    ]
    aligned = ("left", "left", "right", "right", "right", "right")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=aligned)


def _shown(us: float, plain: float) -> tuple[str, str]:
    return f"{us:.1f}", f"{us / plain:.2f}"
