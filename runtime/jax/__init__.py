"""Norms of JAX arrays on the same kernels. Importing it imports JAX, and neither torch nor Triton.

Stands on codegen/, kernels/, selection/ and upstream/.
"""

from .. import settings
from ..errors import JaxError
from ..upstream.jaxlib_triton import RANGE

try:
    from .calls import Quantised as Quantised
    from .functions import add_layer_norm as add_layer_norm
    from .functions import add_rms_norm as add_rms_norm
    from .functions import l2_norm as l2_norm
    from .functions import layer_norm as layer_norm
    from .functions import layer_norm_add as layer_norm_add
    from .functions import normalize as normalize
    from .functions import qk_norm_rope as qk_norm_rope
    from .functions import quantised_layer_norm as quantised_layer_norm
    from .functions import quantised_rms_norm as quantised_rms_norm
    from .functions import rms_norm as rms_norm
    from .functions import rms_norm_add as rms_norm_add
    from .several import rms_norms as rms_norms
except ImportError as error:
    if isinstance(error, JaxError):
        raise
    raise JaxError(
        f"normforge.jax needs jax{RANGE}, and what it imports of it is not there ({error}): "
        "pip install 'normforge[jax]', with Python 3.11 or newer"
    ) from error

from .launches import load_aot as load_aot
from .launches import lower_for as lower_for

if (_path := settings.recording()) is not None:
    from ..selection.recording import record_process

    record_process(_path)

# The public names are those of this package.
__all__ = [name for name, each in globals().items() if getattr(each, "__module__", "").startswith(f"{__name__}.")]


def __dir__() -> list[str]:
    return sorted(__all__)
