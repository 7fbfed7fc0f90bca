"""The forward and backward functions as operators of torch's dispatcher, for traced graphs.

torch.compile, torch.export and make_fx record operators, and take the outputs' metadata from fake kernels. Eager calls
use no operator, because the dispatcher alone takes 6 us, and Inductor's code bypasses the dispatcher too (`kernels`).
An operator returns only the outputs that were asked for, in the order of `LayerNormOutput` or `NormGradients`. Schemas
have no defaults, so that kernels receive every argument.

If a caller passes tensors for outputs, another operator (`..._into`) writes y and the sum there: a copy after the
functional operator would move as many bytes again as the kernel. This operator returns y_scale, mean and rstd, as
tensors without elements if they were not asked for, because torch functionalises only writing operators that return a
fixed number of tensors.

Importing this module registers the operators in `torch.ops.normforge`. The code that computes results, other than
look-ups of plain norms, is imported when an operator is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..calls import native
from ..calls.check import check, refuse_gradient
from ..calls.functions import OPERATORS, Function
from ..calls.outputs import results_of
from ..calls.record import BackwardPass
from ..codegen.groups import GROUP
from ..codegen.parameters import GRADIENTS, GROUP_BWD
from ..codegen.values import Direction
from ..upstream.imports import when_imported
from ..upstream.torch_inductor import called_at_once
from ..upstream.torch_internals import eager_only
from . import gradients
from .kernels import NAMESPACE, Recording, at_once, both, of_plain_tensors, register_autograd

# The compiler keeps the strides of the trace. Fake kernels refuse rows that kernels cannot walk.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

Tensors = list[torch.Tensor]

# torch declares no types for Library.
_Library: Any = torch.library.Library
_library = _Library(NAMESPACE, "DEF")
# The kernels of operators, by name.
_kernels: dict[str, Callable[..., Any]] = {}
_recording: Any = Recording(_library, _kernels)
# The functions that Inductor's code calls in place of operators.
_at_once: dict[Any, Callable[..., Any]] = {}


def _in_order(name: str, count: int) -> Callable[..., Tensors]:
    """Return the kernel of a function's operator by the look-up: arguments in order to results.

    Outs are missing among its `count` arguments, and so are those that programs of an earlier version lack.
    """

    @eager_only
    def run(*arguments: Any) -> Tensors:
        results = getattr(native.calls, name)(*arguments, *(None,) * (count - len(arguments)))
        return [result for result in results if result is not None]

    return run


def _schema(takes: Function, into: bool) -> str:
    """Return the schema of a function's operator, or of its operator that writes to outs, without its name."""
    rows = {row.operator_argument: row.declaration for row in takes.family.parameters}
    declared = [rows[name] for name in takes.passed]
    if not into:
        return f"({', '.join(declared)}) -> Tensor[]"
    # A tensor for y is always passed; those for other results if they are asked for.
    for alias, (out, result) in zip("abcdefgh", takes.outs, strict=False):
        always = not next(row.wanted for row in takes.family.results if row.name == result)
        declared.append(f"Tensor({alias}!){'' if always else '?'} {out}")
    written = {result for _, result in takes.outs}
    returned = [f"Tensor {row.name}" for row in takes.family.results if row.name not in written]
    return f"({', '.join(declared)}) -> ({', '.join(returned)})"


def _named(function: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of an operator by name; outs come last."""
    takes = OPERATORS[function]
    return dict(zip((*takes.passed, *[out for out, _ in takes.outs]), arguments, strict=False))


def _handed(function: str, into: bool, results: Any) -> Tensors | tuple[torch.Tensor, ...]:
    """Return the tensors that an operator returns; a writing operator returns those not passed to it."""
    if not into:
        return [tensor for tensor in results if tensor is not None]
    takes = OPERATORS[function]
    written = {result for _, result in takes.outs}
    returned = [each for row, each in zip(takes.family.results, results, strict=True) if row.name not in written]
    return tuple([results[0].new_empty(0) if each is None else each for each in returned])


@eager_only
def _returned(function: str, into: bool, *arguments: Any) -> Tensors | tuple[torch.Tensor, ...]:
    from .computing import run

    return _handed(function, into, run(function, _named(function, arguments)))


@eager_only
def _fake(function: str, into: bool, *arguments: Any) -> Tensors | tuple[torch.Tensor, ...]:
    args = _named(function, arguments)
    if OPERATORS[function].family_name == GROUP:
        from .computing import fake_group

        return _handed(function, into, fake_group(args))
    call = check(function, args, addressed=False)
    if into:
        refuse_gradient(call)
    return _handed(function, into, results_of(call, call.x.new_empty))


def _register(name: str, takes: Function, into: bool = False) -> None:
    """Define a function's operator, or its operator that writes, for all devices; and the batch-invariant twin."""
    own = f"{name}_into" if into else name
    kernel: Callable[..., Any] = partial(_returned, name, into)
    in_order = kernel
    if not (into or takes.family_name):
        in_order = _in_order(name, len(takes.passed) + len(takes.outs))
        kernel = of_plain_tensors(in_order, kernel)
    _define(own, _schema(takes, into), kernel, partial(_fake, name, into), in_order, writes=len(takes.outs) * into)


def _define(name: str, schema: str, kernel: Any, fake: Any, shortest: Any = None, writes: int = 0) -> None:
    """Define an operator that writes to its last arguments, or to none, and the operator's batch-invariant twin.

    `shortest` is another kernel for Inductor's code.
    """
    at = both(name, shortest or kernel)
    for defined, each in both(name, kernel).items():
        _library.define(f"{defined}{schema}", tags=_TAGS)
        _library.impl(defined, each, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{defined}", fake, lib=_library)
        operator: torch._ops.OpOverload[Any, Any] = getattr(torch.ops.normforge, defined).default
        _kernels[defined] = each
        _at_once[operator] = at_once(operator, at[defined])
        if writes:
            _count_writes(defined, operator, writes)


def _count_writes(name: str, operator: torch._ops.OpOverload[Any, Any], outs: int) -> None:
    """Make autograd see that an operator writes to its last arguments, also while it is traced."""

    def count(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        increment_version([out for out in arguments[-outs:] if out is not None])
        return operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments)

    # torch.library.custom_op does the same for mutated arguments.
    _library.impl(name, count, "ADInplaceOrView", with_keyset=True)


def _register_gradients(name: str, takes: Function) -> None:
    """Give a function's operator its gradients; a quantised output has none."""
    if takes.direction is Direction.BACKWARD and not takes.family_name.startswith("quantised"):
        gradients.register_second(_recording, name)
    elif takes.family_name in ("renormed", "statistics"):
        gradients.register_in_parts(_recording, name)
    elif takes.gradients:
        backward = GROUP_BWD if takes.family_name == GROUP else GRADIENTS[takes.family_name]
        gradients.register(_recording, name, backward.functions[takes.norm])


# The arguments of `families.rotary`'s operators: the tensors, and the options.
_HEADS = "Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, Tensor? positions"
_ROTATION = (
    "str norm, float eps, bool interleaved, int rotary_dim, float weight_offset, str cast, int height, int width, "
    "bool alternates"
)


def _register_rotary() -> None:
    """Define the operators of norms with rotary embeddings, and the gradients of the first."""
    count = _HEADS.count("Tensor")

    @eager_only
    def run(*arguments: Any) -> Any:
        from ..families import rotary

        return rotary.launched((*arguments[:count], None, None), arguments[count:])

    @eager_only
    def run_cached(*arguments: Any) -> Any:
        from ..families import rotary

        return rotary.launched(arguments[: count + 2], arguments[count + 2 : -1], (None, None, arguments[-1]))

    @eager_only
    def run_backward(*arguments: Any) -> Any:
        from ..families import rotary

        return rotary.launched_gradients(*arguments)

    def fake(q: torch.Tensor, k: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        return q.new_empty(q.shape), k.new_empty(k.shape)

    def fake_backward(dq_out: torch.Tensor, dk_out: torch.Tensor, *arguments: Any) -> Tensors:
        wanted = zip(arguments[:4], (True, True, *arguments[-1]), strict=True)
        return [each.new_empty(each.shape) for each, is_due in wanted if is_due]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options = inputs[count:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:count])

    def differentiate(ctx: Any, dq_out: Any, dk_out: Any) -> tuple[Any, ...]:
        from ..families import rotary

        due, again = ctx.needs_input_grad[:count], torch.is_grad_enabled()
        call = BackwardPass(ctx.saved_tensors, ctx.options, dq_out, dk_out, due, again)
        return (*rotary.gradients(call), *[None] * len(ctx.options))

    name, passed = "qk_norm_rope", f"{_HEADS}, {_ROTATION}"
    _define(name, f"({passed}) -> (Tensor, Tensor)", run, fake)
    schema = f"({_HEADS}, Tensor slot_mapping, Tensor? k_scale, {_ROTATION}, Tensor(a!) key_cache) -> (Tensor, Tensor)"
    _define(f"{name}_cached", schema, run_cached, fake, writes=1)
    schema = f"(Tensor dq_out, Tensor dk_out, {passed}, bool[] due) -> Tensor[]"
    _define(f"{name}_backward", schema, run_backward, fake_backward)
    register_autograd(_recording, name, differentiate, keep)


for _name, _takes in OPERATORS.items():
    _register(_name, _takes)
    if _takes.outs:
        _register(_name, _takes, into=True)
    _register_gradients(_name, _takes)
_register_rotary()
called_at_once(_at_once)


def _rule_dtensors() -> None:
    from .computing import rule_dtensors

    rule_dtensors(_library)


# Importing DTensors takes a second, so programs without DTensors skip the import.
when_imported("torch.distributed.tensor", _rule_dtensors)
