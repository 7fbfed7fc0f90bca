"""Quantised outputs: scales, saturation, rounding, the fp8 encoders."""

from __future__ import annotations

from ..mutant import Mutant

_QUANTISATION = "tests/runtime/test_quantisation.py"
_ENCODERS = "tests/runtime/test_encoders.py"
_PRIMITIVES = "templates/primitives.py.j2"
_QUANTISED = "templates/quantised.j2"

MUTANTS = (
    Mutant(
        "amax-of-the-last-chunk",
        "one_pass: a row's scale comes from its last chunk",
        _QUANTISED,
        "amax_bits = tl.maximum(amax_bits, magnitude_bits(y, mask))",
        "amax_bits = magnitude_bits(y, mask)",
        (f"{_QUANTISATION}::test_dequantised_rows_come_back[one_pass-torch.int8]",),
    ),
    Mutant(
        "smooth-scale-not-applied-to-chunks",
        "one_pass: smooth_scale is ignored",
        _QUANTISED,
        "{{ kernel.smooth_chunk(m) }}\n",
        "",
        (f"{_QUANTISATION}::test_smooth_scale_is_applied_after_the_bias[one_pass]",),
    ),
    Mutant(
        "smooth-scale-not-applied-the-second-time",
        "two_pass: values are scaled by smooth_scale for their amax and not for themselves",
        _QUANTISED,
        "{{ kernel.smooth(m, mask) }}\n",
        "",
        (f"{_QUANTISATION}::test_smooth_scale_is_applied_after_the_bias[two_pass]",),
        which=1,
    ),
    Mutant(
        "smooth-scale-divides",
        "rows: smooth_scale divides",
        "templates/kernel.j2",
        "y *= load_chunk(smooth_scale_ptr, cols, {{ mask }})",
        "y /= load_chunk(smooth_scale_ptr, cols, {{ mask }})",
        ("tests/kernels/test_rows.py::test_rms_norm_quantised",),
    ),
    Mutant(
        "scale-not-stored-for-each-row",
        "y_scale of every row goes to the first",
        "templates/kernel.j2",
        "tl.store(y_scale_ptr + {{ row }}, y_scale{{ guard }})",
        "tl.store(y_scale_ptr + {{ row }} * 0, y_scale{{ guard }})",
        (f"{_QUANTISATION}::test_dequantised_rows_come_back[one_pass-torch.int8]",),
    ),
    Mutant(
        "amax-drops-nan",
        "a row with a NaN gets a finite scale",
        _PRIMITIVES,
        "bits = z.to(tl.int32, bitcast=True) & 0x7FFFFFFF\n",
        "bits = tl.where(z == z, z, 0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF\n",
        ("tests/runtime/test_precision.py::test_a_bad_value_in_the_last_column_is_seen[one_pass]",),
    ),
    Mutant(
        "amax-counts-what-is-beyond-the-row",
        "lanes beyond N take part in the amax",
        _PRIMITIVES,
        "bits = tl.where(mask, bits, 0)",
        "bits = tl.where(mask, bits, bits)",
        (f"{_QUANTISATION}::test_what_lies_beyond_the_row_has_no_part_in_its_amax",),
    ),
    Mutant(
        "scale-of-zeros-is-zero",
        "a row of zeros gets the scale 0",
        _PRIMITIVES,
        "return tl.where(y_scale < 2.0**-126, 1.0, y_scale)",
        "return y_scale",
        (f"{_QUANTISATION}::test_rows_that_a_weight_makes_zero",),
    ),
    Mutant(
        "values-divided-by-an-unrounded-scale",
        "y is divided by the scale before it is rounded to be stored",
        _PRIMITIVES,
        "y_scale = round_to(y_scale, dtype).to(tl.float32)",
        "y_scale = y_scale.to(tl.float32)",
        (f"{_QUANTISATION}::test_values_are_divided_by_the_scale_as_stored",),
    ),
    Mutant(
        "int8-does-not-saturate",
        "int8 wraps above 127",
        _PRIMITIVES,
        "q = tl.minimum(tl.maximum(q, -127.0), 127.0)\n    return ((q",
        "return ((q",
        (f"{_QUANTISATION}::test_int8_saturates_and_never_wraps[rows]",),
    ),
    Mutant(
        "int8-reaches-minus-128",
        "int8 saturates at -128, which has no positive counterpart",
        _PRIMITIVES,
        "q = tl.minimum(tl.maximum(q, -127.0), 127.0)\n    return ((q",
        "q = tl.minimum(tl.maximum(q, -128.0), 127.0)\n    return ((q",
        (f"{_QUANTISATION}::test_int8_saturates_and_never_wraps[rows]",),
    ),
    Mutant(
        "truncation-rounds",
        "rounding='truncate' rounds to nearest",
        _PRIMITIVES,
        "return tl.minimum(tl.maximum(q, -127.0), 127.0).to(dtype)",
        "return to_int8(q, dtype)",
        (f"{_QUANTISATION}::test_int8_truncates_toward_zero",),
    ),
    Mutant(
        "nearest-truncates",
        "rounding='nearest' truncates",
        _PRIMITIVES,
        "return ((q + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(dtype)",
        "return q.to(dtype)",
        (f"{_QUANTISATION}::test_int8_ties_go_to_even",),
    ),
    Mutant(
        "fp8-does-not-saturate",
        "float8_e4m3fn: what is too large becomes NaN or wraps",
        _PRIMITIVES,
        "    q = tl.minimum(tl.maximum(q, -448.0), 448.0)\n",
        "    q = q * 1.0\n",
        (
            f"{_ENCODERS}::test_anything_larger_saturates",
            f"{_QUANTISATION}::test_fp8_saturates[torch.float8_e4m3fn-rows]",
        ),
    ),
    Mutant(
        "fp8-ties-go-away-from-zero",
        "fp8: halves between two codes are rounded up",
        _PRIMITIVES,
        "half: tl.constexpr = (1 << (dropped - 1)) - 1",
        "half: tl.constexpr = 1 << (dropped - 1)",
        (f"{_QUANTISATION}::test_fp8_ties_go_to_even",),
    ),
    Mutant(
        "fp8-loses-its-sign",
        "fp8: negative values come out positive",
        _PRIMITIVES,
        "return (code | ((bits >> 24) & 0x80)).to(tl.uint8)",
        "return code.to(tl.uint8)",
        (f"{_QUANTISATION}::test_fp8_ties_go_to_even",),
    ),
    Mutant(
        "e4m3fnuz-negative-zero",
        "float8_e4m3fnuz: a small negative value becomes NaN",
        _PRIMITIVES,
        "return tl.where(code == 0x80, 0, code).to(dtype)",
        "return code.to(dtype)",
        (f"{_ENCODERS}::test_smallest_fp32_values_become_zero", f"{_ENCODERS}::test_every_fp16_value"),
    ),
    Mutant(
        "qmax-of-e5m2-is-too-small",
        "float8_e5m2 leaves half of its range unused",
        "codegen/model.py",
        "DType.FP8_E5M2: 57344.0",
        "DType.FP8_E5M2: 28672.0",
        (f"{_QUANTISATION}::test_fp8_saturates[torch.float8_e5m2-rows]",),
    ),
    Mutant(
        "fp8-encoded-in-software-for-hardware",
        "sm_90 does not use its fp8 instruction",
        "runtime/plan.py",
        "return not (dtype in _HARDWARE_FP8 and target.converts_to_fp8)",
        "return True",
        ("tests/runtime/test_warmup.py::test_an_architecture_decides_tiles_types_and_options",),
    ),
)
