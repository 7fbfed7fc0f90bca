"""Call modules and patched blocks."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

import normforge
from tests.nn import decoders, models

from .. import cases
from .functions import SETTINGS, Call, Draw, one_of, operand
from .operands import FLOATS, Operand, built
from .outcome import Outcome, Subject, observed
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
MODULES: Mapping[str, tuple[Callable[[], torch.nn.Module], int]] = {
    **{name: (functools.partial(getattr(normforge, name), WIDTH), 1) for name in ("LayerNorm", "RMSNorm")},
    **{
        name.format(norm): (functools.partial(getattr(normforge, name.format(norm)), WIDTH), 2)
        for name, norm in product(("Add{}", "{}Add", "Gated{}"), ("LayerNorm", "RMSNorm"))
    },
    "GroupNorm": (lambda: normforge.GroupNorm(2, 8), 1),
    "parallel AddLayerNorm": (_parallelized, 2),
    "patched LayerNorm": (lambda: torch.nn.LayerNorm(WIDTH), 1),
    "patched RMSNorm": (lambda: torch.nn.RMSNorm(WIDTH), 1),
    "patched Llama": (lambda: models.LlamaRMSNorm(WIDTH), 1),
    "patched T5": (lambda: models.T5LayerNorm(WIDTH), 1),
    "patched Gemma": (lambda: models.GemmaRMSNorm(WIDTH), 1),
    "patched GroupNorm": (lambda: torch.nn.GroupNorm(2, 8), 1),
    "patched GroupNorm and SiLU": (lambda: torch.nn.Sequential(torch.nn.GroupNorm(2, 8), torch.nn.SiLU()), 1),
    "patched chain": (Chain, 1),
    "patched chains": (lambda: torch.nn.Sequential(Chain(), Chain(), torch.nn.LayerNorm(WIDTH)), 1),
    "patched Transformer's block": (models.Block, 1),
    "patched modulation": (Modulated, 1),
    "patched post-norm": (lambda: decoders.PostNormLayer(), 1),
}

# What becomes of a weight's data, by the state of a call.
_DATA: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bf16": torch.Tensor.bfloat16,
    "fp16": torch.Tensor.half,
    "fp64": torch.Tensor.double,
    "new data": torch.clone,
    "offset": cases.LAYOUTS["offset"],
    "negated": torch._neg_view,
}
_STATES = ("", "", "", "frozen", "another", "none", "hooked", "eps", *_DATA)
_DRAWS: Mapping[str, tuple[Any, Draw]] = {
    **{name: value for name, value in SETTINGS.items() if name not in ("n", "alias", "transform")},
    "lead": ((2, 4), one_of((2, 4), (2, 4), (2, 4), (4,), (1, 1), (3, 5), (0, 4), (2, 2, 2))),
    "state": ("", one_of(*_STATES)),
    "training": (True, one_of(True, False)),
    "patched": ("patched", one_of(*["patched"] * 8, "unpatched", "patched again")),
    "joined": (False, one_of(False, True)),
}


_X = operand(("",), (*FLOATS, torch.float32, torch.float32, torch.float64), False, 0.4)


@functools.cache
def _template(name: str) -> torch.nn.Module:
    """Return a module as it is before its first call; its copies share nothing with it."""
    torch.manual_seed(0)
    module = MODULES[name][0]()
    if name.startswith("patched"):
        normforge.patch(module, compile_passes=False)
    return module


def _fresh(name: str) -> torch.nn.Module:
    return _parallelized() if name.startswith("parallel") else copy.deepcopy(_template(name))


@contextlib.contextmanager
def _in_state(module: torch.nn.Module, call: Call) -> Iterator[None]:
    """Bring a module into a call's state, and back."""
    norms = [
        each for each in module.modules() if getattr(each, "weight", None) is not None and "Norm" in type(each).__name__
    ]
    state = call["state"]
    module.train(call["training"])
    with contextlib.ExitStack() as stack:
        for norm in norms:
            weight, data = norm.weight, norm.weight.data
            stack.callback(setattr, norm, "weight", weight)
            for name in ("eps", "variance_epsilon") if state == "eps" else ():
                if hasattr(norm, name):
                    stack.callback(setattr, norm, name, getattr(norm, name))
                    setattr(norm, name, 1e-3)
            if type(data) is not torch.Tensor:
                # A DTensor's, of which there is no negated view.
                continue
            stack.callback(setattr, weight, "data", data)
            stack.callback(weight.requires_grad_)
            if state in _DATA:
                weight.data = _DATA[state](data)
            elif state == "another":
                norm.weight = torch.nn.Parameter(data.clone())
            elif state == "none":
                norm.register_parameter("weight", None)
            elif state == "hooked":
                stack.callback(norm.register_forward_hook(lambda module, inputs, output: output).remove)
            weight.requires_grad_(state != "frozen")
        yield


def _called(
    name: str, takes: int, kept: dict[str, torch.nn.Module], session: Session, call: Call, cold: bool
) -> Outcome:
    if not cold and name not in kept:
        kept[name] = _fresh(name)
    module = _fresh(name) if cold else kept[name]
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


def subjects() -> list[Subject]:
    """Return a subject per module, which the calls of a sequence share."""
    kept: dict[str, torch.nn.Module] = {}
    made = []
    for name, (_, takes) in MODULES.items():
        operands = ("x", "other")[:takes]
        defaults = {each: default for each, (default, _) in _DRAWS.items()} | dict.fromkeys(operands, Operand())
        draws: dict[str, Draw] = {each: draw for each, (_, draw) in _DRAWS.items()} | dict.fromkeys(operands, _X)
        made.append(Subject(name, defaults, draws, functools.partial(_called, name, takes, kept)))
        # Its trial is run by kernels, and not recorded.
        if not name.startswith("parallel"):
            _template(name)
    return made
