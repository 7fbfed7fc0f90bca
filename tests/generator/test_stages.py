"""Pipelines ask for a prologue and an epilogue, and name no stage of them; what a mode has of both is what it takes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from normforge.codegen import emit
from normforge.codegen.model import Mode
from normforge.codegen.signature import params
from normforge.codegen.stages import Stage
from normforge.codegen.values import Direction, DType, Norm

from ..covering import axes_of, covering, every_mode

PLAIN = tuple(Mode(Norm.LAYER, DType.BF16, DType.BF16, direction=direction) for direction in Direction)

# What a kernel takes for a stage, forward or backward; nothing, where it is arithmetic alone.
TENSORS = {
    Stage.X_SCALE: ("x_scale",),
    Stage.X_BIAS: ("x_bias",),
    Stage.X_GATE: ("gate",),
    Stage.GATE_BEFORE: ("gate",),
    Stage.DROPOUT: ("dropout_rng",),
    Stage.RESIDUAL: ("residual", "dresidual_out"),
    Stage.STORED: ("residual_out",),
    Stage.MODULATION: ("scale",),
    Stage.GATE_AFTER: ("gate",),
    Stage.UNQUANTISED: ("unquantised",),
    Stage.SMOOTH: ("smooth_scale",),
}
# Where a stage's macros are, and what one does, in front of its name.
HOMES = {"prologue.j2": ("", "load_"), "epilogue.j2": ("", "load_")}
GRADIENTS = ("load_", "ahead_", "s_", "dy_", "g_", "dx_", "from_dy_", "from_dx_")


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


def test_a_feature_that_a_pipeline_names_is_seen() -> None:
    text = (emit.TEMPLATES / "rows.py.j2").read_text()
    for line, found in (
        ("{{ kernel.load_dropout(m) }}", ["dropout"]),
        ("{{ kernel.load_x_scale(m) }}", ["scale"]),
        ("{{ backward.load_dresidual(m) }}", ["residual"]),
        ("y *= load_chunk(smooth_scale_ptr, cols, mask)", ["scale", "scale_ptr", "smooth", "smooth_scale_ptr"]),
        ("{% if m.fadd.adds %}{% endif %}", ["m.fadd"]),
        ("# Where there is a residual, it was added.", []),
        ("{# Of the gate. #}", []),
    ):
        assert named(f"{text}{line}\n") == found


def test_stages_come_in_their_order() -> None:
    order = {stage: place for place, stage in enumerate(Stage)}
    for mode in every_mode():
        places = [order[stage] for stage in mode.prologue + mode.epilogue]
        assert places == sorted(set(places)), mode.name
        assert order[mode.prologue[-1]] < order[mode.epilogue[0]]


def test_a_mode_has_the_stages_that_it_takes_something_for() -> None:
    for mode in modes():
        stages = mode.prologue + mode.epilogue
        given = {name for stage in stages for name in TENSORS.get(stage, ())}
        known = {name for names in TENSORS.values() for name in names}
        residuals = {"dresidual_out"} if not mode.is_backward else {"residual"}
        assert given - residuals == tensors(mode) & known, mode.name
        assert (Stage.CAST in stages) is mode.cast.comes_first
        assert (Stage.ROUNDING in stages) is mode.quantise_rounded
        assert (Stage.X in stages) is not mode.dtype_in.is_fp8
        assert Stage.WEIGHT in stages


def macros(name: str) -> dict[str, str]:
    """The macros of a template and what each is handed."""
    text = (emit.TEMPLATES / name).read_text()
    return dict(re.findall(r"{% macro (\w+)\((.*?)\)", text))


def test_every_stage_has_a_macro() -> None:
    """In one place: the prologue's or the epilogue's, as modes have it."""
    homes = {name: {stage for stage in Stage if stage.value in macros(name)} for name in HOMES}
    assert homes["prologue.j2"] == {stage for mode in modes() for stage in mode.prologue}
    assert homes["epilogue.j2"] == {stage for mode in modes() for stage in mode.epilogue}
    assert set.union(*homes.values()) == set(Stage)


@pytest.mark.parametrize(("name", "does"), [*HOMES.items(), ("gradients.j2", GRADIENTS)])
def test_every_macro_is_found(name: str, does: tuple[str, ...]) -> None:
    """A stage without a macro has nothing to do there, so one that is called otherwise would be passed over."""
    asked = "".join(path.read_text() for path in Path(emit.TEMPLATES).glob("*.j2"))
    forms = {"", *(f"_{form}" for form in re.findall(r'"(row|tile|chunk|swept|window|ends|slice|terms)"', asked))}
    found = [f"{what}{stage.value}{form}" for what in does for stage in Stage for form in forms]
    assert len(found) == len(set(found))
    # Helpers are handed other things.
    assert {macro for macro, handed in macros(name).items() if handed == "m, at"} <= set(found)
