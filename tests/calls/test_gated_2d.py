"""gated_layernorm2d_fwd and gated_rmsnorm2d_fwd: quantised rows, of groups too, and statistics, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import normforge
from normforge import LayerNormOutput
from normforge.calls import road
from normforge.codegen.values import Norm
from normforge.errors import ConflictError, GradientError, IllegalCombinationError, LayoutError
from normforge.reference import gated as gating_reference
from normforge.selection import dispatch
from normforge.tools.compare import compare

from ..calling import QUANTISED, each_device

FORWARD: dict[str, Callable[..., LayerNormOutput]] = {
    "layer": normforge.gated_layernorm2d_fwd,
    "rms": normforge.gated_rmsnorm2d_fwd,
}
each_norm = pytest.mark.parametrize("norm", FORWARD)

N = 48


def operands(
    norm: str, device: str = "cpu", n: int = N, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    x, gate = torch.randn(5, 3, 2 * n, device=device).to(dtype).chunk(2, -1)
    found = {"x": x, "gate": gate, "weight": torch.randn(n, device=device)}
    return found | ({"bias": torch.randn(n, device=device)} if norm == "layer" else {})


def check(norm: str, given: dict[str, torch.Tensor], *, first: bool, group: int | None, **options: Any) -> None:
    """Run a call twice, known and not, and hold every output against the oracle."""
    n = group or given["x"].shape[-1]

    def in_groups(rows: torch.Tensor) -> torch.Tensor:
        return rows if group is None else rows.view(*rows.shape[:-1], -1, n)

    exact = {name: in_groups(tensor) for name, tensor in given.items()}
    wanted = gating_reference.FORWARD[Norm(norm)](
        **exact, gating="after_norm" if first else "before_norm", eps=1e-5, **options
    )
    for _ in range(2):
        found = FORWARD[norm](**given, norm_before_gate=first, group_size=group, eps=1e-5, **options)
        assert found.y.shape == given["x"].shape
        findings = compare(found._replace(y=in_groups(found.y)), wanted)
        assert not [finding for finding in findings if not finding.ok], findings


@each_device
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize(("norm", "first", "group"), list(product(FORWARD, (True, False), (None, 16))))
def test_rows_are_quantised_with_their_gate(
    norm: str, first: bool, group: int | None, dtype: torch.dtype, device: str
) -> None:
    check(norm, operands(norm, device), first=first, group=group, fquant="dynamic", out_dtype=dtype)


@each_device
@each_norm
def test_statistics_and_every_option(norm: str, device: str) -> None:
    check(norm, operands(norm, device), first=False, group=None, save_mv=True, activation="sigmoid")
    check(norm, operands(norm, device), first=True, group=24, save_mv=True, out_dtype=torch.float32)
    given = operands(norm, device, dtype=torch.float16)
    check(norm, given, first=True, group=16, save_mv=True, fquant=2, activation="sigmoid")


@each_device
@pytest.mark.parametrize("n", [700, pytest.param(33000, marks=pytest.mark.thorough)])
def test_long_rows_are_quantised(n: int, device: str) -> None:
    for first in (True, False):
        check("layer", operands("layer", device, n), first=first, group=None, fquant="dynamic")


@each_device
def test_hard_rows_are_quantised(device: str) -> None:
    """A closed gate leaves a row of zeros, whose scale is 1, and a NaN its own row alone."""
    given = operands("rms", device)
    x, gate = given["x"].clone(), given["gate"].clone()
    gate[0], x[1, 1, 2] = -300.0, float("nan")
    found = normforge.gated_rmsnorm2d_fwd(x, gate, given["weight"], fquant="dynamic", group_size=16)
    assert found.y_scale is not None
    assert found.y_scale.shape == (5, 3, 3)
    assert torch.equal(found.y_scale[0], torch.ones_like(found.y_scale[0]))
    assert not found.y[0].any()
    broken = ~found.y_scale.isfinite()
    assert broken.sum() == 1
    assert broken[1, 1, 0]


def test_known_calls_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "plans", {})
    given = operands("rms")
    FORWARD["rms"](**given, fquant="dynamic")
    monkeypatch.delattr(road, "check")
    FORWARD["rms"](**given, fquant="dynamic")
    normforge.gated_rmsnorm2d_fwd(given["x"][:2], given["gate"][:2], given["weight"], fquant=2)


@pytest.mark.parametrize("norm", [pytest.param("layer", marks=pytest.mark.thorough), "rms"])
def test_a_compiled_call_is_the_eager_one(norm: str) -> None:
    given = operands(norm)

    def call(**tensors: torch.Tensor) -> tuple[Any, ...]:
        found = FORWARD[norm](**tensors, fquant="dynamic", group_size=16)
        return found.y, found.y_scale

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(**given), call(**given), strict=True):
        assert torch.equal(found, wanted)
    torch._dynamo.reset()


def test_there_is_no_gradient() -> None:
    given = operands("rms")
    for _ in range(2):
        for name in given:
            wanting = {**given, name: given[name].float().requires_grad_()}
            with pytest.raises(GradientError, match=f"{name} requires a gradient and the 2d functions compute none"):
                FORWARD["rms"](**wanting)
            with pytest.raises(GradientError, match="a quantised output has none"):
                FORWARD["rms"](**wanting, fquant="dynamic")
            with torch.no_grad():
                FORWARD["rms"](**wanting)


def test_what_there_is_no_kernel_for_is_refused() -> None:
    given = operands("rms")
    with pytest.raises(IllegalCombinationError, match="gated norms have no fquant smooth_dynamic"):
        FORWARD["rms"](**given, fquant="smooth_dynamic")
    with pytest.raises(IllegalCombinationError, match="fquant none"):
        FORWARD["rms"](**given, out_dtype=torch.int8)
    with pytest.raises(ConflictError, match="activation='gelu' is no mode"):
        FORWARD["rms"](**given, activation="gelu")
    with pytest.raises(LayoutError, match="gate has stride 2 in its last dimension"):
        normforge.gated_rmsnorm2d_fwd(given["x"], torch.randn(5, 3, 2 * N)[..., ::2])


def test_no_rows() -> None:
    found = normforge.gated_rmsnorm2d_fwd(torch.empty(0, N), torch.empty(0, N), fquant="dynamic", group_size=16)
    assert found.y_scale is not None
    assert (found.y.shape, found.y_scale.shape) == ((0, N), (0, 3))
