"""Modulated norms: outputs and gradients against fp64 autograd, for every way in which rows share a modulation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional

import normforge
from normforge.calls import road
from normforge.errors import ConflictError, DTypeError, ShapeError

from ..calling import each_device, each_float
from .oracle import ARRIVING, Tensors, agree, backward, close, each_norm, second_order, taken

EPS = 1e-5

# (B, T, N): several rows a sample.
SHAPE = (3, 9, 40)

FUNCTIONS: dict[str, Any] = {"layer": normforge.modulated_layer_norm, "rms": normforge.modulated_rms_norm}

each_kind = pytest.mark.parametrize("kind", ["sample", "row", "all"])


def shape_of(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return {"sample": (shape[0], shape[-1]), "row": shape, "all": shape[-1:]}[kind]


@dataclass
class Operands(Tensors):
    """The tensors of one call."""

    scale: torch.Tensor
    shift: torch.Tensor
    gate: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def operands(
    norm: str,
    kinds: tuple[str, str, str],
    *,
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    gated: bool = True,
    residual: bool = True,
    affine: bool = True,
) -> Operands:
    """Random operands that require gradients, those of kinds as scale, shift and gate."""

    def leaf(size: tuple[int, ...], of: torch.dtype = dtype, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(size, device=device) + mean).to(of).requires_grad_()

    scale, shift, gate = (leaf(shape_of(kind, shape)) for kind in kinds)
    return Operands(
        leaf(shape, mean=0.3),
        scale,
        shift,
        gate if gated else None,
        leaf(shape, torch.float32) if residual else None,
        leaf(shape[-1:], torch.float32, 1.0) if affine else None,
        leaf(shape[-1:], torch.float32) if affine and norm == "layer" else None,
    )


def call(norm: str, given: Operands) -> tuple[torch.Tensor, ...]:
    """What normforge makes of operands: y and, with a residual, residual_out."""
    others = given.present()
    x, scale, shift = (others.pop(name) for name in ("x", "scale", "shift"))
    found = FUNCTIONS[norm](x, scale, shift, eps=EPS, **others)
    return found if isinstance(found, tuple) else (found,)


def expected(norm: str, given: Operands) -> tuple[Operands, tuple[torch.Tensor, ...]]:
    """fp64 copies of operands, and what torch makes of them."""
    exact = given.doubled()
    x = exact.x

    def beside(operand: torch.Tensor) -> torch.Tensor:
        return operand.unsqueeze(1) if operand.dim() == 2 and x.dim() == 3 else operand

    s = x if exact.gate is None else x * beside(exact.gate)
    s = s if exact.residual is None else s + exact.residual
    if norm == "rms":
        h = functional.rms_norm(s, s.shape[-1:], exact.weight, EPS)
    else:
        h = functional.layer_norm(s, s.shape[-1:], exact.weight, exact.bias, EPS)
    y = h * (1 + beside(exact.scale)) + beside(exact.shift)
    return exact, (y,) if exact.residual is None else (y, s)


def check(norm: str, given: Operands) -> None:
    """Fail unless outputs and all gradients are fp64 autograd's, of the shapes and types of what they are of."""
    outputs, (exact, wanted) = call(norm, given), expected(norm, given)
    assert outputs[0].dtype is given.x.dtype
    agree(given, outputs, exact, wanted, [torch.randn_like(output) for output in outputs])


@each_device
@each_kind
@each_norm
@pytest.mark.parametrize(("gated", "residual"), [(False, False), (False, True), (True, True)])
def test_outputs_and_gradients_are_those_of_fp64(
    norm: str, kind: str, gated: bool, residual: bool, device: str
) -> None:
    check(norm, operands(norm, (kind, kind, kind), device=device, gated=gated, residual=residual))


@each_device
@each_float
@each_norm
def test_every_type_is_rounded_once(norm: str, dtype: torch.dtype, device: str) -> None:
    check(norm, operands(norm, ("sample", "sample", "sample"), dtype=dtype, device=device))


@each_device
@pytest.mark.parametrize(
    "kinds",
    [
        ("sample", "all", "row"),
        ("row", "sample", "all"),
        ("all", "row", "sample"),
        ("sample", "all", "sample"),
        ("all", "sample", "all"),
        ("all", "all", "sample"),
    ],
    ids=str,
)
def test_modulations_may_be_of_several_kinds(kinds: tuple[str, str, str], device: str) -> None:
    check("layer", operands("layer", kinds, device=device))


@each_device
@pytest.mark.parametrize("shape", [(40,), (5, 40), (1, 3, 40), (3, 1, 40), (2, 3, 2, 40)], ids=str)
@each_norm
def test_any_number_of_dimensions(norm: str, shape: tuple[int, ...], device: str) -> None:
    given = operands(norm, ("all", "all", "all") if len(shape) == 1 else ("sample",) * 3, shape=shape, device=device)
    if len(shape) == 4:
        # The oracle above has samples of one dimension.
        flat = {name: tensor.detach() for name, tensor in given.present().items()}
        flat |= {name: flat[name].flatten(1, 2) for name in ("x", "residual")}
        for output, its in zip(call(norm, given), call(norm, Operands(**flat)), strict=True):
            assert torch.equal(output.flatten(1, 2), its)
        return
    check(norm, given)


@each_device
@pytest.mark.parametrize("n", [100, 600, pytest.param(33000, marks=pytest.mark.thorough)])
def test_chunks_of_one_tensor_are_read_where_they_are(n: int, device: str) -> None:
    """As DiT's modulation leaves them, and views of wider rows; nothing is copied, and each pipeline has such rows."""
    six = torch.randn(2, 6 * n, device=device).requires_grad_()
    shift, scale, gate = six.chunk(6, -1)[:3]
    x, residual = torch.randn(2, 2, 2 * n, device=device).chunk(2, -1)
    given = Operands(x, scale, shift, gate, residual)
    with torch.no_grad():
        outputs = call("layer", given)
        rows = road.as_operands((x, scale, shift, gate, residual, None, None))
    assert all(row is tensor for row, tensor in zip(rows, (x, scale, shift, gate, residual), strict=False))
    for output, its in zip(outputs, expected("layer", given)[1], strict=True):
        close("output", output, its, 2e-5)


@each_device
@each_norm
def test_many_short_rows(norm: str, device: str) -> None:
    """So many that a program takes several, and samples end within one."""
    given = operands(norm, ("sample",) * 3, shape=(3, 101, 24), device=device)
    with torch.no_grad():
        outputs = call(norm, given)
    for output, its in zip(outputs, expected(norm, given)[1], strict=True):
        close("output", output, its, 2e-5)


def test_what_kernels_cannot_walk_is_copied() -> None:
    x, scale, shift = torch.randn(40, 3, 2).transpose(0, 2), torch.randn(40, 2).T, torch.randn(80)[::2]
    y = normforge.modulated_rms_norm(x, scale, shift)
    assert torch.equal(y, normforge.modulated_rms_norm(x.contiguous(), scale.contiguous(), shift.contiguous()))


@each_device
def test_only_what_asks_for_a_gradient_has_one(device: str) -> None:
    for name in vars(operands("layer", ("sample",) * 3)):
        given = operands("layer", ("sample",) * 3, device=device)
        for other, tensor in given.present().items():
            tensor.requires_grad_(other == name)
        outputs = call("layer", given)
        assert outputs[0].requires_grad
        assert outputs[1].requires_grad == (name in ("x", "gate", "residual"))
        backward(outputs[0].square().sum())
        assert [other for other, tensor in given.present().items() if tensor.grad is not None] == [name]


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return taken(monkeypatch)


@each_device
@pytest.mark.parametrize(
    ("kind", "rows", "kernels"), [("sample", 9, True), ("sample", 7, False), ("all", 3, True), ("row", 9, False)]
)
def test_which_backward_passes_are_kernels(
    kind: str, rows: int, kernels: bool, device: str, by_kernels: list[bool]
) -> None:
    """Of eight rows a sample and more."""
    check("rms", operands("rms", (kind,) * 3, shape=(3, rows, 40), device=device))
    assert by_kernels == [kernels]


@each_device
@pytest.mark.parametrize("lies", ARRIVING)
def test_a_gradient_that_arrives_may_lie_anyhow(lies: str, device: str, by_kernels: list[bool]) -> None:
    with torch.device(device):
        arrived = ARRIVING[lies]()
    given = operands("layer", ("sample",) * 3, shape=(2, 8, 40), device=device)
    exact, wanted = expected("layer", given)
    agree(given, call("layer", given), exact, wanted, [arrived, arrived])
    assert by_kernels == [lies != "negated"]


@each_device
@pytest.mark.parametrize("n", [700, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1500, 9000))])
@each_norm
def test_gradients_in_each_pipeline(norm: str, n: int, device: str, by_kernels: list[bool]) -> None:
    check(norm, operands(norm, ("sample",) * 3, shape=(2, 8, n), dtype=torch.bfloat16, device=device))
    assert by_kernels == [True]


def test_a_gradient_of_the_sum_alone() -> None:
    given = operands("layer", ("sample",) * 3)
    backward(call("layer", given)[1].square().sum())
    exact, (_, s) = expected("layer", given)
    backward(s.square().sum())
    for name in ("x", "gate", "residual"):
        close(name, vars(given)[name].grad, vars(exact)[name].grad, 1e-5)
    assert given.scale.grad is None
    assert given.weight is not None
    assert given.weight.grad is None


@each_kind
@each_norm
def test_a_gradient_of_a_gradient(norm: str, kind: str) -> None:
    given = operands(norm, (kind,) * 3)
    exact, wanted = expected(norm, given)

    found = second_order(call(norm, given), list(given.present().values()))
    its = second_order(wanted, list(exact.present().values()))
    for name, a, b in zip(given.present(), found, its, strict=True):
        close(name, a, b, 1e-3)


@each_device
@each_norm
def test_two_runs_give_the_same_bits(norm: str, device: str) -> None:
    given = operands(norm, ("sample",) * 3, shape=(2, 4, 40), dtype=torch.bfloat16, device=device)
    leaves = list(given.present().values())

    def once() -> list[torch.Tensor]:
        outputs = call(norm, given)
        return [*outputs, *torch.autograd.grad([o.float().square().sum() for o in outputs], leaves)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize(("gated", "affine"), list(product((False, True), repeat=2)))
@each_norm
def test_where_no_kernel_runs_torch_computes_the_same(norm: str, gated: bool, affine: bool) -> None:
    given = operands(norm, ("sample",) * 3, gated=gated, affine=affine)
    exact, wanted = expected(norm, given)
    for output, its in zip(call(norm, exact), wanted, strict=True):
        assert output.dtype is torch.float64
        close("output", output, its, 1e-12)
    values = given.present()

    def over(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call(norm, Operands(**dict(zip(values, tensors, strict=True))))

    def tangents(*tensors: torch.Tensor) -> Any:
        return torch.func.jvp(over, tensors, tuple(torch.ones_like(tensor) for tensor in tensors))[1]

    leaves = [tensor.detach() for tensor in values.values()]
    for found, its in zip(tangents(*leaves), tangents(*[leaf.double() for leaf in leaves]), strict=True):
        close("tangent", found, its, 1e-4)


@pytest.mark.gpu
@each_norm
def test_autocast_gives_the_type_that_torch_gives(norm: str) -> None:
    x, scale, shift = (torch.randn(2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    function = FUNCTIONS[norm]
    plain = functional.layer_norm if norm == "layer" else functional.rms_norm
    assert function(x, scale, shift).dtype is torch.bfloat16
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert function(x, scale, shift).dtype is plain(x, (64,)).dtype
        assert function(x, scale, shift).dtype is plain(x, (64,)).dtype


def test_a_gate_goes_with_a_residual() -> None:
    x, vector = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(ConflictError, match="gate scales x before residual is added to it, and none was passed"):
        normforge.modulated_layer_norm(x, vector, vector, gate=vector)


@pytest.mark.parametrize("shape", [(2, 3), (8, 3), (3, 8), (1, 8), (2, 1, 8)], ids=str)
def test_a_modulation_that_fits_no_rows_is_refused(shape: tuple[int, ...]) -> None:
    x, vector = torch.randn(2, 3, 8), torch.randn(8)
    problem = rf"has shape {tuple(shape)} and x \(2, 3, 8\); it takes \(2, 8\) or \(2, 3, 8\) or \(8,\)".replace(
        str(shape), str(shape).replace("(", r"\(").replace(")", r"\)")
    )
    for name, given in {
        "scale": (torch.randn(shape), vector),
        "shift": (vector, torch.randn(shape)),
    }.items():
        with pytest.raises(ShapeError, match=f"{name} {problem}"):
            normforge.modulated_layer_norm(x, *given)
    with pytest.raises(ShapeError, match=f"gate {problem}"):
        normforge.modulated_layer_norm(x, vector, vector, gate=torch.randn(shape), residual=x)


def test_what_is_no_tensor_is_refused() -> None:
    x, vector = torch.randn(2, 8), torch.randn(8)
    arguments: list[tuple[object, ...]] = [(x, None, vector), (x, vector, vector.int()), ("x", vector, vector)]
    for given in arguments:
        with pytest.raises(DTypeError):
            FUNCTIONS["rms"](*given)
    with pytest.raises(ConflictError, match="eps=-1"):
        normforge.modulated_rms_norm(x, vector, vector, eps=-1)
    assert normforge.modulated_rms_norm(torch.empty(0, 3, 8), torch.empty(0, 8), vector).shape == (0, 3, 8)
