"""`patch` computes norms together with the modulation that forwards write behind them, and nothing else so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import normforge
from normforge.patching import modulating

from ..calling import each_device
from .models import DimlessRMSNorm, written
from .oracle import backward
from .twins import Counted, assert_near, copies, twins

WIDTH, SAMPLES, TOKENS = 32, 2, 9


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """DiT's."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def modulate_scale_first(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift[:, None], x, scale[:, None] + 1)


def modulate_beside(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Of operands that broadcast as they are."""
    return x + x * scale + shift


PLAINLY = "return self.last(self.norm(x) * (1 + scale) + shift)"
# What a module of functions is to a forward that imports it.
functions = SimpleNamespace(modulate=modulate)


class Modulated(torch.nn.Module):
    """A norm whose result is scaled and shifted by what a condition says; subclasses write it down."""

    def __init__(self, norm: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm or torch.nn.LayerNorm(WIDTH, eps=1e-6, elementwise_affine=False)
        self.linear = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def said(self, c: torch.Tensor) -> Any:
        return self.linear(c).chunk(2, dim=-1)


def form(name: str, *body: str, said: str = "shift, scale = self.said(c)") -> Any:
    """Return a class of modulated norms whose forward is written down so."""
    return written(Modulated, name, "def forward(self, x, c):", said, *body, names=globals())


ByFunction = form("ByFunction", "return self.last(modulate(self.norm(x), shift, scale))")
# As diffusers' AdaLayerNormZero, which returns it.
WrittenOut = form("WrittenOut", "x = self.norm(x) * (1 + scale[:, None]) + shift[:, None]", "return x")

MODULATED = [
    *(ByFunction, WrittenOut),
    form("ByName", "return self.last(modulate(self.norm(x), scale=scale, shift=shift))"),
    form("ByScaleFirst", "return self.last(modulate_scale_first(self.norm(x), scale, shift))"),
    form("ByDots", "x = self.norm(x)", "x = functions.modulate(x, shift, scale)", "return self.last(x)"),
    # As PixArt chunks a table: the operands are (B, 1, N).
    form(
        "Beside",
        "return self.last(modulate_beside(self.norm(x), shift, scale))",
        said="shift, scale = self.said(c.unsqueeze(1))",
    ),
    # As diffusers' AdaLayerNormContinuous.
    form("OuterIndex", "return self.last(self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :])"),
    form("OuterUnsqueeze", "return self.last(shift.unsqueeze(1) + (scale + 1.0).unsqueeze(1) * self.norm(x))"),
    # As diffusers' FluxTransformerBlock, in a branch.
    form(
        "NamedFirst",
        "if c is not None:",
        "    normed = self.norm(x)",
        "    normed = normed * (1 + scale[:, None]) + shift[:, None]",
        "return self.last(normed) + x",
    ),
    form("OneForAll", PLAINLY, said="shift, scale = self.said(c[0])"),
    form("OneARow", PLAINLY, said="shift, scale = self.said(c.unsqueeze(1) + x)"),
]

each_form = pytest.mark.parametrize("cls", MODULATED)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """How often a norm was computed together with its modulation."""
    return Counted(monkeypatch, modulating, "_fused")


def given(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator)
    c = torch.randn(SAMPLES, WIDTH, generator=generator)
    return x.to(device, dtype).requires_grad_(), c.to(device, dtype).requires_grad_()


def run(model: torch.nn.Module, operands: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """y, and the gradients of operands and parameters."""
    for tensor in (*operands, *model.parameters()):
        tensor.grad = None
    y = model(*operands)
    backward((y.float() * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)).sum())
    found = {name: each.grad for name, each in (*zip("xc", operands, strict=True), *model.named_parameters())}
    return {"y": y.detach(), **{name: each for name, each in found.items() if each is not None}}


def agree(model: torch.nn.Module, patched: torch.nn.Module, operands: tuple[torch.Tensor, ...]) -> None:
    """Fail unless a patched model has the results of the model."""
    assert_near(run(patched, operands), run(model, operands), 2e-5, 1.0)


@each_device
@each_form
def test_every_way_to_write_it(cls: type[Modulated], device: str, counted: Counted) -> None:
    model = cls().to(device)
    patched = copy.deepcopy(model)
    (fused,) = normforge.patch(patched).fused
    assert (fused.path, fused.cls, fused.modulated) == ("", cls, ("norm",))
    operands = given(device)
    agree(model, patched, operands)
    assert counted.counts() == (1,)
    with torch.inference_mode():
        torch.testing.assert_close(patched(*operands), model(*operands), rtol=0, atol=1e-5)
    assert counted.counts() == (1,)


@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.LayerNorm(WIDTH),
        torch.nn.LayerNorm(WIDTH, bias=False),
        torch.nn.RMSNorm(WIDTH),
        torch.nn.RMSNorm(WIDTH, elementwise_affine=False, eps=1e-3),
        # As LTX's.
        DimlessRMSNorm(),
    ],
    ids=str,
)
def test_norms_with_weights_of_their_own(norm: torch.nn.Module, counted: Counted) -> None:
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    model, patched = twins(ByFunction(copy.deepcopy(norm)))
    agree(model, patched, given())
    assert counted.counts() == (1,)


def test_bf16_is_nearer_to_the_exact_result_than_three_operators() -> None:
    model = WrittenOut()
    exact = run(copy.deepcopy(model).double(), given(dtype=torch.float64))
    model, patched = twins(model.bfloat16())
    errors = [
        (run(each, given(dtype=torch.bfloat16))["y"].double() - exact["y"]).abs().mean() for each in (model, patched)
    ]
    assert errors[1] < errors[0]


def other(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale.unsqueeze(1) + shift.unsqueeze(1)


UNMODULATED = [
    form("ScaleAlone", "return self.last(self.norm(x) * (1 + scale[:, None])) * shift[:, None]"),
    form("OtherFormula", "return self.last(other(self.norm(x), shift, scale))"),
    # The norm's own result goes on.
    form(
        "UsedAgain",
        "normed = self.norm(x)",
        "modulated = normed * (1 + scale[:, None]) + shift[:, None]",
        "return self.last(modulated) * normed",
    ),
    form("UsedTwice", "x = self.norm(x)", "x = x * (1 + scale[:, None]) + shift[:, None] * x", "return self.last(x)"),
    # Not the norm is modulated.
    form("OfAnother", "return self.norm(self.last(x) * (1 + scale[:, None]) + shift[:, None])"),
    # What stands behind the norm runs behind it.
    form(
        "WithAnEffect",
        "return self.last(self.norm(x) * (1 + self.linear(c)[:, None, :WIDTH]) + shift[:, None])",
    ),
    form("OfAVariable", "chosen = modulate", "return self.last(chosen(self.norm(x), shift, scale))"),
]


@pytest.mark.parametrize("cls", UNMODULATED)
def test_what_is_not_a_modulation_runs_as_it_did(cls: type[Modulated], counted: Counted) -> None:
    model = cls()
    patched = copy.deepcopy(model)
    assert all(not each.modulated for each in normforge.patch(patched).fused)
    agree(model, patched, given())
    assert counted.counts() == (0,)


@pytest.mark.parametrize(
    ("shape", "conditioning"),
    [
        ((SAMPLES, 3, 4, WIDTH), (SAMPLES, 1, WIDTH)),
        ((TOKENS, WIDTH), (TOKENS, WIDTH)),
        ((SAMPLES, 1, WIDTH), (SAMPLES, WIDTH)),
    ],
)
def test_shapes(shape: tuple[int, ...], conditioning: tuple[int, ...]) -> None:
    model, patched = twins(WrittenOut())
    operands = torch.randn(shape).requires_grad_(), torch.randn(conditioning).requires_grad_()
    agree(model, patched, operands)


def test_one_sample_whose_operands_serve_all(counted: Counted) -> None:
    model, patched = twins(ByFunction())
    x, c = given()
    operands = x, c[:1].detach().requires_grad_()
    agree(model, patched, operands)
    assert counted.counts() == (0,)


def test_a_wider_modulation_makes_a_wider_result(counted: Counted) -> None:
    model, patched = twins(WrittenOut())
    x, c = given()
    x = x.detach().bfloat16().requires_grad_()
    wanted, found = run(model, (x, c)), run(patched, (x, c))
    assert found["y"].dtype is wanted["y"].dtype is torch.float32
    assert_near(found, wanted, 2e-2, 1.0)
    assert counted.counts() == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("cls", [ByFunction, WrittenOut])
def test_autocast(cls: type[Modulated], counted: Counted) -> None:
    model, patched = twins(cls().to("cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        wanted, found = run(model, given("cuda")), run(patched, given("cuda"))
    assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in wanted.items()}
    assert_near(found, wanted, 2e-2, 1.0)
    assert counted.counts() == (1,)


def test_a_norm_that_was_changed_since(counted: Counted) -> None:
    """Replaced, given another forward, or parametrised: it is called."""
    patched = ByFunction(torch.nn.LayerNorm(WIDTH))
    normforge.patch(patched)
    x, c = given()
    patched.norm.forward = lambda x: x * 0
    shift, scale = patched.said(c)
    torch.testing.assert_close(patched(x, c), patched.last(modulate(x * 0, shift, scale)))
    del patched.norm.forward
    patched.norm = torch.nn.Identity()
    torch.testing.assert_close(patched(x, c), patched.last(modulate(x, shift, scale)))
    assert counted.counts() == (0,)


def test_a_function_that_was_replaced_since(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ByFunction()
    normforge.patch(model)
    x, c = given()
    shift, scale = model.said(c)
    monkeypatch.setitem(globals(), "modulate", lambda x, shift, scale: x - shift[:, None] * scale[:, None])
    torch.testing.assert_close(model(x, c), model.last(model.norm(x) - shift[:, None] * scale[:, None]))
    assert counted.counts() == (0,)


def function(*body: str, **names: Any) -> Any:
    """Return a function with a body and globals of its own."""
    names |= {"modulate": modulate, "torch": torch}
    exec("\n    ".join(("def modulates(x, shift, scale, *, factor=1.0):", *body)), names)
    return names["modulates"]


def enclosing(factor: Any, plus: Callable[[Any, torch.Tensor], torch.Tensor] = torch.add) -> Any:
    return lambda x, shift, scale: x * plus(factor, scale[:, None]) + shift[:, None]


def formula_of(function: Any) -> modulating.Formula | None:
    return modulating.formula_of(function, 2, ())


BY_FLAG = "return modulate(x, scale, shift) if flag else modulate(x, shift, scale)"
BY_DTYPE = "return modulate(x, scale, shift) if dtypes[0] is torch.float32 else modulate(x, shift, scale)"


def test_a_function_that_reads_what_is_set_otherwise_since() -> None:
    """Globals of its own or of a function that it calls, a builtin, a default, its closure or its code."""
    changed: list[tuple[Any, Callable[[Any], object]]] = [
        (function(BY_FLAG, flag=False), lambda f: f.__globals__.update(flag=True)),
        (
            function("return inner(x, shift, scale)", inner=function(BY_FLAG, flag=False)),
            lambda f: f.__globals__["inner"].__globals__.update(flag=True),
        ),
        (
            function("return add(x * (1 + scale[:, None]), shift[:, None])", add=torch.add),
            lambda f: f.__globals__.update(add=torch.sub),
        ),
        (function(BY_DTYPE, dtypes=(torch.half,)), lambda f: f.__globals__.update(dtypes=(torch.float32,))),
        (
            function("return x * (abs(-1) + scale[:, None]) + shift[:, None]"),
            lambda f: f.__globals__.update(abs=lambda _: 2),
        ),
        (
            function("return x * (factor + scale[:, None]) + shift[:, None]"),
            lambda f: f.__kwdefaults__.update(factor=2.0),
        ),
        (enclosing(1.0), lambda f: setattr(f.__closure__[0], "cell_contents", 2.0)),
        (function("return modulate(x, shift, scale)"), lambda f: setattr(f, "__code__", function("return x").__code__)),
    ]
    for each, change in changed:
        assert formula_of(each) == modulating.Formula(scale=1, by_sample=True)
        change(each)
        assert formula_of(each) != modulating.Formula(scale=1, by_sample=True)


class Holding:
    factor, modulates = 1.0, staticmethod(modulate)


def test_a_function_of_what_may_change_unseen_is_called() -> None:
    module: Any = ModuleType("own")
    module.factor, module.modulates = 1.0, modulate
    own = function("return modulate(x, shift, scale)")
    own.factor = 1.0
    refused = {
        "a dictionary": function('return modulate(x, shift, scale * settings["factor"])', settings={"factor": 1.0}),
        "a module": function("return modulate(x, shift, scale * module.factor)", module=module),
        "its own attribute": own,
        "counting": function("global calls", "calls += 1", "return modulate(x, shift, scale)", calls=0),
        "a cell": enclosing({"factor": 1.0}, lambda held, scale: held["factor"] + scale),
        "long rows": function("return modulate(x, shift, scale) if x.shape[1] < 200 else x"),
        "a function of a module": function("return module.modulates(x, shift, scale)", module=module),
        "a method": function("return held.modulates(x, shift, scale)", held=Holding),
        "a tuple": function("return held[0](x, shift, scale)", held=(modulate,)),
    }
    assert [name for name, each in refused.items() if formula_of(each) is not None] == []
    assert None not in map(formula_of, (modulate, modulate_scale_first))


def test_compiled_it_is_one_graph_of_torchs_operators(counted: Counted) -> None:
    model, patched = twins(ByFunction())
    wanted = run(model, given())
    torch._dynamo.reset()
    compiled: Any = torch.compile(patched, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given()), wanted["y"], rtol=0, atol=1e-5)
    assert counted.counts() == (0,)


def test_copies_and_pickles_are_fused_and_can_be_unpatched(counted: Counted) -> None:
    model = ByFunction()
    normforge.patch(model)
    wanted = model(*given())
    counted.counts()
    for other in copies(model):
        assert type(other) is type(model)
        assert torch.equal(other(*given()), wanted)
        assert counted.counts() == (1,)
        normforge.unpatch(other)
        assert (type(other), type(other.norm)) == (ByFunction, torch.nn.LayerNorm)
        assert torch.equal(other(*given()), ByFunction.forward(other, *given()))
        assert counted.counts() == (0,)


# Two branches modulate the result of one norm.
InBranches = form(
    "InBranches",
    "if self.training:",
    "    return self.last(modulate(self.norm(x), shift, scale))",
    "return self.last(self.norm(x) * (1 + scale[:, None]) + shift[:, None])",
)


def test_a_norm_that_two_branches_modulate_is_printed_once() -> None:
    model = InBranches()
    (fused,) = normforge.patch(model).fused
    assert fused.modulated == ("norm",)
    assert repr(model).count("norm with the modulation") == 1


class Summed(Modulated):
    """Adds before its modulated norm, and before one that is not modulated."""

    def __init__(self) -> None:
        super().__init__()
        self.second = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, c: Any = None) -> Any:
        shift, scale = (self.last(x), x) if c is None else (part[:, None] for part in self.said(c))
        x = x + self.last(x)
        x = x + self.last(self.norm(x) * (1 + scale) + shift)
        return self.last(self.second(x))


def test_a_sum_is_left_to_the_norm_that_is_not_modulated(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", "0")
    model = Summed()
    patched = copy.deepcopy(model)
    (fused,) = normforge.patch(patched).fused
    assert (fused.norms, fused.modulated) == (("second",), ("norm",))
    for _ in range(3):
        agree(model, patched, given())
    assert counted.counts() == (3,)
    assert "sums with second; norm with the modulation" in repr(patched)


def test_what_patch_says_of_it() -> None:
    model = torch.nn.ModuleList([ByFunction(), ByFunction(), Summed()])
    assert str(normforge.patch(model)).splitlines() == [
        "swapped  4 x LayerNorm   -> normforge.LayerNorm [0.norm]",
        "fused    2 x ByFunction  norm with the modulation [0]",
        "fused    1 x Summed      sums with second; norm with the modulation [2]",
    ]
    assert "norm with the modulation" in repr(model[0])
    normforge.unpatch(model)
    assert normforge.patch(model, fuse=False).fused == ()


def test_what_holds_a_modulated_norm_is_no_norm_that_was_skipped() -> None:
    """Called a norm, it holds one; all that it adds is the modulation."""
    named = form("AdaLayerNormZero", "x = self.norm(x) * (1 + scale[:, None]) + shift[:, None]", "return x")
    done = normforge.patch(torch.nn.ModuleList([named()]))
    assert [each.modulated for each in done.fused] == [("norm",)]
    assert (done.skipped, done.unfused) == ((), ())
