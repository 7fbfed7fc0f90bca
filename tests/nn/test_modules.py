"""The modules: torch's in all but speed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

import normforge
from normforge.errors import ArgumentError
from normforge.selection import dispatch
from proving.cases import cases, check, operands

from ..calling import each_device, printed
from .models import randomised
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


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET")
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.mark.usefixtures("no_interpreter")
def test_a_cpu_without_the_interpreter_runs_torchs_operators() -> None:
    assert normforge.backend(torch.randn(1)) == normforge.backend(torch.empty(1, device="meta")) == "torch"
    for dtype, (theirs, ours) in product((torch.float64, torch.float32, torch.bfloat16), PAIRS.items()):
        x = torch.randn(4, 3, 8).to(dtype)
        found, wanted = (results(module((3, 8), dtype=dtype), x) for module in (ours, theirs))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    for case in cases("plain", vary=("norm", "dtype")):
        check(case, operands(case))
    # Weights of another type than torch's CPU operator takes.
    mixed = normforge.layer_norm(torch.randn(2, 8), (8,), torch.ones(8).bfloat16(), torch.zeros(8))
    halves = normforge.RMSNorm(8, cast_before_weight=True)(torch.randn(2, 8).half())
    assert mixed.dtype is halves.dtype is torch.float32
    for x, shape in ((torch.zeros(2, 8).int(), (8,)), (torch.zeros(2, 8), (7,))):
        with pytest.raises(ArgumentError):
            normforge.layer_norm(x, shape)
    assert normforge.LayerNorm(8, device="meta")(torch.empty(2, 8, device="meta")).shape == (2, 8)


@pytest.mark.parametrize("value", [None, "0"])
def test_a_cpu_without_the_interpreter_needs_no_triton(value: str | None) -> None:
    """It need not even be installed, as it is not on macOS."""
    code = """
import sys, torch
brought = {*sys.modules}
import normforge
print(normforge.backend(torch.empty(1)), normforge.LayerNorm(8)(torch.ones(8)).tolist() == [0] * 8)
print("triton" in {*sys.modules} - brought)
"""
    backend, zeros, brought = printed(code, TRITON_INTERPRET=value).split()
    assert (backend, zeros) == ("torch", "True")
    assert value or brought == "False"


def test_a_cpu_under_the_interpreter_runs_kernels() -> None:
    assert normforge.backend(torch.randn(1)) == "kernel"
