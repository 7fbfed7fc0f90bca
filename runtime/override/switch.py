"""`override_torch`: kernels put under the names of torch's own operators, and taken away again."""

from __future__ import annotations

import threading
from functools import cache
from types import TracebackType

import torch

from ..kernels.gpu import interpreting
from ..locks import fork_safe
from ..upstream.torch_dispatcher import Replacement, kernel_of, without_torchs_own_overrides
from .served import OPERATORS, serving


class TorchOverride:
    """One wish that kernels serve torch's own norms, as `override_torch` returns it; a context that withdraws it."""

    def __init__(self, switch: Switch) -> None:
        """Add a wish to those of a switch."""
        self._switch = switch
        switch.enter(self)

    @property
    def active(self) -> bool:
        """Whether this wish stands."""
        return self._switch.holds(self)

    def restore(self) -> None:
        """Withdraw it, if it stands; torch's own kernels are back once there is no other."""
        self._switch.leave(self)

    def __enter__(self) -> TorchOverride:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = f"active on {self._switch.key}" if self.active else "restored"
        return f"<normforge.{type(self).__name__} of {', '.join(OPERATORS)}: {state}>"


class Switch:
    """Whether kernels stand under a dispatch key, by who wishes it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._lock = fork_safe(threading.Lock())
        self._wishes: list[TorchOverride] = []
        self._replacement: Replacement | None = None

    def enter(self, wish: TorchOverride) -> None:
        """Add a wish."""
        with self._lock:
            if self._replacement is None:
                self._replacement = self._replace()
            self._wishes.append(wish)

    def leave(self, wish: TorchOverride | None) -> None:
        """Withdraw a wish, or all of them."""
        with self._lock:
            self._wishes = [] if wish is None else [other for other in self._wishes if other is not wish]
            if not self._wishes and self._replacement is not None:
                with without_torchs_own_overrides(OPERATORS):
                    self._replacement.remove()
                self._replacement = None

    def holds(self, wish: TorchOverride) -> bool:
        """Whether a wish was not withdrawn."""
        with self._lock:
            return any(other is wish for other in self._wishes)

    def _replace(self) -> Replacement:
        with without_torchs_own_overrides(OPERATORS):
            torchs = {operator: kernel_of(operator, self.key) for operator in OPERATORS}
        # Above what torch put there itself, and not upon it.
        kernels = {operator: serving(operator, kernel) for operator, kernel in torchs.items() if kernel is not None}
        return Replacement(kernels, self.key)


@cache
def _switch() -> Switch:
    # Triton's interpreter also runs kernels on CUDA tensors; without a GPU, the CPU is where its users have theirs.
    return Switch("CPU" if interpreting() and not torch.cuda.is_available() else "CUDA")


def override_torch() -> TorchOverride:
    """Have kernels serve torch's own norms on GPUs, in every model of the process, until that is withdrawn.

    Without a GPU, and with TRITON_INTERPRET=1, kernels serve norms on the CPU. The wish's repr names the device type.

    They stand under `aten::native_layer_norm`, `aten::_fused_rms_norm` and the operators of their gradients, which in
    eager mode torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.functional's norms and torch.nn.TransformerEncoderLayer
    come to. Results have torch's dtypes, shapes and strides. Torch's own kernel goes on serving what no kernel does:
    float64, parameters of another type than x's, no rows or rows of no elements, forward-mode AD, and a kernel that is
    not loaded yet while a CUDA graph is captured. What torch.compile makes does not change: it decomposes these
    operators itself.

    It is off until it is called. Each call is a wish, and torch's own kernels are back once all are withdrawn. The
    kernels stand above what torch itself puts in place of its own (`torch.backends.python_native`, from 2.13 on), which
    is not asked for what is left to torch either; if that is switched on again later, it stands above them.

    Returns:
        The wish. `with normforge.override_torch(): ...` withdraws it at the end, and so does its `restore`.
    """
    return TorchOverride(_switch())


def restore_torch() -> None:
    """Withdraw every wish of `override_torch`, whoever made it; nothing happens where nobody did."""
    _switch().leave(None)
