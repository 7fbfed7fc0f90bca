"""`patch` and `unpatch`: what they take, what that computes, that all else stays, what is refused, and hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

import normforge
from proving.cold_warm.contexts import CONTEXTS

from ..calling import FLOATS, each_device, each_float, in_threads
from ..thorough import COSTLY
from . import models
from .decoders import FAMILIES, LlamaLayer, made
from .models import WIDTH, Counted, LlamaRMSNorm, Make, assert_near, norm, randomised, results, twins
from .test_forms import BetweenNorms, ByFunction, InABranch, Plainly

llama, t5 = models.LlamaRMSNorm.forward, models.T5LayerNorm.forward
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


@each_float
@pytest.mark.parametrize("weight", FLOATS, ids=str)
@pytest.mark.parametrize("cls", [*HUGGING_FACE, *WEIGHTLESS], ids=lambda cls: cls.__name__)
@each_device
def test_hugging_face_classes_keep_their_results(
    cls: Make, dtype: torch.dtype, weight: torch.dtype, device: str
) -> None:
    original, patched = twins(randomised(cls()).to(device, weight))
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


@each_hugging_face
def test_one_rounding_if_asked_for(cls: Make) -> None:
    module = randomised(cls()).bfloat16()
    eps, weight = 1e-6, module.get_parameter("weight")
    normforge.patch(module, cast_before_weight=False)
    x = torch.randn(64, WIDTH).bfloat16()
    offset = 1.0 if cls is models.GemmaRMSNorm else 0.0
    assert torch.equal(module(x), normforge.rms_norm(x, (WIDTH,), weight, eps, weight_offset=offset))


ON_A_GPU = pytest.param("default cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("where", ["default meta", "default fp64", "inference", "no_grad", "bf16 autocast", ON_A_GPU])
@each_hugging_face
def test_what_is_found_does_not_depend_on_where_patch_is_called(cls: Make, where: str) -> None:
    modules = [cls(), cls()]
    normforge.patch(modules[0])
    with torch.device("cuda") if where == "default cuda" else CONTEXTS[where]():
        assert len(normforge.patch(modules[1]).swapped) == 1
    assert type(modules[1]) is type(modules[0]) is not cls
    assert vars(modules[1]).keys() == vars(modules[0]).keys()


@pytest.mark.parametrize("cls", KEYWORD, ids=["Llama", "T5"])
def test_the_input_by_its_own_name(cls: Make) -> None:
    module = randomised(cls())
    x = torch.randn(2, WIDTH)
    wanted = module(hidden_states=x)
    normforge.patch(module)
    torch.testing.assert_close(module(hidden_states=x), wanted)
    assert torch.equal(module(hidden_states=x), module(x))
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(hidden_states=x), wanted)
    for positional, named in (((), {"input": x}), ((), {}), ((x,), {"hidden_states": x}), ((x,), {"gate": x})):
        with pytest.raises(TypeError, match="takes one tensor, by position or as hidden_states"):
            module(*positional, **named)


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
    assert sum(in_threads(lambda each: len(normforge.patch(each).swapped), [model] * 4)) == 8
    normforge.unpatch(model)
    assert {type(module) for module in model} == {models.LlamaRMSNorm}


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
    calls = Counted(monkeypatch, forward=(normforge.LayerNorm, "forward"))
    with torch.no_grad():
        torch.testing.assert_close(model(x), wanted)
        assert calls.counts() == ({} if expected else {"forward": 2})
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            torch.testing.assert_close(model(x), wanted)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        assert calls.counts() == {"forward": 2}
    assert all("torch.backends.mha.set_fastpath_enabled(False)" in each.reason for each in result.bypassed)
    normforge.unpatch(model)
    assert normforge.unpatch(model) == ()


def test_a_patched_norm_is_printed_as_ours() -> None:
    """Else it would be torch's to the character."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.RMSNorm(WIDTH), torch.nn.GroupNorm(2, WIDTH))
    unpatched = [repr(norm) for norm in model]
    normforge.patch(model)
    assert [repr(norm) for norm in model] == [f"normforge.{norm}" for norm in unpatched]

    class Own(normforge.LayerNorm):
        """A user's."""

    assert repr(Own(WIDTH)) == unpatched[0].replace("LayerNorm", "Own")
    # Of a graph it becomes a class's name, and of torch's errors a part.
    norm: Any = model[0]
    assert norm._get_name() == "LayerNorm"
    normforge.unpatch(model)
    assert [repr(norm) for norm in model] == unpatched


class SwitchLayerNorm(models.T5LayerNorm):
    """Called as SwitchTransformersLayerNorm, whose formula is that of T5LayerNorm."""


class TimmGroupNorm(torch.nn.GroupNorm):
    """Calls what torch's does, as timm's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class Rescaling(models.LlamaRMSNorm):
    """Called nothing like a norm."""


class SlottedRMSNorm(models.LlamaRMSNorm):
    """Has slots."""

    __slots__ = ("extra",)


class Registering(models.LlamaRMSNorm):
    """Is told of every class that is derived from it, which has to have a key."""

    def __init_subclass__(cls, *, key: str) -> None:
        super().__init_subclass__()


class RegisteredRMSNorm(Registering, key="own"):
    """Has a key."""


def on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(models.LlamaRMSNorm(), torch.nn.LayerNorm(WIDTH), LlamaLayer())


# Models, the paths of the modules that patch swaps, and how many blocks it fuses.
MODELS: dict[str, tuple[Make, tuple[str, ...] | None, int]] = {
    **{f"blocks of {family}": (partial(made, family), None, 2) for family in FAMILIES},
    "groups with SiLU": (models.ResidualGroups, None, 0),
    "a norm alone": (lambda: torch.nn.RMSNorm(WIDTH), ("",), 0),
    "ours": (
        lambda: torch.nn.Sequential(normforge.LayerNorm(WIDTH), normforge.AddRMSNorm(WIDTH), torch.nn.LayerNorm(WIDTH)),
        ("2",),
        0,
    ),
    "shared": (lambda: torch.nn.Sequential(*[torch.nn.LayerNorm(WIDTH)] * 2), ("0",), 0),
    "Hugging Face's": (lambda: torch.nn.Sequential(*(cls() for cls in HUGGING_FACE)), tuple("01234"), 0),
    "of any width": (lambda: torch.nn.Sequential(*(models.LlamaRMSNorm(n) for n in (1, 2, 3, 4097))), tuple("0123"), 0),
    "of any name": (
        lambda: torch.nn.Sequential(
            SwitchLayerNorm(), Rescaling(), TimmGroupNorm(2, WIDTH), SlottedRMSNorm(), RegisteredRMSNorm()
        ),
        tuple("01234"),
        0,
    ),
    "on meta": (on_meta, ("0", "1", "2.input_layernorm", "2.post_attention_layernorm"), 1),
}
OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LayerNorm: normforge.LayerNorm,
    torch.nn.RMSNorm: normforge.RMSNorm,
    torch.nn.GroupNorm: normforge.GroupNorm,
}


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "alone"])
@pytest.mark.parametrize("case", MODELS.values(), ids=[name.replace(" ", "_") for name in MODELS])
def test_only_the_classes_change(case: tuple[Make, tuple[str, ...] | None, int], fuse: bool) -> None:
    """Also not by the trial: no hook of a module runs, and random numbers come as they would have."""
    make, paths, blocks = case
    model = make()
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: pytest.fail("the module was called"))
    before = {path: (module, type(module), dict(vars(module))) for path, module in model.named_modules()}
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    values, random = copy.deepcopy(parameters), torch.get_rng_state()
    assert normforge.unpatch(model) == ()
    done = normforge.patch(model, fuse=fuse)
    assert paths in (tuple(each.path for each in done.swapped), None)
    assert len(done.fused) == (blocks if fuse else 0)
    for path, old, new in done.swapped:
        assert type(model.get_submodule(path)) is new
        assert new is OURS[old] if old in OURS else issubclass(new, (normforge.RMSNorm, old))
    assert normforge.patch(model, fuse=fuse) == normforge.Patch((), ())
    # Fusing can be added.
    added = normforge.patch(model)
    assert len(added.fused) == (0 if fuse else blocks)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module is before[path][0] for path, module in model.named_modules())
    for path, parameter in model.named_parameters():
        assert parameter is parameters[path]
        assert parameter.is_meta or torch.equal(parameter, values[path])
    assert list(model.state_dict()) == keys
    back = [(path, new, old) for path, old, new in normforge.unpatch(model)]
    assert {*done.swapped} <= {*back}
    changed = {each.path for each in (*done.swapped, *added.swapped)}
    changed |= {each.path for each in (*done.fused, *added.fused)}
    assert {path for path, _, _ in back} == changed
    assert {path: (module, type(module), dict(vars(module))) for path, module in model.named_modules()} == before
    assert normforge.unpatch(model) == ()


@COSTLY
@pytest.mark.parametrize(
    ("cls", "name"),
    [(models.LlamaRMSNorm, "variance_epsilon"), *((cls, "eps") for cls in (models.EpsRMSNorm, *WEIGHTLESS))],
)
@pytest.mark.parametrize(
    "epsilon", [np.float32(1e-3), np.float64(1e-3), torch.tensor(1e-3), 1], ids=["float32", "float64", "tensor", "int"]
)
def test_epsilon_is_any_number_and_may_be_changed(cls: Callable[[], Any], name: str, epsilon: Any) -> None:
    original = randomised(cls())
    setattr(original, name, epsilon)
    module = copy.deepcopy(original)
    assert len(normforge.patch(module).swapped) == 1
    x = torch.randn(64, 2, WIDTH)
    for value in (epsilon, 0.5, 2.0):
        for each in (module, original):
            setattr(each, name, value)
        torch.testing.assert_close(module(x), original(x))
        assert getattr(module, name) == module.eps == value
        assert f"eps={value}, elementwise_affine={cls not in WEIGHTLESS}" in str(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for value in (epsilon, 1e-6, 0.5):
        setattr(module, name, value)
        torch.testing.assert_close(compiled(x), module(x))
    normforge.unpatch(module)
    assert getattr(module, name) == 0.5
    setattr(original, name, 0.5)
    assert torch.equal(module(x), original(x))


class Doubled(torch.nn.Module):
    """A parametrisation."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("unpatched", ["while parametrised", "afterwards"])
@pytest.mark.parametrize("make", [lambda: torch.nn.LayerNorm(WIDTH), models.LlamaRMSNorm], ids=["torch", "Llama"])
def test_parametrising_a_patched_norm(make: Make, unpatched: str) -> None:
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


def wrapped(module: torch.nn.Module, hook: str) -> None:
    inner = module.forward
    module.forward = lambda *inputs: inner(*inputs)
    setattr(module, hook, object())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced, r"1, which patch made a LayerNorm of a LayerNorm, is a Identity now, which is none"),
        (derived, r"is a Derived now, a class that is derived from LayerNorm in its text"),
        (
            partial(wrapped, hook="other"),
            r"has had its forward overridden on the instance since.* take it away first: del module\.forward$",
        ),
        (partial(wrapped, hook="_hf_hook"), r"accelerate\.hooks\.remove_hook_from_module"),
        (partial(wrapped, hook="_diffusers_hook"), r"remove_hook\(name\) of each module's _diffusers_hook"),
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


@pytest.mark.parametrize(
    "model", [None, torch.nn.LayerNorm, [torch.nn.LayerNorm(WIDTH)]], ids=["None", "class", "list"]
)
@pytest.mark.parametrize("function", [normforge.patch, normforge.unpatch], ids=["patch", "unpatch"])
def test_what_is_no_module_is_refused(function: Callable[[Any], Any], model: Any) -> None:
    with pytest.raises(normforge.errors.DTypeError, match=f"^model is a {type(model).__name__}; it takes a torch.nn.M"):
        function(model)


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(LlamaLayer(), LlamaLayer(), LlamaRMSNorm())


# Models, and modules of theirs: norms, each of which is computed together with something else unless a hook is on it,
# and what is between them.
FUSED: dict[str, tuple[Make, str, tuple[torch.Tensor | None, ...]]] = {
    "alone": (lambda: torch.nn.Sequential(torch.nn.LayerNorm(WIDTH)), "0", ()),
    "with a sum": (InABranch, "norm", (None,)),
    "with the sum behind": (Plainly, "norm", ()),
    "with the norm behind": (BetweenNorms, "norm", ()),
    "with its modulation": (ByFunction, "norm", (torch.randn(2, WIDTH),)),
    "with SiLU": (lambda: torch.nn.Sequential(torch.nn.GroupNorm(3, 9), torch.nn.SiLU()), "0", ()),
    **{
        path: (layers, path, ())
        for path in ("0", "1", "0.self_attn", "0.mlp", "0.post_attention_layernorm", "1.input_layernorm", "2")
    },
}


def written_to(output: Any) -> Any:
    # Not by a factor, which an RMSNorm takes off again.
    (output if isinstance(output, torch.Tensor) else output[0]).add_(1)


def changed(output: Any) -> Any:
    return 1 + output if isinstance(output, torch.Tensor) else (1 + output[0], *output[1:])


# Ways to have a hook called, of which some also change something.
HOOKS: dict[str, Callable[[torch.nn.Module, Any], Any]] = {
    "forward": lambda norm, hook: norm.register_forward_hook(hook),
    "pre": lambda norm, hook: norm.register_forward_pre_hook(hook),
    "backward": lambda norm, hook: norm.register_full_backward_hook(hook),
    "every module": lambda norm, hook: register_module_forward_hook(hook),
    "changing input": lambda norm, hook: norm.register_forward_pre_hook(
        lambda *given: hook(*given) or (changed(given[1]) if given[1] else None)
    ),
    "changing output": lambda norm, hook: norm.register_forward_hook(lambda *given: hook(*given) or changed(given[2])),
    "writing to the output": lambda norm, hook: norm.register_forward_hook(
        lambda *given: hook(*given) or written_to(given[2])
    ),
}


def noting(seen: list[list[torch.Tensor]], norm: torch.nn.Module) -> Callable[..., None]:
    """Return a hook that notes the tensors with which a norm is called."""

    def hook(module: torch.nn.Module, *given: Any) -> None:
        leaves = [each.detach() for each in tree_leaves(given) if each is not None]
        seen.extend([leaves] * (module is norm))

    return hook


@pytest.mark.parametrize("when", ["before", "since"])
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("fused", FUSED)
def test_hooks_are_called(fused: str, kind: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks from before `patch` and since; once a hook is gone, the same is computed without it."""
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", "0")
    make, path, beside = FUSED[fused]
    model, x = make(), torch.randn(2, 9, WIDTH)
    ours = copy.deepcopy(model)
    if when == "since":
        normforge.patch(ours)
        results(ours, x, *beside)
    called, found = [], []
    for each in (model, ours):
        norm = each.get_submodule(path)
        seen: list[list[torch.Tensor]] = []
        handle = HOOKS[kind](norm, noting(seen, norm))
        if when == "before" and each is ours:
            normforge.patch(ours)
        for _ in range(2):
            y, gradients = results(each, x, *beside)
            found.append({"y": y, **gradients})
            handle.remove()
        called.append(seen)
    assert len(called[0]) == len(called[1]) == 1
    torch.testing.assert_close(called[1], called[0], rtol=1e-4, atol=1e-5)
    for wanted, actual in zip(found[:2], found[2:], strict=True):
        assert_near(actual, wanted, 2e-5, 1.0)
