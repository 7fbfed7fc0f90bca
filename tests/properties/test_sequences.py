"""A call after any other call, in whichever state they left the library, computes what it would by itself."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import normforge
from normforge.errors import FrozenError, MissingInstanceError, NormforgeError
from normforge.tools import cli

from ..thorough import THOROUGH
from . import oracle
from .gradient_problems import StepKind, draw_step, draw_step_kind
from .illegal import spoilt
from .problems import MOST_ELEMENTS, Choose, MadeCall, T, draw_call, draw_family, vary
from .profile import chooser, each_device, examples, pool

_ON_MISS, _FROZEN = "NORMFORGE_ON_MISS", "NORMFORGE_FROZEN"
_GRADIENT_MODES: dict[str, Callable[[], Any]] = {
    "as it is": nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
}
_FUSED = (("pre_add_store", "smooth_dynamic"), ("none", "none"), ("pre_add_store", "none"), ("none", "dynamic"))
_SHAPES = ((2,), (1,), (3,), (2, 2), ())
# At once, because few of a machine's steps are calls.
_CALLS = 2
# Lengths of a machine's calls: a bucket of several rows a program, and one of one.
_LENGTHS = (24, 130, 1100)


_FOLDER = tempfile.TemporaryDirectory(prefix="normforge-few-")


@cache
def _few_instances() -> Path:
    """A folder with plain fp16 and bf16 kernels of both norms, and nothing else."""
    folder = Path(_FOLDER.name)
    manifest = folder / "few.yaml"
    manifest.write_text("groups:\n  few:\n    norm: [layer, rms]\n    dtype_in: [fp16, bf16]\n")
    assert cli.main(["generate", "--manifest", str(manifest), "--out", str(folder / "few")]) == 0
    return folder / "few"


@cache
def _all_instances() -> Path:
    """The folder that normforge comes with."""
    found = importlib.util.find_spec("normforge.generated")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0])


def _in_thread(function: Callable[[], T]) -> T:
    """What a function returns or raises, run in a thread of its own."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


@THOROUGH
@each_device
@examples(5)
@given(data=st.data())
def test_no_call_is_taken_for_one_that_differs_in_one_thing(device: str, data: st.DataObject) -> None:
    """Every member of a family of kinds, in any order: one after all the others."""
    choose = chooser(data)
    family = choose(pool().families) if device == "cuda" else draw_family(choose, _LENGTHS, *choose(_FUSED))
    for kind in data.draw(st.permutations(family)):
        made = draw_call(choose, kind, ((2,), (3,))).made(torch.device(device))
        made.check(made.run())


class _Calls(RuleBasedStateMachine):
    """A process's calls and settings in any order; calls differ from one another in one thing."""

    device = "cpu"

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        choose = self._chooser(data)
        if self.device == "cuda":
            self.family = choose(pool().families)
        else:
            self.family = draw_family(choose, _LENGTHS, *choose(_FUSED))
        self.gradients, self.in_thread, self.autocast, self.on_side = "as it is", False, False, False
        self.recording = ExitStack()
        self.model = torch.nn.Sequential(torch.nn.LayerNorm(24), torch.nn.RMSNorm(24, eps=1e-6)).to(self.device)

    def teardown(self) -> None:
        for name in (_ON_MISS, _FROZEN):
            os.environ.pop(name, None)
        normforge.load_instances()
        if hasattr(self, "recording"):
            self.recording.close()

    @rule(folder=st.sampled_from((_few_instances, _all_instances)))
    def load(self, folder: Callable[[], Path]) -> None:
        normforge.load_instances(folder())

    @rule(policy=st.sampled_from(("generate", "error")))
    def set_policy(self, policy: str) -> None:
        os.environ[_ON_MISS] = policy

    @rule(frozen=st.sampled_from(("0", "1")))
    def set_frozen(self, frozen: str) -> None:
        os.environ[_FROZEN] = frozen

    @rule(gradients=st.sampled_from(tuple(_GRADIENT_MODES)), in_thread=st.booleans(), on_side=st.booleans())
    def set_surroundings(self, gradients: str, in_thread: bool, on_side: bool) -> None:
        self.gradients, self.in_thread, self.on_side = gradients, in_thread, on_side

    @rule(autocast=st.booleans())
    def set_autocast(self, autocast: bool) -> None:
        self.autocast = autocast

    @rule(records=st.booleans())
    def set_recording(self, records: bool) -> None:
        self.recording.close()
        if records:
            folder = self.recording.enter_context(tempfile.TemporaryDirectory())
            self.recording.enter_context(normforge.record(Path(folder) / "asked.yaml"))

    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        for _ in range(_CALLS):
            made = self._call_of_the_family(data)
            output = self._run(
                made.run, asks=partial(normforge.which, *made.positional, norm=made.norm, **made.keywords)
            )
            if output is not None:
                made.check(output)

    @rule(data=st.data())
    def call_wrongly(self, data: st.DataObject) -> None:
        made = self._call_of_the_family(data)
        wrong = spoilt(self._chooser(data), made)
        if wrong is None:
            return
        if made.call.kind.fquant != "none" and any(
            t.requires_grad for t in wrong.values() if isinstance(t, torch.Tensor)
        ):
            # With gradients off, one that is required is no mistake.
            return
        with pytest.raises(NormforgeError):
            self._within(lambda: made.function(**wrong))
        made.check_untouched(refused=True)

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        choose = self._chooser(data)
        made = draw_step(choose, self._step_kind(choose), _SHAPES, MOST_ELEMENTS).made(torch.device(self.device))
        recorded = self.gradients in ("as it is", "enable_grad")

        def step() -> tuple[Any, Any, torch.dtype | None]:
            outputs = made.forward()
            return outputs, made.backward(outputs) if recorded else {}, self._y_dtype(made.step.kind)

        done = self._run(step, asks=None)
        if done is not None:
            outputs, found, y_dtype = done
            made.check(outputs, found, recorded=recorded, y_dtype=y_dtype)

    @rule(swap=st.sampled_from((normforge.patch, normforge.unpatch)))
    def swap_norms(self, swap: Callable[[torch.nn.Module], Any]) -> None:
        swap(self.model)

    @rule(shape=st.sampled_from(((2, 24), (1, 3, 24))), seed=st.integers(0, 1000))
    def run_model(self, shape: tuple[int, ...], seed: int) -> None:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)
        rows = x.reshape(-1, 24)
        for module, centres, eps in ((self.model[0], True, 1e-5), (self.model[1], False, 1e-6)):
            y = self._run(lambda module=module: module(x), asks=None)  # type: ignore[misc]  # a default binds it
            if y is not None:
                oracle.hold("y", y.detach().reshape(-1, 24), oracle.statistics(rows, centres, eps).h)

    def _call_of_the_family(self, data: st.DataObject) -> MadeCall:
        choose = self._chooser(data)
        kind = choose(self.family)
        if self.device == "cpu" and choose((False, True)):
            kind = vary(choose, kind, (kind.n,))
            self.family = (*self.family, kind)
        return draw_call(choose, kind, _SHAPES).made(torch.device(self.device))

    def _step_kind(self, choose: Choose) -> StepKind:
        return choose(pool().steps[:4]) if self.device == "cuda" else draw_step_kind(choose, _LENGTHS)

    def _run(self, function: Callable[[], T], asks: Callable[[], str] | None) -> T | None:
        """What a legal call returns; None where a setting forbids it, and only there."""
        try:
            return self._within(function)
        except MissingInstanceError:
            assert os.environ.get(_ON_MISS) == "error"
            if asks is not None:
                with pytest.raises(MissingInstanceError):
                    asks()
        except FrozenError:
            assert os.environ.get(_FROZEN) == "1"
            assert self.device == "cuda"
        return None

    def _within(self, function: Callable[[], T]) -> T:
        def run() -> T:
            with ExitStack() as surroundings:
                surroundings.enter_context(_GRADIENT_MODES[self.gradients]())
                surroundings.enter_context(torch.autocast(self.device, torch.bfloat16, enabled=self.autocast))
                if self.device == "cuda" and self.on_side:
                    # Its tensors were made on the stream that was current before.
                    torch.cuda.synchronize()
                    surroundings.enter_context(torch.cuda.stream(_side_stream()))
                result = function()
                if self.device == "cuda":
                    torch.cuda.synchronize()
                return result

        return _in_thread(run) if self.in_thread else run()

    def _y_dtype(self, kind: StepKind) -> torch.dtype | None:
        """What torch's own operator makes of x's type here, on a GPU; on a CPU x's."""
        if self.device == "cpu" or not self.autocast:
            return None
        x = torch.zeros(1, 8, dtype=kind.x.dtype, device=self.device)
        operator = torch.nn.functional.layer_norm if kind.norm == "layer" else torch.nn.functional.rms_norm
        return operator(x, (8,)).dtype

    @staticmethod
    def _chooser(data: st.DataObject) -> Choose:
        return chooser(data)


@cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch declares no types for it


class _CallsOnGpu(_Calls):
    device = "cuda"


TestCalls = _Calls.TestCase
TestCallsOnGpu = pytest.mark.gpu(_CallsOnGpu.TestCase)
TestCalls.settings = TestCallsOnGpu.settings = examples(10, steps=15)
