"""Torch's own norms with kernels under them: the results are those of torch in every respect, on and off again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn import functional

import normforge
from normforge.calls import attempt
from normforge.errors import FrozenError, InvarianceError
from normforge.kernels import obtain
from normforge.override import served
from normforge.override import switch as switches
from normforge.override.served import OPERATORS
from normforge.override.switch import Switch, TorchOverride
from proving.cases import EPS, LAYOUTS

from ..calling import captured, each_device, printed, there
from ..conformance.test_opinfo import TOLERANCE as OF_SAMPLES
from ..conformance.test_opinfo import called, in_fp64
from ..nn.test_transforms import TRANSFORMS, Call, M, N, Transform, leaf
from ..thorough import THOROUGH
from .conftest import KERNELS, override

aten: Any = torch.ops.aten

SERVED = {"layer": [*KERNELS[:2]], "rms": [*KERNELS[2:]]}
# Of a value, beside the largest of its tensor.
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}

each_norm = pytest.mark.parametrize("norm", SERVED)

Results = Sequence["torch.Tensor | None"]


def normalised(norm: str, x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float = EPS) -> Results:
    """What the operator returns of x: y, and what it keeps of each row."""
    if norm == "rms":
        return tuple(aten._fused_rms_norm(x, shape, weight, eps))
    return tuple(aten.native_layer_norm(x, shape, weight, bias, eps))


def with_gradients(norm: str, x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None) -> Results:
    results = normalised(norm, x, shape, weight, bias)
    y: Any = results[0]
    leaves = [leaf for leaf in (x, weight, None if norm == "rms" else bias) if leaf is not None]
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    return [*results, *torch.autograd.grad(y, leaves, dy)]


def described(results: Results) -> list[Any]:
    return [None if each is None else (each.dtype, each.shape, each.stride(), each.device) for each in results]


def alike(actual: Results, expected: Results, tolerance: float = TOLERANCE[torch.float32]) -> None:
    """Fail unless results are like torch's in type, shape and stride, and close."""
    assert described(actual) == described(expected)
    for a, b in zip(actual, expected, strict=True):
        if a is not None and b is not None:
            largest = max(1.0, b.abs().max().item()) if b.numel() else 1.0
            torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance * largest)


def check(run: Callable[[], Results], ran: list[str], norm: str, tolerance: float, device: str = "cpu") -> None:
    """Hold what kernels make of a forward and a backward call against what torch's own do."""
    expected = run()
    assert not ran
    with override(device):
        actual = run()
    assert ran == SERVED[norm]
    alike(actual, expected, tolerance)


def test_parameters_of_fp32_beside_16_bits_on_a_cpu(ran: list[str]) -> None:
    """What torch takes there alone, and keeps fp32 statistics of."""
    x = torch.randn(3, 40).bfloat16().requires_grad_()
    weight, bias = (torch.randn(40, requires_grad=True) for _ in range(2))
    check(lambda: with_gradients("layer", x, (40,), weight, bias), ran, "layer", TOLERANCE[torch.bfloat16])


OTHERS = {name: LAYOUTS[name] for name in ("gapped", "offset", "transposed", "channels last")}
OTHERS["one row for all"] = lambda x: x[:1, :1].expand(x.shape)


@each_device
@each_norm
@pytest.mark.parametrize("lay", OTHERS.values(), ids=OTHERS)
def test_a_layout(lay: Callable[[torch.Tensor], torch.Tensor], norm: str, device: str, ran: list[str]) -> None:
    """Of x and of the gradient that arrives; results are contiguous, as torch's are."""
    x, dy = (lay(torch.randn(2, 3, 16, device=device)) for _ in range(2))
    weight = torch.randn(16, device=device, requires_grad=True)

    def called() -> Results:
        leaf = x.detach().requires_grad_()
        y, *others = normalised(norm, leaf, (16,), weight, None)
        dx, dweight = torch.autograd.grad(there(y), (leaf, weight), dy)
        # RMSNorm of torch's on a CPU is other operators, whose gradient of x lies as x does.
        return [y, *others, dx if norm == "layer" or ran else dx.contiguous(), dweight]

    check(called, ran, norm, TOLERANCE[torch.float32], device)


MASKS = {norm: list(product((False, True), repeat=count)) for norm, count in (("layer", 3), ("rms", 2))}


def backward_of(norm: str, dy: torch.Tensor, x: torch.Tensor, weight: Any, bias: Any, mask: Sequence[bool]) -> Results:
    n = x.shape[-1]
    statistics = normalised(norm, x, (n,), weight, bias)[1:]
    if norm == "rms":
        return tuple(aten._fused_rms_norm_backward(dy, x, (n,), *statistics, weight, mask))
    return tuple(aten.native_layer_norm_backward(dy, x, (n,), *statistics, weight, bias, mask))


@each_device
@pytest.mark.parametrize(("norm", "mask"), [(norm, mask) for norm, masks in MASKS.items() for mask in masks])
def test_an_output_mask(norm: str, mask: tuple[bool, ...], device: str, ran: list[str]) -> None:
    x, dy = torch.randn(3, 16, device=device), torch.randn(3, 16, device=device)
    weight, bias = torch.randn(16, device=device), torch.randn(16, device=device)
    whole = x.clone().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()
    y: Any = normalised(norm, whole[0], (16,), *whole[1:])[0]
    exact = torch.autograd.grad(y, whole[: len(mask)], dy)
    with override(device):
        actual = backward_of(norm, dy, x, weight, bias, mask)
    alike(actual, [each if wanted else None for each, wanted in zip(exact, mask, strict=True)])
    assert ran == (SERVED[norm] if any(mask) else SERVED[norm][:1])


class Own(torch.Tensor):
    """A class of somebody's own."""


def trained(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def of_rows(x: torch.Tensor, weight: Any = None, eps: float = EPS) -> Results:
    return normalised("layer", x, (8,), weight, None, eps)


NOT_SERVED: dict[str, Callable[[], Results]] = {
    "float64": lambda: with_gradients("layer", trained(3, 8, dtype=torch.float64), (8,)),
    "float64 and RMSNorm": lambda: with_gradients("rms", trained(3, 8, dtype=torch.float64), (8,)),
    "no rows": lambda: with_gradients("layer", trained(0, 8), (8,), torch.ones(8, requires_grad=True)),
    "no rows and RMSNorm": lambda: with_gradients("rms", trained(0, 8), (8,)),
    "rows of nothing": lambda: with_gradients("layer", trained(3, 0), (0,)),
    "an eps below 0": lambda: of_rows(torch.randn(3, 8), eps=-1e-3),
    "an eps that fp32 does not hold": lambda: of_rows(torch.randn(3, 8), eps=1e39),
    "a class of its own": lambda: of_rows(torch.randn(3, 8).as_subclass(Own)),
    "forward-mode AD": lambda: torch.func.jvp(
        lambda x: functional.layer_norm(x, (8,)), (torch.ones(2, 8).cumsum(-1),), (torch.ones(2, 8),)
    ),
    "a weight that lies apart": lambda: of_rows(torch.randn(3, 8), torch.ones(16)[::2]),
}


@pytest.mark.parametrize("call", NOT_SERVED.values(), ids=NOT_SERVED)
def test_what_no_kernel_serves_is_torchs(call: Callable[[], Results], ran: list[str]) -> None:
    torch.manual_seed(0)
    expected = call()
    torch.manual_seed(0)
    with override():
        actual = call()
    assert not ran
    assert described(actual) == described(expected)
    for a, b in zip(actual, expected, strict=True):
        # RMSNorm on a CPU is other operators, and what stands for a kernel of its gradient adds in another order.
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


ERRORS: dict[str, Callable[[], object]] = {
    "gradients of parameters that are not there": lambda: backward_of(
        "layer", torch.randn(3, 16), torch.randn(3, 16), None, None, (True, True, True)
    ),
    "another shape": lambda: functional.layer_norm(torch.randn(3, 8), (9,)),
    "no shape": lambda: functional.layer_norm(torch.randn(3, 8), ()),
    "a weight of another shape": lambda: functional.layer_norm(torch.randn(3, 8), (8,), torch.ones(9)),
    "a weight of another type": lambda: functional.layer_norm(torch.randn(3, 8), (8,), torch.ones(8).half()),
    "integers": lambda: functional.layer_norm(torch.ones(3, 8, dtype=torch.int32), (8,)),
    "RMSNorm of another shape": lambda: functional.rms_norm(torch.randn(3, 8), (9,)),
}


@pytest.mark.parametrize("call", ERRORS.values(), ids=ERRORS)
def test_an_error_is_torchs(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError) as expected:
        call()
    with override(), pytest.raises(RuntimeError) as actual:
        call()
    assert (type(actual.value), str(actual.value)) == (type(expected.value), str(expected.value))


@each_device
@each_norm
def test_eps_of_none(norm: str, device: str) -> None:
    """Small enough rows tell whose epsilon it is."""
    x = torch.randn(3, 16, device=device) * 1e-4
    call = functional.rms_norm if norm == "rms" else functional.layer_norm
    expected = call(x, (16,))
    with override(device):
        torch.testing.assert_close(call(x, (16,)), expected)


def test_what_is_copied_on_write_stays_shared(ran: list[str]) -> None:
    lazily: Any = torch._lazy_clone
    x = lazily(torch.randn(3, 16))
    with override():
        functional.layer_norm(x, (16,))
        functional.rms_norm(x, (16,))
    assert torch._C._is_cow_tensor(x)  # type: ignore[attr-defined]  # likewise
    assert not ran


@pytest.mark.parametrize("grad", [False, True])
def test_whether_gradients_are_recorded_stays_as_it_was(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 16, requires_grad=True)
    with override(), torch.set_grad_enabled(grad):
        assert functional.layer_norm(x, (16,)).requires_grad is grad
        assert torch.is_grad_enabled() is grad
        monkeypatch.setattr(served, "layernorm2d_fwd", _refuse)
        functional.layer_norm(x, (16,))
        assert torch.is_grad_enabled() is grad


def _refuse(*_: Any, **__: Any) -> None:
    raise FrozenError("it would have to be compiled")


@each_norm
def test_a_kernel_that_there_is_none_of_is_said_once(
    norm: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NORMFORGE_FROZEN and NORMFORGE_ON_MISS forbid a kernel: torch's serves, forward and backward."""
    for name in KERNELS:
        monkeypatch.setattr(served, name, _refuse)
    monkeypatch.setattr(attempt, "_said", set())
    x = torch.randn(3, 16, requires_grad=True)
    expected = with_gradients(norm, x, (16,))
    with override():
        for _ in range(3):
            alike(with_gradients(norm, x, (16,)), expected)
    says = "override_torch leaves calls to torch's own kernel: it would have to be compiled"
    assert [record.getMessage() for record in caplog.records] == [says, says]


def test_only_what_is_loaded_runs_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    x = torch.randn(3, 16)
    loads: list[bool] = []

    def layernorm2d_fwd(*_: Any, **__: Any) -> Any:
        loads.append(not obtain._this_thread.only_compiled)
        return _refuse()

    monkeypatch.setattr(attempt, "captured", lambda x: True)
    monkeypatch.setattr(served, "layernorm2d_fwd", layernorm2d_fwd)
    expected = functional.layer_norm(x, (16,))
    with override():
        torch.testing.assert_close(functional.layer_norm(x, (16,)), expected, rtol=0, atol=0)
        monkeypatch.setattr(attempt, "captured", lambda x: False)
        functional.layer_norm(x, (16,))
    assert loads == [False, True]


@pytest.mark.gpu
@each_norm
def test_a_captured_graph(norm: str, ran: list[str]) -> None:
    """What was called before is captured; what was not is torch's kernel in the graph."""
    for n, warm in ((1024, True), (1032, False)):
        x = torch.randn(8, n, device="cuda")
        call = partial(normalised, norm, x, (n,), None, None)
        expected = call()
        with override("cuda"):
            if warm:
                call()
            ran.clear()
            graph, actual = captured(call)
            assert ran == (SERVED[norm][:1] if warm else [])
        graph.replay()
        alike(actual, expected)


def _autocast(call: Call, x: torch.Tensor, t: torch.Tensor) -> Any:
    a = leaf(x)
    with torch.autocast(x.device.type, torch.bfloat16):
        y = call(a)
    return [y, *torch.autograd.grad(y, a, t.to(y.dtype))]


def _inferred(call: Call, x: torch.Tensor, t: torch.Tensor) -> Any:
    with torch.inference_mode():
        return call(x).clone()


# Transforms that come to other operators and keys of torch's dispatcher, and those of them that take seconds.
_QUICK = (
    "vmap, in_dims of the last",
    "grad",
    "vmap of grad",
    "jvp",
    "functionalize",
    "double backward of a checkpoint",
)
_LONG = ("vmap", "grad of grad", "jvp of grad", "batched gradients, differentiated", "jit.trace", "compiled grad")
SURROUNDINGS = [
    pytest.param(_autocast, id="autocast"),
    pytest.param(_inferred, id="inference mode"),
    *(pytest.param(TRANSFORMS[name], id=name) for name in _QUICK),
    *(pytest.param(TRANSFORMS[name], id=name, marks=THOROUGH) for name in _LONG),
]


@each_device
@each_norm
@pytest.mark.parametrize("surround", SURROUNDINGS)
def test_what_surrounds_a_call(surround: Transform, norm: str, device: str) -> None:
    function, weight = getattr(functional, f"{norm}_norm"), torch.randn(N, device=device)

    def call(x: torch.Tensor, w: torch.Tensor = weight, r: Any = None) -> torch.Tensor:
        y: torch.Tensor = function(x, (N,), w, eps=EPS)
        return y

    x, t = torch.randn(M, N, device=device), torch.randn(M, N, device=device)
    leaves = torch.utils._pytree.tree_leaves
    expected = leaves(surround(call, x, t))
    with override(device):
        alike(leaves(surround(call, x, t)), expected, 1e-4)


@each_device
def test_the_fast_path_of_an_encoder_layer_comes_to_kernels(device: str, ran: list[str]) -> None:
    """One operator of torch's that calls no module, and so none that `patch` could swap."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).to(device).eval()
    x = torch.randn(2, 4, 16, device=device)
    with torch.no_grad():
        expected = layer(x)
        with override(device):
            torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert ran == ["layernorm2d_fwd"] * 2


@each_device
def test_a_patched_model_is_served_as_before(device: str, ran: list[str]) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.RMSNorm(16)).to(device)
    normforge.patch(model)
    x = torch.randn(3, 16, device=device)
    expected = model(x)
    with override(device):
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert not ran


NAMES = ("layer_norm", "rms_norm", "native_layer_norm")


@each_device
@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=[] if dtype is torch.float32 else [THOROUGH]) for dtype in OF_SAMPLES], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_samples(name: str, dtype: torch.dtype, device: str, op_infos: dict[str, Any], ran: list[str]) -> None:
    info, tolerance = op_infos[name], OF_SAMPLES[dtype]
    served = 0
    for sample in info.sample_inputs(device, dtype, requires_grad=True):
        expected, exact = called(info.op, sample), called(info.op, sample.transform(in_fp64))
        ran.clear()
        with override(device):
            actual = called(info.op, sample)
        served += bool(ran)
        for a, like, wanted in zip(actual, expected, exact, strict=True):
            assert (a.dtype, a.shape, a.stride()) == (like.dtype, like.shape, like.stride())
            largest = wanted.abs().max().item() if wanted.numel() else 0.0
            torch.testing.assert_close(
                a.double(), wanted, rtol=tolerance, atol=tolerance * max(largest, 1.0), equal_nan=True
            )
    assert served >= 4


def in_sequence(norm: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    return parallelize_module(torch.nn.Sequential(norm), mesh, {"0": SequenceParallel()})


def fully(norm: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), norm)
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm])
@pytest.mark.parametrize("shard", [in_sequence, fully])
def test_local_parts_are_served(
    shard: Callable[..., torch.nn.Module], norm: type[torch.nn.Module], mesh: DeviceMesh, ran: list[str]
) -> None:
    model = shard(norm(16), mesh)
    x = torch.randn(2, 4, 16)

    def called() -> list[torch.Tensor]:
        model.zero_grad()
        y = model(x)
        assert isinstance(y, DTensor) == (shard is in_sequence)
        y = y.to_local() if shard is in_sequence else y
        torch.autograd.backward([y.square().sum()])
        gradients = [parameter.grad for parameter in model.parameters()]
        return [y.detach(), *[gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]]

    expected = called()
    assert not ran
    with override():
        actual = called()
    assert [name[-3:] for name in ran] == ["fwd", "bwd"]
    assert len(actual) == len(expected) == 1 + len(list(model.parameters()))
    torch.testing.assert_close(actual, expected)


def tables(key: str = "CPU") -> dict[str, str]:
    """What torch's dispatcher has for each operator."""
    dump: Callable[[str], str] = torch._C._dispatch_dump_table
    lines = {operator: dump(f"aten::{operator}").splitlines() for operator in OPERATORS}
    return {operator: next((line for line in of if line.startswith(f"{key}:")), "") for operator, of in lines.items()}


def is_replaced(key: str = "CPU") -> bool:
    replaced = {"torch_internals.py" in line for line in tables(key).values()}
    assert len(replaced) == 1
    return replaced.pop()


def test_it_is_off_until_it_is_called_and_afterwards() -> None:
    before = tables()
    assert not is_replaced()
    with override() as wish:
        assert is_replaced()
        assert wish.active
        assert repr(wish) == (
            "<normforge.TorchOverride of native_layer_norm, native_layer_norm_backward, _fused_rms_norm, "
            "_fused_rms_norm_backward: active on CPU>"
        )
    assert tables() == before
    assert not wish.active
    assert repr(wish).endswith(": restored>")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels serve norms on the GPU that is here")
@pytest.mark.parametrize("interpreted", [pytest.param(False, marks=THOROUGH), True])
def test_kernels_serve_where_they_run(interpreted: bool) -> None:
    """In the interpreter on the CPU, if there is no GPU; what is said to be active there is."""
    code = """
import torch, normforge
with normforge.override_torch() as wish:
    dump = torch._C._dispatch_dump_table("aten::native_layer_norm")
    (line,) = [line for line in dump.splitlines() if line.startswith("CPU:")]
    print(repr(wish).rpartition(": ")[2], "torch_internals.py" in line)
    x = torch.randn(2, 64)
    torch.testing.assert_close(torch.nn.functional.layer_norm(x, (64,)), normforge.reference.layernorm2d_fwd(x).y)
"""
    said = printed(code, TRITON_INTERPRET="1" if interpreted else None)
    assert said == ("active on CPU> True" if interpreted else "active on CUDA> False")


def test_each_wish_counts() -> None:
    first, second = override(), override()
    first.restore()
    first.restore()
    assert is_replaced()
    assert second.active
    # A `with` ends with an error too.
    with pytest.raises(ZeroDivisionError), override():
        _ = 1 / 0
    assert is_replaced()
    second.restore()
    assert not is_replaced()


def test_the_public_functions_are_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch without CUDA lacks one of the kernels, and what is not there is not replaced."""
    gpus = Switch("CUDA")
    monkeypatch.setattr(switches, "_switch", lambda: gpus)
    torchs, on_cpu = tables("CUDA"), tables()
    with normforge.override_torch():
        normforge.override_torch()
        assert "torch_internals.py" in tables("CUDA")["native_layer_norm"]
        assert tables() == on_cpu
    assert "torch_internals.py" in tables("CUDA")["native_layer_norm"]
    normforge.restore_torch()
    assert tables("CUDA") == torchs
    normforge.restore_torch()
    assert tables("CUDA") == torchs


def test_several_threads_switch_while_others_call() -> None:
    """A call that is under way while its kernel is taken away ends as it began."""
    # No kernel serves float64: its calls are short, and many are under way.
    x = torch.randn(4, 16).double()
    expected = functional.layer_norm(x, (16,))
    switch, over = Switch("CPU"), threading.Event()

    def toggle(_: int) -> None:
        for _ in range(200):
            with TorchOverride(switch):
                pass

    def call(_: int) -> int:
        calls = 0
        while not over.is_set():
            assert torch.equal(functional.layer_norm(x, (16,)), expected)
            calls += 1
        return calls

    with ThreadPoolExecutor(4) as pool:
        calling = [pool.submit(call, place) for place in range(2)]
        try:
            list(pool.map(toggle, range(2)))
        finally:
            over.set()
        assert all(each.result() for each in calling)
    assert not is_replaced()


@pytest.fixture
def torchs_own() -> Iterator[Any]:
    """`torch.backends.python_native` with an override of RMSNorm for CPUs, of inputs with 24 columns."""
    native = getattr(torch.backends, "python_native", None)
    if native is None:
        pytest.skip("this PyTorch has no overrides of its own: they came with 2.13")
    from torch._native import registry

    def ones(x: torch.Tensor, shape: Any, weight: Any, eps: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones_like(x), torch.ones(*x.shape[:-1], 1)

    of_24: dict[str, Any] = {"cond": lambda x, shape, weight, eps: x.shape[-1] == 24, "impl": ones}
    registry.register_op_override("cutedsl", "aten", "_fused_rms_norm", "CPU", **of_24)
    key = ("_fused_rms_norm", "CPU")
    registry._register_overrides_from_graph(*key, registry._graphs[key])
    yield native
    registry._destroy_aten_override(*key)
    del registry._graphs[key]
    for named in (
        registry._dsl_name_to_lib_graph,
        registry._dispatch_key_to_lib_graph,
        registry._op_symbol_to_lib_graph,
    ):
        for places in named.values():
            while key in places:
                places.remove(key)


def is_torchs_own(x: torch.Tensor) -> bool:
    return bool((functional.rms_norm(x, x.shape[-1:]) == 1).all())


def test_torchs_own_override_is_switched_within(torchs_own: Any, ran: list[str]) -> None:
    """Neither holds what the other put there: a kernel that was taken is of no use once that has gone."""
    x, wide, other = torch.randn(3, 24), torch.randn(3, 24).double(), torch.randn(3, 16)
    with override():
        with torchs_own.operations_disabled("_fused_rms_norm"):
            assert not is_torchs_own(x)
            assert not is_torchs_own(wide)
        # Whoever came last is first.
        assert is_torchs_own(x)
        ran.clear()
        assert not is_torchs_own(other)
        assert ran == ["rmsnorm2d_fwd"]
    assert is_torchs_own(x)
    assert not is_torchs_own(other)
    torchs_own.disable_operations("_fused_rms_norm")
    try:
        with override():
            assert not is_torchs_own(x)
        assert not is_torchs_own(x)
    finally:
        torchs_own.enable_operations("_fused_rms_norm")
    assert is_torchs_own(x)


def test_under_batch_invariance_nothing_is_left_to_torch() -> None:
    """Nor does torch's own backward pass, which no `with` reaches, stand behind a forward pass that is invariant."""
    x = torch.randn(257, 131, generator=torch.Generator().manual_seed(2)) + 100.0
    with override(), normforge.batch_invariant():
        batch = functional.layer_norm(x, (131,))
        assert torch.equal(functional.layer_norm(x[3:12], (131,)), batch[3:12])
        with pytest.raises(InvarianceError, match="float64"):
            functional.layer_norm(x.double(), (131,))
        with pytest.raises(InvarianceError, match="NORMFORGE_BATCH_INVARIANT=1"):
            functional.layer_norm(x.clone().requires_grad_(), (131,))
