"""What operators of modulated, gated and group norms have in common, and what torch makes of their functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from normforge.calls import road
from normforge.calls.functions import FUNCTIONS as FUNCTIONS_OF
from normforge.errors import DTypeError, GradientError, LayoutError, NormforgeError
from normforge.families.public import CALLS
from proving.cases import Case, Tensors, cases, check, operands

from ..calling import pieces, same_bits
from ..thorough import THOROUGH
from .families import BACKWARD, FUNCTIONS, OPERATORS, N, arguments, each_family, each_norm
from .registered import by_name

COMPILED = [
    *cases("l2", "added", "renormed", "channels", vary=("norm",), layout="gapped"),
    *cases("modulated", vary=("norm",), layout="gapped"),
    *cases("gated", vary=("norm",), layout="gapped", norm_before_gate=False, group_size=8),
    *cases("group", vary=(), layout="contiguous", activation="silu"),
    *cases("group", vary=(), layout="channels last", activation="silu"),
]


@each_family
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_operators_are_what_torch_wants(name: str, full: bool, grad: bool) -> None:
    torch.library.opcheck(OPERATORS[name], arguments(name, full=full, grad=grad))


@each_norm
@pytest.mark.parametrize("full", [False, True])
def test_a_quantising_operator_is_what_torch_wants(name: str, full: bool) -> None:
    given = arguments(name, full=full, save_mv=False, fquant="dynamic", out_dtype=torch.int8)
    torch.library.opcheck(OPERATORS[name], given)
    y, *total, y_scale = OPERATORS[name](*given)
    assert (y.dtype, y_scale.dtype, y_scale.shape) == (torch.int8, torch.float32, y.shape[:-1])
    assert [each.shape for each in total] == [y.shape] * (full and name.startswith("modulated"))


@each_family
def test_a_gradient_needs_statistics(name: str) -> None:
    y = OPERATORS[name](*arguments(name, full=False, grad=True, save_mv=False))[0]
    with pytest.raises(GradientError, match="mean and rstd were not saved; pass save_mv=True"):
        y.sum().backward()


@each_norm
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_what_is_quantised_has_no_gradient(name: str, dtype: torch.dtype) -> None:
    found = OPERATORS[name](*arguments(name, full=True, grad=True, fquant="dynamic", out_dtype=dtype))
    assert not [each for each in found if each.requires_grad]


def gradient_arguments(name: str, *, full: bool, m: int = 3) -> tuple[Any, ...]:
    """A call of a backward operator for the gradients of all that is there."""
    forward = arguments(name, full=full, rows=m)
    given = by_name(OPERATORS[name], forward)
    y, *others = OPERATORS[name](*forward)
    given |= {"dy": torch.randn_like(y), "mean": others[-2] if name.endswith("layer") else None, "rstd": others[-1]}
    if given.get("residual") is not None:
        given |= {"x": others[0], "gated": given["x"], "dresidual_out": torch.randn_like(y)}
    if name == "group":
        given |= {"statistics": others[-1], "wants": ["dx", "dweight", "dbias"]}
    else:
        results = FUNCTIONS_OF[f"{name}_norm_backward"].results
        given["wants"] = [row.name for row in results if not row.like or given.get(row.like[0]) is not None]
    return tuple(given.get(argument.name) for argument in BACKWARD[name]._schema.arguments)


@each_family
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("m", [3, 9])
def test_backward_operators_are_what_torch_wants(name: str, full: bool, m: int) -> None:
    """Where kernels compute, and torch's operators: of few rows a sample."""
    torch.library.opcheck(BACKWARD[name], gradient_arguments(name, full=full, m=m))


@THOROUGH
@each_norm
@pytest.mark.parametrize("full", [False, True])
def test_a_backward_operator_is_differentiated(name: str, full: bool) -> None:
    given = gradient_arguments(name, full=full, m=9)
    for each in given:
        if isinstance(each, torch.Tensor):
            each.requires_grad_()
    torch.library.opcheck(BACKWARD[name], given)


@each_norm
@pytest.mark.parametrize("full", [False, True])
def test_gradients_of_a_graph_are_the_bits_of_an_eager_call(name: str, full: bool) -> None:
    forward = arguments(name, full=full, grad=True, rows=9)
    named = by_name(OPERATORS[name], forward)
    tensors = {each: given for each, given in named.items() if isinstance(given, torch.Tensor)}
    arrived = [torch.randn(tensors["x"].shape) for _ in range(2 if "residual" in tensors else 1)]

    def gradients(*given: torch.Tensor) -> Any:
        said = named | dict(zip(tensors, given, strict=True))
        return torch.autograd.grad(OPERATORS[name](*said.values())[: len(arrived)], given, arrived)

    graph = make_fx(gradients)(*tensors.values())
    assert BACKWARD[name] in [node.target for node in graph.graph.nodes]
    family, norm = name.split("_")
    calls = CALLS[family]
    eager = road.normalise(calls, road.operands_of(calls, named), road.options_of(calls, norm, named))
    expected = torch.autograd.grad(eager, list(tensors.values()), arrived if len(arrived) > 1 else arrived[0])
    assert all(map(same_bits, graph(*tensors.values()), expected))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_modulations_of_each_row_are_differentiated_by_operators_that_are_fused(norm: str) -> None:
    def gradients(*given: torch.Tensor) -> Any:
        return torch.autograd.grad(FUNCTIONS[f"modulated_{norm}"](*given).sum(), given)

    given = [torch.randn(2, 9, N, requires_grad=True) for _ in range(3)]
    graph = make_fx(gradients)(*given)
    assert BACKWARD[f"modulated_{norm}"] not in [node.target for node in graph.graph.nodes]
    torch.testing.assert_close(graph(*given), gradients(*given))


@each_norm
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rstd": lambda rstd: rstd[..., :1]}, "rstd has shape"),
        ({"dy": lambda dy: dy[..., :5]}, "dy has shape"),
        ({"wants": lambda _: ["dx", "dresidual"]}, "wants has 'dresidual'; it takes some of dx"),
    ],
)
def test_a_backward_operator_refuses_what_kernels_cannot_read(
    name: str, changed: dict[str, Callable[[Any], Any]], message: str
) -> None:
    passed = FUNCTIONS_OF[f"{name}_norm_backward"].passed
    given = dict(zip(passed, gradient_arguments(name, full=False), strict=True))
    given |= {each: change(given[each]) for each, change in changed.items()}
    with pytest.raises(NormforgeError, match=message):
        BACKWARD[name](*given.values())


def test_a_backward_operator_returns_memory_of_its_own() -> None:
    """The gradient of a shift that each row has is dy itself."""
    takes = FUNCTIONS_OF["modulated_rms_norm_backward"]
    rows = {name: torch.randn(2, 3, N) for name in ("dy", "x", "scale", "shift")}
    given = {**rows, "rstd": torch.rand(2, 3), "weight_offset": 0.0, "wants": ["dshift"]}
    (dshift,) = BACKWARD["modulated_rms"](*[given.get(name) for name in takes.passed])
    assert torch.equal(dshift, rows["dy"])
    assert dshift.data_ptr() != rows["dy"].data_ptr()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_a_compiled_call_has_the_outputs_and_gradients_of_the_formula(
    case: Case, backend: str, fresh_dynamo: None
) -> None:
    function, told = case.function, case.arguments

    def run(given: Tensors) -> tuple[torch.Tensor, ...]:
        return pieces(function(**given, **told))

    check(case, operands(case), run=torch.compile(run, fullgraph=True, backend=backend))


def test_a_group_norm_keeps_the_layout_and_a_mean_and_an_rstd_per_group() -> None:
    y, statistics = OPERATORS["group"](*arguments("group", full=True))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert statistics.shape == (2, 2, 4)
    assert len(OPERATORS["group"](*arguments("group", full=True, save_mv=False))) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float4_e2m1fn_x2], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_group_norm_quantises_nothing(dtype: torch.dtype, device: str) -> None:
    given = by_name(OPERATORS["group"], arguments("group", full=False, out_dtype=dtype))
    given["x"] = given["x"].to(device)
    with pytest.raises(DTypeError, match=rf"out_dtype is {dtype}; it takes None, torch.float16"):
        OPERATORS["group"](*(given | {"weight": None, "bias": None}).values())


def test_a_group_norm_copies_nothing() -> None:
    given = by_name(OPERATORS["group"], arguments("group", full=False))
    with pytest.raises(LayoutError, match=r"pass x\.contiguous\(\), or call normforge\.group_norm"):
        OPERATORS["group"](*(given | {"x": given["x"].transpose(2, 3)}).values())
