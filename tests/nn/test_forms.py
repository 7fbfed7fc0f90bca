"""`patch` computes norms together with the sums and modulations beside them, by the text of a forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional

import normforge
from normforge.errors import NormforgeError, SettingError
from normforge.families import post_add
from normforge.patching import modulating

from ..calling import each_device, table_at
from ..thorough import THOROUGH
from .models import (
    WIDTH,
    Counted,
    DimlessRMSNorm,
    GemmaRMSNorm,
    LlamaRMSNorm,
    Olmo2RMSNorm,
    T5LayerNorm,
    assert_near,
    assert_same_results,
    copies,
    randomised,
    results,
    twins,
    written,
)

SAMPLES, TOKENS = 2, 9


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """DiT's."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def modulate_scale_first(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift[:, None], x, scale[:, None] + 1)


def modulate_beside(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Of operands that broadcast as they are."""
    return x + x * scale + shift


def scaled_alone(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale.unsqueeze(1) + shift.unsqueeze(1)


def dropout_add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + functional.dropout(x, 0.1)


# What a module of functions is to a forward that imports it.
functions = SimpleNamespace(modulate=modulate)


class Parts(torch.nn.Module):
    """What blocks are made of, which the text of a forward puts together."""

    def __init__(self, norm: Callable[[int], torch.nn.Module] = torch.nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.other = randomised(norm(WIDTH)), norm(WIDTH)
        self.part, self.last = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.linear = torch.nn.Linear(WIDTH, 2 * WIDTH)

    def said(self, c: torch.Tensor) -> Any:
        """Return what a condition says: shift and scale."""
        return self.linear(c).chunk(2, dim=-1)

    def meddle(self, x: torch.Tensor) -> torch.Tensor:
        """Change x without a trace, by what tells its norm from that before."""
        x.data.add_(torch.linspace(0, 3, WIDTH, device=x.device))
        return x


def form(first: str, name: str, *body: str, **counts: int) -> Any:
    """Return a class with a forward that is written so, and how often a call fuses what."""
    cls = written(Parts, name, "def forward(self, x, c=None):", first, *body, names=globals())
    cls.counts = counts
    return cls


TABLE: dict[str, Any] = table_at(Path(__file__).with_name("forms.yaml"))
FORMS = [form(row.pop("first"), name, *row.pop("body"), **row) for name, row in TABLE["forms"].items()]
PreNorm, InABranch, Plainly, BetweenNorms, ByFunction, WrittenOut, *_ = FORMS
modulated = partial(form, "shift, scale = self.said(c)", modulation=1)
# A sum with what is not the condition of each sample.
SumOfTwo = form("total = x + c", "SumOfTwo", "return self.norm(total), total")
NormOfOne = form("", "NormOfOne", "return c + self.norm(x)")


def each(*forms: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("form", forms, ids=lambda form: form.__name__)


def given(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows, and a condition of each sample."""
    generator = torch.Generator().manual_seed(0)
    x, c = (torch.randn(*shape, WIDTH, generator=generator) for shape in ((SAMPLES, TOKENS), (SAMPLES,)))
    return x.to(device).requires_grad_(), c.to(device).requires_grad_()


@each_device
@each(*FORMS)
def test_a_form(form: Any, device: str, fused: Counted) -> None:
    """What is fused, and that results stay, call after call; forward alone, no gradient is added."""
    model = form().to(device)
    patched = copy.deepcopy(model)
    done = normforge.patch(patched).fused
    assert all((each.path, each.cls) == ("", form) for each in done)
    assert [each.modulated for each in done if each.modulated] == [("norm",)] * ("modulation" in form.counts)
    x, c = given(device)
    for _ in range(2):
        assert_same_results(patched, model, x, c)
        assert fused.counts() == form.counts
    with torch.inference_mode():
        assert_near({"y": patched(x.clone(), c)}, {"y": model(x.clone(), c)}, 2e-5, 1.0)
    assert fused.counts() == {name: count for name, count in form.counts.items() if name != "input_added"}


# Norms, and whether they round once, as the kernel does that modulates.
NORMS: list[tuple[Callable[[int], torch.nn.Module], bool]] = [
    (torch.nn.LayerNorm, True),
    (partial(torch.nn.LayerNorm, bias=False), True),
    (partial(torch.nn.LayerNorm, elementwise_affine=False), True),
    (torch.nn.RMSNorm, True),
    (partial(torch.nn.RMSNorm, elementwise_affine=False, eps=1e-3), True),
    # As LTX's.
    (lambda n: DimlessRMSNorm(), True),
    (GemmaRMSNorm, True),
    (Olmo2RMSNorm, True),
    (LlamaRMSNorm, False),
    (T5LayerNorm, False),
]


@each_device
@pytest.mark.parametrize(("norm", "rounds_once"), NORMS)
def test_a_norm(norm: Any, rounds_once: bool, device: str, fused: Counted) -> None:
    for form in (Plainly, BetweenNorms, ByFunction):
        model, patched = twins(form(norm).to(device))
        assert_same_results(patched, model, *given(device))
        assert fused.counts() == (form.counts if rounds_once or form is not ByFunction else {})


@pytest.mark.parametrize(
    ("norm", "x", "residual", "count"),
    [
        *((norm, torch.bfloat16, torch.bfloat16, 1) for norm in (GemmaRMSNorm, LlamaRMSNorm, T5LayerNorm)),
        # As under autocast; a norm that rounds rows first would round them to the residual's type.
        (GemmaRMSNorm, torch.bfloat16, torch.float32, 1),
        (LlamaRMSNorm, torch.bfloat16, torch.float32, 0),
        (GemmaRMSNorm, torch.float32, torch.bfloat16, 0),
        (GemmaRMSNorm, torch.float64, torch.float64, 0),
    ],
)
def test_types_of_a_norm_and_a_residual(
    norm: Any, x: torch.dtype, residual: torch.dtype, count: int, fused: Counted
) -> None:
    model, patched = twins(NormOfOne(norm).to(x))
    operands = torch.randn(2, 3, WIDTH).to(x), torch.randn(2, 3, WIDTH).to(residual)
    # One rounding to bf16 instead of two.
    torch.testing.assert_close(patched(*operands), model(*operands), rtol=1.6e-2, atol=1e-2)
    assert fused.counts().get("sum_behind", 0) == count


@THOROUGH
@pytest.mark.usefixtures("fused")
def test_types_and_shapes_of_a_sum() -> None:
    """What the kernel does not add as torch does is added by torch."""
    model, patched = twins(SumOfTwo(LlamaRMSNorm))
    x = torch.randn(2, 3, WIDTH)
    half, other = x.half(), x.bfloat16()
    for b in (x[0], x[:, :1], 1.0, x.double(), x.to(torch.int32), half, other, x.mT.contiguous().mT):
        wanted, actual = model(x, b), patched(x, b)
        assert [each.dtype for each in actual] == [each.dtype for each in wanted]
        torch.testing.assert_close(actual, wanted)
    torch.testing.assert_close(patched(half, other)[1], half + other)
    for each in (x[:0], other):
        torch.testing.assert_close(patched(each, each), model(each, each))


@pytest.mark.parametrize(("shape", "condition", "dtype", "count"), TABLE["modulations"])
@each(ByFunction, WrittenOut)
def test_shapes_and_types_of_a_modulation(
    form: Any, shape: list[int], condition: list[int], dtype: torch.dtype, count: int, fused: Counted
) -> None:
    model, patched = twins(form())
    x, c = torch.randn(*shape, WIDTH).to(dtype), torch.randn(*condition, WIDTH)
    assert_same_results(patched, model, x, c, tolerance=2e-5 if dtype is torch.float32 else 2e-2)
    assert fused.counts().get("modulation", 0) == count


def test_bf16_is_nearer_to_the_exact_result_than_three_operators() -> None:
    model, (x, c) = WrittenOut(partial(torch.nn.LayerNorm, elementwise_affine=False)), given()
    exact, _ = results(copy.deepcopy(model).double(), x.double(), c.double())
    errors = [
        (results(each, x.bfloat16(), c.bfloat16())[0].double() - exact).abs().mean() for each in twins(model.bfloat16())
    ]
    assert errors[1] < errors[0]


@pytest.mark.gpu
@each(ByFunction, WrittenOut)
def test_autocast(form: Any, fused: Counted) -> None:
    model, patched = twins(form().to("cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        assert_same_results(patched, model, *given("cuda"), tolerance=2e-2)
    assert fused.counts() == form.counts


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block.other, "variance_epsilon", 1e-3),
        lambda block: setattr(block, "other", GemmaRMSNorm(WIDTH)),
        lambda block: block.other.to(torch.float64),
        lambda block: block.other.register_forward_hook(lambda *_: None),
    ],
    ids=["eps", "offset", "dtype", "hook"],
)
def test_a_norm_behind_a_sum_that_is_of_another_kind(change: Callable[[Any], object], fused: Counted) -> None:
    model = BetweenNorms(LlamaRMSNorm)
    change(model)
    model, patched = twins(model)
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(patched(x), model(x), rtol=1e-5, atol=1e-5)
    assert fused.counts() == {"sum_behind": 1}


def test_what_was_replaced_since_is_called(fused: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function, a norm's forward, and a norm."""
    model, (x, c) = ByFunction(), given()
    normforge.patch(model)
    with monkeypatch.context() as replaced:
        replaced.setitem(globals(), "modulate", lambda x, shift, scale: x - shift[:, None] * scale[:, None])
        torch.testing.assert_close(model(x, c), model.last(modulate(model.norm(x), *model.said(c))))
    model.norm.forward = lambda x: x * 0
    torch.testing.assert_close(model(x, c), model.last(modulate(x * 0, *model.said(c))))
    del model.norm.forward
    model.norm = torch.nn.Identity()
    torch.testing.assert_close(model(x, c), model.last(modulate(x, *model.said(c))))
    assert fused.counts() == {}


@each(PreNorm, Plainly, BetweenNorms)
def test_short_sums_and_batch_invariant_ones_are_added_alone(
    form: Any, fused: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (x, _) = form(), given()
    normforge.patch(model)
    for least, counts in (("0", form.counts), (x.numel(), form.counts), (x.numel() + 1, {}), ("", {})):
        monkeypatch.setenv("NORMFORGE_FUSE_FROM", str(least))
        model(x)
        assert fused.counts() == counts
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", "0")
    with normforge.batch_invariant():
        # So that rows do not differ by how many there are.
        model(x)
    assert fused.counts() == {}


@pytest.mark.parametrize("setting", ["-1", "1e6", "twelve"])
def test_a_threshold_that_is_no_number_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", setting)
    with pytest.raises(SettingError, match=f"NORMFORGE_FUSE_FROM='{setting}' is no number of elements"):
        normforge.patch(Plainly())


@pytest.mark.usefixtures("fused")
def test_a_sum_that_no_kernel_serves_is_added_alone(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    model, patched = twins(Plainly())
    x, _ = given()
    monkeypatch.setattr(post_add, "normalise", Mock(side_effect=NormforgeError("no kernel")))
    for _ in range(2):
        torch.testing.assert_close(patched(x), model(x))
    assert caplog.text.count("a residual add and LayerNorm are left two kernels: no kernel") == 1


@each(PreNorm, Plainly, ByFunction)
def test_compiled_it_is_one_graph_of_torchs_operators(form: Any, fused: Counted) -> None:
    model, patched = twins(form())
    torch._dynamo.reset()
    compiled: Any = torch.compile(patched, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given()), model(*given()), rtol=0, atol=1e-5)
    assert fused.counts() == {}


@each(PreNorm, Plainly, ByFunction)
def test_copies_and_pickles_are_fused_and_can_be_unpatched(form: Any, fused: Counted) -> None:
    model = form()
    normforge.patch(model)
    wanted = model(*given())
    fused.counts()
    for other in copies(model):
        assert type(other) is type(model)
        for _ in range(2):
            assert torch.equal(other(*given()), wanted)
            assert fused.counts() == form.counts
        assert list(other.state_dict()) == list(model.state_dict())
        normforge.unpatch(other)
        assert (type(other), type(other.norm)) == (form, torch.nn.LayerNorm)
        torch.testing.assert_close(other(*given()), wanted)
        assert fused.counts() == {}


def function(*body: str, **names: Any) -> Any:
    """Return a function with a body and globals of its own."""
    names |= {"modulate": modulate, "torch": torch}
    exec("\n    ".join(("def modulates(x, shift, scale, *, factor=1.0):", *body)), names)
    return names["modulates"]


def enclosing(factor: Any, plus: Callable[[Any, torch.Tensor], torch.Tensor] = torch.add) -> Any:
    return lambda x, shift, scale: x * plus(factor, scale[:, None]) + shift[:, None]


def formula_of(function: Any) -> Any:
    return modulating.formula_of(function, 2, (), ())


BY_FLAG = "return modulate(x, scale, shift) if flag else modulate(x, shift, scale)"
BY_DTYPE = "return modulate(x, scale, shift) if dtypes[0] is torch.float32 else modulate(x, shift, scale)"
# Of a builtin, and of a keyword's default.
BY_ABS, BY_FACTOR = (f"return x * ({one} + scale[:, None]) + shift[:, None]" for one in ("abs(-1)", "factor"))
BY_ADD = "return add(x * (1 + scale[:, None]), shift[:, None])"


def test_a_function_that_reads_what_is_set_otherwise_since() -> None:
    """Globals of its own or of a function that it calls, a builtin, a default, its closure or its code."""
    inner = function(BY_FLAG, flag=False)
    changed: list[tuple[Any, Callable[[Any], object]]] = [
        (function(BY_FLAG, flag=False), lambda f: f.__globals__.update(flag=True)),
        (function("return inner(x, shift, scale)", inner=inner), lambda f: inner.__globals__.update(flag=True)),
        (function(BY_ADD, add=torch.add), lambda f: f.__globals__.update(add=torch.sub)),
        (function(BY_DTYPE, dtypes=(torch.half,)), lambda f: f.__globals__.update(dtypes=(torch.float32,))),
        (function(BY_ABS), lambda f: f.__globals__.update(abs=lambda _: 2)),
        (function(BY_FACTOR), lambda f: f.__kwdefaults__.update(factor=2.0)),
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
