"""The oracle: what every kernel computes, in plain torch, in the dtype asked.

Stands on codegen/.
"""

from .gradients import ReferenceGradients, layernorm2d_bwd, rmsnorm2d_bwd
from .norms import ReferenceOutput, layernorm2d_fwd, rmsnorm2d_fwd

__all__ = [
    "ReferenceGradients",
    "ReferenceOutput",
    "layernorm2d_bwd",
    "layernorm2d_fwd",
    "rmsnorm2d_bwd",
    "rmsnorm2d_fwd",
]


def __dir__() -> list[str]:
    return sorted(__all__)
