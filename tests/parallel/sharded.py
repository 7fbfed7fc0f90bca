"""Cases of rows that are sharded, run on every rank of a group; the same call of whole tensors is what is expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import normforge
from normforge import errors
from normforge.calls.functions import FUNCTIONS
from normforge.calls.traced import operated
from normforge.codegen.families import Kind
from proving.cases import cases, operands

from .ranks import DEVICE, WORLD, Cases

CASES = Cases()
N = 32

# Rows that no two ranks share evenly.
SHAPE = (2, 5, N)

# How they lie. A large group is asked for the first alone, which leaves some of its ranks without any.
ROWS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate()) if WORLD == 2 else (Shard(0),)


def mesh() -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


@contextmanager
def communicates(**counts: int) -> Iterator[None]:
    """Fail unless what is within makes so many communications: `all_reduce=1`, say."""
    mode = CommDebugMode()  # type: ignore[no-untyped-call]  # torch declares none
    with mode:
        yield
    found = {str(op).rpartition(".")[2].removesuffix("_"): n for op, n in mode.get_comm_counts().items() if n}
    assert found == counts, found


def placed(tensor: torch.Tensor, *placements: Placement) -> DTensor:
    """A tensor that every rank has, as a DTensor that may require a gradient of its own."""
    # Gloo sends no eight-bit floats; what these hold exactly, others do too.
    wide = tensor.detach() if tensor.dtype.itemsize > 1 else tensor.detach().float()
    whole = cast(distribute_tensor(wide, mesh(), placements), tensor.dtype)
    whole.requires_grad_(tensor.requires_grad)
    return whole


def same(found: object, expected: torch.Tensor, *placements: Placement) -> None:
    """Fail unless a DTensor is what is expected, and lies so."""
    assert isinstance(found, DTensor)
    assert found.placements == placements, found.placements
    assert found.dtype == expected.dtype
    # As in `placed`.
    whole = (found if expected.dtype.itemsize > 1 else cast(found, torch.float32)).full_tensor().detach()
    assert whole.shape == expected.shape
    # Sums of other parts differ in their last bits.
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}.get(expected.dtype, 0)
    torch.testing.assert_close(whole.float(), expected.float(), rtol=tolerance, atol=tolerance)


def cast(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    """A DTensor with parts in another dtype; itself if they have that."""
    if tensor.dtype == dtype:
        return tensor
    part = tensor.to_local().to(dtype)
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def agrees(
    call: Callable[..., Any], whole: Sequence[torch.Tensor], lies: Sequence[Placement], kept: Placement, **counts: int
) -> None:
    """Fail unless a call of DTensors returns what the call of whole tensors does, and so do its gradients.

    Args:
        call: from tensors to outputs.
        whole: the tensors, which require gradients.
        lies: how each is placed. Its gradient lies so too, or is a sum over ranks if only the outputs are sharded.
        kept: how outputs and their gradients lie.
        counts: the communications that the call and its gradients make.
    """
    expected, parts = call(*whole), [placed(each, placement) for each, placement in zip(whole, lies, strict=True)]
    followed = [at for at, output in enumerate(expected) if output.requires_grad]
    arriving = [torch.randn_like(expected[at]) for at in followed]
    gradients = torch.autograd.grad([expected[at] for at in followed], whole, arriving)
    arrived = [placed(each, kept) for each in arriving]
    with communicates(**counts):
        found = call(*parts)
        made = torch.autograd.grad([found[at] for at in followed], parts, arrived)
    for one, other in zip(found, expected, strict=True):
        same(one, other, kept)
    for one, other, placement in zip(made, gradients, lies, strict=True):
        same(one, other, Partial() if placement == Replicate() != kept else placement)


# What the operators are called with besides tensors, and which tensors.
FORWARD_MODES: tuple[dict[str, Any], ...] = (
    {},
    {"weight": 1, "bias": 1, "save_mv": True, "out_dtype": torch.bfloat16},
    {"weight": 1, "residual": 1, "fadd": "pre_add_store", "save_mv": True},
    {"weight": 1, "residual": 1, "fadd": "pre_add", "x_bias": 1},
    {"weight": 1, "residual": 1, "fadd": "post_add"},
    {"weight": 1, "smooth_scale": 1, "fquant": "smooth_dynamic", "save_mv": True},
    {"weight": 1, "residual": 1, "fadd": "pre_add_store", "fquant": "dynamic", "out_dtype": torch.float8_e4m3fn},
    {"weight": 1, "x_scale": 1, "out_dtype": torch.bfloat16},
    {"x_scale": 0, "out_dtype": torch.float32, "save_mv": True},
)
BACKWARD_MODES: tuple[dict[str, Any], ...] = (
    {"dy": 1, "rstd": 1, "mean": 1, "wants": ("dx",)},
    {"dy": 1, "rstd": 1, "mean": 1, "weight": 1, "wants": ("dweight", "dbias", "dx")},
    {"dy": 1, "rstd": 1, "mean": 1, "weight": 1, "dresidual_out": 1, "wants": ("dx", "dweight")},
    {"dy": 1, "rstd": 1, "mean": 1, "weight": 1, "x_bias": 1, "wants": ("dx", "dx_bias")},
    {"rstd": 1, "mean": 1, "dresidual_out": 1, "wants": ("dx",)},
)


# What has sharding rules; the others are torch's operators where there are DTensors.
_OF_RULES = {name: takes for name, takes in FUNCTIONS.items() if not takes.family_name}


def operator_calls(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Kind]]]:
    """The arguments of some calls of a function, and of what kind its tensors are."""
    takes = FUNCTIONS[name]
    kinds = {parameter: kind for parameter, kind, _ in takes.tensors}
    shapes = {Kind.ROWS: SHAPE, Kind.VECTOR: (N,), Kind.PER_ROW: SHAPE[:-1], Kind.SCALE: SHAPE[:-1]}
    modes = FORWARD_MODES if takes.outs else BACKWARD_MODES
    for mode in modes:
        if any(name in mode and name not in takes.passed for name in ("residual", "x_bias", "dresidual_out")):
            # A norm that lacks these has no such call.
            continue
        given: dict[str, Any] = {"x": torch.randn(SHAPE)}
        if "x_scale" in mode:
            given["x"] = given["x"].to(torch.float8_e4m3fn)
        for parameter, value in mode.items():
            if parameter == "x_scale" and not value:
                # One for all rows, which each rank has.
                given[parameter] = torch.rand(1)
            elif parameter in kinds:
                given[parameter] = torch.rand(shapes[kinds[parameter]]) + 0.5
            elif parameter in takes.passed:
                given[parameter] = value
        if "wants" in given:
            known = {result.name for result in takes.results}
            given["wants"] = tuple(name for name in given["wants"] if name in known)
        if not takes.outs:
            given.setdefault("dy", None)
        yield given, kinds


@CASES.case
def each_operator_with_each_tensor() -> None:
    """Whatever is passed and returned, with no communication."""
    seen = set()
    for name, takes in _OF_RULES.items():
        function = getattr(normforge, name)
        for given, kinds in operator_calls(name):
            expected = function(**given)
            for rows in ROWS:
                sharded = {
                    key: placed(value, Replicate() if kinds[key] is Kind.VECTOR or value.numel() == 1 else rows)
                    if key in kinds
                    else value
                    for key, value in given.items()
                    if value is not None or key not in kinds
                } | ({"dy": None} if "dy" in given and given["dy"] is None else {})
                with communicates():
                    found = function(**sharded)
                sums = Replicate() if rows == Replicate() else Partial()
                for row, one, other in zip(takes.family.results, found, expected, strict=True):
                    assert (one is None) is (other is None)
                    if one is not None:
                        seen.add(row.name)
                        same(one, other, sums if row.kind is Kind.VECTOR else rows)
            seen |= given.keys() & kinds.keys()
    of_tables = {name for takes in _OF_RULES.values() for name, _, _ in takes.tensors}
    of_tables |= {result.name for takes in _OF_RULES.values() for result in takes.results}
    # DTensors with a dropout are refused.
    of_tables -= {"dropout_rng", "ddropped"}
    assert seen == of_tables, f"no case has {of_tables - seen}"


@CASES.case
def differentiable_functions_are_of_each_ranks_rows() -> None:
    """With no communication: a vector per sample is sharded with the samples, or lies whole beside sharded rows."""
    families = ("plain", "added", "renormed", "modulated", "gated")
    alike = partial(cases, *families, dtype=torch.float32, vectors=torch.float32, residual=torch.float32)
    for case in alike(shape=(2, 5, 40), layout="contiguous", dropout_p=0.0):
        given = operands(case)
        call = partial(_named, case.run, list(given))
        for rows in ROWS:
            samples = Replicate() if rows == Shard(1) else rows
            lies = [{3: rows, 2: samples, 1: Replicate()}[each.dim()] for each in given.values()]
            agrees(call, list(given.values()), lies, rows)


def _named(run: Callable[[dict[str, Any]], Any], names: Sequence[str], *tensors: Any) -> Any:
    return run(dict(zip(names, tensors, strict=True)))


@CASES.case
def quantised_rows_with_a_gate_are_of_each_ranks() -> None:
    """With no communication; groups are within rows, whose gate lies as they do."""
    for groups in ((), (2,)):
        rows, vector = (*SHAPE[:-1], *groups, N // 2), (*groups, N // 2)
        tensors = {name: torch.randn(rows) for name in ("x", "gate")}
        tensors |= {name: torch.randn(vector) for name in ("weight", "bias")}
        sharded = {
            name: placed(each, Shard(0) if each.shape == rows else Replicate()) for name, each in tensors.items()
        }
        options: dict[str, Any] = {"fquant": "dynamic", "out_dtype": torch.int8}
        with communicates():
            found = operated("gated_layer_norm", sharded | options)
        for one, other in zip(found, operated("gated_layer_norm", tensors | options), strict=True):
            same(one, other, Shard(0))


# What the quantised norms are called with; of vectors the name and a scale.
_WIDE = 160
QUANTISED: tuple[dict[str, Any], ...] = (
    {"fquant": "static", "y_scale": 1},
    {"fquant": "static", "y_scale": _WIDE, "residual": 1, "save_unquant": True, "out_dtype": torch.int8},
    {"scale_ub": 1, "x_bias": _WIDE, "residual": 1},
    {"fquant": "smooth_dynamic", "smooth_scale": _WIDE, "save_unquant": True},
    {"group_size": 64, "residual": 1, "save_unquant": True},
    {"group_size": 64, "scale_layout": "column_major"},
    {"group_size": 64, "scale_format": "ue8m0_packed", "scale_layout": "column_major", "residual": 1},
    {"group_size": 32, "scale_format": "ue8m0"},
)


@CASES.case
def quantised_norms_are_of_each_ranks_rows() -> None:
    """With no communication; scales lie with their rows, in the layout that each part would have by itself."""
    shape = (2, 5, _WIDE)
    for options in QUANTISED:
        for name in ("quantised_layer_norm", "quantised_rms_norm"):
            function = getattr(normforge, name)
            kept = {"out_dtype": torch.float8_e4m3fn} | options
            given: dict[str, Any] = {"weight": torch.rand(_WIDE) + 0.5} | {
                vector: torch.rand(kept.pop(vector)) + 0.5
                for vector in ("y_scale", "scale_ub", "x_bias", "smooth_scale")
                if vector in kept
            }
            whole = {"x": torch.randn(shape)} | ({"residual": torch.randn(shape)} if kept.pop("residual", 0) else {})
            expected = function(**whole, **given, **kept)
            for rows in ROWS:
                parts = {key: placed(each, rows) for key, each in whole.items()}
                vectors = {key: placed(each, Replicate()) for key, each in given.items()}
                with communicates():
                    found = function(**parts, **vectors, **kept)
                local = function(**{key: each.to_local() for key, each in parts.items()}, **given, **kept)
                for one, other, alone in zip(found, expected, local, strict=True):
                    assert (one is None) is (other is None)
                    if one is not None:
                        same(one, other, rows)
                        assert one.stride() == other.stride()
                        assert one.to_local().stride() == alone.stride()


@CASES.case
def quantised_outputs_go_where_they_are_told() -> None:
    """Rows, their sum and their scales, each on its rank."""
    x, residual = torch.randn(SHAPE), torch.randn(SHAPE)
    by_columns: dict[str, Any] = {"group_size": 32, "scale_layout": "column_major"}
    modes: tuple[dict[str, Any], ...] = ({}, by_columns)
    for options in modes:
        expected = normforge.quantised_rms_norm(x, residual=residual, **options)
        rows = placed(x, Shard(1))
        places: dict[str, Any] = {
            "out": placed(torch.zeros(SHAPE, dtype=torch.int8), Shard(1)),
            "residual_out": placed(residual, Shard(1)),
            "y_scale": placed(torch.zeros(*SHAPE[:-1], 1), Shard(1)),
        }
        with communicates():
            found = normforge.quantised_rms_norm(rows, residual=places["residual_out"], **options, **places)
        assert expected.y_scale is not None
        assert expected.residual_out is not None
        assert (found.y, found.y_scale) == (places["out"], places["y_scale"])
        same(found.y, expected.y, Shard(1))
        same(found.residual_out, expected.residual_out, Shard(1))
        same(found.y_scale, expected.y_scale.view(*SHAPE[:-1], 1), Shard(1))


@CASES.case
def quantised_norms_are_traced_with_dtensors() -> None:
    x, weight = torch.randn(SHAPE), torch.rand(N)
    options: dict[str, Any] = {"group_size": 32, "scale_layout": "column_major", "out_dtype": torch.float8_e4m3fn}
    expected = normforge.quantised_rms_norm(x, weight, **options)
    call = torch.compile(partial(normforge.quantised_rms_norm, **options), backend="aot_eager", fullgraph=True)
    for rows in ROWS:
        found = call(placed(x, rows), placed(weight, Replicate()))
        assert expected.y_scale is not None
        same(found.y, expected.y, rows)
        same(found.y_scale, expected.y_scale, rows)


@CASES.case
def pairs_of_fp4_are_half_as_many() -> None:
    x, ones = torch.randn(2, 5, _WIDE), torch.ones(1)
    options: dict[str, Any] = {"group_size": 16, "scale_format": "e4m3", "out_dtype": torch.float4_e2m1fn_x2}
    expected = normforge.quantised_rms_norm(x, global_scale=ones, **options)
    assert expected.y_scale is not None
    for rows in ROWS:
        part = placed(x, rows)
        found = normforge.quantised_rms_norm(part, global_scale=placed(ones, Replicate()), **options)
        alone = normforge.quantised_rms_norm(part.to_local(), global_scale=ones, **options)
        assert isinstance(found.y, DTensor)
        assert found.y.shape == expected.y.shape
        assert found.y.placements == (rows,)
        assert torch.equal(found.y.to_local().view(torch.uint8), alone.y.view(torch.uint8))
        same(found.y_scale, expected.y_scale, rows)


@CASES.case
def scales_in_tiles_are_of_rows_that_are_whole() -> None:
    """A tile has 128 rows, and is of no rank's rows alone."""
    x = torch.randn(2, 5, N)
    options: dict[str, Any] = {"out_dtype": torch.float8_e4m3fn, "group_size": 32, "scale_format": "ue8m0"}
    options["scale_layout"] = "swizzled_128x4"
    expected = normforge.quantised_rms_norm(x, **options)
    found = normforge.quantised_rms_norm(placed(x, Replicate()), **options)
    assert expected.y_scale is not None
    same(found.y, expected.y, Replicate())
    same(found.y_scale, expected.y_scale, Replicate())
    refused("to_local()", lambda: normforge.quantised_rms_norm(placed(x, Shard(1)), **options), errors.LayoutError)


@CASES.case
def outputs_that_are_written_to() -> None:
    """Parts are written in place, and nothing is moved to them."""
    x, residual = torch.randn(SHAPE), torch.randn(SHAPE)
    expected = normforge.rmsnorm2d_fwd(x, residual=residual, fadd=1, save_mv=True)
    sharded, sum_of = placed(x, Shard(0)), placed(residual, Shard(0))
    at = sharded.to_local().data_ptr()
    with communicates():
        found = normforge.rmsnorm2d_fwd(
            sharded, residual=sum_of, fadd=1, save_mv=True, out=sharded, residual_out=sum_of
        )
    assert found.y is sharded
    assert sharded.to_local().data_ptr() == at
    same(sharded, expected.y, Shard(0))
    assert expected.residual_out is not None
    assert expected.rstd is not None
    same(sum_of, expected.residual_out, Shard(0))
    same(found.rstd, expected.rstd, Shard(0))
    refused("placements", lambda: normforge.rmsnorm2d_fwd(sharded, out=placed(x, Shard(1))), errors.LayoutError)


def refused(text: str, call: Callable[[], object], error: type[Exception]) -> None:
    """Fail unless a call raises an error that says so."""
    with pytest.raises(error, match=re.escape(text)):
        call()


@CASES.case
def what_lies_otherwise_is_redistributed() -> None:
    """Rows that are no whole ones become replicated, as with torch's norms, and so do vectors."""
    whole = [torch.randn(shape, requires_grad=True) for shape in (SHAPE, SHAPE, (N,), (N,))]
    apart = [Shard(2), Shard(2), Replicate(), Replicate()]
    agrees(normforge.add_layer_norm, whole, apart, Replicate(), all_gather_into_tensor=2)
    agrees(
        lambda x, weight: [normforge.rms_norm(x, (N,), weight)],
        [whole[0], whole[2]],
        [Shard(0), Shard(0)],
        Shard(0),
        all_gather_into_tensor=1,
        reduce_scatter_tensor=1,
    )
    x, weight = torch.randn(SHAPE), torch.randn(N)
    world = dist.get_world_size()
    part = DTensor.from_local(x / world, mesh(), [Partial()])
    same(normforge.rms_norm(part, (N,), placed(weight, Replicate())), normforge.rms_norm(x, (N,), weight), Replicate())


@CASES.case
def a_gradient_that_lies_otherwise() -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    expected = torch.autograd.grad(normforge.rms_norm(x, (N,)).sum(), x)[0]
    sharded = placed(x, Shard(1))
    y = normforge.rms_norm(sharded, (N,))
    same(torch.autograd.grad(y, sharded, placed(torch.ones(SHAPE), Replicate()))[0], expected, Shard(1))


@CASES.case
def several_dimensions_are_normalised_together() -> None:
    x, weight = torch.randn(4, 3, 2, 16), torch.randn(2, 16)
    expected = normforge.rms_norm(x, (2, 16), weight)
    same(normforge.rms_norm(placed(x, Shard(1)), (2, 16), placed(weight, Replicate())), expected, Shard(1))
    # The first of the two makes no whole rows either.
    same(normforge.rms_norm(placed(x, Shard(2)), (2, 16), placed(weight, Replicate())), expected, Replicate())


@CASES.case
def parts_of_any_strides() -> None:
    """What was cut out of a tensor, or transposed, is copied where kernels cannot walk it."""
    base = torch.randn(5, 4, N)
    x = base.transpose(0, 1)
    expected = normforge.rms_norm(x, (N,))
    cut = DTensor.from_local(base.chunk(dist.get_world_size(), 1)[dist.get_rank()].transpose(0, 1), mesh(), [Shard(0)])
    assert not cut.to_local().is_contiguous()
    same(normforge.rms_norm(cut, (N,)), expected, Shard(0))
    same(normforge.rms_norm(placed(base, Shard(1)).transpose(0, 1), (N,)), expected, Shard(0))
    # A part whose columns are apart, of a whole that is said to be contiguous.
    apart = cut.to_local().contiguous().transpose(1, 2).contiguous().transpose(1, 2)
    odd = DTensor.from_local(apart, mesh(), [Shard(0)], run_check=False, shape=x.shape, stride=(5 * N, N, 1))
    same(normforge.rmsnorm2d_fwd(odd, eps=torch.finfo(torch.float32).eps).y, expected, Shard(0))


@CASES.case
def mixtures_are_refused() -> None:
    x, weight = torch.randn(SHAPE), torch.randn(N)
    refused(
        "weight is a plain tensor", lambda: normforge.rms_norm(placed(x, Shard(0)), (N,), weight), errors.DeviceError
    )
    refused("x is a plain tensor", lambda: normforge.rms_norm(x, (N,), placed(weight, Replicate())), errors.DeviceError)
    refused("weight is a plain", lambda: normforge.rmsnorm2d_fwd(placed(x, Shard(0)), weight), errors.DeviceError)
    other = init_device_mesh(DEVICE, (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))
    elsewhere = distribute_tensor(weight, other, [Replicate(), Replicate()])
    refused("redistribute one", lambda: normforge.rms_norm(placed(x, Shard(0)), (N,), elsewhere), errors.DeviceError)
    refused(
        "x's shape", lambda: normforge.add_rms_norm(placed(x, Shard(0)), placed(x[:, :4], Shard(0))), errors.ShapeError
    )


@CASES.case
def a_dropout_is_refused() -> None:
    """No rank knows which rows of the whole it has, which is what a mask follows from."""
    rows, residual = placed(torch.randn(SHAPE), Shard(0)), placed(torch.randn(SHAPE), Shard(0))
    state = placed(torch.tensor([1, 2]), Replicate())
    added: dict[str, Any] = {"residual": residual, "fadd": "pre_add_store"}
    text = "dropout_p was passed with a DTensor"
    for rng in (None, (1, 2), state):
        drops: dict[str, Any] = {"dropout_p": 0.5, "dropout_rng": rng}
        refused(text, partial(normforge.add_layer_norm, rows, residual, **drops), errors.DeviceError)
        refused(text, partial(normforge.rmsnorm2d_fwd, rows, **added, **drops), errors.DeviceError)
    arguments = {"x": rows, **added, "dropout_p": 0.5, "dropout_rng": state}
    refused(text, lambda: operated("rmsnorm2d_fwd", arguments), errors.DeviceError)
    # Each rank's part by itself is a call like any other.
    normforge.add_rms_norm(rows.to_local(), residual.to_local(), dropout_p=0.5, dropout_rng=(1, mesh().get_rank()))


@CASES.case
def checkpointed() -> None:
    """Its hooks on saved tensors see the same tensors at both times."""
    x, weight = torch.randn(SHAPE, requires_grad=True), torch.randn(N, requires_grad=True)
    expected = torch.autograd.grad(normforge.rms_norm(x, (N,), weight).square().sum(), (x, weight))
    sharded, whole = placed(x, Shard(1)), placed(weight, Replicate())
    for early in (True, False):
        y = checkpoint(
            lambda a, b: normforge.rms_norm(a, (N,), b), sharded, whole, use_reentrant=False, early_stop=early
        )
        dx, dweight = torch.autograd.grad(y.square().sum(), (sharded, whole))
        same(dx, expected[0], Shard(1))
        same(dweight, expected[1], Partial())


class Block(torch.nn.Module):
    """A pre-norm decoder layer but for attention, with both residual adds in the norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = normforge.AddRMSNorm(N), normforge.AddLayerNorm(N)
        self.up, self.down = torch.nn.Linear(N, 2 * N, bias=False), torch.nn.Linear(2 * N, N, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, residual = self.first(x, residual=residual)
        y, residual = self.second(self.down(torch.nn.functional.silu(self.up(h))), residual)
        return y, residual


def parallel_block(local: bool = False) -> tuple[Block, torch.nn.Module]:
    """A block, and the same one parallelized."""
    block, twin = Block(), Block()
    twin.load_state_dict(block.state_dict())
    style = normforge.parallel.SequenceParallel(use_local_output=local)
    plan = {
        "first": normforge.parallel.SequenceParallel(),
        "second": style,
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return block, parallelize_module(twin, mesh(), plan)


@CASES.case
def a_block_under_sequence_parallel() -> None:
    """Two inputs and two outputs; the norms themselves communicate nothing."""
    for local in (False, True):
        block, parallel = parallel_block(local)
        x, residual = torch.randn(2, 4, N, requires_grad=True), torch.randn(2, 4, N, requires_grad=True)
        y, total = block(x, residual)
        (y.square().sum() + total.sum()).backward()
        a, b = placed(x, Shard(1)), placed(residual, Shard(1))
        # Into the linear layers and out of them again, forward and backward.
        with communicates(all_gather_into_tensor=2, reduce_scatter_tensor=2):
            one, other = parallel(a, b)
            if local:
                one, other = (DTensor.from_local(each, mesh(), [Shard(1)]) for each in (one, other))
            torch.autograd.backward([one, other], [2 * one.detach(), torch.ones_like(other)])
        same(one, y, Shard(1))
        same(other, total, Shard(1))
        for tensor, whole in ((a, x), (b, residual)):
            assert whole.grad is not None
            same(tensor.grad, whole.grad, Shard(1))
        for (name, parameter), theirs in zip(parallel.named_parameters(), block.parameters(), strict=True):
            assert theirs.grad is not None
            assert isinstance(parameter.grad, DTensor)
            if name.startswith(("first", "second")):
                assert parameter.grad.placements == (Partial(),), name
            torch.testing.assert_close(parameter.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-4)


@CASES.case
def the_style_takes_plain_parts_and_replicates_the_first_ranks_parameters() -> None:
    norm = normforge.AddRMSNorm(N)
    torch.nn.init.constant_(norm.weight, 1.0 + dist.get_rank())
    module = parallelize_module(norm, mesh(), normforge.parallel.SequenceParallel(sequence_dim=-2))
    assert isinstance(norm.weight, DTensor)
    assert torch.equal(norm.weight.full_tensor(), torch.ones(N))
    x, residual = torch.randn(2, 4, N), torch.randn(2, 4, N)
    part = [each.chunk(dist.get_world_size(), 1)[dist.get_rank()] for each in (x, residual)]
    expected = normforge.add_rms_norm(x, residual, torch.ones(N))
    for found, whole in zip(module(*part), expected, strict=True):
        same(found, whole, Shard(1))
    norm = normforge.AddRMSNorm(N)
    norm.register_forward_hook(lambda _, inputs, outputs: list(outputs))
    local = parallelize_module(norm, mesh(), normforge.parallel.SequenceParallel(use_local_output=True))
    assert [type(each) for each in local(*part)] == [torch.Tensor, torch.Tensor]
    again = module(placed(x, Replicate()), residual=placed(residual, Shard(0)))
    for found, whole in zip(again, expected, strict=True):
        same(found, whole, Shard(1))


@CASES.case
def torchs_own_style_of_one_input() -> None:
    from torch.distributed.tensor.parallel import SequenceParallel

    for cls in (normforge.LayerNorm, normforge.RMSNorm):
        x = torch.randn(2, 4, N)
        norm = cls(N)
        module = parallelize_module(norm, mesh(), SequenceParallel())
        part, gradient = placed(x, Shard(1)), placed(torch.ones_like(x), Shard(1))
        with communicates():
            y = module(part)
            y.backward(gradient)
        same(y, cls(N)(x), Shard(1))
        assert isinstance(norm.weight.grad, DTensor)
        assert norm.weight.grad.placements == (Partial(),)


@CASES.case
def operators_of_group_norm_are_of_each_ranks_samples() -> None:
    """With no communication, statistics and gradients too, and positions or channels innermost."""
    for shape, memory in (((4, 8, 3), torch.contiguous_format), ((4, 8, 3, 2), torch.channels_last)):
        x, dy = (torch.randn(shape).contiguous(memory_format=memory) for _ in range(2))
        vectors = [torch.randn(8), torch.randn(8)]
        told = (2, 1e-5, "silu")
        expected = torch.ops.normforge.group_norm(x, *vectors, *told, None, True)
        wants = ["dx", "dweight", "dbias"]
        theirs = torch.ops.normforge.group_norm_backward(dy, x, *vectors, expected[1], *told, wants)
        for of_x, of_statistics in ((Shard(0), Shard(1)), (Replicate(), Replicate())):
            rows, whole = [placed(each, of_x) for each in (x, dy)], [placed(each, Replicate()) for each in vectors]
            with communicates():
                found = torch.ops.normforge.group_norm(rows[0], *whole, *told, None, True)
                made = torch.ops.normforge.group_norm_backward(rows[1], rows[0], *whole, found[1], *told, wants)
            same(found[0], expected[0], of_x)
            same(found[1], expected[1], of_statistics)
            sums = Replicate() if of_x == Replicate() else Partial()
            for one, other, lies in zip(made, theirs, (of_x, sums, sums), strict=True):
                same(one, other, lies)


@CASES.case
def samples_of_group_norm_are_sharded() -> None:
    """Each rank normalises its samples; what lies otherwise becomes whole."""
    whole = [torch.randn(shape, requires_grad=True) for shape in ((4, 8, 3), (8,), (8,))]
    expected = normforge.group_norm(whole[0], 2, whole[1], whole[2], activation="silu")
    gradients = torch.autograd.grad(expected.square().sum(), whole)
    for of_x in ROWS:
        parts = [placed(whole[0], of_x), *[placed(each, Replicate()) for each in whole[1:]]]
        found = normforge.group_norm(parts[0], 2, parts[1], parts[2], activation="silu")
        assert isinstance(found, DTensor)
        assert found.placements == ((Shard(0),) if of_x == Shard(0) else (Replicate(),))
        for one, other in zip(
            (found, *torch.autograd.grad(found.square().sum(), parts)), (expected, *gradients), strict=True
        ):
            assert isinstance(one, DTensor)
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-4)
