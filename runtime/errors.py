"""Every error a call can raise. Each message names the argument, what it got and what it takes."""

from __future__ import annotations

from .codegen.errors import IllegalCombinationError as IllegalCombinationError
from .codegen.errors import NormforgeError as NormforgeError


class ArgumentError(NormforgeError):
    """Base of what is wrong with one argument of a call."""


class ShapeError(ArgumentError, ValueError):
    """A tensor whose shape does not fit x's."""


class DTypeError(ArgumentError, TypeError):
    """A tensor or dtype that the kernels do not take, or an argument that is not a tensor."""


class DeviceError(ArgumentError, RuntimeError):
    """A tensor on another device than x, or on one where no kernel can run."""


class LayoutError(ArgumentError, ValueError):
    """A tensor whose strides the kernels cannot walk, or an output that overlaps another tensor."""


class ConflictError(ArgumentError, ValueError):
    """An argument that the modes asked for would leave unused, one that they lack, or a word that is none."""


class PeerError(NormforgeError, TimeoutError):
    """Another rank that sent nothing in time, so that the results of a call are NaN."""


class GradientError(NormforgeError, RuntimeError):
    """A gradient that normforge does not compute, or an output that autograd does not let be written to."""


class TransformError(NormforgeError, RuntimeError):
    """A call that a program transformation of torch's (torch.func, torch.jit) is to follow, and cannot."""


class InvarianceError(NormforgeError, RuntimeError):
    """A call under batch invariance whose bits would depend on the batch, or that no kernel serves."""


class MissingInstanceError(NormforgeError, LookupError):
    """A legal combination that the loaded table does not hold, under NORMFORGE_ON_MISS=error."""


class TableError(NormforgeError, ImportError):
    """A folder that holds no dispatch table this version can use."""


class CacheError(NormforgeError, OSError):
    """A cache folder that kernels cannot be generated or compiled into."""


class PatchError(NormforgeError, RuntimeError):
    """A module that cannot be unpatched as it is, since something else changed it after it was patched."""


class RecordError(NormforgeError, OSError):
    """A file that the instances a program asks for cannot be recorded to."""


class CompileError(NormforgeError, RuntimeError):
    """A kernel that Triton cannot compile for a GPU, or that does not fit on it, met ahead of the call."""


class FrozenError(NormforgeError, RuntimeError):
    """A kernel that would have to be compiled, under NORMFORGE_FROZEN=1."""


class AotError(NormforgeError, RuntimeError):
    """A folder of kernels compiled ahead of time that does not fit what is here, or that cannot be made."""


class JaxError(NormforgeError, ImportError):
    """A release of JAX that normforge.jax cannot launch kernels through, or none."""


class TargetError(NormforgeError, ValueError):
    """An architecture that kernels are not compiled for."""


class SettingError(NormforgeError, ValueError):
    """An environment variable with a value that it does not take."""


# The classes above, without the names that the classes need.
__all__ = [name for name, value in tuple(globals().items()) if isinstance(value, type)]


def __dir__() -> list[str]:
    return sorted(__all__)
