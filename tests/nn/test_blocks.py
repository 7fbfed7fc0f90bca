"""`patch` fuses the adds of blocks with the norms behind them: the same numbers, and all that is attached goes on."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import normforge
from normforge.calls.recorded_sum import add_ahead
from normforge.nn import sums

from ..thorough import THOROUGH
from . import models
from .decoders import FAMILIES, VOCABULARY, Decoder, LlamaLayer, made
from .models import WIDTH, LlamaRMSNorm
from .oracle import backward, each_device

# Interpreted kernels take a tenth of a second each.
each_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "Llama" else [THOROUGH]) for name in FAMILIES]
)
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join sums as small as these are."""
    monkeypatch.setattr(sums, "LEAST_ELEMENTS", 0)


def tokens(device: str = "cpu", batch: int = 2, length: int = 3) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


def loss_of(model: Any, given: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return functional.cross_entropy(model(given, **kwargs).float().flatten(0, 1), given.roll(1).flatten())


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def assert_near(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        size = max(gradient.abs().max().item(), 1e-3)
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=tolerance * size, msg=name)


class Joined:
    """How many sums were made together with a norm, and how many of these norms were taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.taken = 0
        taken = sums._Waiting.taken

        def counted_add(*args: Any) -> Any:
            result = add_ahead(*args)
            self.made += result is not None
            return result

        def counted_taken(*args: Any) -> Any:
            result = taken(*args)
            self.taken += result is not None
            return result

        monkeypatch.setattr(sums, "add_ahead", counted_add)
        monkeypatch.setattr(sums._Waiting, "taken", counted_taken)

    def counts(self) -> tuple[int, int]:
        """Since this was called last."""
        found, self.made, self.taken = (self.made, self.taken), 0, 0
        return found


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Joined:
    return Joined(monkeypatch)


def test_a_small_sum_is_added_alone(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Llama")
    normforge.patch(model)
    given = tokens()
    # A layer has two sums; what follows its second is learned in the first call.
    elements = given.numel() * WIDTH
    for least, expected in ((0, 2), (elements, 4), (elements + 1, 0)):
        monkeypatch.setattr(sums, "LEAST_ELEMENTS", least)
        model(given)
        assert joined.counts() == (expected, expected)
    monkeypatch.setattr(sums, "LEAST_ELEMENTS", 0)
    with normforge.batch_invariant():
        # So that rows do not differ by how many there are.
        model(given)
        assert joined.counts() == (0, 0)


@each_family
@each_device
def test_logits_loss_and_gradients_of_a_fused_model(family: str, device: str, joined: Joined) -> None:
    model = made(family, device=device)
    patched = copy.deepcopy(model)
    done = normforge.patch(patched)
    norms = FAMILIES[family][1]
    assert [(each.path, each.cls, each.norms) for each in done.fused] == [
        (f"layers.{index}", type(layer), norms) for index, layer in enumerate(model.layers)
    ]
    assert not done.unfused
    assert isinstance(patched.layers[0], type(model.layers[0]))
    given = tokens(device)
    learned = len([norm for norm in norms if norm is None])
    for step in range(3):
        wanted = loss_of(model, given)
        actual = loss_of(patched, given)
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
        backward(wanted)
        backward(actual)
        assert_near(gradients(patched), gradients(model), 1e-4)
        # A sum that leaves its block is joined from the second call on.
        expected = 2 * (len(norms) - (learned if step == 0 else 0))
        assert joined.counts() == (expected, expected)
    assert not sums.waiting_sums


@THOROUGH
@every_family
def test_a_nudge_by_one_rounding_is_all_there_is_in_bf16(family: str, joined: Joined) -> None:
    """The distance from fp64 is that of the unfused model, give or take."""
    exact = made(family, torch.float64)
    model = made(family, torch.bfloat16)
    with torch.no_grad():
        for wide, narrow in zip(exact.parameters(), model.parameters(), strict=True):
            wide.copy_(narrow)
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    for each in (exact, model, patched, patched):
        each.zero_grad()
        backward(loss_of(each, tokens()))
    assert joined.counts()[1] > 0
    wanted, unfused, fused = (gradients(each) for each in (exact, model, patched))
    for name, gradient in wanted.items():
        size = gradient.norm() + 1e-3
        # The last of patched's two steps; both added up.
        off = (fused[name].double() - gradient).norm() / size
        assert off <= 2 * (unfused[name].double() - gradient).norm() / size + 0.02, name


@THOROUGH
@every_family
def test_greedy_decoding_with_a_cache(family: str, joined: Joined) -> None:
    model = made(family).eval()
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            wanted = model.generate(tokens(), 4)
            joined.counts()
            assert torch.equal(patched.generate(tokens(), 4), wanted)
            assert joined.counts()[1] >= 2 * 4


@THOROUGH
def test_a_hidden_state_has_the_gradient_that_it_has_unfused() -> None:
    """Of all that is computed from it: its norm, and the residual path behind it."""
    model = made("Llama")
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    loss_of(patched, tokens())
    found = []
    for each in (model, patched):
        hidden: list[torch.Tensor] = []
        loss = loss_of(each, tokens(), hidden=hidden)
        hidden[1].retain_grad()
        seen: list[torch.Tensor] = []
        hidden[2].register_hook(seen.append)  # type: ignore[no-untyped-call]  # torch declares no types for it
        by_autograd = torch.autograd.grad(loss, hidden, retain_graph=True)
        backward(loss)
        found.append([hidden[1].grad, *seen, *by_autograd])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


@THOROUGH
def test_a_hook_on_a_hidden_state_may_change_its_gradient() -> None:
    model = made("Llama")
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    loss_of(patched, tokens())
    for each in (model, patched):
        hidden: list[torch.Tensor] = []
        loss = loss_of(each, tokens(), hidden=hidden)
        hidden[1].register_hook(lambda gradient: 3 * gradient)  # type: ignore[no-untyped-call]  # likewise
        backward(loss)
    assert_near(gradients(patched), gradients(model), 1e-4)


def written(module: torch.nn.Module, inputs: Any, output: Any) -> None:
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
    "writing to the output": lambda module, seen: module.register_forward_hook(written),
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
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    backward(loss_of(patched, tokens()))
    patched.zero_grad()
    found = []
    for each in (model, patched):
        seen: list[Any] = []
        HOOKS[kind](each.get_submodule(path), seen)
        loss = loss_of(each, tokens())
        backward(loss)
        found.append([loss, *[one for one in seen if isinstance(one, torch.Tensor)]])
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert_near(gradients(patched), gradients(model), 1e-4)


@THOROUGH
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
def test_a_hook_that_writes_to_a_hidden_state_without_gradients(mode: Callable[[], Any]) -> None:
    """As activation steering does: the norm that was computed ahead is of what the state was."""
    model = made("Llama").eval()
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    with mode():
        patched(tokens())
        for each in (model, patched):
            each.layers[0].register_forward_hook(written)
            each.layers[1].post_attention_layernorm.register_forward_pre_hook(lambda m, inputs: inputs[0].add_(1))
        for _ in range(3):
            torch.testing.assert_close(patched(tokens()), model(tokens()))


@THOROUGH
def test_dropout_draws_what_it_drew(joined: Joined) -> None:
    torch.manual_seed(0)
    model = Decoder(lambda: LlamaLayer(p=0.5), LlamaRMSNorm)
    patched = copy.deepcopy(model)
    assert len(normforge.patch(patched).fused) == 2
    for training in (True, False):
        losses = []
        for each in (model, patched):
            each.train(training)
            torch.manual_seed(3)
            losses.append(loss_of(each, tokens()))
            backward(losses[-1])
        torch.testing.assert_close(*losses)
        assert_near(gradients(patched), gradients(model), 1e-4)
    assert joined.counts()[1] > 0


@THOROUGH
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, joined: Joined) -> None:
    model = made("Llama")
    for layer in model.layers:
        layer.gradient_checkpointing, layer.use_reentrant = True, reentrant
    patched = copy.deepcopy(model)
    assert len(normforge.patch(patched).fused) == 2
    for step in range(6):
        if step == 3:  # What is learned outside a checkpoint is not used in one.
            with torch.no_grad():
                patched.eval()(tokens())
            patched.train()
        for each in (model, patched):
            backward(loss_of(each, tokens()))
        assert_near(gradients(patched), gradients(model), 1e-4)
    assert joined.counts()[1] >= 6 * 2


@THOROUGH
def test_one_layer_of_two_checkpointed(joined: Joined) -> None:
    for which in (0, 1):
        model = made("Llama")
        model.layers[which].gradient_checkpointing = True
        patched = copy.deepcopy(model)
        normforge.patch(patched)
        for _ in range(4):
            for each in (model, patched):
                backward(loss_of(each, tokens()))
            assert_near(gradients(patched), gradients(model), 1e-4)


@THOROUGH
def test_a_last_layer_recomputed_by_a_reentrant_checkpoint_hands_its_norm_the_gradient() -> None:
    """There the sum is made without gradients, and its norm is called with them."""
    model = made("Llama")
    model.layers[1].gradient_checkpointing = model.layers[1].use_reentrant = True
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    for _ in range(4):
        for each in (model, patched):
            backward(loss_of(each, tokens()))
        assert_near(gradients(patched), gradients(model), 1e-4)


@THOROUGH
def test_saved_tensors_offloaded() -> None:
    model = made("Llama")
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu():
            losses = [loss_of(each, tokens()) for each in (model, patched)]
        for loss in losses:
            backward(loss)
        assert_near(gradients(patched), gradients(model), 1e-4)


@THOROUGH
@every_family
def test_a_compiled_model_is_one_graph(family: str) -> None:
    model = made(family)
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    wanted = loss_of(model, tokens())
    compiled = torch.compile(patched, fullgraph=True, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(loss_of(compiled, tokens()), wanted)
        # Eager calls in between change nothing of the graph.
        with torch.compiler.set_stance("force_eager"):
            torch.testing.assert_close(loss_of(patched, tokens()), wanted)


@THOROUGH
def test_mixed_types_under_autocast() -> None:
    """fp32 weights and residuals, branches in bf16."""
    model = made("Llama")
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    for _ in range(3):
        found = []
        for each in (model, patched):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(each, tokens())
            backward(loss)
            found.append(loss)
        torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)
        assert_near(gradients(patched), gradients(model), 5e-2)


@THOROUGH
def test_sums_of_other_types_and_shapes() -> None:
    """What the kernel does not add as torch does is added by torch."""

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = LlamaRMSNorm(WIDTH)
            self.part = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, branch: Any = None) -> Any:
            total = x + (self.part(x) if branch is None else branch)
            return self.norm(total), total

    module = Odd()
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


@THOROUGH
def test_layers_called_singly_sliced_and_replaced(joined: Joined) -> None:
    model = made("Llama")
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    given = tokens()
    for _ in range(2):
        torch.testing.assert_close(patched(given), model(given))
    x = torch.randn(1, 3, WIDTH)
    for _ in range(5):
        torch.testing.assert_close(patched.layers[0](x), model.layers[0](x))
    for each in (model, patched):
        each.layers = each.layers[1:]
    for _ in range(5):
        torch.testing.assert_close(patched(given), model(given))
    new = made("Llama").layers[1]
    for each in (model, patched):
        each.layers.append(copy.deepcopy(new))
        each.norm = copy.deepcopy(model.layers[0].input_layernorm)
    for _ in range(5):
        torch.testing.assert_close(patched(given), model(given))
    joined.counts()
    patched(given)
    assert joined.counts() == (1, 1)
    # The new ones are fused when they are patched too.
    assert [each.path for each in normforge.patch(patched).fused] == ["layers.1"]
    for _ in range(2):
        torch.testing.assert_close(patched(given), model(given))
    joined.counts()
    patched(given)
    assert joined.counts() == (4, 4)


@THOROUGH
def test_a_sum_that_is_held_holds_no_more_than_itself() -> None:
    """Nothing of a forward pass stays behind it, whether its norms were called or not."""
    patched = made("Llama")
    normforge.patch(patched)
    given = tokens()
    # Tensors of a test before this one may still live, in the traceback of an error that it expected.
    before = set(sums.waiting_sums)
    patched(given)
    patched.layers[0](torch.randn(1, 3, WIDTH, requires_grad=True))
    assert set(sums.waiting_sums) <= before
    patched.layers[1].register_forward_pre_hook(out_of_memory)
    with pytest.raises(MemoryError):
        patched(given)
    gc.collect()
    assert set(sums.waiting_sums) <= before


def out_of_memory(*_: Any) -> None:
    raise MemoryError


@THOROUGH
def test_copies_and_pickles_are_fused_and_can_be_unpatched(joined: Joined) -> None:
    model = made("Llama")
    normforge.patch(model)
    wanted = model(tokens())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False), copy.deepcopy(model.layers)[0]):
        layer = other.layers[0] if isinstance(other, Decoder) else other
        assert type(layer) is type(model.layers[0])
        if isinstance(other, Decoder):
            joined.counts()
            assert [torch.equal(other(tokens()), wanted) for _ in range(2)] == [True, True]
            assert joined.counts() == (2 + 4, 2 + 4)
            assert list(other.state_dict()) == list(model.state_dict())
        normforge.unpatch(other)
        assert type(layer) is LlamaLayer
        assert "_normforge_sites" not in vars(layer)


def test_unpatch_gives_back_what_there_was() -> None:
    for family in FAMILIES:
        model = made(family)
        classes = {path: type(module) for path, module in model.named_modules()}
        attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
        state, parameters = list(model.state_dict()), list(model.parameters())
        normforge.patch(model)
        assert list(model.state_dict()) == state
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        assert normforge.patch(model) == normforge.Patch((), ())
        normforge.unpatch(model)
        assert {path: type(module) for path, module in model.named_modules()} == classes
        assert {path: dict(vars(module)) for path, module in model.named_modules()} == attributes
        assert normforge.unpatch(model) == ()


@THOROUGH
def test_fusing_can_be_left_out_and_added(joined: Joined) -> None:
    model = made("Llama")
    done = normforge.patch(model, fuse=False)
    assert (done.fused, done.unfused) == ((), ())
    assert type(model.layers[0]) is LlamaLayer
    model(tokens())
    assert joined.counts() == (0, 0)
    done = normforge.patch(model)
    assert not done.swapped
    assert len(done.fused) == 2
    model(tokens())
    assert joined.counts() == (2, 2)
    normforge.unpatch(model)
    assert type(model.norm) is LlamaRMSNorm


class Overridden(LlamaLayer):
    """Adds by a function of its own."""

    def forward(self, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> torch.Tensor:
        hidden_states = torch.add(hidden_states, self.self_attn(self.input_layernorm(hidden_states))[0])
        return torch.add(hidden_states, self.mlp(self.post_attention_layernorm(hidden_states)))


class Failing(LlamaLayer):
    """Needs what nobody can guess."""

    def forward(self, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> Any:
        return hidden_states + self.mlp(self.input_layernorm(hidden_states)) * kwargs["scale"]


class Unfollowed(LlamaLayer):
    """Changes its sums before they are used."""

    def forward(self, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> Any:
        hidden_states = (hidden_states + self.mlp(self.input_layernorm(hidden_states))) * 2
        return (hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))) * 2


def decorated_unknown(function: Callable[..., Any]) -> Callable[..., Any]:
    kept = [function]

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return kept[0](*args)

    return wrapper


class Decorated(torch.nn.Module):
    """Under a decorator that keeps it where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.part = torch.nn.Linear(WIDTH, WIDTH)

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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Failing, r"it runs as before, since patch cannot see .* its forward raised KeyError: 'scale'"),
        (Unfollowed, "no norm is called with a sum of its forward, and none is returned"),
        (Decorated, "its forward is decorated by Decorated.forward, which is not known"),
        (without_text, "the text of its forward cannot be read"),
        (on_the_instance, "its forward is overridden on the instance"),
    ],
)
def test_what_is_left_alone_is_told(make: Callable[[], torch.nn.Module], reason: str) -> None:
    model = torch.nn.ModuleList([make()])
    cls = type(model[0])
    (unfused,) = normforge.patch(model).unfused
    assert (unfused.path, unfused.cls) == ("0", cls)
    assert re.search(reason, unfused.reason), unfused.reason
    assert type(model[0]) is cls


def test_a_block_that_adds_by_calls_is_no_block() -> None:
    model = torch.nn.ModuleList([Overridden()])
    done = normforge.patch(model)
    assert (done.fused, done.unfused) == ((), ())


def test_looking_at_a_block_leaves_no_trace() -> None:
    model = made("Llama")
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: pytest.fail("a module was called"))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    normforge.patch(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_a_model_on_meta_is_fused() -> None:
    with torch.device("meta"):
        model = Decoder(LlamaLayer, LlamaRMSNorm)
    assert len(normforge.patch(model).fused) == 2


@THOROUGH
def test_a_norm_behind_a_sum_that_changes_is_learned_anew(joined: Joined) -> None:
    """GPT2's, where an encoder's output is given: another norm than the one that was found."""
    model = made("GPT2")
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    encoded = torch.randn(2, 3, WIDTH)
    for _ in range(8):
        torch.testing.assert_close(patched(tokens(), encoded=encoded), model(tokens(), encoded=encoded))
    joined.counts()
    patched(tokens(), encoded=encoded)
    # The sum before the encoder's part is not one of those that were found followed by a norm.
    found = joined.counts()
    assert found[0] == found[1] > 0


@THOROUGH
def test_torchs_own_layers(joined: Joined) -> None:
    for norm_first in (True, False):
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, norm_first=norm_first, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        patched = copy.deepcopy(model)
        assert len(normforge.patch(patched).fused) == 2
        x = torch.randn(2, 3, WIDTH)
        for _ in range(2):
            torch.testing.assert_close(patched(x), model(x))
        assert joined.counts()[1] > 0
        for each in (model, patched):
            each.eval()
        with torch.no_grad():
            torch.testing.assert_close(patched(x), model(x))


@THOROUGH
def test_layers_under_fully_shard(mesh: DeviceMesh, joined: Joined) -> None:
    """Sums are joined within the layers, whose norms are gathered with them; and the layers stay sharded unpatched."""
    model = made("Llama")
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    for layer in patched.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(patched, mesh=mesh)
    for _ in range(3):
        losses = [loss_of(each, tokens()) for each in (model, patched)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            backward(loss)
        whole = {name: each.full_tensor() for name, each in gradients(patched).items() if isinstance(each, DTensor)}
        assert_near(whole, gradients(model), 1e-4)
    made_ahead, taken = joined.counts()
    assert made_ahead == taken >= 3 * 2
    normforge.unpatch(patched)
    assert [type(layer).__bases__ for layer in patched.layers] == [(FSDPModule, LlamaLayer)] * 2
    torch.testing.assert_close(loss_of(patched, tokens()), losses[0])
    assert joined.counts() == (0, 0)


@THOROUGH
def test_distributed_data_parallel(mesh: DeviceMesh, joined: Joined) -> None:
    model = made("Llama")
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    parallel = torch.nn.parallel.DistributedDataParallel(patched)
    for _ in range(3):
        for each in (model, parallel):
            backward(loss_of(each, tokens()))
        assert_near(gradients(patched), gradients(model), 1e-4)
    assert joined.counts()[1] >= 3 * 2


def test_what_patch_did_is_a_table() -> None:
    model = Decoder(LlamaLayer, LlamaRMSNorm)
    model.extra = models.BiasedRMSNorm()
    text = str(normforge.patch(model))
    assert text.splitlines() == [
        "swapped  5 x LlamaRMSNorm   -> normforge.LlamaRMSNorm [layers.0.input_layernorm]",
        "fused    2 x LlamaLayer     sums with post_attention_layernorm, the norm behind the block [layers.0]",
        "skipped  1 x BiasedRMSNorm  it lacks a 1-D weight as its only parameter, or a number under variance_epsilon "
        "or eps [extra]",
    ]
    assert str(normforge.patch(torch.nn.Identity())) == "nothing to swap or to fuse"
    assert "sum -> post_attention_layernorm, sum -> the norm behind it" in repr(model)


def dropout_add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + functional.dropout(x, 0.1)


class AddsInAFunction(torch.nn.Module):
    """A block that adds where patch does not look, as Bloom's and Falcon's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout_add(self.linear(self.norm(x)), x)


def test_a_block_that_adds_in_a_function_is_reported() -> None:
    done = normforge.patch(torch.nn.Sequential(AddsInAFunction()))
    assert [each.reason for each in done.unfused] == ["it adds by dropout_add(), and patch sees sums written as a + b"]


class ModulatesAndFails(torch.nn.Module):
    """A block whose modulation is fused, and whose sums cannot be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, conditions: dict[str, torch.Tensor]) -> torch.Tensor:
        h = self.norm(x) * (1 + conditions["scale"]) + conditions["shift"]
        return x + self.linear(h)


def test_a_block_is_fused_or_unfused_and_not_both() -> None:
    done = normforge.patch(torch.nn.Sequential(ModulatesAndFails()))
    assert [each.path for each in done.fused] == ["0"]
    assert done.unfused == ()
