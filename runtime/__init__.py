"""normforge: LayerNorm and RMSNorm kernels in Triton, generated from a manifest.

`layer_norm`, `rms_norm` and their fused-add forms are differentiable, with torch's signatures; `LayerNorm`, `RMSNorm`,
`AddLayerNorm` and `AddRMSNorm` are modules of them, and `patch` swaps a model's norms for those. `layernorm2d_fwd` and
`rmsnorm2d_fwd` run every mode of the forward kernels; `reference` holds the plain-torch oracle.
"""

from . import errors, reference
from . import operators as operators
from ._version import __version__
from .ahead_of_time.compile_keys import compile_keys
from .ahead_of_time.warmup import warmup
from .calls.api import layernorm2d_fwd, rmsnorm2d_fwd, which
from .calls.backend import backend
from .calls.outputs import LayerNormOutput
from .kernels.binaries import load_aot
from .nn.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .nn.modules import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from .nn.patching import Patch, patch, unpatch
from .selection.dispatch import instances, load_instances
from .selection.recording import record, record_process

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "LayerNorm",
    "LayerNormOutput",
    "Patch",
    "RMSNorm",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "backend",
    "compile_keys",
    "errors",
    "instances",
    "layer_norm",
    "layernorm2d_fwd",
    "load_aot",
    "load_instances",
    "patch",
    "record",
    "reference",
    "rms_norm",
    "rmsnorm2d_fwd",
    "unpatch",
    "warmup",
    "which",
]

record_process()
