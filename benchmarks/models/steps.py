"""Timed steps of a model: a training step and a decode step, eager or compiled.

A training step drops the gradients of the step before, runs the model and its loss, and runs the backward pass. There
is no optimiser, no clipping and no dropout in it. A decode step runs the model on one token of each of some sequences,
with transformers' static cache, without gradients; the cache is filled by torch's model, and grows step by step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import nn

from .check import Outcome
from .names import AUTOCAST, COMPILE, DECODE, EAGER, GRAPHS, TRAIN
from .specs import Decoding, Shape, Spec

LOGITS = "the logits"

# In the interpreter nothing is generated; that a model can be traced is what is tried there.
_BACKEND = {"cuda": "inductor", "cpu": "aot_eager"}

# Steps of one variant before it is the next one's turn; one more comes first and does not count.
_TURN = {TRAIN: 4, DECODE: 16}
_CPU_TURN = 1


class Step(Protocol):
    """A step of one model's variants."""

    def begin(self, model: nn.Module) -> None:
        """Make a variant ready for a number of steps."""

    def run(self, model: Callable[..., Any]) -> Outcome:
        """Do a step with a variant, or its compiled form, and keep what it gave."""

    def step(self, model: Callable[..., Any]) -> torch.Tensor:
        """Do a step: what is timed."""

    def drop(self) -> None:
        """Drop what a step leaves."""


class TrainStep:
    """A training step; gradients are those of the parameters, which variants share."""

    def __init__(self, spec: Spec, shape: Shape, base: nn.Module, device: torch.device, dtype: str) -> None:
        self._parameters = dict(base.named_parameters())
        # Autocast casts inside the model.
        inputs = torch.float32 if dtype == AUTOCAST else torch.bfloat16
        self._loss = spec.loss(shape, device, inputs)
        self._device, self._autocasts = device, dtype == AUTOCAST

    def begin(self, model: nn.Module) -> None:
        """Put the model into training mode."""
        model.train()

    def run(self, model: Callable[..., Any]) -> Outcome:
        """Forward and backward."""
        loss = self.step(model)
        return Outcome(float(loss.detach()), {name: found.grad for name, found in self._parameters.items()})

    def step(self, model: Callable[..., Any]) -> torch.Tensor:
        """Run what is timed."""
        self.drop()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocasts):
            loss = self._loss(model)
        # torch declares no types for backward.
        cast(Any, loss).backward()
        return loss

    def drop(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None


class DecodeStep:
    """A decode step in bf16."""

    def __init__(self, spec: Spec, shape: Shape, base: nn.Module) -> None:
        assert spec.decoding is not None, f"{spec.name} does not decode"
        self._base = base
        self._decoding: Decoding = spec.decoding(shape, base)

    def begin(self, model: nn.Module) -> None:
        """Put the model into evaluation mode, and fill the cache anew."""
        model.eval()
        self._base.eval()
        with torch.no_grad():
            self._decoding.start(self._base)

    def run(self, model: Callable[..., Any]) -> Outcome:
        """One token more, the first behind the cache's filling."""
        # The next replay of a CUDA graph writes over what this one returned.
        logits = self.step(model).clone()
        return Outcome(None, {LOGITS: logits, **self._decoding.written()})

    def step(self, model: Callable[..., Any]) -> torch.Tensor:
        """Run what is timed."""
        with torch.no_grad():
            return self._decoding.step(model)

    def drop(self) -> None:
        """Nothing is kept between steps."""


def made_to_run(model: nn.Module, run: str, device: torch.device) -> Callable[..., Any]:
    """Return a variant as it is, or compiled.

    Raises:
        ValueError: there are no CUDA graphs on the device.
    """
    if run == EAGER:
        return model
    # All steps of a model are shapes of the same code, which TorchDynamo would take for one that varies.
    if run == COMPILE:
        return torch.compile(_with_code_of_its_own(model), dynamic=False, backend=_BACKEND[device.type])
    assert run == GRAPHS
    if device.type != "cuda":
        raise ValueError(f"CUDA graphs need a GPU, and this is a {device.type}")
    return torch.compile(_with_code_of_its_own(model), dynamic=False, mode="reduce-overhead")


def _with_code_of_its_own(model: nn.Module) -> Callable[..., Any]:
    """Return a call of a model whose code no other call has.

    TorchDynamo keeps what it compiled with the code. Of two variants that differ in how graphs are compiled and not in
    their modules, the second would otherwise run the first one's graphs.
    """

    def call(*args: Any, **named: Any) -> Any:
        return model(*args, **named)

    call.__code__ = call.__code__.replace(co_name="call")
    return call


def graphs_made() -> int:
    """How many graphs TorchDynamo has traced in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def graphs_skipped() -> int:
    """Count the graphs for which torch made no CUDA graph although one was requested."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def time_turn(step: Callable[[], Any], kind: str, device: torch.device) -> list[float]:
    """Milliseconds of some steps, each from the end of the one before to its own end.

    That is the GPU's time or the host's, whichever is longer.
    """
    if device.type == "cpu":
        times = []
        for _ in range(_CPU_TURN):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    ends = [torch.Event(enable_timing=True) for _ in range(_TURN[kind] + 1)]
    for end in ends:
        step()
        end.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(ends)]


def peak_gib(step: Callable[[], Any], drop: Callable[[], None], model: nn.Module, device: torch.device) -> float | None:
    """Return the peak memory of a step, the model's weights included, in GiB; None on a CPU.

    What other variants keep on the device is not counted: the figure is what the step adds, and the weights.
    """
    if device.type == "cpu":
        return None
    drop()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    kept = [*model.parameters(), *model.buffers()]
    return (torch.cuda.max_memory_allocated() - before + sum(each.nbytes for each in kept)) / 2**30
