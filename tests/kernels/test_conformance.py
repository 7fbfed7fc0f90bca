"""The forward lists of other suites (conformance.py): whole on a GPU, with a few rows of each in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import normforge
from normforge import dispatch, reference
from normforge.codegen.model import DType, Mode, Norm
from normforge.codegen.tiling import SMALL_M
from normforge.compare import compare
from normforge.table import Entry

from .conformance import cases
from .problems import Problem

# The interpreter runs a program at a time: two rows of a list's shape, of the lengths that CI has time for, and of
# the many modes that ck_tile crosses with each shape one in seven.
INTERPRETED_ROWS = 2
INTERPRETED_LENGTH = 20000
INTERPRETED_TURNS = 7

CASES = list(cases())


def _id(case: tuple[str, Problem]) -> str:
    suite, problem = case
    details = [suite, problem.mode.name, "x".join(map(str, problem.shape))]
    if problem.row_stride:
        details.append(f"s{problem.row_stride}")
    details += [f"{name}_{dtype.value}" for name, dtype in problem.dtypes.items() if suite == "flash_attention"]
    details += [f"no_{name}" for name in sorted(problem.absent)]
    details += [f"{name}_{value}" for name, value in problem.keywords.items()]
    return "-".join(details)


def _interpreted() -> list[tuple[str, Problem]]:
    few: dict[str, tuple[str, Problem]] = {}
    for turn, (suite, problem) in enumerate(CASES):
        if problem.shape[-1] > INTERPRETED_LENGTH or (suite == "ck_tile" and turn % INTERPRETED_TURNS):
            continue
        smaller = replace(problem, shape=(min(INTERPRETED_ROWS, problem.shape[0]), problem.shape[-1]))
        few.setdefault(_id((suite, smaller)), (suite, smaller))
    return list(few.values())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_on_a_gpu(case: tuple[str, Problem]) -> None:
    case[1].check("cuda")


@pytest.mark.parametrize("case", _interpreted(), ids=_id)
def test_in_the_interpreter(case: tuple[str, Problem]) -> None:
    case[1].check("cpu")


def test_lists_name_each_case_once() -> None:
    names = [_id(case) for case in CASES]
    assert len(set(names)) == len(names)


def _last_rows_agree(x: torch.Tensor, y: torch.Tensor) -> None:
    """Rows at the end of memory are equal to the bit to the same rows of a smaller tensor that takes the same tile."""
    tail = x[-(SMALL_M + 1) :].clone()
    assert torch.equal(y[-3:], normforge.layernorm2d_fwd(tail).y[-3:])


def _agrees_with_the_reference(x: torch.Tensor) -> None:
    """Not with a contiguous copy to the bit: how rows are aligned decides which kernel adds them up."""
    findings = compare(normforge.layernorm2d_fwd(x), reference.layernorm2d_fwd(x.contiguous()))
    assert [finding for finding in findings if not finding.ok] == []


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 64, 4096, 65536])
def test_more_than_2_to_the_31_elements(n: int) -> None:
    rows = (1 << 31) // n + 5
    x = torch.zeros(rows, n, dtype=torch.float16, device="cuda")
    x[-3:] = torch.randn(3, n, dtype=torch.float16, device="cuda")
    y = torch.full_like(x, float("nan"))
    normforge.layernorm2d_fwd(x, out=y)
    _last_rows_agree(x, y)
    assert not y.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 1500, 33000])
def test_row_stride_times_row_past_int32(n: int) -> None:
    stride = (1 << 31) // 4 + 8
    memory = torch.zeros(5 * stride + n, dtype=torch.float16, device="cuda")
    x = memory.as_strided((6, n), (stride, 1))
    x.copy_(torch.randn(6, n, dtype=torch.float16, device="cuda"))
    _agrees_with_the_reference(x)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_rows_that_start_anywhere(offset: int) -> None:
    """N = 3584 as a slice of wider rows: neither the first element nor the stride need be aligned."""
    wide = torch.randn(19, 3584 + 13, dtype=torch.bfloat16, device="cuda")
    _agrees_with_the_reference(wide[:, offset : offset + 3584])


@pytest.mark.gpu
def test_a_call_waits_for_the_work_before_it_on_the_current_stream() -> None:
    x = torch.randn(8192, 8192, device="cuda")
    expected = normforge.layernorm2d_fwd(x @ x).y
    stream = torch.Stream("cuda")
    torch.cuda.synchronize()
    with stream:
        y = normforge.layernorm2d_fwd(x @ x).y
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100, 4096, 40000])
def test_compilations_do_not_depend_on_m(n: int) -> None:
    mode = Mode(Norm.LAYER, DType.FP32, DType.FP32)
    entry = dispatch.find(mode, n)
    for m in (2, entry.small_m + 1):
        normforge.layernorm2d_fwd(torch.randn(m, n, device="cuda"))
    before = _compilations(entry)
    for m in (1, 4, 5, 16, 37, 64, 1000, 4096):
        Problem(mode, (m, n), absent=frozenset({"weight", "bias"})).check("cuda")
    assert _compilations(entry) == before


def _compilations(entry: Entry) -> int:
    kernels = {tile.kernel: entry.load(tile) for tile in entry.distinct_tiles()}
    return sum(len(caches[0]) for kernel in kernels.values() for caches in kernel.device_caches.values())
