"""The rows of parameters fit the modes and the functions that are made of them."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields

import pytest

import normforge
from normforge.calls.outputs import LayerNormOutput, NormGradients
from normforge.codegen.families import REQUIRED, Family
from normforge.codegen.model import Mode
from normforge.codegen.parameters import BACKWARD, FAMILIES, FORWARD, GATED, MODULATED, QUANTISED
from normforge.codegen.public import PUBLIC
from normforge.codegen.values import Norm
from normforge.families import public

# The families whose public functions are emitted.
EMITTED = (FORWARD, BACKWARD, *(functions.family for functions in PUBLIC))
# What a public function has instead of rows that autograd and x decide, and of those.
OTHERWISE: dict[Family, tuple[set[str], set[str]]] = {
    MODULATED: ({"fquant", "out_dtype", "save_mv"}, set()),
    # Gating and groups are in the words of Mamba2.
    GATED: ({"weight_offset", "fquant", "out_dtype", "save_mv", "gating"}, {"norm_before_gate", "group_size"}),
}


@pytest.mark.parametrize(
    ("family", "norm"),
    [
        pytest.param(family, norm, id=family.functions[norm])
        for family in (*EMITTED, *OTHERWISE)
        for norm in family.functions
    ],
)
def test_a_function_takes_what_its_rows_say(family: Family, norm: Norm) -> None:
    """With the annotations and the defaults of the rows; where the function is emitted, in their order."""
    left_out, own = OTHERWISE.get(family, (set(), set()))
    of = normforge if family in OTHERWISE else public
    signature = inspect.signature(getattr(of, family.functions[norm])).parameters
    rows = {row.name: row for row in family.of(norm) if row.name not in left_out}
    assert set(signature) == rows.keys() | own
    assert family in OTHERWISE or list(signature) == list(rows)
    for name, row in rows.items():
        parameter, default = signature[name], row.default[norm]
        assert parameter.annotation == row.annotation
        assert (parameter.default is parameter.empty) == (default == REQUIRED)
        if default != REQUIRED:
            assert default == str(parameter.default) or ast.literal_eval(default) == parameter.default
        assert family in OTHERWISE or (parameter.kind is parameter.KEYWORD_ONLY) == (not row.positional)


def test_the_results_are_what_is_returned() -> None:
    assert tuple(result.name for result in FORWARD.results) == LayerNormOutput._fields
    assert tuple(result.name for result in BACKWARD.results) == NormGradients._fields


def test_every_axis_is_decided_by_a_parameter() -> None:
    """Of the public functions; norm and direction name the function, some axes the family, and reduce an object."""
    axes = {field.name for field in fields(Mode)}
    decided = {row.axis for family in (FORWARD, BACKWARD, MODULATED, GATED, QUANTISED) for row in family.parameters} - {
        ""
    }
    assert decided | {axis for family in FAMILIES for axis in family.axes} == axes - {"norm", "direction", "reduce"}
