"""The differentiable functions, the modules made of them, and patch."""

from __future__ import annotations

from ..mutant import Mutant

_FUNCTIONAL = "tests/training/test_functional.py"
_PATCHING = "tests/training/test_patching.py"
_AUTOGRAD = "runtime/autograd.py"

MUTANTS = (
    Mutant(
        "saved-tensors-skip-the-version",
        "a change of x between forward and backward goes unnoticed, and gradients are of another x",
        _AUTOGRAD,
        "        ctx.save_for_backward(x, weight, statistics)\n",
        "        ctx.kept = (x, weight, statistics)\n        ctx.save_for_backward()\n",
        (f"{_FUNCTIONAL}::test_changing_x_before_the_backward_pass_is_noticed",),
    ),
    Mutant(
        "needs-input-grad-ignored",
        "gradients that nobody asked for are computed",
        _AUTOGRAD,
        "told = (norm, None, bias_dtype, _WANTS[ctx.needs_input_grad[1:]])",
        'told = (norm, None, bias_dtype, ("dx", "dweight"))',
        (f"{_FUNCTIONAL}::test_only_what_requires_a_gradient_gets_one",),
    ),
    Mutant(
        "double-backward-is-zero",
        "a gradient of a gradient is zero in silence",
        _AUTOGRAD,
        "        refuse_double_backward(ctx, *gradients)\n",
        "        return (None,) * 6\n",
        (f"{_FUNCTIONAL}::test_a_double_backward_is_refused",),
    ),
    Mutant(
        "dx-in-the-wider-type",
        "dx comes in the type of the residual",
        _AUTOGRAD,
        "_rounded(dx, x_dtype) if for_x else None",
        "dx if for_x else None",
        (f"{_FUNCTIONAL}::test_each_gradient_is_rounded_once",),
    ),
    Mutant(
        "residual-gets-no-gradient",
        "the gradient of the residual is dropped",
        _AUTOGRAD,
        "_rounded(dx, residual_dtype) if for_residual else None",
        "None",
        (f"{_FUNCTIONAL}::test_gradients_through_either_output_or_both",),
    ),
    Mutant(
        "gradient-of-the-sum-is-dropped",
        "what arrives through residual_out is not added to dx",
        _AUTOGRAD,
        "dx, dweight, dbias = compute(told, dy, dresidual_out, *ctx.saved_tensors)",
        "dx, dweight, dbias = compute(told, dy, None, *ctx.saved_tensors)",
        (f"{_FUNCTIONAL}::test_gradients_through_either_output_or_both",),
    ),
    Mutant(
        "gradient-of-the-sum-alone-is-dropped",
        "where y is not used, x and residual get no gradient",
        _AUTOGRAD,
        "dx, dweight, dbias = dresidual_out, None, None",
        "dx, dweight, dbias = None, None, None",
        (f"{_FUNCTIONAL}::test_gradients_through_either_output_or_both",),
    ),
    Mutant(
        "gradient-of-any-strides-is-not-copied",
        "dy that kernels cannot walk is an error within backward",
        _AUTOGRAD,
        "dy = walkable(dy)",
        "dy = dy",
        (f"{_FUNCTIONAL}::test_any_strides", f"{_FUNCTIONAL}::test_a_sum"),
    ),
    Mutant(
        "gradients-off-record-all-the-same",
        "statistics are computed and x is kept where no gradient is due",
        _AUTOGRAD,
        "if not (torch.is_grad_enabled() and _any_requires_gradient(*rows)):",
        "if False:",
        ("tests/training/test_memory.py",),
    ),
    Mutant(
        "frozen-weight-loses-the-residuals-gradient",
        "where only the residual requires a gradient none is recorded",
        _AUTOGRAD,
        "\n        or (residual is not None and residual.requires_grad)",
        "",
        (f"{_FUNCTIONAL}::test_only_what_requires_a_gradient_gets_one",),
    ),
    Mutant(
        "several-dimensions-are-not-unflattened",
        "y of two normalised dimensions has another shape than x",
        _AUTOGRAD,
        "return rows if len(shape) == 1 else rows.view(*rows.shape[:-1], *shape)",
        "return rows",
        (f"{_FUNCTIONAL}::test_several_normalised_dimensions",),
    ),
    Mutant(
        "any-iterable-is-a-shape",
        "a set or a dictionary is taken for normalized_shape in a call that is known",
        _AUTOGRAD,
        "if normalized_shape.__class__ not in _SHAPES or len(normalized_shape) != 1",
        "if len(normalized_shape) != 1",
        (f"{_FUNCTIONAL}::test_what_only_resembles_a_shape_is_refused_again",),
    ),
    Mutant(
        "eps-of-rms-norm-is-layer-norms",
        "rms_norm without eps adds 1e-5",
        "runtime/functional.py",
        '"rms", x, normalized_shape, weight, None, None, DEFAULT_EPS if eps is None else eps',
        '"rms", x, normalized_shape, weight, None, None, 1e-5 if eps is None else eps',
        (f"{_FUNCTIONAL}::test_torchs_own_call_and_defaults",),
    ),
    Mutant(
        "weight-is-cast-before-it-multiplies",
        "T5's norm rounds behind the weight instead of before it",
        "runtime/patching.py",
        '"cast_before_weight": cast_before_weight and order is not CastOrder.AFTER_WEIGHT,',
        '"cast_before_weight": False,',
        (f"{_PATCHING}::test_hugging_face_classes_keep_their_results",),
    ),
    Mutant(
        "a-forward-of-ones-own-is-swapped",
        "a subclass of torch's norm with another formula is swapped",
        "runtime/patching.py",
        "    if isinstance(module, tuple(_TORCH)):\n        return f",
        "    if False:\n        return f",
        (f"{_PATCHING}::test_what_is_not_known_is_left_alone_and_reported",),
    ),
    Mutant(
        "unpatch-leaves-attributes",
        "a module keeps what patch gave it",
        "runtime/patching.py",
        "                vars(module).pop(name, None)\n",
        "                pass\n",
        (f"{_PATCHING}",),
    ),
    Mutant(
        "what-is-saved-grows",
        "x is kept for the backward pass beside the sum",
        _AUTOGRAD,
        "ctx.save_for_backward(total, weight, statistics)",
        "ctx.save_for_backward(total, weight, statistics)\n        ctx.also = x",
        ("tests/training/test_memory.py",),
    ),
)
