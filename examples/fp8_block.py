"""Train a block in fp8: one kernel adds, normalises and quantises in both directions, and every product is in fp8."""

from __future__ import annotations

from typing import Any

import torch

import normforge

GROUP, E4M3, WANTS = 128, torch.float8_e4m3fn, ("dx", "dweight")
FORM: Any = {"group_size": GROUP, "columnwise": "transposed", "scale_layout": "column_major", "out_dtype": E4M3}


def quantise(rows: torch.Tensor) -> Any:
    """Quantise groups of a row, as the norm does, and return rows and scales as `torch._scaled_mm` takes them."""
    groups = rows.float().reshape(len(rows), -1, GROUP)
    scale = groups.abs().amax(-1).clamp(min=1e-30) / 448.0
    # A product takes rows whose elements are adjacent, and those of a transposed matrix are not.
    return (groups / scale.unsqueeze(-1)).to(E4M3).flatten(-2).contiguous(), scale.t().contiguous().t()


def product(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """Return a @ b.t() in bf16: a product of fp8 where the GPU has one, the dequantised product elsewhere."""
    if a.is_cuda and torch.cuda.get_device_capability(a.device) == (9, 0) and str(torch.version.cuda) >= "12.9":
        return torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16)
    a, b = a.float() * a_scale.repeat_interleave(GROUP, -1), b.float() * b_scale.repeat_interleave(GROUP, -1)
    return (a @ b.t()).bfloat16()


class NormLinear(torch.autograd.Function):
    """The product of norm(x + residual) and a projection, (K, N), and the sum; y is never stored in 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Any, residual: Any, weight: Any, projection: Any, norm: Any = None) -> Any:
        """Save y by columns for the gradient of the projection, and rstd and the sum for those of the norm."""
        made: Any = (norm or normforge.quantised_rms_norm)(x, weight, residual=residual, **FORM)
        ctx.save_for_backward(weight, projection, made.rstd, made.residual_out, made.columnwise, made.columnwise_scale)
        ctx.set_materialize_grads(False)
        return product(made.y, made.y_scale, *quantise(projection)), made.residual_out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dtotal: torch.Tensor | None) -> Any:
        """Quantise the gradient of the product in both directions as well."""
        weight, projection, rstd, total, *columns = ctx.saved_tensors
        dy = product(*quantise(dout), *quantise(projection.t()))
        dx, dweight, *_ = normforge.rmsnorm2d_bwd(dy, total, weight, rstd=rstd, dresidual_out=dtotal, wants=WANTS)
        return dx, dx, dweight, product(*quantise(dout.t()), *columns), None


def in_bf16(x: Any, residual: Any, weight: Any, projection: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same block with a product in bf16."""
    y, total = normforge.add_rms_norm(x, residual, weight=weight)
    return torch.nn.functional.linear(y, projection.bfloat16()), total


def losses(block: Any, steps: int = 3, m: int = 128, n: int = 256, k: int = 128) -> Any:
    """Train a block towards the products of another projection, and yield the loss of each step."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        (x, residual), weight = torch.randn(2, m, n).bfloat16(), torch.ones(n, requires_grad=True)
        first, second = torch.randn(2, k, n) / n**0.5
    target, projection = in_bf16(x, residual, weight.detach(), first)[0].float(), second.requires_grad_()
    optimiser = torch.optim.Adam([weight, projection], lr=0.02)
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(block(x, residual, weight, projection)[0].float(), target)
        weight.grad, projection.grad = torch.autograd.grad(loss, (weight, projection))
        optimiser.step()
        yield round(loss.item(), 4)


def main() -> tuple[list[float], list[float]]:
    """Return the losses in fp8 and in bf16, step by step."""
    fp8, bf16 = list(losses(NormLinear.apply)), list(losses(in_bf16))
    print(f"losses in fp8: {fp8}\nlosses in bf16: {bf16}")
    return fp8, bf16


if __name__ == "__main__":
    main()
