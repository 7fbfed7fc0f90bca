"""The backward kernels, and the plan that launches them."""

from __future__ import annotations

from ..mutant import Mutant, Suite

_INSTANCES = "tests/kernels/test_instances.py"
_ONE_PASS = "tests/kernels/test_backward_one_pass.py"
_SPREAD = "tests/kernels/test_spread.py"
_CAST = "tests/kernels/test_cast.py"
_KINDS = "tests/calls/test_kinds_of_call.py"
_KNOWN = "tests/calls/test_known_calls.py"
_PLAN = "runtime/calls/plan.py"

MUTANTS = (
    Mutant(
        "layer-norm-dx-forgets-the-mean",
        "LayerNorm: dx lacks mean(g)",
        "templates/layer.j2",
        "(g - h * gh_mean - g_mean) * rstd",
        "(g - h * gh_mean) * rstd",
        (
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-cpu]",
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-rest-cpu]",
        ),
    ),
    Mutant(
        "rms-norm-dx-has-the-wrong-sign",
        "RMSNorm: the projection is added to dx",
        "templates/rms.j2",
        "(g - h * gh_mean) * rstd",
        "(g + h * gh_mean) * rstd",
        (
            f"{_INSTANCES}::test_gradient_instance[rms_bwd_fp32_n256-cpu]",
            f"{_INSTANCES}::test_gradient_instance[rms_bwd_fp32_n256-rest-cpu]",
        ),
    ),
    Mutant(
        "rows-backward-keeps-its-first-tile",
        "backward rows: the first tile is taken again and again",
        "templates/bwd_rows.py.j2",
        "{{ backward.shift_tile(m) }}\n",
        "",
        (
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-cpu]",
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-rest-cpu]",
        ),
    ),
    Mutant(
        "rows-backward-skips-tiles",
        "backward rows: the tile that is on its way is not the next one",
        "templates/bwd_rows.py.j2",
        '"(tile + programs)"',
        '"(tile + 2 * programs)"',
        (
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-cpu]",
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-rest-cpu]",
        ),
    ),
    Mutant(
        "one-pass-backward-takes-the-wrong-row-next",
        "backward one_pass: a program takes its neighbour's rows",
        "templates/bwd_one_pass.py.j2",
        "next_row = tl.minimum(row + programs, M - 1)",
        "next_row = tl.minimum(row + 1, M - 1)",
        (f"{_ONE_PASS}::test_rows_in_turn",),
    ),
    Mutant(
        "one-pass-backward-adds-up-one-row",
        "backward one_pass: dweight and dbias come from the last row",
        "templates/backward.j2",
        "next_{{ name }} += ({{ name }}[start // BLOCK] + {{ term }},)",
        "next_{{ name }} += ({{ term }},)",
        (f"{_ONE_PASS}::test_rows_in_turn",),
    ),
    Mutant(
        "row-terms-ignore-the-weight",
        "backward two_pass: the means along a row lack the weight",
        "templates/bwd_row_terms.py.j2",
        '{{ norm.g("mask") }}',
        "g = dy",
        (
            f"{_INSTANCES}::test_gradient_instance[rms_bwd_fp32_nbig-cpu]",
            f"{_INSTANCES}::test_gradient_instance[rms_bwd_fp32_nbig-rest-cpu]",
        ),
    ),
    Mutant(
        "two-pass-backward-skips-tiles",
        "backward two_pass: programs leave tiles out",
        "templates/bwd_two_pass.py.j2",
        "for tile in range(program, tl.cdiv(M, ROWS), tl.num_programs(1)):",
        "for tile in range(program, M // ROWS, tl.num_programs(1)):",
        (
            f"{_INSTANCES}::test_gradient_instance[rms_bwd_fp32_nbig-cpu]",
            f"{_INSTANCES}::test_gradient_instance[rms_bwd_fp32_nbig-rest-cpu]",
        ),
    ),
    Mutant(
        "spread-backward-takes-a-tile-twice",
        "backward spread: the tile after the next is the next",
        "templates/bwd_spread.py.j2",
        "later = tile + 2 * teams",
        "later = tile + teams",
        (f"{_SPREAD}::test_a_program_alone_takes_tiles_of_rows",),
    ),
    Mutant(
        "rows-beyond-the-last-count",
        "backward spread: a row that is not there is added to dx_bias",
        "templates/backward.j2",
        "dx = tl.where(row < M, dx, 0.0)",
        "dx = tl.where(row <= M, dx, 0.0)",
        (f"{_SPREAD}::test_a_program_alone_takes_tiles_of_rows",),
    ),
    Mutant(
        "dresidual-out-not-added-to-tiles",
        "backward rows and two_pass: dresidual_out is ignored",
        "templates/backward.j2",
        "dx += load_chunk(dresidual_out_ptr + row_offset({{ at }}, dresidual_out_row_stride, ROW_ALIGNMENT), "
        "cols, {{ mask }})",
        "dx += 0.0",
        (
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_bf16_addst_n256-cpu]",
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_bf16_addst_n256-rest-cpu]",
        ),
    ),
    Mutant(
        "dresidual-out-not-added-to-rows",
        "backward one_pass: dresidual_out is ignored",
        "templates/backward.j2",
        "dx += dresidual_row[start // BLOCK].to(tl.float32)",
        "dx += 0.0",
        (f"{_ONE_PASS}::test_rows_in_turn",),
    ),
    Mutant(
        "dresidual-out-not-added-by-teams",
        "backward spread: dresidual_out is ignored",
        "templates/backward.j2",
        "dx += widened(dresiduals[r], dresidual_out_ptr.dtype.element_ty)",
        "dx += 0.0",
        (f"{_SPREAD}::test_a_program_alone_takes_tiles_of_rows",),
    ),
    Mutant(
        "dbias-sums-the-wrong-term",
        "dbias is computed as dweight",
        "codegen/signature.py",
        'sums.append(("dbias", "dy"))',
        'sums.append(("dbias", "dy * h"))',
        (
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-cpu]",
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-rest-cpu]",
        ),
    ),
    Mutant(
        "last-program-left-out",
        "the last program's partial sums are dropped",
        "templates/finalise.py.j2",
        "mask = (first + rows < programs) & (cols < N)",
        "mask = (first + rows < programs - 1) & (cols < N)",
        (
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-cpu]",
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-rest-cpu]",
        ),
    ),
    Mutant(
        "dbias-takes-dweights-sums",
        "dbias is made of dweight's partial sums",
        "templates/finalise.py.j2",
        "add_up(dbias_partials_ptr, dbias_ptr, programs, N, ROWS, BLOCK)",
        "add_up(dweight_partials_ptr, dbias_ptr, programs, N, ROWS, BLOCK)",
        (
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-cpu]",
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-rest-cpu]",
        ),
    ),
    Mutant(
        "finalise-does-not-wait",
        "partial sums are read before they are written",
        "templates/finalise.py.j2",
        "    wait_for_launch_ahead(PDL)\n",
        "",
        ("tests/kernels/test_launch_ahead.py::test_partial_sums_are_not_read_before_they_are_there",),
        Suite.COMPILE,
    ),
    Mutant(
        "kernels-do-not-wait",
        "a kernel reads x before the launch ahead has written it",
        "templates/kernel.j2",
        "    wait_for_launch_ahead(PDL)\n",
        "    pass\n",
        (
            "tests/kernels/test_launch_ahead.py::test_nothing_is_read_or_written_before_the_launch_ahead_has_ended"
            "[ln_fwd_bf16_mv_rows]",
        ),
        Suite.COMPILE,
    ),
    Mutant(
        "partial-sums-overlap",
        "dbias's partial sums start within dweight's",
        _PLAN,
        "section, term = aligned_length(programs * self.n), aligned_length(m)",
        "section, term = aligned_length((programs - 1) * self.n), aligned_length(m)",
        (
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-cpu]",
            f"{_INSTANCES}::test_gradient_instance[ln_bwd_fp32_n256-rest-cpu]",
        ),
    ),
    Mutant(
        "dx-in-the-type-of-x-always",
        "dx_dtype is ignored",
        "runtime/calls/check.py",
        "told: torch.dtype | None = self.given[result.told] if result.told else None",
        "told: torch.dtype | None = None",
        ("tests/nn/test_functional.py::test_each_gradient_is_rounded_once",),
    ),
    Mutant(
        "dbias-in-the-type-of-x",
        "dbias's dtype is x's",
        "runtime/calls/check.py",
        "for operand in result.like if self.given[operand] is not None]",
        "for operand in reversed(result.like) if self.given[operand] is not None]",
        (f"{_KNOWN}::test_gradients_have_the_dtypes_that_they_are_said_to_have",),
    ),
    Mutant(
        "dresidual-out-takes-the-row-stride-of-x",
        "dresidual_out's row stride is dropped",
        _PLAN,
        "strides[slot] = absent if tensor is None else",
        'strides[slot] = absent if tensor is None or name == "dresidual_out" else',
        (f"{_KINDS}::test_another_kind_of_operand_is_another_kind_of_backward_call[layer-gaps]",),
    ),
    Mutant(
        "no-gradients-of-no-rows",
        "dweight of no rows is whatever was in memory",
        "runtime/calls/launch.py",
        "results_of(call, partial(torch.zeros, device=call.x.device))",
        "results_of(call, partial(torch.ones, device=call.x.device))",
        (f"{_KNOWN}::test_a_backward_call_without_dy_or_rows",),
    ),
    Mutant(
        "missing-dy-is-ones",
        "dy=None counts as ones",
        "runtime/calls/first.py",
        "dy=torch.zeros(call.n, dtype=x.dtype, device=x.device).expand(x.shape)",
        "dy=torch.ones(call.n, dtype=x.dtype, device=x.device).expand(x.shape)",
        (f"{_KNOWN}::test_a_backward_call_without_dy_or_rows",),
    ),
    Mutant(
        "packed-statistics-are-not-aligned",
        "rstd of an odd number of rows starts at no multiple of 16 bytes, for which kernels are compiled",
        "runtime/calls/outputs.py",
        "return -(-length // _STEP) * _STEP",
        "return length",
        ("tests/calls/test_row_statistics.py",),
    ),
    Mutant(
        "packed-statistics-change-places",
        "mean is taken for rstd in a backward pass",
        "runtime/calls/outputs.py",
        "(packed[:m], packed[aligned_length(m) :])",
        "(packed[aligned_length(m) :], packed[:m])",
        ("tests/calls/test_row_statistics.py",),
    ),
    Mutant(
        "mean-without-its-check",
        "a mean of another shape is read as if it had one value a row",
        "runtime/calls/argument_checks.py",
        "    if statistic.shape != x.shape[:-1]:\n",
        "    if False:\n",
        (f"{_KNOWN}::test_a_bad_backward_call_is_refused_alike_cold_and_warm",),
    ),
    Mutant(
        "dweight-takes-the-row-unrounded",
        "cast: dweight is of rows that the weight was not multiplied with",
        "codegen/signature.py",
        "if mode.cast.comes_first else",
        "if False else",
        (f"{_CAST}::test_dweight_is_of_the_rounded_row_and_dx_of_the_row",),
    ),
)
