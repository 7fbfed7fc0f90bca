"""The instance that a call would take."""

from __future__ import annotations

import inspect
from typing import Any

from ..calls.backend import backend
from ..calls.check import TAKEN_WITH_ITS_SCALE, check, refuse_fp8, refuse_gradient
from ..calls.randomness import described
from ..codegen.parameters import FORWARD
from ..codegen.values import Norm
from ..dtypes import word
from ..selection import dispatch
from . import public


def which(*arguments: Any, norm: str | Norm = "layer", functional: bool = False, **keywords: Any) -> str:
    """Name the instance that a forward call would take, without generating or launching anything.

    Args:
        *arguments: the arguments of the norm's forward function, `layernorm2d_fwd` say.
        norm: the norm's word: "layer" or "rms".
        functional: whether the question is about `layer_norm`, `rms_norm` or a module rather than the forward
            function. Those run torch's own operator where no kernel can run, and then the answer is "torch".
        **keywords: the keyword arguments of the forward function.

    Returns:
        The name that `instances()` lists, or would list once it has been generated on demand.

    Raises:
        NormforgeError: whatever the call itself would raise about its arguments.
    """
    kind = word(Norm, "norm", norm)
    bound = inspect.signature(getattr(public, FORWARD.functions[kind])).bind(*arguments, **keywords)
    bound.apply_defaults()
    args = bound.arguments
    if "dropout_p" in args:
        args["dropout_p"], args["dropout_rng"] = described(args["dropout_p"], args["dropout_rng"], args["x"])
    call = check(FORWARD.functions[kind], args)
    if not functional:
        refuse_gradient(call)
    else:
        refuse_fp8(call.x, TAKEN_WITH_ITS_SCALE.format(FORWARD.functions[kind]))
        if backend(call.x) == "torch":
            return "torch"
    return dispatch.name_of(call.mode, call.n)
