"""The rows of parameters fit the modes and the functions that are made of them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

import normforge
from normforge.calls.outputs import LayerNormOutput, NormGradients
from normforge.codegen.families import REQUIRED, Family, Parameter
from normforge.codegen.model import Mode
from normforge.codegen.parameters import BACKWARD, FORWARD, GATED, MODULATED, QUANTISED
from normforge.codegen.public import PUBLIC
from normforge.codegen.values import Norm
from normforge.families import public

# The families whose public functions are emitted.
EMITTED = (FORWARD, BACKWARD, *(functions.family for functions in PUBLIC))
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(public, name) for family in EMITTED for name in family.functions.values()
}


def functions_of(families: tuple[Family, ...]) -> pytest.MarkDecorator:
    cases = [pytest.param(family, norm, id=family.functions[norm]) for family in families for norm in family.functions]
    return pytest.mark.parametrize(("family", "norm"), cases)


each_emitted_function = functions_of(EMITTED)


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


def test_every_axis_is_decided_by_a_parameter() -> None:
    """Of the forward functions; which norm, which direction and whether modulated is which function."""
    axes = {field.name for field in fields(Mode)}
    decided = {row.axis for family in (FORWARD, MODULATED, GATED, QUANTISED) for row in family.parameters} - {""}
    assert decided == axes - {"norm", "direction", "modulated"}
    assert {row.axis for row in BACKWARD.parameters} - {""} <= axes
