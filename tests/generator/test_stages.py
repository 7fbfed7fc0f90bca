"""Pipelines ask for a prologue and an epilogue, and name no stage of them."""

from __future__ import annotations

import re
from functools import cache

import pytest

from normforge.codegen import emit
from normforge.codegen.model import Mode
from normforge.codegen.signature import params
from normforge.codegen.stages import Stage
from normforge.codegen.values import Direction, DType, Norm

from ..covering import axes_of, covering, every_mode

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
