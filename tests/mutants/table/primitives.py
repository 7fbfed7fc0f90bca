"""The device functions that kernels are made of."""

from __future__ import annotations

from ..mutant import Mutant

_PRIMITIVES = "templates/primitives.py.j2"
_PRECISION = "tests/runtime/test_precision.py"
_SPREAD = "tests/kernels/test_spread.py"

MUTANTS = (
    Mutant(
        "variance-is-unbiased",
        "the variance is divided by N - 1",
        _PRIMITIVES,
        "shift, mean_square = row_means(deviations, squares, N, AXIS)",
        "shift, mean_square = row_means(deviations, squares, N - 1 if N > 1 else 1, AXIS)",
        ("tests/runtime/test_shapes.py::test_dimensions[layer-(96,)]",),
    ),
    Mutant(
        "variance-is-not-corrected",
        "the pivot's own rounding is left in the variance",
        _PRIMITIVES,
        "tl.maximum(mean_square - shift * shift, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        "tl.maximum(mean_square, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        (
            "tests/kernels/test_two_pass.py::test_moments_of_rows_that_cancel",
            f"{_SPREAD}::test_slices_merge_into_the_moments_of_their_row",
        ),
    ),
    Mutant(
        "lanes-beyond-the-row-are-centred",
        "lanes beyond N add the mean's square to the variance",
        _PRIMITIVES,
        "        centred = tl.where(mask, centred, 0.0)\n    return centred",
        "        centred = tl.where(mask, centred, centred)\n    return centred",
        (f"{_PRECISION}::test_ragged_rows_of_very_different_size",),
    ),
    Mutant(
        "bf16-is-truncated",
        "bf16 outputs are cut where they should be rounded",
        _PRIMITIVES,
        "nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000",
        "nearest = bits & -0x10000",
        ("tests/runtime/test_operands.py::test_outputs_are_rounded_once",),
    ),
    Mutant(
        "bias-of-short-rows-is-ignored",
        "rows and two_pass: bias is not added",
        _PRIMITIVES,
        "        h += load_chunk(bias_ptr, cols, mask)\n",
        "        h += 0.0\n",
        ("tests/kernels/test_rows.py::test_layer_norm_of_a_sum",),
    ),
    Mutant(
        "weights-loaded-early-lack-the-last",
        "one_pass, few rows: the last column's weight is 0",
        _PRIMITIVES,
        "chunks += (tl.load(row, mask=start + tl.arange(0, BLOCK) < N, other=0.0),)",
        "chunks += (tl.load(row, mask=start + tl.arange(0, BLOCK) < N - 1, other=0.0),)",
        ("tests/runtime/test_operands.py::test_every_operand_in_another_dtype[one_pass]",),
    ),
    Mutant(
        "weights-loaded-late-lack-the-last",
        "one_pass, many rows: the last column's weight is 0",
        _PRIMITIVES,
        "chunk = load_chunk(ptr, cols, cols < N if start + BLOCK > N else None)",
        "chunk = load_chunk(ptr, cols, cols < N - 1)",
        ("tests/kernels/test_instances.py::test_instance[ln_fwd_fp32_n4096-cpu]",),
    ),
    Mutant(
        "rms-chunks-forget-weight-offset",
        "one_pass: RMSNorm's weight_offset is dropped",
        _PRIMITIVES,
        "h *= operand_chunk(weight_ptr, weight_row, start, N, BLOCK) + weight_offset",
        "h *= operand_chunk(weight_ptr, weight_row, start, N, BLOCK)",
        (f"{_PRECISION}::test_weight_offset[1-one_pass]",),
    ),
    Mutant(
        "pairs-come-apart-the-wrong-way",
        "values of 16 bits read in pairs change places",
        _PRIMITIVES,
        "values = tl.reshape(tl.join(low, high), (2 * chunk.shape[0],))\n    else:\n        values = chunk",
        "values = tl.reshape(tl.join(high, low), (2 * chunk.shape[0],))\n    else:\n        values = chunk",
        (f"{_SPREAD}::test_a_program_alone_in_its_team",),
    ),
    Mutant(
        "slices-weigh-alike",
        "spread: a short last slice counts as much as a full one",
        _PRIMITIVES,
        "counts = tl.maximum(tl.minimum(N - peers * SLICE, SLICE), 0).to(tl.float32)",
        "counts = tl.where(N - peers * SLICE > 0, SLICE, 0).to(tl.float32)",
        (f"{_SPREAD}::test_slices_merge_into_the_moments_of_their_row",),
    ),
    Mutant(
        "slices-forget-their-distance",
        "spread: how far slices lie apart is left out of the variance",
        _PRIMITIVES,
        "counts * (variances + distances * distances)",
        "counts * variances",
        (f"{_SPREAD}::test_slices_merge_into_the_moments_of_their_row",),
    ),
    Mutant(
        "a-slice-counts-columns-that-are-not-there",
        "spread: the mean of a short slice is taken over a full one",
        _PRIMITIVES,
        "count = SLICE if whole else tl.minimum(N - first_col, SLICE).to(tl.float32)",
        "count = SLICE if whole else (SLICE + 0 * first_col).to(tl.float32)",
        (f"{_SPREAD}::test_moments_of_a_slice",),
    ),
    Mutant(
        "an-empty-slot-may-be-published",
        "spread: two NaNs of all ones make a team wait for ever",
        _PRIMITIVES,
        "tl.store(slots, tl.where(bits == -1, -2, bits), mask=mask)",
        "tl.store(slots, bits, mask=mask)",
        (f"{_SPREAD}::test_no_two_values_look_like_an_empty_slot",),
    ),
    Mutant(
        "gathered-values-change-places",
        "spread: means are taken for variances",
        _PRIMITIVES,
        "return first, (bits >> 32).to(tl.int32).to(tl.float32, bitcast=True)",
        "return (bits >> 32).to(tl.int32).to(tl.float32, bitcast=True), first",
        (f"{_SPREAD}::test_a_program_alone_in_its_team",),
    ),
    Mutant(
        "rows-of-a-tile-change-places",
        "backward spread: four rows' means come back in another order",
        _PRIMITIVES,
        "scalars = (a, b, c, d)",
        "scalars = (a, c, b, d)",
        (f"{_SPREAD}::test_a_program_alone_takes_tiles_of_rows",),
    ),
    Mutant(
        "pairs-of-weights-repeat",
        "window: of each pair of weights the first is applied twice",
        _PRIMITIVES,
        "high = load_beside(ptr, start - lead + 2 * tl.arange(0, BLOCK // 2) + 1, N)",
        "high = load_beside(ptr, start - lead + 2 * tl.arange(0, BLOCK // 2), N)",
        ("tests/kernels/test_window.py::test_rows_are_right_and_what_is_beside_them_stays",),
    ),
)
