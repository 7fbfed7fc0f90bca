"""The modules: torch's in all but speed."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch

import normforge

from ..calling import each_device, printed
from ..thorough import THOROUGH
from .models import randomised
from .oracle import backward
from .twins import results

PAIRS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LayerNorm: normforge.LayerNorm,
    torch.nn.RMSNorm: normforge.RMSNorm,
}
ADDING: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LayerNorm: normforge.AddLayerNorm,
    torch.nn.RMSNorm: normforge.AddRMSNorm,
}

ADDED: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LayerNorm: normforge.LayerNormAdd,
    torch.nn.RMSNorm: normforge.RMSNormAdd,
}

each_pair = pytest.mark.parametrize(("theirs", "ours"), PAIRS.items(), ids=["LayerNorm", "RMSNorm"])
every_pair = pytest.mark.parametrize(
    ("theirs", "ours"), [*PAIRS.items(), *ADDING.items(), *ADDED.items()], ids=lambda c: c.__name__
)

FLAGS: list[dict[str, Any]] = [
    {},
    {"eps": 0.1},
    {"elementwise_affine": False},
    {"bias": False},
    {"dtype": torch.bfloat16},
]


def accepted(cls: type[torch.nn.Module], flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if name in inspect.signature(cls).parameters}


@each_device
@pytest.mark.parametrize("shape", [64, (64,), [3, 64]], ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@each_pair
def test_the_same_numbers_as_torchs(
    theirs: type[torch.nn.Module], ours: type[torch.nn.Module], flags: dict[str, Any], shape: Any, device: str
) -> None:
    flags = accepted(theirs, flags)
    reference = randomised(theirs(shape, **flags)).to(device)
    module = ours(shape, **flags).to(device)
    module.load_state_dict(reference.state_dict())
    dtype = flags.get("dtype", torch.float32)
    x = torch.randn(2, 3, 64, device=device).to(dtype)
    (y, found), (wanted, exact) = (results(each, x) for each in (module, reference))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found, exact, rtol=5 * tolerance, atol=5 * tolerance)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@every_pair
def test_state_dicts_interchange(
    theirs: type[torch.nn.Module], ours: type[torch.nn.Module], flags: dict[str, Any]
) -> None:
    flags = accepted(theirs, flags)
    reference, module = randomised(theirs((3, 64), **flags)), ours((3, 64), **flags)
    for source, target in ((reference, module), (randomised(module), reference)):
        target.load_state_dict(source.state_dict())
        pairs = zip(source.state_dict().items(), target.state_dict().items(), strict=True)
        assert all(a == b and torch.equal(p, q) and p.dtype == q.dtype for (a, p), (b, q) in pairs)


@every_pair
def test_constructed_like_torchs(theirs: type[torch.nn.Module], ours: type[torch.nn.Module]) -> None:
    parameters = inspect.signature(ours).parameters.values()
    positional = [(p.name, p.default) for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == [(p.name, p.default) for p in inspect.signature(theirs).parameters.values()]
    module = ours((3, 64), 0.25)
    assert isinstance(module, theirs)
    assert str(module).partition("(")[2] == str(theirs((3, 64), 0.25)).partition("(")[2]


@THOROUGH
def test_casting_before_the_weight() -> None:
    """Hugging Face's order, to the bit: the row is rounded, and the product is rounded again."""
    x = torch.randn(64, 64).bfloat16()
    for weight in (torch.randn(64).bfloat16(), torch.randn(64)):
        plain = normforge.rms_norm(x, (64,), eps=1e-6)
        module = normforge.RMSNorm(64, eps=1e-6, cast_before_weight=True)
        module.weight = torch.nn.Parameter(weight)
        assert module(x).dtype == weight.dtype
        assert torch.equal(module(x), weight * plain)
        assert "cast_before_weight=True" in str(module)
        rounded_once = normforge.rms_norm(x, (64,), weight, eps=1e-6)
        assert not torch.equal(module(x).to(x.dtype), rounded_once)


@each_device
def test_the_gradient_of_casting_before_the_weight(device: str) -> None:
    module = randomised(normforge.RMSNorm(64, eps=1e-6, cast_before_weight=True)).to(device)
    x = torch.randn(5, 64, device=device).bfloat16().requires_grad_()
    dy = torch.randn(5, 64, device=device)
    backward(module(x), dy)
    exact = x.detach().double().requires_grad_()
    weight = module.get_parameter("weight")
    exact_weight = weight.detach().double().requires_grad_()
    backward(torch.nn.functional.rms_norm(exact, (64,), exact_weight, 1e-6), dy.double())
    for tensor, twin in ((x, exact), (weight, exact_weight)):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.double(), twin.grad, rtol=2e-2, atol=5e-2)


# Runs where TRITON_INTERPRET is unset: what a CPU tensor meets there is torch's operator.
FALLBACK = """
import json, sys, torch, normforge
from torch.nn import functional as F
torch.manual_seed(0)
report = {"backend": normforge.backend(torch.randn(1)), "equal": [], "close": []}
for dtype in (torch.float64, torch.float32, torch.bfloat16):
    x = torch.randn(4, 3, 8).to(dtype).requires_grad_()
    residual = torch.randn(4, 3, 8, requires_grad=True)
    pairs = ((normforge.LayerNorm, torch.nn.LayerNorm), (normforge.RMSNorm, torch.nn.RMSNorm))
    for ours, theirs in pairs:
        a, b = ours((3, 8), dtype=dtype), theirs((3, 8), dtype=dtype)
        gradients = [torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]) for m in (a, b)]
        report["equal"].append(torch.equal(a(x), b(x)) and all(map(torch.equal, *gradients)))
    for adding, norm in ((normforge.AddLayerNorm(8), F.layer_norm), (normforge.AddRMSNorm(8), F.rms_norm)):
        y, residual_out = adding(x, residual)
        (y.sum() + residual_out.sum()).backward()
        total = x.float() + residual
        report["equal"].append(y.dtype == dtype and residual_out.dtype == torch.float32)
        report["close"].append((y.float() - norm(total, (8,))).abs().max().item())
# Weights of another type than torch's CPU operator takes.
mixed = normforge.layer_norm(torch.randn(2, 8), (8,), torch.ones(8).bfloat16(), torch.zeros(8))
report["equal"].append(mixed.dtype == torch.float32)
halves = normforge.RMSNorm(8, cast_before_weight=True)(torch.randn(2, 8).half())
report["equal"].append(halves.dtype == torch.float32)
for bad in ((torch.zeros(2, 8).int(), (8,)), (torch.zeros(2, 8), (7,))):
    try:
        normforge.layer_norm(*bad)
    except normforge.errors.ArgumentError as error:
        report["equal"].append(True)
# Before torch's meta tensors, which import it themselves.
report["triton"] = "triton" in sys.modules and "triton" not in brought
report["meta"] = normforge.backend(torch.empty(1, device="meta"))
report["meta shape"] = list(normforge.LayerNorm(8, device="meta")(torch.empty(2, 8, device="meta")).shape)
print(json.dumps(report))
"""


@THOROUGH
def test_a_cpu_without_the_interpreter_runs_torchs_operators() -> None:
    code = "import sys, torch; brought = set(sys.modules)\n" + FALLBACK
    report = json.loads(printed(code, TRITON_INTERPRET=None))
    assert report["backend"] == report["meta"] == "torch"
    assert len(report["equal"]) == 3 * 4 + 4
    assert all(report["equal"])
    assert max(report["close"]) < 2e-2
    assert report["meta shape"] == [2, 8]
    # It need not even be installed, as it is not on macOS.
    assert not report["triton"]


def test_a_cpu_with_the_interpreter_turned_off() -> None:
    code = """
import torch, normforge
print(normforge.backend(torch.empty(1)), normforge.LayerNorm(8)(torch.ones(8)).tolist() == [0] * 8)
"""
    assert printed(code, TRITON_INTERPRET="0") == "torch True"


def test_a_cpu_under_the_interpreter_runs_kernels() -> None:
    assert normforge.backend(torch.randn(1)) == "kernel"
