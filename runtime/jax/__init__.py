"""Norms of JAX arrays on the same kernels. Importing it imports JAX, and neither torch nor Triton.

Stands on codegen/, kernels/, selection/ and upstream/.
"""

from .. import settings
from ..errors import JaxError
from ..upstream.jaxlib_triton import RANGE

try:
    from .calls import Quantised as Quantised
    from .functions import *  # noqa: F403 - the table of functions writes its __all__
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
