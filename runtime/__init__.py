"""normforge: LayerNorm and RMSNorm kernels in Triton, generated from a manifest.

`layernorm2d_fwd` and `rmsnorm2d_fwd` run the generated kernels; `reference` holds the plain-torch oracle.
"""

from . import errors, reference
from ._version import __version__
from .api import layernorm2d_fwd, rmsnorm2d_fwd, which
from .dispatch import instances, load_instances
from .output import LayerNormOutput

__all__ = [
    "LayerNormOutput",
    "__version__",
    "errors",
    "instances",
    "layernorm2d_fwd",
    "load_instances",
    "reference",
    "rmsnorm2d_fwd",
    "which",
]
