"""Norms behind an all-reduce, on the GPUs of one host: one kernel, beside an all-reduce and a norm, and FlashInfer's.

Each call is timed in a CUDA graph that all ranks replay together; the time is the slowest rank's. Every way is checked
against sums in fp32 first. A soak makes calls of random sizes and forms, eagerly and in graphs, and compares the bits
of every sum.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch.multiprocessing.spawn import spawn

import normforge

from .chosen import RESULTS
from .environment import describe, folder_name, machine_here
from .results import save_rows

SUITE = "reduced"

_ROWS = (1, 8, 64, 128, 256, 512, 1024, 4096)
_COLUMNS = (2048, 4096, 8192)
_COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
# Norms, and what they are quantised by.
_FORMS = ("rms", "layer"), ("none", "dynamic")
# Calls in a graph, which take turns on as many sets of inputs, and replays.
_CALLS, _SETS, _REPLAYS = 20, 2, 15

Call = Callable[[int], Any]


@dataclass(frozen=True)
class Row:
    """Microseconds of a call by each way, on the slowest rank, 0 by none; and the best unfused way's in ours.

    m is the rows of a sum over ranks, and of what is gathered.
    """

    collective: str
    norm: str
    fquant: str
    ranks: int
    m: int
    n: int
    normforge: float
    nccl: float
    one_shot: float
    two_shot: float
    flashinfer: float
    ratio: float


def reduced(options: argparse.Namespace, _: list[str]) -> int:
    """Time all cells on all GPUs of this host, and write the table."""
    ranks = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        run: Any = spawn
        run(_rank, (ranks, f"file://{folder}/store", options), nprocs=ranks)
    return 0


def _rank(rank: int, ranks: int, store: str, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=ranks)
    machine = machine_here()
    out: Path = options.out or RESULTS / f"{folder_name(machine)}-reduced"
    header = describe(machine, (), options.revision)
    if options.soak:
        calls, wrong = _soak(rank, options.soak)
        if rank == 0:
            print(f"{calls} calls on {ranks} GPUs, {wrong} wrong values", flush=True)
        dist.destroy_process_group()
        return
    rows = []
    for n in _COLUMNS:
        ways = _Ways(n)
        for m, collective, norm, fquant in product(_ROWS, _COLLECTIVES, *_FORMS):
            # The others share rows out, and have fewer cells.
            if collective != "all_reduce" and (m < 8 or n != 4096 or norm != "rms"):
                continue
            rows.append(ways.time(m, collective, norm, fquant))
            if rank == 0:
                print(*asdict(rows[-1]).values(), flush=True)
                save_rows(out, SUITE, header, Row, rows)
        del ways
    dist.destroy_process_group()


class _Ways:
    """The ways to compute a norm of sums over ranks, of rows of one length."""

    def __init__(self, n: int) -> None:
        most = max(_ROWS)
        self.n, self.device = n, torch.device("cuda", torch.cuda.current_device())
        self.kernel = normforge.parallel.AllReduceNorm(None, most, n, torch.bfloat16)
        # Torch's all-reduces read symmetric memory; ours reads x wherever it is.
        self.x = [symmetric.empty(most * n, dtype=torch.bfloat16, device=self.device) for _ in range(_SETS)]
        group: Any = dist.group.WORLD
        self.group = group.group_name
        for each in self.x:
            symmetric.rendezvous(each, group)
        self.weight, self.bias = torch.rand(2, n, device=self.device).bfloat16()
        self.flashinfer = _flashinfer(most, n, group) if find_spec("flashinfer") else None

    def time(self, m: int, collective: str, norm: str, fquant: str) -> Row:
        """Check every way, and time it."""
        part, residual, expected = _drawn(collective, m, self.n, m)
        xs = [x[: part.numel()].view(part.shape) for x in self.x]
        bias, function = self.bias if norm == "layer" else None, getattr(normforge, f"{norm}norm2d_fwd")
        vectors = (self.weight,) if bias is None else (self.weight, bias)
        words: dict[str, Any] = {"fquant": fquant} | ({"out_dtype": torch.float8_e4m3fn} if fquant != "none" else {})

        def apart(total: torch.Tensor) -> Any:
            return function(total, *vectors, residual=residual, fadd="pre_add_store", **words)

        def nccl(at: int) -> Any:
            dist.all_reduce(xs[at])
            return apart(xs[at])

        def reduced_first(reduce: Callable[..., torch.Tensor], at: int) -> Any:
            return apart(reduce(xs[at], "sum", self.group))

        def scattered(at: int) -> Any:
            total = torch.empty_like(residual)
            dist.reduce_scatter_tensor(total, xs[at])
            return apart(total)

        def gathered(at: int) -> Any:
            # A rank normalises its own rows alone, and sends what is narrower.
            out = apart(xs[at])
            for each in (out.y, out.y_scale):
                if each is not None:
                    sent = each.view(torch.uint8) if each.itemsize == 1 else each
                    dist.all_gather_into_tensor(sent.new_empty((m, *sent.shape[1:])), sent)
            return out

        ours = partial(self.kernel, residual=residual, weight=self.weight, bias=bias, collective=collective, norm=norm)
        ways: dict[str, Call] = {"nccl": {"reduce_scatter": scattered, "all_gather": gathered}.get(collective, nccl)}
        if collective == "all_reduce":
            for name in ("one_shot_all_reduce", "two_shot_all_reduce_"):
                ways[name[:8]] = partial(reduced_first, getattr(torch.ops.symm_mem, name))
        unfused = list(ways)
        ways["normforge"] = lambda at: ours(xs[at], **words)
        if self.flashinfer is not None and collective == "all_reduce" and norm == "rms":
            fused = partial(self.flashinfer, residual=residual, weight=self.weight, quantises=fquant != "none")
            ways["flashinfer"] = lambda at: fused(xs[at])
        times = {"one_shot": 0.0, "two_shot": 0.0, "flashinfer": 0.0}
        for name, way in ways.items():
            for x in xs:
                x.copy_(part)
            dist.barrier()
            total = way(0).residual_out
            if not torch.allclose(total.float(), expected.float(), rtol=2**-6, atol=2**-5):
                raise AssertionError(f"{name}: wrong sums of {m} rows of {self.n}")
            times[name] = _graph(way)
        best = min(times[name] for name in unfused)
        rounded = {name: round(time, 2) for name, time in times.items()}
        ranks, ratio = dist.get_world_size(), round(best / times["normforge"], 3)
        return Row(collective, norm, fquant, ranks, m, self.n, **rounded, ratio=ratio)


def _flashinfer(most: int, n: int, group: Any) -> Callable[..., Any]:
    """Return FlashInfer's all-reduce, add, RMSNorm and quantisation in one kernel; FlashInfer keeps its memory."""
    comm = import_module("flashinfer.comm")
    rank, ranks, patterns = dist.get_rank(), dist.get_world_size(), comm.AllReduceFusionPattern
    # Launched early, complete at the end, and added up in fp32.
    flags = (True, True, True)
    _, workspace, *_ = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(rank, ranks, most, n, group=group)

    def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, quantises: bool) -> Any:
        total, y = torch.empty_like(x), torch.empty_like(x, dtype=torch.float8_e4m3fn if quantises else x.dtype)
        pattern = patterns.kARResidualRMSNormDynamicFP8Quant if quantises else patterns.kARResidualRMSNorm
        outs = (None, y, x.new_empty(len(x), dtype=torch.float32)) if quantises else (y, None, None)
        sizes = ranks, rank, len(x), n
        comm.trtllm_allreduce_fusion(
            x, *sizes, workspace, *flags, pattern, None, None, residual, total, *outs, weight, 1e-6, None, None
        )
        return normforge.QuantisedOutput(y, total, outs[2], None)

    return call


def _drawn(collective: str, m: int, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a rank's rows and its residual, and the sums that it should get: added up in the order of ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    residual = torch.randn(m, n, device="cuda").bfloat16()
    torch.manual_seed(seed * 9 + rank)
    x = torch.randn(m, n, device="cuda").bfloat16()
    each = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(each, x)
    whole = torch.stack(each).float().sum(0)
    if collective == "all_gather":
        x = x.chunk(ranks)[rank]
        whole = x.float()
    elif collective == "reduce_scatter":
        whole = whole.chunk(ranks)[rank]
    residual = residual[: len(whole)]
    return x, residual, (whole + residual.float()).bfloat16()


def _soak(rank: int, minutes: float) -> tuple[int, int]:
    """Return how many calls were made, and how many values of their sums were wrong."""
    end, drawn, most = time.monotonic() + 60 * minutes, random.Random(0), 2048
    ranks = dist.get_world_size()
    kernels = [normforge.parallel.AllReduceNorm(None, most, n, torch.bfloat16) for n in (*_COLUMNS, 5120, 96)]
    going, wrong, calls = torch.ones(1, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda"), 0
    while going.item():
        kernel, rows = drawn.choice(kernels), int(2 ** drawn.uniform(1, 11))
        collective, rows = drawn.choice(_COLLECTIVES), rows // ranks * ranks
        x, residual, expected = _drawn(collective, rows, kernel.n, calls)
        weight = torch.rand(kernel.n, device="cuda")
        forms = [{"norm": norm, "fquant": fquant} for norm, fquant in product(*_FORMS)]
        options = [drawn.choice(forms) | {"collective": collective} for _ in range(drawn.randint(1, 7))]
        call = partial(_totals, kernel, x, residual, weight, options)
        found, replays = call(), drawn.choice((0, 0, 3, 50))
        if replays:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = call()
            for _ in range(replays):
                graph.replay()
        wrong += sum((total != expected).sum() for total in found)
        calls += len(options) * (1 + replays)
        kernel.check()
        going.fill_(time.monotonic() < end)
        dist.broadcast(going, 0)
    dist.all_reduce(wrong)
    return calls, int(wrong)


def _totals(kernel: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, options: Any) -> list[Any]:
    return [kernel(x, residual, weight, **each).residual_out for each in options]


def _graph(way: Call) -> float:
    """Return the microseconds of a call in a graph, on the slowest rank."""
    way(0), way(1)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(_CALLS):
            way(call % _SETS)
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _CALLS)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
