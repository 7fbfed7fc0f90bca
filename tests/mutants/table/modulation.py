"""Modulated norms: stages of kernels, how samples share rows, what calls are known by, and gradients."""

from __future__ import annotations

from ..mutant import Mutant

_FORMULA = "tests/nn/test_modulation.py::test_outputs_and_gradients_are_those_of_fp64"
_CALLS = "tests/calls/test_modulated.py"
_PATCHED = "tests/nn/test_modulated_blocks.py"

MUTANTS = (
    Mutant(
        "modulation-forgets-the-one",
        "modulated: rows are multiplied by scale, and not by 1 + scale",
        "templates/epilogue.j2",
        "y = y * (1.0 + load_chunk(scale_ptr, cols, {{ at.mask }}))",
        "y = y * (load_chunk(scale_ptr, cols, {{ at.mask }}))",
        ("tests/nn/test_modulation.py::test_many_short_rows",),
    ),
    Mutant(
        "modulated-chunk-forgets-the-one",
        "one_pass modulated: rows are multiplied by scale, and not by 1 + scale",
        "templates/epilogue.j2",
        "y *= 1.0 + operand_chunk(scale_ptr, scale_row, start, N, BLOCK)",
        "y *= operand_chunk(scale_ptr, scale_row, start, N, BLOCK)",
        (_FORMULA,),
    ),
    Mutant(
        "modulation-forgets-the-gate",
        "modulated: x is not gated",
        "templates/prologue.j2",
        "s *= load_chunk(gate_ptr, cols, {{ at.mask }})\n",
        "",
        (_FORMULA,),
    ),
    Mutant(
        "samples-are-rows",
        "each row is modulated as if it were a sample",
        "runtime/calls/row_layout.py",
        "return RowWalk((tensor.stride(0), 0), (rows,)) if rows > 1 else tensor.stride(0)",
        "return tensor.stride(0)",
        (_FORMULA,),
    ),
    Mutant(
        "known-samples-need-not-fit",
        "a known modulated call does not look at how many samples its operands have",
        "templates/calls.py.j2",
        "{{ p.name }}.dim() == 1 or {{ p.name }}.shape[0] == shape[0])",
        "{{ p.name }}.dim() == 1 or {{ p.name }}.shape[0] > 0)",
        (f"{_CALLS}::test_a_known_call_whose_samples_do_not_fit_is_refused",),
    ),
    Mutant(
        "modulated-backward-forgets-the-scale",
        "backward modulated: dy is not multiplied by 1 + scale",
        "templates/gradients.j2",
        "g *= 1.0 + scale_vector.to(tl.float32)",
        "g *= 1.0",
        (_FORMULA,),
    ),
    Mutant(
        "modulated-backward-takes-the-first-sample",
        "backward modulated: all programs take the rows of the first sample",
        "templates/backward.j2",
        "first_row = (sample * M).to(tl.int64)",
        "first_row = (sample * 0).to(tl.int64)",
        (_FORMULA,),
    ),
    Mutant(
        "modulated-backward-leaves-sums-in-one-place",
        "backward modulated: programs of all samples leave their sums in the same places",
        "templates/backward.j2",
        '{{ "leaving" if m.modulated or m.grouped else "program" }}',
        '{{ "leaving" if m.grouped else "program" }}',
        (_FORMULA,),
    ),
    Mutant(
        "modulated-gradient-forgets-the-bias",
        "backward modulated: dscale leaves the bias out",
        "runtime/calls/modulated_backward.py",
        "dscale = dscale + dy * kept.bias.float()",
        "pass",
        (_FORMULA,),
    ),
    Mutant(
        "modulated-gradient-of-a-negative",
        "backward modulated: a gradient that is a view of its negative is read as it lies in memory",
        "runtime/calls/row_gradients.py",
        " and not tensor.is_neg() for tensor in there",
        " for tensor in there",
        ("tests/nn/test_modulation.py::test_a_gradient_that_arrives_may_lie_anyhow",),
    ),
    Mutant(
        "modulation-passes-hooks-by",
        "patch: a norm that somebody watches is computed with its modulation, and nobody sees it called",
        "runtime/nn/modulating.py",
        "if norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks:",
        "if norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks:",
        (f"{_PATCHED}::test_hooks_on_the_norm_see_it_called",),
    ),
    Mutant(
        "modulation-of-another-order",
        "patch: a function that takes the scale first is given the shift for it",
        "runtime/nn/modulating.py",
        "scale, shift = fitting[formula.scale], fitting[1 - formula.scale]",
        "shift, scale = fitting",
        (f"{_PATCHED}::test_every_way_to_write_it[ByScaleFirst-cpu]",),
    ),
    Mutant(
        "modulation-of-a-name-that-goes-on",
        "patch: a norm's result that is used beside its modulation is thought to be used in it alone",
        "runtime/nn/modulation_text.py",
        "if call is None or len(loads) != 1:",
        "if call is None:",
        (f"{_PATCHED}::test_what_is_not_a_modulation_runs_as_it_did[UsedTwice]",),
    ),
    Mutant(
        "modulated-gradients-known-at-any-address",
        "a backward pass that is known takes tensors at no multiple of 16 bytes for such as are",
        "runtime/calls/modulated_backward.py",
        "ready: Ready | None = kind.plan if aligned else kind.plan_at(*addresses)",
        "ready: Ready | None = kind.plan",
        ("tests/calls/test_known_gradients.py::test_what_differs_is_looked_at[cpu]",),
    ),
    Mutant(
        "modulated-gradients-known-without-the-sums",
        "a backward pass is known whether the sum's gradient arrived or not",
        "runtime/calls/modulated_backward.py",
        "key = (\"modulated bwd\", told, due, arrived[1] is None)",
        "key = (\"modulated bwd\", told, due)",
        ("tests/calls/test_known_gradients.py::test_a_sum_that_is_read_or_not[y alone-('residual',)-cpu]",),
    ),
)
