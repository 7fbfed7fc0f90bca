"""The functional API where something follows its calls: torch's results, or an error that says what to do.

Transforms of torch.func, forward-mode AD, batched gradients, torch.jit.trace and DTensor know torch's operators alone,
so these run. Modes, checkpoints and compiled autograd see normforge's.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import normforge
from normforge import errors
from normforge.families import plain_calls, post_add
from proving.cases import operands

from ..calling import FUNCTIONS, each_function, plain, python, same_bits
from ..operators.registered import Seen
from .models import randomised
from .test_transform_table import TRANSFORMS, Call, M, N, pair
from .twins import Asked

# Without torch's own types, which these mostly lack.
forward_ad: Any = torch.autograd.forward_ad
jit: Any = torch.jit
make_fx: Any = torch.fx.experimental.proxy_tensor.make_fx

ONE, RSTD = torch.ones(M, N), torch.ones(M)

# Functions that nothing follows, of what is transformed, and the argument that is.
UNFOLLOWED: dict[str, tuple[str, Call]] = {
    "rows": ("x", lambda x: normforge.rmsnorm2d_fwd(x).y),
    "weight": ("weight", lambda x: normforge.rmsnorm2d_fwd(ONE, x.mean(0)).y),
    "out": ("out", lambda x: x * normforge.layernorm2d_fwd(ONE, out=torch.empty_like(x)).y),
    "rows beside an out": ("x", lambda x: normforge.layernorm2d_fwd(x, out=torch.empty(M, N)).y),
    "quantised": ("x", lambda x: normforge.quantised_rms_norm(x).y.float()),
    "out of quantised": (
        "out",
        lambda x: x * normforge.quantised_rms_norm(ONE, out=torch.empty_like(x, dtype=torch.int8)).y,
    ),
    "gated": ("gate", lambda x: normforge.gated_rmsnorm2d_fwd(ONE, x).y),
    "backward": ("dy", lambda x: backward_of(x)),
}


def backward_of(dy: torch.Tensor) -> torch.Tensor:
    dx = normforge.rmsnorm2d_bwd(dy, ONE, None, rstd=RSTD).dx
    assert dx is not None
    return dx


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "functionalize"])
@pytest.mark.parametrize("name", UNFOLLOWED)
def test_the_forward_functions_refuse_a_transform(name: str, transform: str) -> None:
    argument, call = UNFOLLOWED[name]
    x = torch.randn(M, N)
    call(x)
    says = rf"^{argument} is wrapped by a transform of torch\.func .* call normforge\.layer_norm, rms_norm .* or make"
    with pytest.raises(errors.TransformError, match=says):
        TRANSFORMS[transform](call, x, x.cos())


@pytest.mark.parametrize("name", [name for name in UNFOLLOWED if name != "weight"])
def test_the_forward_functions_refuse_proxies(name: str) -> None:
    argument, call = UNFOLLOWED[name]
    fx: Any = torch.fx
    says = rf"^{argument} is a Proxy, and torch\.fx\.symbolic_trace records no kernel; call normforge\.layer_norm"
    with pytest.raises(errors.TransformError, match=says):
        fx.symbolic_trace(lambda x: call(x))


@pytest.mark.parametrize("given", [{}, {"fquant": "dynamic"}], ids=["plain", "quantised"])
def test_the_forward_functions_refuse_to_be_traced(given: dict[str, Any]) -> None:
    x = torch.randn(M, N)
    normforge.rmsnorm2d_fwd(x, **given)
    with pytest.raises(errors.TransformError, match=r"^torch\.jit\.trace records no kernel; record with torch\.export"):
        jit.trace(lambda x: normforge.rmsnorm2d_fwd(x, **given).y, x)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("fused", [{}, {"fquant": "dynamic"}], ids=["plain", "quantised"])
@pytest.mark.parametrize("carrier", ["x", "weight"])
def test_the_forward_functions_refuse_a_tangent(carrier: str, fused: dict[str, Any], known: bool) -> None:
    given: dict[str, Any] = {"x": torch.randn(M, N), "weight": torch.randn(N)}
    if known:
        normforge.layernorm2d_fwd(**given, **fused)
    twin = given | {carrier: given[carrier].clone()}
    with forward_ad.dual_level():
        given[carrier] = forward_ad.make_dual(given[carrier], torch.randn_like(given[carrier]))
        says = rf"^{carrier} carries a tangent .*pass {carrier}\.detach\(\)"
        with torch.no_grad(), pytest.raises(errors.GradientError, match=says):
            normforge.layernorm2d_fwd(**given, **fused)
        given[carrier] = given[carrier].detach()
        actual, expected = (normforge.layernorm2d_fwd(**each, **fused) for each in (given, twin))
    assert all(map(same_bits, actual, expected))


def test_the_operators_refuse_a_tangent() -> None:
    x, weight = torch.randn(M, N), torch.randn(N)
    modes = (None, "none", None, "none", None, None, 0.0, None, None, torch.float32, False, "nearest", "after_weight")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.cos())
        with pytest.raises(errors.GradientError, match=r"^x carries a tangent"):
            torch.ops.normforge.rmsnorm2d_fwd(dual, weight, 1e-6, 0.0, *modes)


@pytest.mark.parametrize(
    "module",
    [torch.nn.LayerNorm(N), normforge.AddRMSNorm(N), normforge.GroupNorm(2, N), normforge.GatedRMSNorm(N)],
    ids=lambda module: type(module).__name__,
)
def test_jit_script_is_refused(module: torch.nn.Module) -> None:
    model = torch.nn.Sequential(module)
    normforge.patch(model)
    with pytest.raises(
        errors.TransformError, match=r"^torch\.jit\.script cannot compile normforge\..*unpatch\(model\)"
    ):
        jit.script(model)


def test_a_model_is_scripted_once_it_is_unpatched() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(N), torch.nn.RMSNorm(N))
    normforge.patch(model)
    normforge.unpatch(model)
    x = torch.randn(M, N)
    assert same_bits(jit.script(model)(x), model(x))


@pytest.mark.parametrize("options", [{}, {"weight_offset": 0.5, "x_bias": True, "cast": "before_weight"}], ids=len)
@pytest.mark.parametrize(
    ("make", "recorded"),
    [
        (normforge.LayerNorm, normforge.layer_norm),
        (normforge.RMSNorm, normforge.rms_norm),
        (normforge.AddLayerNorm, plain_calls.normalise),
        (normforge.AddRMSNorm, plain_calls.normalise),
        (normforge.LayerNormAdd, post_add.normalise),
        (partial(normforge.RMSNorm, cast_before_weight=True), plain_calls.normalise_cast_before_weight),
    ],
)
def test_fx_records_one_call(make: Callable[..., torch.nn.Module], recorded: object, options: dict[str, Any]) -> None:
    module = randomised(make(N, **options))
    traced = torch.fx.symbolic_trace(module)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [recorded]
    given = torch.randn(2, M, N).bfloat16()[: len(inspect.signature(module.forward).parameters)]
    actual, expected = (torch.utils._pytree.tree_leaves(each(*given)) for each in (traced, module))
    assert all(map(same_bits, actual, expected))


@pytest.mark.parametrize(
    ("function", "vectors"),
    [
        *((normforge.add_layer_norm, 1), (normforge.add_rms_norm, 1), (normforge.l2_norm, 1)),
        *((normforge.modulated_rms_norm, 2), (normforge.gated_layer_norm, 1)),
    ],
)
def test_fx_records_a_function_by_its_name(function: Callable[..., Any], vectors: int) -> None:
    def call(x: torch.Tensor, others: torch.Tensor) -> Any:
        return function(x, *[others] * vectors)

    traced = torch.fx.symbolic_trace(call)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [function]


@pytest.mark.parametrize("name", ["normalise", "normalise_cast_before_weight", "dropped_add_normalise"])
def test_saved_graphs_find_what_modules_call(name: str) -> None:
    assert pickle.loads(f"cnormforge.families.plain_functions\n{name}\n.".encode()) is getattr(plain_calls, name)


@pytest.mark.parametrize("place", ["x", "weight"])
@pytest.mark.parametrize(("norm", "dropout_p"), [*product(FUNCTIONS, (0.0,)), ("add_layer", 0.3)])
def test_a_class_of_ones_own_is_asked(norm: str, place: str, dropout_p: float) -> None:
    case = plain(norm, shape=(M, N), dropout_p=dropout_p)
    given = {name: tensor.detach() for name, tensor in operands(case).items()}
    expected = case.run(given)
    Asked.functions = []
    actual = case.run(given | {place: given[place].as_subclass(Asked)})
    assert (plain_calls.dropped_add_normalise if dropout_p else case.function) in Asked.functions
    assert all(type(tensor) is Asked for tensor in actual)
    assert same_bits(actual[0].as_subclass(torch.Tensor), expected[0])


@pytest.mark.parametrize("around", ["forward", "backward", "both"])
@each_function
def test_a_mode_around_a_part_of_a_checkpoint(norm: str, around: str) -> None:
    ours, _ = pair(norm, requires_grad=True)
    x = torch.randn(M, N, requires_grad=True)
    (expected,) = torch.autograd.grad(ours(x).square().sum(), x)
    first, then = (Seen() if around in (step, "both") else nullcontext() for step in ("forward", "backward"))
    with first:
        y = checkpoint(ours, x, use_reentrant=False)
    with then:
        (actual,) = torch.autograd.grad(y.square().sum(), x)
    assert same_bits(actual, expected)
    for mode, names in ((first, ["norm2d_fwd"]), (then, ["norm2d_fwd", "norm2d_bwd"])):
        assert not isinstance(mode, Seen) or all(name in str(mode.calls) for name in names)


@each_function
def test_a_backward_pass_is_recorded_of_a_call_that_was_not(norm: str) -> None:
    ours, _ = pair(norm)
    x = torch.randn(M, N, requires_grad=True)
    y = ours(x)

    def back(dy: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(y, x, dy, retain_graph=True)[0]

    graph = make_fx(back)(torch.randn(M, N))
    assert any("norm2d_bwd" in str(node.target) for node in graph.graph.nodes)
    dy = torch.randn(M, N)
    assert same_bits(graph(dy), back(dy))


@pytest.mark.parametrize("strict", [True, False])
@each_function
def test_export_with_a_dynamic_last_dimension(norm: str, strict: bool) -> None:
    def call(x: torch.Tensor) -> Any:
        function = getattr(normforge, f"{norm}_norm")
        return function(x, x) if norm.startswith("add") else function(x, x.shape[-1:])

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return call(x)

    n = torch.export.Dim("n", min=2, max=4096)
    program = torch.export.export(Model(), (torch.randn(M, N),), dynamic_shapes={"x": {1: n}}, strict=strict)
    assert any("normforge" in str(node.target) for node in program.graph.nodes)
    x = torch.randn(M, 100)
    torch.testing.assert_close(program.module()(x), call(x), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_make_fx_of_sizes_that_are_not_integers(mode: str) -> None:
    graph = make_fx(lambda x: normforge.layer_norm(x, x.shape[-1:]), tracing_mode=mode)(torch.randn(M, N))
    x = torch.randn(M, N)
    assert same_bits(graph(x), normforge.layer_norm(x, (N,)))


def test_float64_is_said_once() -> None:
    code = """
import torch, normforge
for _ in range(3):
    normforge.layer_norm(torch.randn(2, 8).double(), (8,))
"""
    process = python(code, TRITON_INTERPRET="1")
    assert process.returncode == 0
    assert process.stderr.splitlines() == [
        "a norm of float64 runs torch's own operator: normforge's kernels take float16, bfloat16 and float32"
    ]


def test_none_is_no_shape_of_a_sharded_tensor(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.randn(4, N), mesh, [Shard(0)])
    none: Any = None
    for norm in (normforge.layer_norm, normforge.rms_norm):
        with pytest.raises(errors.DTypeError, match="normalized_shape is None; it takes a tuple of integers"):
            norm(x, none)
