"""Norms called from JAX, beside the same kernels called from PyTorch, and beside what XLA makes of the formula.

Times are those of kernels, by torch's profiler, which sees what JAX launches too; what the host takes is in none.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from tabulate import tabulate

import normforge

from .chosen import RESULTS
from .device_trace import Launch, calls_in
from .environment import describe, folder_name
from .errors import UsageError
from .jax_results import CASES, SUITE, Case, Row
from .profile import MARK, find_gpu, record
from .progress import progress_over
from .results import save_rows
from .timing import Call, summarise

# torch holds memory too, and kernels in a CUDA graph are not launched one by one.
_SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
# How far one way's outputs may be from another's, relative to the largest.
_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
_CALLS = 40
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def jax_calls(options: argparse.Namespace, _: list[str]) -> int:
    """Run the verb: measure, print a table, and write `jax.csv`.

    Raises:
        UsageError: there is no GPU that torch and JAX both run on, or two ways disagree.
    """
    machine = find_gpu(SUITE)
    if find_spec("jax") is None:
        raise UsageError("jax compares calls from JAX, which is not installed; pip install 'normforge[jax]'")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import jax

    if jax.default_backend() != "gpu":
        raise UsageError(
            f"jax compares calls from JAX, and JAX {jax.__version__} finds no GPU here; install its plugin: "
            "pip install 'jax[cuda13]'"
        )
    header = {**describe(machine, (), options.revision), "jax": jax.__version__}
    rows: list[Row] = []
    for case in progress_over(CASES, what=SUITE, unit="case"):
        rows += measured(case, ways(case, machine.device), partial(record, calls=_CALLS))
    save_rows(options.out or RESULTS / folder_name(machine), SUITE, header, Row, rows)
    print(table(rows))
    return 0


def measured(case: Case, calls: dict[str, Call], record: Callable[[Call, Call], Any]) -> list[Row]:
    """Profile every way of a case."""
    return [_row(case, way, calls_in(record(call, _nothing), MARK)) for way, call in calls.items()]


def table(rows: Sequence[Row]) -> str:
    """Return the results as a table: kernels from JAX, and how they compare."""
    by_case: dict[str, dict[str, float]] = {}
    for row in rows:
        by_case.setdefault(row.case, {})[row.way] = row.us
    headers = ["µs", "from JAX", "from torch", "XLA's own", "from JAX / torch", "XLA's own / from JAX"]
    shown = [
        (case, *(f"{us[way]:.1f}" for way in ("jax", "torch", "xla")), *_ratios(us)) for case, us in by_case.items()
    ]
    return tabulate(shown, headers, tablefmt="github", disable_numparse=True)


def _ratios(us: dict[str, float]) -> tuple[str, str]:
    return f"{us['jax'] / us['torch']:.3f}", f"{us['xla'] / us['jax']:.2f}"


def ways(case: Case, device: torch.device) -> dict[str, Call]:
    """Return the calls, on the same memory.

    Raises:
        UsageError: one computes something else.
    """
    import jax

    import normforge.jax as norms

    dtype = _DTYPES[case.dtype]
    x, dy = (torch.randn(case.m, case.n, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(case.n, device=device) for _ in range(2))
    operands = (x, weight, bias)
    shared = [jax.dlpack.from_dlpack(tensor) for tensor in (*operands, dy)]
    found: dict[str, Callable[[], Any]] = {
        "torch": partial(_by_torch, operands, dy, case.trains),
        **{
            way: partial(_program(jax, norm, case.trains), *shared)
            for way, norm in (("jax", norms.layer_norm), ("xla", partial(_formula, jax.numpy)))
        },
    }
    expected = [tensor.double() for tensor in found["torch"]()]
    if device.type == "cuda":
        # JAX has streams of its own.
        torch.cuda.synchronize()
    for way in ("jax", "xla"):
        for one, other in zip(
            map(torch.utils.dlpack.from_dlpack, jax.block_until_ready(found[way]())), expected, strict=True
        ):
            off = ((one.double() - other).abs().max() / other.abs().max()).item()
            if not off <= _TOLERANCE[case.dtype]:
                raise UsageError(f"{case} by {way} is {off:.1e} off what torch's call computes; nothing was timed")
    return {way: partial(_awaited, jax, call) for way, call in found.items()}


def _program(jax: Any, norm: Callable[..., Any], trains: bool) -> Any:
    if not trains:
        return jax.jit(lambda x, weight, bias, dy: (norm(x, weight, bias),))

    def program(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
        y, back = jax.vjp(norm, x, weight, bias)
        return y, *back(dy)

    return jax.jit(program)


def _formula(jnp: Any, x: Any, weight: Any, bias: Any) -> Any:
    wide = x.astype("float32")
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    rstd = 1 / jnp.sqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    return (centred * rstd * weight + bias).astype(x.dtype)


def _by_torch(operands: Sequence[torch.Tensor], dy: torch.Tensor, trains: bool) -> Sequence[torch.Tensor]:
    leaves = [operand.detach().requires_grad_(trains) for operand in operands]
    x, weight, bias = leaves
    y = normforge.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    return (y.detach(), *torch.autograd.grad(y, leaves, dy)) if trains else (y,)


def _awaited(jax: Any, call: Callable[[], Any]) -> None:
    # Else what JAX launches from threads of its own would begin behind the range that marks the call.
    jax.block_until_ready([each for each in call() if not isinstance(each, torch.Tensor)])


def _nothing() -> None:
    """Do what comes before a call."""


def _row(case: Case, way: str, calls: Sequence[Sequence[Launch]]) -> Row:
    spread = summarise([sum(launch.us for launch in call) for call in calls])
    median, p20, p80 = (round(us, 3) for us in (spread.median, spread.p20, spread.p80))
    return Row(str(case), way, median, p20, p80, spread.runs, " ".join(launch.kernel.name for launch in calls[0]))
