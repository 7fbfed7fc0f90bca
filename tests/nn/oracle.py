"""Calls of the functional API, and their outputs and gradients held against fp64 autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

import normforge
from normforge.families.in_parts import InParts
from normforge.selection import dispatch
from proving.cases import BACKWARD_TOLERANCES, EPS, FORWARD_TOLERANCES, close, coarser, doubled

FUNCTIONS: dict[str, Callable[..., object]] = {
    "layer": normforge.layer_norm,
    "rms": normforge.rms_norm,
    "add_layer": normforge.add_layer_norm,
    "add_rms": normforge.add_rms_norm,
}

each_norm = pytest.mark.parametrize("norm", ["layer", "rms"])
each_add = pytest.mark.parametrize("norm", ["add_layer", "add_rms"])
each_function = pytest.mark.parametrize("norm", FUNCTIONS)


@dataclass
class Operands:
    """The tensors of a call of the functional API; they require gradients unless a test says otherwise."""

    x: torch.Tensor
    residual: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def present(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


def operands(
    norm: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    normalized: int = 1,
    weight: torch.dtype | None = torch.float32,
    bias: torch.dtype | None = torch.float32,
    residual: torch.dtype | None = None,
) -> Operands:
    """Random operands for a function of FUNCTIONS; a dtype of None leaves weight or bias out."""
    tail = tuple(shape[len(shape) - normalized :])

    def leaf(size: Sequence[int], of: torch.dtype, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(*size, device=device) + mean).to(of).requires_grad_()

    return Operands(
        x=leaf(shape, dtype, 0.3),
        residual=leaf(shape, residual or dtype) if norm.startswith("add") else None,
        weight=None if weight is None else leaf(tail, weight, 1.0),
        bias=None if bias is None or norm.endswith("rms") else leaf(tail, bias),
    )


def call(norm: str, given: Operands, normalized: int = 1, eps: float = EPS) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What normforge makes of operands: y and, of an adding function, residual_out."""
    parameters = [given.weight] if norm.endswith("rms") else [given.weight, given.bias]
    if given.residual is None:
        y = FUNCTIONS[norm](given.x, given.x.shape[given.x.dim() - normalized :], *parameters, eps)
        assert isinstance(y, torch.Tensor)
        return y, None
    result = FUNCTIONS[norm](given.x, given.residual, *parameters, eps)
    assert isinstance(result, tuple)
    return result


def expected(
    norm: str, given: Operands, normalized: int = 1, eps: float = EPS
) -> tuple[Operands, torch.Tensor, torch.Tensor | None]:
    """fp64 copies of operands, and what torch makes of them."""
    exact = Operands(**doubled(given.present()))
    total = exact.x if exact.residual is None else exact.x + exact.residual
    shape = list(total.shape[total.dim() - normalized :])
    if norm.endswith("rms"):
        y = functional.rms_norm(total, shape, exact.weight, eps)
    else:
        y = functional.layer_norm(total, shape, exact.weight, exact.bias, eps)
    return exact, y, None if exact.residual is None else total


def check(
    norm: str,
    given: Operands,
    *,
    normalized: int = 1,
    eps: float = EPS,
    dy: torch.Tensor | None = None,
    dresidual_out: torch.Tensor | None = None,
) -> None:
    """Fail unless outputs, and the gradients of dy and dresidual_out (those given), are fp64 autograd's.

    Each gradient must have its tensor's shape and dtype, and what does not require one must not get one.
    """
    outputs, (exact, *wanted) = call(norm, given, normalized, eps), expected(norm, given, normalized, eps)
    agree(given, outputs, exact, wanted, (dy, dresidual_out))


def agree(
    given: Operands,
    outputs: Sequence[torch.Tensor | None],
    exact: Operands,
    wanted: Sequence[torch.Tensor | None],
    arriving: Sequence[torch.Tensor | None],
) -> None:
    """Fail unless outputs and gradients of all that requires one are fp64 autograd's, of the right shapes and types.

    Args:
        given: the operands of the call.
        outputs: its outputs, None where it has none.
        exact: fp64 leaves of the operands.
        wanted: outputs in fp64.
        arriving: the gradient of each output, or None.
    """
    residual = given.x.dtype if given.residual is None else given.residual.dtype
    roots, gradients, exact_roots = [], [], []
    for output, exact_output, gradient in zip(outputs, wanted, arriving, strict=True):
        if output is None or exact_output is None:
            assert output is exact_output
            continue
        assert output.shape == exact_output.shape
        close("output", output, exact_output, FORWARD_TOLERANCES[coarser(output.dtype, residual)])
        if gradient is not None:
            roots.append(output)
            gradients.append(gradient)
            exact_roots.append(exact_output)
    torch.autograd.backward(roots, gradients)
    torch.autograd.backward(exact_roots, [gradient.double() for gradient in gradients])
    for name, tensor in given.present().items():
        its = vars(exact)[name].grad
        if not tensor.requires_grad or its is None:
            assert tensor.grad is None, f"a gradient of {name} that nothing asked for"
            continue
        assert tensor.grad is not None, f"no gradient of {name}"
        assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, tensor.dtype)
        close(
            f"gradient of {name}",
            tensor.grad,
            its,
            BACKWARD_TOLERANCES[coarser(coarser(given.x.dtype, residual), tensor.dtype)],
        )


def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What is added to at each backward pass of rows in parts that is like none before: whether kernels computed it."""
    monkeypatch.setattr(dispatch, "plans", {})
    found: list[bool] = []
    takes = InParts.takes

    def noted(*given: Any) -> bool:
        found.append(takes(*given))
        return found[-1]

    monkeypatch.setattr(InParts, "takes", noted)
    return found


def second_order(outputs: Sequence[torch.Tensor], leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Gradients of the squares of gradients."""
    loss = outputs[0].sin().sum() + sum(output.square().sum() for output in outputs[1:])
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), leaves)


def backward(root: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    """`root.backward(gradient)`, which has no types."""
    torch.autograd.backward([root], None if gradient is None else [gradient])
