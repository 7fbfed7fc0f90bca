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

from ..calling import FORWARD, each_norm, same_bits
from .shared import BACKWARD, backward_operands

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


def arriving(tensor: torch.Tensor) -> torch.Tensor:
    """What a collective returns, before it has come to an end."""
    return AsyncCollectiveTensor(tensor)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, as a view that negates its memory."""
    return torch._neg_view(-tensor)


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# Each stands for the tensor that it is made of.
STANDING_FOR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "wrapper": Wrapper,
    "on its way": arriving,
    "negated": negated,
}
each_stand_in = pytest.mark.parametrize(
    "stand_in", STANDING_FOR.values(), ids=[name.replace(" ", "_") for name in STANDING_FOR]
)


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if isinstance(tensor, Wrapper):
        return tensor.wrapped
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def made(*names: str) -> dict[str, Any]:
    vectors = ("weight", "bias", "x_bias", "smooth_scale")
    return {name: torch.randn(N) if name in vectors else torch.randn(M, N) for name in names}


WANTS = ("dx", "dweight", "dx_bias")
# Calls by name, and their operands.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
for _norm, _bias in (("layer", ("bias",)), ("rms", ())):
    _fused = partial(FORWARD[_norm], fadd="pre_add_store", fquant="smooth_dynamic", save_mv=True)
    CALLS |= {
        f"{_norm}, forward": (FORWARD[_norm], made("x", "weight", *_bias)),
        f"{_norm}, fused": (_fused, made("x", "weight", *_bias, "residual", "x_bias", "smooth_scale")),
        f"{_norm}, backward": (
            partial(BACKWARD[_norm], wants=WANTS),
            backward_operands(_norm),
        ),
        f"{_norm}, differentiable": (
            partial(getattr(normforge, f"{_norm}_norm"), normalized_shape=(N,)),
            made("x", "weight", *_bias),
        ),
        f"{_norm}, differentiable add": (
            getattr(normforge, f"add_{_norm}_norm"),
            made("x", "residual", "weight", *_bias),
        ),
    }


@pytest.mark.parametrize("known", [False, True])
@each_stand_in
@pytest.mark.parametrize(("call", "given"), CALLS.values(), ids=CALLS)
def test_each_operand_of_a_call(
    call: Callable[..., Any], given: dict[str, torch.Tensor], stand_in: Any, known: bool
) -> None:
    def leaves(given: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
        return [plain(each) for each in pytree.tree_leaves(call(**given))]

    expected = leaves(given)
    if not known:
        dispatch.plans.clear()
    for name in given:
        actual = leaves(given | {name: stand_in(given[name])})
        assert all(map(same_bits, actual, expected)), name
    every = leaves({name: stand_in(tensor) for name, tensor in given.items()})
    assert all(map(same_bits, every, expected))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("stand_in", [Wrapper, arriving])
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
    given = {key: tensor.requires_grad_() for key, tensor in made("x", "residual", "weight", "bias").items()}
    dy, dresidual_out = torch.randn(M, N), torch.randn(M, N)
    results = []
    for change in (same, stand_in):
        outputs = normforge.add_layer_norm(**given)
        results.append(torch.autograd.grad(outputs, list(given.values()), [change(dy), change(dresidual_out)]))
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

    given = made("x", "residual", "weight", "bias")
    FORWARD["layer"](**given, fadd=1)
    normforge.add_layer_norm(**given)
    given[name] = DTensor.from_local(given[name], mesh, [Replicate()])
    monkeypatch.setattr(normforge.kernels.launcher.Launcher, "launch_tensors", fail)
    # torch says what it has no rule for; a DTensor beside plain tensors it refuses of its own operators too.
    add: Callable[..., object] = normforge.add_layer_norm
    for call, more in ((FORWARD["layer"], {"fadd": 1}), (add, {})):
        with pytest.raises(Exception, match=r"(?i)dtensor|sharding"):
            call(**given, **more)
