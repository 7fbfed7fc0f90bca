"""A patched module is still of the class it had, and calls the forward it had for whatever no kernel takes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge

from ..calling import backward, there
from ..calls.test_foreign import Wrapper
from . import models
from .models import WIDTH, Asked, Make, copies, randomised, twins
from .test_forms import Plainly, PreNorm, form
from .test_left_alone import LayerNorm2d

ROWS = (3, 5)


class ScaledRMSNorm(models.LlamaRMSNorm):
    """Calls a method of its own."""

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.scaled(hidden_states)


# Norms, and the shape of an x.
REPLACED: dict[str, tuple[Make, tuple[int, ...]]] = {
    "LayerNorm": (lambda: torch.nn.LayerNorm(WIDTH), (2, WIDTH)),
    "RMSNorm": (lambda: torch.nn.RMSNorm(WIDTH), (2, WIDTH)),
    "GroupNorm": (lambda: torch.nn.GroupNorm(2, WIDTH), (2, WIDTH)),
    "timm": (lambda: models.RenamedLayerNorm(WIDTH), (2, WIDTH)),
    "Llama": (models.LlamaRMSNorm, (2, WIDTH)),
    "T5": (models.T5LayerNorm, (2, WIDTH)),
    "Olmo2": (models.Olmo2RMSNorm, (2, WIDTH)),
    "Gemma": (models.GemmaRMSNorm, (2, WIDTH)),
    "L2": (models.L2Norm, (2, WIDTH)),
    "a method": (ScaledRMSNorm, (2, WIDTH)),
}
# A norm whose forward calls torch's function.
CALLING = {"ConvNeXt": (lambda: LayerNorm2d(WIDTH), (2, WIDTH, 3, 2))}
each_replaced = pytest.mark.parametrize(
    ("make", "shape"), [*REPLACED.values(), *CALLING.values()], ids=[*REPLACED, *CALLING]
)


def called(make: Make, shape: tuple[int, ...]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return a module, and a patched copy that was called before."""
    module, ours = twins(randomised(make()))
    assert type(ours) is not type(module)
    for _ in range(2):
        ours(torch.randn(shape))
    return module, ours


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in ROWS], layout=layout, requires_grad=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("LayerNorm", torch.jagged), ("LayerNorm", torch.strided), ("RMSNorm", torch.jagged)),
        *(("timm", torch.jagged), ("timm", torch.strided)),
    ],
    ids=str,
)
def test_nested_tensors(name: str, layout: torch.layout) -> None:
    module, ours = called(*REPLACED[name])
    x = nested(layout)
    twin = x.detach().clone().requires_grad_()
    actual, wanted = ours(x), module(twin)
    assert actual.is_nested
    assert actual.layout is layout
    for norm in (ours, module):
        norm.zero_grad()
    for y in (actual, wanted):
        backward(torch.cat([part.flatten() for part in y.unbind()]).square().sum())
    pairs: Any = ((actual, wanted), (x.grad, twin.grad))
    for a, b in pairs:
        assert all(map(torch.equal, a.unbind(), b.unbind()))
    for a, b in zip(ours.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(there(a.grad), b.grad)


Modulating = form("scale = shift = c", "Modulating", "return self.norm(x) * (1 + scale) + shift")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.usefixtures("fused")
def test_blocks_with_fused_norms_take_nested_tensors() -> None:
    even = [torch.nested.nested_tensor(list(torch.randn(2, 3, WIDTH))) for _ in range(2)]
    for model, calls in (
        (PreNorm(), [(nested(torch.jagged),), (nested(torch.strided),)]),
        (Modulating(), [(nested(torch.jagged), torch.randn(WIDTH)), tuple(even)]),
    ):
        ours = copy.deepcopy(model)
        assert normforge.patch(ours).fused
        for given in [*calls, *calls]:
            assert all(map(torch.equal, ours(*given).unbind(), model(*given).unbind()))


def double(x: torch.Tensor) -> torch.Tensor:
    return x.double()


LEFT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float64": double,
    "meta": lambda x: x.to("meta"),
    "wrapper": Wrapper,
    "function": lambda x: x.as_subclass(Asked),
}


@each_replaced
@pytest.mark.parametrize("change", LEFT.values(), ids=LEFT)
def test_what_no_kernel_takes_is_computed_as_before(
    make: Make, shape: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same functions of torch, and so to the bit."""
    module, ours = called(make, shape)
    x = torch.randn(shape)
    if change is double and isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm)):
        module, ours = module.double(), ours.double()
    if change(x).device.type == "meta":
        module, ours = module.to("meta"), ours.to("meta")
    found = []
    for norm in (module, ours):
        monkeypatch.setattr(Asked, "functions", [])
        found.append((norm(change(x)), [getattr(each, "__name__", str(each)) for each in Asked.functions]))
    (wanted, before), (actual, after) = found
    assert (actual.dtype, actual.shape, type(actual)) == (wanted.dtype, wanted.shape, type(wanted))
    if make is models.L2Norm and before:
        # A norm without a weight asks x for the length of rows.
        assert after.pop(0) == "__get__"
    assert after == before
    assert actual.device.type == "meta" or torch.equal(actual, wanted)


def test_integer_rows_are_taken_as_before() -> None:
    module, ours = called(*REPLACED["Llama"])
    x = torch.arange(2 * WIDTH).view(2, WIDTH)
    assert torch.equal(ours(x), module(x))


def test_rounding_once_holds_where_no_kernel_runs() -> None:
    module = models.LlamaRMSNorm()
    normforge.patch(module, cast_before_weight=False)
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    assert module(x).dtype is torch.bfloat16
    assert torch.func.vmap(module)(x).dtype is torch.bfloat16


@each_replaced
def test_it_is_still_of_its_class_and_can_be_copied_pickled_and_unpatched(make: Make, shape: tuple[int, ...]) -> None:
    module, ours = called(make, shape)
    cls, x = type(module), torch.randn(shape)
    assert isinstance(ours, cls)
    assert type(ours).__name__ == cls.__name__
    assert repr(ours).startswith(f"normforge.{cls.__name__}(")
    # Norms of one class share one class.
    assert type(twins(make())[1]) is type(ours)
    for other in (*copies(ours), copy.copy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is type(ours)
        assert torch.equal(other(x), ours(x))
        assert other.state_dict().keys() == module.state_dict().keys()
        normforge.unpatch(other)
        assert type(other) is cls
        assert torch.equal(other(x), module(x))
    assert type(ours) is not cls


@pytest.mark.parametrize("strict", [False, True], ids=["not_strict", "strict"])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "Llama"])
def test_what_is_exported_to_onnx_holds_operators_of_torch_alone(
    name: str, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any size: ONNX has functions for torch's operators, and for none of normforge's."""
    _, ours = called(*REPLACED[name])
    given = (torch.randn(2, WIDTH),)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    graph = torch.export.export(ours, given, strict=strict).graph
    operators = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert operators
    assert all(operator.startswith("aten.") for operator in operators)


@pytest.mark.parametrize("eps", [-1e-3, float("inf")])
@each_replaced
def test_an_epsilon_that_no_kernel_takes_is_as_before(make: Make, shape: tuple[int, ...], eps: float) -> None:
    """Set after patch, which leaves a norm with such an epsilon alone."""
    module, ours = called(make, shape)
    for norm in (ours, module):
        setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", eps)
    x = torch.randn(shape)
    for _ in range(2):
        torch.testing.assert_close(ours(x), module(x), equal_nan=True)


@pytest.mark.usefixtures("fused")
def test_an_epsilon_that_no_kernel_takes_is_as_before_where_norms_are_fused() -> None:
    silu = torch.nn.Sequential(torch.nn.GroupNorm(3, 9), torch.nn.SiLU())
    x = torch.randn(3, 9, WIDTH)
    for module, beside in ((silu, ()), (PreNorm(), ()), (Plainly(), ()), (Modulating(), (x,))):
        ours = copy.deepcopy(module)
        normforge.patch(ours)
        for norm in (*ours.modules(), *module.modules()):
            if "eps" in vars(norm):
                vars(norm)["eps"] = -1e-3
        for _ in range(2):
            torch.testing.assert_close(ours(x, *beside), module(x, *beside))
