"""Call what takes other arguments than tensors: modules, patched blocks, and functions of JAX arrays."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

import normforge
from tests.nn import decoders, models

from .functions import SETTINGS, Call, Draw, one_of
from .operands import FLOATS, USUAL_HOLDERS, USUAL_LAYOUTS, Operand, built
from .outcome import Outcome, Subject, error_of, observed
from .session import Session

WIDTH = models.WIDTH


class Modulated(torch.nn.Module):
    """A norm whose result is scaled and shifted by samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.of_samples = torch.nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shift = self.of_samples(x[:, 0]).chunk(2, dim=-1)
        y: torch.Tensor = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return y


class Chain(torch.nn.Module):
    """Adds and norms, and nothing that takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.LayerNorm(WIDTH)
        self.second = torch.nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.silu(self.first(x))
        return x + functional.silu(self.second(x))


def _parallelized() -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from normforge.parallel import SequenceParallel

    style = SequenceParallel(sequence_dim=0, use_local_output=True)
    return parallelize_module(normforge.AddLayerNorm(WIDTH), init_device_mesh("cpu", (1,)), style)


# By name: what makes a module, and how many tensors of x's shape it takes.
NORMS: Mapping[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "LayerNorm": (lambda: normforge.LayerNorm(WIDTH), 1),
    "RMSNorm": (lambda: normforge.RMSNorm(WIDTH), 1),
    "AddLayerNorm": (lambda: normforge.AddLayerNorm(WIDTH), 2),
    "AddRMSNorm": (lambda: normforge.AddRMSNorm(WIDTH), 2),
    "GatedLayerNorm": (lambda: normforge.GatedLayerNorm(WIDTH), 2),
    "GatedRMSNorm": (lambda: normforge.GatedRMSNorm(WIDTH), 2),
    "GroupNorm": (lambda: normforge.GroupNorm(2, 8), 1),
    "parallel AddLayerNorm": (_parallelized, 2),
    "patched LayerNorm": (lambda: torch.nn.LayerNorm(WIDTH), 1),
    "patched RMSNorm": (lambda: torch.nn.RMSNorm(WIDTH), 1),
    "patched Llama": (lambda: models.LlamaRMSNorm(WIDTH), 1),
    "patched T5": (lambda: models.T5LayerNorm(WIDTH), 1),
    "patched Gemma": (lambda: models.GemmaRMSNorm(WIDTH), 1),
    "patched GroupNorm": (lambda: torch.nn.GroupNorm(2, 8), 1),
    "patched GroupNorm and SiLU": (lambda: torch.nn.Sequential(torch.nn.GroupNorm(2, 8), torch.nn.SiLU()), 1),
}
BLOCKS: Mapping[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "patched chain": (Chain, 1),
    "patched chains": (lambda: torch.nn.Sequential(Chain(), Chain(), torch.nn.LayerNorm(WIDTH)), 1),
    "patched Transformer's block": (models.Block, 1),
    "patched modulation": (Modulated, 1),
    "patched post-norm": (lambda: decoders.PostNormLayer(), 1),
}

_STATES = (
    "",
    "",
    "",
    "bf16",
    "fp16",
    "fp64",
    "frozen",
    "new data",
    "another",
    "none",
    "offset",
    "negated",
    "hooked",
    "eps",
)
_DRAWS: Mapping[str, tuple[Any, Draw]] = {
    **{name: value for name, value in SETTINGS.items() if name not in ("n", "alias")},
    "lead": ((2, 4), one_of((2, 4), (2, 4), (2, 4), (4,), (1, 1), (3, 5), (0, 4), (2, 2, 2))),
    "state": ("", one_of(*_STATES)),
    "training": (True, one_of(True, False)),
    "patched": ("patched", one_of(*["patched"] * 8, "unpatched", "patched again")),
    "joined": (False, one_of(False, True)),
}


def _x(random: Any) -> Operand:
    layout = random.choice(USUAL_LAYOUTS)
    holder = random.choice(USUAL_HOLDERS) if random.random() < 0.4 else "tensor"
    return Operand(
        random.choice((*FLOATS, torch.float32, torch.float32, torch.float64)), layout, holder, random.random() < 0.4
    )


@functools.cache
def _template(name: str) -> torch.nn.Module:
    """Return a module as it is before its first call; its copies share nothing with it."""
    torch.manual_seed(0)
    module = {**NORMS, **BLOCKS}[name][0]()
    if name.startswith("patched"):
        normforge.patch(module, compile_passes=False)
    return module


class Modules:
    """One module of each name, which calls of a sequence share."""

    def __init__(self) -> None:
        self._made: dict[str, torch.nn.Module] = {}

    def of(self, name: str, cold: bool) -> torch.nn.Module:
        """Return the module of a name, a new one if caches are to be empty."""
        if cold:
            return _fresh(name)
        if name not in self._made:
            self._made[name] = _fresh(name)
        return self._made[name]


def _fresh(name: str) -> torch.nn.Module:
    return _parallelized() if name.startswith("parallel") else copy.deepcopy(_template(name))


@contextlib.contextmanager
def _in_state(module: torch.nn.Module, call: Call) -> Iterator[None]:
    """Bring a module into a call's state, and back."""
    norms = [
        each for each in module.modules() if getattr(each, "weight", None) is not None and "Norm" in type(each).__name__
    ]
    before = [(each, each.weight, each.weight.data) for each in norms]
    state, handles = call["state"], []
    eps = [
        (each, name, getattr(each, name))
        for each in norms
        for name in ("eps", "variance_epsilon")
        if hasattr(each, name)
    ]
    module.train(call["training"])
    for norm, weight, data in before:
        if type(data) is not torch.Tensor:
            # A DTensor's, of which there is no negated view.
            continue
        if state in ("bf16", "fp16", "fp64"):
            weight.data = data.to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}[state])
        elif state == "new data":
            weight.data = data.clone()
        elif state == "offset":
            weight.data = torch.cat([data[:1], data])[1:]
        elif state == "negated":
            weight.data = torch._neg_view(data)
        elif state == "another":
            norm.weight = torch.nn.Parameter(data.clone())
        elif state == "none":
            norm.register_parameter("weight", None)
        elif state == "hooked":
            handles.append(norm.register_forward_hook(lambda module, inputs, output: output))
        weight.requires_grad_(state != "frozen")
    for norm, name, _ in eps if state == "eps" else ():
        setattr(norm, name, 1e-3)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for norm, name, value in eps:
            setattr(norm, name, value)
        for norm, weight, data in before:
            if type(data) is torch.Tensor:
                weight.data = data
            norm.weight = weight
            weight.requires_grad_()


def _called(name: str, takes: int, kept: Modules, session: Session, call: Call, cold: bool) -> Outcome:
    module = kept.of(name, cold)
    is_group = "Group" in name
    if name.startswith("patched") and call["patched"] != "patched":
        normforge.unpatch(module)
    if name.startswith("patched") and call["patched"] == "patched again":
        normforge.patch(module, compile_passes=False)
    lead = call["lead"]
    shape = (lead[0], 8, *lead[1:]) if is_group else (*lead, WIDTH)
    given = {each: built(call[each], shape, call[each].dtype) for each in ("x", "other")[:takes]}
    inputs = list(given.values())
    least = "0" if call["joined"] else str(2**60)
    try:
        with _in_state(module, call), mock.patch.dict(os.environ, NORMFORGE_FUSE_FROM=least):
            return observed(session, call, {**given, **dict(module.named_parameters())}, lambda: module(*inputs))
    finally:
        if name.startswith("patched") and call["patched"] == "unpatched":
            normforge.patch(module, compile_passes=False)


def _modules(among: Mapping[str, tuple[Callable[[], torch.nn.Module], int]]) -> list[Subject]:
    kept = Modules()
    made = []
    for name, (_, takes) in among.items():
        draws: dict[str, Draw] = {each: draw for each, (_, draw) in _DRAWS.items() if each != "transform"}
        operands = ("x", "other")[:takes]
        defaults = {each: default for each, (default, _) in _DRAWS.items() if each != "transform"}
        defaults |= dict.fromkeys(operands, Operand())
        outcome = functools.partial(_called, name, takes, kept)
        made.append(Subject(name, defaults, draws | dict.fromkeys(operands, _x), outcome))
        # Its trial is run by kernels, and not recorded.
        _template(name) if not name.startswith("parallel") else None
    return made


def subjects(family: str) -> list[Subject]:
    """Return what is called of a family."""
    return {"modules": lambda: _modules(NORMS), "blocks": lambda: _modules(BLOCKS), "jax": _of_jax}[family]()


_JAX: Mapping[str, tuple[str, ...]] = {
    "layer_norm": ("x", "weight", "bias"),
    "rms_norm": ("x", "weight"),
    "add_layer_norm": ("x", "residual", "weight", "bias"),
    "add_rms_norm": ("x", "residual", "weight"),
    "quantised_layer_norm": ("x", "weight", "bias"),
    "quantised_rms_norm": ("x", "weight"),
}
_JAX_DRAWS: Mapping[str, tuple[Any, Draw]] = {
    "n": (16, one_of(16, 16, 8, 1, 33)),
    "lead": ((4,), one_of((4,), (), (2, 3), (0,), (1,))),
    "eps": (1e-5, one_of(1e-5, 1e-6, 0.0, 1, True, -1.0, None, "array", "traced")),
    "transform": ("", one_of("", "", "grad", "vmap", "jvp", "grad of grad", "jit")),
    "x64": (False, one_of(False, False, True)),
    "strict": (False, one_of(False, False, True)),
    "x": ("float32", one_of("float32", "bfloat16", "float16", "float64", "int32", "numpy", "list", "weak")),
    **dict.fromkeys(
        ("weight", "bias"), (None, one_of(None, "float32", "bfloat16", "float16", "float64", "numpy", "longer"))
    ),
    "residual": ("float32", one_of("float32", "bfloat16", "float16", "numpy", None, "longer")),
}


def _array(kind: str, shape: tuple[int, ...]) -> Any:
    import jax.numpy as jnp
    import numpy as np

    if kind == "longer":
        shape = (*shape[:-1], shape[-1] + 1)
    if kind in ("numpy", "list"):
        made = np.ones(shape, np.float32)
        return made.tolist() if kind == "list" else made
    return jnp.full(shape, 1.0) if kind == "weak" else jnp.ones(shape, kind if kind != "longer" else "float32")


def _traced(name: str, session: Session, call: Call, cold: bool) -> Outcome:
    import jax

    import normforge.jax as norms

    # What JAX keeps is of functions that normforge keeps: without those, it traces others anew.
    del session, cold
    function = getattr(norms, name)
    transforms: Mapping[str, Callable[[Any], Any]] = {
        "": lambda f: f,
        "jit": jax.jit,
        "vmap": jax.vmap,
        "grad": lambda f: jax.grad(lambda *xs: _total(f(*xs))),
        "jvp": lambda f: lambda *xs: jax.jvp(f, xs, xs),
        "grad of grad": lambda f: jax.grad(lambda *xs: jax.grad(lambda *ys: _total(f(*ys)))(*xs).sum()),
    }
    found: Outcome = {"finds": 0}
    promotion = jax.numpy_dtype_promotion("strict") if call["strict"] else contextlib.nullcontext()
    ranks = jax.numpy_rank_promotion("raise") if call["strict"] else contextlib.nullcontext()
    try:
        with jax.enable_x64(call["x64"]), promotion, ranks:
            shapes = {"x": (*call["lead"], call["n"]), "residual": (*call["lead"], call["n"])}
            there = [each for each in _JAX[name] if call[each] is not None]
            arrays = [_array(call[each], shapes.get(each, (call["n"],))) for each in there]
            eps = {"array": lambda: jax.numpy.float32(1e-5), "traced": lambda: jax.numpy.ones(())}.get(
                call["eps"] if isinstance(call["eps"], str) else "", lambda: call["eps"]
            )()

            def called(*given: Any) -> Any:
                return function(**dict(zip(there, given, strict=True)), eps=eps)

            program = jax.make_jaxpr(transforms[call["transform"]](called))(*arrays)
            found["results"] = [str(each) for each in program.out_avals]
            found["program"] = re.sub(r"0x[0-9a-f]+", "…", str(program))
    except Exception as error:
        found["exception"] = error_of(error)
    return found


def _total(results: Any) -> Any:
    first = results[0] if isinstance(results, tuple) else results
    return first.astype("float32").sum()


def _of_jax() -> list[Subject]:
    from tests.jax.settled import settle

    # What the tests of JAX need, before anything runs in the process.
    settle(on_gpu=False)
    made = []
    for name, operands in _JAX.items():
        own = {
            each: value
            for each, value in _JAX_DRAWS.items()
            if each in operands or each not in ("x", "weight", "bias", "residual")
        }
        made.append(
            Subject(
                name,
                {each: value for each, (value, _) in own.items()},
                {each: draw for each, (_, draw) in own.items()},
                functools.partial(_traced, name),
            )
        )
    return made
