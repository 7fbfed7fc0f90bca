"""The functions that are called, by family, and how calls of them can differ: read off signatures and schemas.

What a parameter can be follows from its row in `codegen/parameters.py`; parameters that have none are listed here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml

import normforge
from normforge.codegen.families import REQUIRED, Kind, Parameter
from normforge.codegen.parameters import BACKWARD, FAMILIES, FORWARD, GATED, GRADIENTS, MODULATED, QUANTISED
from normforge.codegen.values import FusedQuant, HeadNorm, Norm
from normforge.dtypes import DTYPES

from ..cases import with_tuples
from .contexts import CONTEXTS, PLACES, TRANSFORMS
from .operands import EIGHT_BITS, FLOATS, LAYOUTS, USUAL_HOLDERS, USUAL_LAYOUTS, Operand, built

# A call: its properties by name; those that print alike are the same.
Call = dict[str, Any]
Draw = Callable[[Random], Any]

LENGTHS = (16,) * 4 + (8, 17, 1, 2, 32, 3, 48, 128, 129, 300)
# From 8 rows on, kernels compute gradients to modulations and gates.
LEADS = (*[(16,), (3, 8), (9,)] * 2, (4,), (1,), (2, 3), (1, 4), (2, 1), (2, 2, 2), (), (0,), (64, 33), (2100,))


def one_of(*values: Any) -> Draw:
    """Return what draws one of some values."""
    return lambda random: random.choice(values)


def _often(value: Any, others: Any, times: int = 2) -> Draw:
    return one_of(*[value] * (times * len(others)), *others)


# Properties of every call, with the value that each has if nothing was said.
SETTINGS: Mapping[str, tuple[Any, Draw]] = {
    "n": (16, one_of(*LENGTHS)),
    "lead": ((16,), one_of(*LEADS)),
    "place": ("", _often("", tuple(PLACES))),
    "outer": ("", _often("", tuple(CONTEXTS), 1)),
    "inner": ("", _often("", tuple(CONTEXTS))),
    "transform": ("", _often("", tuple(TRANSFORMS), 1)),
    "alias": ("", _often("", ("residual=x", "gate=x", "bias=weight", "out=x", "out=residual", "residual_out=out"), 3)),
    "gradient": ("contiguous", _often("contiguous", tuple(LAYOUTS), 1)),
    "arriving": ("all", one_of("all", "all", "all", "first", "last", "none")),
    "create_graph": (False, one_of(False, False, False, True)),
    "twice": (False, one_of(False, False, True)),
    "back_place": ("", _often("", tuple(PLACES), 3)),
    "back_context": ("", _often("", tuple(CONTEXTS), 1)),
}

_NUMBERS: Mapping[str, Draw] = {
    "eps": _often(
        1e-5,
        (
            1e-6,
            0.0,
            1,
            0,
            True,
            np.float64(1e-5),
            np.float32(1e-5),
            torch.tensor(1e-5),
            -1.0,
            math.inf,
            1e40,
            None,
            "1",
        ),
        1,
    ),
    "weight_offset": _often(0.0, (1.0, 0, 1, True, -1.0, 1e40, np.float32(1.0), None), 1),
    "dropout_p": _often(0.0, (0.5, 0.25, 0.5, 0, 1.0, -0.5, True, np.float32(0.5), None), 1),
}
_SPECIAL: Mapping[str, Draw] = {
    "normalized_shape": _often("(n,)", ("[n]", "Size", "(n,)", "(float(n),)", "last two", None, "n", "(n + 1,)"), 1),
    "dim": one_of(-1, -1, -1, 1, 2),
    "num_groups": one_of(1, 2, 4, 4, 4, 2.0, True, 3, 0),
    "norm_before_gate": one_of(True, True, False, 1),
    "return_mask": one_of(False, False, False, True, 1),
    "next_norm": one_of(False, True, 1),
    "saves": one_of(False, True),
    "dtype": one_of(None, *FLOATS),
}
_HEADS = dict.fromkeys(("q", "k", "dq_out", "dk_out"), ("heads", "heads", "heads", "head", "no heads"))
_TURNS = dict.fromkeys(("cos", "sin"), ("turns", "turns", "shared turns"))
_INTEGERS = {"positions": ("lead", "lead", "axes"), "slot_mapping": ("lead",)}
_NAMED_FORMS: Mapping[str, tuple[str, ...]] = {
    "y_scale": ("one", "vector", "lead", "column", "none"),
    "amax_out": ("one", "none", "vector"),
    "statistics": ("groups",),
    "key_cache": ("blocks",),
    **_HEADS,
    **_TURNS,
    **_INTEGERS,
}
_FORMS: Mapping[Kind, tuple[str, ...]] = {
    Kind.ROWS: ("rows",) * 12 + ("vector",),
    Kind.OUT: ("rows",) * 12 + ("lead",),
    Kind.SAMPLES: ("sample", "sample", "rows", "vector"),
    Kind.GROUPS: ("vector", "vector", "groups"),
    Kind.VECTOR: ("vector",) * 12 + ("longer", "matrix"),
    Kind.PER_ROW: ("lead", "lead", "column"),
    Kind.SCALE: ("one", "lead", "column"),
    Kind.SCALES: ("one", "lead", "column", "by 32", "by 128"),
    Kind.VALUE: ("one", "none"),
}


def shape_of(form: str, n: int, lead: tuple[int, ...], *, channels: bool = False) -> tuple[int, ...]:
    """Return the shape of a form, for rows of n and so many leading dimensions."""
    rows = (*lead[:1], n, *lead[1:]) if channels else (*lead, n)
    return {
        "rows": rows,
        "vector": (n,),
        "longer": (n + 1,),
        "matrix": (1, n),
        "sample": (lead[0] if lead else 1, n),
        "groups": (lead[-1] if lead else 1, n),
        "lead": lead,
        "column": (*lead, 1),
        "by 32": (*lead, -(-n // 32)),
        "by 128": (*lead, -(-n // 128)),
        "heads": (*lead, 2, n),
        "head": (*lead, 1, n),
        "no heads": (*lead, 0, n),
        "of all heads": (2 * n,),
        "turns": (*lead, n // 2),
        "shared turns": (lead[-1] if lead else 1, n // 2),
        "axes": (3, *lead),
        "blocks": (3, 4, 2, n),
        "one": (1,),
        "none": (),
    }[form]


# The dtypes that are drawn of rows, and of vectors.
_OF_ROWS = (*FLOATS * 5, torch.float64, torch.int32)
_OF_VECTORS = (*FLOATS * 4, torch.float64)


def operand(forms: tuple[str, ...], dtypes: tuple[torch.dtype | None, ...], optional: bool, grads: float) -> Draw:
    """Return what draws a tensor's properties: None in 9 of 20 if it is optional, and a gradient at a rate."""

    def draw(random: Random) -> Any:
        if optional and random.random() < 0.45:
            return None
        layout = random.choice(USUAL_LAYOUTS)
        holder = random.choice(USUAL_HOLDERS) if random.random() < 0.5 else "tensor"
        return Operand(random.choice(dtypes), layout, holder, random.random() < grads, random.choice(forms))

    return draw


# By family, what its functions take that rows of the same name do not say.
_OWN: Mapping[str, Mapping[str, Draw]] = {
    "gated": {"group_size": _often(None, (8, 16, 1, 4, True, 8.0), 1)},
    "quantised": {"group_size": _often(None, (16, 32, 64, 128, "32", "none", 5), 1)},
    "rope": {
        **{name: operand(forms, _OF_ROWS, False, 0.4) for name, forms in _HEADS.items()},
        **{name: operand(forms, _OF_VECTORS, False, 0.03) for name, forms in _TURNS.items()},
        **{
            name: operand(forms, (torch.int64, torch.int64, torch.int32, torch.float32), True, 0.0)
            for name, forms in _INTEGERS.items()
        },
        **dict.fromkeys(
            ("q_weight", "k_weight"), operand((*["vector"] * 6, "of all heads", "longer"), _OF_VECTORS, True, 0.4)
        ),
        "key_cache": operand(("blocks",), (torch.float32, *FLOATS, torch.float8_e4m3fn), True, 0.03),
        "k_scale": operand(("one", "none", "vector"), (*[torch.float32] * 8, torch.float16), True, 0.03),
        "norm": one_of(*[norm.value for norm in HeadNorm] * 2, Norm.RMS, HeadNorm.LAYER, "odd"),
        "rotary_dim": _often(None, (16, 8, 2, 7, 8.0, True), 1),
        "mrope_section": _often(None, ((2, 3, 3), [2, 3, 3], (8, 0, 0), (2, 2, 2), (1, 1, 2)), 1),
        **dict.fromkeys(("interleaved", "mrope_interleaved", "alternates"), one_of(False, False, True, 1)),
        **dict.fromkeys(("height", "width"), one_of(0, 0, 3)),
        "due": one_of([False, False], [True, True], [True, False]),
        "out": _often(None, ("in place", "new", "of q alone"), 2),
    },
    **{family: {"activation": one_of(None, "silu", "none", "silu", "relu")} for family in ("", "group")},
}


def _of_row(row: Parameter, operator: bool) -> Draw:
    forms, optional = _NAMED_FORMS.get(row.name, _FORMS.get(row.kind, ("one",))), row.is_optional
    match row.kind:
        case Kind.ROWS:
            eight = EIGHT_BITS[1:] if row.axis == "dtype_in" or row.name == "dy" else ()
            return operand(forms, (*_OF_ROWS, *eight), optional, 0.4)
        case Kind.VECTOR | Kind.GROUPS | Kind.SAMPLES:
            return operand(forms, _OF_VECTORS, optional, 0.4)
        case Kind.OUT:
            return operand(forms, (*[None] * 8, *FLOATS, torch.int8), optional, 0.03)
        case Kind.PER_ROW | Kind.SCALE | Kind.SCALES | Kind.VALUE:
            other = torch.float8_e8m0fnu if row.kind is Kind.SCALES else torch.float16
            return operand(forms, (*[torch.float32] * 8, other), optional, 0.03)
        case Kind.RANDOM:
            return one_of(None, "tensor", "tensor", *(() if operator else ("pair", "generator", "other pair")))
        case Kind.NUMBER:
            return _NUMBERS[row.name]
        case Kind.FLAG:
            return one_of(False, True, *(() if operator else (1, 0, None)))
        case Kind.DTYPE:
            return one_of(None, None, *FLOATS, *EIGHT_BITS, torch.float4_e2m1fn_x2, torch.int32)
        case Kind.NAMES:
            return one_of(*_WANTS)
        case Kind.WORD:
            assert row.words is not None
            words = [str(word.value) for word in row.words]
            codes = [word.code for word in row.words if hasattr(word, "code")] if row.takes_codes else []
            return one_of(*words * 2, *(() if operator else (*codes, True, next(iter(row.words)), "odd")))
    raise AssertionError(row.kind)


_WANTS = (
    ("dx",), ("dx", "dweight"), ["dx", "dweight"], ("dx", "dweight", "dbias"), ("dweight",), ("dbias",),
    ("dx", "dx_bias"), ("dx", "ddropped"), (), "dx", ("dx", "odd"), ("dx", "dscale", "dshift"), ("dx", "dgate"),
    ("dgated", "dgate", "dscale"),
)  # fmt: skip


@dataclass(frozen=True)
class Function:
    """A function, and the properties in which calls of it can differ.

    Attributes:
        name: the function's, or the operator's with its namespace.
        call: the function itself.
        draws: by parameter, what draws an argument.
        defaults: by parameter, the argument of a call that nothing was said of.
        rows: by parameter, its row.
        channels: whether x has its channels behind its samples.
    """

    name: str
    call: Callable[..., Any]
    draws: Mapping[str, Draw]
    defaults: Mapping[str, Any]
    rows: Mapping[str, Parameter]
    channels: bool = False


def _rows_for(name: str) -> dict[str, Parameter]:
    words = {"modulated": MODULATED, "gated": GATED, "quantised": QUANTISED, "_bwd": BACKWARD}
    own = next((family for word, family in words.items() if word in name), FORWARD)
    own = next((each for each in FAMILIES if name.removeprefix("torch.") in each.functions.values()), own)
    if "_backward" in name:
        own = GRADIENTS.get(own.name, own)
    families = [family for family in FAMILIES if family not in (own, FORWARD)]
    return {row.name: row for family in (*families, FORWARD, own) for row in family.parameters}


def _function(name: str, call: Callable[..., Any], parameters: Mapping[str, tuple[Any, bool]]) -> Function:
    """Return the row of a function.

    Args:
        name: its name.
        call: itself.
        parameters: by name, the default (`REQUIRED` for none) and whether None may be passed.
    """
    operator, rows = name.startswith("torch."), _rows_for(name)
    kind = next((kind for kind in _OWN if kind in name), "")
    draws, defaults = {}, {}
    for parameter, (default, optional) in parameters.items():
        row = rows.get(parameter)
        forms = _NAMED_FORMS.get(parameter, () if row is None else _FORMS.get(row.kind, ()))
        if parameter in _OWN.get(kind, {}) and not (operator and kind not in ("group", "rope")):
            draws[parameter] = _OWN[kind][parameter]
        elif row is not None:
            draws[parameter] = _of_row(row, operator)
        elif forms:
            draws[parameter] = operand(forms, (torch.float32,) * 8 + (torch.float16,), optional, 0.03)
        else:
            draws[parameter] = _SPECIAL[parameter]
        if default is not REQUIRED:
            defaults[parameter] = default
        elif parameter == "normalized_shape":
            defaults[parameter] = "(n,)"
        elif forms and (not optional or parameter == "dy"):
            defaults[parameter] = Operand(torch.int64 if parameter in _INTEGERS else torch.float32, form=forms[0])
        else:
            defaults[parameter] = None if optional else _usual(parameter, row)
    return Function(name, call, draws, defaults, rows, channels="group_norm" in name)


def _usual(name: str, row: Parameter | None) -> Any:
    if row is None or row.kind is Kind.NAMES:
        usual = {"num_groups": 2, "wants": ("dx",), "norm_before_gate": True, "activation": "none"}
        return (usual | {"norm": "rms", "rotary_dim": 16, "due": [True, True]}).get(name, False)
    if row.kind is Kind.WORD:
        assert row.words is not None
        return str(next(iter(row.words)).value)
    return {Kind.NUMBER: {"eps": 1e-5}.get(name, 0.0), Kind.FLAG: False, Kind.DTYPE: torch.float32}[row.kind]


def _public(name: str, home: Any = normforge) -> Function:
    call = getattr(home, name)
    found = inspect.signature(call).parameters.values()
    empty = inspect.Parameter.empty
    passed = {
        each.name: (REQUIRED if each.default is empty else each.default, "None" in str(each.annotation))
        for each in found
        if each.name != "group"
    }
    return _function(name, call, passed)


def _operator(name: str) -> Function:
    call = getattr(torch.ops.normforge, name).default
    schema = call._schema.arguments
    return _function(f"torch.{name}", call, {each.name: (REQUIRED, "Optional" in str(each.type)) for each in schema})


# By family, the public functions.
_PUBLIC = {
    "functional": ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"),
    "added": ("layer_norm_add", "rms_norm_add", "renormed_layernorm2d_fwd", "renormed_rmsnorm2d_fwd"),
    "forward": ("layernorm2d_fwd", "rmsnorm2d_fwd"),
    "backward": tuple(f"{word}{norm}2d_bwd" for word in ("", "quantised_") for norm in ("layernorm", "rmsnorm")),
    "modulated": tuple(f"modulated_{name}" for name in ("layer_norm", "rms_norm", "layernorm2d_fwd", "rmsnorm2d_fwd")),
    "gated": tuple(f"gated_{name}" for name in ("layer_norm", "rms_norm", "layernorm2d_fwd", "rmsnorm2d_fwd")),
    "quantised": ("quantised_layer_norm", "quantised_rms_norm"),
    "statistics": ("layer_statistics", "rms_statistics"),
    "heads": ("qk_norm_rope", "qk_norm_rope_bwd"),
    "l2": ("l2_norm", "l2norm2d_fwd", "l2norm2d_bwd", "normalize", "normalize2d_fwd", "normalize2d_bwd"),
}
# The operator of norms behind an exchange, which is there once `normforge.parallel` was imported, takes several ranks.
_OPERATORS = sorted(
    name.removeprefix("normforge::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("normforge::") and name != "normforge::all_reduce_norm"
)


def _several(name: str) -> Function:
    """Return the row of `rms_norms`, the first of whose norms is a function's, with what differs from its defaults."""
    alone = _public(name)

    def call(x: Any, beside: Any, **given: Any) -> Any:
        options = {each: value for each, value in given.items() if _is_given(value, alone.defaults[each])}
        return normforge.rms_norms([(x, options.pop("weight", None), options), (beside,)])

    dtypes = (*FLOATS * 5, torch.float64)
    rows = {each: operand(("rows",), dtypes, each == "residual", 0.4) for each in ("residual", "beside")}
    defaults = {**alone.defaults, "residual": None, "beside": Operand(form="rows")}
    return replace(alone, name=f"rms_norms, {name}", call=call, draws={**alone.draws, **rows}, defaults=defaults)


def _is_given(value: Any, default: Any) -> bool:
    return isinstance(value, torch.Tensor) or repr(value) != repr(default)


def families() -> dict[str, list[Function]]:
    """Return the functions of each family that this module knows."""
    from normforge import parallel

    found = {family: [_public(name) for name in names] for family, names in _PUBLIC.items()}
    over_channels = [_public(name) for name in ("layer_norm", "rms_norm", "l2_norm", "normalize")]
    found["group"] = [
        _public("group_norm"),
        *[replace(each, channels=True, defaults={**each.defaults, "dim": 1}) for each in over_channels],
    ]
    found["several"] = [_several(name) for name in ("add_rms_norm", "quantised_rms_norm")]
    found["operators"] = [_operator(name) for name in _OPERATORS]
    found["parallel"] = [_public(f"split_{norm}", parallel) for norm in ("layer_norm", "rms_norm")]
    return found


def _jump(value: Any) -> Any:
    """Return an argument that `jumps.yaml` holds."""
    if isinstance(value, dict):
        return Operand(**{name: _jump(each) for name, each in value.items()})
    found = getattr(torch, value, None) if isinstance(value, str) else None
    return found if isinstance(found, torch.dtype) else value


JUMPS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    word: tuple({name: _jump(each) for name, each in jump.items()} for jump in jumps)
    for word, jumps in with_tuples(yaml.safe_load(Path(__file__).with_name("jumps.yaml").read_text())).items()
}


def settled(function: Function, call: Call) -> Call:
    """Return a call whose arguments go together, as far as rows say which of them need which."""
    call = dict(call)
    for name in _HEADS:
        if isinstance(call.get(name), Operand) and isinstance(call["q"], Operand):
            call[name] = call[name]._replace(dtype=call["q"].dtype)
    axes = _axes(function, call)
    for name in function.draws:
        row = function.rows.get(name)
        if row is None or row.name not in call:
            continue
        asked = True
        if row.wanted and (row.absent or row.unused):
            try:
                asked = row.is_asked_for(axes)
            except AttributeError:
                continue
            if row.kind.is_tensor and row.kind is not Kind.RANDOM and asked and row.absent and call[name] is None:
                call[name] = Operand(form=_FORMS[row.kind][0])
            if not asked and row.kind.is_tensor:
                call[name] = None
        if row.needs and call.get(row.needs) is None and call[name]:
            call[name] = 0.0
    return call


def _axes(function: Function, call: Call) -> SimpleNamespace:
    axes = SimpleNamespace(dropout=bool(call.get("dropout_p")))
    for name in function.draws:
        row = function.rows.get(name)
        if row is not None and row.words is not None:
            word = call[name]
            found = [each for each in row.words if word in (each, each.value, getattr(each, "code", each.value))]
            setattr(axes, row.axis or name, found[0] if found else next(iter(row.words)))
        elif row is not None and row.kind.is_tensor and row.axis:
            setattr(axes, row.axis, call[name] is not None)
    x = call.get("x")
    dtype = x.dtype if isinstance(x, Operand) else None
    axes.dtype_in = DTYPES.get(dtype or torch.float32, DTYPES[torch.float32])
    return axes


def _result_dtype(name: str, call: Call) -> torch.dtype:
    """Return the dtype of the result that goes to a place."""
    x, residual = call.get("x"), call.get("residual")
    if name == "amax_out":
        return torch.float32
    if name == "residual_out":
        return residual.dtype if isinstance(residual, Operand) and residual.dtype else torch.float32
    quantises = call.get("fquant") not in ("none", 0, False, None, FusedQuant.NONE)
    of_x = x.dtype if isinstance(x, Operand) and x.dtype else torch.float32
    found: torch.dtype = call.get("out_dtype") or (torch.int8 if quantises else of_x)
    return torch.uint8 if found is torch.float4_e2m1fn_x2 else found


def arguments(function: Function, call: Call) -> dict[str, Any]:
    """Return the arguments of a call, by parameter."""
    n, lead = call["n"], call["lead"]
    made: dict[str, Any] = {}
    for name in function.draws:
        value = call[name]
        if isinstance(value, Operand):
            row = function.rows.get(name)
            form = value.form or (_FORMS[row.kind][0] if row else "rows")
            shape = shape_of(form, n, lead, channels=function.channels and form == "rows")
            if name == "statistics":
                shape = (2, lead[0] if lead else 1, 2)
            made[name] = built(value, shape, value.dtype or _result_dtype(name, call))
        elif name == "normalized_shape":
            sizes = {
                "(n,)": (n,),
                "[n]": [n],
                "Size": torch.Size((n,)),
                "(float(n),)": (float(n),),
                "(n + 1,)": (n + 1,),
            }
            made[name] = sizes.get(value, n if value == "n" else None if value is None else (*lead[-1:], n))
        elif name == "dropout_rng":
            made[name] = {
                "pair": (1, 2), "other pair": (3, 4), "tensor": torch.tensor([5, 6]), "generator": torch.Generator(),
            }.get(value)  # fmt: skip
        elif name == "out" and isinstance(value, str):
            q, k = made["q"], made["k"]
            pairs = {"in place": (q, k), "of q alone": (q, torch.empty_like(k))}
            made[name] = pairs.get(value, (torch.empty_like(q), torch.empty_like(k)))
        else:
            made[name] = list(value) if function.name.startswith("torch.") and isinstance(value, tuple) else value
    target, _, source = call["alias"].partition("=")
    if target in made and source in made and made[target] is not None:
        made[target] = made[source]
    return made
