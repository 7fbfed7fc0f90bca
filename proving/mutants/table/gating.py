"""Gated norms: stages of kernels, groups of columns, what calls are known by, and gradients."""

from __future__ import annotations

from ..mutant import Mutant

_FORMULA = "tests/nn/test_families.py::test_outputs_and_gradients_are_those_of_fp64"
_CALLS = "tests/calls/test_gated.py"

MUTANTS = (
    Mutant(
        "gate-before-is-forgotten",
        "gated in front of the norm: rows are normalised as they are",
        "templates/prologue.j2",
        "s *= {{ m.gate_activation.value }}(load_chunk(gate_ptr, cols, {{ at.mask }}))\n",
        "",
        (_FORMULA,),
    ),
    Mutant(
        "gate-after-is-forgotten",
        "gated behind the norm: y is not multiplied",
        "templates/epilogue.j2",
        "y *= {{ m.gate_activation.value }}(operand_chunk(gate_ptr, gate_row, start, N, BLOCK))\n",
        "",
        (_FORMULA,),
    ),
    Mutant(
        "silu-is-sigmoid",
        "silu: the gate itself is left out",
        "templates/primitives.py.j2",
        "return z * sigmoid(z, PTX)",
        "return sigmoid(z, PTX)",
        (_FORMULA,),
    ),
    Mutant(
        "silu-slope-forgets-the-gate",
        "backward: silu's slope is sigmoid",
        "templates/primitives.py.j2",
        "return rising * (1.0 + z * (1.0 - rising))",
        "return rising",
        (_FORMULA,),
    ),
    Mutant(
        "groups-share-the-first-weight",
        "groups of columns: every group has the weight of the first",
        "runtime/calls/row_layout.py",
        "return RowWalk((0, tensor.stride(0)), (groups,)) if groups > 1 else 0",
        "return 0",
        (_FORMULA,),
    ),
    Mutant(
        "group-sums-in-one-place",
        "backward of groups: programs of all groups leave their sums in the same places",
        "templates/backward.j2",
        '{{ "leaving" if m.modulated or m.grouped else "program" }}',
        '{{ "leaving" if m.modulated else "program" }}',
        (_FORMULA,),
    ),
    Mutant(
        "group-statistics-of-the-first",
        "backward of groups: every group has the statistics of a token's first",
        "templates/backward.j2",
        "rstd_ptr += group\nif dx_ptr",
        "if dx_ptr",
        (_FORMULA,),
    ),
    Mutant(
        "gate-gradient-forgets-the-bias",
        "backward, gated behind the norm: the gate's gradient leaves the bias out",
        "templates/layer.j2",
        "if bias_ptr is not None:\n    y += {{ bias }}\n",
        "",
        (_FORMULA,),
    ),
    Mutant(
        "known-groups-need-not-fit",
        "a known gated call does not look at how many groups its weight has",
        "runtime/upstream/known.c",
        "(look > SCALE && count == 1)",
        "(look > SCALE && (count == 1 || look == GROUPS))",
        (f"{_CALLS}::test_a_known_call_whose_groups_do_not_fit_is_refused",),
    ),
)
