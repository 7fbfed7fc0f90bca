"""The forward and backward functions as operators of torch's dispatcher: what a traced graph holds of them.

torch.compile, torch.export and make_fx record operators, and learn what they return from fake kernels. Eager calls do
not come here: the dispatcher alone takes 6 us, and Inductor's code goes past it too (`shortcuts`). An operator returns
the outputs that were asked for, in the order of `LayerNormOutput` or `NormGradients`, and nothing in place of the
others. Its schema has no defaults, so that its kernels are given every argument.

Where a caller says where outputs go, another operator (`..._into`) writes y and the sum there. A copy after the
functional one would move as many bytes again as its kernel does. It returns y_scale, mean and rstd, of no elements
where not asked for: of operators that write, torch functionalises only those that return a fixed number of tensors.

Importing this module registers them, in `torch.ops.normforge`. What computes results besides look-ups of plain norms is
imported when an operator is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..calls import native
from ..calls.check import check, refuse_gradient
from ..calls.functions import FUNCTIONS
from ..calls.outputs import results_of
from ..codegen import parameters
from ..codegen.values import Direction
from ..upstream.imports import when_imported
from ..upstream.torch_dynamo import eager_only
from ..upstream.torch_inductor import called_at_once
from . import gradients, grouped
from .shortcuts import Recording, at_once, of_plain_tensors
from .twins import both

# The compiler keeps strides as they were traced: fake kernels refuse rows that kernels cannot walk, and no others come.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

Tensors = list[torch.Tensor]

_NAMESPACE = "normforge"
# torch declares no types for it.
_Library: Any = torch.library.Library
_library = _Library(_NAMESPACE, "DEF")
# Of operators, by name.
_kernels: dict[str, Callable[..., Any]] = {}
_recording: Any = Recording(_library, _kernels)
# What Inductor's code calls in place of operators.
_at_once: dict[Any, Callable[..., Any]] = {}


def _in_order(name: str, places: int) -> Callable[..., Tensors]:
    """Return a function's operator by its look-up: from the arguments in order, no places, to the results."""
    absent = (None,) * places

    @eager_only
    def run(*arguments: Any) -> Tensors:
        results = getattr(native.calls, name)(*arguments, *absent)
        return [result for result in results if result is not None]

    return run


def _schema(name: str, into: bool, defined: str) -> str:
    """The schema of a function's operator, or of that which writes where it is told, by the name that it has."""
    takes = FUNCTIONS[name]
    rows = [row for row in takes.family.of(takes.norm) if row.name in takes.passed]
    declared = [f"{row.schema} {row.name}" for row in rows]
    if not into:
        return f"{defined}({', '.join(declared)}) -> Tensor[]"
    # y is always written to somewhere, the others where they are asked for.
    for alias, (place, result) in zip("abcdefgh", takes.places, strict=False):
        always = not next(row.wanted for row in takes.family.results if row.name == result)
        declared.append(f"Tensor({alias}!){'' if always else '?'} {place}")
    written = {result for _, result in takes.places}
    returned = [f"Tensor {row.name}" for row in takes.family.results if row.name not in written]
    return f"{defined}({', '.join(declared)}) -> ({', '.join(returned)})"


def _named(function: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of an operator by their names; those of places come last."""
    takes = FUNCTIONS[function]
    return dict(zip((*takes.passed, *[place for place, _ in takes.places]), arguments, strict=False))


def _handed(function: str, into: bool, results: Any) -> Tensors | tuple[torch.Tensor, ...]:
    """What an operator returns: what there is, or, if it writes, some tensor for each result that it does not write."""
    if not into:
        return [tensor for tensor in results if tensor is not None]
    takes = FUNCTIONS[function]
    written = {result for _, result in takes.places}
    returned = [each for row, each in zip(takes.family.results, results, strict=True) if row.name not in written]
    return tuple([results[0].new_empty(0) if each is None else each for each in returned])


@eager_only
def _returned(function: str, into: bool, *arguments: Any) -> Tensors | tuple[torch.Tensor, ...]:
    from .computing import run

    return _handed(function, into, run(function, _named(function, arguments)))


def _by_formula(function: str, given: dict[str, Any]) -> Sequence[torch.Tensor | None]:
    from .computing import by_formula

    return by_formula(function, given)


@eager_only
def _fake(function: str, into: bool, *arguments: Any) -> Tensors | tuple[torch.Tensor, ...]:
    from ..compiled.switch import settle

    settle()
    call = check(function, _named(function, arguments), addressed=False)
    if into:
        refuse_gradient(call)
    return _handed(function, into, results_of(call, call.x.new_empty))


def _register(name: str, into: bool = False) -> None:
    """Define a function's operator, or that which writes, with one kernel for all devices and a fake one; and its twin.

    The twin is the same, batch invariant.
    """
    kernel: Callable[..., Any] = partial(_returned, name, into)
    takes = FUNCTIONS[name]
    in_order = None if into or takes.family_name else _in_order(name, len(takes.places))
    if in_order is not None:
        kernel = of_plain_tensors(in_order, kernel)
    own = f"{name}_into" if into else name
    shortest = both(own, in_order or kernel)
    for defined, each in both(own, kernel).items():
        _library.define(_schema(name, into, defined), tags=_TAGS)
        _library.impl(defined, each, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{defined}", partial(_fake, name, into), lib=_library)
        operator: torch._ops.OpOverload[Any, Any] = getattr(torch.ops.normforge, defined).default
        _kernels[defined] = each
        _at_once[operator] = at_once(operator, shortest[defined])
        if into:
            _count_writes(defined, operator, len(takes.places))


def _count_writes(name: str, operator: torch._ops.OpOverload[Any, Any], places: int) -> None:
    """Have autograd see what an operator writes to, its last arguments, also where it is traced and does not run."""

    def count(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        increment_version([place for place in arguments[-places:] if place is not None])
        return operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments)

    # As torch.library.custom_op does for what it is told is mutated.
    _library.impl(name, count, "ADInplaceOrView", with_keyset=True)


for _name, _takes in FUNCTIONS.items():
    _register(_name)
    if _takes.places:
        _register(_name, into=True)
    if _takes.direction is Direction.BACKWARD:
        _tensors = [name for name, _, _ in _takes.tensors]
        gradients.register_second(_recording, _NAMESPACE, _name, _takes.passed, _tensors, partial(_by_formula, _name))
    elif _takes.gradients:
        # What is quantised has no gradient.
        _backward = parameters.GRADIENTS[_takes.family_name].functions[_takes.norm]
        gradients.register(_recording, _NAMESPACE, _name, _backward)
_at_once |= grouped.register(_library, _NAMESPACE, _TAGS)
called_at_once(_at_once)


def _rule_dtensors() -> None:
    from . import sharding

    sharding.register(_library, _NAMESPACE)


# Who has no DTensors does not wait for them to be imported, which takes a second.
when_imported("torch.distributed.tensor", _rule_dtensors)
