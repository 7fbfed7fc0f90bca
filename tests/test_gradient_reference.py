"""What the oracle of gradients rounds first, and what holds gradients against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normforge import reference
from normforge.calls.outputs import NormGradients
from normforge.reference.gradients import ReferenceGradients
from normforge.tools.compare import compare_gradients

M, N = 3, 37
EPS = 1e-5
OFFSET = 0.5


def fp64(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def gradients(norm: str, operands: dict[str, Any], statistics: dict[str, Any]) -> ReferenceGradients:
    if norm == "layer":
        return reference.layernorm2d_bwd(**operands, **statistics)
    return reference.rmsnorm2d_bwd(**operands, **statistics, weight_offset=OFFSET)


@pytest.mark.parametrize(
    ("dy_dtype", "x_dtype", "to"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
        (torch.float16, torch.float32, torch.float16),
        (torch.float32, torch.float32, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_dweight_is_of_rows_rounded_first_and_nothing_else_is(
    norm: str, dy_dtype: torch.dtype, x_dtype: torch.dtype, to: torch.dtype | None
) -> None:
    x, dy = (torch.randn(M, N) * 2 + 1).to(x_dtype), torch.randn(M, N).to(dy_dtype)
    operands = {"dy": dy, "x": x, "weight": fp64(N)}
    mean = x.double().mean(-1).float() if norm == "layer" else torch.zeros(M)
    rstd = torch.rand(M)
    statistics = {"mean": mean, "rstd": rstd} if norm == "layer" else {"rstd": rstd}
    actual = gradients(norm, operands, statistics | {"cast": "before_weight"})
    once = gradients(norm, operands, statistics)
    h = (x.double() - mean.double().unsqueeze(-1)) * rstd.double().unsqueeze(-1)
    rounded = h if to is None else h.to(to).double()
    torch.testing.assert_close(actual.dweight, (dy.double() * rounded).sum(0), atol=1e-12, rtol=1e-12)
    assert torch.equal(actual.dx, once.dx)
    assert (actual.open is None) == (to is None)


def test_a_gradient_that_fp16_holds_as_a_subnormal_is_rounded_to_its_step() -> None:
    step, rows = 2.0**-24, fp64(M, N)
    expected = reference.rmsnorm2d_bwd(torch.zeros(M, N), rows, rstd=torch.ones(M))
    for off, ok in ((0.4, True), (0.6, False)):
        found = NormGradients(torch.full((M, N), 5 * step, dtype=torch.float16), None, None, None)
        (finding,) = compare_gradients(found, expected._replace(dx=torch.full_like(rows, (5 + off) * step)))
        assert finding.ok == ok


def test_x_and_x_bias_are_added_in_fp32() -> None:
    """1 + 2**-24 is 1 in fp32: a column that is the mean there has no weight gradient, whatever fp64 makes of it."""
    operands: dict[str, Any] = {
        "dy": torch.ones(1, 3),
        "x": torch.tensor([[1.0, 2.0, 0.0]]),
        "x_bias": torch.tensor([2.0**-24, 0.0, 0.0]),
        "mean": torch.tensor([1.0]),
        "rstd": torch.tensor([1.0]),
    }
    assert reference.layernorm2d_bwd(**operands).dweight.tolist() == [0.0, 1.0, -1.0]
    exact = {name: tensor.double() for name, tensor in operands.items()}
    assert reference.layernorm2d_bwd(**exact).dweight.tolist() == [2.0**-24, 1.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NormGradients._fields)
def test_a_gradient_that_is_off_is_told(name: str, dtype: torch.dtype) -> None:
    x, dy = torch.randn(M, N), torch.randn(M, N)
    mean, rstd = x.mean(-1), (x.var(-1, correction=0) + EPS).rsqrt()
    given: dict[str, Any] = {"x_bias": torch.zeros(N), "dropout_p": 0.25, "dropout_rng": torch.tensor([1, 2])}
    expected = reference.layernorm2d_bwd(dy, x, torch.randn(N), mean=mean, rstd=rstd, **given)
    perfect = NormGradients(*(getattr(expected, field).to(dtype) for field in NormGradients._fields))
    assert all(finding.ok for finding in compare_gradients(perfect, expected))
    spoilt = getattr(perfect, name).clone()
    spoilt.view(-1)[5] += 0.02 * (1 + spoilt.view(-1)[5].abs())
    for wrong in (spoilt, None):
        findings = compare_gradients(perfect._replace(**{name: wrong}), expected, due=NormGradients._fields)
        assert [finding.name for finding in findings if not finding.ok] == [name]
