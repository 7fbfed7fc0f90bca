"""Dropout before the add: bits, where elements are, what is scaled and summed, and what the mask follows from."""

from __future__ import annotations

from ..mutant import Mutant

_BITS = "tests/calls/test_dropout.py::test_kernels_drop_what_the_formula_says"
_ROWS = "tests/calls/test_dropout.py::test_kernels_count_rows_beyond_32_bits"
_FUSED = "tests/calls/test_dropout.py::test_dropout_goes_with_what_else_is_fused"
_ZERO = "tests/calls/test_dropout.py::test_a_p_of_zero_is_the_call_without"
_DRAWN = "tests/calls/test_dropout.py::test_what_is_drawn_goes_on_and_comes_back_with_its_state"
_GRADIENTS = "tests/nn/test_dropout.py::test_gradients_are_those_of_torchs_operators"
_ONE = "tests/nn/test_dropout.py::test_one_of_the_two_gradients_may_be_all_there_is"

MUTANTS = (
    Mutant(
        "kept-values-are-not-scaled",
        "what is kept is not divided by 1 - p",
        "templates/primitives.py.j2",
        "return tl.where(bits >= least, scaled(values, kept), 0.0)",
        "return tl.where(bits >= least, values, 0.0)",
        (_BITS,),
    ),
    Mutant(
        "neighbours-are-dropped-together",
        "the second of two neighbours has the first's bits as they are",
        "templates/primitives.py.j2",
        "bits = tl.reshape(tl.join(bits, with_halves_swapped(bits)), SHAPE)",
        "bits = tl.reshape(tl.join(bits, bits), SHAPE)",
        (_BITS,),
    ),
    Mutant(
        "short-chunks-start-anew",
        "chunks of fewer than eight take the first words wherever they start",
        "templates/primitives.py.j2",
        "within = (start + tl.arange(0, BLOCK)) % EIGHT",
        "within = tl.arange(0, BLOCK) % EIGHT",
        (_BITS,),
    ),
    Mutant(
        "rows-of-32-bits",
        "the upper half of an element's number is forgotten",
        "templates/primitives.py.j2",
        "high = (counter >> 32).to(tl.uint32)",
        "high = tl.zeros_like(low)",
        (_ROWS,),
    ),
    Mutant(
        "offsets-of-32-bits",
        "the upper half of the offset is forgotten",
        "templates/primitives.py.j2",
        "offset_high = tl.zeros_like(low) + (offset >> 32).to(tl.uint32)",
        "offset_high = tl.zeros_like(low)",
        (_BITS,),
    ),
    Mutant(
        "a-row-backwards-has-another-mask",
        "two_pass: the last sweep draws the mask of other columns",
        "templates/kernel.j2",
        '"LAST - back", "evict_first"',
        '"back", "evict_first"',
        (_BITS,),
    ),
    Mutant(
        "what-was-dropped-has-the-sums-gradient",
        "backward: the mask is not drawn again",
        "templates/gradients.j2",
        "ddropped = drop(dx, dropout, {{ at.row }}, {{ at.start }}, N)",
        "ddropped = dx",
        (_GRADIENTS,),
    ),
    Mutant(
        "x-bias-was-never-dropped",
        "backward: x_bias has the sum's gradient",
        "codegen/signature.py",
        '"ddropped" if mode.dropout else "dx"',
        '"dx"',
        (_GRADIENTS,),
    ),
    Mutant(
        "dropped-behind-the-add",
        "the residual is dropped too",
        "codegen/stages.py",
        '    DROPOUT = "dropout"  # some elements dropped, the others scaled\n    RESIDUAL = "residual"',
        '    RESIDUAL = "residual"\n    DROPOUT = "dropout"',
        (_FUSED,),
    ),
    Mutant(
        "a-p-of-zero-drops",
        "a call that drops nothing is one with dropout if a seed was passed",
        "runtime/calls/randomness.py",
        "return (dropout_p, state) if dropout_p else (0.0, None)",
        "return dropout_p, state",
        (_ZERO,),
    ),
    Mutant(
        "the-default-generator-draws",
        "a generator that was passed is left alone",
        "runtime/calls/randomness.py",
        '{} if generator is None else {"generator": generator}',
        "{}",
        (_DRAWN,),
    ),
    Mutant(
        "a-gradient-of-the-sum-alone-is-not-dropped",
        "where no gradient arrives for y, x has the sum's",
        "runtime/families/dropout.py",
        "ddropped = dropped(eager.widened(dresidual_out), p, rng)",
        "ddropped = eager.widened(dresidual_out)",
        (_ONE,),
    ),
    Mutant(
        "dropout-asks-for-no-residual",
        "after a dropout call, a call that is refused draws random numbers",
        "runtime/families/dropout.py",
        "    _, _, found = native.calls.dropped.find(operands, told)\n",
        "    _, rng = settled(p, rng, x)\n    _, _, found = native.calls.dropped.find(operands, told)\n",
        ("tests/nn/test_dropout.py::test_a_residual_of_another_shape_is_refused_alike_after_a_call",),
    ),
)
