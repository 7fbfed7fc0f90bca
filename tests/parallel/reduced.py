"""Cases of norms of partial sums; the norm of the ranks' sum, by one rank alone, is what is expected."""

from __future__ import annotations

import os
import random
import sys
import time
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

import normforge
from normforge import errors
from normforge.integrations import sglang, vllm
from normforge.parallel import AllReduceNorm, all_reduce

from ..calling import captured, counted, refusals
from ..integrations.stand_ins import of_sglang, of_vllm
from .ranks import DEVICE, Cases
from .sharded import MODES, refused

CASES = Cases()
ROWS, N = 6, 192
FP8 = torch.float8_e4m3fn


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of each rank."""
    each = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(each, x.contiguous())
    return each


def alike(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random values, the same on all ranks."""
    values = torch.randn(shape, dtype=dtype)
    dist.broadcast(values, 0)
    return values


def summed(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """What is normalised: the sum over ranks in their order, in fp32, rounded once."""
    total = torch.zeros(x.shape)
    for each in gathered(x):
        total += each.float()
    return (total if residual is None else total + residual.float()).to(x.dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.contiguous().view(torch.uint8)


def in_two_steps(yes: bool) -> AbstractContextManager[object]:
    """Have each rank add up a share of the rows, or all of them."""
    most: dict[int, float] = {} if yes else dict.fromkeys(range(1, 9), float("inf"))
    return mock.patch.object(all_reduce, "_ONE_SHOT_BYTES", most)


@CASES.case
def rows_are_kept_until_a_slow_rank_reads_them() -> None:
    """A rank that is done sends the rows of the next call while another has not read those of the one before."""
    if DEVICE != "cpu":
        return
    kernel: Any = AllReduceNorm(None, 1, 64, torch.float32)
    kernel(torch.zeros(1, 64))
    peers: Any
    (peers,) = {id(each): each for name, each in sys.modules.items() if name.endswith(".peers")}.values()
    receive, last = peers.receive, dist.get_world_size() - 1

    def read_late(*arguments: Any) -> Any:
        time.sleep(0.1)
        return receive(*arguments)

    with mock.patch.object(peers, "receive", read_late if dist.get_rank() == last else receive):
        xs = torch.randn(4, 1, 64)
        for found, x in zip([kernel(x, torch.zeros(1, 64)).residual_out for x in xs], xs, strict=True):
            assert torch.equal(found, summed(x, None))


@CASES.case
def every_form_is_that_of_the_sum() -> None:
    """Each norm, with and without a residual, quantised or not, in one step and in two, alike on all ranks."""
    kernel: Any = AllReduceNorm(None, ROWS, N, torch.bfloat16)
    x = torch.randn(2, ROWS // 2, N).bfloat16()
    residual, weight, bias = alike(*x.shape), alike(N).float(), alike(N)
    # The mean of a row is far from 0.
    residual[0, 0] += 20
    forms: Any = ({}, *MODES["of sums"])
    for norm, options, added, twice in product(("rms", "layer"), forms, (None, residual), (False, True)):
        given = {name: alike(*each).float().abs() if isinstance(each, list) else each for name, each in options.items()}
        total = summed(x, added)
        own = {"bias": bias} if norm == "layer" else {"weight_offset": 1.0}
        with in_two_steps(twice):
            found = kernel(x, added, weight, norm=norm, **own, **given)
        assert (found.residual_out is None) is (added is None)
        if added is not None:
            assert torch.equal(found.residual_out, total)
        expected = normalised(norm, total, weight, given, **own)
        close(found.y, expected.y)
        for each in (found.y, found.y_scale, found.unquantised):
            if each is not None:
                assert all(torch.equal(bits(each), other) for other in gathered(bits(each)))
        if expected.y_scale is not None:
            close(found.y_scale, expected.y_scale)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless values differ by a step of their type at most: warps add up in another order."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    step = 2.0 ** {torch.float8_e4m3fn: -3, torch.bfloat16: -7}.get(found.dtype, -10)
    one = found.float() if found.dtype.itemsize > 1 or found.dtype.is_floating_point else found.double()
    whole = 1.0 if not found.dtype.is_floating_point else 1e-3
    torch.testing.assert_close(one, expected.to(one.dtype), rtol=step, atol=whole)


@CASES.case
def shares_of_rows_are_scattered_and_gathered() -> None:
    """A rank's share of the sum is normalised there, and all ranks' rows everywhere; also between other calls."""
    ranks, rank, own = dist.get_world_size(), dist.get_rank(), 3
    kernel: Any = AllReduceNorm(None, own * ranks, N, torch.bfloat16)
    weight = alike(N)
    quantised = {"fquant": "dynamic", "out_dtype": FP8, "group_size": 64}
    share = slice(rank * own, (rank + 1) * own)
    for _ in range(4):
        for norm, options, adds in product(("rms", "layer"), ({}, quantised), (False, True)):
            x, kept = torch.randn(own * ranks, 2, N)[:, 1].bfloat16(), torch.randn(own, N).bfloat16()
            residual = kept if adds else None
            all_of_it = torch.cat(gathered(kept)) if adds else None
            summed_here = summed(x, all_of_it)
            expected = kernel(x, all_of_it, weight, norm=norm, **options)
            scattered = kernel(x, residual, weight, collective="reduce_scatter", norm=norm, **options)
            part = torch.randn(own, N).bfloat16()
            both = kernel(part, residual, weight, collective="all_gather", norm=norm, **options)
            total = part if residual is None else (part.float() + residual.float()).bfloat16()
            of_all = normalised(norm, torch.cat(gathered(total)), weight, options)
            close(both.y, of_all.y)
            if adds:
                assert torch.equal(scattered.residual_out, summed_here[share])
                assert torch.equal(both.residual_out, total)
            assert torch.equal(bits(scattered.y), bits(expected.y[share]))
            if options:
                assert torch.equal(scattered.y_scale, expected.y_scale[share])
                close(both.y_scale, of_all.y_scale)
    refused("ranks share equally", partial(kernel, x[1:], collective="reduce_scatter"), errors.ShapeError)


def normalised(norm: str, total: torch.Tensor, weight: torch.Tensor, options: dict[str, Any], **own: Any) -> Any:
    """The norm of rows by one rank alone."""
    own["eps"] = 1e-5 if norm == "layer" else 1e-6
    if options:
        return getattr(normforge, f"quantised_{norm}_norm")(total, weight, **own, **options)
    y = getattr(normforge, f"{norm}_norm")(total, (N,), weight, **own)
    return normforge.QuantisedOutput(y, None, None, None)


@CASES.case
def every_type_keeps_its_bits() -> None:
    """Sums are exact in their type; zeros keep their signs, and NaNs and infinities arrive."""
    for dtype, n in product((torch.float32, torch.float16, torch.bfloat16), (1, 7, 100)):
        kernel: Any = AllReduceNorm(None, 3, n, dtype)
        for twice in (False, True):
            x = torch.randn(3, n).to(dtype)
            x[0, 0], x[1, -1] = -0.0, float("inf") if dist.get_rank() else 1.0
            # Every bit of the NaN is set, as of memory that nothing was sent to.
            x[2] = torch.full((n * x.itemsize,), 255, dtype=torch.uint8).view(dtype) if dist.get_rank() else x[2]
            residual = alike(3, n, dtype=dtype)
            with in_two_steps(twice):
                total: Any = kernel(x, residual).residual_out
            expected = summed(x, residual)
            assert torch.equal(total.nan_to_num(7), expected.nan_to_num(7))
            assert total[2].isnan().all()
            assert not total[0].isnan().any()
            kernel.check()


@CASES.case
def calls_keep_their_order_whoever_is_late() -> None:
    """Two objects take turns at random numbers of rows, some of them on two strides, while ranks sleep at random."""
    kernels: list[Any] = [AllReduceNorm(None, most, 64, torch.float32) for most in (4, 9)]
    drawn, own = random.Random(0), random.Random(dist.get_rank())
    residuals = [alike(9, 64, dtype=torch.float32), alike(9, 64, dtype=torch.float32)]
    expected = [each.clone() for each in residuals]
    for _ in range(60):
        at, twice = drawn.randrange(2), drawn.random() < 0.5
        rows = drawn.randint(0, kernels[at].max_rows)
        x = torch.randn(rows, 96)[:, :64]
        if own.random() < 0.3:
            time.sleep(own.random() / 50)
        with in_two_steps(twice):
            found: Any = kernels[at](x, residuals[at][:rows]).residual_out
        expected[at][:rows] = summed(x, expected[at][:rows])
        residuals[at][:rows] = found
        assert torch.equal(residuals[at], expected[at])


@CASES.case
def rows_have_the_same_bits_in_any_batch() -> None:
    """Under batch invariance too, alone, among others, in one step and in two."""
    kernel: Any = AllReduceNorm(None, 300, N, torch.bfloat16)
    x, residual, weight = torch.randn(300, N).bfloat16(), alike(300, N), alike(N)
    with normforge.batch_invariant():
        whole = kernel(x, residual, weight)
        for twice, rows in product((False, True), (1, 3)):
            with in_two_steps(twice):
                part = kernel(x[:rows], residual[:rows], weight)
            assert torch.equal(part.y, whole.y[:rows])
            assert torch.equal(part.residual_out, whole.residual_out[:rows])
        more = torch.randn(301, N).bfloat16()
        refused("under batch invariance", partial(kernel, more, more, weight), errors.InvarianceError)


@CASES.case
def more_rows_take_torchs_all_reduce() -> None:
    """The results are the same but for torch's rounding of the sum."""
    kernel: Any = AllReduceNorm(None, 2, N, torch.bfloat16)
    x, residual, weight = torch.randn(3, N).bfloat16(), alike(3, N), alike(N)
    kept = x.clone()
    norms: Any = {"rms": torch.nn.functional.rms_norm, "layer": torch.nn.functional.layer_norm}
    for norm, options in product(norms, ({}, {"fquant": "dynamic", "out_dtype": FP8})):
        for added in (residual, None):
            y, total, scale, _ = kernel(x, added, weight, norm=norm, **options)
            assert torch.equal(x, kept)
            assert (total is None, scale is None) == (added is None, not options)
            whole = summed(x, added)
            one = y.float() if scale is None else y.float() * scale[..., None]
            expected = norms[norm](whole.float(), (N,), weight.float(), eps=1e-5)
            torch.testing.assert_close(one, expected, rtol=0.1, atol=0.05)


@CASES.case
def compiled_calls_are_one_operator() -> None:
    """torch.compile keeps the call as an operator, with the eager call's bits."""
    ranks = dist.get_world_size()
    kernel: Any = AllReduceNorm(None, 2 * ranks**2, N, torch.bfloat16)
    x, residual, weight = torch.randn(2 * ranks, N).bfloat16(), alike(2 * ranks, N), alike(N)
    shares = {"all_reduce": residual, "reduce_scatter": residual[:2], "all_gather": residual}
    forms: Any = ({}, {"fquant": "dynamic", "out_dtype": FP8, "save_unquant": True}, {"norm": "layer"})
    for (collective, added), options in product(shares.items(), forms):
        call = partial(kernel, residual=added, weight=weight, collective=collective, **options)
        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for one, other in zip(compiled(x), call(x), strict=True):
            assert (one is None) is (other is None)
            assert one is None or torch.equal(bits(one), bits(other))
    # Whatever sees operators sees this one.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y, *_ = kernel(mode.from_tensor(x), mode.from_tensor(residual), collective="all_gather")
    assert y.shape == (ranks * len(x), N)
    weight.requires_grad_()
    refused("computes none", partial(kernel, x, residual, weight), errors.GradientError)


@CASES.case
def calls_are_recorded_with_their_ranks() -> None:
    """The kernels of a recording are those that the program launched, for as many ranks."""
    kernel: Any = AllReduceNorm(None, ROWS, 256, torch.bfloat16)
    x = torch.randn(ROWS, 256).bfloat16()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "calls.yaml"
        with normforge.record(path):
            kernel(x, x.clone(), alike(256))
        keys = normforge.recorded_keys(path, arch="sm_90")
    ranks = dist.get_world_size()
    (key,) = [key for key in keys if "_ar" in str(key)]
    assert dict(key.key.arguments)["RANKS"] == ranks
    name = key.instances[0].rpartition("_")[0]
    refused("number no mode says", partial(normforge.compile_keys, [256], [name], arch="sm_90"), errors.ConflictError)


@CASES.case
def wrong_arguments_are_refused() -> None:
    """Each error says what was passed, before anything is sent."""
    kernel: Any = AllReduceNorm(None, ROWS, N, torch.bfloat16)
    x = torch.randn(2, N).bfloat16()
    for error, rows in refusals(Path(__file__).with_name("refused.yaml"), {"x": x}).items():
        for given, text in rows.values():
            refused(text, partial(kernel, **{"x": x, **given}), error)
    for text, error, most, n, dtype in (
        ("max_rows is 0", errors.ShapeError, 0, N, torch.bfloat16),
        ("n is 40000", errors.ShapeError, 1, 40000, torch.bfloat16),
        ("dtype is torch.float64", errors.DTypeError, 1, N, torch.float64),
    ):
        refused(text, partial(AllReduceNorm, None, most, n, dtype), error)
    refused("timeout", partial(AllReduceNorm, None, 1, N, torch.bfloat16, timeout=-1), errors.ConflictError)
    kernel(x)
    if DEVICE == "cpu" and (child := os.fork()) == 0:
        try:
            refused("before a fork", partial(kernel, x), errors.DeviceError)
        except BaseException:
            os._exit(1)
        os._exit(0)
    elif DEVICE == "cpu":
        assert os.waitpid(child, 0)[1] == 0


@CASES.case
def a_group_may_be_destroyed() -> None:
    """Ranks have one another's memory; calls of more rows need the group, and say so."""
    group: Any = dist.new_group()
    kernel: Any = AllReduceNorm(group, 2, N, torch.bfloat16)
    x = torch.randn(2, N).bfloat16()
    before = kernel(x, x)
    dist.destroy_process_group(group)
    assert torch.equal(kernel(x, x).y, before.y)
    more = torch.randn(3, N).bfloat16()
    refused("was destroyed", partial(kernel, more, more), errors.DeviceError)


@CASES.case
def a_rank_that_does_not_come_is_an_error() -> None:
    """The others' rows are NaN, and the next call raises."""
    kernel: Any = AllReduceNorm(None, 2, N, torch.bfloat16, timeout=0.05)
    x = torch.randn(2, N).bfloat16()
    if dist.get_rank() == 0:
        assert kernel(x, x).y.isnan().all()
        refused("sent nothing within the timeout", kernel.check, errors.PeerError)
        refused("sent nothing within the timeout", partial(kernel, x, x), errors.PeerError)
    dist.barrier()


@CASES.case
def engines_norms_are_served_with_their_all_reduce() -> None:
    """The plugs return the norm of a sum over ranks by one kernel, and leave what it does not serve to the engine."""
    x, residual = torch.randn(3, 384).bfloat16(), alike(3, 384)
    total, more = summed(x, residual), torch.randn(3, 2**16).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_PLUGINS", "normforge")
        ran = counted(patch, (AllReduceNorm, "__call__", "fused"))
        of_sglang.stand_in(patch)
        sglang.register()
        sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry.apply_hooks()
        layers = sys.modules[of_sglang.LAYERS]
        for norm in (layers.RMSNorm(384), layers.GemmaRMSNorm(384)):
            for options in ({}, {"use_attn_tp_group": False}):
                y, kept = norm.forward_with_allreduce_fusion(x, residual, **options)
                assert torch.equal(kept, total)
                close(y, norm(total))
        assert len(ran) == 4
        long, short = layers.RMSNorm(2**16), layers.RMSNorm(384, fp32_residual=True)
        long.forward_with_allreduce_fusion(more, more)
        short.forward_with_allreduce_fusion(x, residual)
        norm.forward_with_allreduce_fusion(x, residual, residual)
        patch.setattr(sys.modules["sglang.srt.distributed"], "get_attn_tensor_model_parallel_world_size", lambda: 1)
        norm.forward_with_allreduce_fusion(x, residual)
        assert len(ran) == 4

        of_vllm.stand_in(patch)
        layers = sys.modules[of_vllm.LAYERS]
        linear = torch.nn.Linear(384, 384)
        linear._input_quant_key = of_vllm.KEYS["kFp8DynamicTokenSym"]  # type: ignore[assignment]
        for norm in (layers.RMSNorm(384, dtype=torch.bfloat16), layers.LayerNorm(384, dtype=torch.bfloat16)):
            y, kept = vllm.maybe_fused_all_reduce_norm(norm, x, residual)
            assert torch.equal(kept, total)
            close(y, norm(total))
            close(vllm.maybe_fused_all_reduce_norm(norm, x), norm(summed(x, None)))
            found, kept = vllm.maybe_fused_all_reduce_norm(norm, x, residual, linear)
            expected = vllm.maybe_fused_norm_quant(norm, total, linear)
            assert torch.equal(kept, total)
            close(found.data, expected.data)
            close(found.scale, expected.scale)
        assert len(ran) == 10
        many = torch.randn(2**14, 768).bfloat16()
        for norm in (layers.RMSNorm(768), layers.LayerNorm(768)):
            for added, given in ((None, None), (many, None), (many, torch.nn.Linear(768, 768))):
                found = vllm.maybe_fused_all_reduce_norm(norm, many, added, given)
                assert isinstance(found, tuple) is (added is not None)
        assert len(ran) == 10


@CASES.case
def graphs_are_replayed_in_step() -> None:
    """A thousand replays of an odd number of calls, of two objects, with calls between them."""
    if DEVICE == "cpu":
        return
    kernels: list[Any] = [AllReduceNorm(None, 8, N, torch.bfloat16) for _ in range(2)]
    x, residual, weight = torch.randn(8, N).bfloat16(), alike(8, N), alike(N)
    calls = [(0, 8), (1, 3), (0, 1), (0, 8), (1, 8)]

    def run() -> list[torch.Tensor]:
        return [kernels[at](x[:rows], residual[:rows], weight).y for at, rows in calls]

    run()
    torch.cuda.synchronize()
    dist.barrier()
    graph, results = captured(run)
    for replay in range(1000):
        x.copy_(torch.randn(8, N, generator=torch.Generator(x.device).manual_seed(replay * 9 + dist.get_rank())))
        graph.replay()
        if replay % 100 == 0:
            expected = summed(x, residual)
            y = normforge.rms_norm(expected, (N,), weight, eps=1e-6)
            for found, (_, rows) in zip(results, calls, strict=True):
                close(found, y[:rows])
            for one, other in zip(run(), results, strict=True):
                assert torch.equal(one, other)
    for kernel in kernels:
        kernel.check()
