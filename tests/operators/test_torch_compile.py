"""torch.compile and torch.export: one graph, no recompilation over M, any batch, and the results of eager calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import normforge
from normforge import errors
from proving.cases import Case, Tensors, check, operands

from ..calling import FUNCTIONS, backward, each_device, pieces, plain, same_bits, slices, table_at
from ..calls.test_quantised import NVFP4
from ..calls.test_wrong_tensors import MXFP8
from ..nn import models
from ..nn.decoders import made
from ..nn.models import WIDTH
from ..thorough import COSTLY, THOROUGH

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N = 64

# What is traced is the same for all of them. aot_eager has everything but the code that inductor writes.
BACKEND = "aot_eager"


def compiled(function: Any, **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    """A function that is compiled whole, and what counts its compilations."""
    counter = CompileCounterWithBackend(options.pop("backend", BACKEND))
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def flat(norm: str, m: int) -> tuple[torch.Tensor, ...]:
    """The tensors of a call of the functional API, each to be differentiated by; a residual is in bf16."""
    given = operands(plain(norm, shape=(m, N), residual=torch.bfloat16))
    order = ("x", "residual", "weight", "bias")
    return tuple(given[name] for name in order if name in given)


def functional_call(norm: str) -> Callable[..., Any]:
    if norm.startswith("add"):
        return FUNCTIONS[norm]
    return lambda x, *parameters: FUNCTIONS[norm](x, (N,), *parameters)


def same(function: Callable[..., Any], call: Callable[..., Any], given: Sequence[torch.Tensor]) -> None:
    """Fail unless a compiled call has the bits of an eager one, and its gradients too if some are due."""
    actual, expected = pieces(function(*given)), pieces(call(*given))
    assert all(map(same_bits, actual, expected))
    leaves = [each for each in given if each.requires_grad]
    if leaves:
        arriving = [torch.randn_like(output) for output in expected]
        ours, eager = (torch.autograd.grad(outputs, leaves, arriving) for outputs in (actual, expected))
        assert all(map(same_bits, ours, eager))


@COSTLY
@each_device
@pytest.mark.parametrize("backend", [BACKEND, pytest.param("inductor", marks=THOROUGH)])
@pytest.mark.parametrize("case", slices(Path(__file__).with_name("slices.yaml"))["compiled"], ids=str)
def test_a_compiled_call_has_the_outputs_and_gradients_of_the_formula(case: Case, backend: str, device: str) -> None:
    function, told = case.function, case.arguments

    def run(given: Tensors) -> tuple[torch.Tensor, ...]:
        return pieces(function(**given, **told))

    check(case, operands(case, device), run=torch.compile(run, fullgraph=True, backend=backend))


def marked(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return rows of several dimensions, whose number may differ in each."""
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, (0, 1))
    return tensors


def chosen(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What experts are given of a batch: a number of rows that is not known while tracing."""
    return normforge.layer_norm(x[mask], (N,)), normforge.rmsnorm2d_fwd(x[mask], fquant="dynamic").y


def layouts() -> list[tuple[torch.Tensor, ...]]:
    """Rows that have to be copied, and some that have not."""
    rows = (torch.randn(4, 5, N).transpose(0, 1), torch.randn(5, 2 * N)[:, ::2], torch.randn(5, 2 * N)[:, :N])
    return [(each,) for each in rows]


MASKS = [torch.tensor(mask) for mask in ([True, False, True, True, False, False], [False] * 6, [True] * 6)]
PLANES = [torch.linspace(-1, 2, 12 * N).view(3, 4, N).requires_grad_(), torch.ones(4, N, requires_grad=True)]
# By name: the call, tensors of calls of it, and how many graphs they take.
GRAPHS: dict[str, tuple[Callable[..., Any], list[tuple[torch.Tensor, ...]], int]] = {
    "several dimensions that are dynamic": (
        normforge.add_rms_norm,
        [marked(torch.randn(*size, N), torch.randn(*size, N)) for size in ((2, 3), (4, 5), (7, 9))],
        1,
    ),
    "as many rows as the data says": (chosen, [(torch.randn(6, N), mask) for mask in MASKS], 1),
    "several dimensions normalised together": (lambda x, w: normforge.rms_norm(x, (4, N), w), [tuple(PLANES)], 1),
    **{f"copied rows, {norm}": (functional_call(norm), layouts(), 3) for norm in ("layer", "rms")},
    **{f"any M, {norm}": (functional_call(norm), [flat(norm, m) for m in (2, 3, 17, 600)], 2) for norm in FUNCTIONS},
}


@THOROUGH
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_does_as_an_eager_call(name: str) -> None:
    call, calls, graphs = GRAPHS[name]
    function, counter = compiled(call)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for given in calls:
            same(function, call, given)
    assert counter.frame_count == graphs


class StraightThrough(torch.autograd.Function):
    """A user's own function, on one that is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return normforge.rmsnorm2d_fwd(x, weight).y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


@pytest.mark.parametrize("traced", [False, True])
def test_a_forward_function_within_a_function_of_ones_own(traced: bool) -> None:
    x, weight = torch.randn(5, N, requires_grad=True), torch.randn(N, requires_grad=True)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = StraightThrough.apply(x, weight)  # type: ignore[no-untyped-call]  # torch declares no types
        return y

    y = (compiled(call)[0] if traced else call)(x, weight)
    assert same_bits(y, normforge.rmsnorm2d_fwd(x.detach(), weight.detach()).y)
    assert same_bits(torch.autograd.grad(y, x, arriving := torch.randn(5, N))[0], arriving)


@each_device
@pytest.mark.parametrize("backend", ["eager", BACKEND, pytest.param("inductor", marks=THOROUGH)])
def test_outputs_are_written_where_the_caller_says(backend: str, device: str) -> None:
    def call(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        fused: dict[str, Any] = {"residual": residual, "fadd": "pre_add_store", "residual_out": residual}
        return normforge.rmsnorm2d_fwd(x, out=out, fquant="dynamic", x_bias=x.new_ones(N), **fused)

    function, _ = compiled(call, backend=backend)
    x, residual = torch.randn(2, 5, N, device=device)
    out = torch.empty(5, N, device=device, dtype=torch.int8 if device == "cpu" else torch.float8_e4m3fn)
    twins = residual.clone(), torch.empty_like(out)
    for _ in range(2):
        # Without the processes that inductor would start to compile code with.
        with torch._inductor.config.patch(compile_threads=1):
            actual, expected = function(x, residual, out), call(x, *twins)
        assert all(same_bits(a, b) for a, b in zip(actual, expected, strict=True))
        assert (actual.y.data_ptr(), actual.residual_out.data_ptr()) == (out.data_ptr(), residual.data_ptr())
        assert same_bits(residual, twins[0])


def test_an_overlap_is_refused_when_the_graph_runs() -> None:
    function, _ = compiled(lambda x, out: normforge.layernorm2d_fwd(x, out=out).y, backend="eager")
    memory = torch.randn(6, N)
    with pytest.raises(errors.LayoutError, match=r"^out overlaps x in memory"):
        function(memory[1:], memory[:-1])


TOKENS = torch.randint(17, (3, 8), generator=torch.Generator().manual_seed(0))


def trained(
    model: torch.nn.Module, call: Callable[..., torch.Tensor], tokens: torch.Tensor = TOKENS
) -> list[torch.Tensor]:
    model.zero_grad()
    logits = call(tokens)
    backward(logits.square().mean())
    gradients = [parameter.grad for parameter in model.parameters()]
    return [logits.detach().clone(), *(gradient.clone() for gradient in gradients if gradient is not None)]


@THOROUGH
def test_a_patched_model() -> None:
    model = made("torch")
    original = trained(model, model)
    normforge.patch(model)
    function, counter = compiled(model)
    expected, actual = trained(model, model), trained(model, function)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert sum("normforge" in target and "norm2d_fwd" in target for target in targets) == 5
    normforge.unpatch(model)
    torch.testing.assert_close(trained(model, function), original, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_patched_model_trains_on_a_card(mode: str) -> None:
    """By Inductor's code, and in CUDA graphs."""
    counters.clear()
    model = made("torch", device="cuda")
    normforge.patch(model)
    function = torch.compile(model, mode=mode, fullgraph=True)
    for _ in range(5):
        tokens = torch.randint(17, (4, 12), device="cuda")
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch declares no types
        actual = trained(model, function, tokens)
        torch.testing.assert_close(actual, trained(model, model, tokens), rtol=1e-3, atol=1e-4)
    assert not counters["graph_break"]
    assert counters["inductor"]["cudagraph_skips"] == 0


def guards(model: torch.nn.Module) -> list[str]:
    """What compiled code of a model looks at in each call before it runs, as TorchDynamo lists it."""
    torch._dynamo.reset()

    def call(x: torch.Tensor) -> Any:
        return model(x)

    torch.compile(call, backend="eager", fullgraph=True)(torch.randn(2, WIDTH))
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(call.__code__)
    listed = str(entry.guard_manager).splitlines()
    return [line for line in listed if "+- " in line and "+- GuardManager" not in line]


@pytest.mark.parametrize(
    "norm", [torch.nn.LayerNorm, torch.nn.RMSNorm, models.LlamaRMSNorm], ids=lambda cls: cls.__name__
)
def test_what_compiled_code_looks_at_anew_in_each_call_is_little(norm: Callable[[int], torch.nn.Module]) -> None:
    """A norm more is its options more, and what calls are checked by is no part of it: GPT-2 had 680 of these."""
    found = {}
    for patched, count in ((False, 2), (False, 6), (True, 2), (True, 6)):
        model = torch.nn.Sequential(*[norm(WIDTH) for _ in range(count)])
        if patched:
            normforge.patch(model)
        found[patched, count] = guards(model)
    a_norm = {patched: (len(found[patched, 6]) - len(found[patched, 2])) / 4 for patched in (False, True)}
    assert a_norm[True] <= a_norm[False] + 6
    assert [line for line in found[True, 2] if re.search(r"FUNCTIONS|_modules.*__mro__", line)] == []
    assert len(found[True, 2]) - len(found[False, 2]) < 155


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], torch.dtype, float]] = {
    **{
        f"{cls.__name__} of {weight}": (partial(cls, dtype=weight), torch.bfloat16, 2e-2)
        for cls in (models.LlamaRMSNorm, models.T5LayerNorm, models.Olmo2RMSNorm)
        for weight in (torch.float32, torch.bfloat16)
    },
    "a block": (models.Block, torch.float32, 1e-4),
}


@each_device
@pytest.mark.parametrize("around", ["nothing", "checkpoint", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_a_patched_module(name: str, around: str, device: str) -> None:
    make, dtype, tolerance = MODELS[name]
    module = torch.nn.Sequential(make()).to(device)
    normforge.patch(module)

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(module, x, use_reentrant=False) if around == "checkpoint" else module(x)
        return y

    function, _ = compiled(call, backend=BACKEND if device == "cpu" else "inductor")
    x = torch.randn(2, 4, WIDTH, device=device).to(dtype).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16, enabled=around == "autocast"):
        actual, expected = function(x), call(x)
    tolerance = 2e-2 if around == "autocast" else tolerance
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    inputs, arriving = [x, *module.parameters()], torch.randn_like(expected)
    ours, eager = (torch.autograd.grad(y, inputs, arriving) for y in (actual, expected))
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


X = torch.linspace(-1, 1, 3 * N).view(3, N)
# One of each kind of refusal; the first three take one road to theirs.
BAD: dict[str, dict[str, Any]] = {
    "weight too short": {"weight": torch.ones(N - 1)},
    "residual without fadd": {"residual": X},
    "eps negative": {"eps": -1e-5},
    "x of doubles": {"x": X.double()},
    "weight elsewhere": {"weight": torch.ones(N, device="meta")},
    "x transposed": {"x": torch.zeros(N, 3).T},
    "x permuted": {"x": torch.zeros(2, 2, 2, 2, N).permute(3, 2, 1, 0, 4)},
    "fadd unknown": {"fadd": "add"},
    "out of rows that overlap": {"x": torch.ones(2, 2, N), "out": torch.ones(99).as_strided((2, 2, N), (20, 8, 1))},
    "x of a gradient": {"x": X.clone().requires_grad_()},
    "weight of a gradient": {"weight": torch.ones(N, requires_grad=True)},
    "out of a gradient": {"out": torch.zeros(3, N, requires_grad=True)},
}


@pytest.mark.parametrize(
    "bad", [pytest.param(bad, id=name, marks=THOROUGH if at > 2 else ()) for at, (name, bad) in enumerate(BAD.items())]
)
def test_a_bad_call_is_refused_alike(bad: dict[str, Any]) -> None:
    given = {"x": X, **bad}
    with pytest.raises(errors.NormforgeError) as eager:
        normforge.layernorm2d_fwd(**given)
    with pytest.raises(errors.NormforgeError) as traced:
        torch.compile(lambda given: normforge.layernorm2d_fwd(**given), backend="eager")(given)
    assert (type(traced.value), str(traced.value)) == (type(eager.value), str(eager.value))
    # Without a graph break to raise it from, TorchDynamo's own error says what it was.
    with pytest.raises(torch._dynamo.exc.Unsupported) as whole:
        torch.compile(lambda given: normforge.layernorm2d_fwd(**given), backend="eager", fullgraph=True)(given)
    assert type(eager.value).__name__ in str(whole.value)
    assert str(eager.value) in str(whole.value).replace("\\", "")


@pytest.mark.usefixtures("nothing_known")
def test_a_cpu_without_the_interpreter_traces_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.RMSNorm(8))
    normforge.patch(model)
    function, counter = compiled(model)
    x = torch.randn(4, 8)
    assert torch.equal(function(x), model(x))
    (graph,) = counter.graphs
    assert not [node for node in graph.graph.nodes if "normforge" in str(node.target)]


COLUMNS = 16
W, B = torch.linspace(0.5, 2.0, COLUMNS), torch.linspace(-1.0, 1.0, COLUMNS)
FORMATS = {"MXFP8": MXFP8, "NVFP4": NVFP4}

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    name: eval(f"lambda x: {text}") for name, text in table_at(Path(__file__).with_name("calls.yaml")).items()
}
# Calls that only the graph of all calls has.
BESIDE: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda x: normforge.layer_norm_add(x, 2 * x, W, B),
    lambda x: normforge.modulated_rms_norm(x, W, B, weight=W),
    lambda x: normforge.l2norm2d_fwd(x, W),
    lambda x: normforge.rmsnorm2d_bwd(x, x, W, rstd=x[:, 1].clone()),
)
# A trace starts from one of these sizes, and what it makes serves all the others.
SIZES = (2, 1, 5, COLUMNS, 0)
_QUICK = ("modulated_layer_norm, (COLUMNS,)", "quantised, column_major")
each_call = pytest.mark.parametrize("call", [pytest.param(c, marks=[] if c in _QUICK else [THOROUGH]) for c in CALLS])


def leaves(made: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]


class Model(torch.nn.Module):
    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = CALLS[call]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return leaves(self.call(x))


def exported(model: Model, start: int) -> Any:
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (torch.randn(start, COLUMNS),), dynamic_shapes=shapes, strict=False).module()
    assert any("normforge" in str(node.target) for node in program.graph.nodes)
    return program


@each_call
@pytest.mark.parametrize(
    "trace",
    [
        partial(exported, start=2),
        pytest.param(partial(exported, start=COLUMNS), marks=THOROUGH),
        partial(torch.compile, dynamic=True, backend="aot_eager", fullgraph=True),
    ],
    ids=["exported", "exported from as many rows as columns", "compiled"],
)
def test_a_trace_serves_all_sizes(call: str, trace: Callable[[Model], Any]) -> None:
    model = Model(call)
    traced = trace(model)
    for size in SIZES:
        x = torch.randn(size, COLUMNS)
        for actual, expected in zip(traced(x), model(x), strict=True):
            assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
            assert same_bits(actual, expected)


@each_device
@pytest.mark.parametrize("order", [1, pytest.param(-1, marks=THOROUGH)])
def test_each_call_behind_each_other(order: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph reads the table of functions in both ways, by constants and by guards, whichever comes first."""
    for name, vector in (("W", W), ("B", B)):
        monkeypatch.setitem(globals(), name, vector.to(device))
    calls = [*CALLS.values(), *BESIDE][::order]

    def all_of(x: torch.Tensor) -> list[torch.Tensor]:
        return leaves([call(x) for call in calls])

    x = torch.randn(3, COLUMNS, device=device)
    assert all(map(same_bits, torch.compile(all_of, backend="eager", fullgraph=True)(x), all_of(x)))
