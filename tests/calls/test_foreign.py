"""Operands whose address holds no values: wrapper subclasses, freed storages, and views that negate their memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils import _pytree as pytree

import normforge
from normforge import errors
from normforge.selection import dispatch
from proving.cases import Case, cases, operands

from ..calling import FORWARD, each_norm, same_bits
from .test_wrong_tensors import CALLS as FUNCTIONS

pytestmark = pytest.mark.usefixtures("nothing_known")

M, N = 3, 64


class Wrapper(torch.Tensor):
    """A tensor that stands for another one, which its operators are run on; it has no memory of its own."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.wrapped = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares another signature than it calls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Wrapper, lambda wrapper: wrapper.wrapped, (args, kwargs or {}))
        return func(*args, **kwargs)


# Each stands for the tensor that it is made of.
STANDING_FOR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "wrapper": Wrapper,
    # What a collective returns, before it has come to an end.
    "on_its_way": AsyncCollectiveTensor,
    # The same values, as a view that negates its memory.
    "negated": lambda tensor: torch._neg_view(-tensor),
}
each_stand_in = pytest.mark.parametrize("stand_in", STANDING_FOR.values(), ids=STANDING_FOR)


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if isinstance(tensor, Wrapper):
        return tensor.wrapped
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def detached(case: Case) -> dict[str, Any]:
    return {name: tensor.detach() for name, tensor in operands(case).items()}


DIFFERENTIABLE = cases("plain", vary=("norm", "without"), shape=(M, N))
# Calls by name, and what is passed.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{name: FUNCTIONS[name] for name in ("bare", "with a weight", "added", "dropout", "backward", "backward, rms")},
    **{name: FUNCTIONS[name] for name in ("quantised", "gated", "renormed")},
    **{str(case): (partial(case.function, **case.arguments), detached(case)) for case in DIFFERENTIABLE},
}


@pytest.mark.parametrize("known", [False, True])
@each_stand_in
@pytest.mark.parametrize(("call", "given"), CALLS.values(), ids=CALLS)
def test_each_operand_of_a_call(call: Callable[..., Any], given: dict[str, Any], stand_in: Any, known: bool) -> None:
    def leaves(given: dict[str, Any]) -> list[torch.Tensor | None]:
        return [plain(each) for each in pytree.tree_leaves(call(**given))]

    expected = leaves(given)
    if not known:
        dispatch.plans.clear()
    others = {name: stand_in(tensor) for name, tensor in given.items() if isinstance(tensor, torch.Tensor)}
    for changed in (*({name: tensor} for name, tensor in others.items()), others):
        assert all(map(same_bits, leaves(given | changed), expected)), [*changed]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("stand_in", [Wrapper, AsyncCollectiveTensor])
@each_norm
def test_each_output_of_a_forward_function(norm: str, stand_in: Any, known: bool) -> None:
    x, residual = torch.randn(M, N), torch.randn(M, N)
    modes: dict[str, Any] = {"residual": residual, "fadd": "pre_add_store"}
    expected = FORWARD[norm](x, **modes)
    if known:
        FORWARD[norm](x, **modes, out=torch.empty(M, N), residual_out=torch.empty(M, N))
    for name, wanted in (("out", expected.y), ("residual_out", expected.residual_out)):
        output = torch.zeros(M, N)
        FORWARD[norm](x, **modes, **{name: stand_in(output)})
        assert same_bits(output, wanted)


@each_stand_in
def test_a_gradient_that_stands_for_another(stand_in: Any) -> None:
    given = operands(DIFFERENTIABLE[0])
    arriving = torch.randn(2, M, N)
    results = []
    for change in (torch.clone, stand_in):
        outputs = DIFFERENTIABLE[0].run(given)
        results.append(torch.autograd.grad(outputs, list(given.values()), [*map(change, arriving)]))
    # torch's operators compute those of what is no plain tensor.
    torch.testing.assert_close(*results)


def test_a_copy_of_what_is_negated_makes_nothing_known() -> None:
    """Rows of four strides can be copied and cannot be walked; the memory of a view is not its values."""
    rows = torch.randn(3, 3, 3, 3, N)[:2, :2, :2, :2]
    outputs = [normforge.layernorm2d_fwd(torch._neg_view(rows)).y for _ in range(2)]
    assert same_bits(*outputs)
    with pytest.raises(errors.LayoutError, match="do not collapse to 3 row strides or fewer"):
        normforge.layernorm2d_fwd(rows)


@pytest.mark.parametrize("name", ["x", "residual", "weight", "bias"])
def test_distributed_tensors_among_others_are_never_launched(name: str, mesh: Any, monkeypatch: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    def fail(*arguments: Any) -> Any:
        pytest.fail("a kernel was launched")

    given = detached(DIFFERENTIABLE[0].but(without=("x_bias",)))
    FORWARD["layer"](**given, fadd=1)
    normforge.add_layer_norm(**given)
    given[name] = DTensor.from_local(given[name], mesh, [Replicate()])
    monkeypatch.setattr(normforge.kernels.launcher.Launcher, "launch_tensors", fail)
    # torch says what it has no rule for; a DTensor beside plain tensors it refuses of its own operators too.
    add: Callable[..., object] = normforge.add_layer_norm
    for call, more in ((FORWARD["layer"], {"fadd": 1}), (add, {})):
        with pytest.raises(Exception, match=r"(?i)dtensor|sharding"):
            call(**given, **more)
