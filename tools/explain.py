"""`normforge.explain`: which kernels a call takes, with which tiles, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..ahead_of_time.compile_keys import launchers_of
from ..call_kinds import CallKind
from ..calls.backend import backend
from ..kernels import binaries
from ..kernels.gpu import Target, target_of
from ..kernels.launcher import Launcher
from ..selection import dispatch
from ..selection.table import Entry
from .list_instances import shown_tile

_OWN = "normforge.generated"


@dataclass(frozen=True)
class KernelUse:
    """A kernel that a call took.

    Attributes:
        instance: the instance of the dispatch table, as `normforge.which` names it; a kernel that no table lists.
        kernel: the kernel's own name, as a profiler shows it.
        n: the row length; of GroupNorm, the number of elements in a group.
        rows: the class of M: "few", "some", "many" or "most".
        tile: the tile that the table has for such calls on the device's architecture; "" for no table.
        options: the constants and the compiler's options, by name.
        source: "committed" for a kernel that normforge came with, "folder" for a kernel of another table, "generated"
            for a kernel that was generated on demand.
        module: the file that the kernel is defined in.
        binary: "interpreted", "aot" for a binary from a folder that `normforge aot` wrote, or "compiled".
    """

    instance: str
    kernel: str
    n: int
    rows: str
    tile: str
    options: dict[str, Any]
    source: str
    module: Path
    binary: str

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return (
            f"{self.kernel}\n  instance  {self.instance} ({self.source}: {self.module})\n"
            f"  rows      {self.rows}, N = {self.n}\n  tile      {self.tile}\n"
            f"  options   {options}\n  binary    {self.binary}"
        )


@dataclass(frozen=True)
class Explanation:
    """The kernels of a call, or why no kernel ran, and the result.

    Attributes:
        backend: "kernel" if a kernel of normforge's ran, else "torch".
        kernels: the kernels, in the order in which the call first took each.
        reason: why torch's operators ran instead; "" if a kernel ran.
        result: what the call returned.
    """

    backend: str
    kernels: tuple[KernelUse, ...]
    reason: str
    result: Any

    def __str__(self) -> str:
        return "\n".join(map(str, self.kernels)) if self.kernels else f"no kernel of normforge's ran: {self.reason}"


def explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Make a call and report which kernels the call took, with which tiles, and why; or why torch's operators ran.

    The call is made once, and for real: f may be a function of normforge's, a module or a whole patched model.
    `normforge.which` names the instance of a forward call without making the call.

    Args:
        f: what is called.
        *args: the arguments of f; tensors of any shapes that f takes.
        **kwargs: the keyword arguments of f.

    Returns:
        An `Explanation`; `str()` of it is a report.

    Raises:
        Exception: whatever f raises.

    Example:
        >>> print(normforge.explain(normforge.layer_norm, x, (4096,), weight, bias))
    """
    # Each once, in order.
    kinds: dict[CallKind, None] = {}
    with dispatch.observed(lambda recorded: kinds.update(dict.fromkeys(recorded.calls))):
        result = f(*args, **kwargs)
    tensors = list(_tensors((f, args, kwargs, _closure(f))))
    if not kinds:
        return Explanation("torch", (), _reason(tensors), result)
    target = target_of(next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu")))
    uses = [_use(kind, entry, launcher, target) for kind in kinds for entry, launcher in launchers_of(kind, target)]
    return Explanation("kernel", tuple(uses), "", result)


def _use(kind: CallKind, entry: Entry | None, launcher: Launcher, target: Target) -> KernelUse:
    key, folder = launcher.key, binaries.loaded()
    tile = None if entry is None else entry.tile(entry.least_rows().get(kind.rows, 1), kind.n, target.arch)
    constants = {name: value for name, value in key.arguments if isinstance(value, int) and name != "N"}
    source = "generated" if entry else "committed"
    if entry and dispatch.loaded().find(entry.mode, kind.n) is not None:
        source = "committed" if entry.package == _OWN else "folder"
    binary = "compiled" if target.compiles else "interpreted"
    if target.compiles and folder is not None and key.portable in folder.rows:
        binary = "aot"
    return KernelUse(
        instance=entry.name if entry else kind.mode,
        kernel=key.symbol,
        n=kind.n,
        rows=kind.rows,
        tile=shown_tile(tile) if tile else "",
        options={**constants, **dict(key.options)},
        source=source,
        module=Path(launcher.kernel.fn.__code__.co_filename),
        binary=binary,
    )


def _reason(tensors: list[torch.Tensor]) -> str:
    """Say why no kernel was launched for a call of some tensors."""
    if not tensors:
        return "neither the arguments nor the variables of the function are tensors or modules"
    for tensor in tensors:
        where = f"a tensor of shape {tuple(tensor.shape)}"
        if tensor.dtype is torch.float64:
            return f"{where} is float64, and kernels take float16, bfloat16 and float32"
        if tensor.dim() and tensor.numel() == 0:
            return f"{where} has no elements"
        if backend(tensor) == "torch" and tensor.device.type == "cpu":
            return (
                f"{where} is on the CPU, where kernels run only in Triton's interpreter; move the tensors to a GPU, or "
                "set TRITON_INTERPRET=1 before the program starts"
            )
        if backend(tensor) == "torch":
            return f"{where} is on {tensor.device.type!r}, and kernels run on NVIDIA and AMD GPUs"
    return (
        "the call reached no norm of normforge's that kernels serve: a model that is not patched, a transform of "
        "torch.func, a tangent of forward-mode AD or torch.jit.trace keeps torch's operators"
    )


def _closure(f: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the variables of a function's surroundings that the function uses: a lambda often takes no arguments."""
    if not inspect.isfunction(f):
        return ()
    variables = inspect.getclosurevars(f)
    return (*variables.nonlocals.values(), *variables.globals.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
