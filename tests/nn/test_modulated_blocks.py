"""`patch` finds out which functions modulate by calling them, and calls whatever may change unseen."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from normforge.patching import modulating

from .test_forms import modulate, modulate_scale_first


def function(*body: str, **names: Any) -> Any:
    """Return a function with a body and globals of its own."""
    names |= {"modulate": modulate, "torch": torch}
    exec("\n    ".join(("def modulates(x, shift, scale, *, factor=1.0):", *body)), names)
    return names["modulates"]


def enclosing(factor: Any, plus: Callable[[Any, torch.Tensor], torch.Tensor] = torch.add) -> Any:
    return lambda x, shift, scale: x * plus(factor, scale[:, None]) + shift[:, None]


def formula_of(function: Any) -> modulating.Formula | None:
    return modulating.formula_of(function, 2, ())


BY_FLAG = "return modulate(x, scale, shift) if flag else modulate(x, shift, scale)"
BY_DTYPE = "return modulate(x, scale, shift) if dtypes[0] is torch.float32 else modulate(x, shift, scale)"
# Of a builtin, and of a keyword's default.
BY_ABS, BY_FACTOR = (f"return x * ({one} + scale[:, None]) + shift[:, None]" for one in ("abs(-1)", "factor"))
BY_ADD = "return add(x * (1 + scale[:, None]), shift[:, None])"


def test_a_function_that_reads_what_is_set_otherwise_since() -> None:
    """Globals of its own or of a function that it calls, a builtin, a default, its closure or its code."""
    inner = function(BY_FLAG, flag=False)
    changed: list[tuple[Any, Callable[[Any], object]]] = [
        (function(BY_FLAG, flag=False), lambda f: f.__globals__.update(flag=True)),
        (function("return inner(x, shift, scale)", inner=inner), lambda f: inner.__globals__.update(flag=True)),
        (function(BY_ADD, add=torch.add), lambda f: f.__globals__.update(add=torch.sub)),
        (function(BY_DTYPE, dtypes=(torch.half,)), lambda f: f.__globals__.update(dtypes=(torch.float32,))),
        (function(BY_ABS), lambda f: f.__globals__.update(abs=lambda _: 2)),
        (function(BY_FACTOR), lambda f: f.__kwdefaults__.update(factor=2.0)),
        (enclosing(1.0), lambda f: setattr(f.__closure__[0], "cell_contents", 2.0)),
        (function("return modulate(x, shift, scale)"), lambda f: setattr(f, "__code__", function("return x").__code__)),
    ]
    for each, change in changed:
        assert formula_of(each) == modulating.Formula(scale=1, by_sample=True)
        change(each)
        assert formula_of(each) != modulating.Formula(scale=1, by_sample=True)


class Holding:
    factor, modulates = 1.0, staticmethod(modulate)


def test_a_function_of_what_may_change_unseen_is_called() -> None:
    module: Any = ModuleType("own")
    module.factor, module.modulates = 1.0, modulate
    own = function("return modulate(x, shift, scale)")
    own.factor = 1.0
    refused = {
        "a dictionary": function('return modulate(x, shift, scale * settings["factor"])', settings={"factor": 1.0}),
        "a module": function("return modulate(x, shift, scale * module.factor)", module=module),
        "its own attribute": own,
        "counting": function("global calls", "calls += 1", "return modulate(x, shift, scale)", calls=0),
        "a cell": enclosing({"factor": 1.0}, lambda held, scale: held["factor"] + scale),
        "long rows": function("return modulate(x, shift, scale) if x.shape[1] < 200 else x"),
        "a function of a module": function("return module.modulates(x, shift, scale)", module=module),
        "a method": function("return held.modulates(x, shift, scale)", held=Holding),
        "a tuple": function("return held[0](x, shift, scale)", held=(modulate,)),
    }
    assert [name for name, each in refused.items() if formula_of(each) is not None] == []
    assert None not in map(formula_of, (modulate, modulate_scale_first))
