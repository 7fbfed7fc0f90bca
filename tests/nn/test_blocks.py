"""`patch` fuses the adds of blocks with the norms about them: the same numbers, and all that is attached goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import normforge

from ..calling import backward, each_device
from ..thorough import THOROUGH
from .decoders import FAMILIES, VOCABULARY, Decoder, LlamaLayer, made
from .models import WIDTH, Counted, LlamaRMSNorm, assert_near, copies, twins

# Interpreted kernels take a tenth of a second each.
each_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in ("Llama", "torch") else [THOROUGH]) for name in FAMILIES]
)

# By family, the norms of each layer that are computed together with the sum of their result.
ADDED: dict[str, tuple[str, ...]] = {
    "Gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "GPT2": ("ln_cross",),
}

pytestmark = pytest.mark.usefixtures("fused")


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, given: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    given = given.to(next(model.parameters()).device)
    return functional.cross_entropy(model(given, **kwargs).float().flatten(0, 1), given.roll(1).flatten())


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    given = ((name, each.grad) for name, each in model.named_parameters() if each.grad is not None)
    found = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in given}
    model.zero_grad()
    return found


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


def calls_of(family: str) -> dict[str, int]:
    """Return how often a model of a family, of two layers, fuses what in a forward pass."""
    # GPT2's norm of its other branch is not called. Gemma's block normalises the first of its sums again.
    added, again = 0 if family == "GPT2" else len(ADDED.get(family, ())), int(family == "Gemma2")
    counts = {"sum_before": len(FAMILIES[family][1]) - again, "sum_behind": added - again, "norm_behind": again}
    return {name: 2 * count for name, count in counts.items() if count}


@each_family
@each_device
def test_logits_loss_and_gradients_of_a_fused_model(family: str, device: str, fused: Counted) -> None:
    model = made(family, device)
    patched = copy.deepcopy(model)
    done = normforge.patch(patched)
    _, norms, inputs = FAMILIES[family]
    added = ADDED.get(family, ())
    assert [(each.path, each.cls, each.norms, each.gradients, each.added) for each in done.fused] == [
        (f"layers.{index}", type(layer), norms, inputs, added) for index, layer in enumerate(model.layers)
    ]
    assert not done.unfused
    assert isinstance(patched.layers[0], type(model.layers[0]))
    called = [name for name in inputs if name not in norms and name != "ln_cross"]
    for each in (patched, patched, *(copies(patched) if added else ())):
        agree(model, each)
        assert fused.counts() == calls_of(family) | ({"input_added": 2 * len(called)} if called else {})
    normforge.unpatch(patched)
    assert type(patched.layers[0]) is type(model.layers[0])


def with_dropout() -> Any:
    return Decoder(lambda: LlamaLayer(p=0.5), LlamaRMSNorm)


def seeded(model: Any, given: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return loss_of(model, given)


def hooked(model: Any, given: torch.Tensor) -> torch.Tensor:
    """Change the gradients of hidden states: of their norms, and of the residual path behind them."""
    hidden: list[torch.Tensor] = []
    loss = loss_of(model, given, hidden=hidden)
    for each in hidden[1:]:
        each.register_hook(lambda gradient: 3 * gradient)  # type: ignore[no-untyped-call]  # torch declares no types
    return loss


def with_autocast(model: Any, given: torch.Tensor) -> torch.Tensor:
    """Of fp32 weights and residuals, and branches in bf16."""
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, given)


CLOSE = (1.3e-6, 1e-4)
RUNS: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], torch.Tensor], tuple[float, float]]] = {
    "dropout, which draws what it drew": (with_dropout, seeded, CLOSE),
    "dropout in evaluation": (with_dropout, lambda model, given: loss_of(model.eval(), given), CLOSE),
    "hooks on hidden states": (partial(made, "Llama"), hooked, CLOSE),
    **{f"autocast, {name}": (partial(made, name), with_autocast, (1e-2, 5e-2)) for name in ("Llama", "torch")},
    # The norm is of another sum, that of a branch between.
    "an encoder's output": (partial(made, "GPT2"), partial(loss_of, encoded=torch.randn(2, 3, WIDTH)), CLOSE),
}


@THOROUGH
@pytest.mark.parametrize("run", RUNS)
def test_a_run(run: str, fused: Counted) -> None:
    make, runs, tolerances = RUNS[run]
    model, patched = twins(make())
    for _ in range(2):
        agree(model, patched, runs, tolerances)
        assert fused.counts()["sum_before"] > 0


@THOROUGH
@pytest.mark.parametrize(
    ("layers", "reentrant"), [((0, 1), False), ((0, 1), True), ((0,), False), ((1,), False), ((1,), True)], ids=str
)
def test_gradient_checkpointing(layers: tuple[int, ...], reentrant: bool, fused: Counted) -> None:
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
    assert fused.counts()["input_added"] >= 6 * 2


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_weights_of_norms_that_lie_apart(family: str) -> None:
    model, patched = twins(made(family))
    for each in (model, patched):
        for module in each.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 1:
                module.weight = torch.nn.Parameter(weight.detach().repeat_interleave(2)[::2])
    for _ in range(2):
        agree(model, patched)


def test_a_sum_has_the_layout_that_torch_gives_it() -> None:
    layer, patched = twins(LlamaLayer())
    channels_first = torch.randn(2, WIDTH, 3)
    for _ in range(2):
        wanted, y = (each(channels_first.mT) for each in (layer, patched))
        assert y.stride() == wanted.stride() != torch.empty(y.shape).stride()
        torch.testing.assert_close(y, wanted)


@THOROUGH
def test_torchs_own_layers(fused: Counted) -> None:
    for norm_first in (True, False):
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, norm_first=norm_first, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        patched = copy.deepcopy(model)
        assert len(normforge.patch(patched).fused) == 2
        x = torch.randn(2, 3, WIDTH)
        for _ in range(2):
            torch.testing.assert_close(patched(x), model(x))
        assert fused.counts()["sum_before"] > 0
        with torch.no_grad():
            torch.testing.assert_close(patched.eval()(x), model.eval()(x))


def test_layers_under_fully_shard(mesh: DeviceMesh, fused: Counted) -> None:
    """Sums are joined within the layers, whose norms are gathered with them; and the layers stay sharded unpatched."""
    model, patched = twins(made("Llama"))
    for layer in patched.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(patched, mesh=mesh)
    for _ in range(3):
        agree(model, patched)
        assert fused.counts() == {"sum_before": 2, "input_added": 2}
    normforge.unpatch(patched)
    # Layers that shared a class do so still.
    assert type(patched.layers[0]) is type(patched.layers[1])
    assert type(patched.layers[0]).__bases__ == (FSDPModule, LlamaLayer)
    torch.testing.assert_close(loss_of(patched, tokens()), loss_of(model, tokens()))
    assert fused.counts() == {}


@THOROUGH
def test_distributed_data_parallel(mesh: DeviceMesh, fused: Counted) -> None:
    model, patched = twins(made("Llama"))
    parallel = torch.nn.parallel.DistributedDataParallel(patched)
    for _ in range(3):
        agree(model, patched, lambda each, given: loss_of(model if each is model else parallel, given))
        assert fused.counts()["input_added"] >= 2
