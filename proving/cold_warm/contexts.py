"""Define the surroundings of a call: the thread, and the state of the process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import normforge

Thunk = Callable[[], Any]
# torch declares no types for what is in it.
forward_ad: Any = torch.autograd.forward_ad


# The operators of normforge that a dispatch mode saw.
OPERATORS_SEEN: list[str] = []


def _dispatched(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if str(function).startswith("normforge"):
        OPERATORS_SEEN.append(str(function))
    return function(*args, **(kwargs or {}))


# Made by `type`, as torch declares no types of what a subclass's statement calls.
_Dispatch: Callable[[], Any] = type("_Dispatch", (TorchDispatchMode,), {"__torch_dispatch__": _dispatched})


class _Function(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _fake() -> FakeTensorMode:
    """Return a fake mode that caches nothing: torch fails at a view of a dual tensor that is in a fake mode's cache."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


CONTEXTS: Mapping[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "bf16 autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fp16 autocast": lambda: torch.autocast("cpu", torch.float16),
    "invariant": normforge.batch_invariant,
    "not invariant": lambda: normforge.batch_invariant(False),
    "dual level": forward_ad.dual_level,
    "dispatch mode": _Dispatch,
    "function mode": _Function,
    "fake": _fake,
    "default fp64": _default_dtype,
    "default meta": lambda: torch.device("meta"),
    "saved hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept),
    "saved on CPU": lambda: torch.autograd.graph.save_on_cpu(),
}


def _in_thread(call: Thunk) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def _context_of_batch_invariance(enabled: bool) -> contextvars.Context:
    """Return a copy of a context that was within, and has outlived it."""
    with normforge.batch_invariant(enabled):
        return contextvars.copy_context()


async def _task_that_outlives(call: Thunk) -> Any:
    left = asyncio.Event()

    async def later() -> Any:
        await left.wait()
        return call()

    with normforge.batch_invariant():
        task = asyncio.ensure_future(later())
        await asyncio.sleep(0)
    left.set()
    return await task


def _beside_another(call: Thunk) -> Any:
    """Run a call outside while another thread is within."""
    with normforge.batch_invariant():
        return contextvars.Context().run(call)


PLACES: Mapping[str, Callable[[Thunk], Any]] = {
    "": lambda call: call(),
    "thread": _in_thread,
    "copied context": lambda call: _context_of_batch_invariance(True).run(call),
    "copied context, not invariant": lambda call: _context_of_batch_invariance(False).run(call),
    "thread of a copied context": lambda call: _in_thread(lambda: _context_of_batch_invariance(True).run(call)),
    "task": lambda call: asyncio.run(_task_that_outlives(call)),
    "beside another": _beside_another,
}

# From a function and its first tensor to what a transform of it returns.
TRANSFORMS: Mapping[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "": lambda call, x: call(x),
    "vmap": lambda call, x: torch.func.vmap(call)(x),
    "grad": lambda call, x: torch.func.grad(lambda at: _first(call(at)).sum())(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (torch.ones_like(x),))[1],
    "dual": lambda call, x: _dual(call, x),
}


def _first(outputs: Any) -> torch.Tensor:
    found: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    return found


def _dual(call: Callable[[Any], Any], x: Any) -> Any:
    with forward_ad.dual_level():
        outputs = call(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(_first(outputs)).tangent
        return outputs, tangent is None


def within(call: Thunk, place: str, *contexts: str) -> Any:
    """Run a call at a place, within contexts that are entered there."""

    def run() -> Any:
        with contextlib.ExitStack() as stack:
            for name in contexts:
                stack.enter_context(CONTEXTS[name]())
            return call()

    return PLACES[place](run)
