"""Modules that share a sketch read as if each had been rendered for its mode alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

import pytest

from normforge.codegen import emit
from normforge.codegen.groups import AnyMode, group_modes
from normforge.codegen.model import Mode
from normforge.codegen.sketch import Reader, Sketches, blank
from normforge.codegen.values import DType, Norm

from ..covering import every_mode
from ..thorough import THOROUGH


def kernels_of(mode: AnyMode) -> list[str]:
    """The kernels of a mode, by templates that read the mode itself."""
    parts = dict.fromkeys(part for pipeline in mode.pipelines for part in emit.parts(mode, pipeline))
    return [emit._render_kernel(mode, part, *emit._templates_of(mode)) for part in parts]


def imported(module: str) -> set[str]:
    """What a module imports from those that the folder's modules share."""
    nodes = [node for node in ast.parse(module).body if isinstance(node, ast.ImportFrom)]
    return {name.name for node in nodes for name in node.names}


@pytest.mark.parametrize(("first", "step"), [(0, 131), pytest.param(1, 31, marks=THOROUGH)])
def test_a_module_reads_as_if_rendered_for_its_mode_alone(first: int, step: int) -> None:
    functions = emit._functions("primitives") | emit._functions("group_primitives")
    modes: tuple[AnyMode, ...] = (*every_mode()[first::step], *group_modes())
    for mode in modes:
        module, kernels = emit.render_module(mode, mode.pipelines), kernels_of(mode)
        assert module.endswith("".join(f"\n\n{kernel}\n" for kernel in kernels)), mode.name
        called = set(re.findall(r"\b(?:\w+(?=\()|[A-Z_]+\b)", "".join(kernels)))
        assert imported(module) == called & functions, mode.name


def test_modes_share_what_templates_do_not_decide_on() -> None:
    sketches, rendered = Sketches(), []

    def render(read: Reader) -> str:
        rendered.append(read)
        wide = "wide" if read.dtype_in.itemsize == 4 else "narrow"
        return f"{read.kernel(read.pipelines[0])} {wide} {read.dtype_in.value} {blank('other')}"

    texts = []
    for dtype in (DType.BF16, DType.FP16, DType.FP32):
        mode = Mode(Norm.RMS, dtype, dtype)
        sketch = sketches.find(mode, "start", render)
        texts.append(sketch.fill({"name": mode.name, "dtype_in.value": dtype.value, "other": "!"}))
    assert texts == [
        "rms_fwd_bf16_rows narrow bf16 !",
        "rms_fwd_fp16_rows narrow fp16 !",
        "rms_fwd_fp32_rows wide fp32 !",
    ]
    assert len(rendered) == 2


@pytest.mark.parametrize(
    "wrong", [lambda read: str(read), lambda read: str(read.norm == Norm.RMS), lambda read: str(read.nope)]
)
def test_what_no_note_could_say_is_refused(wrong: Callable[[Reader], str]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        Sketches().find(Mode(Norm.RMS, DType.BF16, DType.BF16), "start", wrong)
