"""Cases of rows that are sharded, run on every rank of a group; the same call of whole tensors is what is expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import normforge
from normforge import errors
from normforge.calls.functions import FUNCTIONS
from normforge.calls.traced import operated
from normforge.codegen.families import Kind
from proving.cases import cases, gradients, operands

from ..calling import pieces, table_at, there
from .ranks import DEVICE, WORLD, Cases

CASES = Cases()
N = 32

# Rows that no two ranks share evenly.
SHAPE = (2, 5, N)

# How they lie. A large group is asked for the first alone, which leaves some of its ranks without any.
ROWS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate()) if WORLD == 2 else (Shard(0),)

# How modules are called: eagerly, and by graphs, which are the same in a group of any size.
BACKENDS = (None, "aot_eager", "inductor") if WORLD == 2 else (None,)


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
    if expected.dtype.itemsize == 1:
        pairs = expected.dtype is torch.float4_e2m1fn_x2
        found, expected = cast(found, torch.float32), expected.view(torch.uint8) if pairs else expected
    whole = found.full_tensor().detach()
    assert whole.shape == expected.shape
    # Sums of other parts differ in their last bits.
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}.get(expected.dtype, 0)
    torch.testing.assert_close(whole.float(), expected.float(), rtol=tolerance, atol=tolerance)


def cast(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    """A DTensor with parts in another dtype; itself if they have that."""
    if tensor.dtype == dtype:
        return tensor
    part = tensor.to_local()
    part = (part.view(torch.uint8) if part.dtype is torch.float4_e2m1fn_x2 else part).to(dtype)
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def lying(given: Mapping[str, Any], rows: Placement) -> dict[str, Placement]:
    """How the tensors of a call lie: vectors on every rank, and vectors of samples sharded as samples are."""
    leading = given["x"].shape[:2]

    def lies(tensor: torch.Tensor) -> Placement:
        if tensor.shape[:2] == leading:
            return rows
        return rows if tensor.dim() == 2 and rows == Shard(0) else Replicate()

    return {name: lies(tensor) for name, tensor in given.items() if isinstance(tensor, torch.Tensor)}


def alike(
    call: Callable[..., Any],
    given: Mapping[str, Any],
    lies: Placement | Mapping[str, Placement],
    kept: Placement | None = None,
    whole: Callable[..., Any] | None = None,
    **counts: int,
) -> tuple[dict[str, Any], list[Any]]:
    """Fail unless a call of DTensors returns what the call of whole tensors does, and so do gradients that are due.

    Args:
        call: from arguments by name to outputs.
        given: the arguments, whole tensors among them.
        lies: how each tensor is placed, or how rows are. Its gradient lies so too, or is a sum over ranks if only the
            outputs are sharded.
        kept: how outputs and their gradients lie, if not as rows do; vectors are sums over ranks.
        whole: the call of whole tensors, if it is another.
        counts: the communications that the call and its gradients make.

    Returns:
        The DTensors of the call by name, and its outputs.
    """
    if isinstance(lies, Placement):
        kept = lies if kept is None else kept
        lies = lying(given, lies)
    assert kept is not None
    sums = Replicate() if kept == Replicate() else Partial()
    tensors = {name: given[name] for name in lies}
    expected = pieces((whole or call)(**given))
    arriving = [torch.randn_like(each) if each is not None and each.requires_grad else None for each in expected]
    wanted = gradients(expected, tensors, arriving)
    parts: dict[str, Any] = {name: placed(tensor, lies[name]) for name, tensor in tensors.items()}
    arrived = [None if each is None else placed(each, kept) for each in arriving]
    with communicates(**counts):
        found = pieces(call(**{**given, **parts}))
        made = gradients(found, parts, arrived)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            same(one, other.detach(), sums if other.dim() == 1 else kept)
            assert one.stride() == other.stride()
    assert made.keys() == wanted.keys()
    for name, gradient in made.items():
        same(gradient, wanted[name], sums if lies[name] == Replicate() else lies[name])
    return parts, list(found)


MODES: dict[str, list[dict[str, Any]]] = table_at(Path(__file__).with_suffix(".yaml"))
# What has sharding rules; the others are torch's operators where there are DTensors.
_OF_RULES = {name: takes for name, takes in FUNCTIONS.items() if not takes.family_name}


_SHAPES = {Kind.ROWS: SHAPE, Kind.VECTOR: (N,)}


def operator_calls(name: str) -> Iterator[dict[str, Any]]:
    """The arguments of some calls of a function."""
    takes = FUNCTIONS[name]
    shapes = {each: _SHAPES.get(kind, SHAPE[:-1]) for each, kind, _ in takes.tensors}
    for mode in MODES["forward" if takes.outs else "backward"]:
        # A norm that lacks these has no such call.
        if {"residual", "x_bias", "dresidual_out", "dy_scale"} & mode.keys() - {*takes.passed}:
            continue
        given = {"x": torch.randn(SHAPE).to(torch.float8_e4m3fn if "x_scale" in mode else torch.float32)}
        # Of scales 0 says that there is one for all rows, which each rank has.
        given |= {
            each: torch.rand(shapes[each] if value else 1) + 0.5 for each, value in mode.items() if each in shapes
        }
        if "dy_scale" in mode:
            given["dy"] = given["dy"].to(torch.float8_e4m3fn)
        options = {each: value for each, value in mode.items() if each in takes.passed and each not in shapes}
        if not takes.outs:
            known = {result.name for result in takes.results}
            options |= {"wants": tuple(each for each in mode["wants"] if each in known), "dy": given.pop("dy", None)}
        yield {**given, **options}


@CASES.case
def each_operator_with_each_tensor() -> None:
    """Whatever is passed and returned, with no communication."""
    seen = set()
    for name, takes in _OF_RULES.items():
        for given in operator_calls(name):
            for rows in ROWS:
                parts, found = alike(getattr(normforge, name), given, rows)
                returned = zip(takes.family.results, found, strict=True)
                seen |= {*parts, *(row.name for row, one in returned if one is not None)}
    of_tables = {name for takes in _OF_RULES.values() for name, _, _ in takes.tensors}
    of_tables |= {result.name for takes in _OF_RULES.values() for result in takes.results}
    # DTensors with a dropout are refused.
    of_tables -= {"dropout_rng", "ddropped"}
    assert seen == of_tables, f"no case has {of_tables - seen}"


@CASES.case
def differentiable_functions_are_of_each_ranks_rows() -> None:
    """With no communication: a vector per sample is sharded with the samples, or lies whole beside sharded rows."""
    families = ("plain", "added", "renormed", "statistics", "modulated", "gated")
    varied = partial(cases, *families, dtype=torch.float32, vectors=torch.float32, residual=torch.float32)
    for case in varied(shape=(2, 5, 40), layout="contiguous", dropout_p=0.0):
        for rows in ROWS:
            alike(partial(case.function, **case.arguments), operands(case, DEVICE), rows)


@CASES.case
def quantised_rows_with_a_gate_are_of_each_ranks() -> None:
    """With no communication; groups are within rows, whose gate lies as they do."""
    for groups in ((), (2,)):
        rows, vector = (*SHAPE[:-1], *groups, N // 2), (*groups, N // 2)
        given: dict[str, Any] = {name: torch.randn(rows) for name in ("x", "gate")}
        given |= {name: torch.randn(vector) for name in ("weight", "bias")}
        given |= {"fquant": "dynamic", "out_dtype": torch.int8}
        lies = {"x": Shard(0), "gate": Shard(0), "weight": Replicate(), "bias": Replicate()}
        alike(lambda **given: tuple(operated("gated_layer_norm", given)), given, lies, Shard(0))


_MODULATE = ("scale", "shift", "gate", "next_weight")
_WIDE = 160


@CASES.case
def quantised_norms_are_of_each_ranks_rows() -> None:
    """With no communication; scales lie with their rows, in the layout that each part would have by itself."""
    rows_of, vectors = ("x", "residual"), ("y_scale", "scale_ub", "x_bias", "smooth_scale", "global_scale", *_MODULATE)
    for options, name in product(MODES["quantised"], ("quantised_layer_norm", "quantised_rms_norm")):
        function = getattr(normforge, name)
        given = {"out_dtype": torch.float8_e4m3fn, "x": 1, "weight": _WIDE} | options
        given |= {each: torch.randn(2, 5, _WIDE) for each in rows_of if each in given}
        given |= {each: torch.rand(given[each]) + 0.5 for each in ("weight", *vectors) if each in given}
        for rows in ROWS:
            parts, found = alike(function, given, rows)
            local = function(**given | {each: part.to_local() for each, part in parts.items()})
            for one, alone in zip(found, local, strict=True):
                assert one is None or one.to_local().stride() == alone.stride()


@CASES.case
def functions_of_every_mode_are_operators_of_dtensors_in_a_graph() -> None:
    x, weight = torch.randn(SHAPE), torch.rand(N)
    options: dict[str, Any] = {"group_size": 32, "scale_layout": "column_major", "out_dtype": torch.float8_e4m3fn}
    by_group: Callable[..., Any] = partial(normforge.quantised_rms_norm, **options)
    by_token: Callable[..., Any] = partial(normforge.rmsnorm2d_fwd, fquant="dynamic", save_mv=True)
    for function in (by_group, by_token):
        call = torch.compile(function, backend="aot_eager", fullgraph=True)
        for rows in ROWS:
            for one, other in zip(call(placed(x, rows), placed(weight, Replicate())), function(x, weight), strict=True):
                assert (one is None) is (other is None)
                if other is not None:
                    same(one, other, rows)


@CASES.case
def scales_in_tiles_and_columns_are_of_rows_that_are_whole() -> None:
    """A tile has 128 rows and a block of a column 32, and neither is of one rank's rows alone."""
    forms: dict[str, dict[str, Any]] = {
        "to_local()": {"scale_format": "ue8m0", "scale_layout": "swizzled_128x4"},
        "columnwise was asked for with rows": {"columnwise": "transposed"},
    }
    x = torch.randn(SHAPE)
    for said, options in forms.items():
        call = partial(normforge.quantised_rms_norm, out_dtype=torch.float8_e4m3fn, group_size=32, **options)
        alike(call, {"x": x}, Replicate())
        refused(said, partial(call, placed(x, Shard(1))), errors.LayoutError)


@CASES.case
def outputs_that_are_written_to() -> None:
    """Parts are written in place: rows, their sum and their scales, each on its rank, and nothing is moved to them."""
    x, residual = torch.randn(SHAPE), torch.randn(SHAPE)
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (normforge.rmsnorm2d_fwd, {"fadd": 1, "save_mv": True}),
        (normforge.quantised_rms_norm, {}),
        (normforge.quantised_rms_norm, {"group_size": 32, "scale_layout": "column_major"}),
    ]
    for function, options in calls:
        expected = function(x, residual=residual, **options)
        rows = placed(x, Shard(1))
        outs = {"out": rows, "residual_out": placed(residual, Shard(1))}
        if expected.y_scale is not None:
            outs["out"] = placed(torch.zeros(SHAPE, dtype=torch.int8), Shard(1))
            outs["y_scale"] = placed(torch.zeros(*SHAPE[:-1], 1), Shard(1))
        at = {name: out.to_local().data_ptr() for name, out in outs.items()}
        with communicates():
            found = function(rows, residual=outs["residual_out"], **options, **outs)
        assert (found.y, found.y_scale) == (outs["out"], outs.get("y_scale"))
        assert at == {name: out.to_local().data_ptr() for name, out in outs.items()}
        for one, other in zip(found, expected, strict=True):
            assert (one is None) is (other is None)
            if other is not None:
                same(one, other.view(one.shape), Shard(1))
    refused("placements", lambda: normforge.rmsnorm2d_fwd(rows, out=placed(x, Shard(0))), errors.LayoutError)


def refused(text: str, call: Callable[[], object], error: type[Exception]) -> None:
    """Fail unless a call raises an error that says so."""
    with pytest.raises(error, match=re.escape(text)):
        call()


@CASES.case
def what_lies_otherwise_is_redistributed() -> None:
    """Rows that are no whole ones become replicated, as with torch's norms, and so do vectors."""
    shapes = {"x": SHAPE, "residual": SHAPE, "weight": (N,), "bias": (N,)}
    given = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    apart = {"x": Shard(2), "residual": Shard(2), "weight": Replicate(), "bias": Replicate()}
    alike(normforge.add_layer_norm, given, apart, Replicate(), all_gather_into_tensor=2)
    given = {"x": given["x"], "weight": given["weight"]}
    split = {"x": Shard(0), "weight": Shard(0)}
    rms_norm = partial(normforge.rms_norm, normalized_shape=(N,))
    alike(rms_norm, given, split, Shard(0), all_gather_into_tensor=1, reduce_scatter_tensor=1)
    x, weight = torch.randn(SHAPE), torch.randn(N)
    part = DTensor.from_local(x / dist.get_world_size(), mesh(), [Partial()])
    same(rms_norm(part, weight=placed(weight, Replicate())), rms_norm(x, weight=weight), Replicate())
    # A gradient that lies otherwise than y.
    x.requires_grad_()
    sharded = placed(x, Shard(1))
    (expected,) = torch.autograd.grad(rms_norm(x).sum(), x)
    same(torch.autograd.grad(rms_norm(sharded), sharded, placed(torch.ones(SHAPE), Replicate()))[0], expected, Shard(1))


@CASES.case
def several_dimensions_are_normalised_together() -> None:
    given = {"x": torch.randn(4, 3, 2, 16), "weight": torch.randn(2, 16)}
    rms_norm = partial(normforge.rms_norm, normalized_shape=(2, 16))
    alike(rms_norm, given, {"x": Shard(1), "weight": Replicate()}, Shard(1))
    # The first of the two makes no whole rows either.
    alike(rms_norm, given, {"x": Shard(2), "weight": Replicate()}, Replicate(), all_gather_into_tensor=1)


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
    given = {"x": torch.randn(SHAPE, requires_grad=True), "weight": torch.randn(N, requires_grad=True)}
    for early in (True, False):
        options: dict[str, Any] = {"normalized_shape": (N,), "use_reentrant": False, "early_stop": early}
        alike(partial(checkpoint, normforge.rms_norm, **options), given, Shard(1))


@CASES.case
def modules_under_sequence_parallel() -> None:
    """With no communication: gradients of rows lie as rows do, and those of parameters are sums over ranks."""
    modules: tuple[Any, ...] = (normforge.LayerNorm, normforge.RMSNorm, normforge.AddRMSNorm)
    for norm, backend in product(modules, BACKENDS):
        torch._dynamo.reset()
        parallel, whole = norm(N), norm(N)
        parallelize_module(parallel, mesh(), normforge.parallel.SequenceParallel())
        rows = [torch.randn(2, 4, N, requires_grad=True) for _ in range(1 + (norm is normforge.AddRMSNorm))]
        parts, expected = [placed(each, Shard(1)) for each in rows], pieces(whole(*rows))
        dys = [torch.randn_like(each) for each in expected]
        torch.autograd.backward(expected, dys)
        arrived = [placed(dy, Shard(1)) for dy in dys]
        call = torch.compile(parallel, fullgraph=True, backend=backend) if backend else parallel
        # TorchDynamo compiles nothing while operators are watched.
        with nullcontext() if backend else communicates():
            found = pieces(call(*parts))
        with communicates():
            torch.autograd.backward(found, arrived)
        ours, theirs = [*found, *(each.grad for each in parts)], [*expected, *(there(each.grad) for each in rows)]
        for one, other in zip(ours, theirs, strict=True):
            same(one, other, Shard(1))
        for one, other in zip(parallel.parameters(), whole.parameters(), strict=True):
            same(one.grad, there(other.grad), Partial())


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
            sums = Replicate() if of_x == Replicate() else Partial()
            lie = (of_x, of_statistics, of_x, sums, sums)
            for one, other, lies in zip((*found, *made), (*expected, *theirs), lie, strict=True):
                same(one, other, lies)


@CASES.case
def samples_of_group_norm_are_sharded() -> None:
    """Each rank normalises its samples; what lies otherwise becomes whole."""
    shapes = {"x": (4, 8, 3), "weight": (8,), "bias": (8,)}
    given = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    call = partial(normforge.group_norm, num_groups=2, activation="silu")
    for of_x in ROWS:
        moved: dict[str, Any] = {"all_gather_into_tensor": 1} if of_x == Shard(1) else {}
        alike(call, given, lying(given, of_x), Replicate() if moved else of_x, **moved)
