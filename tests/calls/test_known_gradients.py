"""Backward passes of modulated norms whose tensors are like those of one before: launched without being looked at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import normforge
from normforge.families.in_parts import InParts
from normforge.selection import dispatch

from ..calling import each_device
from .looked import Looked

SAMPLES, ROWS, N = 2, 9, 48


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    return Looked(monkeypatch, InParts, "gradients")


def operands(
    device: str, *others: str, dtype: torch.dtype = torch.float32, rows: int = ROWS
) -> dict[str, torch.Tensor]:
    """Of a call: x, scale and shift, as chunks of one tensor, and what else is named."""
    generator = torch.Generator().manual_seed(rows)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    scale, shift, gate = draw(SAMPLES, 3 * N).chunk(3, dim=-1)
    found = {"x": draw(SAMPLES, rows, N), "scale": scale, "shift": shift, "gate": gate}
    found |= {"residual": draw(SAMPLES, rows, N), "weight": draw(N), "bias": draw(N)}
    return {name: found[name].requires_grad_() for name in ("x", "scale", "shift", *others)}


def gradients(
    function: Callable[..., Any], given: dict[str, Any], due: tuple[str, ...] | None = None, dy: Any = None
) -> dict[str, torch.Tensor]:
    made = function(**given)
    outputs = [each for each in (made if isinstance(made, tuple) else (made,)) if each.requires_grad]
    arrived = [torch.linspace(-1, 1, each.numel()).view(each.shape).to(each) for each in outputs]
    names = due or tuple(given)
    found = torch.autograd.grad(
        outputs, [given[name] for name in names], [dy, *arrived[1:]] if dy is not None else arrived
    )
    return dict(zip(names, found, strict=True))


def exactly(norm: str, x: Any, scale: Any, shift: Any, gate: Any = None, residual: Any = None) -> Any:
    total = x if gate is None else x * gate[:, None]
    total = total if residual is None else total + residual
    centred = total - total.mean(-1, keepdim=True) if norm == "layer" else total
    eps = 1e-5 if norm == "layer" else 1e-6
    y = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + scale[:, None]) + shift[:, None]
    return y if residual is None else (y, total)


def exact(norm: str, given: dict[str, Any], dy: Any = None) -> dict[str, torch.Tensor]:
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    return gradients(partial(exactly, norm), wide, dy=None if dy is None else dy.double())


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "layer": normforge.modulated_layer_norm,
    "rms": normforge.modulated_rms_norm,
}


@each_device
@pytest.mark.parametrize("norm", FUNCTIONS)
@pytest.mark.parametrize("others", [(), ("residual",), ("gate", "residual")], ids=str)
def test_the_second_backward_pass_is_known(norm: str, others: tuple[str, ...], device: str, looked: Looked) -> None:
    function = FUNCTIONS[norm]
    first = gradients(function, operands(device, *others))
    assert looked.counts() == (1, 0)
    given = operands(device, *others)
    second = gradients(function, given)
    assert looked.counts() == (0, 1)
    wanted = exact(norm, given)
    for name, gradient in second.items():
        assert torch.equal(gradient, first[name]), name
        torch.testing.assert_close(gradient.double(), wanted[name], rtol=1e-4, atol=1e-4, msg=name)


@each_device
def test_other_values_and_addresses(device: str, looked: Looked) -> None:
    """What is known of a call is neither its numbers nor where they lie."""
    function = normforge.modulated_layer_norm
    gradients(function, operands(device))
    given = operands(device)
    with torch.no_grad():
        for tensor in given.values():
            tensor.mul_(2).add_(1)
    found, wanted = gradients(function, given), exact("layer", given)
    assert looked.counts() == (1, 1)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.double(), wanted[name], rtol=1e-4, atol=1e-4, msg=name)


@each_device
@pytest.mark.parametrize("due", [("x",), ("scale",), ("shift", "x"), ("residual", "gate"), ("gate",)], ids=str)
def test_only_what_is_due_is_made(due: tuple[str, ...], device: str, looked: Looked) -> None:
    """Of which gradients are due calls are known by too."""
    given = operands(device, "gate", "residual")
    everything = gradients(normforge.modulated_layer_norm, given)
    for name, tensor in given.items():
        tensor.requires_grad_(name in due)
    for _ in range(2):
        found = gradients(normforge.modulated_layer_norm, given, due)
        for name in due:
            torch.testing.assert_close(found[name], everything[name], rtol=1e-5, atol=1e-5)
    assert looked.counts() == (2, 1)


@each_device
def test_gradients_that_were_not_due_before(device: str, looked: Looked) -> None:
    """Of the same tensors, which require them all: torch may ask for those alone that somebody asked for."""
    given = operands(device)
    first = gradients(FUNCTIONS["layer"], given, ("x",))
    second = gradients(FUNCTIONS["layer"], given)
    wanted = exact("layer", given)
    assert torch.equal(first["x"], second["x"])
    for name, gradient in second.items():
        torch.testing.assert_close(gradient.double(), wanted[name], rtol=1e-4, atol=1e-4, msg=name)
    assert sum(looked.counts()) == 2


@each_device
@pytest.mark.parametrize("others", [("residual",), ("gate", "residual")], ids=str)
@pytest.mark.parametrize("first", ["y alone", "both"])
def test_a_sum_that_is_read_or_not(first: str, others: tuple[str, ...], device: str, looked: Looked) -> None:
    """Of a model's blocks the last one's sum is read by nobody, and its backward pass runs before all others'."""
    function = FUNCTIONS["rms"]

    def alone(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **given: function(**given)[0]

    ways: list[Callable[[Any], Any]] = [alone, lambda function: function]
    for way in ways if first == "y alone" else reversed(ways):
        given = operands(device, *others)
        found = gradients(way(function), given)
        assert looked.counts() == (1, 0)
        wide = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
        wanted = gradients(way(partial(exactly, "rms")), wide)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient.double(), wanted[name], rtol=1e-4, atol=1e-4, msg=name)
    for way in ways:
        gradients(way(function), operands(device, *others))
    assert looked.counts() == (0, 2)


@each_device
def test_what_differs_is_looked_at(device: str, looked: Looked) -> None:
    function = normforge.modulated_layer_norm
    gradients(function, operands(device))
    looked.counts()
    arrived = {
        "transposed": torch.randn(ROWS, SAMPLES, N, device=device).transpose(0, 1),
        "wider": torch.randn(SAMPLES, ROWS, 2 * N, device=device)[..., :N],
        "expanded": torch.randn((), device=device).expand(SAMPLES, ROWS, N),
        "misaligned": torch.randn(SAMPLES * ROWS * N + 1, device=device)[1:].view(SAMPLES, ROWS, N),
        "misaligned again": torch.randn(SAMPLES * ROWS * N + 1, device=device)[1:].view(SAMPLES, ROWS, N),
    }
    counts = {}
    for name, dy in arrived.items():
        given = operands(device)
        found, wanted = gradients(function, given, dy=dy), exact("layer", given, dy)
        counts[name] = looked.counts()
        for each, gradient in found.items():
            torch.testing.assert_close(gradient.double(), wanted[each], rtol=1e-4, atol=1e-4, msg=f"{name}: {each}")
    # Copied, and then like the first.
    copied = dict.fromkeys(("transposed", "expanded"), (1, 1))
    assert counts == {**dict.fromkeys(arrived, (1, 0)), **copied, "misaligned again": (0, 1)}
    for other in (operands(device, rows=ROWS + 3), operands(device, dtype=torch.bfloat16)):
        gradients(function, other)
        assert looked.counts() == (1, 0)


@each_device
def test_a_gradient_that_is_its_negative_is_never_taken_for_what_lies_there(device: str, looked: Looked) -> None:
    function = normforge.modulated_layer_norm
    gradients(function, operands(device))
    dy = torch.randn(SAMPLES, ROWS, N, dtype=torch.complex64, device=device).conj().imag
    given = operands(device)
    found, wanted = gradients(function, given, dy=dy), exact("layer", given, dy)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.double(), wanted[name], rtol=1e-4, atol=1e-4, msg=name)


@each_device
def test_what_kernels_leave_sums_for_is_looked_at_each_time(device: str, looked: Looked) -> None:
    """With a weight, and with a scale for all samples, gradients are made of sums by torch's operators."""
    for given in (operands(device, "weight", "bias"), operands(device)):
        if "weight" not in given:
            given["scale"] = given["scale"].detach()[0].clone().requires_grad_()
        found = [gradients(normforge.modulated_layer_norm, given) for _ in range(2)]
        assert all(torch.equal(found[0][name], found[1][name]) for name in given)
        assert looked.counts() == (2, 0)


@each_device
def test_a_second_derivative_is_not_known(device: str, looked: Looked) -> None:
    """What a gradient is asked of keeps being torch's operators."""
    given = operands(device)
    gradients(normforge.modulated_layer_norm, given)
    looked.counts()
    y = FUNCTIONS["layer"](**given)
    (dx,) = torch.autograd.grad(y.square().sum(), given["x"], create_graph=True)
    assert dx.requires_grad
    assert looked.counts() == (0, 0)


@each_device
def test_another_table_knows_nothing(device: str, looked: Looked) -> None:
    gradients(normforge.modulated_layer_norm, operands(device))
    dispatch.forget()
    gradients(normforge.modulated_layer_norm, operands(device))
    assert looked.counts() == (2, 0)


@each_device
def test_under_batch_invariance_calls_are_known_by_themselves(device: str, looked: Looked) -> None:
    dispatch.forget()
    gradients(normforge.modulated_layer_norm, operands(device))
    with normforge.batch_invariant():
        for _ in range(2):
            gradients(normforge.modulated_layer_norm, operands(device))
    assert looked.counts() == (2, 1)


@each_device
def test_under_batch_invariance_a_call_whose_tensors_are_copied_is_looked_at(device: str, looked: Looked) -> None:
    dispatch.forget()
    dy = torch.randn(SAMPLES * ROWS * N + 1, device=device)[1:].view(SAMPLES, ROWS, N)
    with normforge.batch_invariant():
        found = [
            gradients(normforge.modulated_layer_norm, operands(device), dy=given) for given in (dy, dy, dy.clone())
        ]
    assert looked.counts() == (3, 0)
    for name, gradient in found[0].items():
        assert all(torch.equal(gradient, other[name]) for other in found[1:]), name
