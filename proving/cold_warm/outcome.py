"""Outcomes of calls: everything that is compared of a call and its backward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from normforge.codegen.values import SEVERAL

from .contexts import OPERATORS_SEEN, TRANSFORMS, within
from .functions import Call, Draw, Function, arguments
from .operands import laid
from .session import Session

Outcome = dict[str, Any]


class Subject(NamedTuple):
    """Something that is called.

    Attributes:
        name: its name.
        defaults: the call that nothing was said of.
        draws: by property, what draws another value.
        outcome: from a session, a call and whether caches are empty to what the call came to.
        settled: makes properties go together.
        jumps: properties that are set together.
    """

    name: str
    defaults: Call
    draws: Mapping[str, Draw]
    outcome: Callable[[Session, Call, bool], Outcome]
    settled: Callable[[Call], Call] = dict
    jumps: Sequence[Call] = ()


def described(value: Any) -> Any:
    """Return all that is compared of an argument or a result."""
    if isinstance(value, torch.Tensor):
        try:
            strides = value.stride()
        except RuntimeError:
            strides = ()
        grad_fn = type(value.grad_fn).__name__
        marks = (value.requires_grad, value.is_leaf, grad_fn, value.is_inference(), value.is_neg())
        return type(value).__name__, str(value.dtype), tuple(value.shape), strides, *marks
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(map(described, value))
    return repr(value)


def error_of(error: BaseException) -> tuple[str, str]:
    """Return an exception's type and text, without addresses in memory."""
    return type(error).__name__, re.sub(r"0x[0-9a-f]+|\b\d{9,}\b", "…", str(error))[:400]


def versions(tensors: Mapping[str, Any]) -> dict[str, int | None]:
    """Return how often each tensor was written to."""
    found = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    return {name: None if tensor.is_inference() else tensor._version for name, tensor in found.items()}


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors that a call returned."""
    several = outputs if isinstance(outputs, tuple | list) else [outputs]
    return [each for each in several if isinstance(each, torch.Tensor)]


def outcome_of(function: Function, session: Session, call: Call, cold: bool) -> Outcome:
    """Return what a call of a function comes to: launches, results, versions, exceptions, and those of gradients."""
    del cold
    given = arguments(function, call)
    first = next(iter(given))

    def run() -> Any:
        def called(x: Any) -> Any:
            if function.name.startswith("torch."):
                return function.call(x, *[value for name, value in given.items() if name != first])
            return function.call(**{**given, first: x})

        return TRANSFORMS[call["transform"]](called, given[first])

    found = observed(session, call, given, run)
    return _of_results(found) if function.name.startswith("rms_norms") else found


def _of_results(found: Outcome) -> Outcome:
    """Leave out what the first call of a kind of `rms_norms` launches by itself, whose results are not returned."""
    launches = [] if "exception" in found else found["launches"]
    together = [at for at, (key, *_) in enumerate(launches) if key.symbol.startswith(SEVERAL)]
    return found | {"launches": launches[together[0] :] if together else launches}


def observed(session: Session, call: Call, given: Mapping[str, Any], run: Callable[[], Any]) -> Outcome:
    """Run a call and its backward pass.

    Args:
        session: which records launches.
        call: its settings.
        given: tensors by name, those that gradients are of among them.
        run: the call itself.
    """
    session.start()
    OPERATORS_SEEN.clear()
    for name, value in given.items():
        session.name(name, value)
    before = versions(given)
    found: Outcome = {}
    outputs = None
    try:
        outputs = within(run, call["place"], call["outer"], call["inner"])
        found["results"] = described(outputs)
        names = {id(tensor): name for name, tensor in given.items()}
        found["which"] = [names.get(id(tensor)) for tensor in tensors_of(outputs)]
    except Exception as error:
        found["exception"] = error_of(error)
    found["versions"] = {name: _less(version, before[name]) for name, version in versions(given).items()}
    found["launches"], session.launches = session.launches, []
    due = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]
    due = {"all": due, "first": due[:1], "last": due[-1:], "none": []}[call["arriving"]]
    if due:
        found |= _backward(session, call, given, due)
    found["operators"], found["finds"] = list(OPERATORS_SEEN), session.finds
    return found


def _less(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _backward(session: Session, call: Call, given: Mapping[str, Any], due: list[torch.Tensor]) -> Outcome:
    found: Outcome = {}
    leaves = {name: each for name, each in given.items() if getattr(each, "requires_grad", False) and each.is_leaf}
    try:
        arriving = []
        for at, output in enumerate(due):
            gradient = laid(call["gradient"], output.shape, output.dtype)
            session.name(f"gradient {at}", gradient)
            arriving.append(gradient.to(output.dtype))

        options = {"allow_unused": True, "retain_graph": True, "create_graph": call["create_graph"]}
        run = partial(torch.autograd.grad, due, [*leaves.values()], arriving, **options)
        for turn in range(1 + call["twice"]):
            found[f"gradients {turn}"] = described(within(run, call["back_place"], call["back_context"]))
    except Exception as error:
        found["gradients' exception"] = error_of(error)
    found["gradients' launches"], session.launches = session.launches, []
    return found
