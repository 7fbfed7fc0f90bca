"""A patched module is still of the class it had, and calls the forward it had for whatever no kernel takes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import normforge

from ..calls.test_foreign import Wrapper
from . import models
from .models import WIDTH, written
from .oracle import backward
from .twins import copies

ROWS = (3, 5)

REPLACED: dict[str, Callable[[], torch.nn.Module]] = {
    "LayerNorm": lambda: torch.nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: torch.nn.RMSNorm(WIDTH),
    "GroupNorm": lambda: torch.nn.GroupNorm(2, WIDTH),
    "timm": lambda: models.RenamedLayerNorm(WIDTH),
    "Llama": models.LlamaRMSNorm,
    "T5": models.T5LayerNorm,
    "Olmo2": models.Olmo2RMSNorm,
    "Gemma": models.GemmaRMSNorm,
    "L2": models.L2Norm,
}
each_replaced = pytest.mark.parametrize("make", REPLACED.values(), ids=REPLACED)


def patched(make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A module with other weights than ones, and a patched copy that was called before."""
    module = make()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 1.0)
    ours = copy.deepcopy(module)
    assert len(normforge.patch(ours).swapped) == 1
    for _ in range(2):
        ours(torch.randn(2, WIDTH))
    return module, ours


class Two(torch.nn.Module):
    """What blocks of two norms hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)


def block(first: str) -> Any:
    """Return a class of blocks that add twice, the first time so."""
    then = "return x + self.linear(self.second(x))"
    return written(Two, "Block", "def forward(self, x):", f"x = {first}", then, names=globals())


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in ROWS], layout=layout, requires_grad=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("LayerNorm", torch.jagged),
        ("LayerNorm", torch.strided),
        ("RMSNorm", torch.jagged),
        ("timm", torch.jagged),
        ("timm", torch.strided),
    ],
    ids=str,
)
def test_nested_tensors(name: str, layout: torch.layout) -> None:
    module, ours = patched(REPLACED[name])
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
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_blocks_with_fused_norms_take_nested_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", "0")
    adding = torch.nn.Sequential(*(block("x + self.linear(self.first(x))")() for _ in range(2)))
    signature, modulates = "def forward(self, x, scale, shift):", "return self.first(x) * (1 + scale) + shift"
    modulating = written(Two, "Modulating", signature, modulates, names=globals())()
    even = [torch.nested.nested_tensor(list(torch.randn(2, 3, WIDTH))) for _ in range(3)]
    for model, calls in (
        (adding, [(nested(torch.jagged),), (nested(torch.strided),)]),
        (modulating, [(nested(torch.jagged), *torch.randn(2, WIDTH)), tuple(even)]),
    ):
        ours = copy.deepcopy(model)
        assert normforge.patch(ours).fused
        for given in [*calls, *calls]:
            assert all(map(torch.equal, ours(*given).unbind(), model(*given).unbind()))


class Function(torch.Tensor):
    """A tensor that counts what functions torch is asked for."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(getattr(func, "__name__", str(func)))
        torchs: Any = super()
        return torchs.__torch_function__(func, types, args, kwargs or {})


def double(x: torch.Tensor) -> torch.Tensor:
    return x.double()


LEFT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float64": double,
    "meta": lambda x: x.to("meta"),
    "wrapper": Wrapper,
    "function": lambda x: x.as_subclass(Function),
}


@each_replaced
@pytest.mark.parametrize("change", LEFT.values(), ids=LEFT)
def test_what_no_kernel_takes_is_computed_as_before(
    make: Callable[[], torch.nn.Module], change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same functions of torch, and so to the bit."""
    module, ours = patched(make)
    x = torch.randn(2, WIDTH)
    if change is double and isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm)):
        module, ours = module.double(), ours.double()
    if change(x).device.type == "meta":
        module, ours = module.to("meta"), ours.to("meta")
    called = []
    for norm in (module, ours):
        monkeypatch.setattr(Function, "calls", [])
        called.append((norm(change(x)), list(Function.calls)))
    (wanted, before), (actual, after) = called
    assert (actual.dtype, actual.shape, type(actual)) == (wanted.dtype, wanted.shape, type(wanted))
    if make is models.L2Norm and before:
        # A norm without a weight asks x for the length of rows.
        assert after.pop(0) == "__get__"
    assert after == before
    assert actual.device.type == "meta" or torch.equal(actual, wanted)


def test_complex_and_integer_rows_are_taken_as_before() -> None:
    module, ours = patched(models.LlamaRMSNorm)
    x = torch.arange(2 * WIDTH).view(2, WIDTH)
    assert torch.equal(ours(x), module(x))
    module, ours = patched(REPLACED["RMSNorm"])
    z = torch.randn(2, WIDTH, dtype=torch.complex64)
    try:
        wanted = module.to(torch.complex64)(z)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            ours.to(torch.complex64)(z)
    else:
        assert torch.equal(ours.to(torch.complex64)(z), wanted)


def test_rounding_once_holds_where_no_kernel_runs() -> None:
    module = models.LlamaRMSNorm()
    normforge.patch(module, cast_before_weight=False)
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    assert module(x).dtype is torch.bfloat16
    assert torch.func.vmap(module)(x).dtype is torch.bfloat16


def test_a_batch_invariant_model_is_not_left_to_torch() -> None:
    _, ours = patched(models.LlamaRMSNorm)
    with normforge.batch_invariant(), pytest.raises(normforge.errors.InvarianceError):
        ours(torch.randn(2, WIDTH, dtype=torch.float64))


@each_replaced
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "alone"])
def test_it_is_still_of_the_class_it_was(make: Callable[[], torch.nn.Module], fuse: bool) -> None:
    model = torch.nn.Sequential(make(), torch.nn.Linear(WIDTH, WIDTH))
    cls = type(model[0])
    normforge.patch(model, fuse=fuse)
    assert isinstance(model[0], cls)
    assert type(model[0]).__name__ == cls.__name__
    assert repr(model[0]).startswith(f"normforge.{cls.__name__}(")


def test_norms_of_one_class_share_one_class() -> None:
    model = torch.nn.Sequential(*(models.LlamaRMSNorm() for _ in range(3)))
    normforge.patch(model)
    assert len({type(module) for module in model}) == 1


@each_replaced
def test_it_can_be_copied_pickled_and_unpatched(make: Callable[[], torch.nn.Module]) -> None:
    module, ours = patched(make)
    x = torch.randn(2, WIDTH)
    for other in (*copies(ours), copy.copy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is type(ours)
        assert torch.equal(other(x), ours(x))
        assert other.state_dict().keys() == module.state_dict().keys()
        normforge.unpatch(other)
        assert type(other) is type(module)
    assert type(ours) is not type(module)


def test_a_class_that_counts_its_subclasses_is_not_told() -> None:
    made: list[str] = []

    class Registering(models.LlamaRMSNorm):
        def __init_subclass__(cls, *, key: str, **options: Any) -> None:
            made.append(key)

    class OwnRMSNorm(Registering, key="own"):
        pass

    module = OwnRMSNorm()
    assert len(normforge.patch(module).swapped) == 1
    assert isinstance(module, OwnRMSNorm)
    assert made == ["own"]


def test_slots() -> None:
    class SlottedRMSNorm(models.LlamaRMSNorm):
        __slots__ = ("extra",)

    module = SlottedRMSNorm()
    done = normforge.patch(module)
    assert len(done.swapped) + len(done.skipped) == 1
    assert isinstance(module, SlottedRMSNorm)
    module(torch.randn(2, WIDTH))
    normforge.unpatch(module)
    assert type(module) is SlottedRMSNorm


def test_a_method_of_its_own_that_the_forward_calls() -> None:
    class ScaledRMSNorm(models.LlamaRMSNorm):
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return self.scaled(hidden_states)

    module, ours = patched(ScaledRMSNorm)
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    assert torch.equal(ours(x), module(x))


@pytest.mark.parametrize("strict", [False, True], ids=["not_strict", "strict"])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "Llama"])
def test_what_is_exported_to_onnx_holds_operators_of_torch_alone(
    name: str, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any size: ONNX has functions for torch's operators, and for none of normforge's."""
    _, ours = patched(REPLACED[name])
    given = (torch.randn(2, WIDTH),)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    graph = torch.export.export(ours, given, strict=strict).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called
    assert all(operator.startswith("aten.") for operator in called)


@pytest.mark.parametrize("eps", [-1e-3, float("inf")])
@each_replaced
def test_an_epsilon_that_no_kernel_takes_is_as_before(make: Callable[[], torch.nn.Module], eps: float) -> None:
    """Set after patch, which leaves a norm with such an epsilon alone."""
    module, ours = patched(make)
    for norm in (ours, module):
        setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", eps)
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        torch.testing.assert_close(ours(x), module(x), equal_nan=True)


def test_an_epsilon_that_no_kernel_takes_is_as_before_where_norms_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", "0")
    silu = torch.nn.Sequential(torch.nn.GroupNorm(2, WIDTH), torch.nn.SiLU())
    for module in (silu, block("x + self.linear(self.first(x) * (1 + x) + x)")()):
        ours = copy.deepcopy(module)
        normforge.patch(ours)
        for norm in (*ours.modules(), *module.modules()):
            if "eps" in vars(norm):
                vars(norm)["eps"] = -1e-3
        x = torch.randn(3, 2, WIDTH) if module is not silu else torch.randn(3, WIDTH)
        for _ in range(2):
            torch.testing.assert_close(ours(x), module(x))
