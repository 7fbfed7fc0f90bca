"""Fused normalisation for PyTorch and JAX, on Triton kernels that are generated from a manifest.

`layer_norm`, `rms_norm`, `add_layer_norm` and `add_rms_norm` are differentiable functions of tensors; the first two
have the signatures of `torch.nn.functional`. `LayerNorm`, `RMSNorm`, `AddLayerNorm` and `AddRMSNorm` are the modules,
and `patch` replaces the norms of a model by these modules. `layernorm2d_fwd` and `rmsnorm2d_fwd` run every mode of the
forward kernels. `reference` holds the oracle, in plain torch. `normforge.jax` holds the functions of JAX arrays and
must be imported explicitly.

Example::

    >>> x = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
    >>> weight = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    >>> y = normforge.rms_norm(x, (1024,), weight)
"""

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from . import errors as errors
from . import settings
from ._version import __version__ as __version__

# Type checkers and editors read these imports, which do not run; a program finds the names by `_HOMES`, which is read
# from them.
if TYPE_CHECKING:
    from . import parallel as parallel
    from . import reference as reference
    from .ahead_of_time.compile_keys import compile_keys as compile_keys
    from .ahead_of_time.compile_keys import recorded_keys as recorded_keys
    from .ahead_of_time.warmup import warmup as warmup
    from .calls.backend import backend as backend
    from .calls.outputs import ColumnwiseOutput as ColumnwiseOutput
    from .calls.outputs import LayerNormOutput as LayerNormOutput
    from .calls.outputs import QuantisedGradients as QuantisedGradients
    from .calls.outputs import QuantisedOutput as QuantisedOutput
    from .compiled.switch import compile_passes as compile_passes
    from .families.functional import gated_layer_norm as gated_layer_norm
    from .families.functional import gated_rms_norm as gated_rms_norm
    from .families.functional import layer_norm_add as layer_norm_add
    from .families.functional import layer_statistics as layer_statistics
    from .families.functional import modulated_layer_norm as modulated_layer_norm
    from .families.functional import modulated_rms_norm as modulated_rms_norm
    from .families.functional import qk_norm_rope as qk_norm_rope
    from .families.functional import qk_norm_rope_bwd as qk_norm_rope_bwd
    from .families.functional import rms_norm_add as rms_norm_add
    from .families.functional import rms_statistics as rms_statistics
    from .families.gated.functions import GatedLayerNorm as GatedLayerNorm
    from .families.gated.functions import GatedRMSNorm as GatedRMSNorm
    from .families.group.functions import GroupNorm as GroupNorm
    from .families.group.functions import group_norm as group_norm
    from .families.plain_functions import add_layer_norm as add_layer_norm
    from .families.plain_functions import add_rms_norm as add_rms_norm
    from .families.plain_functions import l2_norm as l2_norm
    from .families.plain_functions import layer_norm as layer_norm
    from .families.plain_functions import normalize as normalize
    from .families.plain_functions import rms_norm as rms_norm
    from .families.plain_modules import AddLayerNorm as AddLayerNorm
    from .families.plain_modules import AddRMSNorm as AddRMSNorm
    from .families.plain_modules import LayerNorm as LayerNorm
    from .families.plain_modules import LayerNormAdd as LayerNormAdd
    from .families.plain_modules import RMSNorm as RMSNorm
    from .families.plain_modules import RMSNormAdd as RMSNormAdd
    from .families.public import gated_layernorm2d_fwd as gated_layernorm2d_fwd
    from .families.public import gated_rmsnorm2d_fwd as gated_rmsnorm2d_fwd
    from .families.public import l2norm2d_bwd as l2norm2d_bwd
    from .families.public import l2norm2d_fwd as l2norm2d_fwd
    from .families.public import layernorm2d_bwd as layernorm2d_bwd
    from .families.public import layernorm2d_fwd as layernorm2d_fwd
    from .families.public import modulated_layernorm2d_fwd as modulated_layernorm2d_fwd
    from .families.public import modulated_rmsnorm2d_fwd as modulated_rmsnorm2d_fwd
    from .families.public import normalize2d_bwd as normalize2d_bwd
    from .families.public import normalize2d_fwd as normalize2d_fwd
    from .families.public import quantised_layer_norm as quantised_layer_norm
    from .families.public import quantised_layernorm2d_bwd as quantised_layernorm2d_bwd
    from .families.public import quantised_rms_norm as quantised_rms_norm
    from .families.public import quantised_rmsnorm2d_bwd as quantised_rmsnorm2d_bwd
    from .families.public import renormed_layernorm2d_fwd as renormed_layernorm2d_fwd
    from .families.public import renormed_rmsnorm2d_fwd as renormed_rmsnorm2d_fwd
    from .families.public import rmsnorm2d_bwd as rmsnorm2d_bwd
    from .families.public import rmsnorm2d_fwd as rmsnorm2d_fwd
    from .families.several import rms_norms as rms_norms
    from .families.which import which as which
    from .kernels.binaries import load_aot as load_aot
    from .override.switch import TorchOverride as TorchOverride
    from .override.switch import override_torch as override_torch
    from .override.switch import restore_torch as restore_torch
    from .patching.report import Patch as Patch
    from .patching.swap import patch as patch
    from .patching.swap import unpatch as unpatch
    from .random_mask import dropout_mask as dropout_mask
    from .selection.batch import batch_invariant as batch_invariant
    from .selection.dispatch import instances as instances
    from .selection.dispatch import load_instances as load_instances
    from .selection.recording import record as record
    from .tools.explain import explain as explain

# The public names, and the modules that define them, as those imports say. A module is imported when a program asks
# for one of its names.
_imports = next(node.body for node in ast.parse(Path(__file__).read_bytes()).body if isinstance(node, ast.If))
_HOMES = {
    alias.name: node.module or alias.name
    for node in _imports
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = ["__version__", "errors", *_HOMES]

if not TYPE_CHECKING:

    def __getattr__(name):
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if not _is_command():
            # Should this be the first that needs it in a program of JAX's, `start` runs now.
            import_module("torch")
        module = import_module(f".{home}", __name__)
        return globals().setdefault(name, module if home == name else getattr(module, name))

    def __dir__():
        return sorted(__all__)


def start() -> None:
    """Register torch's operators, and begin a recording if one is asked for; a second call does nothing."""
    # The import may run `_start_late`, which calls this function.
    import_module("torch")
    from . import operators as operators

    if (path := settings.recording()) is not None:
        from .selection.recording import record_process

        record_process(path)


def _is_command() -> bool:
    """Return True if this process is the `normforge` command, some of whose verbs need no torch."""
    # While Python looks for the module of -m, argv[0] is "-m" rather than the program's path.
    if sys.argv[:1] == ["-m"]:
        return ("-m", __name__) in pairwise(sys.orig_argv)
    return Path(next(iter(sys.argv), "")).stem == __name__


def _start_late() -> None:
    """Run `start` at the end of torch's import, unless a module of normforge imports torch."""
    modules = [(name, module) for name, module in sys.modules.items() if name.startswith(f"{__name__}.")]
    halfway = [name for name, module in modules if getattr(module.__spec__, "_initializing", False)]
    if halfway:
        raise ImportError(f"{halfway[0]} needs torch, which a program of JAX's has to import first: import torch")
    start()


if not _is_command():
    # A program of JAX's may never need torch.
    if sys.modules.get("torch") is None and ("jax" in sys.modules or find_spec("torch") is None):
        from .upstream.imports import when_imported

        when_imported("torch", _start_late)
    else:
        start()
