"""Programmatic dependent launch, in machine text: a kernel that may start early touches no memory before it waits."""

from __future__ import annotations

import re

import pytest

from normforge.ahead_of_time.compile_keys import compile_keys
from normforge.codegen import emit
from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.values import Direction, DType, FusedAdd, FusedQuant, Norm, Part, Pipeline
from normforge.kernels.gpu import Target
from normforge.kernels.obtain import compile_for

from .compilation import NVIDIA, SM_90, compiled

pytestmark = pytest.mark.compile

N = 1504
TILES = {
    Pipeline.ROWS: Tile(Pipeline.ROWS, 2, 2048, 4),
    Pipeline.ONE_PASS: Tile(Pipeline.ONE_PASS, 1, 1024, 4),
    Pipeline.TWO_PASS: Tile(Pipeline.TWO_PASS, 2, 512, 4),
    Pipeline.SPREAD: Tile(Pipeline.SPREAD, 2, 512, 4, held=2),
}
MODES = (
    Mode(Norm.LAYER, DType.BF16, DType.BF16, save_mv=True),
    Mode(Norm.RMS, DType.FP16, DType.INT8, FusedAdd.PRE_ADD_STORE, FusedQuant.SMOOTH_DYNAMIC),
    Mode(Norm.LAYER, DType.BF16, DType.BF16, FusedAdd.PRE_ADD_STORE, direction=Direction.BACKWARD),
)
KERNELS = [
    (mode, pipeline, part) for mode in MODES for pipeline in mode.pipelines for part in emit.parts(mode, pipeline)
]

ACCESS = re.compile(r"\b(?:ld|st|atom|red)\.(?!param)\S*global")
WAIT, ADMIT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def first_access(text: str) -> int:
    found = ACCESS.search(text)
    assert found is not None
    return found.start()


def ptx_of(mode: Mode, pipeline: Pipeline, part: Pipeline | Part, target: Target = SM_90) -> str:
    # Rows of odd length start anywhere.
    n = N + 1 if part is Part.WINDOW else N
    return str(compiled(mode, n, target, TILES[pipeline], part).asm["ptx"])


@pytest.mark.parametrize(("mode", "pipeline", "part"), KERNELS, ids=[mode.kernel(part) for mode, _, part in KERNELS])
def test_nothing_is_read_or_written_before_the_launch_ahead_has_ended(
    mode: Mode, pipeline: Pipeline, part: Pipeline | Part
) -> None:
    texts = {target.arch: ptx_of(mode, pipeline, part, target) for target in NVIDIA}
    # Ampere has no such launch, and a cooperative one is none.
    assert WAIT not in texts["sm_80"]
    for name in ("sm_90", "sm_100"):
        text = texts[name]
        assert text.count(WAIT) == (part is not Pipeline.SPREAD)
        assert text.find(WAIT) < first_access(text)


def test_partial_sums_are_not_read_before_they_are_there() -> None:
    keys = compile_keys([N], ["ln_bwd_bf16"], arch="sm_90", rows=["few"])
    (key,) = [key for key in keys if key.key.symbol == "sum_partials"]
    text = compile_for(key.key, key.function, SM_90).asm["ptx"]
    assert text.count(WAIT) == 1
    assert text.index(WAIT) < first_access(text)


ADMITTING = [(pipeline, part) for mode, pipeline, part in KERNELS if mode.is_backward and part is not Pipeline.SPREAD]


@pytest.mark.parametrize(("pipeline", "part"), ADMITTING, ids=[part.value for _, part in ADMITTING])
def test_a_backward_kernel_admits_the_next_one_before_it_leaves_its_sums(
    pipeline: Pipeline, part: Pipeline | Part
) -> None:
    """Every program comes there once, whatever rows it had: the next kernel waits for the last."""
    text = ptx_of(MODES[2], pipeline, part)
    assert text.count(ADMIT) == 1
    assert text.index(WAIT) < text.index(ADMIT) < text.rindex("st.global")
