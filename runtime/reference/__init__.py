"""The oracle: what every kernel computes, in plain torch, in the dtype asked.

Stands on codegen/.
"""

from collections.abc import Callable
from functools import partial

from ..codegen.values import Norm
from .gradients import ReferenceGradients, backward, layernorm2d_bwd, rmsnorm2d_bwd
from .norms import ReferenceOutput, layernorm2d_fwd, rmsnorm2d_fwd

FORWARD: dict[Norm, Callable[..., ReferenceOutput]] = {
    norm: layernorm2d_fwd if norm.centres else partial(rmsnorm2d_fwd, norm=norm, eps=float(norm.row.eps))
    for norm in Norm
}
BACKWARD: dict[Norm, Callable[..., ReferenceGradients]] = {
    norm: partial(backward, averages=norm.row.averages) for norm in Norm
}

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
