"""What a call is known again by, and what is looked at in each call because no key can hold it."""

from __future__ import annotations

from ..mutant import Mutant

_KNOWN = "tests/calls/test_known_calls.py"
_FOREIGN = "tests/calls/test_foreign.py"
_KINDS = "tests/calls/test_kinds_of_call.py"
_OPERANDS = f"{_KINDS}::test_another_kind_of_operand_is_another_kind_of_call"
_GRADIENTS = f"{_KINDS}::test_another_kind_of_operand_is_another_kind_of_backward_call"
_OTHERS = f"{_KINDS}::test_other_gradients_are_another_kind_of_backward_call"
_CALLS = "templates/calls.py.j2"
_KNOWN_CALLS = "runtime/calls/known.py"
_FIRST = "runtime/calls/first.py"
_OVERLAP = "runtime/calls/overlap.py"

MUTANTS = (
    Mutant(
        "guards-are-not-asked",
        "tensors of another dtype or layout are read as those of an earlier call",
        _CALLS,
        "                if kind.fits(*kind.present(tensors)):\n",
        "                if kind.present(tensors):\n",
        (f"{_OPERANDS}[layer-plain-bf16]", f"{_GRADIENTS}[rms-bf16]"),
    ),
    Mutant(
        "key-forgets-what-is-there",
        "an operand that an earlier call lacked is ignored",
        _CALLS,
        '{{ p.name ~ " is None, " if p.is_optional }}',
        "",
        (f"{_KINDS}::test_another_mode_is_another_kind_of_call", f"{_GRADIENTS}[rms-absent]"),
    ),
    Mutant(
        "key-forgets-the-class-of-a-mode",
        "fadd=True is taken for 1 once a call with 1 was known",
        _CALLS,
        '{{ p.name ~ ".__class__, " if has_class(p) }}',
        "",
        (f"{_KNOWN}::test_equal_is_not_the_same",),
    ),
    Mutant(
        "key-forgets-modes",
        "an earlier call's modes and dtypes serve, and its gradients are computed",
        _CALLS,
        "{{ p.name }}, {{ p.name ~",
        "{{ p.name ~",
        (f"{_KINDS}::test_another_mode_is_another_kind_of_call", _OTHERS),
    ),
    Mutant(
        "key-forgets-the-shape-of-rows-with-gaps",
        "rows of three dimensions with gaps are read as rows without",
        _CALLS,
        "                    key = (*key, shape[1:])\n",
        "                    key = (*key,)\n",
        (f"{_KNOWN}::test_other_strides_are_another_kind_of_call",),
    ),
    Mutant(
        "one-row-has-a-stride",
        "several rows with gaps are read as if they had none, after one row",
        _KNOWN_CALLS,
        "    if free == 1 and shape[0] > 1:\n",
        "    if free == 1:\n",
        (f"{_KNOWN}::test_other_strides_are_another_kind_of_call",),
    ),
    Mutant(
        "alignment-is-not-asked",
        "what is at no multiple of 16 bytes is read by a kernel compiled for what is",
        _KNOWN_CALLS,
        "else self._misaligned.get(_alignment(addresses))",
        "else self.plan",
        (f"{_OPERANDS}[layer-fused-misaligned]", f"{_GRADIENTS}[rms-misaligned]"),
    ),
    Mutant(
        "no-memory-is-an-address",
        "a kernel is launched on address 0 in a call that is known",
        _CALLS,
        ".data_ptr() or NOWHERE",
        ".data_ptr()",
        (f"{_FOREIGN}::test_a_tensor_whose_storage_was_freed_is_refused",),
    ),
    Mutant(
        "known-eps-may-be-anything",
        "an eps of any kind is taken in a call that is known",
        _CALLS,
        "{{ p.name }}.__class__ is float\n",
        "",
        (f"{_KNOWN}::test_equal_is_not_the_same",),
        which=0,
    ),
    Mutant(
        "known-eps-may-be-negative",
        "an eps of any size is taken in a call that is known",
        _CALLS,
        '{{ "0.0" if p.least == 0 else "-LARGEST_FP32" }} <= {{ p.name }} <= LARGEST_FP32',
        "{{ p.name }} <= LARGEST_FP32",
        (f"{_KNOWN}::test_a_bad_call_is_refused_alike_cold_and_warm",),
    ),
    Mutant(
        "known-gradients-are-dropped",
        "a gradient is lost in silence in a call that is known",
        _CALLS,
        "not (known.trains and is_grad_enabled())\n",
        "",
        (
            f"{_KNOWN}::test_a_gradient_of_a_quantised_output_is_refused_after_a_call_without",
            "tests/calls/test_refusals.py::test_forward_functions_do_not_detach_in_silence",
        ),
    ),
    Mutant(
        "known-rows-of-another-shape",
        "a residual of fewer rows is read beyond its end",
        _CALLS,
        "{{ p.name }}.shape == shape{{",
        "{{ p.name }}.shape is not None{{",
        (f"{_KNOWN}::test_a_bad_call_is_refused_alike_cold_and_warm",),
    ),
    Mutant(
        "known-writes-to-out-are-not-counted",
        "what autograd kept of out is changed unseen by a call that is known",
        _CALLS,
        "                    increment_version(out)\n",
        "",
        (f"{_KNOWN}::test_a_known_call_counts_what_it_writes_to",),
    ),
    Mutant(
        "known-writes-to-residual-out-are-not-counted",
        "what autograd kept of residual_out is changed unseen by a call that is known",
        _CALLS,
        "                        increment_version(residual_out)\n",
        "",
        (f"{_KNOWN}::test_a_known_call_counts_what_it_writes_to",),
    ),
    Mutant(
        "guards-forget-negation",
        "where TorchDynamo has no guards, a view that negates its memory is read as it lies there",
        "runtime/upstream/tensor_guards.py",
        "tensor.requires_grad, tensor.is_neg(), tensor",
        "tensor.requires_grad, tensor",
        ("tests/calls/test_tensor_guards.py",),
    ),
    Mutant(
        "subclasses-are-known",
        "a subclass of Tensor is launched without being looked at",
        _FIRST,
        "    return all(tensor.__class__ in PLAIN for tensor in tensors) and not",
        "    return not",
        (f"{_KNOWN}::test_a_subclass_is_served_and_not_remembered",),
    ),
    Mutant(
        "negated-tensors-are-known",
        "rows that cannot be walked are read as rows without gaps, after a copy of some that were negated",
        _FIRST,
        " and not any(tensor.is_neg() for tensor in tensors)\n",
        "\n",
        (f"{_FOREIGN}::test_a_copy_of_what_is_negated_makes_nothing_known",),
    ),
    Mutant(
        "negated-operands-are-not-resolved",
        "a view with the negative bit is read as it lies in memory",
        _FIRST,
        "return tensor.resolve_neg() if",
        "return tensor if",
        (f"{_FOREIGN}::test_each_operand_of_a_forward_function",),
    ),
    Mutant(
        "wrappers-are-let-through",
        "an operand of a wrapper class, a DTensor say, is launched with the address of nothing",
        _FIRST,
        "    return any(row.kind.is_tensor and sees_operators(given.get(row.name)) for row in family.parameters)\n",
        "    return False\n",
        (f"{_FOREIGN}::test_each_operand_of_a_forward_function",),
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
        ("tests/calls/test_tensor_guards.py::test_an_output_over_a_vector_is_refused_by_whichever_guards",),
    ),
    Mutant(
        "overlap-of-rows-that-touch-in-a-byte",
        "out whose rows share their first byte with the end of x's is taken",
        _OVERLAP,
        "if distance >= _span(a, a_width) or -distance >= _span(b, b_width):",
        "if distance >= _span(a, a_width) - 1 or -distance >= _span(b, b_width):",
        ("tests/calls/test_overlap.py::test_agrees_with_counting_elements",),
    ),
    Mutant(
        "overlap-of-another-row-stride",
        "out that starts where x does and has other rows is taken for x",
        _OVERLAP,
        " and a.dtype == b.dtype and all(size < 2 or s == t for size, s, t in strides)",
        " and a.dtype == b.dtype",
        ("tests/calls/test_overlap.py::test_out_that_overlaps_an_input_elsewhere_than_exactly",),
    ),
    Mutant(
        "rows-that-do-not-collapse-are-walked",
        "leading dimensions without one common stride are read at the last one's",
        "runtime/calls/row_layout.py",
        "        if found and found[-1][1] == size * stride:\n",
        "        if found:\n",
        ("tests/calls/test_bad_arguments.py::test_refused",),
    ),
    Mutant(
        "a-residual-is-ignored",
        "residual without fadd is ignored in silence",
        "runtime/calls/check.py",
        "        error = absent if _asks(mode, wanted) else unused\n",
        '        error = absent if _asks(mode, wanted) else ""\n',
        ("tests/calls/test_bad_arguments.py::test_refused",),
    ),
    Mutant(
        "negated-outputs-are-written",
        "what is written to a view with the negative bit reads as its negative",
        "runtime/calls/argument_checks.py",
        "    if addressed and output.is_neg():\n",
        "    if False:\n",
        (f"{_FOREIGN}::test_an_output_that_negates_its_memory_is_refused",),
    ),
)
