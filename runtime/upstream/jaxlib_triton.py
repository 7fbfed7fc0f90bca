"""jaxlib's launch of Triton's kernels, `jax._src.lib.gpu_triton`: private, with no public way beside it.

Pallas, TransformerEngine and jax-triton launch kernels through this module: PTX goes into the program, in a message
that jaxlib's custom call reads, and is assembled when the call first runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import distributions
from typing import Any

from ..errors import JaxError

# The releases of JAX that normforge[jax] installs; see pyproject.toml.
RANGE = ">=0.10.1,<0.13"
# The custom call's name.
TARGET = "triton_kernel_call_ffi"

# The bytes that addresses of arrays need not be a multiple of, and the bytes to clear before a launch.
_ALIGNMENT = 16
_CLEARED = 0

# A number and its type, "i32" say, or None for the next array.
Parameter = tuple[float | int, str] | None
# Compiled kernels take Triton's scratch memory, global and for profiles, behind the parameters. jaxlib passes only the
# scratch memory that its release knows; these values come first, so that no kernel reads a parameter that is missing.
_SCRATCH: Sequence[Parameter] = ((0, "u64"), (0, "u64"))


def message(
    name: str,
    ptx: str,
    warps: int,
    shared: int,
    capability: int,
    grid: Sequence[int],
    parameters: Sequence[Parameter],
    library: Any = None,
) -> bytes:
    """Return the message of a custom call: a kernel and one launch of the kernel.

    Args:
        name: the kernel's symbol in its PTX.
        ptx: the kernel.
        warps: warps per program.
        shared: bytes of shared memory.
        capability: 90 of sm_90.
        grid: programs in each dimension.
        parameters: what the kernel takes, in order; arrays are the call's operands, and then its results.
        library: the module of jaxlib; None is the installed one.

    Raises:
        JaxError: jaxlib has no such module, or another.
    """
    library = library or _library()
    kernel = library.TritonKernel(name, warps, 1, shared, ptx, "", capability)
    parameters = [
        library.create_array_parameter(_CLEARED, _ALIGNMENT)
        if parameter is None
        else library.create_scalar_parameter(*parameter)
        for parameter in (*parameters, *_SCRATCH)
    ]
    call = library.TritonKernelCall(kernel, *grid, parameters)
    return zlib.compress(call.to_proto(name, b""))


@cache
def _library() -> Any:
    """Return the module, after trying it on a kernel that does nothing."""
    try:
        from jax._src.lib import gpu_triton

        parameters: Sequence[Parameter] = (None, (1, "i32"), (1, "i64"), (1.0, "fp32"))
        message("nothing", "", 1, 0, 90, (1, 1, 1), parameters, gpu_triton)
        known = list(gpu_triton._cuda_triton.registrations())
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _unknown(f"{type(error).__name__}: {error}") from error
    if TARGET not in known:
        raise _unknown(f"it registers {', '.join(known) or 'nothing'}, and not {TARGET}")
    return gpu_triton


def _unknown(why: str) -> JaxError:
    return JaxError(
        f"kernels are launched through jax._src.lib.gpu_triton, which jax's plugin for CUDA brings, and the one of "
        f"{_installed()} is none that normforge knows ({why}); install jax{RANGE} with it: "
        f"pip install 'normforge[jax]' 'jax[cuda13]{RANGE}'"
    )


def _installed() -> str:
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin")
    return ", ".join(f"{each.name} {each.version}" for name in names for each in distributions(name=name))
