"""Checks of variants: each must be closer to torch's model than that model with its weights nudged.

A nudge moves every weight to a neighbour in bf16, up or down at random. What that does to the loss and to each
parameter's gradient is what rounding does to this model; a variant may be off by as much as the largest of some nudges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ..oracle import WrongOutputError

# A gradient that is nothing but roundings, as of a key's bias, is as far off in the one as in the other.
_NUDGES = 4
# The change that another order of sums makes to the loss, in fp32.
_ORDER_OF_SUMS = 2.0**-20
_DTYPE = torch.bfloat16


class Outcome(NamedTuple):
    """The result of a step: its loss if there is one, and tensors by name, gradients or logits."""

    loss: float | None
    tensors: Mapping[str, torch.Tensor | None]


@dataclass(frozen=True)
class Yardstick:
    """The result of torch's model, and how far nudges move it.

    Attributes:
        expected: of the model as it is.
        loss: the largest distance of a nudged model's loss.
        distances: the largest distance of each tensor, over the norm of the tensor.
    """

    expected: Outcome
    loss: float
    distances: dict[str, float]


class Off(NamedTuple):
    """The largest distance over a nudge's, and of what: a parameter's gradient, or the loss."""

    ratio: float
    where: str


def make_yardstick(run: Callable[[], Outcome], model: nn.Module) -> Yardstick:
    """Run a step of torch's model, and of the model nudged; its weights are as before then."""
    first = run()
    kept = {name: None if tensor is None else tensor.clone() for name, tensor in first.tensors.items()}
    expected = Outcome(first.loss, kept)
    loss, distances = 0.0, dict.fromkeys(kept, 0.0)
    for seed in range(_NUDGES):
        with nudged(model, seed):
            outcome = run()
        if expected.loss is not None and outcome.loss is not None:
            loss = max(loss, abs(outcome.loss - expected.loss))
        for name, want in kept.items():
            distances[name] = max(distances[name], _distance(outcome.tensors[name], want))
    return Yardstick(expected, max(loss, abs(expected.loss or 0.0) * _ORDER_OF_SUMS), distances)


def check(outcome: Outcome, yardstick: Yardstick) -> Off:
    """Hold what a variant's step gave against torch's.

    Raises:
        WrongOutputError: something is further off than a nudge of the weights moves it, or is missing.
    """
    expected = yardstick.expected
    found: list[Off] = []
    if expected.loss is not None:
        off = abs((float("nan") if outcome.loss is None else outcome.loss) - expected.loss)
        found.append(Off(off / yardstick.loss, "loss"))
    for name, want in expected.tensors.items():
        distance, nudge = _distance(outcome.tensors[name], want), yardstick.distances[name]
        found.append(Off(distance / nudge if nudge else (0.0 if distance == 0 else float("inf")), name))
    # A NaN is no order; it comes first.
    worst = max(found, key=lambda off: float("inf") if off.ratio != off.ratio else off.ratio)
    if not worst.ratio <= 1:
        raise WrongOutputError(
            f"{worst.where} is {worst.ratio:.3g} times as far off as a nudge of the weights moves it"
        )
    return worst


@contextmanager
def nudged(model: nn.Module, seed: int) -> Iterator[None]:
    """Move every weight of a model to a neighbour in bf16, for a while."""
    parameters = list(model.parameters())
    saved = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator(parameters[0].device).manual_seed(seed)
    try:
        with torch.no_grad():
            for parameter in parameters:
                rounded = parameter.to(_DTYPE)
                away = torch.rand(parameter.shape, generator=generator, device=parameter.device) < 0.5
                neighbour = _neighbour(rounded, away)
                parameter.add_((neighbour.float() - rounded.float()).to(parameter.dtype))
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(parameters, saved, strict=True):
                parameter.copy_(before)


def _neighbour(values: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
    """Return the next 16-bit values, away from zero or towards zero; zero has only the former."""
    bits = values.view(torch.int16)
    away = away | (bits & 0x7FFF == 0)
    return (bits + away.to(torch.int16) * 2 - 1).view(values.dtype)


def _distance(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    if got is None or want is None:
        return 0.0 if got is want else float("nan")
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("nan")
    scale = want.float().norm()
    return float((got.float() - want.float()).norm() / scale.clamp(min=torch.finfo(torch.float32).tiny))
