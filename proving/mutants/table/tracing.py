"""Operators: what a traced graph holds of calls."""

from __future__ import annotations

from ..mutant import Mutant

_OPERATORS = "tests/operators/test_operators.py"
_TRANSFORMS = "tests/nn/test_transforms.py"
_AUTOGRAD = "runtime/families/plain.py"
_OPTIONS = "tests/nn/test_options.py"
_LEFT = "tests/compiled/test_models.py::test_what_a_model_wrote_out_is_left_as_it_wrote_it"

MUTANTS = (
    Mutant(
        "fake-outputs-of-another-type",
        "a graph takes every output for one of x's dtype",
        "runtime/operators/registered.py",
        "return _handed(function, into, results_of(call, call.x.new_empty))",
        "return _handed(function, into, results_of(call, lambda shape, dtype: call.x.new_empty(shape)))",
        (f"{_OPERATORS}::test_fake_tensors", f"{_OPERATORS}::test_torchs_checks_of_a_forward_operator"),
    ),
    Mutant(
        "operator-outputs-change-places",
        "a traced call returns mean as y_scale",
        "runtime/calls/traced.py",
        "LayerNormOutput(*operated_as(function, call, LayerNormOutput._fields))",
        "LayerNormOutput(*operated_as(function, call, LayerNormOutput._fields[::-1]))",
        (f"{_OPERATORS}::test_a_traced_call_returns_what_an_eager_one_does",),
    ),
    Mutant(
        "operator-forgets-weight-offset-backward",
        "a traced gradient of RMSNorm lacks weight_offset",
        "runtime/operators/gradients.py",
        "ctx.shared = {name: given[name] for name in shared}",
        'ctx.shared = {name: given[name] for name in shared if name != "weight_offset"}',
        (f"{_OPERATORS}::test_gradients_of_an_operator",),
    ),
    Mutant(
        "operator-adds-the-bias-of-a-stored-sum-again",
        "gradients of a traced fused add are of rows that x_bias was added to twice",
        "runtime/operators/gradients.py",
        """given["x_bias"] = given["x"].new_zeros(""",
        """given["x_bias"] = given["x"].new_ones(""",
        (f"{_OPTIONS}::test_a_traced_call_is_the_same",),
    ),
    Mutant(
        "operator-without-statistics-has-a-gradient",
        "a traced call that kept too little is differentiated",
        "runtime/operators/gradients.py",
        "        if ctx.refusal is not None:\n",
        "        if False:\n",
        (f"{_OPERATORS}::test_what_kept_too_little_has_no_gradient",),
    ),
    Mutant(
        "quantised-operator-has-a-gradient",
        "a traced quantised call drops gradients in silence",
        "runtime/operators/gradients.py",
        """if given["fquant"] != "none":""",
        "if False:",
        (f"{_OPERATORS}::test_a_quantised_operator_has_no_gradient",),
    ),
    Mutant(
        "operator-forgets-x-bias",
        "a traced call with x_bias and out ignores x_bias",
        "runtime/operators/computing.py",
        "            results = PUBLIC[function](**given)\n",
        '            results = PUBLIC[function](**{**given, "x_bias": None})\n',
        ("tests/operators/test_torch_compile.py::test_outputs_are_written_where_the_caller_says",),
    ),
    Mutant(
        "gradients-of-an-operator-are-what-it-was-given",
        "a backward operator returns the very tensor that it was given",
        "runtime/operators/computing.py",
        "if result.is_contiguous() and not any(result is each for each in given):",
        "if result.is_contiguous():",
        ("tests/operators/test_neighbours.py::test_a_backward_operator_returns_memory_of_its_own",),
    ),
    Mutant(
        "tangents-are-dropped",
        "forward-mode AD through a norm of frozen parameters loses the tangent",
        "runtime/upstream/torch_internals.py",
        "return forward_ad._current_level >= 0 and any(",
        "return False and any(",
        (f"{_TRANSFORMS}::test_forward_mode_keeps_the_tangent",),
    ),
    Mutant(
        "known-calls-drop-tangents",
        "forward-mode AD through a call that is known loses the tangent",
        "runtime/upstream/known.c",
        " || PyLong_AsLong(level) >= 0",
        "",
        (
            f"{_TRANSFORMS}::test_forward_mode_keeps_the_tangent",
            f"{_TRANSFORMS}::test_the_forward_functions_refuse_a_tangent",
            f"{_TRANSFORMS}::test_a_frozen_residual_block_in_forward_mode",
        ),
    ),
    Mutant(
        "operands-without-memory-are-launched",
        "an operand whose class keeps its values elsewhere is read at address 0",
        "runtime/calls/first.py",
        "    if not at and tensor.numel():\n",
        "    if False:\n",
        (f"{_TRANSFORMS}::test_the_forward_functions_refuse_a_transform",),
    ),
    Mutant(
        "batched-gradients-have-an-address",
        "several gradients at once are read as one",
        "runtime/calls/record.py",
        "gradient.__class__ in PLAIN and (gradient.data_ptr() != 0 or gradient.numel() == 0) for",
        "True for",
        (f"{_TRANSFORMS}::test_batched_gradients",),
    ),
    Mutant(
        "dynamo-enters-a-transform-unseen",
        "what TorchDynamo traces within a transform of torch.func meets kernels",
        "runtime/upstream/torch_internals.py",
        "return transforming() or (onnx is not None and bool(onnx.is_in_onnx_export()))",
        "return onnx is not None and bool(onnx.is_in_onnx_export())",
        ("tests/nn/test_transform_table.py::test_a_function",),
    ),
    Mutant(
        "jit-trace-meets-kernels",
        "torch.jit.trace records the memory of outputs and not what is written to it",
        "runtime/calls/backend.py",
        "left_in_traces() or jit_tracing() or has_tangent(tensors)",
        "left_in_traces() or has_tangent(tensors)",
        (f"{_TRANSFORMS}::test_jit_trace_of_a_patched_model",),
    ),
    Mutant(
        "a-recorded-backward-pass-is-launched",
        "make_fx records the memory of gradients and not what is written to it",
        _AUTOGRAD,
        "    if is_dynamo_compiling() or dispatch_modes():\n",
        "    if is_dynamo_compiling():\n",
        (f"{_TRANSFORMS}::test_a_backward_pass_is_recorded_of_a_call_that_was_not",),
    ),
    Mutant(
        "checkpoints-keep-other-tensors",
        "a checkpoint that is made again within a mode keeps other tensors",
        "runtime/calls/traced.py",
        "(intercepted(*tensors) and saved_tensors_hooks() is None)",
        "intercepted(*tensors)",
        (f"{_TRANSFORMS}::test_a_mode_around_a_part_of_a_checkpoint",),
    ),
    Mutant(
        "a-norm-left-to-inductor-is-torchs-operator",
        "a norm that a model wrote out becomes another in the graph",
        "runtime/patching/huggingface.py",
        "and self.__dict__[ORIGINAL].asked\n",
        "and False\n",
        (_LEFT,),
    ),
)
