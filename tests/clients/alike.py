"""Hold a patched model against the same model unpatched: outputs, gradients, state dict, classes, and unpatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch

import normforge

Run = Callable[[torch.nn.Module], Any]


def agree(model: torch.nn.Module, run: Run, left: frozenset[str] = frozenset()) -> None:
    """Patch a model and unpatch it again; assert that it computes the same, and that a twin beside it does not change.

    Args:
        model: an unpatched model; its parameters are moved away from 1 and 0.
        run: call a model and return its outputs: tensors, or sequences of them. A first one without dimensions is the
            loss; else the loss is the mean of all squares.
        left: the classes of norms that `patch` reports and leaves alone, all of them.
    """
    move(model)
    # Some models change at their first call: BigBird takes another class of attention.
    before = trained(model, run)
    classes, state, twin = classes_of(model), deepcopy(model.state_dict()), deepcopy(model)

    def assert_untouched(model: torch.nn.Module) -> None:
        assert classes_of(model) == classes
        for ours, theirs in zip(trained(model, run), before, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())

    report = normforge.patch(model)
    assert report.swapped, f"patch took no norm: {report.skipped}"
    found = {skipped.cls.__name__ for skipped in report.skipped}
    assert found == left, f"patch left {sorted(found)} alone; the table has {sorted(left)}"
    for ours, theirs in zip(trained(model, run), before, strict=True):
        close_all(ours, theirs)
    assert_untouched(twin)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items() if torch.is_tensor(value))
    model.load_state_dict(state)
    normforge.unpatch(model)
    assert_untouched(model)


def move(model: torch.nn.Module) -> None:
    """Add a little to each parameter: the 1 and 0 that norms start with hide what is left out or added twice."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)


def trained(model: torch.nn.Module, run: Run) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the outputs of a model by their places, and the gradients of its parameters by their names."""
    # Noise that a forward draws is the same at every call.
    torch.manual_seed(1)
    outputs = list(tensors(run(model)))
    losses = [output for output in outputs[:1] if not output.dim()]
    losses = losses or [output.square().mean() for output in outputs if output.requires_grad]
    sum(losses).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {str(place): output.detach() for place, output in enumerate(outputs)}, gradients


def tensors(output: Any) -> Iterator[Any]:
    """Yield every floating-point tensor of an output."""
    if isinstance(output, torch.Tensor):
        yield from [output] * output.is_floating_point()
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from tensors(part)


def classes_of(model: torch.nn.Module) -> list[tuple[str, type]]:
    """Return each module's name and class."""
    return [(name, type(module)) for name, module in model.named_modules()]


def close_all(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Assert that tensors differ by the rounding of fp32 through a few layers; a wrong norm is off by 1e-1."""
    assert ours.keys() == theirs.keys()
    # A gradient that is zero but for rounding, as of a bias before a softmax, is measured by the other gradients.
    floor = min(1.0, max((0.1 * tensor.abs().max().item() for tensor in theirs.values()), default=1.0))
    for name, tensor in theirs.items():
        scale = max(floor, tensor.abs().max().item())
        torch.testing.assert_close(ours[name], tensor, rtol=2e-5, atol=2e-5 * scale, msg=f"{name}: {{}}".format)


def train_alike(trainer_of: Callable[[bool], Any], steps: int) -> torch.Tensor:
    """Train by transformers' trainers, for an unpatched model and a patched one; return the losses, which agree."""
    losses = []
    for patches in (False, True):
        trainer = trainer_of(patches)
        trainer.train()
        losses.append(torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
    assert len(losses[0]) == steps
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    return losses[1]
