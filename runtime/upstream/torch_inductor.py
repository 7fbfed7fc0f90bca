"""Custom passes of Inductor: check that this torch is a known release, and install a pass for the process.

`torch._inductor.config.post_grad_custom_pre_pass = p` is the public way. Since torch 2.13 this sets one thread
alone, and autograd compiles the backward graph of CUDA tensors in another. So the pass becomes the default of the
setting, which all threads see, and is also set in the thread if another value was set there. Importing the setting
takes 2.8 s, most of it TorchDynamo; this module imports it only after other code did, or on request.

The module also chooses the function that Inductor's code calls in place of an operator. Inductor writes a call of
`torch.ops.ns.name.default` for an operator that it makes no code of, and torch's dispatcher takes some 8 us to hand 17
arguments to a kernel in Python. `FallbackKernel.set_python_kernel_name` decides which name is written. If a needed
interface is missing, Inductor's code calls the operator as usual.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .imports import when_imported
from .torch_internals import known_to_hold

# The releases whose graphs the passes were tried on.
KNOWN = ("2.11", "2.12", "2.13", "2.14", "2.15")

_SETTING = "post_grad_custom_pre_pass"
_CONFIG = "torch._inductor.config"


def reason_against(version: str = torch.__version__) -> str | None:
    """Return the reason why graphs of this torch are not rewritten, or None."""
    release = ".".join(version.split("+")[0].split(".")[:2])
    if release in KNOWN:
        return None
    return f"torch {version} is none of those that they were tried on ({', '.join(KNOWN)})"


def is_loaded() -> bool:
    """Return True if Inductor's settings were imported."""
    return _CONFIG in sys.modules


def _settings() -> Any:
    """Import Inductor's settings and return the module, for which torch declares no types."""
    from torch._inductor import config

    return config


def installed() -> Any:
    """Return the passes that run over partitioned graphs, as this thread sees them."""
    return getattr(_settings(), _SETTING)


def install(custom_pass: Any) -> None:
    """Have a pass run over partitioned graphs in all threads, in place of the passes before."""
    _settings()._config[_SETTING].default = custom_pass
    if installed() is not custom_pass:
        # A value that was set takes precedence over the default.
        setattr(_settings(), _SETTING, custom_pass)


def uninstall(custom_pass: Any, before: Any) -> None:
    """Undo `install`, given what ran before."""
    setting = _settings()._config[_SETTING]
    if setting.default is custom_pass:
        setting.default = None
    if before is not None or installed() is custom_pass:
        setattr(_settings(), _SETTING, before)


def run_pass(custom_pass: Callable[..., None], graph: torch.fx.Graph, is_inference: bool) -> None:
    """Run a pass as Inductor does, which passes `is_inference` to passes that take the argument."""
    from torch._inductor import custom_graph_pass

    aware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())
    if isinstance(custom_pass, aware):
        custom_pass(graph, is_inference=is_inference)
    else:
        custom_pass(graph)


def all_equal(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if sizes or strides are equal for all values of their symbols."""
    return len(sizes) == len(others) and all(known_to_hold(a == b) for a, b in zip(sizes, others, strict=True))


def without_guards(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which questions about a fake tensor's sizes add no guards, and so cause no recompilation."""
    environment: Any = getattr(getattr(tensor, "fake_mode", None), "shape_env", None)
    return nullcontext() if environment is None else environment.suppress_guards()


Operator = torch._ops.OpOverload[Any, Any]

# The name of the operator's attribute that Inductor's code calls. Code that another process wrote to Inductor's cache
# finds the attribute too.
AT_ONCE = "at_once"

_LOWERING = "torch._inductor.lowering"

_log = logging.getLogger(__name__)


def called_at_once(functions: Mapping[Operator, Callable[..., Any]]) -> None:
    """Have Inductor's code call functions in place of operators, with the same arguments: the last by name.

    This does not import Inductor. Code that Inductor writes in C++, or as a graph, calls the operators.
    """
    for operator, function in functions.items():
        setattr(operator, AT_ONCE, function)
    when_imported(_LOWERING, functools.partial(_lower, tuple(functions)))


def _lower(operators: tuple[Operator, ...]) -> None:
    from torch._inductor import ir
    from torch._inductor import lowering as inner

    # Torch declares no types for this module.
    lowering: Any = inner
    try:
        needed = (ir.FallbackKernel.set_python_kernel_name, lowering.constrain_to_fake_tensors)
        for operator in operators:
            if operator not in lowering.lowerings:
                lowering.make_fallback(operator, needed[1], warn=False)
                lowering.lowerings[operator] = _renaming(operator, lowering.lowerings[operator])
    except (AssertionError, AttributeError, ImportError, KeyError, TypeError):
        _log.debug("this Inductor is another than is known; its code calls operators", exc_info=True)


def _renaming(operator: Operator, lower: Callable[..., Any]) -> Callable[..., Any]:
    """Return a lowering that lowers an operator as Inductor does, and gives the result the name to call."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    @functools.wraps(lower)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        graph: Any = V.graph
        before = len(graph.operations)
        lowered = lower(*args, **kwargs)
        last = [each.name for each in operator._schema.arguments][len(args) :]
        if [*kwargs] == last and not (graph.cpp_wrapper or getattr(graph, "fx_wrapper", False)):
            for each in graph.operations[before:]:
                if isinstance(each, ir.FallbackKernel) and each.op_overload is operator:
                    each.set_python_kernel_name(f"{each.python_kernel_name}.{AT_ONCE}")
        return lowered

    return renamed
