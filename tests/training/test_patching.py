"""`patch`: which modules it takes, what stays the same, and the way back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import normforge

from . import models
from .models import WIDTH, Transformer
from .oracle import backward, each_device

HUGGING_FACE = (models.LlamaRMSNorm, models.T5LayerNorm, models.Olmo2RMSNorm, models.Qwen2RMSNorm)

each_hugging_face = pytest.mark.parametrize("cls", HUGGING_FACE, ids=lambda cls: cls.__name__)


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 1.0)
    return module


def losses(model: torch.nn.Module, device: str, steps: int = 5) -> list[float]:
    """The loss of each of a few steps on one batch."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(17, (4, 12), generator=generator).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())
        backward(loss)
        optimiser.step()
        found.append(loss.item())
    return found


@each_device
def test_a_patched_transformer_trains_as_the_unpatched(device: str) -> None:
    model = Transformer().to(device)
    patched = copy.deepcopy(model)
    result = normforge.patch(patched)
    assert [swapped.path for swapped in result.swapped] == [
        "blocks.0.first",
        "blocks.0.second",
        "blocks.1.first",
        "blocks.1.second",
        "last",
    ]
    assert not result.skipped
    wanted, actual = losses(model, device), losses(patched, device)
    assert wanted[-1] < 0.9 * wanted[0]
    assert actual == pytest.approx(wanted, rel=1e-4)


def test_only_the_classes_change() -> None:
    model = Transformer()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    state, classes = copy.deepcopy(model.state_dict()), {path: type(m) for path, m in modules.items()}
    attributes = {path: dict(vars(m)) for path, m in modules.items()}
    result = normforge.patch(model)
    ours: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
        torch.nn.LayerNorm: normforge.LayerNorm,
        torch.nn.RMSNorm: normforge.RMSNorm,
    }
    assert all(s.new is ours[s.old] is not s.old for s in result.swapped)
    assert all(type(model.get_submodule(s.path)) is s.new for s in result.swapped)
    assert all(m is modules[path] for path, m in model.named_modules())
    assert all(p is parameters[path] for path, p in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    back = normforge.unpatch(model)
    assert [(s.path, s.new, s.old) for s in back] == list(result.swapped)
    assert {path: type(m) for path, m in model.named_modules()} == classes
    assert {path: dict(vars(m)) for path, m in model.named_modules()} == attributes


def test_patching_and_unpatching_twice_does_nothing_more() -> None:
    model = Transformer()
    assert normforge.unpatch(model) == ()
    assert len(normforge.patch(model).swapped) == 5
    assert normforge.patch(model) == normforge.Patch((), ())
    assert len(normforge.unpatch(model)) == 5
    assert normforge.unpatch(model) == ()


def test_modules_that_were_ours_stay_ours() -> None:
    model = torch.nn.Sequential(normforge.LayerNorm(WIDTH), normforge.AddRMSNorm(WIDTH), torch.nn.LayerNorm(WIDTH))
    assert [swapped.path for swapped in normforge.patch(model).swapped] == ["2"]
    normforge.unpatch(model)
    assert [type(module) for module in model] == [normforge.LayerNorm, normforge.AddRMSNorm, torch.nn.LayerNorm]


def test_a_shared_module_is_swapped_once_for_all() -> None:
    norm = torch.nn.LayerNorm(WIDTH)
    model = torch.nn.Sequential(norm, torch.nn.Linear(WIDTH, WIDTH), norm)
    assert [swapped.path for swapped in normforge.patch(model).swapped] == ["0"]
    assert type(model[0]) is type(model[2]) is normforge.LayerNorm
    assert model[0] is model[2]
    assert len(normforge.unpatch(model)) == 1


def test_a_norm_alone() -> None:
    norm = torch.nn.RMSNorm(WIDTH)
    assert normforge.patch(norm).swapped == ((("", torch.nn.RMSNorm, normforge.RMSNorm)),)
    assert type(norm) is normforge.RMSNorm


def test_hooks_stay() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH))
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    normforge.patch(model)
    model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    normforge.unpatch(model)
    model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    assert seen == ["forward", "backward"] * 2


def test_an_optimiser_made_before_moves_the_weights() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    normforge.patch(model)
    weight = model[0].get_parameter("weight")
    before = weight.detach().clone()
    backward(model(torch.randn(2, WIDTH)).square().sum())
    optimiser.step()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("make", [lambda: torch.nn.LayerNorm(WIDTH), models.T5LayerNorm], ids=["torch", "T5"])
def test_copies_and_pickles_of_a_patched_model_can_be_unpatched(make: Callable[[], torch.nn.Module]) -> None:
    model = torch.nn.Sequential(make())
    cls = type(model[0])
    normforge.patch(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    x = torch.randn(2, WIDTH)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), model(x))
        normforge.unpatch(other)
        assert type(other[0]) is cls
    assert type(model[0]) is not cls


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_device
@each_hugging_face
def test_hugging_face_classes_keep_their_results(
    cls: Callable[[], torch.nn.Module], dtype: torch.dtype, weight: torch.dtype, device: str
) -> None:
    original = randomised(cls()).to(device, weight)
    patched = copy.deepcopy(original)
    attributes = dict(vars(patched))
    assert [swapped.old for swapped in normforge.patch(patched).swapped] == [cls]
    assert isinstance(patched, normforge.RMSNorm)
    x = torch.randn(512, WIDTH, device=device).to(dtype).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    actual, wanted = patched(x), original(twin)
    assert actual.dtype == wanted.dtype
    # In the original's order of casts the results are the same, but where a sum's last bit tips a rounding.
    step = 1e-5 if dtype == weight == torch.float32 else 2 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(actual, wanted, rtol=step, atol=0)
    differing = ~torch.isclose(actual.float(), wanted.float(), rtol=1e-5, atol=0)
    assert differing.float().mean() < 1e-3
    dy = torch.randn_like(wanted)
    backward(actual, dy)
    backward(wanted, dy)
    tolerance = 1e-4 if dtype == weight == torch.float32 else 3e-2
    torch.testing.assert_close(x.grad, twin.grad, rtol=tolerance, atol=tolerance)
    patched_weight, original_weight = patched.get_parameter("weight").grad, original.get_parameter("weight").grad
    assert patched_weight is not None
    assert original_weight is not None
    size = original_weight.abs().max().item()
    torch.testing.assert_close(patched_weight, original_weight, rtol=tolerance, atol=tolerance * size)
    normforge.unpatch(patched)
    assert type(patched) is cls
    assert dict(vars(patched)) == attributes


@each_hugging_face
def test_one_rounding_if_asked_for(cls: Callable[[], torch.nn.Module]) -> None:
    module = randomised(cls()).bfloat16()
    eps, weight = 1e-6, module.get_parameter("weight")
    normforge.patch(module, cast_before_weight=False)
    x = torch.randn(64, WIDTH).bfloat16()
    assert torch.equal(module(x), normforge.rms_norm(x, (WIDTH,), weight, eps))


def test_looking_at_a_module_leaves_no_trace() -> None:
    """No hook of the module runs, its weight keeps its value, and random numbers come as they would have."""
    module = randomised(models.LlamaRMSNorm())
    weight = module.get_parameter("weight").detach().clone()
    module.register_forward_pre_hook(lambda *_: pytest.fail("the module was called"))
    state = torch.get_rng_state()
    normforge.patch(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(module.get_parameter("weight"), weight)


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(models.LlamaRMSNorm(), torch.nn.LayerNorm(WIDTH))
    assert len(normforge.patch(model).swapped) == 2


def overridden() -> torch.nn.Module:
    module = torch.nn.LayerNorm(WIDTH)
    module.forward = lambda input: input  # type: ignore[method-assign]  # what the test is about
    return module


SKIPPED: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "weight offset": (models.GemmaRMSNorm, "computes something else"),
    "eps elsewhere": (models.MisplacedEpsilonRMSNorm, "computes something else"),
    "rounded twice": (models.TwiceRoundedRMSNorm, "computes something else"),
    "two inputs": (models.GatedRMSNorm, "could not be tried on a CPU tensor (TypeError: "),
    "bias": (models.BiasedRMSNorm, "lacks a 1-D weight as its only parameter"),
    "eps unnamed": (models.NamelessEpsilonRMSNorm, "variance_epsilon or eps"),
    "subclass": (lambda: models.ScaledLayerNorm(WIDTH), "ScaledLayerNorm is a subclass of torch's"),
    "own class": (models.OwnLayerNorm, "OwnLayerNorm is no class that patch knows"),
    "own forward": (overridden, "overridden on the instance"),
    "double": (lambda: torch.nn.RMSNorm(WIDTH, dtype=torch.float64), "parameters in torch.float64"),
}


@pytest.mark.parametrize("case", SKIPPED.values(), ids=[name.replace(" ", "_") for name in SKIPPED])
def test_what_is_not_known_is_left_alone_and_reported(case: tuple[Callable[[], torch.nn.Module], str]) -> None:
    make, reason = case
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), make())
    cls, attributes = type(model[1]), dict(vars(model[1]))
    result = normforge.patch(model)
    assert not result.swapped
    ((path, skipped, why),) = result.skipped
    assert (path, skipped) == ("1", cls)
    assert reason in why
    assert type(model[1]) is cls
    assert dict(vars(model[1])) == attributes


def test_what_is_no_norm_is_not_reported() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GroupNorm(2, 4), torch.nn.BatchNorm1d(4))
    assert normforge.patch(model) == normforge.Patch((), ())


def test_autocast_of_a_patched_model() -> None:
    model: Any = Transformer()
    tokens = torch.randint(17, (2, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = model(tokens)
        normforge.patch(model)
        actual = model(tokens)
    assert actual.dtype == wanted.dtype
    torch.testing.assert_close(actual, wanted, rtol=5e-2, atol=5e-2)
