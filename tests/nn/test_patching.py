"""`patch`: which modules it takes, what stays the same, and the way back."""

from __future__ import annotations

import copy
import gc
import math
import os
import re
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.nn.utils import parametrize

import normforge

from ..calling import FLOATS, each_device, each_float
from ..thorough import THOROUGH
from . import models
from .models import WIDTH, Transformer, norm, randomised
from .oracle import backward
from .twins import results

llama, t5, olmo2, l2 = (
    cls.forward for cls in (models.LlamaRMSNorm, models.T5LayerNorm, models.Olmo2RMSNorm, models.L2Norm)
)
# With their input called what Hugging Face's models call it.
KEYWORD = (
    norm(lambda m, hidden_states: llama(m, hidden_states), models.LlamaRMSNorm),
    norm(lambda m, hidden_states: t5(m, hidden_states), models.T5LayerNorm),
)

HUGGING_FACE = (
    *(models.LlamaRMSNorm, models.T5LayerNorm, models.Olmo2RMSNorm),
    *(models.Qwen2RMSNorm, models.GemmaRMSNorm),
)

WEIGHTLESS = (models.L2Norm, models.DimlessRMSNorm)

each_hugging_face = pytest.mark.parametrize("cls", HUGGING_FACE, ids=lambda cls: cls.__name__)


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


@THOROUGH
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
    result = normforge.patch(model, fuse=False)
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
    assert len(normforge.patch(model, fuse=False).swapped) == 5
    assert normforge.patch(model, fuse=False) == normforge.Patch((), ())
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


@each_float
@pytest.mark.parametrize("weight", FLOATS, ids=str)
@pytest.mark.parametrize("cls", [*HUGGING_FACE, *WEIGHTLESS], ids=lambda cls: cls.__name__)
@each_device
def test_hugging_face_classes_keep_their_results(
    cls: Callable[[], torch.nn.Module], dtype: torch.dtype, weight: torch.dtype, device: str
) -> None:
    original = randomised(cls()).to(device, weight)
    patched = copy.deepcopy(original)
    attributes = dict(vars(patched))
    assert [swapped.old for swapped in normforge.patch(patched).swapped] == [cls]
    assert isinstance(patched, normforge.RMSNorm)
    of_fp32 = dtype is torch.float32 and (cls in WEIGHTLESS or weight is torch.float32)
    tolerance = 1e-4 if of_fp32 else 3e-2
    # Without a weight, rows are of any length, whatever the module holds of a size.
    for width in (WIDTH, 3) if cls in WEIGHTLESS else (WIDTH,):
        x = torch.randn(512, width, device=device).to(dtype)
        (actual, found), (wanted, exact) = (results(module, x) for module in (patched, original))
        assert actual.dtype == wanted.dtype
        # In the original's order of casts the results are the same, but where a sum's last bit tips a rounding.
        step = 1e-5 if of_fp32 else 2 * torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(actual, wanted, rtol=step, atol=0)
        differing = ~torch.isclose(actual.float(), wanted.float(), rtol=1e-5, atol=0)
        assert differing.float().mean() < 1e-3
        for name, gradient in exact.items():
            size = 1.0 if name == "x" else gradient.abs().max().item()
            torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance * size)
    normforge.unpatch(patched)
    assert type(patched) is cls
    assert dict(vars(patched)) == attributes


@each_hugging_face
def test_one_rounding_if_asked_for(cls: Callable[[], torch.nn.Module]) -> None:
    module = randomised(cls()).bfloat16()
    eps, weight = 1e-6, module.get_parameter("weight")
    normforge.patch(module, cast_before_weight=False)
    x = torch.randn(64, WIDTH).bfloat16()
    offset = 1.0 if cls is models.GemmaRMSNorm else 0.0
    assert torch.equal(module(x), normforge.rms_norm(x, (WIDTH,), weight, eps, weight_offset=offset))


@pytest.mark.parametrize("cls", WEIGHTLESS)
def test_a_norm_without_a_weight(cls: Callable[[], Any]) -> None:
    """In fp64, with another epsilon, and as it is shown."""
    original, patched, x = cls(), cls(), torch.randn(64, 2, WIDTH)
    normforge.patch(patched)
    assert torch.equal(patched(x.double()), original(x.double()))
    original.eps = patched.eps = 0.5
    torch.testing.assert_close(patched(x), original(x))
    assert repr(patched).endswith("(eps=0.5, elementwise_affine=False)")


@pytest.mark.parametrize("make", [models.LlamaRMSNorm, models.NoisyRMSNorm], ids=["Llama", "noisy"])
def test_looking_at_a_module_leaves_no_trace(make: Callable[[], torch.nn.Module]) -> None:
    """No hook of the module runs, its weight keeps its value, and random numbers come as they would have."""
    module = randomised(make())
    weight = module.get_parameter("weight").detach().clone()
    module.register_forward_pre_hook(lambda *_: pytest.fail("the module was called"))
    state = torch.get_rng_state()
    normforge.patch(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(module.get_parameter("weight"), weight)


@pytest.mark.parametrize("shape", [WIDTH, (2, WIDTH)], ids=str)
def test_a_subclass_whose_forward_is_torchs_call(shape: Any) -> None:
    module = models.RenamedLayerNorm(shape)
    x = torch.randn(3, 2, WIDTH)
    wanted = module(x)
    assert [each.new for each in normforge.patch(module).swapped] == [type(module)]
    assert isinstance(module, normforge.LayerNorm)
    torch.testing.assert_close(module(x), wanted)
    normforge.unpatch(module)
    assert type(module) is models.RenamedLayerNorm


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(models.LlamaRMSNorm(), torch.nn.LayerNorm(WIDTH))
    assert len(normforge.patch(model).swapped) == 2


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "on meta by default": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=[name.replace(" ", "_") for name in CONTEXTS])
@each_hugging_face
def test_what_is_found_does_not_depend_on_where_patch_is_called(
    cls: Callable[[], torch.nn.Module], context: Callable[[], AbstractContextManager[object]]
) -> None:
    modules = [cls(), cls()]
    normforge.patch(modules[0])
    with context():
        assert len(normforge.patch(modules[1]).swapped) == 1
    assert type(modules[1]) is type(modules[0]) is not cls
    assert vars(modules[1]).keys() == vars(modules[0]).keys()


@pytest.mark.parametrize("action", ["always", "error"])
def test_what_a_forward_warns_of_on_trial_is_not_the_callers(action: Any) -> None:
    """Torch's RMSNorm warns of a bf16 input beside an fp32 weight: patch took timm's, and left it where that raises."""

    def warning(m: Any, x: torch.Tensor) -> Any:
        if x.dtype != m.weight.dtype:
            warnings.warn(f"x is {x.dtype} and the weight {m.weight.dtype}", stacklevel=2)
        return llama(m, x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        assert len(normforge.patch(norm(warning)()).swapped) == 1
    assert not caught


@pytest.mark.gpu
@each_hugging_face
def test_a_gpu_by_default(cls: Callable[[], torch.nn.Module]) -> None:
    torch.set_default_device("cuda")
    try:
        module = randomised(cls())
        x = torch.randn(4, WIDTH)
        wanted = module(x)
        assert len(normforge.patch(module).swapped) == 1
        torch.testing.assert_close(module(x), wanted)
        assert module(x).device.type == "cuda"
    finally:
        torch.set_default_device(None)


def test_another_default_type() -> None:
    module = models.LlamaRMSNorm()
    torch.set_default_dtype(torch.float64)
    try:
        assert len(normforge.patch(module).swapped) == 1
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("cls", KEYWORD, ids=["Llama", "T5"])
def test_the_input_by_its_own_name(cls: Callable[[], torch.nn.Module]) -> None:
    module = randomised(cls())
    x = torch.randn(2, WIDTH)
    wanted = module(hidden_states=x)
    normforge.patch(module)
    torch.testing.assert_close(module(hidden_states=x), wanted)
    assert torch.equal(module(hidden_states=x), module(x))
    for positional, named in (((), {"input": x}), ((), {}), ((x,), {"hidden_states": x}), ((x,), {"gate": x})):
        with pytest.raises(TypeError, match="takes one tensor, by position or as hidden_states"):
            module(*positional, **named)


@pytest.mark.parametrize(
    ("cls", "name", "argument"),
    [(KEYWORD[0], "variance_epsilon", "hidden_states"), (models.EpsRMSNorm, "eps", "x")],
)
def test_compiled_with_a_changed_epsilon(cls: Callable[[], torch.nn.Module], name: str, argument: str) -> None:
    module = randomised(cls())
    normforge.patch(module)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    x = torch.randn(2, WIDTH)
    for epsilon in (1e-6, 0.5):
        setattr(module, name, epsilon)
        torch.testing.assert_close(compiled(**{argument: x}), module(x))


def test_looking_at_a_compiled_forward_compiles_nothing() -> None:
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    class CompiledRMSNorm(models.LlamaRMSNorm):
        forward = torch.compile(models.LlamaRMSNorm.forward, backend=backend)

    module = CompiledRMSNorm()
    assert len(normforge.patch(module).swapped) == 1
    assert not compiled
    normforge.unpatch(module)
    module(torch.randn(2, WIDTH))
    assert compiled


@pytest.mark.parametrize("n", [1, 2, 3, 4097])
def test_norms_of_any_width(n: int) -> None:
    module = models.LlamaRMSNorm(n)
    assert len(normforge.patch(module).swapped) == 1
    detaching = models.DetachingRMSNorm(n)
    assert "the gradient of its forward" in normforge.patch(detaching).skipped[0].reason


def test_another_rounding_asked_for_later_is_refused() -> None:
    """What a second call asks for is not ignored where the first call decided otherwise."""
    model = torch.nn.Sequential(models.LlamaRMSNorm(), torch.nn.LayerNorm(WIDTH))
    normforge.patch(model)
    (skipped,) = normforge.patch(model, cast_before_weight=False).skipped
    assert skipped.path == "0"
    assert "patched with cast_before_weight=True before; unpatch it first" in skipped.reason
    normforge.unpatch(model)
    assert not normforge.patch(model, cast_before_weight=False).skipped
    assert normforge.patch(model, cast_before_weight=False) == normforge.Patch((), ())


def test_threads_that_patch_one_model() -> None:
    """Each module is swapped once, and keeps what it was."""
    model = torch.nn.Sequential(*(models.LlamaRMSNorm() for _ in range(8)))
    start = threading.Barrier(4)

    def patched(_: int) -> int:
        start.wait()
        return len(normforge.patch(model).swapped)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(patched, range(4))) == 8
    normforge.unpatch(model)
    assert {type(module) for module in model} == {models.LlamaRMSNorm}


@pytest.mark.parametrize("name", ["variance_epsilon", "eps"])
def test_epsilon_may_be_changed_afterwards(name: str) -> None:
    module = randomised(models.LlamaRMSNorm())
    if name == "eps":
        module = randomised(models.EpsRMSNorm())
    original = copy.deepcopy(module)
    normforge.patch(module)
    x = torch.randn(2, WIDTH)
    for epsilon in (0.5, 2.0):
        for each in (module, original):
            setattr(each, name, epsilon)
        torch.testing.assert_close(module(x), original(x))
        assert getattr(module, name) == module.eps == epsilon
        assert f"eps={epsilon}" in str(module)
    normforge.unpatch(module)
    assert getattr(module, name) == 2.0
    assert torch.equal(module(x), original(x))


@pytest.mark.parametrize(
    "epsilon", [np.float32(1e-3), np.float64(1e-3), torch.tensor(1e-3), 1], ids=["float32", "float64", "tensor", "int"]
)
def test_an_epsilon_of_any_type_of_number(epsilon: Any) -> None:
    for make in (models.LlamaRMSNorm, models.Qwen2RMSNorm):
        module: Any = make(eps=epsilon)
        original = copy.deepcopy(module)
        assert len(normforge.patch(module).swapped) == 1
        assert module.eps == epsilon
        x = torch.randn(2, WIDTH)
        torch.testing.assert_close(module(x), original(x))


def overridden() -> torch.nn.Module:
    module = torch.nn.LayerNorm(WIDTH)
    module.forward = lambda input: input  # type: ignore[method-assign]  # what the test is about
    return module


def lazy() -> torch.nn.Module:
    module = models.LlamaRMSNorm()
    weight: Any = torch.nn.UninitializedParameter()
    module.weight = weight
    return module


SETTINGS = Namespace(scale=1.0)


def of_a_list(m: Any, kept: list[float] = [1.0]) -> float:  # noqa: B006  # what the test is about
    return kept[0]


def of_settings(m: Any, *, kept: Any = SETTINGS) -> Any:
    return kept.scale


def of_itself(m: Any) -> Any:
    own: Any = of_itself.scale  # type: ignore[attr-defined]  # set below
    return own


vars(of_itself)["scale"] = 1.0
ONE = 1.0


def of_a_global(m: Any) -> float:
    return ONE


def enclosed(scale: float) -> Callable[[Any], float]:
    return lambda m: scale


# Ways to read a number that is 1 now, each with a name that the report holds.
READ: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a helper's global": (lambda m: of_a_global(m), "ONE"),
    "a helper's global, in a generator": (lambda m: sum(of_a_global(each) for each in (m,)), "ONE"),
    "a factor": (lambda m: m.multiplier, "multiplier"),
    "a bound, of its class": (lambda m: m.bound, "bound"),
    "a factor of a config": (lambda m: m.config.scale, "config"),
    "a class's attribute": (lambda m: models.GlobalRMSNorm.scale, "models.GlobalRMSNorm.scale"),
    "its class's attribute": (lambda m: m.__class__.scale, "__class__.scale"),
    "its type's attribute": (lambda m: type(m).scale, "type"),
    "another module's global": (lambda m: models.SCALE, "models.SCALE"),
    "a module in a variable": (lambda m: getattr(models, "SCALE"), "models"),  # noqa: B009  # what the test is about
    "a default": (lambda m: of_a_list(m), "of_a_list"),
    "a method's default": (lambda m: m.of_a_list(), "of_a_list"),
    "a keyword's default": (of_settings, "factor"),
    "a closure": (enclosed(1.0), "scale"),
    "a function's attribute": (of_itself, "of_itself.scale"),
    "a partial": (lambda m: PARTIAL(m), "PARTIAL"),
    "the environment": (lambda m: float(os.environ.get("SCALE", 1)), "os.environ.get"),
    "the environment, by a function": (lambda m: float(os.getenv("SCALE", 1)), "environ.get"),
    "a flag of torch's": (lambda m: 2 if torch.backends.cudnn.benchmark else 1, "torch.backends.cudnn.benchmark"),
    "the default dtype": (lambda m: 1 if torch.get_default_dtype() is torch.float32 else 2, "torch.get_default_dtype"),
    "autocast": (lambda m: 1 if torch.is_autocast_enabled("cpu") else 1.0, "torch.is_autocast_enabled"),
    "a global that it imports": (lambda m: __import__("tests.nn.models").nn.models.SCALE, "__import__"),
}
PARTIAL: Any = partial(max, 1.0, key=lambda each: 1)


@pytest.mark.parametrize("case", READ.values(), ids=[name.replace(" ", "_") for name in READ])
@pytest.mark.parametrize("base", [models.LlamaRMSNorm, models.RenamedLayerNorm])
def test_what_may_change_unseen_is_not_read(base: Any, case: tuple[Callable[[Any], Any], str]) -> None:
    factor, name = case

    class Reading(base):  # type: ignore[misc]  # a parameter
        scale, bound, config, of_a_list = 1.0, 1.0, SETTINGS, of_a_list

        def __init__(self) -> None:
            super().__init__(WIDTH)
            self.multiplier = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x if factor(self) == 1 else 2 * x)
            return y

    module = Reading()
    ((_, _, reason),) = normforge.patch(module).skipped
    assert re.fullmatch(
        rf"its forward reads (\w.*, )?{re.escape(name)}(, .*)?, and ours would not see that change", reason
    )
    assert type(module) is Reading


def misplaced(m: Any, x: torch.Tensor) -> Any:
    """Add the epsilon outside the root, which shows only where x is small."""
    wide = x.float()
    return m.weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + m.variance_epsilon)).to(x.dtype)


def of_fixed_epsilon(m: Any, x: torch.Tensor) -> Any:
    return m.weight * functional.rms_norm(x.float(), x.shape[-1:], eps=m.fixed).to(x.dtype)


def of_another_epsilon(m: Any, x: torch.Tensor) -> Any:
    return functional.layer_norm(x, m.normalized_shape, m.weight, m.bias, 1e-3)


def in_fp16(m: Any, input: torch.Tensor) -> Any:
    x, weight, bias = (each.half() for each in (input, m.weight, m.bias))
    return functional.layer_norm(x, m.normalized_shape, weight, bias, m.eps).to(input.dtype)


def with_a_bias(m: Any, x: torch.Tensor) -> Any:
    """Normalise as minimal GPTs do."""
    return functional.layer_norm(x, (WIDTH,), m.weight, m.bias)


def detaching(m: Any, x: torch.Tensor) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.detach().pow(2).mean(-1, keepdim=True) + m.eps)).type_as(x)


def optionally_weighted(m: Any, x: torch.Tensor) -> Any:
    """Say by a flag whether there is a weight, as Gemma4's."""
    h = m.factor(x)
    return (h * m.weight.float() if m.with_scale else h).to(x.dtype)


SKIPPED: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "weight offset": (models.HalfOffsetRMSNorm, "computes something else"),
    "rounded offset": (norm(lambda m, x: (m.factor(x) * (1 + m.weight)).to(x.dtype)), "computes something else"),
    "eps elsewhere": (norm(misplaced), "computes something else"),
    "rounded twice": (norm(lambda m, x: (m.weight * m.factor(x).to(x.dtype)).to(x.dtype)), "computes something else"),
    "two inputs": (norm(lambda m, x, gate: m.weight * m.factor(x * gate).to(x.dtype)), "its forward takes (x"),
    "perhaps two inputs": (norm(lambda m, x, gate=None: llama(m, x if gate is None else x * gate)), "gate=None"),
    "noise in training": (models.NoisyRMSNorm, "sqrt(mean(x**2) + eps) in training"),
    "two orders": (
        norm(lambda m, x: llama(m, x) if m.training else olmo2(m, x)),
        "rounds elsewhere in training than in evaluation",
    ),
    "buffer": (models.CountingRMSNorm, "holds buffers (calls)"),
    "list": (
        models.reading(lambda m: m.seen.append(0) or 1, seen=[]),
        "its forward reads seen, and ours would not see",
    ),
    "in place": (norm(lambda m, x: x.copy_(m.factor(x)) * m.weight), "writes to its input"),
    "own gradient": (models.DetachingRMSNorm, "the gradient of its forward is not that of"),
    "epsilon read once": (norm(of_fixed_epsilon, fixed=1e-6), "does not read its epsilon from variance_epsilon"),
    "own call": (models.CallingRMSNorm, "CallingRMSNorm has its own __call__"),
    "mixed in": (models.WrappedRMSNorm, "WrappedRMSNorm is also a _Mixin"),
    "own module": (
        norm(lambda m, x: m.activation(llama(m, x)), activation=torch.nn.Identity()),
        "holds modules (activation)",
    ),
    "no shape yet": (lazy, "its weight has no shape yet"),
    "bias": (models.BiasedRMSNorm, "lacks a 1-D weight as its only parameter"),
    "eps unnamed": (models.NamelessEpsilonRMSNorm, "variance_epsilon or eps"),
    "subclass": (lambda: models.ScaledLayerNorm(WIDTH), "ScaledLayerNorm is a subclass of torch's"),
    "fp16 within": (lambda: norm(in_fp16, torch.nn.LayerNorm)(WIDTH), "OwnNorm is a subclass of torch's"),
    "fixed epsilon": (lambda: norm(of_another_epsilon, torch.nn.LayerNorm)(WIDTH), "OwnNorm is a subclass of torch's"),
    "own class": (norm(with_a_bias, models.BiasedRMSNorm), "it lacks a 1-D weight as its only parameter"),
    "channels first": (lambda: models.ChannelRMS_norm(WIDTH), "it lacks a 1-D weight as its only parameter"),
    "L2 clipped": (norm(lambda m, x: l2(m, x.clamp(-1e4, 1e4)), models.L2Norm), "very large or small numbers"),
    "L2 with a gradient of its own": (norm(detaching, models.L2Norm), "the gradient of its forward is not that of"),
    "L2 scaled": (norm(lambda m, x: l2(m, x) * 0.5, models.L2Norm), "its forward computes something else than"),
    "nameless": (
        lambda: norm(models.ChannelRMS_norm.forward, models.ChannelRMS_norm)(WIDTH),
        "it lacks a 1-D weight as its only parameter",
    ),
    "own forward": (overridden, "overridden on the instance"),
    "clipped input": (norm(lambda m, x: llama(m, x.clamp(-65504, 65504))), "very large or small numbers"),
    "narrowly clipped input": (norm(lambda m, x: llama(m, x.clamp(-1e4, 1e4))), "very large or small numbers"),
    "clipped output": (norm(lambda m, x: llama(m, x).clamp(-65504, 65504)), "very large or small numbers"),
    "finite input": (norm(lambda m, x: llama(m, torch.nan_to_num(x))), "it may clip them"),
    "finite output": (norm(lambda m, x: torch.nan_to_num(llama(m, x))), "it may clip them"),
    "a factor in a dict": (models.reading(lambda m: m.kept["scale"], kept={"scale": 1.0}), "its forward reads kept"),
    "a factor in a tuple": (models.reading(lambda m: m.kept[0], kept=(1.0,)), "its forward reads kept"),
    "a factor in a list": (models.reading(lambda m: m.kept[0], kept=[1.0]), "its forward reads kept"),
    "factors of its module": (models.GlobalRMSNorm, "its forward reads SCALE, SCALES, and"),
    "a factor of its gradient": (models.GradientScalingRMSNorm, "its forward reads SCALE, and"),
    "a flag": (models.reading(lambda m: 2 if m.doubles else 1, doubles=False), "its forward reads doubles"),
    "a size": (models.reading(lambda m: m.size / m.weight.numel(), size=WIDTH), "its forward reads size"),
    "a bound that decides": (models.reading(lambda m: 1 if m.least > 0 else 0, least=1.0), "its forward reads least"),
    "a word": (models.reading(lambda m: 1 if m.kind == "rms" else 0, kind="rms"), "its forward reads kind"),
    "negative epsilon": (lambda: torch.nn.LayerNorm(WIDTH, eps=-0.1), "its eps is -0.1, and kernels take a finite"),
    "negative epsilon of an RMSNorm": (lambda: torch.nn.RMSNorm(WIDTH, eps=-0.1), "its eps is -0.1"),
    "negative epsilon of a GroupNorm": (lambda: torch.nn.GroupNorm(4, WIDTH, eps=-0.1), "its eps is -0.1"),
    "negative epsilon of Llama's": (lambda: models.LlamaRMSNorm(eps=-1e-6), "its variance_epsilon is -1e-06"),
    "double": (lambda: torch.nn.RMSNorm(WIDTH, dtype=torch.float64), "parameters in torch.float64"),
}


def test_what_the_garbage_collector_calls_is_no_part_of_a_forward() -> None:
    """JAX's callback and hypothesis's read variables of their modules, whenever a collection begins."""
    thresholds = gc.get_threshold()
    gc.callbacks.append(lambda phase, info: print(end=phase[SETTINGS.scale > 0 :][:0]))
    gc.set_threshold(1)
    try:
        assert normforge.patch(torch.nn.Sequential(models.LlamaRMSNorm())).swapped
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.pop()


@pytest.mark.parametrize(("library", "times"), [("some_library", 1), ("typing_extensions", 99)])
def test_what_torch_calls_on_the_way_is_no_part_of_a_backward_pass(
    library: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first backward passes torch 2.11 looks types up, for which typing_extensions reads its variables."""
    inside: dict[str, Any] = {"__name__": library, "calls": []}
    exec("def read(): calls.append(0)", inside)
    around = {**inside, "__name__": "torch.autograd", "grad": torch.autograd.grad, "times": times}
    exec("def first(*args, **options): len(calls) < times and read(); return grad(*args, **options)", around)
    monkeypatch.setattr(torch.autograd, "grad", around["first"])
    assert normforge.patch(torch.nn.Sequential(models.LlamaRMSNorm())).swapped
    assert inside["calls"]


@pytest.mark.parametrize("case", SKIPPED.values(), ids=[name.replace(" ", "_") for name in SKIPPED])
def test_what_is_not_known_is_left_alone_and_reported(case: tuple[Callable[[], torch.nn.Module], str]) -> None:
    make, reason = case
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), make())
    cls, attributes = type(model[1]), copy.copy(vars(model[1]))
    contents = {name: copy.deepcopy(value) for name, value in attributes.items() if isinstance(value, list)}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    result = normforge.patch(model)
    assert {name: vars(model[1])[name] for name in contents} == contents
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert not result.swapped
    ((path, skipped, why),) = result.skipped
    assert (path, skipped) == ("1", cls)
    assert reason in why
    assert type(model[1]) is cls
    assert dict(vars(model[1])) == attributes


HALVES = (torch.float16, torch.bfloat16)
_accelerator_available = False


def one_of(m: Any, one: int = 1) -> int:
    return max([one, *(one for _ in range(2))])


TAKEN = {
    "the length of rows": models.reading(
        lambda m: functional.rms_norm(m.weight, (m.size,)).isnan().logical_not(), size=WIDTH
    ),
    "the shape of rows": models.reading(
        lambda m: functional.rms_norm(m.weight, m.shape).isnan().logical_not(), shape=(WIDTH,)
    ),
    "a flag that changes nothing": models.reading(lambda m: 1.0 if m.fast else 1, fast=False),
    "a flag that says whether there is a weight": norm(optionally_weighted, with_scale=True),
    "what is None": models.reading(lambda m: 1 if m.groups is None else 0, groups=None),
    "constants of a library": models.reading(lambda m: 1 if math.pi < torch.inf and HALVES else 0),
    "a helper without state": models.reading(lambda m: sum(one_of(m) for _ in range(1))),
    "what is installed": models.reading(lambda m: 2 if _accelerator_available else 1),
    "what it does not read": models.reading(lambda m: 1, config=Namespace(scale=1.0), scale=2.0, kept=[1.0]),
}


@pytest.mark.parametrize("make", TAKEN.values(), ids=[name.replace(" ", "_") for name in TAKEN])
def test_what_changes_no_result_may_be_read(make: Callable[[], torch.nn.Module]) -> None:
    module = make()
    assert len(normforge.patch(module).swapped) == 1


@pytest.mark.parametrize(
    "model", [None, torch.nn.LayerNorm, [torch.nn.LayerNorm(WIDTH)]], ids=["None", "class", "list"]
)
@pytest.mark.parametrize("function", [normforge.patch, normforge.unpatch], ids=["patch", "unpatch"])
def test_what_is_no_module_is_refused(function: Callable[[Any], Any], model: Any) -> None:
    with pytest.raises(normforge.errors.DTypeError, match=f"^model is a {type(model).__name__}; it takes a torch.nn.M"):
        function(model)


def test_what_is_no_norm_is_not_reported() -> None:
    plain = [torch.nn.Linear(4, 4), torch.nn.InstanceNorm1d(4), torch.nn.BatchNorm1d(4), torch.nn.PReLU(4)]
    # Called after the norm that it lacks, or that it computes scales for; and a weight of one dimension.
    named = [
        norm(lambda m, x: m.conv(x), torch.nn.Module, "NoLayerNormConvLayer", conv=torch.nn.Conv1d(4, 4, 1)),
        norm(lambda m, x: m.linear(x), torch.nn.Module, "AdaLayerNormSingle", linear=torch.nn.Linear(4, 24)),
        norm(lambda m, x: x * m.gamma, torch.nn.Module, "LayerScale", gamma=torch.nn.Parameter(torch.ones(4))),
    ]
    model = torch.nn.Sequential(*plain, *(cls() for cls in named))
    assert normforge.patch(model) == normforge.Patch((), ())


def test_a_norm_is_taken_whatever_its_class_is_called() -> None:
    """As SwitchTransformersLayerNorm, whose formula is that of T5LayerNorm."""

    class SwitchLayerNorm(models.T5LayerNorm):
        pass

    class Rescaling(models.LlamaRMSNorm):
        pass

    model = torch.nn.Sequential(SwitchLayerNorm(), Rescaling())
    assert [swapped.old for swapped in normforge.patch(model).swapped] == [SwitchLayerNorm, Rescaling]


def test_autocast_of_a_patched_model() -> None:
    model: Any = Transformer()
    tokens = torch.randint(17, (2, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = model(tokens)
        normforge.patch(model)
        actual = model(tokens)
    assert actual.dtype == wanted.dtype
    torch.testing.assert_close(actual, wanted, rtol=5e-2, atol=5e-2)


class Doubled(torch.nn.Module):
    """A parametrisation."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("unpatched", ["while parametrised", "afterwards"])
@pytest.mark.parametrize("make", [lambda: torch.nn.LayerNorm(WIDTH), models.LlamaRMSNorm], ids=["torch", "Llama"])
def test_parametrising_a_patched_norm(make: Callable[[], torch.nn.Module], unpatched: str) -> None:
    """The class that torch derives from ours stays what it is, on the class that was there before patch."""
    model = torch.nn.Sequential(randomised(make()))
    cls, x = type(model[0]), torch.randn(2, WIDTH)
    wanted, keys = model(x), list(model.state_dict())
    normforge.patch(model)
    parametrize.register_parametrization(model[0], "weight", Doubled())
    assert isinstance(model[0], cls)
    twice = model(x)
    if cls is models.LlamaRMSNorm:
        # By the forward that it had, which takes other dtypes than its weight's.
        torch.testing.assert_close(model(x.double()), twice.double(), rtol=1e-5, atol=1e-5)
    if unpatched == "while parametrised":
        (swapped,) = normforge.unpatch(model)
        assert swapped.new is type(model[0])
        assert type(model[0]).__bases__ == (cls,)
        assert parametrize.is_parametrized(model[0], "weight")
        for each in (model, copy.deepcopy(model)):
            torch.testing.assert_close(each(x), twice)
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
    normforge.unpatch(model)
    assert type(model[0]) is cls
    assert torch.equal(model(x), wanted)
    assert sorted(model.state_dict()) == sorted(keys)


def test_unpatching_leaves_fully_shard_in_place(mesh: DeviceMesh) -> None:
    model = Transformer()
    tokens = torch.randint(17, (2, 5))
    wanted = model(tokens).detach()
    done = normforge.patch(model, fuse=False).swapped
    norms, classes = [swapped.path for swapped in done], [swapped.old for swapped in done]
    for path in norms:
        fully_shard(model.get_submodule(path), mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert normforge.patch(model, fuse=False) == normforge.Patch((), ())
    assert len(normforge.unpatch(model)) == len(norms)
    for path, cls in zip(norms, classes, strict=True):
        module = model.get_submodule(path)
        assert isinstance(module, FSDPModule)
        assert type(module).__bases__ == (FSDPModule, cls)
        module.unshard()
        module.reshard()
    # Modules that shared a class do so still.
    assert len({type(model.get_submodule(path)) for path in norms}) == 2
    actual = model(tokens)
    torch.testing.assert_close(actual, wanted)
    actual.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_norm_under_fully_shard_is_reported(mesh: DeviceMesh) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), models.LlamaRMSNorm())
    for module in model:
        fully_shard(module, mesh=mesh)
    assert [skipped.path for skipped in normforge.patch(model).skipped] == ["0", "1"]
    assert all(isinstance(module, FSDPModule) for module in model)


class Derived(normforge.LayerNorm):
    """Somebody's own class, derived from ours."""


def replaced(module: torch.nn.Module) -> None:
    module.__class__ = torch.nn.Identity


def derived(module: torch.nn.Module) -> None:
    module.__class__ = Derived


def wrapped(module: torch.nn.Module) -> None:
    inner = module.forward
    module.forward = lambda *inputs: inner(*inputs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced, r"1, which patch made a LayerNorm of a LayerNorm, is a Identity now, which is none"),
        (derived, r"is a Derived now, a class that is derived from LayerNorm in its text"),
        (wrapped, r"has had its forward overridden on the instance since"),
    ],
)
def test_what_was_changed_otherwise_is_not_unpatched(change: Callable[[torch.nn.Module], None], reason: str) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH))
    normforge.patch(model)
    change(model[1])
    before = [dict(vars(module)) for module in model]
    with pytest.raises(normforge.errors.PatchError, match=reason):
        normforge.unpatch(model)
    assert type(model[0]) is normforge.LayerNorm
    assert [dict(vars(module)) for module in model] == before


def test_modules_of_one_class_of_ours_become_what_each_was() -> None:
    model = torch.nn.Sequential(models.LlamaRMSNorm(), models.Olmo2RMSNorm(), models.Qwen2RMSNorm())
    classes = [type(module) for module in model]
    normforge.patch(model)
    assert all(isinstance(module, normforge.RMSNorm) for module in model)
    normforge.unpatch(model)
    assert [type(module) for module in model] == classes


ENCODERS: dict[str, tuple[dict[str, Any], bool]] = {
    "batch first": ({"batch_first": True}, True),
    "norm first": ({"batch_first": True, "norm_first": True}, True),
    "gelu": ({"batch_first": True, "activation": "gelu"}, True),
    "sequence first": ({}, False),
    "odd heads": ({"batch_first": True, "nhead": 1}, False),
    "no bias": ({"batch_first": True, "bias": False}, False),
    "silu": ({"batch_first": True, "activation": functional.silu}, False),
}


@pytest.mark.parametrize("case", ENCODERS.values(), ids=[name.replace(" ", "_") for name in ENCODERS])
def test_encoder_layers_that_pass_their_norms_by_are_reported(
    case: tuple[dict[str, Any], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly those whose norms torch does not call in evaluation without gradients."""
    flags, expected = case
    model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(WIDTH, **{"nhead": 2} | flags)).eval()
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        wanted = model(x)
    result = normforge.patch(model, fuse=False)
    assert len(result.swapped) == 2
    assert [(bypassed.path, bypassed.cls) for bypassed in result.bypassed] == (
        [("0", torch.nn.TransformerEncoderLayer)] if expected else []
    )
    calls: list[str] = []
    forward = normforge.LayerNorm.forward

    def counting(self: normforge.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        calls.append("")
        return forward(self, x)

    monkeypatch.setattr(normforge.LayerNorm, "forward", counting)
    with torch.no_grad():
        torch.testing.assert_close(model(x), wanted)
    assert len(calls) == (0 if expected else 2)
    if expected:
        assert "torch.backends.mha.set_fastpath_enabled(False)" in result.bypassed[0].reason
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad():
                torch.testing.assert_close(model(x), wanted)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        assert len(calls) == 2
    normforge.unpatch(model)
    assert normforge.unpatch(model) == ()


def test_a_patched_norm_is_printed_as_ours() -> None:
    """Else it would be torch's to the character, in models and in what patch returns."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.RMSNorm(WIDTH), torch.nn.GroupNorm(2, WIDTH))
    unpatched = [repr(norm) for norm in model]
    done = normforge.patch(model)
    assert [repr(norm) for norm in model] == [f"normforge.{norm}" for norm in unpatched]
    assert [line.split(" -> ")[1] for line in str(done).splitlines()] == [
        f"normforge.{type(norm).__name__} [{at}]" for at, norm in enumerate(model)
    ]

    class Own(normforge.LayerNorm):
        """A user's."""

    assert repr(Own(WIDTH)) == unpatched[0].replace("LayerNorm", "Own")
    # Of a graph it becomes a class's name, and of torch's errors a part.
    norm: Any = model[0]
    assert norm._get_name() == "LayerNorm"
    normforge.unpatch(model)
    assert [repr(norm) for norm in model] == unpatched


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("_hf_hook", r"accelerate\.hooks\.remove_hook_from_module"),
        ("_diffusers_hook", r"remove_hook\(name\) of each module's _diffusers_hook"),
        ("other", r"take it away first: del module\.forward$"),
    ],
)
def test_unpatch_names_the_library_whose_hook_is_there(name: str, fix: str) -> None:
    module = torch.nn.LayerNorm(WIDTH)
    normforge.patch(module)
    wrapped(module)
    setattr(module, name, object())
    with pytest.raises(normforge.errors.PatchError, match=fix):
        normforge.unpatch(module)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_norm_in_fp32_is_taken(dtype: torch.dtype, weight: torch.dtype) -> None:
    """As FP32LayerNorm of diffusers: kernels compute in fp32, and round once, to the dtype of x."""
    module = randomised(models.WideLayerNorm(WIDTH)).to(weight)
    ours, x = copy.deepcopy(module), torch.randn(64, WIDTH).to(dtype)
    assert [swapped.old for swapped in normforge.patch(ours).swapped] == [models.WideLayerNorm]
    assert isinstance(ours, (normforge.LayerNorm, models.WideLayerNorm))
    assert ours(x).dtype is module(x).dtype is dtype
    torch.testing.assert_close(ours(x), module(x))
