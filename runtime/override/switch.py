"""Register kernels under the names of torch's own operators, and remove them again: `override_torch`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from ..errors import DeviceError
from ..kernels.gpu import interpreting
from ..locks import fork_safe
from ..upstream.torch_internals import Replacement, kernel_of, without_torchs_own_overrides
from .served import OPERATORS, serving


class TorchOverride:
    """A request that kernels serve torch's own norms, returned by `override_torch`; a context that withdraws it."""

    def __init__(self, switch: Switch) -> None:
        """Add the request to those of a switch."""
        self._switch = switch
        switch.enter(self)

    @property
    def active(self) -> bool:
        """True until the request is withdrawn."""
        return self in self._switch.requests

    def restore(self) -> None:
        """Withdraw the request; torch's own kernels are back once no request is left."""
        self._switch.leave(self)

    def __enter__(self) -> TorchOverride:
        return self

    def __exit__(self, *details: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = f"active on {self._switch.key}" if self.active else "restored"
        return f"<normforge.{type(self).__name__} of {', '.join(OPERATORS)}: {state}>"


class Switch:
    """The replacement of torch's norms under a dispatch key.

    Attributes:
        key: the dispatch key.
        requests: the requests that were not withdrawn.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._lock = fork_safe(threading.Lock())
        self.requests: set[TorchOverride] = set()
        self._replacement: Replacement | None = None

    def enter(self, request: TorchOverride) -> None:
        """Add a request."""
        with self._lock:
            if self._replacement is None:
                with without_torchs_own_overrides(OPERATORS):
                    torchs = {operator: kernel_of(operator, self.key) for operator in OPERATORS}
                # Fall back to torch's plain kernels, not to torch's own overrides of them.
                kernels = {name: serving(name, kernel) for name, kernel in torchs.items() if kernel is not None}
                self._replacement = Replacement(kernels, self.key)
            self.requests.add(request)

    def leave(self, request: TorchOverride | None) -> None:
        """Withdraw a request; None withdraws all."""
        with self._lock:
            self.requests = set() if request is None else self.requests - {request}
            if not self.requests and self._replacement is not None:
                with without_torchs_own_overrides(OPERATORS):
                    self._replacement.remove()
                self._replacement = None


@cache
def _switch() -> Switch:
    # Triton's interpreter also runs kernels on CUDA tensors; without a GPU its users' tensors are on the CPU.
    return Switch("CPU" if interpreting() and not torch.cuda.is_available() else "CUDA")


def override_torch() -> TorchOverride:
    """Have kernels serve torch's own norms on GPUs, in every model of the process, until the request is withdrawn.

    Without a GPU, and with TRITON_INTERPRET=1, kernels serve norms on the CPU. The request's repr names the device.

    Kernels are registered for `aten::native_layer_norm`, `aten::_fused_rms_norm` and their backward operators. In eager
    mode torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.functional's norms and torch.nn.TransformerEncoderLayer call
    these operators. Results have torch's dtypes, shapes and strides. Calls that no kernel serves fall back to torch's
    own kernel: float64, parameters of another dtype than x's, no rows or rows of no elements, forward-mode AD, and
    kernels that are not loaded yet while a CUDA graph is captured. Code from torch.compile does not change, because it
    decomposes these operators itself.

    Each call is a request, and torch's own kernels return once all requests are withdrawn. The kernels take precedence
    over torch's own overrides (`torch.backends.python_native`, from 2.13 on), which do not serve the fallback either.
    Overrides that are switched on again later take precedence over the kernels.

    Returns:
        The request. `with normforge.override_torch(): ...` withdraws the request at its end; so does `restore`.
    """
    return TorchOverride(_switch())


def restore_torch() -> None:
    """Withdraw every request of `override_torch`; do nothing if there is none."""
    _switch().leave(None)


# The dispatch keys of the devices that kernels run on.
_KEYS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def standalone(operator: str) -> Callable[..., Any]:
    """Return an operator of aten as a function, run by our kernel where one serves; results have no gradients.

    Torch's kernels are looked up now, so that the function may replace the operator itself afterwards.

    Args:
        operator: one of `served.OPERATORS`.

    Returns:
        A function of the operator's arguments, in the order of its schema. It raises a DeviceError for tensors on a
        device that torch has no kernel of the operator for.
    """
    serves = {}
    for key in _KEYS:
        if (kernel := kernel_of(operator, key.name)) is not None:
            serves[key.name.lower()] = partial(serving(operator, kernel), torch._C.DispatchKeySet(key))

    def call(x: torch.Tensor, *others: Any) -> Any:
        serve = serves.get(x.device.type)
        if serve is None:
            raise DeviceError(
                f"aten::{operator} was given a tensor on {x.device}; this torch has kernels of it for "
                f"{' and '.join(serves)}: move the tensor there"
            )
        return serve(x, *others)

    return call
