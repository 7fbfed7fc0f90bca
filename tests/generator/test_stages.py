"""Pipelines name no stage, and modules that share a sketch read as if each had been rendered for its mode alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache

import pytest

from normforge.codegen import emit
from normforge.codegen.groups import AnyMode, group_modes
from normforge.codegen.model import Mode
from normforge.codegen.signature import params
from normforge.codegen.sketch import Reader, Sketches, blank
from normforge.codegen.stages import Stage
from normforge.codegen.values import Direction, DType, Norm

from ..covering import axes_of, covering, every_mode
from ..thorough import THOROUGH

PLAIN = tuple(Mode(Norm.LAYER, DType.BF16, DType.BF16, direction=direction) for direction in Direction)


@cache
def modes() -> tuple[Mode, ...]:
    """Every two values of axes together."""
    return tuple(covering(every_mode(), axes_of, 2))


@cache
def tensors(mode: Mode) -> frozenset[str]:
    """What the kernels of a mode are given, by name."""
    parts = {part for pipeline in mode.pipelines for part in emit.parts(mode, pipeline)}
    names = {param.declaration for part in parts for param in params(mode, part)}
    return frozenset(name.removesuffix("_ptr") for name in names if name.endswith("_ptr"))


@cache
def of_features() -> frozenset[str]:
    """The words that say what not every norm has: parts of stages' names, and what kernels are given for them."""
    stages = set(Stage).difference(*(mode.prologue + mode.epilogue for mode in PLAIN))
    words = {word for stage in stages for word in stage.value.split("_") if len(word) > 1}
    further = frozenset[str]().union(*map(tensors, modes())).difference(*map(tensors, PLAIN))
    return frozenset(words | {f"{name}_ptr" for name in further})


def named(template: str) -> list[str]:
    """The features that a pipeline names; what it says in comments is for readers."""
    code = re.sub(r"{#(?s:.*?)#}|^ *#.*$", "", template, flags=re.MULTILINE)
    found = {word for word in of_features() if re.search(rf"(?<![a-z])d?{word}(?![a-z])", code)}
    # Whether a mode has one is for the stages to ask.
    return sorted(found | {f"m.{name}" for name in re.findall(r"\bm\.(\w+)", code) if name != "dtype_in"})


def pipelines() -> list[str]:
    """The templates that kernels of these modes are made of."""
    parts = {(mode.is_backward, part) for mode in PLAIN for each in mode.pipelines for part in emit.parts(mode, each)}
    return sorted(f"{'bwd_' if backward else ''}{part.value}.py.j2" for backward, part in parts)


@pytest.mark.parametrize("name", [*pipelines(), "plain.j2"])
def test_no_pipeline_names_a_feature(name: str) -> None:
    assert named((emit.TEMPLATES / name).read_text()) == []


@pytest.mark.parametrize("name", ["quantised.j2", "scaled.j2", "scaled_groups.j2"])
def test_what_quantises_names_its_scales_alone(name: str) -> None:
    assert named((emit.TEMPLATES / name).read_text()) == ["scale"]


def kernels_of(mode: AnyMode) -> list[str]:
    """The kernels of a mode, by templates that read the mode itself."""
    parts = dict.fromkeys(part for pipeline in mode.pipelines for part in emit.parts(mode, pipeline))
    return [emit._render_kernel(mode, part, *emit._templates_of(mode)) for part in parts]


@pytest.mark.parametrize(("first", "step"), [(0, 521), pytest.param(1, 31, marks=THOROUGH)])
def test_a_module_reads_as_if_rendered_for_its_mode_alone(first: int, step: int) -> None:
    functions = frozenset[str]().union(*map(emit._functions, emit.DEVICE_FUNCTIONS))
    modes: tuple[AnyMode, ...] = (*every_mode()[first::step], *group_modes())
    for mode in modes:
        module, kernels = emit.render_module(mode, mode.pipelines), kernels_of(mode)
        assert module.endswith("".join(f"\n\n{kernel}\n" for kernel in kernels)), mode.name
        called = set(re.findall(r"\b(?:\w+(?=\()|[A-Z_]+\b)", "".join(kernels)))
        shared = [node for node in ast.parse(module).body if isinstance(node, ast.ImportFrom)]
        assert {name.name for node in shared for name in node.names} == called & functions, mode.name


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
