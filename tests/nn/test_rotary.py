"""Norms of queries and keys with rotary embeddings: outputs and gradients against the formula in fp64, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.fx.experimental.proxy_tensor import make_fx

import normforge
from normforge import errors
from normforge.families import rotary
from normforge.kernels.gpu import Target
from normforge.kernels.obtain import compile_for
from normforge.selection import dispatch
from proving import cases
from proving.cases import coarser, gradients, with_tuples

from ..calling import combined, each_device, each_of, refusals, same_bits, table_at
from ..kernels.compile_cases import TARGETS, binary_of
from ..launching import launching_nothing
from ..thorough import COSTLY
from .test_transforms import M, N, alike

Tensors = dict[str, Any]
LEAVES = ("q", "k", "q_weight", "k_weight")


@dataclass(frozen=True)
class Case:
    """One call: the sizes, and how each head is normalised and rotated."""

    n: int = 64
    rotary_dim: int = 64
    q_heads: int = 4
    k_heads: int = 2
    tokens: int = 5
    norm: str = "rms"
    interleaved: bool = False
    positions: bool = False
    whole: bool = False
    weights: bool = True
    weight_offset: float = 0.0
    eps: float = 1e-6
    cast: str = "after_weight"
    mrope_section: tuple[int, int, int] | None = None
    mrope_interleaved: bool = False
    dtype: torch.dtype = torch.bfloat16


def _calls(each: Any = None, **at: Any) -> list[Case]:
    return [Case(**at, **own) for own in combined(each or {})]


TABLE = with_tuples(table_at(Path(__file__).with_name("rotary_cases.yaml")))
CASES = [case for row in TABLE for case in _calls(**row)]
EXACT = Case(n=80, rotary_dim=32, norm="layer", interleaved=True, dtype=torch.float32)
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def given(case: Case, device: str = "cpu") -> Tensors:
    """Operands by name: q and k are heads of one packed tensor, v behind them."""
    packed = torch.randn(case.tokens, case.q_heads + 2 * case.k_heads, case.n, device=device).to(case.dtype)
    keys = packed[:, case.q_heads : case.q_heads + case.k_heads]
    operands = {"q": packed[:, : case.q_heads], "k": keys, "q_weight": None, "k_weight": None}
    if case.weights:
        heads = (case.q_heads, case.k_heads) if case.norm.endswith("_across_heads") else (1, 1)
        operands |= {
            f"{own}_weight": torch.randn(each * case.n, device=device) for own, each in zip("qk", heads, strict=True)
        }
    positions = torch.randperm(case.tokens + 3, device=device)[: case.tokens] if case.positions else None
    if case.mrope_section:
        positions = torch.randint(case.tokens + 3, (3, case.tokens), device=device)
    columns = case.rotary_dim // (1 if case.whole else 2)
    angles = torch.randn(case.tokens + 3 * case.positions, columns, device=device)
    return operands | {"cos": angles.cos(), "sin": angles.sin(), "positions": positions}


def _of_axes(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """Take the columns of three positions as transformers' Qwen2-VL does, or its Qwen3-VL."""
    if case.mrope_section is None:
        return rows
    if not case.mrope_interleaved:
        starts = [0, *accumulate(case.mrope_section)]
        return torch.cat([row[..., start:end] for row, start, end in zip(rows, starts, starts[1:], strict=False)], -1)
    mixed = rows[0].clone()
    for at in (1, 2):
        columns = slice(at, 3 * case.mrope_section[at], 3)
        mixed[..., columns] = rows[at, ..., columns]
    return mixed


def formula(case: Case, name: str, operands: Tensors) -> torch.Tensor:
    """Compute one of the two outputs in the dtype of the operands, unrounded but for the norm's own rounding."""
    x, weight = operands[name], operands[f"{name}_weight"]
    shape, norm = x.shape, case.norm.removesuffix("_across_heads")
    x = x if norm == case.norm else x.flatten(-2)
    h = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    squares = h.square().sum(-1, keepdim=True) / (1 if norm == "l2" else x.shape[-1])
    h = h * (squares + case.eps).rsqrt()
    if case.cast == "before_weight":
        # Autograd differentiates the norm as if nothing was rounded.
        h = h + (h.to(case.dtype).to(h.dtype) - h).detach()
    z = (h if weight is None else h * (weight + case.weight_offset)).reshape(shape)
    rows = slice(None) if operands["positions"] is None else operands["positions"]
    cos, sin = (_of_axes(case, operands[table][rows]).unsqueeze(1) for table in ("cos", "sin"))
    rotated, rest = z[..., : case.rotary_dim], z[..., case.rotary_dim :]
    half = case.rotary_dim // 2
    pairs, at = ((half, 2), -1) if case.interleaved else ((2, half), -2)
    first, second = rotated.reshape(*rotated.shape[:-1], *pairs).unbind(at)
    beside = torch.stack((-second, first), at).flatten(-2)
    if not case.whole:
        cos, sin = (torch.stack((each, each), at).flatten(-2) for each in (cos, sin))
    return torch.cat((rotated * cos + beside * sin, rest), -1)


OPTIONS = ("norm", "eps", "interleaved", "rotary_dim", "weight_offset", "cast", "mrope_section", "mrope_interleaved")


def call(case: Case, operands: Tensors, function: Any = normforge.qk_norm_rope, **others: Any) -> Any:
    return function(**operands, **{name: getattr(case, name) for name in OPTIONS}, **others)


def leaves_of(operands: Tensors, names: Sequence[str] = LEAVES) -> Tensors:
    """Return operands of which those of some names require gradients."""
    return operands | {
        name: each.detach().requires_grad_() for name in names if (each := operands.get(name)) is not None
    }


def exact(case: Case, operands: Tensors) -> tuple[Tensors, list[torch.Tensor]]:
    """Return the operands in fp64 on the CPU, and the formula's results."""
    whole: Tensors = {name: each if each is None else each.detach().cpu() for name, each in operands.items()}
    whole |= {
        name: each.double().requires_grad_(operands[name].requires_grad)
        for name, each in whole.items()
        if each is not None and each.is_floating_point()
    }
    return whole, [formula(case, name, whole) for name in ("q", "k")]


def agree(case: Case, found: Any, wanted: Any, sums: float = 1.0) -> None:
    # Half of a last place, and what fp32 adds to it; a norm that fp32 rounds to the other side is a last place off.
    places = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}[coarser(case.dtype, found.dtype)]
    rtol, atol = (places * 2.02, places * 8) if case.cast == "before_weight" else (places * 1.01, 4e-6)
    found, wanted = found.detach().double().cpu(), wanted.detach()
    size = sums * float(torch.cat((wanted.abs().flatten(), wanted.new_ones(1))).max())
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol * size)


def check(
    case: Case, operands: Tensors, due: list[Any] | None = None, trained: Sequence[str] = LEAVES
) -> tuple[torch.Tensor, ...]:
    """Hold results and gradients of a call against the formula, and return the results."""
    leaves = leaves_of(operands, trained)
    results: tuple[torch.Tensor, ...] = call(case, leaves)
    whole, wanted = exact(case, leaves)
    due = due or [torch.randn(each.shape, dtype=torch.float64).to(each) for each in results]
    for name, result, its in zip(("q", "k"), results, wanted, strict=True):
        assert (result.dtype, result.shape) == (operands[name].dtype, operands[name].shape)
        agree(case, result, its)
    tensors, wide = ({name: of[name] for name in LEAVES if of[name] is not None} for of in (leaves, whole))
    exactly = gradients(wanted, wide, [None if each is None else each.double().cpu() for each in due])
    grads = gradients(results, tensors, due)
    assert grads.keys() == tensors.keys() & {*trained}
    for name, found in grads.items():
        assert found.dtype is operands[name].dtype
        # Sums over heads of what may have been rounded to the other side; zeros of what nothing depends on.
        agree(case, found, exactly.get(name, torch.zeros_like(wide[name])), 8.0 if "weight" in name else 1.0)
    return results


@COSTLY
@each_device
@each_case
def test_outputs_and_gradients(case: Case, device: str) -> None:
    for seed in range(3):
        # The later ones are known calls, of other tensors.
        torch.manual_seed(seed)
        check(case, given(case, device))


@each_device
@pytest.mark.parametrize("norm", ["rms", "layer", "l2", "layer_across_heads"])
def test_heads_whose_squares_overflow_are_zeros(norm: str, device: str) -> None:
    """Weights have the gradients of the other heads: docs/reference/numerics.md."""
    case = Case(norm=norm, dtype=torch.float32)
    operands = leaves_of(given(case, device))
    rows = operands["q"].detach().clone()
    rows[2] *= 1e25
    q, _ = call(case, operands | {"q": rows.requires_grad_()})
    others = call(case, operands)[0][[0, 1, 3, 4]]
    assert torch.equal(q, others.new_zeros(q.shape).index_copy(0, torch.tensor([0, 1, 3, 4], device=device), others))
    due = torch.randn_like(q)
    dq, dweight = torch.autograd.grad(q, (rows, operands["q_weight"]), due)
    assert not dq[2].any()
    (wanted,) = torch.autograd.grad(others, operands["q_weight"], due[[0, 1, 3, 4]])
    torch.testing.assert_close(dweight, wanted)


@each_device
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_tokens_of_several_sequences_may_share_rows(positions: bool, whole: bool, device: str) -> None:
    case = Case(positions=positions, whole=whole)
    operands = given(case, device)
    several: Tensors = operands | {name: operands[name].expand(3, *operands[name].shape) for name in ("q", "k")}
    rows = ("positions",) if positions else ("cos", "sin")
    alone = call(case, operands)
    for sizes in ((), (1,), (3,)):
        shared = {name: operands[name].expand(*sizes, *operands[name].shape) for name in rows}
        for found, wanted in zip(call(case, several | shared), alone, strict=True):
            assert all(same_bits(each, wanted) for each in found)


@each_device
def test_weights_of_other_types_have_gradients_of_theirs(device: str) -> None:
    case = Case(dtype=torch.float32)
    operands = given(case, device)
    check(case, operands | {"q_weight": operands["q_weight"].half(), "sin": operands["sin"].bfloat16()})


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    # Every other element of memory.
    "stretched": lambda x: torch.stack((x, torch.full_like(x, 7)), -1).flatten(-2)[..., ::2],
    "negated": lambda x: torch._neg_view(-x),
    # A stride that no vector of 16 bytes divides.
    "apart": lambda x: torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]],
    **{name: cases.LAYOUTS[name] for name in ("offset", "gapped", "expanded")},
}


@each_device
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides(layout: str, interleaved: bool, device: str) -> None:
    case = Case(interleaved=interleaved, positions=True)
    operands = given(case, device)
    laid_out = {name: LAYOUTS[layout](operands[name]) for name in ("q", "k")}
    laid_out |= {
        name: LAYOUTS["stretched"](operands[name]) for name in ("cos", "positions", "k_weight") if layout == "stretched"
    }
    for _ in range(2):
        due = [LAYOUTS[layout](torch.randn_like(operands[name])) for name in ("q", "k")]
        check(case, operands | laid_out, due)


@each_device
def test_tokens_of_several_dimensions(device: str) -> None:
    """Sizes before the heads count tokens; tables and positions have them, or one dimension."""
    flat = Case(tokens=6, rotary_dim=32)
    operands = given(flat, device)
    wanted = call(flat, operands)
    split = {name: operands[name].view(2, 3, -1, 64) for name in ("q", "k")}
    # As Hugging Face's models have them, the same columns twice.
    doubled = {name: torch.cat([operands[name][:6]] * 2, -1).view(2, 3, 32)[..., :16] for name in ("cos", "sin")}
    positions = torch.arange(6, dtype=torch.int32, device=device)
    for others in (
        {name: operands[name][:6] for name in ("cos", "sin")},
        doubled,
        {"sin": doubled["sin"].contiguous()} | {"cos": doubled["cos"]},
        {"positions": positions},
        {"positions": positions.long().view(2, 3)},
    ):
        for name, result, its in zip(("q", "k"), call(flat, operands | split | others), wanted, strict=True):
            assert result.shape == split[name].shape
            torch.testing.assert_close(result.view(its.shape), its)
    none = {name: each[:0] for name, each in (split | doubled).items()}
    assert [each.shape for each in call(flat, operands | none)] == [none["q"].shape, none["k"].shape]


@each_device
@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place(interleaved: bool, device: str) -> None:
    """Heads of a packed tensor are overwritten, those beside them are not, and autograd is told; in a graph too."""
    case = Case(interleaved=interleaved, n=80, rotary_dim=64)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for overwrite in (call, call, compiled):
        operands = given(case, device)
        wanted = call(case, operands)
        packed = operands["q"]._base
        values, version = packed[:, case.q_heads + case.k_heads :].clone(), packed._version
        out = operands["q"], operands["k"]
        results = overwrite(case, operands, out=out)
        assert overwrite is compiled or all(result is own for result, own in zip(results, out, strict=True))
        assert same_bits(packed, torch.cat([*wanted, values], 1))
        assert packed._version > version


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_tensors_are_written_to(dtype: torch.dtype) -> None:
    """Also where no kernel runs."""
    case = Case(dtype=dtype)
    operands = given(case)
    wanted = call(case, operands)
    for _ in range(2):
        out = tuple(LAYOUTS["gapped"](torch.zeros_like(each)) for each in wanted)
        assert all(result is own for result, own in zip(call(case, operands, out=out), out, strict=True))
        assert all(map(same_bits, out, wanted))


def test_a_known_call_overwrites_nothing_else() -> None:
    """Keys of the same strides that begin within the queries; or tables that lie in their memory."""
    case = Case(dtype=torch.float32)
    operands = given(case)
    packed = operands["q"]._base
    for start in (4, 5):
        call(case, operands | {"k": (k := packed[:, start : start + 2])}, out=(operands["q"], k))
    for start in (3, 2):
        k = packed[:, start : start + 2]
        with pytest.raises(errors.LayoutError, match=r"out \(q\) overlaps k"):
            call(case, operands | {"k": k}, out=(operands["q"], k))
    tables = dict.fromkeys(("cos", "sin"), packed[:, 6, :32])
    out = operands["q"], operands["k"]
    call(case, operands | tables, out=out)
    with pytest.raises(errors.LayoutError, match=r"out \(k\) overlaps sin"):
        call(case, operands | tables | {"sin": packed[:, 5, :32]}, out=out)


def test_a_known_call_without_gradients_says_nothing_of_one_with_them() -> None:
    operands = given(Case())
    for name, others in (("cos", {}), ("k_weight", {"out": (operands["q"], operands["k"])})):
        leaves = operands | {name: operands[name].clone().requires_grad_()}
        for _ in range(2):
            with torch.no_grad():
                call(Case(), leaves, **others)
            with pytest.raises(errors.GradientError, match=f"{name} requires a gradient"):
                call(Case(), leaves, **others)


CACHED = Case(positions=True)
SLOTS = torch.tensor([7, -1, 0, 11, 4])


def _cache(case: Case, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Three blocks of four slots, filled with what nothing writes."""
    return torch.full((3, 4, case.k_heads, case.n), 99.0, device=device).to(dtype)


def _written(cache: torch.Tensor, k: torch.Tensor, slots: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return a cache with keys at the slots of their tokens."""
    rows = cache.clone().flatten(0, 1)
    for token, slot in enumerate(slots.flatten().tolist()):
        if slot >= 0:
            row = k.flatten(0, -3)[token]
            # Torch multiplies by the reciprocal of a number on a GPU.
            divided = row.float() / torch.full_like(row, scale, dtype=torch.float32)
            rows[slot] = divided.clamp(-448, 448).to(cache.dtype) if cache.element_size() == 1 else row
    return rows.view(cache.shape)


CACHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "adjoining": lambda cache: cache,
    "heads first": lambda cache: cache.transpose(1, 2).contiguous().transpose(1, 2),
    "beside values": lambda cache: torch.stack((cache, cache), 1)[:, 0],
    "unaligned": lambda cache: torch.nn.functional.pad(cache.view(torch.uint8), (0, 8)).view(cache.dtype)[
        ..., : cache.shape[-1]
    ],
}


@each_device
@pytest.mark.parametrize("layout", CACHES)
@pytest.mark.parametrize("kept", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("norm", "interleaved", "dtype"),
    [
        ("rms", False, torch.bfloat16),
        ("rms_across_heads", True, torch.bfloat16),
        ("rms_across_heads", False, torch.float64),
    ],
)
def test_keys_are_written_to_a_cache(
    norm: str, interleaved: bool, dtype: torch.dtype, kept: torch.dtype | None, layout: str, device: str
) -> None:
    """To the slots of their tokens and no others, in any order and on any strides, of known calls too."""
    scale = None if kept is None else torch.tensor([0.015], device=device)
    for slots in (SLOTS, SLOTS.flip(0).int(), torch.full_like(SLOTS, -1), SLOTS[:1], SLOTS[:0]):
        case = Case(80, 64, tokens=len(slots), norm=norm, interleaved=interleaved, positions=True, dtype=dtype)
        operands = given(case, device)
        wanted = call(case, operands)
        cache = CACHES[layout](_cache(case, kept or dtype, device))
        before, version = cache.clone(), cache._version
        out = (operands["q"], operands["k"]) if slots is SLOTS else None
        results = call(case, operands, out=out, key_cache=cache, slot_mapping=slots.to(device), k_scale=scale)
        assert all(map(same_bits, results, wanted))
        expected = _written(before, wanted[1], slots, 1.0 if scale is None else float(scale))
        assert same_bits(cache.view(torch.uint8), expected.view(torch.uint8))
        assert cache._version > version or not len(slots)


def test_extremes_saturate_in_a_cache() -> None:
    case = replace(CACHED, norm="rms", weights=False, dtype=torch.float32)
    operands = given(case)
    operands["k"][2:4] = torch.tensor([float("nan"), 3.0]).view(2, 1, 1)
    scale, cache = torch.tensor(1e-4), _cache(case, torch.float8_e4m3fn)
    _, k = call(case, operands, key_cache=cache, slot_mapping=SLOTS, k_scale=scale)
    expected = _written(_cache(case, torch.float8_e4m3fn), k, SLOTS, 1e-4)
    assert cache[0, 0].isnan().all()
    assert torch.equal(cache.float().nan_to_num(7.0), expected.float().nan_to_num(7.0))


def test_a_traced_call_writes_to_the_cache() -> None:
    """As one operator, which a graph keeps."""
    operands, wanted = given(CACHED), _cache(CACHED, torch.float8_e4m3fn)
    call(CACHED, operands, key_cache=wanted, slot_mapping=SLOTS)

    def run(q: torch.Tensor, cache: torch.Tensor) -> Any:
        return call(CACHED, operands | {"q": q}, key_cache=cache, slot_mapping=SLOTS)

    args = operands["q"], _cache(CACHED, torch.float8_e4m3fn)
    for traced in (torch.compile(run, backend="aot_eager", fullgraph=True), make_fx(run)(*args)):
        for _ in range(2):
            cache = _cache(CACHED, torch.float8_e4m3fn)
            traced(operands["q"], cache)
            assert same_bits(cache.view(torch.uint8), wanted.view(torch.uint8))
    with pytest.raises(errors.TransformError, match="q is wrapped by a transform"):
        torch.vmap(run, (0, None))(torch.stack((args[0], args[0])), args[1])


@each_device
@pytest.mark.parametrize("case", CASES[1::4], ids=str)
def test_gradients_are_written_to_heads_of_one_tensor(case: Case, device: str) -> None:
    """With the bits of autograd's; a known call too, and where they arrived."""
    for in_place in (False, True, False):
        operands = given(case, device)
        leaves = leaves_of(operands)
        due = [torch.randn_like(operands[name]) for name in ("q", "k")]
        packed = torch.full_like(operands["q"]._base, 7)
        out = packed[:, : case.q_heads], packed[:, case.q_heads : case.q_heads + case.k_heads]
        arrived = [own.copy_(each) for own, each in zip(out, due, strict=True)] if in_place else due
        found = call(
            case, dict(zip(("dq_out", "dk_out"), arrived, strict=True)) | operands, normforge.qk_norm_rope_bwd, out=out
        )
        wanted = gradients(
            call(case, leaves), {name: leaves[name] for name in LEAVES if case.weights or name in "qk"}, due
        )
        assert all(found[at] is own for at, own in enumerate(out))
        for name, each in zip(LEAVES, found, strict=True):
            assert (each is None) is (name not in wanted)
            assert each is None or same_bits(each, wanted[name])
        assert (packed[:, case.q_heads + case.k_heads :] == 7).all()


def test_gradients_by_other_ways() -> None:
    """Traced, by torch's operators, and of no tokens."""
    for case in (Case(), Case(dtype=torch.float64), Case(tokens=0)):
        operands = given(case)
        due = {f"d{name}_out": torch.randn_like(operands[name]) for name in ("q", "k")}
        leaves = leaves_of(operands)
        wanted = torch.autograd.grad(call(case, leaves), [leaves[name] for name in LEAVES], [*due.values()])
        run = partial(call, case, function=normforge.qk_norm_rope_bwd)
        out = tuple(torch.empty_like(operands[name]) for name in ("q", "k"))
        for compute in (run, torch.compile(run, backend="aot_eager")):
            for found, its in zip(compute(due | operands, out=out), wanted, strict=True):
                torch.testing.assert_close(found, its)
    with pytest.raises(errors.TransformError, match="dq_out is wrapped by a transform"):
        torch.vmap(lambda dq_out: normforge.qk_norm_rope_bwd(dq_out, K, **GIVEN))(Q.expand(2, *Q.shape))


GIVEN = given(Case())
KEPT = _cache(Case(), torch.bfloat16)
ROWS = torch.ones(3, 5).long()
Q, K, WEIGHT = (GIVEN[name] for name in ("q", "k", "k_weight"))
TRAINED = WEIGHT.clone().requires_grad_()


@each_of(refusals(Path(__file__).with_name("rotary.yaml"), globals()))
def test_what_is_refused(given: Tensors, error: type[Exception], message: str) -> None:
    """Also of a call that is known but for that."""
    call(Case(), GIVEN)
    function = normforge.qk_norm_rope_bwd if "dq_out" in given else normforge.qk_norm_rope
    for _ in range(2):
        with pytest.raises(error, match=message):
            function(**(GIVEN | given))


def test_dtensors_are_refused(mesh: DeviceMesh) -> None:
    operands = given(Case())
    whole = {
        name: each if each is None else DTensor.from_local(each.contiguous(), mesh, [Replicate()])
        for name, each in operands.items()
    }
    with pytest.raises(errors.DeviceError, match="was given a DTensor"):
        call(Case(), whole)


@each_device
@pytest.mark.parametrize("at", [0, 1])
def test_a_gradient_of_one_result(at: int, device: str) -> None:
    """The other's gradients are zeros; and what needs no gradient has none."""
    operands = given(Case(), device)
    due: list[Any] = [None, None]
    due[at] = torch.randn_like(operands["qk"[at]])
    check(Case(), operands, due)
    results = check(Case(), operands, due, trained=(f"{'qk'[at]}_weight",))
    assert [each.requires_grad for each in results] == [True, at == 1][:: 1 - 2 * at]


@each_device
@pytest.mark.parametrize("norm", ["rms", "layer_across_heads"])
def test_queries_alone(norm: str, device: str) -> None:
    """Keys without heads take no part, and have no gradient."""
    case = Case(norm=norm, q_heads=3)
    for seed in range(2):
        torch.manual_seed(seed)
        operands = given(case, device)
        alone = operands | {"k": operands["k"][:, :0], "k_weight": None}
        results = check(case, alone, trained=("q", "q_weight"))
        assert results[1].shape == (case.tokens, 0, case.n)
        assert same_bits(results[0], call(case, operands)[0])
    with_offset = replace(case, weight_offset=1.0)
    assert same_bits(call(with_offset, alone)[0], call(with_offset, operands)[0])


def _of_leaves(case: Case, operands: Tensors) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return the function of the tensors that have gradients, and these."""
    names = [name for name in LEAVES if operands[name] is not None]
    return lambda *tensors: call(case, operands | dict(zip(names, tensors, strict=True))), [operands[n] for n in names]


@pytest.mark.parametrize(
    "case", [Case(n=6, rotary_dim=4, tokens=2), replace(EXACT, n=6, rotary_dim=4, tokens=2)], ids=str
)
def test_where_no_kernel_runs_torch_computes_the_same(case: Case) -> None:
    operands = given(replace(case, dtype=torch.float64))
    operands |= {name: operands[name].double() for name in ("q_weight", "k_weight", "cos", "sin")}
    function, tensors = _of_leaves(case, operands)
    _, wanted = exact(case, operands)
    for result, its in zip(function(*tensors), wanted, strict=True):
        torch.testing.assert_close(result, its.detach(), rtol=1e-12, atol=1e-12)
    leaves = tuple(each.clone().requires_grad_() for each in tensors)
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@each_device
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    ["vmap", "grad", "jvp", "double backward", "jit.trace", "fx.symbolic_trace", "make_fx of backward", "hessian"],
)
def test_transforms(name: str, device: str) -> None:
    case = Case(n=N, rotary_dim=N, q_heads=1, k_heads=1, tokens=M, dtype=torch.float32)
    operands = given(case, device)

    def of(run: Callable[[Tensors], torch.Tensor]) -> Callable[..., torch.Tensor]:
        def function(x: torch.Tensor, w: torch.Tensor = operands["q_weight"], r: Any = None) -> torch.Tensor:
            return run(operands | {"q": x.unsqueeze(-2), "q_weight": w}).squeeze(-2)

        return function

    alike(name, of(lambda each: call(case, each)[0]), of(partial(formula, case, "q")), device)


@each_device
@pytest.mark.parametrize("case", [EXACT, Case(positions=True), Case(weights=False, cast="before_weight")], ids=str)
def test_traced(case: Case, device: str) -> None:
    """One operator forward and one backward, with the bits of an eager call."""
    function, tensors = _of_leaves(case, leaves_of(given(case, device)))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    eager, traced = function(*tensors), compiled(*tensors)
    assert all(map(same_bits, traced, eager))
    compiled(*tensors)
    # The operator's calls are known too; the first one runs among other dispatch keys.
    with mock.patch.object(rotary, "_first", side_effect=AssertionError):
        assert all(map(same_bits, compiled(*tensors), eager))
    due = [torch.randn_like(each) for each in eager]
    for found, its in zip(*(torch.autograd.grad(each, tensors, due) for each in (traced, eager)), strict=True):
        assert same_bits(found, its)


@pytest.mark.parametrize("weights", [False, True])
def test_operators_are_what_torch_wants(weights: bool) -> None:
    operands = leaves_of(given(Case(weights=weights, positions=True)))
    tensors = [operands[name] for name in rotary._OPERANDS]
    options = ("rms", 1e-6, False, 64, 0.0, "after_weight", 0, 0, False)
    torch.library.opcheck(torch.ops.normforge.qk_norm_rope.default, (*tensors, *options))
    with torch.no_grad():
        cached = torch.ops.normforge.qk_norm_rope_cached.default
        torch.library.opcheck(cached, (*tensors, SLOTS, None, *options, _cache(CACHED, torch.bfloat16)))
    with pytest.raises(errors.GradientError, match="requires a gradient"):
        cached(*tensors, SLOTS, None, *options, _cache(CACHED, torch.bfloat16))
    due = [torch.randn_like(operands[name]) for name in ("q", "k")]
    backward: Any = torch.ops.normforge.qk_norm_rope_backward.default
    plain: list[Any] = [None if each is None else each.detach() for each in tensors]
    torch.library.opcheck(backward, (*due, *plain, *options, [weights, False]))
    with pytest.raises(errors.ShapeError, match="k has shape"):
        torch.ops.normforge.qk_norm_rope.default(plain[0], plain[1][1:], *plain[2:], *options)


@each_device
def test_bits_of_a_token_are_its_own(device: str) -> None:
    """Under batch invariance, wherever it lies and however many there are, in a graph too."""
    case = Case(tokens=9, n=80, rotary_dim=80)
    operands = given(case, device)
    with normforge.batch_invariant():
        graph = make_fx(lambda q, k: call(case, operands | {"q": q, "k": k}))(operands["q"], operands["k"]).graph
        assert torch.ops.normforge.qk_norm_rope_invariant.default in [node.target for node in graph.nodes]
        wanted = call(case, operands)
        for layout in ("offset", "gapped", "transposed"):
            some = {name: LAYOUTS[layout](operands[name][4:6]) for name in ("q", "k")}
            some |= {name: operands[name][4:6] for name in ("cos", "sin")}
            for found, its in zip(call(case, operands | some), wanted, strict=True):
                assert same_bits(found, its[4:6])


def test_one_kernel_serves_heads_wherever_they_lie() -> None:
    """Under batch invariance: how a row is added up follows from what a kernel was compiled for."""
    case = Case(tokens=9)
    operands, met = given(case), []
    for layout in LAYOUTS:
        laid_out = operands | {name: LAYOUTS[layout](operands[name]) for name in ("q", "k")}
        with dispatch.using(dispatch.loaded()), launching_nothing(TARGETS[0]) as keys, normforge.batch_invariant():
            call(case, laid_out)
        met.append(keys)
    assert len(set.union(*met)) == 1


def test_a_mean_far_from_zero() -> None:
    """The spread of a row is kept beside a mean ten thousand times as large."""
    operands = given(EXACT)
    operands |= {name: operands[name] + 1e4 for name in ("q", "k")}
    _, wanted = exact(EXACT, operands)
    torch.testing.assert_close(call(EXACT, operands)[0].double(), wanted[0].detach(), rtol=0, atol=1e-5)


@COSTLY
@pytest.mark.compile
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(n=128, rotary_dim=128),
        replace(EXACT, positions=True, dtype=torch.float16, cast="before_weight"),
        Case(n=128, rotary_dim=128, positions=True, mrope_section=(24, 20, 20), mrope_interleaved=True),
        Case(n=128, rotary_dim=128, q_heads=3, k_heads=1, norm="rms_across_heads"),
        replace(EXACT, norm="layer_across_heads", positions=True, dtype=torch.float16, cast="before_weight"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("cold_cache")
def test_compile(case: Case, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions launch one kernel, and gradients of weights another; so does one that writes to a cache."""
    with dispatch.using(dispatch.loaded()), launching_nothing(target) as met:
        results = call(case, leaves_of(given(case)))
        torch.autograd.backward(results, [torch.ones_like(each) for each in results])
        cache, scale = _cache(case, torch.float8_e4m3fn), torch.ones(1)
        with launching_nothing(target) as cached:
            call(case, given(case), key_cache=cache, slot_mapping=SLOTS, k_scale=scale)
    name = "qk_norm_rope_across" if case.norm.endswith("_across_heads") else "qk_norm_rope"
    assert [key.symbol for key in cached] == [f"{name}_fwd"]
    met |= cached
    # Weights of two lengths take two kernels.
    sums = 1 + (name.endswith("across") and case.q_heads != case.k_heads)
    assert sorted(key.symbol for key in met) == [f"{name}_bwd", *[f"{name}_fwd"] * 2, *["sum_partials"] * sums]
    (key,) = cached
    with monkeypatch.context() as frozen:
        frozen.setenv("NORMFORGE_FROZEN", "1")
        with pytest.raises(errors.FrozenError, match="by making the call once"):
            compile_for(key, resolve_name(key.kernel), target)
    for key in met:
        assert binary_of(target) in compile_for(key, resolve_name(key.kernel), target).asm
