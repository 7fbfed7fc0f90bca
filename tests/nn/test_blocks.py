"""`patch` fuses the adds of blocks with the norms behind them: the same numbers, and all that is attached goes on."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import normforge
from normforge.errors import SettingError
from normforge.families import post_add, renormed
from normforge.patching import sums

from ..calling import each_device
from ..thorough import THOROUGH
from . import models
from .decoders import FAMILIES, VOCABULARY, Decoder, LlamaLayer, made
from .models import WIDTH, LlamaRMSNorm, written
from .oracle import backward
from .twins import Counted, assert_near, copies, twins

# Interpreted kernels take a tenth of a second each.
each_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "Llama" else [THOROUGH]) for name in FAMILIES]
)
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join sums as small as these are."""
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", "0")


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, given: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    given = given.to(next(model.parameters()).device)
    return functional.cross_entropy(model(given, **kwargs).float().flatten(0, 1), given.roll(1).flatten())


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """How many sums were made together with a norm, and how many norms gave the input for the sum behind them."""
    counted = Counted(monkeypatch, sums, "add_ahead", "norm_of_summand")
    monkeypatch.setattr(renormed, "add_ahead", counted.counting("add_ahead", renormed.add_ahead))
    return counted


def agree(
    model: Any,
    patched: Any,
    run: Callable[[Any, torch.Tensor], torch.Tensor] = loss_of,
    tolerances: tuple[float, float] = (1.3e-6, 1e-4),
) -> None:
    """Fail unless runs of both return the same loss, and gradients are the same, within a tolerance each."""
    of_loss, tolerance = tolerances
    losses = [run(each, tokens()) for each in (model, patched)]
    torch.testing.assert_close(*losses, rtol=of_loss, atol=of_loss)
    for loss in losses:
        backward(loss)
    assert_near(gradients(patched), gradients(model), tolerance, 1e-3)


def same(model: Any, patched: Any, given: torch.Tensor, times: int) -> None:
    """Fail unless both return the same, call after call."""
    for _ in range(times):
        torch.testing.assert_close(patched(given), model(given))


def test_a_small_sum_is_added_alone(joined: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Llama")
    normforge.patch(model)
    given = tokens()
    # A layer has a norm directly behind a sum, and one whose input is added again.
    elements = given.numel() * WIDTH
    for least, expected in ((0, 2), (elements, 2), (elements + 1, 0), ("", 0)):
        monkeypatch.setenv("NORMFORGE_FUSE_FROM", str(least))
        model(given)
        assert joined.counts() == (expected, expected)
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", "0")
    with normforge.batch_invariant():
        # So that rows do not differ by how many there are.
        model(given)
        assert joined.counts() == (0, 0)


@pytest.mark.parametrize("setting", ["-1", "1e6", "twelve"])
def test_a_threshold_that_is_no_number_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", setting)
    with pytest.raises(SettingError, match=f"NORMFORGE_FUSE_FROM='{setting}' is no number of elements"):
        normforge.patch(made("Llama"))


@each_family
@each_device
def test_logits_loss_and_gradients_of_a_fused_model(family: str, device: str, joined: Counted) -> None:
    model = made(family, device=device)
    patched = copy.deepcopy(model)
    done = normforge.patch(patched)
    _, norms, inputs = FAMILIES[family]
    assert [(each.path, each.cls, each.norms, each.gradients) for each in done.fused] == [
        (f"layers.{index}", type(layer), norms, inputs) for index, layer in enumerate(model.layers)
    ]
    assert not done.unfused
    assert isinstance(patched.layers[0], type(model.layers[0]))
    for _ in range(2):
        agree(model, patched)
        called = [name for name in inputs if name not in norms and name != "ln_cross"]
        assert joined.counts() == (2 * len(norms), 2 * len(called))


@THOROUGH
@every_family
def test_a_nudge_by_one_rounding_is_all_there_is_in_bf16(
    family: str, joined: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distance from fp64 is that of the unfused model, give or take."""
    added = Counted(monkeypatch, post_add, "normalise")
    exact = made(family, torch.float64)
    model = made(family, torch.bfloat16)
    with torch.no_grad():
        for wide, narrow in zip(exact.parameters(), model.parameters(), strict=True):
            wide.copy_(narrow)
    model, patched = twins(model)
    for each in (exact, model, patched, patched):
        each.zero_grad()
        backward(loss_of(each, tokens()))
    assert sum((*joined.counts(), *added.counts())) > 0
    wanted, unfused, fused = (gradients(each) for each in (exact, model, patched))
    for name, gradient in wanted.items():
        size = gradient.norm() + 1e-3
        # The last of patched's two steps; both added up.
        off = (fused[name].double() - gradient).norm() / size
        assert off <= 2 * (unfused[name].double() - gradient).norm() / size + 0.02, name


@THOROUGH
@every_family
def test_greedy_decoding_with_a_cache(family: str, joined: Counted) -> None:
    model, patched = twins(made(family).eval())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            wanted = model.generate(tokens(), 4)
            joined.counts()
            assert torch.equal(patched.generate(tokens(), 4), wanted)
            # Five forwards of two layers; without gradients nothing else is fused.
            assert joined.counts() == (2 * 5 * len(FAMILIES[family][1]), 0)


@THOROUGH
def test_a_hidden_state_has_the_gradient_that_it_has_unfused() -> None:
    """Of all that is computed from it: its norm, and the residual path behind it; a hook may change the gradient."""
    model, patched = twins(made("Llama"))
    loss_of(patched, tokens())
    seen: list[list[torch.Tensor]] = []

    def hooked(model: Any, given: torch.Tensor) -> torch.Tensor:
        hidden: list[torch.Tensor] = []
        loss = loss_of(model, given, hidden=hidden)
        seen.append([*torch.autograd.grad(loss, hidden, retain_graph=True)])
        hidden[2].register_hook(seen[-1].append)  # type: ignore[no-untyped-call]  # torch declares no types for it
        hidden[1].register_hook(lambda gradient: 3 * gradient)  # type: ignore[no-untyped-call]  # likewise
        return loss

    agree(model, patched, hooked)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-6)


def overwritten(module: torch.nn.Module, inputs: Any, output: Any) -> None:
    # Not by a factor, which an RMSNorm takes off again.
    (output if isinstance(output, torch.Tensor) else output[0]).add_(1)


HOOKS: dict[str, Callable[[torch.nn.Module, list[Any]], Any]] = {
    "forward": lambda module, seen: module.register_forward_hook(
        lambda m, inputs, output: seen.extend([*inputs, output])
    ),
    "pre": lambda module, seen: module.register_forward_pre_hook(lambda m, inputs: seen.extend(inputs)),
    "backward": lambda module, seen: module.register_full_backward_hook(
        lambda m, dinputs, doutputs: seen.extend([*dinputs, *doutputs])
    ),
    "changing input": lambda module, seen: module.register_forward_pre_hook(
        lambda m, inputs: (1 + inputs[0], *inputs[1:]) if inputs else None
    ),
    "changing output": lambda module, seen: module.register_forward_hook(
        lambda m, inputs, output: 1 + output if isinstance(output, torch.Tensor) else (1 + output[0], *output[1:])
    ),
    "writing to the output": lambda module, seen: module.register_forward_hook(overwritten),
}
HOOKED = (
    *("layers.0", "layers.1", "layers.0.self_attn", "layers.0.mlp"),
    *("layers.0.post_attention_layernorm", "layers.1.input_layernorm", "norm"),
)
FIRST = (("pre", "layers.1.input_layernorm"), ("writing to the output", "layers.0"))


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        pytest.param(kind, path, marks=[] if (kind, path) in FIRST else [THOROUGH])
        for kind, path in itertools.product(HOOKS, HOOKED)
    ],
)
def test_hooks_fire_and_see_what_they_saw(kind: str, path: str) -> None:
    model = made("Llama")
    model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    model, patched = twins(model)
    backward(loss_of(patched, tokens()))
    patched.zero_grad()
    seen: list[list[Any]] = [[], []]
    for each, found in zip((model, patched), seen, strict=True):
        HOOKS[kind](each.get_submodule(path), found)
    agree(model, patched)
    for one, other in zip(*seen, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


class Meddling(torch.nn.Module):
    """Calls a norm with a sum that something was done to in between, by which the norm can be told from no other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(WIDTH)
        self.part = torch.nn.Linear(WIDTH, WIDTH)

    def meddle(self, x: torch.Tensor) -> torch.Tensor:
        x.data.add_(torch.linspace(0, 3, WIDTH))
        return x


def meddling(name: str, *body: str, first: str = "total = x + self.part(x)") -> Any:
    return written(Meddling, name, "def forward(self, x, flag=True):", first, *body, names=globals())


IN_A_BRANCH = meddling("InABranch", "if flag is not None:", "    self.meddle(total)", "return self.norm(total)")
MEDDLING = [
    IN_A_BRANCH,
    meddling("InAStatement", "self.meddle(total)", "return self.norm(total)"),
    meddling("InAnExpression", "return self.meddle(total) * 0 + self.norm(total)"),
    meddling(
        "InALoop",
        "made = []",
        "while len(made) < 2:",
        "    made.append(self.norm(total))",
        "    self.meddle(total)",
        "return made",
    ),
    meddling("InACondition", "y = self.meddle(total) if flag else self.norm(total)", "return y + self.norm(total)"),
    meddling("BeforeTheResidual", "y = self.part(self.norm(x))", "self.meddle(x)", "return x + y", first="x = x * 1"),
    meddling(
        "WithTheResidualReplaced",
        "y = self.part(self.norm(x))",
        "x.data = x.data * 2 + 1",
        "return x + y",
        first="x = x * 1",
    ),
]


@pytest.mark.parametrize("cls", MEDDLING)
def test_what_a_block_does_to_a_sum_before_its_norm(cls: type[Meddling]) -> None:
    same(*twins(cls()), torch.randn(2, 3, WIDTH, requires_grad=True), times=2)


@THOROUGH
def test_dropout_draws_what_it_drew(joined: Counted) -> None:
    model = Decoder(lambda: LlamaLayer(p=0.5), LlamaRMSNorm)
    patched = copy.deepcopy(model)
    assert len(normforge.patch(patched).fused) == 2

    def seeded(model: Any, given: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return loss_of(model, given)

    for training in (True, False):
        agree(model.train(training), patched.train(training), seeded)
    assert joined.counts()[1] > 0


@THOROUGH
@pytest.mark.parametrize(
    ("layers", "reentrant"), [((0, 1), False), ((0, 1), True), ((0,), False), ((1,), False), ((1,), True)], ids=str
)
def test_gradient_checkpointing(layers: tuple[int, ...], reentrant: bool, joined: Counted) -> None:
    """A last layer's sum is made without gradients where a re-entrant checkpoint recomputes it; its norm is not."""
    model = made("Llama")
    for layer in layers:
        model.layers[layer].gradient_checkpointing, model.layers[layer].use_reentrant = True, reentrant
    model, patched = twins(model)
    for step in range(6):
        if step == 3:  # What is learned outside a checkpoint is not used in one.
            with torch.no_grad():
                patched.eval()(tokens())
            patched.train()
        agree(model, patched)
    assert joined.counts()[1] >= 6 * 2


WITHIN: dict[str, tuple[Callable[[], AbstractContextManager[object]], tuple[float, float]]] = {
    "saved tensors offloaded": (torch.autograd.graph.save_on_cpu, (1.3e-6, 1e-4)),
    # fp32 weights and residuals, branches in bf16.
    "autocast": (partial(torch.autocast, "cpu", torch.bfloat16), (1e-2, 5e-2)),
}


@THOROUGH
@pytest.mark.parametrize("context", WITHIN)
def test_a_forward_within_a_context(context: str, joined: Counted) -> None:
    model, patched = twins(made("Llama"))
    entered, tolerances = WITHIN[context]

    def within(model: Any, given: torch.Tensor) -> torch.Tensor:
        with entered():
            return loss_of(model, given)

    for _ in range(2):
        agree(model, patched, within, tolerances)
    assert joined.counts()[0] > 0


@THOROUGH
@every_family
def test_a_compiled_model_is_one_graph(family: str) -> None:
    model, patched = twins(made(family))
    wanted = loss_of(model, tokens())
    compiled = torch.compile(patched, fullgraph=True, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(loss_of(compiled, tokens()), wanted)
        # Eager calls in between change nothing of the graph.
        with torch.compiler.set_stance("force_eager"):
            torch.testing.assert_close(loss_of(patched, tokens()), wanted)


@THOROUGH
def test_sums_of_other_types_and_shapes() -> None:
    """What the kernel does not add as torch does is added by torch."""
    module = meddling(
        "Odd", "return self.norm(total), total", first="total = x + (self.part(x) if flag is None else flag)"
    )()
    patched = copy.deepcopy(module)
    assert normforge.patch(patched).fused[0].norms == ("norm",)
    x = torch.randn(2, 3, WIDTH)
    for branch in (x[0], x[:, :1], 1.0, x.double(), x.to(torch.int32), x.half(), x.bfloat16(), x.mT.contiguous().mT):
        wanted, actual = module(x, branch), (patched(x, branch))
        assert [each.dtype for each in actual] == [each.dtype for each in wanted]
        torch.testing.assert_close(actual, wanted)
    half, other = x.half(), x.bfloat16()
    torch.testing.assert_close(patched(half, other)[1], half + other)
    torch.testing.assert_close(patched(x[:0], x[:0]), module(x[:0], x[:0]))
    torch.testing.assert_close(patched(other, other), module(other, other))


@THOROUGH
def test_copies_and_pickles_are_fused_and_can_be_unpatched(joined: Counted) -> None:
    model = made("Llama")
    normforge.patch(model)
    wanted = model(tokens())
    for other in (*copies(model), copy.deepcopy(model.layers)[0]):
        layer = other.layers[0] if isinstance(other, Decoder) else other
        assert type(layer) is type(model.layers[0])
        if isinstance(other, Decoder):
            joined.counts()
            assert [torch.equal(other(tokens()), wanted) for _ in range(2)] == [True, True]
            assert joined.counts() == (4, 4)
            assert list(other.state_dict()) == list(model.state_dict())
        normforge.unpatch(other)
        assert type(layer) is LlamaLayer


def decorated_unknown(function: Callable[..., Any]) -> Callable[..., Any]:
    kept = [function]

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return kept[0](*args)

    return wrapper


class Decorated(Meddling):
    """Under a decorator that keeps it where nobody looks."""

    @decorated_unknown
    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x + self.part(x))


def without_text() -> torch.nn.Module:
    namespace: dict[str, Any] = {"Decorated": Decorated}
    text = "class Typed(Decorated):\n    def forward(self, x):\n        return self.norm(x + self.part(x))\n"
    exec(compile(text, "<typed>", "exec"), namespace)
    module: torch.nn.Module = namespace["Typed"]()
    return module


def on_the_instance() -> torch.nn.Module:
    layer: Any = LlamaLayer()
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    module: torch.nn.Module = layer
    return module


@THOROUGH
def test_a_branch_between_a_sum_and_its_norm() -> None:
    """GPT2's, where an encoder's output is given: the norm is of another sum."""
    model, patched = twins(made("GPT2"))
    for _ in range(2):
        agree(model, patched, partial(loss_of, encoded=torch.randn(2, 3, WIDTH)))


@THOROUGH
def test_torchs_own_layers(joined: Counted) -> None:
    for norm_first in (True, False):
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, norm_first=norm_first, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        patched = copy.deepcopy(model)
        assert len(normforge.patch(patched).fused) == 2
        x = torch.randn(2, 3, WIDTH)
        same(model, patched, x, times=2)
        assert joined.counts()[0] > 0
        with torch.no_grad():
            same(model.eval(), patched.eval(), x, times=1)


@THOROUGH
def test_layers_under_fully_shard(mesh: DeviceMesh, joined: Counted) -> None:
    """Sums are joined within the layers, whose norms are gathered with them; and the layers stay sharded unpatched."""
    model, patched = twins(made("Llama"))
    for layer in patched.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(patched, mesh=mesh)
    for _ in range(3):
        losses = [loss_of(each, tokens()) for each in (model, patched)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            backward(loss)
        whole = {name: each.full_tensor() for name, each in gradients(patched).items() if isinstance(each, DTensor)}
        assert_near(whole, gradients(model), 1e-4, 1e-3)
    assert joined.counts() == (3 * 2, 3 * 2)
    normforge.unpatch(patched)
    assert [type(layer).__bases__ for layer in patched.layers] == [(FSDPModule, LlamaLayer)] * 2
    torch.testing.assert_close(loss_of(patched, tokens()), losses[0])
    assert joined.counts() == (0, 0)


@THOROUGH
def test_distributed_data_parallel(mesh: DeviceMesh, joined: Counted) -> None:
    model, patched = twins(made("Llama"))
    parallel = torch.nn.parallel.DistributedDataParallel(patched)
    for _ in range(3):
        agree(model, patched, lambda each, given: loss_of(model if each is model else parallel, given))
    assert joined.counts()[1] >= 3 * 2


def test_what_patch_did_is_a_table() -> None:
    model = Decoder(LlamaLayer, LlamaRMSNorm)
    model.extra = models.BiasedRMSNorm()
    text = str(normforge.patch(model))
    assert text.splitlines() == [
        "swapped  5 x LlamaRMSNorm   -> normforge.LlamaRMSNorm [layers.0.input_layernorm]",
        "fused    2 x LlamaLayer     sums with post_attention_layernorm; gradients of residuals with those of "
        "input_layernorm, post_attention_layernorm [layers.0]",
        "skipped  1 x BiasedRMSNorm  it lacks a 1-D weight as its only parameter, or a number under variance_epsilon "
        "or eps [extra]",
    ]
    assert str(normforge.patch(torch.nn.Identity())) == "nothing to swap or to fuse"
    assert "sums with post_attention_layernorm; gradients of residuals with those of input_layernorm" in repr(model)


def dropout_add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + functional.dropout(x, 0.1)


class PoolFormerLayer(torch.nn.Module):
    """A block whose norms no sum is fused with: transformers' of this name."""

    def __init__(self) -> None:
        super().__init__()
        self.before_norm, self.linear = torch.nn.GroupNorm(1, WIDTH), torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = x + self.linear(self.before_norm(x))
        return total


class ModulesToSaveWrapper(torch.nn.Module):
    """PEFT's around a module that is trained beside adapters."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = torch.nn.ModuleDict({"default": copy.deepcopy(module)})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.modules_to_save["default"](*args, **kwargs)


def wrapped_layer() -> torch.nn.Module:
    layer: Any = LlamaLayer()
    for name in ("input_layernorm", "post_attention_layernorm"):
        setattr(layer, name, ModulesToSaveWrapper(getattr(layer, name)))
    module: torch.nn.Module = layer
    return module


UNFUSED = {
    "no norm is called directly behind a sum, or with what is added later": meddling(
        "Unfollowed", "return (x + self.part(self.norm(x * 2))) * 2", first="x = x * 1"
    ),
    "its forward is decorated by Decorated.forward, which is not known": Decorated,
    "the text of its forward cannot be read (OSError: could not get source code)": without_text,
    "its forward is overridden on the instance": on_the_instance,
    "it adds by add(), and patch sees sums written as a + b": meddling(
        "Adding", "return torch.add(x, self.part(self.norm(x)))", first="x = x * 1"
    ),
    # As Bloom's and Falcon's.
    "it adds by dropout_add(), and patch sees sums written as a + b": meddling(
        "AddsInAFunction", "return dropout_add(self.part(self.norm(x)), x)", first="x = x * 1"
    ),
    "before_norm is a GroupNorm, and a sum is fused with a plain LayerNorm or RMSNorm": PoolFormerLayer,
    "input_layernorm is a ModulesToSaveWrapper around norms, and a sum is fused with a norm that the block itself "
    "holds; take the wrapper away before patch (PEFT: merge_and_unload)": wrapped_layer,
}


@pytest.mark.parametrize("reason", UNFUSED)
def test_what_is_left_alone_is_told(reason: str) -> None:
    model = torch.nn.ModuleList([UNFUSED[reason]()])
    cls = type(model[0])
    done = normforge.patch(model)
    assert done.swapped
    assert done.fused == ()
    assert [(each.path, each.cls, each.reason) for each in done.unfused] == [("0", cls, reason)]
    assert type(model[0]) is cls


@pytest.mark.parametrize(
    ("base", "returned", "fused"),
    [
        # The modulation is fused, and no norm is called directly behind the sum.
        (Meddling, "x + self.part(self.norm(x) * (1 + scale) + shift)", ["0"]),
        (PoolFormerLayer, "self.before_norm(self.linear(x).sin()) + self.linear(x)", []),
    ],
)
def test_what_is_not_reported_as_unfused(base: Any, returned: str, fused: list[str]) -> None:
    block = written(base, "Block", "def forward(self, x, scale, shift):", f"return {returned}", names=globals())()
    done = normforge.patch(torch.nn.Sequential(block))
    assert [each.path for each in done.fused] == fused
    assert done.unfused == ()
