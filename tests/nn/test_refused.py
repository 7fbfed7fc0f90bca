"""What functions and modules refuse: one table, each call made twice, and after a good one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import normforge
from normforge.errors import ConflictError, DeviceError, DTypeError, LayoutError, ShapeError
from normforge.selection import dispatch

from .oracle import FUNCTIONS

MODULES = (normforge.LayerNorm, normforge.RMSNorm, normforge.LayerNormAdd, normforge.RMSNormAdd)
ADDING = (normforge.AddLayerNorm, normforge.AddRMSNorm)
X, IMAGES, VECTOR = torch.randn(3, 40), torch.randn(2, 8, 3, 3), torch.randn(40)
ROWS, SAMPLES = torch.randn(2, 3, 8), dict.fromkeys(("scale", "shift", "gate"), torch.randn(8))

# A good call of each kind.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "group": (normforge.group_norm, {"x": IMAGES, "num_groups": 2, "weight": VECTOR[:8]}),
    "gated": (normforge.gated_layer_norm, {"x": X, "gate": X, "weight": VECTOR, "bias": VECTOR}),
    "gated rms": (normforge.gated_rms_norm, {"x": X, "gate": X, "weight": VECTOR, "group_size": 8}),
    "modulated": (normforge.modulated_layer_norm, {"x": X, "scale": VECTOR, "shift": VECTOR}),
    "modulated rows": (normforge.modulated_layer_norm, {"x": ROWS, "residual": ROWS, **SAMPLES}),
    "modulated rms": (normforge.modulated_rms_norm, {"x": X, "scale": VECTOR, "shift": VECTOR}),
    "l2": (normforge.l2_norm, {"x": X, "weight": VECTOR}),
    "module": (normforge.GatedRMSNorm, {"hidden_size": 24}),
    "layer module": (normforge.GatedLayerNorm, {"hidden_size": 24}),
    "group module": (normforge.GroupNorm, {"num_groups": 2, "num_channels": 8}),
    "module's call": (normforge.RMSNorm(40), {"x": X}),
    "adding module's call": (normforge.AddRMSNorm(40), {"x": X, "residual": X}),
    "added module's call": (
        normforge.RMSNormAdd((4, 10), elementwise_affine=False),
        dict.fromkeys(("x", "residual"), X.view(3, 4, 10)),
    ),
    **{f"{cls.__name__} module": (cls, {"normalized_shape": 40}) for cls in (*MODULES, *ADDING)},
}
for norm, function in FUNCTIONS.items():
    beside = {"residual": X} if norm.startswith("add") else {"normalized_shape": (40,)}
    CALLS[norm] = (function, {"x": X, **beside, "weight": VECTOR, "x_bias": VECTOR})
    if norm.startswith("add"):
        CALLS[f"{norm}, dropped"] = (function, {"x": X, **beside, "weight": VECTOR, "dropout_p": 0.3})
_DIVISOR = r"group_size=.* and x has shape \(3, 40\); it takes a divisor of N, 40"
_INDIVISIBLE = "Expected number of channels in input to be divisible by num_groups, but got input of shape"
BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("group", {"num_groups": 3}, ShapeError, _INDIVISIBLE),
    ("group", {"num_groups": 0}, ShapeError, "num_groups is 0"),
    *(
        ("group", {"num_groups": wrong}, ShapeError, "it takes a whole number")
        for wrong in (np.float64(2), torch.tensor(2.0), "2", True)
    ),
    ("group", {"bias": torch.ones(1, 8)}, ShapeError, r"bias has shape \(1, 8\); it takes \(8,\)"),
    ("group", {"x": IMAGES[0, :, 0, 0]}, ShapeError, "at least 2 dimensions"),
    ("group", {"activation": "gelu"}, ConflictError, "activation='gelu' is no mode; it takes 'none', 'silu'"),
    ("group", {"eps": -1.0}, ConflictError, "eps=-1"),
    *(("gated rms", {"group_size": wrong}, ShapeError, _DIVISOR) for wrong in (0, 7, -8, 80, 8.0, True, "8")),
    ("gated rms", {"activation": "relu"}, ConflictError, "activation='relu' is no mode; it takes 'silu', 'sigmoid'"),
    ("gated rms", {"norm_before_gate": "no"}, ConflictError, "norm_before_gate='no' is no flag; it takes True or"),
    ("gated rms", {"eps": -1}, ConflictError, "eps=-1"),
    ("gated rms", {"gate": None}, DTypeError, "gate"),
    ("modulated", {"gate": VECTOR}, ConflictError, "gate scales x before residual is added to it, and none was passed"),
    ("modulated rms", {"scale": None}, DTypeError, "scale"),
    ("modulated rms", {"eps": -1}, ConflictError, "eps=-1"),
    ("l2", {"eps": -1.0}, ConflictError, "eps"),
    ("module", {"group_size": 7}, ShapeError, "group_size=7 and hidden_size=24; it takes a divisor of that"),
    ("layer module", {"activation": "gelu"}, ConflictError, "activation='gelu'"),
    ("module", {"norm_before_gate": 2}, ConflictError, "norm_before_gate=2"),
    ("group module", {"activation": "relu"}, ConflictError, "activation='relu'"),
    ("module's call", {"x": X[:, :32]}, ShapeError, r"normalized_shape is \(40,\) and x has shape \(3, 32\)"),
    # Rows of 40 elements were normalised before, as rows of four times ten.
    ("added module's call", {"x": X, "residual": X + 1}, ShapeError, r"is \(4, 10\) and x has shape \(3, 40\)"),
    ("added module's call", {"residual": X}, ShapeError, r"residual has shape \(3, 40\)"),
    ("added module's call", {"residual": None}, DTypeError, "residual is a NoneType"),
    *(
        (f"{cls.__name__} module", bad, ConflictError, says)
        for cls in (*MODULES, *ADDING)
        for bad, says in (
            ({"weight_offset": 1.0, "elementwise_affine": False}, "^weight_offset=1.0 is added to weight and elem"),
            ({"cast": "early"}, "^cast='early' is no mode; it takes 'after_weight', 'before_weight'"),
        )
    ),
    *(
        (f"{cls.__name__} module", {"dropout_p": p}, ConflictError, "^dropout_p=.* will not do; it takes a number from")
        for cls in ADDING
        for p in (1.0, -0.1, "half")
    ),
    ("layer", {"normalized_shape": (32,)}, ShapeError, r"normalized_shape is \(32,\).*\(3, 40\)"),
    ("rms", {"normalized_shape": (2, 40)}, ShapeError, r"normalized_shape is \(2, 40\).*\(3, 40\)"),
    ("rms", {"x": VECTOR, "normalized_shape": (1, 40)}, ShapeError, r"normalized_shape is \(1, 40\).*\(40,\)"),
    ("layer", {"normalized_shape": ()}, ShapeError, r"normalized_shape is \(\).*one or more"),
    *(
        ("layer", {"normalized_shape": wrong}, DTypeError, "normalized_shape is .*tuple of integers")
        for wrong in (40, {0: 40}, {40}, "(", "40", (40.0,), (np.float64(40),))
    ),
    ("rms", {"normalized_shape": (3, 40)}, ShapeError, r"weight has shape \(40,\).*\(3, 40\)"),
    ("layer", {"eps": -1.0}, ConflictError, r"eps=-1\.0.*at least 0"),
    ("rms", {"eps": "small"}, ConflictError, "eps='small'.*a number"),
    ("layer", {"eps": None}, ConflictError, "eps=None.*a number"),
    ("add_rms", {"residual": None}, DTypeError, r"residual is a NoneType.*torch\.Tensor"),
]
# What may be wrong with any tensor of a call, the error, and what the message says behind the tensor's name.
WRONG: list[tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = [
    (lambda tensor: 2.0, DTypeError, r" is a float.*torch\.Tensor"),
    (lambda tensor: tensor.int(), DTypeError, r" has dtype torch\.int32.*torch\.bfloat16"),
    (lambda tensor: tensor.to_sparse(), LayoutError, r" is in layout torch\.sparse_coo"),
    (lambda tensor: tensor.to("meta"), DeviceError, " is on meta and x on cpu"),
    (lambda tensor: tensor[:-1], ShapeError, r" has shape \("),
]
BAD += [
    (call, {name: change(tensor)}, error, f"^{name}{says}")
    for call, (_, good) in CALLS.items()
    for name, tensor in good.items()
    for change, error, says in WRONG
    # Beside an x of another shape or device the other tensors are wrong.
    if isinstance(tensor, torch.Tensor) and (name != "x" or error in (DTypeError, LayoutError))
]
# A modulation that fits no rows.
for shape in ((2, 3), (8, 3), (3, 8), (1, 8), (2, 1, 8)):
    fits = f"has shape {shape} and x (2, 3, 8); it takes (2, 8) or (2, 3, 8) or (8,)"
    for name in ("scale", "shift", "gate"):
        BAD.append(("modulated rows", {name: torch.ones(shape)}, ShapeError, re.escape(f"{name} {fits}")))


# Of every function of plain norms, and of those that drop.
OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"weight_offset": "one"}, ConflictError, "weight_offset='one' will not do"),
    ({"weight_offset": True}, ConflictError, "weight_offset=True will not do"),
    ({"weight_offset": None}, ConflictError, "weight_offset=None will not do"),
    ({"weight_offset": float("inf")}, ConflictError, "weight_offset=inf will not do"),
    ({"weight": None, "weight_offset": 1.0}, ConflictError, "weight_offset=1.0 is added to weight"),
    ({"weight": VECTOR.int(), "weight_offset": 1.0}, DTypeError, "weight has dtype torch.int32"),
    ({"cast": "never"}, ConflictError, "cast='never' is no mode"),
]
DROPPING: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dropout_p": 1.0}, ConflictError, "^dropout_p=1.0 will not do"),
    ({"dropout_rng": 5}, DTypeError, "^dropout_rng is 5; it takes"),
    ({"dropout_rng": (1,)}, DTypeError, "^dropout_rng"),
    ({"residual": None}, DTypeError, "^residual is a NoneType"),
    ({"eps": -1.0}, ConflictError, "^eps=-1.0"),
]
BAD += [(norm, *row) for norm in FUNCTIONS for row in OPTIONS]
BAD += [(f"{norm}, dropped", *row) for norm in ("add_layer", "add_rms") for row in DROPPING]


@pytest.mark.parametrize("call", CALLS)
def test_what_is_refused(call: str) -> None:
    """Alike before any call and after good ones, recorded or not, without a draw of random numbers."""
    function, good = CALLS[call]
    dispatch.forget()
    messages = []
    for recorded in (None, False, True):
        if recorded is not None:
            function(**good | ({"x": good["x"].clone().requires_grad_(recorded)} if "x" in good else {}))
        before = torch.get_rng_state()
        said = []
        for name, bad, error, says in BAD:
            if name == call:
                with pytest.raises(error, match=says) as refusal:
                    function(**(good | bad))
                said.append(str(refusal.value))
        assert torch.equal(torch.get_rng_state(), before)
        messages.append(said)
    assert messages[0] == messages[1] == messages[2] != []
