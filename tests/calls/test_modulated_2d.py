"""modulated_layernorm2d_fwd and modulated_rmsnorm2d_fwd: quantised rows, the sum and statistics, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import normforge
from normforge import LayerNormOutput
from normforge.calls import road
from normforge.codegen.values import Norm
from normforge.errors import (
    ConflictError,
    DTypeError,
    GradientError,
    IllegalCombinationError,
    LayoutError,
    ShapeError,
)
from normforge.reference import modulated as modulation_reference
from normforge.selection import dispatch
from normforge.tools.compare import compare

from ..calling import QUANTISED, each_device, same_bits

FORWARD: dict[str, Callable[..., LayerNormOutput]] = {
    "layer": normforge.modulated_layernorm2d_fwd,
    "rms": normforge.modulated_rmsnorm2d_fwd,
}
each_norm = pytest.mark.parametrize("norm", FORWARD)

N = 48
# Of scale, shift and gate: one a sample, one a row and one for all.
SHARED: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "sample": lambda rows, n: (2, n),
    "row": lambda rows, n: (2, rows, n),
    "all": lambda rows, n: (n,),
}
MIXES = [(kind, kind, kind) for kind in SHARED] + [("sample", "all", "row"), ("row", "sample", "all")]


def operands(
    norm: str,
    device: str = "cpu",
    n: int = N,
    dtype: torch.dtype = torch.bfloat16,
    mix: tuple[str, str, str] = ("sample", "sample", "sample"),
    rows: int = 3,
) -> dict[str, torch.Tensor]:
    """A whole call, of two samples of a few rows: each row lies within a longer one."""

    def within(*shape: int) -> torch.Tensor:
        return torch.randn(*shape[:-1], 2 * shape[-1], device=device).to(dtype)[..., n:]

    found = dict(zip(("scale", "shift", "gate"), (within(*SHARED[kind](rows, n)) for kind in mix), strict=True))
    found |= {"x": within(2, rows, n), "residual": torch.randn(2, rows, n, device=device)}
    found["weight"] = torch.randn(n, device=device)
    return found | ({"bias": torch.randn(n, device=device)} if norm == "layer" else {})


def check(norm: str, given: dict[str, torch.Tensor], **options: Any) -> LayerNormOutput:
    """Run a call twice, known and not, and hold every output against the oracle."""
    wanted = modulation_reference.FORWARD[Norm(norm)](**given, eps=1e-5, **options)
    found = None
    for _ in range(2):
        found = FORWARD[norm](**given, eps=1e-5, **options)
        findings = compare(found, wanted)
        assert not [finding for finding in findings if not finding.ok], findings
    assert found is not None
    return found


@each_device
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@each_norm
def test_rows_are_quantised_with_their_modulation(norm: str, dtype: torch.dtype, device: str) -> None:
    given = operands(norm, device)
    check(norm, given, fquant="dynamic", out_dtype=dtype)
    bare = {name: given[name] for name in ("x", "scale", "shift")}
    assert check(norm, bare, fquant="dynamic", out_dtype=dtype).residual_out is None


@each_device
@pytest.mark.parametrize(("norm", "mix"), list(product(FORWARD, MIXES)))
def test_a_modulation_may_be_of_samples_of_rows_or_of_all(norm: str, mix: tuple[str, str, str], device: str) -> None:
    for n in (N, 51):
        check(norm, operands(norm, device, n, mix=mix), fquant="dynamic")


@each_device
@each_norm
def test_statistics_and_every_option(norm: str, device: str) -> None:
    given = operands(norm, device)
    check(norm, given, save_mv=True)
    check(norm, given, save_mv=True, out_dtype=torch.float32)
    del given["gate"]
    check(norm, given, save_mv=True, fquant=2)
    check(norm, operands(norm, device, dtype=torch.float16), save_mv=True, fquant="dynamic")
    check(norm, operands(norm, device, dtype=torch.float32), fquant="dynamic", out_dtype=torch.float8_e4m3fn)
    if norm == "rms":
        check(norm, given, fquant="dynamic", weight_offset=1.0)


@each_device
@pytest.mark.parametrize("mix", MIXES, ids="-".join)
@each_norm
def test_many_short_rows_are_quantised(norm: str, mix: tuple[str, str, str], device: str) -> None:
    """So many that a program takes several, and samples end within one."""
    check(norm, operands(norm, device, 24, mix=mix, rows=151), fquant="dynamic")


# one_pass and two_pass.
@each_device
@pytest.mark.parametrize("n", [700, pytest.param(33001, marks=pytest.mark.thorough)])
@each_norm
def test_long_rows_are_quantised(norm: str, n: int, device: str) -> None:
    check(norm, operands(norm, device, n), fquant="dynamic")


@each_device
def test_hard_rows_are_quantised(device: str) -> None:
    """A scale of -1 leaves a sample of zeros, whose y_scale is 1, and a NaN its own row alone."""
    given = operands("rms", device)
    given["scale"], given["shift"] = torch.full((2, N), -1.0, device=device), torch.zeros(2, N, device=device)
    given["scale"][1] = 0.5
    given["x"][1, 1, 2] = float("nan")
    found = FORWARD["rms"](**given, fquant="dynamic")
    assert found.y_scale is not None
    assert torch.equal(found.y_scale[0], torch.ones_like(found.y_scale[0]))
    assert not found.y[0].any()
    assert (~found.y_scale.isfinite()).nonzero().tolist() == [[1, 1]]


@each_device
@each_norm
def test_an_unquantised_call_is_the_differentiable_one(norm: str, device: str) -> None:
    given = operands(norm, device)
    function: Any = getattr(normforge, f"modulated_{norm}_norm")
    y, total = function(**given)
    found = FORWARD[norm](**given)
    assert same_bits(found.y, y)
    assert found.residual_out is not None
    assert same_bits(found.residual_out, total)
    assert found[2:] == (None, None, None)


@each_device
@pytest.mark.parametrize("n", [N, pytest.param(33001, marks=pytest.mark.thorough)])
@each_norm
def test_outputs_are_written_where_the_caller_says(norm: str, n: int, device: str) -> None:
    given = operands(norm, device, n)
    wanted = FORWARD[norm](**given, fquant="dynamic")
    assert wanted.residual_out is not None
    out, before = torch.empty(2, 3, n, dtype=torch.int8, device=device), given["residual"].clone()
    # In place of the residual, and beside it.
    for total in (given["residual"], torch.empty_like(before)):
        given["residual"].copy_(before)
        version = total._version
        found = FORWARD[norm](**given, fquant="dynamic", out=out, residual_out=total)
        assert found.y is out
        assert found.residual_out is total
        assert total._version > version
        assert same_bits(out, wanted.y)
        assert same_bits(total, wanted.residual_out)


def test_known_calls_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "plans", {})
    given = operands("rms")
    FORWARD["rms"](**given, fquant="dynamic")
    monkeypatch.delattr(road, "check")
    FORWARD["rms"](**given, fquant="dynamic")


@pytest.mark.parametrize("norm", [pytest.param("layer", marks=pytest.mark.thorough), "rms"])
def test_a_compiled_call_is_the_eager_one(norm: str) -> None:
    given = operands(norm)

    def call(**tensors: torch.Tensor) -> tuple[Any, ...]:
        found = FORWARD[norm](**tensors, fquant="dynamic")
        return found.y, found.residual_out, found.y_scale

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    wanted = call(**given)
    out = torch.empty(2, 3, N, dtype=torch.int8)
    for places in ({}, {"out": out}):
        for found, its in zip(compiled(**given, **places), wanted, strict=True):
            assert torch.equal(found, its)
    assert torch.equal(out, wanted[0])
    torch._dynamo.reset()


def test_there_is_no_gradient() -> None:
    given = operands("rms")
    for _ in range(2):
        for name in given:
            wanting = {**given, name: given[name].clone().requires_grad_()}
            reason = f"{name} requires a gradient and the 2d functions compute none; call normforge.modulated_rms_norm"
            with pytest.raises(GradientError, match=reason):
                FORWARD["rms"](**wanting)
            with pytest.raises(GradientError, match="a quantised output has none"):
                FORWARD["rms"](**wanting, fquant="dynamic")
            with torch.no_grad():
                FORWARD["rms"](**wanting)


X = torch.randn(2, 3, N)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"fquant": "smooth_dynamic"}, IllegalCombinationError, "modulated norms have no fquant smooth_dynamic"),
        ({"fquant": "static"}, IllegalCombinationError, "modulated norms have no fquant static"),
        ({"fquant": "int8"}, ConflictError, "fquant='int8' is no mode"),
        ({"out_dtype": torch.int8}, IllegalCombinationError, "fquant none"),
        ({"out_dtype": torch.float16}, IllegalCombinationError, "out_dtype fp16 is not a quantised type"),
        ({"residual": None}, ConflictError, "gate scales x before residual is added to it, and none was passed"),
        ({"scale": torch.randn(3, N)}, ShapeError, "scale has shape"),
        ({"shift": torch.randn(2, 2 * N)[..., ::2]}, LayoutError, "shift has stride 2 in its last dimension"),
        ({"gate": torch.randn(2, 3, N).double()}, DTypeError, "gate has dtype torch.float64"),
        ({"residual_out": X, "residual": None, "gate": None}, ConflictError, "no residual is added; pass residual"),
        ({"residual_out": X.half()}, DTypeError, "residual_out has dtype torch.float16; it takes torch.float32"),
        ({"out": X}, DTypeError, "out has dtype torch.float32; it takes torch.int8"),
        ({"out": torch.empty(2, 3, 2 * N, dtype=torch.int8)[..., :N]}, LayoutError, "it takes a contiguous tensor"),
        ({"out": torch.empty(6, N, dtype=torch.int8)}, ShapeError, "out has shape"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused(asked: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {**operands("rms"), "fquant": "dynamic"}
    if asked.get("out_dtype") is torch.int8:
        given["fquant"] = "none"
    for _ in range(2):
        with pytest.raises(error, match=message):
            FORWARD["rms"](**{**given, **asked})
        FORWARD["rms"](**given)


def test_outputs_overlap_nothing_else() -> None:
    given = operands("rms", mix=("row", "row", "row"))
    given["scale"] = torch.randn(2, 3, N)
    with pytest.raises(LayoutError, match="residual_out overlaps scale in memory"):
        FORWARD["rms"](**given, fquant="dynamic", residual_out=given["scale"])
    memory = torch.empty(6 * N + 16, dtype=torch.int8)
    with pytest.raises(LayoutError, match="out starts at no multiple of 16 bytes"):
        FORWARD["rms"](**given, fquant="dynamic", out=memory[1 : 1 + 6 * N].view(2, 3, N))


def test_kernels_that_calls_take_are_listed_before() -> None:
    """`compile_keys` has what a quantised call launches."""
    (key, *_) = normforge.compile_keys(n=[N], modes=["ln_fwd_bf16_int8_xg_addst_mod_dq"], arch="sm_90")
    types = dict(key.key.arguments)
    assert {"scale_ptr", "shift_ptr", "gate_ptr", "y_scale_ptr"} <= types.keys()
    assert isinstance(types["scale_row_stride"], tuple)


def test_no_rows() -> None:
    found = FORWARD["rms"](torch.empty(0, 3, N), torch.empty(0, N), torch.empty(N), fquant="dynamic")
    assert found.y_scale is not None
    assert (found.y.shape, found.y_scale.shape) == ((0, 3, N), (0, 3))
