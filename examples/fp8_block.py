"""A block in fp8 by hand: one kernel adds the residual, normalises and quantises; a matrix product follows."""

from __future__ import annotations

import torch

import normforge


def main() -> float:
    """Return the error of the block, relative to the largest element of the same block in fp32."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, residual = (torch.randn(16, 256, device=device).bfloat16() for _ in range(2))
    weight = torch.rand(256, device=device).bfloat16() + 0.5
    projection = torch.randn(256, 128, device=device) / 16

    # One launch: the sum is stored for the next block, and each row of y has a scale.
    out = normforge.rmsnorm2d_fwd(
        x, weight, residual=residual, fadd="pre_add_store", fquant="dynamic", out_dtype=torch.float8_e4m3fn
    )
    assert out.y_scale is not None
    # A GPU's fp8 matrix product takes y and y_scale as they are (torch._scaled_mm); here rows are scaled back first.
    product = (out.y.float() * out.y_scale[:, None]) @ projection

    total = x.float() + residual.float()
    expected = torch.nn.functional.rms_norm(total, (256,), weight.float(), 1e-6) @ projection
    error = float((product - expected).abs().max() / expected.abs().max())
    print(f"relative error of the fp8 block: {error:.2g}")
    return error


if __name__ == "__main__":
    main()
