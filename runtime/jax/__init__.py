"""Norms of JAX arrays on the same kernels. Importing it imports JAX, and neither torch nor Triton.

Stands on codegen/, kernels/, selection/ and upstream/.
"""

from .. import settings
from ..errors import JaxError
from ..upstream.jaxlib_triton import RANGE

try:
    from .calls import Quantised
    from .functions import (
        add_layer_norm,
        add_rms_norm,
        l2_norm,
        layer_norm,
        layer_norm_add,
        normalize,
        qk_norm_rope,
        quantised_layer_norm,
        quantised_rms_norm,
        rms_norm,
        rms_norm_add,
    )
except ImportError as error:
    if isinstance(error, JaxError):
        raise
    raise JaxError(
        f"normforge.jax needs jax{RANGE}, and what it imports of it is not there ({error}): "
        "pip install 'normforge[jax]', with Python 3.11 or newer"
    ) from error

from .launches import load_aot, lower_for

if (_path := settings.recording()) is not None:
    from ..selection.recording import record_process

    record_process(_path)

__all__ = [
    "Quantised",
    "add_layer_norm",
    "add_rms_norm",
    "l2_norm",
    "layer_norm",
    "layer_norm_add",
    "load_aot",
    "lower_for",
    "normalize",
    "qk_norm_rope",
    "quantised_layer_norm",
    "quantised_rms_norm",
    "rms_norm",
    "rms_norm_add",
]


def __dir__() -> list[str]:
    return sorted(__all__)
