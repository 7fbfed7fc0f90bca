"""The functional API and the modules: gradients against fp64, all that torch's promise, and rows that are hard."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import normforge
from normforge.calls import road
from normforge.errors import ArgumentError
from proving.cases import Case, cases, check, close, doubled, formula, gradients, operands

from ..calling import each_add, each_device, each_float, each_function, each_norm, plain, printed
from .models import randomised, results

TORCH: dict[str, Callable[..., torch.Tensor]] = {"layer": functional.layer_norm, "rms": functional.rms_norm}
OURS: dict[str, Callable[..., torch.Tensor]] = {"layer": normforge.layer_norm, "rms": normforge.rms_norm}


@each_device
@pytest.mark.parametrize(("dtype", "residual"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@each_add
def test_each_gradient_is_rounded_once(norm: str, dtype: torch.dtype, residual: torch.dtype, device: str) -> None:
    """The one in 16 bits is the other one rounded, and that one has not been."""
    case = plain(norm, shape=(3, 130), dtype=dtype, residual=residual)
    given = operands(case, device)
    outputs = case.run(given)
    found = gradients(outputs, given, [torch.randn_like(output) for output in outputs])
    wide, narrow = sorted((found["x"], found["residual"]), key=lambda gradient: -gradient.dtype.itemsize)
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(wide.bfloat16(), narrow)
    assert not torch.equal(wide, narrow.float())


@each_norm
@pytest.mark.parametrize("weighted", [False, True])
@each_float
def test_torchs_own_call_and_defaults(norm: str, weighted: bool, dtype: torch.dtype) -> None:
    # So small that eps decides the result.
    x = (torch.randn(3, 40) * 1e-3).to(dtype)
    arguments = {"weight": torch.randn(40).to(dtype)} if weighted else {}
    wanted = TORCH[norm](x, [40], **arguments)
    # The second call is one that is known.
    for _ in range(2):
        torch.testing.assert_close(OURS[norm](x, [40], **arguments), wanted)


@each_norm
def test_signatures_are_torchs(norm: str) -> None:
    every = inspect.signature(OURS[norm]).parameters.values()
    ours = [p for p in every if p.kind is not p.KEYWORD_ONLY]
    assert [p.name for p in every if p not in ours] == ["cast", "weight_offset", "x_bias", "dim", "activation"]
    theirs = list(inspect.signature(TORCH[norm]).parameters.values())
    # torch calls its first one `input`.
    assert [p.name for p in ours[1:]] == [p.name for p in theirs[1:]]
    assert [p.default for p in ours] == [p.default for p in theirs]


@each_device
@each_norm
def test_a_weight_of_any_stride_and_a_gradient_of_another_type(norm: str, device: str) -> None:
    case = plain(norm, shape=(3, 130))
    given = operands(case, device) | {"weight": torch.randn(260, device=device)[::2].requires_grad_()}
    check(case, given, [torch.randn(3, 130, device=device, dtype=torch.bfloat16)])


@pytest.mark.parametrize("name", ["x", "x_bias", "weight"])
@each_function
def test_changing_x_before_the_backward_pass_is_noticed(norm: str, name: str) -> None:
    """Of what is kept: an add keeps the sum, and neither x nor a bias of x."""
    case = plain(norm, x_bias=True, shape=(3, 64))
    given = operands(case)
    changed = given[name] * 1
    y, *_ = case.run({**given, name: changed})
    changed.data.add_(0)
    with torch.no_grad():
        changed.add_(1)
    kept = "add" not in norm or name == "weight"
    with pytest.raises(RuntimeError, match="modified by an inplace operation") if kept else nullcontext():
        torch.autograd.grad(y.sum(), given[name])


@each_device
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@each_float
@each_norm
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_as_torch(norm: str, dtype: torch.dtype, autocast: torch.dtype, device: str) -> None:
    x = (torch.randn(3, 64, device=device) * 1e-2).to(dtype).requires_grad_()
    weight = torch.randn(64, device=device, requires_grad=True)
    dy = torch.randn(3, 64, device=device)

    def run(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.autocast(device, dtype=autocast):
            y = function(x, (64,), weight)
        return y, *torch.autograd.grad(y, (x, weight), dy.to(y.dtype))

    (y, dx, dweight), (wanted, *exact) = run(OURS[norm]), run(TORCH[norm])
    torch.testing.assert_close((y, dx), (wanted, exact[0]))
    tolerance = 3e-2 if wanted.dtype != torch.float32 else 1e-4
    torch.testing.assert_close(dweight, exact[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("asking", [("weight",), ("bias",), ("x",), ("residual",), ("residual", "weight"), ()], ids=str)
@pytest.mark.parametrize("traced", [False, True])
def test_the_sum_has_a_gradient_where_what_is_summed_has(asking: tuple[str, ...], traced: bool) -> None:
    case = plain("add_layer", shape=(2, 3, 64))
    given = {name: tensor.requires_grad_(name in asking) for name, tensor in operands(case).items()}
    function = torch.compile(case.function, backend="aot_eager", fullgraph=True) if traced else case.function
    for _ in range(2):
        y, total = function(**given)
        assert y.requires_grad == bool(asking)
        assert total.requires_grad == bool({"x", "residual"}.intersection(asking))
        assert gradients((y, total), given, [torch.ones_like(y)] * 2).keys() == {*asking}


@pytest.mark.parametrize(
    "shape", [[64], torch.Size([64]), (64,), (np.int64(64),), (np.uint16(64),), (torch.tensor(64),)], ids=str
)
def test_a_shape_of_any_kind_is_taken_again(shape: Any) -> None:
    for _ in range(2):
        assert not normforge.layer_norm(torch.ones(2, 3, 64), shape).any()


Pair = tuple[type[torch.nn.Module], type[torch.nn.Module]]
PAIRS: list[Pair] = [(torch.nn.LayerNorm, normforge.LayerNorm), (torch.nn.RMSNorm, normforge.RMSNorm)]
WITH_SUMS: list[Pair] = [
    *((torch.nn.LayerNorm, ours) for ours in (normforge.AddLayerNorm, normforge.LayerNormAdd)),
    *((torch.nn.RMSNorm, ours) for ours in (normforge.AddRMSNorm, normforge.RMSNormAdd)),
]

each_pair = pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=["LayerNorm", "RMSNorm"])
every_pair = pytest.mark.parametrize(("theirs", "ours"), [*PAIRS, *WITH_SUMS], ids=lambda c: c.__name__)

FLAGS: list[dict[str, Any]] = [
    {},
    {"eps": 0.1},
    {"elementwise_affine": False},
    {"bias": False},
    {"dtype": torch.bfloat16},
]


def accepted(cls: type[torch.nn.Module], flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if name in inspect.signature(cls).parameters}


@each_device
@pytest.mark.parametrize("shape", [64, (64,), [3, 64], (2, 3, 64), (5, 64)], ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@each_pair
def test_the_same_numbers_as_torchs(
    theirs: type[torch.nn.Module], ours: type[torch.nn.Module], flags: dict[str, Any], shape: Any, device: str
) -> None:
    flags = accepted(theirs, flags)
    reference = randomised(theirs(shape, **flags)).to(device)
    module = ours(shape, **flags).to(device)
    module.load_state_dict(reference.state_dict())
    dtype = flags.get("dtype", torch.float32)
    # Several dimensions are one long row, of which there are several in several dimensions, or one without another.
    x = torch.randn(*((4, 2, 5, 64) if shape == (5, 64) else (2, 3, 64)), device=device).to(dtype)
    (y, found), (wanted, exact) = (results(each, x) for each in (module, reference))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found, exact, rtol=5 * tolerance, atol=5 * tolerance)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@every_pair
def test_state_dicts_interchange(
    theirs: type[torch.nn.Module], ours: type[torch.nn.Module], flags: dict[str, Any]
) -> None:
    both = [randomised(cls((3, 64), **accepted(theirs, flags))) for cls in (theirs, ours)]
    for source, target in (both, both[::-1]):
        target.load_state_dict(randomised(source).state_dict())
        torch.testing.assert_close(dict(target.state_dict()), dict(source.state_dict()), rtol=0, atol=0)


@every_pair
def test_constructed_like_torchs(theirs: type[torch.nn.Module], ours: type[torch.nn.Module]) -> None:
    parameters = inspect.signature(ours).parameters.values()
    positional = [(p.name, p.default) for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == [(p.name, p.default) for p in inspect.signature(theirs).parameters.values()]
    module = ours((3, 64), 0.25)
    assert isinstance(module, theirs)
    assert str(module).partition("(")[2] == str(theirs((3, 64), 0.25)).partition("(")[2]


@pytest.mark.usefixtures("nothing_known")
def test_a_cpu_without_the_interpreter_runs_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert normforge.backend(torch.randn(1)) == normforge.backend(torch.empty(1, device="meta")) == "torch"
    assert {normforge.which(torch.ones(3, 64), norm=norm, functional=True) for norm in OURS} == {"torch"}
    for dtype, (theirs, ours) in product((torch.float64, torch.float32, torch.bfloat16), PAIRS):
        x = torch.randn(4, 3, 8).to(dtype)
        found, wanted = (results(module((3, 8), dtype=dtype), x) for module in (ours, theirs))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    for case in cases("plain", vary=("norm", "dtype")):
        check(case, operands(case))
    # Weights of another type than torch's CPU operator takes.
    mixed = normforge.layer_norm(torch.randn(2, 8), (8,), torch.ones(8).bfloat16(), torch.zeros(8))
    halves = normforge.RMSNorm(8, cast_before_weight=True)(torch.randn(2, 8).half())
    assert mixed.dtype is halves.dtype is torch.float32
    for x, shape in ((torch.zeros(2, 8).int(), (8,)), (torch.zeros(2, 8), (7,))):
        with pytest.raises(ArgumentError):
            normforge.layer_norm(x, shape)
    assert normforge.LayerNorm(8, device="meta")(torch.empty(2, 8, device="meta")).shape == (2, 8)


def test_a_cpu_without_the_interpreter_needs_no_triton() -> None:
    """It need not even be installed, as it is not on macOS."""
    code = """
import sys, torch
brought = {*sys.modules}
import normforge
print(normforge.backend(torch.empty(1)), normforge.LayerNorm(8)(torch.ones(8)).tolist() == [0] * 8)
print("triton" in {*sys.modules} - brought)
"""
    assert printed(code, TRITON_INTERPRET=None).split() == ["torch", "True", "False"]


@each_device
@pytest.mark.parametrize("n", [100, 600, pytest.param(33000, marks=pytest.mark.thorough)])
def test_chunks_of_one_tensor_are_read_where_they_are(n: int, device: str) -> None:
    """As DiT's modulation leaves them, and views of wider rows; nothing is copied, and each pipeline has such rows."""
    six = torch.randn(2, 6 * n, device=device)
    shift, scale, gate = six.chunk(6, -1)[:3]
    x, residual = torch.randn(2, 2, 2 * n, device=device).chunk(2, -1)
    given = {"x": x, "scale": scale, "shift": shift, "gate": gate, "residual": residual}
    (case,) = cases("modulated", vary=(), without=("weight", "bias"))
    rows = road.as_operands((*given.values(), None, None), 1)
    assert all(row is tensor for row, tensor in zip(rows, given.values(), strict=False))
    for output, its in zip(case.run(given), formula(case, doubled(given)), strict=True):
        close("output", output, its.detach(), 2e-5)


def test_what_kernels_cannot_walk_is_copied() -> None:
    x, scale, shift = torch.randn(40, 3, 2).transpose(0, 2), torch.randn(40, 2).T, torch.randn(80)[::2]
    y = normforge.modulated_rms_norm(x, scale, shift)
    assert torch.equal(y, normforge.modulated_rms_norm(x.contiguous(), scale.contiguous(), shift.contiguous()))


@each_device
@pytest.mark.parametrize(
    "case", cases("gated", vary=("norm", "activation", "norm_before_gate"), without=("weight", "bias")), ids=str
)
def test_rows_that_are_hard(case: Case, device: str) -> None:
    """All equal, far from 0, a gate far below 0, and infinities and NaNs that stay in their own rows."""
    n = 40
    x, gate = torch.randn(7, n, device=device), torch.randn(7, n, device=device)
    x[0] = 3.0
    x[1] = 1e4 + torch.randn(n, device=device)
    x[2] *= 1e18
    gate[3] = -200.0
    gate[4] = 90.0
    x[5, 3], gate[6, 2] = float("inf"), float("nan")
    given = {"x": x, "gate": gate}
    (y,), (wanted,) = case.run(given), formula(case, doubled(given))
    assert not y[5:].isfinite().all(-1).any()
    # Of 1e4 fp32 holds no more than the noise beside it to a thousandth.
    for row in range(5):
        tolerance = 2e-3 if row in (0, 1) and case["norm"] == "layer" else 2e-5
        close(f"row {row}", y[row], wanted[row].detach(), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases("gated", vary=("norm", "norm_before_gate"), dtype=torch.bfloat16), ids=str)
def test_short_rows_by_the_hundred_thousand(case: Case) -> None:
    for n, group_size in ((64, None), (128, None), (256, 64)):
        many = case.but(shape=(262144 * 64 // n, n), group_size=group_size)
        check(many, operands(many, "cuda"))


@pytest.mark.parametrize(("norm", "names"), [("layer", ["weight", "bias"]), ("rms", ["weight"])])
def test_modules_are_the_functions_with_parameters(norm: str, names: list[str]) -> None:
    """Which have the names of mamba_ssm's RMSNormGated, whose state dicts are loaded: a weight and nothing else."""
    x, gate = torch.randn(2, 3, 48).chunk(2, -1)
    options: dict[str, Any] = {"activation": "sigmoid", "norm_before_gate": False, "group_size": 8, "eps": 1e-3}
    made: Any = normforge.GatedLayerNorm if norm == "layer" else normforge.GatedRMSNorm
    function: Any = getattr(normforge, f"gated_{norm}_norm")
    module = made(24, **options)
    assert torch.equal(module.weight, torch.ones(24))
    assert [name for name, _ in module.named_parameters()] == names
    randomised(module)
    assert torch.equal(module(x, gate), function(x, gate, *module.parameters(), **options))
    assert repr(module).endswith("Norm(24, eps=0.001, group_size=8, norm_before_gate=False, activation='sigmoid')")
    assert made(24, dtype=torch.float16, device="meta").weight.is_meta


def test_usual_options_of_modules_are_not_shown() -> None:
    assert repr(normforge.GatedRMSNorm(24)) == "normforge.GatedRMSNorm(24, eps=1e-06)"
    assert normforge.GatedLayerNorm(24, bias=False).bias is None
