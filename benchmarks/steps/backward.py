"""A LayerNorm's backward pass in four steps.

Each function takes dy and x (M, N), weight (N,), and each row's mean and rstd (M,) fp32; it returns dx, dweight, dbias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from normforge.generated.finalise import sum_partials
from normforge.generated.ln_bwd_bf16 import ln_bwd_bf16_one_pass, ln_bwd_bf16_rows

from .forward import alignment_of

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

BUFFERS = 128


# Step 1.
@triton.jit
def add_under_locks(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    sums_ptr,
    locks_ptr,
    row_stride,
    N,
    BUFFERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take a row per program, and add its share of dweight and dbias to one of BUFFERS sums under its lock."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row)
    h = tl.where(mask, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
    g = dy * weight
    dx = (g - tl.sum(g) / N - h * (tl.sum(g * h) / N)) * rstd
    tl.store(dx_ptr + row * row_stride + cols, dx, mask=mask)

    buffer = row % BUFFERS
    dweight_ptr = sums_ptr + buffer * 2 * N + cols
    dbias_ptr = dweight_ptr + N
    while tl.atomic_cas(locks_ptr + buffer, 0, 1) != 0:
        pass
    tl.store(dweight_ptr, tl.load(dweight_ptr, mask=mask) + dy * h, mask=mask)
    tl.store(dbias_ptr, tl.load(dbias_ptr, mask=mask) + dy, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(locks_ptr + buffer, 0)


@triton.jit
def add_up(sums_ptr, total_ptr, count, COLUMNS, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add `count` rows of sums, from first to last."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, count, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(sums_ptr + rows * COLUMNS + cols, mask=(rows < count) & (cols < COLUMNS), other=0.0)
    tl.store(total_ptr + cols, tl.sum(total, axis=0, keep_dims=True), mask=cols < COLUMNS)


def summed(sums: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Dweight and dbias, of sums (count, 2, N)."""
    count, _, n = sums.shape
    total = torch.empty(2, n, dtype=dtype, device=sums.device)
    add_up[(triton.cdiv(2 * n, 16),)](sums, total, count, 2 * n, ROWS=128, BLOCK=16)
    return total[0], total[1]


def locked(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> Gradients:
    """Step 1."""
    (m, n), dx = x.shape, torch.empty_like(x)
    sums = torch.zeros(BUFFERS, 2, n, dtype=torch.float32, device=x.device)
    locks = torch.zeros(BUFFERS, dtype=torch.int32, device=x.device)
    block = triton.next_power_of_2(n)
    warps = min(max(block // 256, 1), 8)
    add_under_locks[(m,)](
        dy, x, weight, mean, rstd, dx, sums, locks, x.stride(0), n, BUFFERS=BUFFERS, BLOCK=block, num_warps=warps
    )
    return dx, *summed(sums, weight.dtype)


# Step 2.
@triton.jit
def load_chunks(ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Return a row's chunks, as they are stored."""
    chunks = ()
    for start in tl.static_range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        if start + BLOCK <= N:
            chunks += (tl.load(ptr + cols),)
        else:
            chunks += (tl.load(ptr + cols, mask=cols < N, other=0.0),)
    return chunks


@triton.jit
def keep_sums(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    sums_ptr,
    row_stride,
    M,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows in turn; a program keeps its share of dweight and dbias in registers and stores it once."""
    program = tl.program_id(0).to(tl.int64)
    weights = load_chunks(weight_ptr, N, BLOCK)
    dweight = ()
    dbias = ()
    for _ in tl.static_range(0, N, BLOCK):
        dweight += (tl.zeros((BLOCK,), tl.float32),)
        dbias += (tl.zeros((BLOCK,), tl.float32),)

    for row in tl.range(program, M, tl.num_programs(0), num_stages=STAGES):
        xs = load_chunks(x_ptr + row * row_stride, N, BLOCK)
        dys = load_chunks(dy_ptr + row * row_stride, N, BLOCK)
        mean = tl.load(mean_ptr + row + tl.arange(0, 1))
        rstd = tl.load(rstd_ptr + row + tl.arange(0, 1))
        g_sums = tl.zeros((BLOCK,), tl.float32)
        gh_sums = tl.zeros((BLOCK,), tl.float32)
        for c in tl.static_range(len(xs)):
            g = dys[c].to(tl.float32) * weights[c].to(tl.float32)
            g_sums += g
            gh_sums += g * (xs[c].to(tl.float32) - mean) * rstd
        g_mean = tl.sum(g_sums) / N
        gh_mean = tl.sum(gh_sums) / N

        next_dweight = ()
        next_dbias = ()
        for c in tl.static_range(len(xs)):
            cols = c * BLOCK + tl.arange(0, BLOCK)
            dy = dys[c].to(tl.float32)
            h = (xs[c].to(tl.float32) - mean) * rstd
            dx = (dy * weights[c].to(tl.float32) - g_mean - h * gh_mean) * rstd
            tl.store(dx_ptr + row * row_stride + cols, dx, mask=None if (c + 1) * BLOCK <= N else cols < N)
            next_dweight += (dweight[c] + dy * h,)
            next_dbias += (dbias[c] + dy,)
        dweight = next_dweight
        dbias = next_dbias

    for c in tl.static_range(len(dweight)):
        cols = c * BLOCK + tl.arange(0, BLOCK)
        tl.store(sums_ptr + program * 2 * N + cols, dweight[c], mask=cols < N)
        tl.store(sums_ptr + program * 2 * N + N + cols, dbias[c], mask=cols < N)


def programs_of(x: torch.Tensor, each: int) -> int:
    """Return the number of programs, `each` per multiprocessor; a CPU counts as one multiprocessor."""
    return each * (torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1)


def options_of(x: torch.Tensor, warps: int) -> dict[str, int]:
    """Warps, and 128 registers a thread at most, so that four programs of 4 warps run at once, or two of 8."""
    capped = x.is_cuda and torch.version.hip is None
    return {"num_warps": warps, "maxnreg": 128} if capped else {"num_warps": warps}


def partial_sums(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, stages: int = 1
) -> Gradients:
    """Step 2; with several stages, step 3."""
    (m, n), dx = x.shape, torch.empty_like(x)
    short = n <= 2048
    programs = programs_of(x, 4 if short else 2)
    sums = torch.empty(programs, 2, n, dtype=torch.float32, device=x.device)
    keep_sums[(programs,)](
        *(dy, x, weight, mean, rstd, dx, sums, x.stride(0), m),
        N=n,
        BLOCK=min(triton.next_power_of_2(n), 1024),
        STAGES=stages,
        **options_of(x, 4 if short else 8),
    )
    return dx, *summed(sums, weight.dtype)


# Step 3.
def rows_ahead(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> Gradients:
    """Step 3."""
    return partial_sums(dy, x, weight, mean, rstd, stages=3)


# Step 4.
def emitted_gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> Gradients:
    """Step 4: kernels of `generated/ln_bwd_bf16.py` and `generated/finalise.py`."""
    (m, n), dx = x.shape, torch.empty_like(x)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    programs, options = (programs_of(x, 4), options_of(x, 4)) if n <= 1024 else (programs_of(x, 2), options_of(x, 8))
    sums = torch.empty(2, programs, n, dtype=torch.float32, device=x.device)
    alignment = alignment_of(dy.stride(0) | x.stride(0) | dx.stride(0))
    arguments = (dy, x, weight, mean, rstd, dx, *sums, dy.stride(0), x.stride(0), dx.stride(0), m, n, alignment)
    if n <= 1024:
        block = triton.next_power_of_2(n)
        ln_bwd_bf16_rows[(programs,)](*arguments, ROWS=max(2048 // block, 1), BLOCK=block, PDL=False, **options)
    else:
        paired, ptx = n % 2 == 0 and alignment % 2 == 0, "maxnreg" in options
        ln_bwd_bf16_one_pass[(programs,)](
            *arguments, BLOCK=1024, STAGES=3, PAIRED=paired, PTX=ptx, PDL=False, **options
        )
    sum_partials[(triton.cdiv(n, 16), 2)](
        *sums, None, dweight, dbias, None, programs, N=n, ROWS=128, BLOCK=16, PDL=False
    )
    return dx, dweight, dbias
