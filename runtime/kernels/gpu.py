"""Which GPU, and whether kernels run on it: what tiles, grids and compilations depend on.

A target describes a device that is here, or an architecture that is not; a CPU means Triton's interpreter.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from ..codegen.tiling import WARP
from ..errors import DeviceError, TargetError

# Imported where a device is asked, for kernels may be chosen without torch: see `normforge.jax`.
if TYPE_CHECKING:
    import torch

# The interpreter has none; one stands for few programs, so that a handful of rows makes each take several in turn.
_INTERPRETED_MULTIPROCESSORS = 1

# The first NVIDIA architecture that converts to fp8 in one rounding.
_FIRST_WITH_FP8 = 89
# The first with programmatic dependent launch.
_FIRST_WITH_PDL = 90


@dataclass(frozen=True)
class Target:
    """A kind of GPU.

    Attributes:
        arch: as tables of tiles name it: "sm_90" or "gfx942", say; "cpu" for the interpreter.
        warp_size: threads of a warp; in the interpreter, those that tiles are made of.
        multiprocessors: how many it has.
        compiles: whether kernels are compiled for it, rather than interpreted.
        plainly: whether kernels are launched in turn and no more is asked of a launch, as jaxlib launches them: none
            before the one ahead has ended, and none whose programs all have to run at once.
    """

    arch: str
    warp_size: int
    multiprocessors: int
    compiles: bool = True
    plainly: bool = False

    @property
    def is_nvidia(self) -> bool:
        """True if NVIDIA made the GPU."""
        return self.arch.startswith("sm_")

    @property
    def converts_to_fp8(self) -> bool:
        """True if the GPU converts to the fp8 formats of NVIDIA's hardware in one rounding."""
        return self._is_from(_FIRST_WITH_FP8)

    @property
    def launches_early(self) -> bool:
        """True if a kernel may start before the kernel ahead has ended: programmatic dependent launch."""
        return self._is_from(_FIRST_WITH_PDL) and not self.plainly

    def _is_from(self, first: int) -> bool:
        return self.compiles and self.is_nvidia and int(self.arch[3:]) >= first


# Where no device is here to ask: A100, L40S, H100 and H200, B200, MI210 and half of an MI250, MI300X.
ARCHITECTURES = {
    target.arch: target
    for target in (
        Target("sm_80", 32, 108),
        Target("sm_89", 32, 142),
        Target("sm_90", 32, 132),
        Target("sm_100", 32, 148),
        Target("gfx90a", 64, 104),
        Target("gfx942", 64, 304),
    )
}
_NAMES = re.compile(r"sm_(?:[89]\d|1\d\d)|gfx\d+[0-9a-f]{2}")


def named_target(arch: str, multiprocessors: int | None = None) -> Target:
    """The GPUs of an architecture, of which none need be here.

    Args:
        arch: "sm_90" or "gfx942", say.
        multiprocessors: how many they have; by default what `ARCHITECTURES` says.

    Raises:
        TargetError: there is no such architecture, or how many multiprocessors it has is not known and not said.
    """
    known = ARCHITECTURES.get(arch)
    if known is None and _NAMES.fullmatch(arch) is None:
        raise TargetError(
            f"arch {arch!r} is no architecture that kernels are compiled for; write one like "
            f"{', '.join(ARCHITECTURES)}, without a letter behind an sm_ number: Triton adds what it needs"
        )
    if known is None:
        if multiprocessors is None:
            raise TargetError(
                f"how many multiprocessors GPUs of {arch} have is not known, and tiles are chosen by it; say it: "
                "multiprocessors=…, or --multiprocessors"
            )
        # GCN and CDNA have warps of 64 threads; RDNA, from gfx10 on, runs 32.
        known = Target(arch, 64 if arch.startswith("gfx9") else 32, multiprocessors)
    if multiprocessors is None:
        return known
    if multiprocessors < 1:
        raise TargetError(f"multiprocessors={multiprocessors} will not do; a GPU has one or more")
    return replace(known, multiprocessors=multiprocessors)


@cache
def architecture(device: torch.device) -> str:
    """A device's architecture as tables of tiles name it: "sm_90" or "gfx942", say; "cpu" for the interpreter."""
    if device.type == "cpu":
        return "cpu"
    import torch

    if torch.version.hip is not None:
        # What follows the colon says which features are switched on.
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def target_of(device: torch.device) -> Target:
    """Return the target of a device; a CPU is the target of Triton's interpreter."""
    arch = architecture(device)
    if device.type != "cuda":
        return Target(arch, WARP, _INTERPRETED_MULTIPROCESSORS, compiles=False)
    import torch

    properties = torch.cuda.get_device_properties(device)
    return Target(arch, int(properties.warp_size), int(properties.multi_processor_count), compiles=not interpreting())


def scale_warps(warps: int, warp_size: int) -> int:
    """How many warps of a target hold the threads that a tile's 32-wide warps stand for."""
    return max(1, warps * WARP // warp_size)


@cache
def interpreting() -> bool:
    """Return True if Triton runs kernels in its CPU interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def require_device(x: torch.Tensor) -> None:
    """Refuse a tensor that no kernel can read.

    Raises:
        DeviceError: x is not on a GPU, and the interpreter is off.
    """
    if not (x.is_cuda or interpreting()):
        raise DeviceError(
            f"x is on {x.device} and generated kernels run on a GPU; move the tensors to one, or set "
            "TRITON_INTERPRET=1 before the program starts to run them in Triton's (slow) CPU interpreter"
        )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which a device is the current one."""
    import torch

    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        return torch.cuda.device(device)
    return nullcontext()
