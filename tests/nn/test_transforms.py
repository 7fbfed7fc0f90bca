"""What torch can do with its own norms, done with these: one table beside the formula, and models, hooks and graphs."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
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
from proving.cases import cases, formula, operands

from ..calling import FUNCTIONS, each_device, each_function, plain, python, same_bits, table_at, there
from ..operators.registered import Seen
from ..thorough import COSTLY, THOROUGH
from .models import Asked, randomised

M, N = 3, 16

# Without torch's own types, which these mostly lack.
forward_ad: Any = torch.autograd.forward_ad
func: Any = torch.func
derivatives: Any = torch.autograd.functional
jit: Any = torch.jit
fx: Any = torch.fx
make_fx: Any = torch.fx.experimental.proxy_tensor.make_fx

# y of x, and of what else may be followed: the weight, and what is added to x.
Call = Callable[..., torch.Tensor]
Transform = Callable[[Call, torch.Tensor, torch.Tensor], Any]

NORMS = (*FUNCTIONS,)
CASES = {norm: plain(norm, shape=(M, N)) for norm in NORMS}
CASES |= {
    case.family: case
    for case in (
        *cases("group", vary=(), shape=(M, N)),
        *cases("modulated", vary=(), shape=(M, N), sharing=("row", "all", "all"), without=("gate", "residual")),
        *cases("gated", vary=(), shape=(M, N), norm="rms"),
    )
}
ALL = (*CASES,)
DROPPED = ("dropped_layer", "dropped_rms")
CASES["grouped"] = CASES["gated"].but(group_size=8)
CASES |= {norm: plain(norm.replace("dropped", "add"), shape=(M, N), dropout_p=0.3) for norm in DROPPED}


def pair(norm: str, device: str = "cpu", *, requires_grad: bool = False) -> tuple[Call, Call]:
    """Return a function by normforge, known already, and the same by torch's elementary operators."""
    case = CASES[norm]
    given = {name: tensor.detach().requires_grad_(requires_grad) for name, tensor in operands(case, device).items()}
    beside = next((name for name in ("residual", "scale", "gate") if name in given), None)

    def of(run: Callable[..., Any]) -> Call:
        def call(x: torch.Tensor, w: torch.Tensor = given["weight"], r: Any = None) -> Any:
            made = run({**given, "x": x, "weight": w, **({beside: r} if beside and r is not None else {})})
            return made[0] + made[1] if beside == "residual" else made

        return call

    ours = of(lambda given: case.function(**given, **case.arguments))
    # Of each kind that the transforms come to: with no gradient, and with one of x, of weight, and of both.
    for of_x, of_weight in product((False, True), repeat=2):
        x, w = torch.randn(M, N, device=device), given["weight"].detach().clone()
        y = ours(x.requires_grad_(of_x), w.requires_grad_(of_weight))
        if y.requires_grad:
            torch.autograd.backward([y.square().sum()])
    return ours, of(lambda given: made if len(made := formula(case, given)) == 2 else made[0])


def squares(f: Call) -> Call:
    return lambda *operands: f(*operands).square().sum()


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def both(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, t))


def of_one(f: Call) -> Call:
    """As make_fx and others want a function: of one argument, without defaults."""
    return lambda x: f(x)


def first_of(f: Call, x: torch.Tensor) -> Any:
    a = leaf(x.detach())
    return torch.autograd.grad(f(a).square().sum(), a)


def second(f: Call, x: torch.Tensor, t: torch.Tensor) -> Any:
    a, w = leaf(x), leaf(t[0])
    first = torch.autograd.grad(squares(f)(a, w), (a, w), create_graph=True)
    return torch.autograd.grad([gradient.sin().sum() for gradient in first], (a, w))


def penalty(f: Call, x: torch.Tensor, t: torch.Tensor) -> Any:
    a = leaf(x)
    y = f(a)
    (gradient,) = torch.autograd.grad(y, a, t, create_graph=True)
    torch.autograd.backward([y.sum() + gradient.square().sum()])
    return a.grad


def batched(f: Call, x: torch.Tensor, t: torch.Tensor) -> Any:
    a = leaf(x)
    (gradients,) = torch.autograd.grad(f(a), a, both(x, t), is_grads_batched=True, create_graph=True)
    return gradients, torch.autograd.grad(gradients.sin().sum(), a)


def along(f: Call, x: torch.Tensor, t: torch.Tensor, *, recorded: bool) -> Any:
    """By forward-mode AD as it is, with nothing of torch.func around it."""
    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        y = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t), leaf(t[0])))
        return y.primal, y.tangent


def along_what_arrives(f: Call, x: torch.Tensor, t: torch.Tensor, *, create_graph: bool = True) -> Any:
    a = leaf(x)
    y = f(a)
    with forward_ad.dual_level():
        dy = forward_ad.make_dual(t.sin(), t)
        (gradient,) = torch.autograd.grad(y, a, dy, create_graph=create_graph)
        return tuple(forward_ad.unpack_dual(gradient))


def checkpointed_twice(f: Call, x: torch.Tensor, t: torch.Tensor) -> Any:
    a = leaf(x)
    (gradient,) = torch.autograd.grad(checkpoint(f, a, use_reentrant=False).square().sum(), a, create_graph=True)
    return torch.autograd.grad(gradient.sin().sum(), a)


def traced(f: Call, x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        # A condition on a tensor would be one on the values traced with.
        warnings.simplefilter("error", jit.TracerWarning)
        return jit.trace(f, x, check_trace=True)


def compiled(f: Call, *operands: torch.Tensor, backend: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    try:
        return torch.compile(f, backend=backend, fullgraph=True)(*operands)
    finally:
        torch._dynamo.reset()


TABLES: dict[str, dict[str, Any]] = table_at(Path(__file__).with_name("transforms.yaml"))
TRANSFORMS, BY_TORCH = (
    {name: eval(f"lambda f, x, t: {text}") for name, text in TABLES[table].items()}
    for table in ("transforms", "by torch")
)

# Seconds each.
_LONG = {"compiled", "compiled vmap", "compiled grad", "compiled jacrev", "compiled double backward"}
_LONG |= {"make_fx of hessian", "functional.hessian"}


BY_TORCH = TRANSFORMS | BY_TORCH

# By default each transform takes one function of four.
TRANSFORMED: list[Any] = [
    pytest.param(name, norm, marks=[] if norm == NORMS[place % 4] and name not in _LONG else [THOROUGH])
    for place, name in enumerate(TRANSFORMS)
    for norm in ALL
    # Torch's own GroupNorm, which ours comes to, takes gradients of one shape for those of another (2.13).
    if (name, norm) != ("functional.hessian, forward", "group")
]
# Dropout takes those that differentiate, those that map it, and those that record it.
TRANSFORMED += [
    *product(("vmap", "grad", "jvp", "double backward", "batched gradients"), DROPPED),
    *product(("make_fx", "jit.trace", "fx.symbolic_trace"), DROPPED),
    ("jit.trace of other rows", "grouped"),
]


def alike(name: str, ours: Call, theirs: Call, device: str) -> None:
    """Fail unless a transform gives the same of both functions."""
    x, t = torch.randn(M, N, device=device), torch.randn(M, N, device=device)
    leaves = torch.utils._pytree.tree_leaves
    actual, expected = leaves(TRANSFORMS[name](ours, x, t)), leaves(BY_TORCH[name](theirs, x, t))
    assert len(actual) == len(expected) > 0
    for a, b in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1.0, b.abs().max().item()))


@COSTLY
@each_device
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("name", "norm"), TRANSFORMED)
def test_a_function(name: str, norm: str, device: str) -> None:
    alike(name, *pair(norm, device), device)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.LayerNorm(N), torch.nn.Linear(N, N), torch.nn.RMSNorm(N))


def _per_sample(module: torch.nn.Module, x: torch.Tensor) -> Any:
    """The gradients of each sample's loss, as differential privacy wants them."""
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = func.functional_call(module, parameters, (sample,))
        return y.square().sum()

    return func.vmap(func.grad(loss), in_dims=(None, 0))(parameters, x)


def _ensemble(module: torch.nn.Module, x: torch.Tensor) -> Any:
    others = [module, copy.deepcopy(module)]
    with torch.no_grad():
        for parameter in others[1].parameters():
            parameter.mul_(0.5)
    parameters, buffers = func.stack_module_state(others)
    return func.vmap(lambda p, b, a: func.functional_call(module, (p, b), (a,)), in_dims=(0, 0, None))(
        parameters, buffers, x
    )


def _parameters(call: Callable[..., torch.Tensor], module: torch.nn.Module, x: torch.Tensor) -> Any:
    y = call(x)
    return y, torch.autograd.grad(y.square().sum(), list(module.parameters()))


def _penalised(module: torch.nn.Module, x: torch.Tensor) -> Any:
    """The gradients of parameters by a gradient of x."""
    a = leaf(x)
    (gradient,) = torch.autograd.grad(module(a).square().sum(), a, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), list(module.parameters()))


MODELS: dict[str, Callable[[torch.nn.Module, torch.Tensor], Any]] = {
    name: eval(f"lambda module, x: {text}") for name, text in TABLES["models"].items()
}


@each_device
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("transform", MODELS.values(), ids=MODELS)
def test_a_patched_model(transform: Callable[[torch.nn.Module, torch.Tensor], Any], device: str) -> None:
    theirs = model().to(device)
    ours = copy.deepcopy(theirs)
    assert len(normforge.patch(ours).swapped) == 2
    x = torch.randn(4, N, device=device)
    ours(x)
    leaves = torch.utils._pytree.tree_leaves
    for a, b in zip(leaves(transform(ours, x)), leaves(transform(theirs, x)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


ONE, RSTD = torch.ones(M, N), torch.ones(M)

UNFOLLOWED: dict[str, tuple[str, Call]] = {
    name: (argument, eval(f"lambda x: {text}")) for name, (argument, text) in TABLES["unfollowed"].items()
}


def backward_of(dy: torch.Tensor) -> torch.Tensor:
    return there(normforge.rmsnorm2d_bwd(dy, ONE, None, rstd=RSTD).dx)


# By transform, what is said of an argument that nothing follows.
REFUSED = dict.fromkeys(
    ("grad", "vmap", "jvp", "functionalize"),
    r"^{} is wrapped by a transform of torch\.func .* call normforge\.layer_norm, rms_norm .* or make",
)
REFUSED |= {
    "fx.symbolic_trace": r"^{} is a Proxy, and torch\.fx\.symbolic_trace records no kernel; call normforge\.layer_norm",
    "jit.trace": r"^torch\.jit\.trace records no kernel; record with torch\.export",
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("transform", REFUSED)
@pytest.mark.parametrize("name", UNFOLLOWED)
def test_the_forward_functions_refuse_a_transform(name: str, transform: str) -> None:
    argument, call = UNFOLLOWED[name]
    x = torch.randn(M, N)
    call(x)
    with pytest.raises(errors.TransformError, match=REFUSED[transform].format(argument)):
        TRANSFORMS[transform](call, x, x.cos())


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
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return FUNCTIONS[norm](x, x if norm.startswith("add") else x.shape[-1:])

    n = torch.export.Dim("n", min=2, max=4096)
    program = torch.export.export(Model(), (torch.randn(M, N),), dynamic_shapes={"x": {1: n}}, strict=strict)
    assert any("normforge" in str(node.target) for node in program.graph.nodes)
    x = torch.randn(M, 100)
    torch.testing.assert_close(program.module()(x), Model()(x), rtol=0, atol=0)


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
