"""Compute cases by torch's operators in the inputs' own types, which flash-attention's rule compares with."""

from __future__ import annotations

import torch
from torch.nn import functional

from .case import RESIDUAL_OUT, Case, Norm, Y


def run(case: Case, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute y and the gradients of a case with a weight, in weight's dtype from a sum in x's."""
    names = [name for name in ("x", "residual", "weight", "bias") if name in given]
    leaves = {name: given[name].detach().requires_grad_() for name in names}
    x, weight = leaves["x"], leaves["weight"]
    total = x if case.residual is None else (x + leaves["residual"]).to(x.dtype)
    shape, wide = (case.n,), total.to(weight.dtype)
    if case.norm is Norm.LAYER:
        y = functional.layer_norm(wide, shape, weight, leaves.get("bias"), case.eps).to(x.dtype)
    else:
        y = functional.rms_norm(wide, shape, weight, case.eps).to(x.dtype)
    outputs = {Y: (y, given.get("dy")), RESIDUAL_OUT: (total, given.get("dresidual_out"))}
    arriving = [(output, gradient) for output, gradient in outputs.values() if gradient is not None]
    gradients = torch.autograd.grad(
        [output for output, _ in arriving],
        list(leaves.values()),
        [gradient.to(output.dtype) for output, gradient in arriving],
    )
    return {"y": y.detach(), **{f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True)}}
