"""The operators: what torch checks of any, that they return what the functions do, and how graphs come to hold them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._library.simple_registry import singleton
from torch.fx.experimental.proxy_tensor import make_fx

import normforge
from normforge import errors
from normforge.calls.functions import FUNCTIONS, completed
from normforge.calls.outputs import NormGradients
from normforge.calls.traced import INVARIANT
from proving.cases import Case, Tensors, cases, check, operands

from ..calling import BACKWARD, backward_operands, each_device, each_norm, same_bits, slices
from ..thorough import THOROUGH, first_of_each
from . import registered
from .registered import forward, seen, step

M, N = 3, 64
HALF = torch.bfloat16

SLICES = slices(Path(__file__).with_name("slices.yaml"))
# torch's checks of an operator take seconds.
FIRST = ("plain", "modulated", "group")
each_step = pytest.mark.parametrize(
    "case", first_of_each(SLICES["steps"], lambda case: case.family if case.family in FIRST else None, str)
)

each_mode = pytest.mark.parametrize("case", SLICES["forward"], ids=str)
# Options of forward functions, which a case may have for axes.
OPTIONS = ("out_dtype", "fadd", "fquant", "rounding", "cast", "save_mv", "scale_dtype")


def of_mode(case: Case, device: str = "cpu") -> tuple[Tensors, Callable[[Tensors], Any]]:
    """Return the tensors of a forward call, and the call."""
    given = {name: tensor.detach() for name, tensor in operands(case, device).items()}
    if case["fquant"] == "smooth_dynamic":
        given["smooth_scale"] = torch.rand(N, device=device) + 0.5
    return given, partial(forward, case, **{name: case[name] for name in OPTIONS if case[name] is not None})


@pytest.mark.parametrize(
    "options", [{}, {"fquant": "dynamic"}, {"fadd": "pre_add_store", "residual": torch.ones(M, N)}], ids=len
)
@each_norm
def test_torchs_checks_of_an_operator_that_writes(norm: str, options: dict[str, Any]) -> None:
    out = torch.empty(M, N, dtype=torch.int8 if "fquant" in options else torch.float32)
    residual_out = torch.empty(M, N) if "residual" in options else None
    torch.library.opcheck(registered.FORWARD_INTO[norm], (*arguments(norm, options), out, residual_out))


def hold(run: Callable[[Tensors], Any], given: Tensors, fresh: Tensors) -> None:
    """Fail unless operators pass torch's checks, and graphs hold them and do to the bit what eager calls do."""
    expected = run(fresh)
    graph = make_fx(run)(given)
    for operator, values in seen(run, given):
        assert operator in [node.target for node in graph.graph.nodes]
        torch.library.opcheck(operator, values)
    for found, wanted in zip(graph(fresh), expected, strict=True):
        assert same_bits(found, wanted)
        assert wanted is None or found.stride() == wanted.stride()


@each_device
@each_step
def test_operators_of_a_step(case: Case, device: str) -> None:
    hold(partial(step, case), operands(case, device), operands(case, device, seed=1))


@each_device
@each_mode
def test_operators_of_a_forward_call(case: Case, device: str) -> None:
    given, run = of_mode(case, device)
    hold(run, given, {name: tensor.flip(-1) for name, tensor in given.items()})


# In another order than results are returned in, and any collection will do.
@pytest.mark.parametrize("others", [{"wants": {"dweight", "dx"}}, {"wants": ("dx_bias", "dx"), "dy": None}], ids=len)
@each_norm
def test_a_traced_gradient_is_what_an_eager_one_is(norm: str, others: dict[str, Any]) -> None:
    def call(given: Tensors) -> NormGradients:
        return BACKWARD[norm](**given, **others, cast="before_weight")

    given = backward_operands(norm, M, N) | {"weight": torch.randn(N).bfloat16()}
    given = {name: tensor for name, tensor in given.items() if name not in others}
    hold(call, given, given)


@pytest.mark.parametrize("case", cases("modulated", vary=("norm",), sharing=("row",) * 3), ids=str)
def test_modulations_of_each_row_are_differentiated_by_operators_that_are_fused(case: Case) -> None:
    assert not [operator for operator, _ in seen(step, case, operands(case)) if "backward" in str(operator)]


def arguments(norm: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a forward operator, from those of the function."""
    function = f"{norm}norm2d_fwd"
    usual = {"x": torch.randn(M, N), "weight": torch.randn(N), "bias": torch.randn(N), "eps": 1e-5}
    whole = completed(function, usual | {"weight_offset": 1.0} | given)
    return tuple(whole.get(name) for name in FUNCTIONS[function].passed)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=str)
@each_norm
def test_gradients_of_an_operator(norm: str, residual: torch.dtype | None, at_once: bool) -> None:
    """Called as any operator is, and as Inductor's code calls it."""
    operator: Any = registered.FORWARD[norm]
    call = operator.at_once if at_once else operator
    without = ("residual",) if residual is None else ()
    offset = 1.0 if norm == "rms" else 0.0
    (case,) = cases("plain", vary=(), norm=norm, shape=(M, N), without=without, residual=residual, weight_offset=offset)
    given = operands(case)
    if "bias" in given:
        given["bias"] = given["bias"].detach().half().requires_grad_()
    fadd = "pre_add_store" if "residual" in given else "none"

    def run(given: Tensors) -> tuple[torch.Tensor, ...]:
        made = call(*arguments(norm, {**given, "fadd": fadd, "save_mv": True}))
        return tuple(made[: 1 + ("residual" in given)])

    check(case, given, run=run)


def followed(case: Case, run: Callable[[Tensors], Any]) -> Any:
    """Call the operator of a call that nothing follows once more, with an x that requires a gradient."""
    given = operands(case)
    with torch.no_grad():
        ((operator, values),) = seen(run, given)
    return operator(values[0].requires_grad_(), *values[1:]), values[0]


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        *(
            (case, None, "mean and rstd were not saved; pass save_mv=True")
            for case in cases(vary=("norm",))
            if case.family != "statistics"
        ),
        *(
            (case, {"fadd": "pre_add", "save_mv": True}, "fadd 'pre_add' does not store the sum")
            for case in cases("plain", vary=("norm",))
        ),
    ],
    ids=str,
)
def test_what_kept_too_little_has_no_gradient(case: Case, options: dict[str, Any] | None, message: str) -> None:
    run = case.run if options is None else partial(forward, case, **options)
    outputs, x = followed(case, run)
    with pytest.raises(errors.GradientError, match=message):
        torch.autograd.grad(outputs[0].sum(), x)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "case",
    [*cases("plain", vary=("norm",), without=("residual", "x_bias")), *cases("modulated", "gated", vary=("norm",))],
    ids=str,
)
def test_a_quantised_operator_has_no_gradient(case: Case, dtype: torch.dtype) -> None:
    run = partial(forward, case, fquant="dynamic", out_dtype=dtype)
    if case.family == "plain":
        with pytest.raises(errors.GradientError, match="requires a gradient and a quantised output has none"):
            followed(case, run)
    else:
        assert not [each for each in followed(case, run)[0] if each.requires_grad]


@pytest.mark.parametrize("case", cases("gated", "modulated", vary=("norm",)), ids=str)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rstd": lambda rstd: rstd[..., :1]}, "rstd has shape"),
        ({"dy": lambda dy: dy[..., :5]}, "dy has shape"),
        ({"wants": lambda _: ["dx", "dresidual"]}, "wants has 'dresidual'; it takes some of dx"),
    ],
)
def test_a_backward_operator_refuses_what_kernels_cannot_read(
    case: Case, changed: dict[str, Callable[[Any], Any]], message: str
) -> None:
    _, (operator, values), *_ = seen(step, case, operands(case))
    given = registered.by_name(operator, values)
    given |= {each: change(given[each]) for each, change in changed.items()}
    with pytest.raises(errors.NormforgeError, match=message):
        operator(*given.values())


def test_a_backward_operator_returns_memory_of_its_own() -> None:
    """The gradient of a shift that each row has is dy itself."""
    rows = {name: torch.randn(2, 3, N) for name in ("dy", "x", "scale", "shift")}
    given = {**rows, "rstd": torch.rand(2, 3), "weight_offset": 0.0, "wants": ["dshift"]}
    passed = FUNCTIONS["modulated_rms_norm_backward"].passed
    (dshift,) = torch.ops.normforge.modulated_rms_norm_backward(*[given.get(name) for name in passed])
    assert torch.equal(dshift, rows["dy"])
    assert dshift.data_ptr() != rows["dy"].data_ptr()


GROUPED: Any = torch.ops.normforge.group_norm.default


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float4_e2m1fn_x2], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_group_norm_quantises_nothing(dtype: torch.dtype, device: str) -> None:
    with pytest.raises(errors.DTypeError, match=rf"out_dtype is {dtype}; it takes None, torch.float16"):
        GROUPED(torch.zeros(2, 8, 3, device=device), None, None, 4, 1e-5, "silu", dtype, True)


def test_a_group_norm_copies_nothing() -> None:
    x = torch.randn(2, 8, 3, 5).transpose(2, 3)
    with pytest.raises(errors.LayoutError, match=r"pass x\.contiguous\(\), or call normforge\.group_norm"):
        GROUPED(x, None, None, 4, 1e-5, "silu", None, True)


def operator_names() -> list[str]:
    """The operators of functions; that of `AllReduceNorm` takes an object, and no saved program holds it."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("normforge::")]
    return [name for name in names if name != "normforge::all_reduce_norm"]


def test_saved_programs_hold_these_schemas() -> None:
    """Every operator has the schema in the file, to the character, and its batch-invariant twin has the same schema."""
    names = operator_names()
    schemas = {str(getattr(torch.ops.normforge, name.removeprefix("normforge::")).default._schema) for name in names}
    held = (Path(__file__).parent / "schemas.txt").read_text().splitlines()
    assert schemas == {schema.replace("(", f"{ending}(", 1) for schema in held for ending in ("", INVARIANT)}


HEAD, HEADS, ALL_HEADS = 40, 2, 4


def heads(qkv: torch.Tensor) -> torch.Tensor:
    return qkv.view(qkv.shape[0], ALL_HEADS, HEAD)[:, :HEADS]


def functional(qkv: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return normforge.rms_norm(heads(qkv), (HEAD,), weight, 1e-6)


def written(qkv: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    q = heads(qkv)
    normforge.layernorm2d_fwd(q, weight, out=q)
    return qkv * 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("function", [functional, pytest.param(written, marks=THOROUGH)])
def test_one_graph_without_a_copy(function: Callable[..., torch.Tensor]) -> None:
    backend = EagerAndRecordGraphs()
    compiled: Any = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    weight = torch.randn(HEAD)
    for tokens in (2, 3, 5):
        qkv = torch.randn(tokens, ALL_HEADS * HEAD)
        assert same_bits(compiled(qkv.clone(), weight), function(qkv.clone(), weight))
    (graph,) = backend.graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
    assert [name for name in called if "normforge" in name]
    assert not [name for name in called if name in ("clone", "copy_")]


# Operators without a rule, and why none can be kept.
_TWO = "q and k are two tensors of rows; the function refuses DTensors"
UNRULED = {
    f"normforge::qk_norm_rope{end}{twin}": _TWO for end in ("", "_backward", "_cached") for twin in ("", "_invariant")
}


@pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")
def test_every_operator_has_a_sharding_rule() -> None:
    from torch.distributed.tensor import DTensor

    assert registered.FORWARD
    names = operator_names()
    assert len(names) > 20
    unruled = {name for name in names if singleton.find(name).torch_dispatch_rules.find(DTensor) is None}
    assert unruled == UNRULED.keys()
