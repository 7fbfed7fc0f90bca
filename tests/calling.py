"""What the tests of this folder share: row lengths, norms by name, checked calls, tables of refusals, and counts."""

from __future__ import annotations

import builtins
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
import yaml

import normforge
from normforge import LayerNormOutput, errors, reference
from normforge.calls.outputs import NormGradients
from normforge.codegen.values import FusedQuant, Rounding
from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd
from normforge.selection import dispatch
from normforge.tools.compare import compare, compare_gradients
from proving.cases import LAYOUTS, Case, cases, with_tuples

S = TypeVar("S")
T = TypeVar("T")
Done = subprocess.CompletedProcess[str]

# A row length that each pipeline serves, with a ragged last chunk where there are several.
LENGTHS = {"rows": 64, "one_pass": 1500, "two_pass": 33000}

FORWARD: dict[str, Callable[..., LayerNormOutput]] = {
    "layer": normforge.layernorm2d_fwd,
    "rms": normforge.rmsnorm2d_fwd,
}
ORACLE: dict[str, Callable[..., reference.ReferenceOutput]] = {
    "layer": reference.layernorm2d_fwd,
    "rms": reference.rmsnorm2d_fwd,
}

BACKWARD: dict[str, Callable[..., NormGradients]] = {"layer": layernorm2d_bwd, "rms": rmsnorm2d_bwd}
BACKWARD_ORACLE: dict[str, Callable[..., reference.ReferenceGradients]] = {
    "layer": reference.layernorm2d_bwd,
    "rms": reference.rmsnorm2d_bwd,
}
FUNCTIONS: dict[str, Callable[..., object]] = {
    "layer": normforge.layer_norm,
    "rms": normforge.rms_norm,
    "add_layer": normforge.add_layer_norm,
    "add_rms": normforge.add_rms_norm,
}

QUANTISED = (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

each_device = pytest.mark.parametrize("device", DEVICES)
each_norm = pytest.mark.parametrize("norm", FORWARD)
each_add = pytest.mark.parametrize("norm", ["add_layer", "add_rms"])
each_function = pytest.mark.parametrize("norm", FUNCTIONS)
each_pipeline = pytest.mark.parametrize("n", LENGTHS.values(), ids=LENGTHS)
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
each_quantised = pytest.mark.parametrize("dtype", QUANTISED, ids=str)


def there(value: T | None) -> T:
    """Return a value, which must not be None."""
    assert value is not None
    return value


def check(
    norm: str,
    x: torch.Tensor,
    *weights: torch.Tensor | None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    **keywords: Any,
) -> LayerNormOutput:
    """Run a call, hold everything it returns against the oracle, and return it."""
    if out is not None:
        keywords["out_dtype"] = out.dtype
    # First, because the call may overwrite what it was given.
    expected = ORACLE[norm](x, *weights, **keywords)
    actual = FORWARD[norm](x, *weights, out=out, residual_out=residual_out, **keywords)
    agree(actual, expected, Rounding(keywords.get("rounding", "nearest")))
    return actual


def agree(actual: LayerNormOutput, expected: reference.ReferenceOutput, rounding: Rounding = Rounding.NEAREST) -> None:
    """Fail unless every output there should be is there and is what the oracle says."""
    wrong = [finding for finding in compare(actual, expected, rounding) if not finding.ok]
    assert not wrong, wrong


def all_plans() -> list[Any]:
    """Return the plans of aligned calls of all known kinds, and those that kinds share, in the order they came in."""
    return [getattr(kind, "plan", kind) for kinds in dispatch.plans.values() for kind in reversed(kinds)]


def backward_operands(norm: str, m: int = 3, n: int = 64) -> dict[str, Any]:
    """Return random operands of a backward call, every one that a norm has."""
    given: dict[str, Any] = {name: torch.randn(m, n) for name in ("dy", "x", "dresidual_out")}
    given |= {"weight": torch.randn(n), "x_bias": torch.randn(n), "rstd": torch.rand(m) + 0.5}
    return given | ({"mean": torch.randn(m)} if norm == "layer" else {})


def check_backward(norm: str, **given: Any) -> NormGradients:
    """Run a backward call, hold every gradient against the oracle, and return them."""
    actual = BACKWARD[norm](**given)
    inputs = {name: value for name, value in given.items() if name not in ("dx_dtype", "bias_dtype", "wants")}
    wrong = [finding for finding in compare_gradients(actual, BACKWARD_ORACLE[norm](**inputs)) if not finding.ok]
    assert not wrong, wrong
    return actual


def plain(norm: str, *, x_bias: bool = False, **at: Any) -> Case:
    """Return the case of a function; a residual has x's dtype unless `at` has another."""
    without = (*(() if "add" in norm else ("residual",)), *(() if x_bias else ("x_bias",)))
    at = {"residual": at.get("dtype", torch.float32), **at}
    family = "added" if norm.endswith("_add") else "plain"
    (case,) = cases(family, vary=(), norm=norm.replace("add_", "").removesuffix("_add"), without=without, **at)
    return case


def backward(root: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    """`root.backward(gradient)`, which has no types."""
    torch.autograd.backward([root], None if gradient is None else [gradient])


def pieces(outputs: Any) -> tuple[torch.Tensor, ...]:
    """The outputs of a call in a tuple, a single one too."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are equal to the bit, NaN and all."""
    if a is None or b is None:
        return a is b
    one, other = (each.clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in (a, b))
    return a.dtype == b.dtype and torch.equal(one, other)


def assert_squares_overflow_to_zeros(m: int, n: int, value: float, device: str) -> None:
    """Fail unless rows whose squares overflow in fp32 have an rstd of 0 and are zeros: docs/reference/numerics.md."""
    constant = torch.full((n,), value, device=device)
    signs = (-1.0) ** torch.arange(n, device=device)
    rows = torch.stack([constant, constant * signs, torch.linspace(0.0, value, n, device=device)])
    x = rows.repeat(m // 3, 1)
    layer = normforge.layernorm2d_fwd(x, None, None, save_mv=True)
    rms = normforge.rmsnorm2d_fwd(x, None, save_mv=True)
    for zeros in (rms.y, there(rms.rstd), layer.y, there(layer.rstd).view(-1, 3)[:, 1:]):
        assert torch.equal(zeros, torch.zeros_like(zeros))
    again = normforge.layernorm2d_fwd(x.bfloat16(), None, None).y
    assert torch.equal(again, torch.zeros_like(again))


def quantising(dtype: torch.dtype, fquant: FusedQuant = FusedQuant.DYNAMIC) -> dict[str, Any]:
    """The keywords that make y of this dtype, with quantisation where that takes it."""
    return {"out_dtype": dtype} if dtype in FLOATS else {"out_dtype": dtype, "fquant": fquant}


def status_of(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """The exit status of a command line, whether it is returned or raised by argparse."""
    try:
        return main(argv)
    except SystemExit as stop:
        return int(str(stop.code))


class Outcome(NamedTuple):
    """What a command line came to."""

    status: int
    out: str
    err: str


def outcome_of(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> Outcome:
    """Run a command line in this process, and return what it came to; see `status_of`."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = status_of(main, argv)
    return Outcome(status, out.getvalue(), err.getvalue())


def module_at(path: Path, name: str) -> Any:
    """Import a file as a module of this name."""
    spec = there(importlib.util.spec_from_file_location(name, path))
    # A dataclass looks its module up there.
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    there(spec.loader).exec_module(module)
    return module


def command(
    *argv: str | Path, cwd: Path | str | None = None, out: Any = subprocess.PIPE, **environment: str | None
) -> Done:
    """Run a command under this process's environment with these changes; None unsets a variable."""
    changed: dict[str, str | None] = {**os.environ, **environment}
    merged = {name: value for name, value in changed.items() if value is not None}
    return subprocess.run(argv, cwd=cwd, env=merged, stdout=out, stderr=subprocess.PIPE, text=True, check=False)


def python(code: str, **environment: str | None) -> Done:
    """Run code in a process of its own; see `command`."""
    return command(sys.executable, "-c", code, **environment)


def printed(code: str, **environment: str | None) -> str:
    """What code prints in a process of its own, which must succeed."""
    process = python(code, **environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def printed_at_once(imports: str, codes: Sequence[str], folder: Path, **environment: str) -> list[str]:
    """What each code prints in a process of its own; each waits, everything imported, until all are ready."""
    wait = f"""
import pathlib, time
{imports}
(pathlib.Path({str(folder)!r}) / f"ready{{time.monotonic_ns()}}").touch()
until = time.monotonic() + 60
while len(list(pathlib.Path({str(folder)!r}).glob("ready*"))) < {len(codes)} and time.monotonic() < until:
    time.sleep(0.001)
"""
    commands = [[sys.executable, "-c", wait + code] for code in codes]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=os.environ | environment, **pipes) for command in commands]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(codes), outputs
    return [out for out, _ in outputs]


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a call in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def in_threads(work: Callable[[S], T], given: Sequence[S]) -> list[T]:
    """Return what work makes of each, in as many threads, which begin together."""
    start = threading.Barrier(len(given))

    def run(each: S) -> T:
        start.wait()
        return work(each)

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(run, given))


def table_at(path: Path, names: dict[str, Any] | None = None) -> Any:
    """Return the contents of a YAML file, where text that begins with `=` is an expression of names, torch and np."""

    def read(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: read(each) for key, each in node.items()}
        if isinstance(node, list):
            return [*map(read, node)]
        is_expression = isinstance(node, str) and node.startswith("=")
        return eval(node[1:], names or {}, {"torch": torch, "np": np}) if is_expression else node

    return read(yaml.safe_load(path.read_text()))


def slices(path: Path) -> dict[str, list[Case]]:
    """Return the slices of the table of cases that a YAML file asks for, by name, each case once."""
    table = with_tuples(table_at(path, {"FLOATS": FLOATS, "LAYOUTS": LAYOUTS}))
    return {
        name: [*dict.fromkeys(case for query in queries for case in _queried(**query))]
        for name, queries in table.items()
    }


def _queried(of: Sequence[str] = (), each: Mapping[str, Any] | None = None, **asked: Any) -> Iterator[Case]:
    """Yield the cases of families, by arguments of `cases` and by values to combine."""
    for case in cases(*of, **asked):
        yield from (case.but(**at) for at in combined(each or {}))


def combined(each: Mapping[str, Iterable[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of values by name."""
    yield from (dict(zip(each, values, strict=True)) for values in product(*each.values()))


# By error and name: what is passed, and what the message begins with or holds.
Refused = Mapping[type[Exception], Mapping[str, tuple[dict[str, Any], str]]]


def refusals(path: Path, names: dict[str, Any]) -> Refused:
    """Return a table of refusals that a YAML file holds; see `table_at`."""
    return {
        getattr(builtins, error, None) or getattr(errors, error): rows for error, rows in table_at(path, names).items()
    }


def each_of(refused: Refused) -> pytest.MarkDecorator:
    """Run a test for each call of a table: of what is passed, the error and its message."""
    rows = [
        pytest.param(given, error, message, id=name)
        for error, table in refused.items()
        for name, (given, message) in table.items()
    ]
    return pytest.mark.parametrize(("given", "error", "message"), rows)


def counted(patch: pytest.MonkeyPatch, *places: tuple[Any, str, str]) -> list[str]:
    """Return a list that functions, each a module's and its name there, add a word to whenever they made something."""
    words: list[str] = []

    def counting(function: Callable[..., Any], word: str) -> Callable[..., Any]:
        def count(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            words.extend([word] * (result is not None))
            return result

        return count

    for module, name, word in places:
        patch.setattr(module, name, counting(getattr(module, name), word))
    return words
