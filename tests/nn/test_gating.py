"""Gated norms: outputs and gradients against fp64 autograd of a composition written out here."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

import normforge
from normforge.calls import road
from normforge.errors import ConflictError, DTypeError, ShapeError, TransformError

from ..calling import each_device, each_float
from .oracle import ARRIVING, Tensors, agree, backward, close, each_norm, second_order, taken

EPS = 1e-5

FUNCTIONS: dict[str, Any] = {"layer": normforge.gated_layer_norm, "rms": normforge.gated_rms_norm}

each_order = pytest.mark.parametrize("first", [True, False], ids=["norm-first", "gate-first"])
each_activation = pytest.mark.parametrize("activation", ["silu", "sigmoid"])


@dataclass
class Operands(Tensors):
    """The tensors of one call."""

    gate: torch.Tensor
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def operands(
    norm: str,
    *,
    shape: tuple[int, ...] = (3, 9, 40),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    affine: bool = True,
) -> Operands:
    """Random operands that require gradients; the gate is the end of rows twice as long."""

    def leaf(size: tuple[int, ...], of: torch.dtype = dtype, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(size, device=device) + mean).to(of).requires_grad_()

    n = shape[-1]
    wide = torch.randn(*shape[:-1], 2 * n, device=device).to(dtype)
    return Operands(
        leaf(shape, mean=0.3),
        wide[..., n:].requires_grad_(),
        leaf((n,), torch.float32, 1.0) if affine else None,
        leaf((n,), torch.float32) if affine and norm == "layer" else None,
    )


def call(norm: str, given: Operands, **options: Any) -> torch.Tensor:
    y: torch.Tensor = FUNCTIONS[norm](**given.present(), eps=EPS, **options)
    return y


def composed(
    norm: str,
    given: Operands,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> torch.Tensor:
    """The formula in elementary operations of torch."""
    x, z = given.x, given.gate
    f = 1 / (1 + torch.exp(-z))
    f = z * f if activation == "silu" else f
    n = group_size or x.shape[-1]
    rows = (x if norm_before_gate else x * f).reshape(*x.shape[:-1], -1, n)
    if norm == "layer":
        rows = rows - rows.mean(-1, keepdim=True)
    y: torch.Tensor = (rows / (rows.pow(2).mean(-1, keepdim=True) + EPS).sqrt()).flatten(-2)
    y = y if given.weight is None else y * given.weight
    y = y if given.bias is None else y + given.bias
    return y * f if norm_before_gate else y


def check(norm: str, given: Operands, **options: Any) -> None:
    """Fail unless y and all gradients are fp64 autograd's, of the shapes and types of what they are of."""
    y, exact = call(norm, given, **options), given.doubled()
    assert y.dtype is given.x.dtype
    agree(given, [y], exact, [composed(norm, exact, **options)], [torch.randn_like(y)])


@each_device
@each_activation
@each_order
@each_norm
@pytest.mark.parametrize("group_size", [None, 8])
def test_outputs_and_gradients_are_those_of_fp64(
    norm: str, first: bool, activation: str, group_size: int | None, device: str
) -> None:
    given = operands(norm, device=device)
    check(norm, given, activation=activation, norm_before_gate=first, group_size=group_size)


@each_device
@each_order
@each_float
@each_norm
def test_every_type_is_rounded_once(norm: str, dtype: torch.dtype, first: bool, device: str) -> None:
    check(norm, operands(norm, shape=(5, 48), dtype=dtype, device=device), norm_before_gate=first, group_size=16)


@each_device
@each_order
@each_norm
@pytest.mark.parametrize("shape", [(40,), (5, 40), (1, 3, 40), (2, 3, 2, 40)], ids=str)
@pytest.mark.parametrize("group_size", [None, 20, 40])
def test_any_number_of_dimensions(
    norm: str, first: bool, shape: tuple[int, ...], group_size: int | None, device: str
) -> None:
    check(norm, operands(norm, shape=shape, device=device), norm_before_gate=first, group_size=group_size)


@each_device
@each_norm
def test_weights_may_be_left_out(norm: str, device: str) -> None:
    for group_size in (None, 8):
        given = operands(norm, device=device, affine=False)
        check(norm, given, group_size=group_size)


@each_device
@each_order
@pytest.mark.parametrize("n", [100, 600, 1500, pytest.param(9000, marks=pytest.mark.thorough)])
def test_gradients_in_each_pipeline(n: int, first: bool, device: str) -> None:
    for group_size in (None, n // 2):
        check("layer", operands("layer", shape=(4, n), device=device), norm_before_gate=first, group_size=group_size)


@each_device
def test_many_short_rows_of_heads(device: str) -> None:
    """As Gated DeltaNet has them: several rows a program, of heads of a projection that are walked where they are."""
    tokens, heads, n = 23, 3, 24
    projected = torch.randn(tokens, 2 * heads * n, device=device)
    x, gate = (part.view(1, tokens, heads, n).requires_grad_() for part in projected.chunk(2, -1))
    given = Operands(x, gate, (torch.rand(n, device=device) + 0.5).requires_grad_())
    with torch.no_grad():
        assert all(row is tensor for row, tensor in zip(road.as_operands((x, gate)), (x, gate), strict=True))
    check("rms", given)


@each_device
@each_norm
def test_groups_are_walked_where_they_are(norm: str, device: str) -> None:
    """As Mamba2 has them: x and the gate parts of one projection, in groups."""
    x, gate = torch.randn(7, 3, 96, device=device).chunk(2, -1)
    given = Operands(x.requires_grad_(), gate.requires_grad_(), torch.randn(48, device=device).requires_grad_())
    check(norm, given, norm_before_gate=False, group_size=16)


@each_device
@each_order
def test_a_gradient_of_a_gradient(first: bool, device: str) -> None:
    for group_size in (None, 8):
        given = operands("layer", shape=(3, 16), device=device)
        exact = given.doubled()
        options: dict[str, Any] = {"norm_before_gate": first, "group_size": group_size}

        found = second_order([call("layer", given, **options)], list(given.present().values()))
        wanted = second_order([composed("layer", exact, **options)], list(exact.present().values()))
        for name, a, b in zip(given.present(), found, wanted, strict=True):
            close(name, a, b, 1e-3)


@pytest.mark.parametrize(
    ("activation", "first", "group_size"), list(product(["silu", "sigmoid"], [True, False], [None, 4]))
)
@each_norm
def test_where_no_kernel_runs_torch_computes_the_same(
    norm: str, activation: str, first: bool, group_size: int | None
) -> None:
    options: dict[str, Any] = {"activation": activation, "norm_before_gate": first, "group_size": group_size}
    given = operands(norm, shape=(3, 8))
    exact = given.doubled()
    y = call(norm, exact, **options)
    assert y.dtype is torch.float64
    close("y", y, composed(norm, exact, **options), 1e-12)
    names = list(given.present())

    def over(*tensors: torch.Tensor) -> torch.Tensor:
        return call(norm, Operands(**dict(zip(names, tensors, strict=True))), **options)

    assert torch.autograd.gradcheck(over, tuple(exact.present().values()))
    leaves = [tensor.detach() for tensor in given.present().values()]
    tangents = torch.func.jvp(over, tuple(leaves), tuple(torch.ones_like(leaf) for leaf in leaves))[1]
    wide = tuple(leaf.double() for leaf in leaves)
    close("tangent", tangents, torch.func.jvp(over, wide, tuple(torch.ones_like(leaf) for leaf in wide))[1], 1e-4)
    mapped = torch.func.vmap(over, (0, 0, *[None] * (len(leaves) - 2)))(*leaves)
    close("mapped", mapped, over(*leaves).double(), 1e-5)


@each_device
@each_order
@each_norm
def test_two_runs_give_the_same_bits(norm: str, first: bool, device: str) -> None:
    given = operands(norm, shape=(9, 32), dtype=torch.bfloat16, device=device)
    leaves = list(given.present().values())

    def once() -> list[torch.Tensor]:
        y = call(norm, given, norm_before_gate=first, group_size=16)
        return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@each_device
@each_norm
def test_the_bits_of_a_row_do_not_depend_on_the_others(norm: str, device: str) -> None:
    given = operands(norm, shape=(40, 24), device=device)

    def of(rows: int) -> list[torch.Tensor]:
        some = Operands(given.x[:rows], given.gate[:rows], given.weight, given.bias)
        y = call(norm, some)
        return [y[0], *(g[0] for g in torch.autograd.grad(y, (given.x, given.gate), torch.ones_like(y)))]

    for rows in (1, 2, 17):
        assert all(torch.equal(a, b) for a, b in zip(of(rows), of(40), strict=True))


@each_device
def test_only_what_asks_for_a_gradient_has_one(device: str) -> None:
    for name in vars(operands("layer")):
        given = operands("layer", device=device)
        for other, tensor in given.present().items():
            tensor.requires_grad_(other == name)
        backward(call("layer", given).square().sum())
        assert [other for other, tensor in given.present().items() if tensor.grad is not None] == [name]


@each_device
@pytest.mark.parametrize("lies", ARRIVING)
@pytest.mark.parametrize("group_size", [None, 8])
def test_a_gradient_that_arrives_may_lie_anyhow(
    lies: str, group_size: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_kernels = taken(monkeypatch)
    with torch.device(device):
        arrived = ARRIVING[lies]()
    given = operands("layer", shape=(2, 8, 40), device=device)
    exact = given.doubled()
    y, wanted = (made("layer", of, group_size=group_size) for made, of in ((call, given), (composed, exact)))
    agree(given, [y], exact, [wanted], [arrived])
    assert by_kernels == [lies != "negated"]


@each_device
@each_activation
@each_order
def test_rows_that_are_hard(first: bool, activation: str, device: str) -> None:
    """All equal, far from 0, a gate far below 0, and infinities and NaNs that stay in their own rows."""
    n = 40
    x = torch.randn(7, n, device=device)
    gate = torch.randn(7, n, device=device)
    x[0] = 3.0
    x[1] = 1e4 + torch.randn(n, device=device)
    x[2] *= 1e18
    gate[3] = -200.0
    gate[4] = 90.0
    x[5, 3], gate[6, 2] = float("inf"), float("nan")
    options: dict[str, Any] = {"norm_before_gate": first, "activation": activation}
    for norm in FUNCTIONS:
        given = Operands(x.clone(), gate.clone())
        y = call(norm, given, **options)
        wanted = composed(norm, given.doubled(), **options).detach()
        assert not y[5:].isfinite().all(-1).any()
        # Of 1e4 fp32 holds no more than the noise beside it to a thousandth.
        for row in range(5):
            tolerance = 2e-3 if row in (0, 1) and norm == "layer" else 2e-5
            close(f"row {row}", y[row], wanted[row], tolerance)


@each_device
def test_no_rows(device: str) -> None:
    x, weight = torch.empty(0, 40, device=device, requires_grad=True), torch.ones(40, device=device, requires_grad=True)
    for group_size in (None, 8):
        y = normforge.gated_rms_norm(x, x.detach(), weight, group_size=group_size)
        assert y.shape == (0, 40)
        (gradient,) = torch.autograd.grad(y.sum(), weight)
        assert torch.equal(gradient, torch.zeros(40, device=device))


def test_groups_are_a_divisor_of_the_row() -> None:
    x = torch.randn(3, 40)
    for wrong in (0, 7, -8, 80, 8.0, True, "8"):
        with pytest.raises(ShapeError, match=r"group_size=.* and x has shape \(3, 40\); it takes a divisor of N, 40"):
            normforge.gated_rms_norm(x, x, group_size=wrong)  # type: ignore[arg-type]  # what is refused


def test_what_does_not_fit_is_refused() -> None:
    x, short = torch.randn(3, 40), torch.randn(20)
    for group_size in (None, 8):
        with pytest.raises(ShapeError, match=r"weight has shape \(20,\)"):
            normforge.gated_rms_norm(x, x, short, group_size=group_size)
        with pytest.raises(ShapeError, match=r"gate has shape \(40,\)"):
            normforge.gated_rms_norm(x, x[0], group_size=group_size)
        with pytest.raises(ShapeError, match=r"bias has shape \(20,\)"):
            normforge.gated_layer_norm(x, x, None, short, group_size=group_size)
    with pytest.raises(ConflictError, match="activation='relu' is no mode; it takes 'silu', 'sigmoid'"):
        normforge.gated_rms_norm(x, x, activation="relu")
    with pytest.raises(ConflictError, match="norm_before_gate='no' is no flag; it takes True or False"):
        normforge.gated_rms_norm(x, x, norm_before_gate="no")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ConflictError, match="eps=-1"):
        normforge.gated_rms_norm(x, x, eps=-1)
    with pytest.raises(DTypeError):
        normforge.gated_rms_norm(x, None)  # type: ignore[arg-type]  # what is refused
    with pytest.raises(DTypeError):
        normforge.gated_rms_norm(x, x.int())


@pytest.mark.gpu
@each_order
@each_norm
def test_short_rows_by_the_hundred_thousand(norm: str, first: bool) -> None:
    for n, group_size in ((64, None), (128, None), (256, 64)):
        given = operands(norm, shape=(262144 * 64 // n, n), dtype=torch.bfloat16, device="cuda")
        check(norm, given, norm_before_gate=first, group_size=group_size)


@pytest.mark.gpu
@each_norm
def test_autocast_gives_the_type_that_torch_gives(norm: str) -> None:
    x, gate = (torch.randn(2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    plain = torch.nn.functional.layer_norm if norm == "layer" else torch.nn.functional.rms_norm
    assert FUNCTIONS[norm](x, gate).dtype is torch.bfloat16
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(2):
            assert FUNCTIONS[norm](x, gate).dtype is plain(x, (64,)).dtype


@each_norm
def test_modules_are_the_functions_with_parameters(norm: str) -> None:
    x, gate = torch.randn(2, 3, 48).chunk(2, -1)
    options: dict[str, Any] = {"activation": "sigmoid", "norm_before_gate": False, "group_size": 8, "eps": 1e-3}
    made: Any = normforge.GatedLayerNorm if norm == "layer" else normforge.GatedRMSNorm
    module = made(24, **options)
    assert torch.equal(module.weight, torch.ones(24))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    assert torch.equal(module(x, gate), FUNCTIONS[norm](x, gate, *module.parameters(), **options))
    assert repr(module).endswith("Norm(24, eps=0.001, group_size=8, norm_before_gate=False, activation='sigmoid')")


def test_modules_have_the_names_of_the_fields_own() -> None:
    """Of mamba_ssm's RMSNormGated, whose state dicts are loaded: a weight and nothing else."""
    assert [name for name, _ in normforge.GatedRMSNorm(24).named_parameters()] == ["weight"]
    assert [name for name, _ in normforge.GatedLayerNorm(24).named_parameters()] == ["weight", "bias"]
    assert [name for name, _ in normforge.GatedLayerNorm(24, bias=False).named_parameters()] == ["weight"]
    assert repr(normforge.GatedRMSNorm(24)) == "normforge.GatedRMSNorm(24, eps=1e-06)"
    assert normforge.GatedRMSNorm(24, dtype=torch.float16, device="meta").weight.is_meta


def test_a_module_of_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="group_size=7 and hidden_size=24; it takes a divisor of that"):
        normforge.GatedRMSNorm(24, group_size=7)
    with pytest.raises(ConflictError, match="activation='gelu'"):
        normforge.GatedLayerNorm(24, activation="gelu")
    with pytest.raises(ConflictError, match="norm_before_gate=2"):
        normforge.GatedRMSNorm(24, norm_before_gate=2)  # type: ignore[arg-type]  # what is refused


def test_what_torch_jit_makes_of_modules() -> None:
    """A trace is of torch's operators, for any number of rows and without a warning; a script there is none."""
    module = normforge.GatedRMSNorm(24, group_size=8)
    x, gate = torch.randn(3, 48).chunk(2, -1)
    jit: Any = torch.jit
    with warnings.catch_warnings():
        warnings.simplefilter("error", jit.TracerWarning)
        traced = jit.trace(module, (x, gate))
    more = torch.randn(5, 24), torch.randn(5, 24)
    torch.testing.assert_close(traced(*more), module(*more), rtol=1e-5, atol=1e-5)
    with pytest.raises(TransformError, match=r"cannot compile normforge\.GatedRMSNorm"):
        jit.script(module)
