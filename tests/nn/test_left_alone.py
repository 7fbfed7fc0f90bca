"""Norms that `patch` leaves alone, the reasons in its reports, and what the trial of a forward may not read."""

from __future__ import annotations

import copy
import functools
import gc
import math
import os
import re
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

import normforge
from normforge.errors import InvarianceError
from normforge.families.group import row
from normforge.patching.calling import CallingNorm
from normforge.patching.huggingface import HuggingFaceGatedRMSNorm, HuggingFaceLayerNorm

from ..calling import table_at
from . import models
from .decoders import LlamaLayer
from .models import WIDTH, BiasedRMSNorm, Make, assert_same_results, norm, noted, randomised, twins, written
from .test_forms import ByFunction, Parts, Plainly, form, modulated

llama, olmo2, l2 = (cls.forward for cls in (models.LlamaRMSNorm, models.Olmo2RMSNorm, models.L2Norm))


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
ONE, ONES = 1.0, [1.0]


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
    "a class's attribute": (lambda m: 2 if models.RenamedLayerNorm.fast else 1, "models.RenamedLayerNorm.fast"),
    "its class's attribute": (lambda m: m.__class__.scale, "__class__.scale"),
    "its type's attribute": (lambda m: type(m).scale, "type"),
    "another module's global": (lambda m: 1 if models.WIDTH else 2, "models.WIDTH"),
    "a module in a variable": (lambda m: getattr(models, "WIDTH") and 1, "models"),  # noqa: B009  # what the test is about
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
    "a global that it imports": (lambda m: __import__("tests.nn.models").nn.models.WIDTH and 1, "__import__"),
}
PARTIAL: Any = partial(max, 1.0, key=lambda each: 1)


@pytest.mark.parametrize("case", READ.values(), ids=[name.replace(" ", "_") for name in READ])
@pytest.mark.parametrize("base", [models.LlamaRMSNorm, models.RenamedLayerNorm])
def test_what_may_change_unseen_is_not_read(base: Any, case: tuple[Callable[[Any], Any], str]) -> None:
    factor, name = case

    class Reading(base):  # type: ignore[misc]  # a parameter
        scale, bound, config, of_a_list = 1.0, 1.0, SETTINGS, of_a_list

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x if factor(self) == 1 else 2 * x)

    module = Reading(WIDTH)
    module.multiplier = 1.0
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
    wide = x.float()
    return m.weight * (wide * (wide.pow(2).mean(-1, keepdim=True) + m.fixed).rsqrt()).to(x.dtype)


def detached(m: Any, x: torch.Tensor) -> Any:
    """Take the mean square for constant in the gradient."""
    scale = (x.float().pow(2).mean(-1, keepdim=True) + m.variance_epsilon).rsqrt().detach()
    return m.weight * (x.float() * scale).to(x.dtype)


def of_globals(m: Any, x: torch.Tensor) -> Any:
    return llama(m, x) * ONE * ONES[0]


class ScaledGradient(torch.autograd.Function):
    """The identity, whose backward pass reads a global."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * ONE


def scaling_the_gradient(m: Any, x: torch.Tensor) -> Any:
    return llama(m, ScaledGradient.apply(x))  # type: ignore[no-untyped-call]  # as torch ships it


class Calling(models.LlamaRMSNorm):
    """Does something around its forward."""

    def __call__(self, x: torch.Tensor) -> Any:
        return 2 * super().__call__(x)


class MixedIn(ContextDecorator, models.LlamaRMSNorm):
    """Is another thing besides."""


def named_otherwise(m: Any, x: torch.Tensor) -> Any:
    return m.weight * (x * (x.pow(2).mean(-1, keepdim=True) + m.epsilon).rsqrt())


def channels_first(m: Any, x: torch.Tensor) -> Any:
    """Normalise over the second dimension, as autoencoders of videos do."""
    return x / x.norm(dim=1, keepdim=True) * x.shape[1] ** 0.5 * m.gamma


def written_out(m: Any, x: torch.Tensor) -> Any:
    """Compute LayerNorm in x's dtype throughout."""
    h = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + m.eps)
    return h * m.weight + m.bias


def noisy(m: Any, x: torch.Tensor) -> Any:
    return llama(m, x) + 0.1 * torch.randn(x.shape) if m.training else llama(m, x)


def optionally_weighted(m: Any, x: torch.Tensor) -> Any:
    """Say by a flag whether there is a weight, as Gemma4's."""
    h = m.factor(x)
    return (h * m.weight.float() if m.with_scale else h).to(x.dtype)


WEIGHT, GAMMA = (torch.nn.Parameter(torch.ones(shape)) for shape in ((WIDTH,), (WIDTH, 1, 1)))

SKIPPED: dict[str, tuple[Make, str]] = table_at(Path(__file__).with_name("left_alone.yaml"), globals())


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
def test_what_is_not_known_is_left_alone_and_reported(case: tuple[Make, str]) -> None:
    make, reason = case
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), make())
    cls, attributes = type(model[1]), copy.copy(vars(model[1]))
    contents = {name: copy.deepcopy(value) for name, value in attributes.items() if isinstance(value, list)}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    random = torch.get_rng_state()
    result = normforge.patch(model)
    assert torch.equal(torch.get_rng_state(), random)
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
def test_what_changes_no_result_may_be_read(make: Make) -> None:
    assert len(normforge.patch(make()).swapped) == 1


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


def test_looking_at_a_compiled_forward_compiles_nothing() -> None:
    counter = CompileCounter()
    module = norm(torch.compile(llama, backend=counter))()
    assert len(normforge.patch(module).swapped) == 1
    assert counter.frame_count == 0
    normforge.unpatch(module)
    module(torch.randn(2, WIDTH))
    assert counter.frame_count == 1


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


# Two branches modulate the result of one norm.
InBranches = modulated(
    "InBranches",
    "if self.training:",
    "    return self.last(modulate(self.norm(x), shift, scale))",
    "return self.last(self.norm(x) * (1 + scale[:, None]) + shift[:, None])",
)


def test_what_patch_did_is_a_table() -> None:
    made = (LlamaLayer, BiasedRMSNorm, ByFunction, ByFunction, InBranches, Plainly)
    model = torch.nn.ModuleList([make() for make in made])
    assert str(normforge.patch(model)).splitlines() == [
        "swapped  2 x LlamaRMSNorm   -> normforge.LlamaRMSNorm [0.input_layernorm]",
        "swapped  8 x LayerNorm      -> normforge.LayerNorm [2.norm]",
        "fused    1 x LlamaLayer     sums with post_attention_layernorm; gradients of residuals with those of "
        "input_layernorm, post_attention_layernorm [0]",
        "fused    2 x ByFunction     norm with the modulation [2]",
        "fused    1 x InBranches     norm with the modulation [4]",
        "fused    1 x Plainly        norm with the sum behind [5]",
        "skipped  1 x BiasedRMSNorm  it lacks a 1-D weight as its only parameter, or a number under variance_epsilon "
        "or eps [1]",
    ]
    assert str(normforge.patch(torch.nn.Identity())) == "nothing to swap or to fuse"
    assert "sums with post_attention_layernorm; gradients of residuals with those of input_layernorm" in repr(model)
    assert repr(model[4]).count("norm with the modulation") == 1


def decorated_unknown(function: Callable[..., Any]) -> Callable[..., Any]:
    kept = [function]

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return kept[0](*args)

    return wrapper


class Decorated(Parts):
    """Under a decorator that keeps it where nobody looks."""

    @decorated_unknown
    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x + self.part(x))


def without_text() -> Any:
    namespace: dict[str, Any] = {"Parts": Parts}
    text = "class Typed(Parts):\n    def forward(self, x):\n        return self.norm(x + self.part(x))\n"
    exec(compile(text, "<typed>", "exec"), namespace)
    return namespace["Typed"]()


def on_the_instance() -> Any:
    layer: Any = LlamaLayer()
    layer.forward = functools.partial(layer.forward)
    return layer


class PoolFormerLayer(torch.nn.Module):
    """A block whose norms no sum is fused with: transformers' of this name."""

    def __init__(self) -> None:
        super().__init__()
        self.before_norm, self.linear = torch.nn.GroupNorm(1, WIDTH), torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = x + self.linear(self.before_norm(x))
        return total


class ModulesToSaveWrapper(torch.nn.Module):
    """Holds a module and a copy that is trained, as PEFT's does beside adapters."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = torch.nn.ModuleDict({"default": copy.deepcopy(module)})


def wrapped_layer() -> Any:
    layer: Any = LlamaLayer()
    for name in ("input_layernorm", "post_attention_layernorm"):
        setattr(layer, name, ModulesToSaveWrapper(getattr(layer, name)))
    return layer


UNFUSED: dict[str, Callable[[], Any]] = {
    "no norm is called directly behind a sum, or with what is added later": form(
        "x = x * 1", "Unfollowed", "return (x + self.part(self.norm(x * 2))) * 2"
    ),
    "its forward is decorated by Decorated.forward, which is not known": Decorated,
    "the text of its forward cannot be read (OSError: could not get source code)": without_text,
    "its forward is overridden on the instance": on_the_instance,
    "it adds by add(), and patch sees sums written as a + b": form(
        "x = x * 1", "Adding", "return torch.add(x, self.part(self.norm(x)))"
    ),
    # As Bloom's and Falcon's.
    "it adds by dropout_add(), and patch sees sums written as a + b": form(
        "x = x * 1", "AddsInAFunction", "return dropout_add(self.part(self.norm(x)), x)"
    ),
    "before_norm is a GroupNorm, and a sum is fused with a plain LayerNorm or RMSNorm": PoolFormerLayer,
    "input_layernorm is a ModulesToSaveWrapper around norms, and a sum is fused with a norm that the block itself "
    "holds; take the wrapper away before patch (PEFT: merge_and_unload)": wrapped_layer,
}


@pytest.mark.parametrize("reason", UNFUSED)
def test_what_is_left_alone_is_told(reason: str) -> None:
    model = torch.nn.ModuleList([UNFUSED[reason]()])
    cls = type(model[0])
    done = normforge.patch(model)
    assert done.swapped
    assert done.fused == ()
    assert [(each.path, each.cls, each.reason) for each in done.unfused] == [("0", cls, reason)]
    assert type(model[0]) is cls


@pytest.mark.parametrize(
    ("base", "name", "returned", "fused"),
    [
        # The modulation is fused, and no norm is called directly behind the sum.
        (Parts, "Block", "x + self.part(self.norm(x) * (1 + scale) + shift)", ["0"]),
        # Called a norm, it holds one; all that it adds is the modulation.
        (Parts, "AdaLayerNormZero", "self.norm(x) * (1 + scale) + shift", ["0"]),
        (PoolFormerLayer, "Block", "self.before_norm(self.linear(x).sin()) + self.linear(x)", []),
    ],
)
def test_what_is_not_reported(base: Any, name: str, returned: str, fused: list[str]) -> None:
    block = written(base, name, "def forward(self, x, scale, shift):", f"return {returned}", names={})()
    done = normforge.patch(torch.nn.Sequential(block))
    assert [each.path for each in done.fused] == fused
    assert (done.skipped, done.unfused) == ((), ())


class LayerNorm2d(torch.nn.LayerNorm):
    """Normalises channels, which are x's second dimension, as ConvNeXt does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class GroupNorm32(torch.nn.GroupNorm):
    """Computes in fp32, as guided diffusion does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).type(x.dtype)


class ChannelsL2Norm(torch.nn.Module):
    """Divides channels by their L2 norm in fp32 and scales them, as Wan's WanRMS_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.channel_first, self.scale, self.bias = True, WIDTH**0.5, 0.0
        self.gamma = torch.nn.Parameter(torch.ones(WIDTH, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if x.dtype is not torch.float32 else x
        normalized = functional.normalize(wide, dim=(1 if self.channel_first else -1)).to(x.dtype)
        y: torch.Tensor = normalized * self.scale * self.gamma + self.bias
        return y


class MinimalNorm(torch.nn.Module):
    """A LayerNorm with an optional bias, as minimal GPTs have."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


def offset(m: Any, x: torch.Tensor) -> Any:
    return functional.layer_norm(x, m.normalized_shape, m.weight + 1.0, bias=m.bias, eps=m.eps)


def in_fp16(m: Any, input: torch.Tensor) -> Any:
    x, weight, bias = (each.half() for each in (input, m.weight, m.bias))
    return functional.layer_norm(x, m.normalized_shape, weight, bias, m.eps).to(input.dtype)


def transposed(m: Any, x: torch.Tensor) -> Any:
    return torch.nn.LayerNorm.forward(m, x.transpose(1, 2)).transpose(1, 2)


def centred(m: Any, x: torch.Tensor) -> Any:
    """Compute LayerNorm with a weight alone, as Cohere's models do."""
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    return (m.weight.float() * (h * (h.pow(2).mean(-1, keepdim=True) + m.variance_epsilon).rsqrt())).to(x.dtype)


# Norms, the class of ours that they get, and the shape of an x; norms of 16 bits say so.
REPLACED: dict[str, tuple[Make, type, tuple[int, ...]]] = {
    "channels": (lambda: LayerNorm2d(WIDTH), CallingNorm, (2, WIDTH, 3, 2)),
    "channels and columns": (lambda: LayerNorm2d((2, WIDTH)), CallingNorm, (2, WIDTH, 3, 2)),
    "fp32 by super": (lambda: GroupNorm32(4, WIDTH), CallingNorm, (2, WIDTH, 5)),
    "no bias": (MinimalNorm, CallingNorm, (5, WIDTH)),
    "a bias": (lambda: MinimalNorm(bias=True), CallingNorm, (5, WIDTH)),
    "an offset": (lambda: norm(offset, torch.nn.LayerNorm)(WIDTH), CallingNorm, (2, 3, WIDTH)),
    "fp16": (lambda: norm(in_fp16, torch.nn.LayerNorm)(WIDTH), CallingNorm, (5, WIDTH)),
    "torch's method": (lambda: norm(transposed, torch.nn.LayerNorm)(WIDTH), CallingNorm, (2, WIDTH, 3)),
    "L2 norm of channels": (ChannelsL2Norm, CallingNorm, (2, WIDTH, 3, 5)),
    "centred": (norm(centred, models.LlamaRMSNorm), HuggingFaceLayerNorm, (2, 3, WIDTH)),
    "renamed": (lambda: models.RenamedLayerNorm(WIDTH), normforge.LayerNorm, (9, 2, WIDTH)),
    "renamed, of planes": (lambda: models.RenamedLayerNorm((2, WIDTH)), normforge.LayerNorm, (9, 2, WIDTH)),
    # As FP32LayerNorm of diffusers: kernels compute in fp32, and round once, to the dtype of x.
    "fp32": (lambda: models.WideLayerNorm(WIDTH), normforge.LayerNorm, (9, WIDTH)),
    "fp32, of bf16": (lambda: models.WideLayerNorm(WIDTH).bfloat16(), normforge.LayerNorm, (9, WIDTH)),
}
each_taken = pytest.mark.parametrize("name", REPLACED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_taken
def test_results_and_gradients_stay(name: str, dtype: torch.dtype) -> None:
    make, ours, shape = REPLACED[name]
    original, patched = twins(randomised(make()))
    assert isinstance(patched, ours)
    assert isinstance(patched, type(original))
    x = torch.randn(shape).to(dtype)
    is_rounded = dtype is torch.bfloat16 or name.endswith("16")
    assert_same_results(patched, original, x, tolerance=2e-2 if is_rounded else 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert patched(x).dtype == original(x).dtype


@each_taken
def test_kernels_compute_them_and_compiled_code_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, _, shape = REPLACED[name]
    original, patched = twins(randomised(make()))
    x, seen = torch.randn(shape), []
    torch._dynamo.reset()
    for module in (original, patched):
        counter = CompileCounter()
        compiled: Any = torch.compile(module, backend=counter, fullgraph=True)
        torch.testing.assert_close(compiled(x), original(x))
        seen.append(counter.op_count)
    assert seen[0] == seen[1] or not isinstance(patched, CallingNorm)
    # torch's own functions are not called.
    for function in ("layer_norm", "rms_norm", "group_norm"):
        monkeypatch.setattr(torch, function, None)
    monkeypatch.setattr(functional, "normalize", None)
    if isinstance(patched, CallingNorm):
        patched(x)
        with pytest.raises(TypeError, match="not callable"):
            original(x)


def test_permuted_channels_are_normalised_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous images stay so, where torch's forward returns a permuted tensor."""
    calls = noted(monkeypatch, row, "launched_backward")
    for name in ("channels", "torch's method"):
        make, _, shape = REPLACED[name]
        _, patched = twins(randomised(make()))
        x = torch.randn(shape, requires_grad=True)
        y = patched(x)
        y.sum().backward()
        assert y.is_contiguous()
        assert calls[-1][0][0].saved[0].data_ptr() == x.data_ptr()
    assert len(calls) == 2


def test_batch_invariance_is_kept_or_refused() -> None:
    modules = [randomised(make()) for make in (MinimalNorm, models.LlamaRMSNorm, GATED["gated first"])]
    x = torch.randn(9, WIDTH)
    for module, kept, refused in zip(modules, (x, x, None), (x.double(), x.double(), x), strict=True):
        normforge.patch(module)
        with normforge.batch_invariant():
            assert kept is None or torch.equal(module(kept)[:1], module(kept[:1]))
            with pytest.raises(InvarianceError):
                module(refused)


# Gated norms


def gated(m: Any, x: torch.Tensor, gate: torch.Tensor) -> Any:
    """Multiply behind the norm, whose rows are rounded before the weight, as in Qwen3-Next."""
    return (llama(m, x) * ACTIVATIONS[m.activation](gate.float())).to(x.dtype)


def gated_once(m: Any, x: torch.Tensor, gate: Any = None) -> Any:
    """Round once, as Kimi's linear attention does."""
    return (m.weight.float() * m.factor(x) * ACTIVATIONS[m.activation](gate.float())).to(x.dtype)


def gated_first(m: Any, x: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
    """Multiply first, and normalise groups of columns, as in Mamba2."""
    h = x.float() if gate is None else x.float() * functional.silu(gate.float())
    groups = h.view(*h.shape[:-1], -1, m.group_size)
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + m.variance_epsilon)
    return m.weight * groups.flatten(-2).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": functional.silu, "sigmoid": torch.sigmoid}
GATED: dict[str, Make] = {
    "silu": norm(gated, activation="silu"),
    "sigmoid": norm(gated, activation="sigmoid"),
    "rounded once": norm(gated_once, activation="sigmoid"),
    "gated first": norm(gated_first, group_size=WIDTH // 4),
}
each_gated = pytest.mark.parametrize("make", GATED.values(), ids=GATED)


@pytest.mark.parametrize("cast_before_weight", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_gated
def test_gated_norms_keep_their_results(make: Make, dtype: torch.dtype, cast_before_weight: bool) -> None:
    original = randomised(make()).to(dtype)
    patched = copy.deepcopy(original)
    normforge.patch(patched, cast_before_weight=cast_before_weight)
    assert isinstance(patched, HuggingFaceGatedRMSNorm)
    x, gate = (torch.randn(2, 33, WIDTH).to(dtype).requires_grad_() for _ in range(2))
    assert_same_results(patched, original, x, gate, tolerance=1e-5 if dtype is torch.float32 else 2e-2)
    y, wanted = patched(x, gate), original(x, gate)
    if cast_before_weight:
        differing = ~torch.isclose(y.float(), wanted.float(), rtol=1e-5, atol=1e-6)
        assert differing.float().mean() < 1e-3
    assert torch.equal(patched(x=x, gate=gate), y)
    assert torch.equal(copy.deepcopy(patched)(x, gate), y)
    normforge.unpatch(patched)
    assert torch.equal(patched(x, gate), wanted)


READ_ALONE: dict[str, dict[str, Any]] = {
    "silu": {"variance_epsilon": 0.5, "activation": "sigmoid"},
    "rounded once": {"activation": "silu"},
    "gated first": {"group_size": WIDTH},
}


@pytest.mark.parametrize("name", READ_ALONE)
def test_a_gated_norm_reads_what_its_forward_reads(name: str) -> None:
    original, patched = twins(randomised(GATED[name]()))
    x, gate = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    compiled: Any = torch.compile(patched, backend=CompileCounter(), fullgraph=True)
    assert torch.equal(compiled(x, gate), original(x, gate))
    for module in (original, patched):
        for attribute, value in READ_ALONE[name].items():
            setattr(module, attribute, value)
    torch.testing.assert_close(patched(x, gate), original(x, gate))
    # Without its gate the forward that it had runs, if it can.
    if name == "gated first":
        assert torch.equal(patched(x), original(x))
    if name == "silu":
        with pytest.raises(TypeError, match="gate"):
            patched(x)
