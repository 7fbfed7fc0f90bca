"""A LayerNorm's forward pass in seven steps. Each function takes x (M, N), weight (N,), bias (N,) and epsilon."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from normforge.generated.ln_fwd_bf16 import ln_fwd_bf16_one_pass, ln_fwd_bf16_rows


# Step 1.
@triton.jit
def sweep_three_times(x_ptr, weight_ptr, bias_ptr, y_ptr, row_stride, N, eps, BLOCK: tl.constexpr):
    """Take a row per program, and read it once for the mean, once for the variance and once for y."""
    row = tl.program_id(0)
    x_ptr += row * row_stride
    y_ptr += row * row_stride
    lanes = tl.arange(0, BLOCK)

    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + lanes
        total += tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.sum(total) / N

    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + lanes
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        centred = tl.where(cols < N, x - mean, 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares) / N + eps)

    for start in range(0, N, BLOCK):
        cols = start + lanes
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + cols, (x - mean) * rstd * weight + bias, mask=cols < N)


def three_sweeps(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Step 1, with the tutorial's choice of a block and of warps."""
    (m, n), y = x.shape, torch.empty_like(x)
    block = min(triton.next_power_of_2(n), 65536 // x.element_size())
    warps = min(max(block // 256, 1), 8)
    sweep_three_times[(m,)](x, weight, bias, y, x.stride(0), n, eps, BLOCK=block, num_warps=warps)
    return y


# Step 2.
@triton.jit
def read_once(x_ptr, weight_ptr, bias_ptr, y_ptr, row_stride, N, eps, BLOCK: tl.constexpr):
    """Take a row per program, in registers after one reading."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x) / N
    centred = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred) / N + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * row_stride + cols, centred * rstd * weight + bias, mask=mask)


def held(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Step 2."""
    (m, n), y = x.shape, torch.empty_like(x)
    block = triton.next_power_of_2(n)
    warps = min(max(block // 1024, 1), 16)
    read_once[(m,)](x, weight, bias, y, x.stride(0), n, eps, BLOCK=block, num_warps=warps)
    return y


# Step 3.
@triton.jit
def read_once_around_a_pivot(x_ptr, weight_ptr, bias_ptr, y_ptr, row_stride, N, eps, BLOCK: tl.constexpr):
    """Take a row per program, and measure and subtract the mean's rounding error."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    pivot = tl.sum(x) / N
    centred = tl.where(mask, x - pivot, 0.0)
    shift = tl.sum(centred) / N
    variance = tl.sum(centred * centred) / N - shift * shift
    rstd = tl.rsqrt(variance + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * row_stride + cols, (centred - shift) * rstd * weight + bias, mask=mask)


def pivoted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Step 3."""
    (m, n), y = x.shape, torch.empty_like(x)
    block = triton.next_power_of_2(n)
    warps = min(max(block // 1024, 1), 16)
    read_once_around_a_pivot[(m,)](x, weight, bias, y, x.stride(0), n, eps, BLOCK=block, num_warps=warps)
    return y


# Step 4.
@triton.jit
def load_as_fp32(ptr, cols, N: tl.constexpr, IS_FULL: tl.constexpr):
    """Load a chunk of N values, with a mask only where it reaches beyond them."""
    values = tl.load(ptr + cols) if IS_FULL else tl.load(ptr + cols, mask=cols < N, other=0.0)
    return values.to(tl.float32)


@triton.jit
def unroll_chunks(
    x_ptr, weight_ptr, bias_ptr, y_ptr, row_stride, eps, N: tl.constexpr, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr
):
    """Take a row per program, in chunks that are unrolled because N is known when the kernel is compiled."""
    offset = tl.program_id(0).to(tl.int64) * row_stride
    if ALIGNMENT > 0:
        offset = tl.multiple_of(offset, ALIGNMENT)
    x_ptr += offset
    y_ptr += offset

    chunks = ()
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        chunk = load_as_fp32(x_ptr, start + tl.arange(0, BLOCK), N, start + BLOCK <= N)
        chunks += (chunk,)
        total += chunk
    pivot = tl.sum(total) / N

    deviations = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        centred = chunks[start // BLOCK] - pivot
        if start + BLOCK > N:
            centred = tl.where(start + tl.arange(0, BLOCK) < N, centred, 0.0)
        deviations += centred
        squares += centred * centred
    shift = tl.sum(deviations) / N
    rstd = tl.rsqrt(tl.sum(squares) / N - shift * shift + eps)

    for start in tl.static_range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        y = (chunks[start // BLOCK] - pivot - shift) * rstd
        y *= load_as_fp32(weight_ptr, cols, N, start + BLOCK <= N)
        y += load_as_fp32(bias_ptr, cols, N, start + BLOCK <= N)
        tl.store(y_ptr + cols, y, mask=None if start + BLOCK <= N else cols < N)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, alignment: int = 0) -> torch.Tensor:
    """Step 4; with an alignment, step 5."""
    (m, n), y = x.shape, torch.empty_like(x)
    block = min(triton.next_power_of_2(n), 1024)
    warps = max(block // 256, 1)
    unroll_chunks[(m,)](x, weight, bias, y, x.stride(0), eps, N=n, BLOCK=block, ALIGNMENT=alignment, num_warps=warps)
    return y


# Step 5.
def alignment_of(row_stride: int) -> int:
    """Return the largest power of two, up to 16, that divides a row stride."""
    return (row_stride | 16) & -(row_stride | 16)


def told(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Step 5."""
    return exact(x, weight, bias, eps, alignment=alignment_of(x.stride(0)))


# Step 6.
@triton.jit
def take_several_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    row_stride,
    M,
    eps,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """ROWS rows a program, each of one chunk."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M) & (cols < N)
    at = tl.multiple_of(rows * row_stride, (ALIGNMENT, ALIGNMENT)) + cols
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    pivot = tl.sum(x, axis=1, keep_dims=True) / N
    centred = tl.where(cols < N, x - pivot, 0.0)
    shift = tl.sum(centred, axis=1, keep_dims=True) / N
    variance = tl.sum(centred * centred, axis=1, keep_dims=True) / N - shift * shift
    rstd = tl.rsqrt(variance + eps)
    weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (centred - shift) * rstd * weight + bias, mask=mask)


def several_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Step 6; rows of more than 1024 columns as in step 5."""
    (m, n), y = x.shape, torch.empty_like(x)
    if n > 1024:
        return told(x, weight, bias, eps)
    block = triton.next_power_of_2(n)
    rows = max(2048 // block, 1)
    take_several_rows[(triton.cdiv(m, rows),)](
        *(x, weight, bias, y, x.stride(0), m, eps),
        N=n,
        ROWS=rows,
        BLOCK=block,
        ALIGNMENT=alignment_of(x.stride(0)),
        num_warps=1,
    )
    return y


# Step 7.
def emitted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Step 7: kernels of `generated/ln_fwd_bf16.py`, with the tile that the generator's rule gives."""
    (m, n), y = x.shape, torch.empty_like(x)
    strides = (x.stride(0), y.stride(0))
    constants = {"N": n, "ROW_ALIGNMENT": alignment_of(strides[0] | strides[1]), "PDL": False}
    if n <= 1024:
        block = triton.next_power_of_2(n)
        rows = max(2048 // block, 1)
        ln_fwd_bf16_rows[(triton.cdiv(m, rows),)](
            x, weight, bias, y, *strides, m, eps, ROWS=rows, BLOCK=block, num_warps=1, **constants
        )
    else:
        ln_fwd_bf16_one_pass[(m,)](x, weight, bias, y, *strides, eps, BLOCK=1024, num_warps=4, **constants)
    return y
