"""The rows of parameters fit the modes, the kernels and the functions that are made of them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from operator import attrgetter
from string import Formatter
from typing import Any

import pytest

import normforge
from normforge.calls.outputs import LayerNormOutput, NormGradients
from normforge.codegen.families import REQUIRED, Family, Kind, Parameter, Result
from normforge.codegen.model import Mode
from normforge.codegen.parameters import BACKWARD, FAMILIES, FORWARD, GATED, GRADIENTS, MODULATED, QUANTISED, family_of
from normforge.codegen.public import PUBLIC
from normforge.codegen.signature import params
from normforge.codegen.values import Norm
from normforge.families import public

from ..covering import axes_of, covering, every_mode

# The families whose public functions are emitted.
EMITTED = (FORWARD, BACKWARD, *(functions.family for functions in PUBLIC))
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(public, name) for family in EMITTED for name in family.functions.values()
}


def functions_of(families: tuple[Family, ...]) -> pytest.MarkDecorator:
    cases = [pytest.param(family, norm, id=family.functions[norm]) for family in families for norm in family.functions]
    return pytest.mark.parametrize(("family", "norm"), cases)


each_function = functions_of(FAMILIES)
each_emitted_function = functions_of(EMITTED)


def rows_of(family: Family) -> list[Parameter | Result]:
    return [*family.parameters, *family.results]


each_row = pytest.mark.parametrize(
    ("family", "row"),
    [
        pytest.param(family, row, id=f"{family.functions[Norm.LAYER]}-{row.name}")
        for family in FAMILIES
        for row in rows_of(family)
    ],
)


@cache
def modes(family: Family, norm: Norm) -> tuple[Mode, ...]:
    """Modes that have every value of each axis."""
    own = [mode for mode in every_mode() if mode.norm is norm and family_of(mode) is family]
    return tuple(covering(own, axes_of, 1))


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def assert_is_row(parameter: inspect.Parameter, row: Parameter, norm: Norm) -> None:
    """Fail unless a function's parameter has the annotation and the default of its row."""
    written = row.default[norm]
    assert parameter.annotation == row.annotation
    assert (parameter.default is parameter.empty) == (written == REQUIRED)
    if written != REQUIRED:
        assert written == str(parameter.default) or ast.literal_eval(written) == parameter.default


@each_emitted_function
def test_the_function_has_the_signature_of_its_rows(family: Family, norm: Norm) -> None:
    signature = inspect.signature(FUNCTIONS[family.functions[norm]])
    rows = family.of(norm)
    assert list(signature.parameters) == [row.name for row in rows]
    for row, parameter in zip(rows, signature.parameters.values(), strict=True):
        assert_is_row(parameter, row, norm)
        assert (parameter.kind is parameter.KEYWORD_ONLY) == (not row.positional)


@each_emitted_function
def test_the_docstring_says_what_the_rows_say(family: Family, norm: Norm) -> None:
    said = in_one_line(inspect.getdoc(FUNCTIONS[family.functions[norm]]) or "")
    assert "see `" not in said
    for row in family.of(norm):
        assert f"{row.name}: {family.meaning(row, norm)}" in said


# What a public function has instead of rows that autograd and x decide, and of those.
OTHERWISE = {
    MODULATED: ({"fquant", "out_dtype", "save_mv"}, set()),
    # Gating and groups are in the words of Mamba2.
    GATED: ({"weight_offset", "fquant", "out_dtype", "save_mv", "gating"}, {"norm_before_gate", "group_size"}),
}


@functions_of(tuple(OTHERWISE))
def test_public_functions_take_what_their_rows_say(family: Family, norm: Norm) -> None:
    left_out, own = OTHERWISE[family]
    signature = inspect.signature(getattr(normforge, family.functions[norm])).parameters
    rows = {row.name: row for row in family.of(norm) if row.name not in left_out}
    assert set(signature) == rows.keys() | own
    for name, row in rows.items():
        assert_is_row(signature[name], row, norm)


def test_the_results_are_what_is_returned() -> None:
    assert tuple(result.name for result in FORWARD.results) == LayerNormOutput._fields
    assert tuple(result.name for result in BACKWARD.results) == NormGradients._fields


@each_function
def test_kernels_have_the_slots_of_what_is_wanted(family: Family, norm: Norm) -> None:
    for mode in modes(family, norm):
        declared = {param.declaration for pipeline in mode.pipelines for param in params(mode, pipeline)}
        tensors = [row for row in rows_of(family) if isinstance(row, Result) or row.kind.is_tensor]
        pointers = {row.slot for row in tensors if row.is_wanted(mode)}
        # The values that programs exchange, and the means that one kernel leaves for the next.
        inner = {"exchange_ptr", "gh_mean_ptr", "g_mean_ptr"}
        assert pointers == {name for name in declared if name.endswith("_ptr")} - inner
        walked = [row for row in tensors if row.kind is not Kind.GROUPS or mode.grouped]
        strides = {row.row_stride_slot for row in walked if row.is_wanted(mode)} - {None}
        of_scales = {"y_scale_row_stride"} if mode.has_scale_strides else set()
        assert strides | of_scales == {name for name in declared if name.endswith("_row_stride")}
        numbers = {row.slot for row in family.of(norm) if row.kind is Kind.NUMBER and row.is_wanted(mode)}
        assert numbers <= declared


def test_every_axis_is_decided_by_a_parameter() -> None:
    """Of the forward functions; which norm, which direction and whether modulated is which function."""
    axes = {field.name for field in fields(Mode)}
    decided = {row.axis for family in (FORWARD, MODULATED, GATED, QUANTISED) for row in family.parameters} - {""}
    assert decided == axes - {"norm", "direction", "modulated"}
    assert {row.axis for row in BACKWARD.parameters} - {""} <= axes


@each_row
def test_a_row_speaks_of_what_there_is(family: Family, row: Parameter | Result) -> None:
    names = {parameter.name for parameter in family.parameters}
    for norm in family.functions:
        for mode in modes(family, norm):
            assert not row.wanted or isinstance(attrgetter(row.wanted)(mode), bool)
    if isinstance(row, Result):
        assert {row.set_by, *row.like} - {""} <= names
        assert not row.axis or row.axis in {field.name for field in fields(Mode)}
        return
    results = {result.name for result in family.results}
    assert (row.kind is Kind.OUT) == (row.result in results)
    assert row.gradient in {"", *(result.name for result in GRADIENTS.get(family.name, BACKWARD).results)}
    assert row.needs in {"", *names}
    words = {parameter.name for parameter in family.parameters if parameter.kind is Kind.WORD}
    for sentence in (row.absent, row.unused):
        asked = {field for _, field, _, _ in Formatter().parse(sentence) if field}
        assert asked <= ({row.name} if row.needs else words)
    # What a mode lets be read or not is an error otherwise, unless being there is what decides the axis, or what it
    # needs does.
    assert not row.wanted or row.unused or row.axis or family[row.needs].axis
    assert (row.words is not None) == (row.kind is Kind.WORD)
