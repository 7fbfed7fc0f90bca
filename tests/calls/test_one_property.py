"""Pairs of calls that differ in one property: the second behaves as in a new process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import normforge
from normforge import errors
from normforge.selection import dispatch

from ..calling import FORWARD

N = 16
X, OTHER = torch.randn(2, 4, N, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(N, generator=torch.Generator().manual_seed(1))
RNG = torch.tensor([3, 4])
STATISTIC = torch.ones(4)


class Handed(torch.Tensor):
    """A subclass that answers for itself."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "handed"


pytestmark = pytest.mark.usefixtures("nothing_known")


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or its error."""
    try:
        found = call()
    except errors.NormforgeError as error:
        return type(error), str(error)
    tensors = found if isinstance(found, tuple) else (found,)
    return [each.tolist() if type(each) is torch.Tensor else each for each in tensors]


def dropped(norm: str, **given: Any) -> Any:
    call: Callable[..., Any] = normforge.add_layer_norm if norm == "layer" else normforge.add_rms_norm
    return call(X, OTHER, **{"dropout_p": 0.5, "dropout_rng": RNG, "eps": 1e-5, **given})


def backward(**given: Any) -> Any:
    return normforge.layernorm2d_bwd(
        X, X, WEIGHT, **{"mean": STATISTIC, "rstd": STATISTIC, "dresidual_out": X, **given}
    )


def forward_2d(**given: Any) -> Any:
    return normforge.rmsnorm2d_fwd(X, WEIGHT, **given)


def layer(shape: Any, *given: Any) -> Any:
    return normforge.layer_norm(X, shape, *given)


def rms(shape: Any, *given: Any) -> Any:
    return normforge.rms_norm(X, shape, *given)


def group(groups: Any, eps: Any = 1e-5) -> Any:
    return normforge.group_norm(X, groups, WEIGHT, eps=eps)


STRIDED = torch.randn(2 * N)[::2]
STORE: dict[str, Any] = {"residual": OTHER}
# Arguments of 2d functions, and what looks the same to a dictionary, and is refused.
EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fadd True": ({**STORE, "fadd": 1}, {**STORE, "fadd": True}),
    "fadd 1.0": ({**STORE, "fadd": 1}, {**STORE, "fadd": 1.0}),
    "fquant 2.0": ({"fquant": 2}, {"fquant": 2.0}),
    "fadd False": ({"fadd": 0}, {"fadd": False}),
    "save_mv 1.0": ({"save_mv": True}, {"save_mv": 1.0}),
    "save_mv 0.0": ({"save_mv": False}, {"save_mv": 0.0}),
    "eps True": ({"eps": 1.0}, {"eps": True}),
    "eps None": ({"eps": 1e-5}, {"eps": None}),
    "a mode that cannot be hashed": ({"fadd": "none"}, {"fadd": ["none"]}),
}
PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    **{
        f"dropout, {norm}, {name} {word}": (
            partial(dropped, norm),
            partial(dropped, norm, **{name: v}),
        )
        for norm, names in (("layer", ("weight", "bias", "x_bias")), ("rms", ("weight", "x_bias")))
        for name in names
        for word, v in (
            ("float64", WEIGHT.double()),
            ("strided", STRIDED),
            ("Handed", WEIGHT.as_subclass(Handed)),
            ("too long", torch.randn(N + 1)),
            ("required", torch.nn.Parameter(WEIGHT)),
        )
    },
    **{
        f"{norm}, {word}": (partial(FORWARD[norm], X, **good), partial(FORWARD[norm], X, **bad))
        for norm in FORWARD
        for word, (good, bad) in EQUAL.items()
    },
    "dropout, eps": (lambda: dropped("layer", eps=1.0), lambda: dropped("layer", eps=True)),
    "dropout, weight_offset": (
        lambda: dropped("rms", weight=WEIGHT, weight_offset=1.0),
        lambda: dropped("rms", weight=WEIGHT, weight_offset=True),
    ),
    "backward, no dropout_rng": (backward, lambda: backward(dropout_p=0.5)),
    "backward, dropout_p": (backward, lambda: backward(dropout_p=False)),
    "forward, dropout_p": (forward_2d, lambda: forward_2d(dropout_p=False)),
    "layer_norm, None": (lambda: layer((N,)), lambda: layer(None)),
    "rms_norm, None": (lambda: rms((N,)), lambda: rms(None)),
    "group_norm, 2.0": (lambda: group(2), lambda: group(2.0)),
    "group_norm, True": (lambda: group(1), lambda: group(True)),
    "group_norm, eps": (lambda: group(2, 1.0), lambda: group(2, True)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_second_call_behaves_as_in_a_new_process(name: str) -> None:
    first, second = PAIRS[name]
    cold = outcome(second)
    assert name.partition(", ")[2] not in EQUAL or isinstance(cold, tuple)
    dispatch.forget()
    for _ in range(2):
        first()
    assert outcome(second) == cold


NUMBERS = [np.float16(0.5), np.float32(0.5), np.float64(0.5), np.int64(1), 1, torch.tensor(0.5), torch.tensor(1)]


EPS: dict[str, Callable[[Any], Any]] = {
    "layer_norm": lambda eps: normforge.layer_norm(X, (N,), WEIGHT, eps=eps),
    "layer_norm of float64": lambda eps: normforge.layer_norm(X.double(), (N,), eps=eps),
    "rms_norm": lambda eps: normforge.rms_norm(X, (N,), WEIGHT, eps),
    "add_rms_norm": lambda eps: normforge.add_rms_norm(X, OTHER, WEIGHT, eps),
    "dropout": lambda eps: dropped("layer", eps=eps),
    "group_norm": lambda eps: group(2, eps),
    "gated_rms_norm": lambda eps: normforge.gated_rms_norm(X, OTHER, WEIGHT, eps=eps),
    "modulated_layer_norm": lambda eps: normforge.modulated_layer_norm(X, WEIGHT, WEIGHT, eps=eps),
    "quantised_rms_norm": lambda eps: normforge.quantised_rms_norm(X, WEIGHT, eps=eps)[:3:2],
    "layernorm2d_fwd": lambda eps: normforge.layernorm2d_fwd(X, WEIGHT, eps=eps).y,
}
each_eps = pytest.mark.parametrize("call", EPS.values(), ids=EPS.keys())


@each_eps
@pytest.mark.parametrize("eps", NUMBERS, ids=repr)
def test_eps_is_what_torch_takes_for_a_number(call: Callable[[Any], Any], eps: Any) -> None:
    """Cold and warm."""
    for _ in range(2):
        assert outcome(lambda: call(eps)) == outcome(lambda: call(float(eps)))


@each_eps
def test_eps_is_no_flag_and_no_list_of_numbers(call: Callable[[Any], Any]) -> None:
    for _ in range(2):
        call(1.0)
        flags = True, np.bool_(True), torch.tensor(True)
        for eps in (*flags, torch.tensor([1.0]), torch.tensor(1.0, requires_grad=True)):
            with pytest.raises(errors.ConflictError, match="eps"):
                call(eps)
