"""What a call is known again by, and what is looked at in each call because no key can hold it."""

from __future__ import annotations

from ..mutant import Mutant

_KNOWN = "tests/runtime/test_known_calls.py"
_FOREIGN = "tests/runtime/test_foreign.py"
_KINDS = "tests/runtime/test_kinds_of_call.py"
_OPERANDS = f"{_KINDS}::test_another_kind_of_operand_is_another_kind_of_call"
_GRADIENTS = f"{_KINDS}::test_another_kind_of_operand_is_another_kind_of_backward_call"
_OTHERS = f"{_KINDS}::test_other_gradients_are_another_kind_of_backward_call"
_FORWARD = "runtime/calls/forward.py"
_OVERLAP = "runtime/calls/overlap.py"

MUTANTS = (
    Mutant(
        "plain-key-forgets-weight",
        "a weight of another dtype is read as that of an earlier call",
        _FORWARD,
        "key = (norm, n, device, kind, weight_kind, bias_kind, save_mv)",
        "key = (norm, n, device, kind, bias_kind, save_mv)",
        (f"{_OPERANDS}[layer-plain-bf16]",),
    ),
    Mutant(
        "plain-key-forgets-bias",
        "a bias of another dtype is read as that of an earlier call",
        _FORWARD,
        "key = (norm, n, device, kind, weight_kind, bias_kind, save_mv)",
        "key = (norm, n, device, kind, weight_kind, save_mv)",
        (f"{_OPERANDS}[layer-plain-bf16]",),
    ),
    Mutant(
        "plain-key-forgets-layout",
        "rows with gaps are read as rows without",
        _FORWARD,
        "kind = x.dtype if x.is_contiguous() else layout_of(x)\n        vector",
        "kind = x.dtype\n        vector",
        (f"{_KNOWN}::test_other_strides_are_another_kind_of_call",),
    ),
    *(
        Mutant(
            f"fused-key-forgets-{name.replace('_', '-')}",
            f"{name} of another dtype or layout is read as that of an earlier call",
            _FORWARD,
            "x_kind, weight_kind, bias_kind, x_bias_kind, smooth_kind, residual_kind, out_kind, sum_kind,",
            "x_kind, weight_kind, bias_kind, x_bias_kind, smooth_kind, residual_kind, out_kind, sum_kind,".replace(
                f"{kind}_kind, " if kind != "sum" else " sum_kind,", ""
            ),
            (f"{_OPERANDS}[layer-fused-{'gaps' if kind in ('residual', 'out', 'sum') else 'bf16'}]",),
        )
        for name, kind in {
            "weight": "weight",
            "x_bias": "x_bias",
            "smooth_scale": "smooth",
            "residual": "residual",
            "out": "out",
            "residual_out": "sum",
        }.items()
        if kind != "weight"
    ),
    Mutant(
        "fused-key-forgets-the-class-of-a-mode",
        "fadd=True is taken for 1 once a call with 1 was known",
        _FORWARD,
        "fadd, fadd.__class__, fquant,",
        "fadd, fquant,",
        (f"{_KNOWN}::test_equal_is_not_the_same",),
    ),
    Mutant(
        "fused-key-forgets-rounding",
        "rounding='truncate' rounds once a call that rounds was known",
        _FORWARD,
        "save_mv, save_mv.__class__, rounding,",
        "save_mv, save_mv.__class__,",
        (f"{_KINDS}::test_another_mode_is_another_kind_of_call",),
    ),
    Mutant(
        "fused-key-forgets-scale-dtype",
        "y_scale has the dtype of an earlier call's",
        _FORWARD,
        "            out_dtype, scale_dtype,\n        )",
        "            out_dtype,\n        )",
        (f"{_KINDS}::test_another_mode_is_another_kind_of_call",),
    ),
    Mutant(
        "fused-key-forgets-out-dtype",
        "y has the dtype of an earlier call's",
        _FORWARD,
        "            out_dtype, scale_dtype,\n        )",
        "            scale_dtype,\n        )",
        (f"{_KINDS}::test_another_mode_is_another_kind_of_call",),
    ),
    *(
        Mutant(
            f"alignment-forgets-{name.replace('_', '-')}",
            f"{name} at no multiple of 16 bytes is read by a kernel compiled for one that is",
            _FORWARD,
            "(x_at | x_bias_at | residual_at | weight_at | bias_at | smooth_at | out_at | sum_at) & MISALIGNED",
            "(x_at | x_bias_at | residual_at | weight_at | bias_at | smooth_at | out_at | sum_at) & MISALIGNED".replace(
                f" | {at}_at", ""
            ),
            (f"{_OPERANDS}[layer-fused-misaligned]",),
        )
        for name, at in {"residual": "residual", "smooth_scale": "smooth", "out": "out", "residual_out": "sum"}.items()
    ),
    Mutant(
        "plain-alignment-forgets-bias",
        "a bias at no multiple of 16 bytes is read by a kernel compiled for one that is",
        _FORWARD,
        "if (x_at | weight_at | bias_at) & MISALIGNED:",
        "if (x_at | weight_at) & MISALIGNED:",
        (f"{_OPERANDS}[layer-plain-misaligned]",),
    ),
    Mutant(
        "alignment-of-eight-bytes",
        "an address that is a multiple of 8 bytes counts as one of 16",
        "runtime/kernels/key.py",
        "ALIGNMENT = 16\n",
        "ALIGNMENT = 8\n",
        (f"{_OPERANDS}[layer-plain-misaligned]",),
    ),
    Mutant(
        "known-eps-is-not-looked-at",
        "an eps of any kind is taken in a call that is known",
        _FORWARD,
        "and eps.__class__ is float\n        and 0.0 <= eps <= LARGEST_FP32",
        "and eps <= LARGEST_FP32",
        (f"{_KNOWN}::test_equal_is_not_the_same", f"{_KNOWN}::test_a_bad_call_is_refused_alike_cold_and_warm"),
        which=0,
    ),
    Mutant(
        "known-call-may-overlap",
        "out that overlaps x is written in a call that is known",
        _OVERLAP,
        "                return False\n    return True",
        "                return True\n    return True",
        (f"{_KNOWN}::test_outputs_that_overlap_are_refused_after_some_that_do_not",),
    ),
    Mutant(
        "known-outputs-may-overlap-each-other",
        "residual_out over out is written in a call that is known",
        _OVERLAP,
        "    if out is not None and y_at < sum_end and sum_at < y_end and may_overlap(out, residual_out):\n"
        "        return False\n",
        "",
        (f"{_KNOWN}::test_outputs_that_overlap_are_refused_after_some_that_do_not",),
    ),
    Mutant(
        "known-output-over-a-vector",
        "out over weight is written if it is the same tensor",
        _OVERLAP,
        "if not (replaceable and tensor is output) and",
        "if tensor is not output and",
        (f"{_KINDS}::test_an_output_never_replaces_a_vector",),
    ),
    Mutant(
        "known-gradient-of-smooth-scale",
        "smooth_scale's gradient is lost in silence in a call that is known",
        _FORWARD,
        "\n        or (smooth_scale is not None and smooth_scale.requires_grad)",
        "",
        (f"{_KNOWN}::test_a_gradient_of_a_quantised_output_is_refused_after_a_call_without",),
    ),
    Mutant(
        "subclasses-are-known",
        "a subclass of Tensor is launched without being looked at",
        _FORWARD,
        "        if x.__class__ not in PLAIN:\n            raise Unlike\n",
        "",
        (f"{_KNOWN}::test_a_subclass_is_served_and_not_remembered",),
        which=0,
    ),
    Mutant(
        "residual-of-another-shape-is-known",
        "a residual of fewer rows is read beyond its end",
        "runtime/calls/operands.py",
        "        or rows.shape != shape\n",
        "",
        (f"{_KNOWN}::test_a_bad_call_is_refused_alike_cold_and_warm",),
    ),
    Mutant(
        "backward-key-forgets-dy",
        "dy of another dtype is read as that of an earlier call",
        "runtime/calls/gradients.py",
        "norm, n, device, dy_kind, x_kind,",
        "norm, n, device, x_kind,",
        (f"{_GRADIENTS}[rms-bf16]",),
    ),
    Mutant(
        "backward-key-forgets-dresidual-out",
        "dresidual_out of another dtype is read as that of an earlier call, or not at all",
        "runtime/calls/gradients.py",
        "dresidual_kind, weight_kind, x_bias_kind, dx_dtype,",
        "weight_kind, x_bias_kind, dx_dtype,",
        (f"{_GRADIENTS}[rms-absent]",),
    ),
    Mutant(
        "backward-key-forgets-dx-dtype",
        "dx has the dtype of an earlier call's",
        "runtime/calls/gradients.py",
        "x_bias_kind, dx_dtype, bias_dtype, wants,",
        "x_bias_kind, bias_dtype, wants,",
        (_OTHERS,),
    ),
    Mutant(
        "backward-key-forgets-wants",
        "the gradients of an earlier call are computed",
        "runtime/calls/gradients.py",
        "dx_dtype, bias_dtype, wants,\n        )",
        "dx_dtype, bias_dtype,\n        )",
        (_OTHERS,),
    ),
    Mutant(
        "backward-alignment-forgets-dresidual-out",
        "dresidual_out at no multiple of 16 bytes is read by a kernel compiled for one that is",
        "runtime/calls/gradients.py",
        "| mean_at | rstd_at | dresidual_at) & MISALIGNED",
        "| mean_at | rstd_at) & MISALIGNED",
        (f"{_GRADIENTS}[rms-misaligned]",),
    ),
    Mutant(
        "overlap-of-rows-that-touch-in-a-byte",
        "out whose rows share their first byte with the end of x's is taken",
        _OVERLAP,
        "return distance < a_width or a_stride - distance < b_width",
        "return distance < a_width",
        ("tests/runtime/test_overlap.py::test_agrees_with_counting_elements",),
    ),
    Mutant(
        "overlap-of-another-row-stride",
        "out that starts where x does and has other rows is taken for x",
        _OVERLAP,
        "return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and _row_bytes(a) == _row_bytes(b)",
        "return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype",
        ("tests/runtime/test_overlap.py::test_out_that_overlaps_an_input_elsewhere_than_exactly",),
    ),
    Mutant(
        "rows-that-do-not-collapse-are-walked",
        "leading dimensions without one common stride are read at the last one's",
        "runtime/calls/arguments.py",
        "        if outer != size * inner:\n",
        "        if False:\n",
        ("tests/runtime/test_bad_arguments.py::test_refused",),
    ),
    Mutant(
        "a-residual-is-ignored",
        "residual without fadd is ignored in silence",
        "runtime/calls/arguments.py",
        "    if residual is not None and not fadd.adds:\n",
        "    if False:\n",
        ("tests/runtime/test_bad_arguments.py::test_refused",),
    ),
    Mutant(
        "negated-vectors-are-known",
        "in a call that is known a view with the negative bit is read as it lies in memory",
        "runtime/calls/operands.py",
        "        or vector.is_neg()\n",
        "",
        (f"{_FOREIGN}::test_each_operand_of_a_forward_function",),
    ),
    Mutant(
        "negated-operands-are-not-resolved",
        "a view with the negative bit is read as it lies in memory",
        "runtime/calls/operands.py",
        "return tensor.resolve_neg()",
        "return tensor",
        (f"{_FOREIGN}::test_each_operand_of_a_forward_function",),
    ),
    Mutant(
        "negated-outputs-are-written",
        "what is written to a view with the negative bit reads as its negative",
        "runtime/calls/arguments.py",
        "    if addressed and output.is_neg():\n",
        "    if False:\n",
        (f"{_FOREIGN}::test_an_output_that_negates_its_memory_is_refused",),
    ),
    Mutant(
        "wrappers-are-let-through",
        "an operand of a wrapper class, a DTensor say, is launched with the address of nothing",
        "runtime/calls/operands.py",
        "        if sees_operators(tensor):\n",
        "        if False:\n",
        (f"{_FOREIGN}::test_each_operand_of_a_forward_function",),
    ),
)
