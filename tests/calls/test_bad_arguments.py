"""Every way to call wrongly has an error of its own type, which names the argument, what it got and what it takes.

What may be wrong with one argument of any function, whatever the others are, is in `test_wrong_tensors`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import normforge
from normforge.errors import (
    ArgumentError,
    ConflictError,
    DeviceError,
    DTypeError,
    GradientError,
    IllegalCombinationError,
    LayoutError,
    ShapeError,
)
from normforge.selection import dispatch

from .test_wrong_tensors import CALLS, E4M3, E8M0, FOLLOWED, FP4, MODULATIONS, WHICH, Call, M, N, refusal

X, VECTOR, ONE = torch.linspace(-1, 1, M * N).view(M, N), torch.ones(N), torch.ones(1)
# Four strides.
PERMUTED = torch.zeros(2, 2, 2, 2, N).permute(3, 2, 1, 0, 4)
PLANES = "(shape (2, 2, 2, 2, 64), strides (64, 128, 256, 512, 1)) do not collapse to 3 row strides or fewer; pass "
E4M3FNUZ, BYTES = torch.float8_e4m3fnuz, torch.zeros(2 * M * N, dtype=torch.int8)
STATIC = {"fquant": "static", "y_scale": ONE}

ADDING = (normforge.AddLayerNorm, normforge.AddRMSNorm)
PLAIN = (normforge.LayerNorm, normforge.RMSNorm, normforge.LayerNormAdd, normforge.RMSNormAdd, *ADDING)
MADE: dict[str, Call] = {
    "gated module": (normforge.GatedRMSNorm, {"hidden_size": 24}),
    "gated layer module": (normforge.GatedLayerNorm, {"hidden_size": 24}),
    "group module": (normforge.GroupNorm, {"num_groups": 2, "num_channels": 8}),
    **{cls.__name__: (cls, {"normalized_shape": 40}) for cls in PLAIN},
}
NO_TUPLE, NO_DIVISOR = "it takes a tuple of integers", "and x has shape (4, 64); it takes a divisor of N, 64"

# By the good call (of `CALLS`) that each resembles and the error: what is other, and what the message has.
Rows = list[tuple[dict[str, Any], str]]
REFUSED: dict[tuple[str, type[Exception]], Rows] = {
    ("bare", ShapeError): [
        ({"x": torch.tensor(1.0)}, "x has shape (); it takes (..., N) with N >= 1"),
        ({"x": torch.zeros(3, 0)}, "x has shape (3, 0); it takes (..., N) with N >= 1"),
        ({"weight": X}, "weight has shape (4, 64); it takes (64,), the last dimension of x"),
        ({"out": torch.zeros(256)}, "out has shape (256,); it takes x's, (4, 64)"),
    ],
    ("bare", DTypeError): [
        ({"x": X.int()}, "x has dtype torch.int32; it takes torch.float16 or torch.bfloat16 or torch.float32 or"),
        ({"x": X.to(E4M3FNUZ)}, "torch.float32 or torch.float8_e4m3fn or torch.float8_e5m2"),
        ({"out": X.half(), "out_dtype": torch.bfloat16}, "out has dtype torch.float16; it takes torch.bfloat16"),
        ({"x": [1.0, 2.0]}, "x is a list; it takes a torch.Tensor"),
        ({"x": X.numpy()}, "x is a ndarray; it takes a torch.Tensor"),
        ({"x": None}, "x is a NoneType; it takes a torch.Tensor"),
        ({"out": torch.int8, "out_dtype": torch.int8, "fquant": 2}, "out is a dtype; it takes a torch.Tensor"),
    ],
    ("bare", DeviceError): [({"x": X.to("meta")}, "x is on meta, where tensors hold no data; it takes a tensor on a")],
    ("bare", LayoutError): [
        ({"x": torch.zeros(N, M).T}, "stride 4 in its last dimension and kernels need 1; pass x.contiguous()"),
        ({"x": PERMUTED}, f"the leading dimensions of x {PLANES}x.contiguous()"),
        ({"x": torch.zeros(PERMUTED.shape), "out": PERMUTED}, f"the leading dimensions of out {PLANES}out"),
        ({"bias": VECTOR[:1].expand(N)}, "bias has stride 0 and kernels need 1; pass bias.contiguous()"),
    ],
    ("bare", ConflictError): [
        ({"residual": X}, "residual was passed and fadd 'none' would ignore it; pass fadd='pre_add_store'"),
        ({"residual_out": X}, "fadd 'none' does not store the sum; pass fadd='pre_add_store'"),
        ({"fadd": "pre_add"}, "fadd 'pre_add' adds a residual and none was passed; pass residual, or fadd='none'"),
        ({"fadd": 1}, "fadd 'pre_add_store' adds a residual and none was passed; pass residual, or fadd='none'"),
        ({"smooth_scale": VECTOR}, "fquant 'none' would ignore it; pass fquant='smooth_dynamic'"),
        ({"smooth_scale": VECTOR, "fquant": 2}, "fquant 'dynamic' would ignore it; pass fquant='smooth_dynamic'"),
        ({"fquant": 1}, "multiplies by a smooth_scale and none was passed; pass it, or fquant='dynamic'"),
        ({"fquant": 3, "out_dtype": torch.int8}, "call normforge.quantised_layer_norm or quantised_rms_norm"),
        ({"x_scale": ONE}, "x_scale was passed and goes with an fp8 x alone; multiply x by it"),
    ],
    ("bare", IllegalCombinationError): [
        ({"out_dtype": torch.int8}, "out_dtype int8 needs a scale for each row, and fquant none computes none"),
        ({"out": BYTES[: M * N].view(M, N)}, "out_dtype int8 needs a scale for each row, and fquant none computes"),
        ({"fquant": 2, "out_dtype": torch.float16}, "out_dtype fp16 is not a quantised type; use one of int8"),
        ({"fquant": 2, "out": X.clone()}, "fquant dynamic writes quantised values, and out_dtype fp32"),
        ({"scale_dtype": torch.float16}, "scale_dtype fp16 is the type of y_scale, and fquant none writes none;"),
        ({"fquant": 2, "scale_dtype": torch.int8}, "scale_dtype int8 cannot hold a row's scale; use one of fp16"),
        ({"fquant": 2, "out_dtype": E4M3, "rounding": "truncate"}, "out_dtype is fp8_e4m3fn; leave rounding out"),
        ({"rounding": "truncate"}, "rounding truncate is for int8, and out_dtype is fp32; leave rounding out"),
    ],
    ("with a weight", ConflictError): [
        ({"weight": None, "weight_offset": 1.0}, "weight_offset=1.0 is added to weight and none")
    ],
    ("added", ShapeError): [({"residual_out": X[:, :32]}, "residual_out has shape (4, 32); it takes x's, (4, 64)")],
    ("added", DTypeError): [
        ({"residual_out": X.half()}, "residual_out has dtype torch.float16; it takes torch.float32"),
        ({"residual": 2.0, "fquant": "dynamic"}, "residual is a float; it takes a torch.Tensor"),
    ],
    ("added", ConflictError): [
        ({"fadd": 2, "residual_out": X}, "fadd 'pre_add' does not store the sum; pass fadd='pre_add_store'"),
        ({"fadd": "post_add_norm"}, "takes no fadd 'post_add_norm'; call normforge.renormed_layernorm2d_fwd"),
    ],
    ("added behind", ConflictError): [
        ({"residual": None}, "fadd 'post_add' adds a residual and none was passed"),
        ({"residual_out": X}, "residual_out was passed and fadd 'post_add' does not store the sum"),
    ],
    ("added behind", IllegalCombinationError): [
        ({"fquant": "dynamic"}, "fadd post_add makes y the sum that later blocks add to, and fquant dynamic"),
        ({"dropout_p": 0.5, "dropout_rng": (1, 2)}, "dropout drops elements of x before a residual is added"),
    ],
    ("fp8", ShapeError): [({"x_scale": torch.rand(2)}, "it takes one value a row, (4,) or (4, 1), or one for all")],
    ("fp8", DTypeError): [({"residual": X.to(E4M3), "fadd": 2}, "residual has dtype torch.float8_e4m3fn; it takes")],
    ("fp8", ConflictError): [
        ({"x_scale": None}, "x is fp8, whose values are x * x_scale, and no x_scale was passed; pass it"),
        ({"out_dtype": None}, "no out_dtype was passed; pass out_dtype=torch.bfloat16, say, or fquant='dynamic'"),
    ],
    ("fp8", IllegalCombinationError): [({"out_dtype": E4M3}, "out_dtype fp8_e4m3fn needs a scale for each row, and")],
    ("fp8", GradientError): [
        (
            {"weight": torch.ones(N, requires_grad=True)},
            "weight requires a gradient and no kernel computes one of a norm of fp8; call normforge.layer_norm or "
            "rms_norm of the dequantised x, (x.float() * x_scale).bfloat16(); call under torch.no_grad()",
        )
    ],
    ("dropout", ShapeError): [({"dropout_rng": torch.zeros(3).long()}, "dropout_rng has shape (3,); it takes (2,)")],
    ("dropout", DTypeError): [
        ({"dropout_p": 0.0, "dropout_rng": 5}, "dropout_rng is 5; it takes (seed, offset), an int64 tensor of the"),
        ({"dropout_rng": (5,)}, "dropout_rng is (5,); it takes (seed, offset), an int64 tensor of the two, or"),
        ({"dropout_rng": (5.0, 1)}, "dropout_rng is (5.0, 1); it takes (seed, offset), an int64 tensor of the two"),
    ],
    ("dropout", ConflictError): [({"dropout_rng": (2**64, 1)}, "dropout_rng has seed 18446744073709551616; it takes")],
    ("dropout", IllegalCombinationError): [
        ({"residual": None, "fadd": 0}, "dropout drops elements of x before a residual is added, and fadd is none"),
    ],
    ("backward", DTypeError): [
        ({"mean": None}, "mean is NoneType; it takes the torch.float32 tensor that the forward call saved"),
        ({"x": X.to(E4M3)}, "x has dtype torch.float8_e4m3fn, which has no gradient; pass the dequantised x, (x."),
    ],
    ("backward", ConflictError): [
        ({"wants": ("dx", "dy")}, "wants has 'dy'; it takes some of dx, dweight, dbias, dx_bias, ddropped"),
        ({"wants": "dx"}, "wants has 'd'; it takes some of dx, dweight, dbias, dx_bias, ddropped"),
        ({"weight": None}, "wants has 'dweight' and no weight was passed; pass it, or leave 'dweight' out"),
        ({"wants": ("ddropped",)}, "wants has 'ddropped' and no dropout_p was passed; pass it, or leave"),
        ({"dropout_p": 0.5}, "dropout_p=0.5 dropped elements by a dropout_rng and none was passed; pass the seed"),
        ({"dropout_p": 0.5, "dropout_rng": torch.Generator()}, "dropped elements by a dropout_rng and none was"),
    ],
    ("backward, rms", ConflictError): [
        ({"weight": None, "weight_offset": 1.0, "wants": ("dx",)}, "weight_offset=1.0 is added to weight and none"),
    ],
    ("quantised, bare", ConflictError): [
        ({"group_size": 48}, "group_size=48 is no mode; it takes 'none' (0), '16' (16), '32' (32), '64' (64),"),
        ({"scale_layout": "column_major"}, "is of scales of groups, and there are none; pass group_size=128, say"),
        ({"fquant": "static"}, "fquant 'static' divides y by a y_scale and none was passed; pass one fp32 value"),
        ({"fquant": "none"}, "fquant 'none' quantises nothing; call normforge.layernorm2d_fwd"),
        ({"smooth_scale": VECTOR}, "would ignore it; pass fquant='smooth_dynamic'"),
        ({"residual_out": X.clone()}, "residual_out was passed and no residual is added; pass residual"),
        ({"global_scale": ONE}, "scale_format 'float' reads none; pass scale_format='e4m3'"),
    ],
    ("quantised, bare", IllegalCombinationError): [
        ({"scale_format": "ue8m0", "out_dtype": E4M3}, "use group_size 32, 64 or 128 with fp8, or scale_format"),
        ({"scale_format": "ue8m0", "group_size": 32}, "scale_format ue8m0 is for groups of fp8, and group_size"),
        ({"scale_layout": "swizzled_128x4"}, "is for the scales of MXFP8 and NVFP4, and group_size is none,"),
        ({**STATIC, "group_size": 32}, "fquant static takes its scales from the caller, and group_size and"),
        ({"scale_ub": ONE}, "scale_ub bounds float scales of fp8, and scale_format is float, out_dtype int8; use"),
        ({"out_dtype": torch.bfloat16}, "fquant dynamic writes quantised values, and out_dtype bf16 is not a"),
        ({"group_size": 32, "out_dtype": E4M3FNUZ}, "group_size 32 and out_dtype fp8_e4m3fnuz do not go together"),
        ({"out_dtype": FP4}, "use fp4_e2m1fn, 16 and e4m3, which are NVFP4, or none of the three"),
    ],
    ("quantised, bare", ShapeError): [
        ({**STATIC, "y_scale": torch.ones(3)}, "with fquant 'static' it takes one value, or one a column, (N,)"),
        ({"scale_ub": torch.ones(2), "out_dtype": E4M3}, "scale_ub has shape (2,); it takes one value, (1,)"),
        ({"y_scale": torch.empty(3)}, "y_scale has shape (3,); it takes (4,) or (4, 1)"),
    ],
    ("quantised, bare", DTypeError): [
        ({"y_scale": torch.empty(M).half()}, "y_scale has dtype torch.float16; it takes")
    ],
    ("quantised, bare", LayoutError): [
        (
            {**STATIC, "y_scale": BYTES[:4].view(torch.float32), "out": BYTES[: M * N].view(M, N)},
            "out overlaps y_scale in memory; pass memory of its own",
        ),
        ({"out": BYTES.view(M, 2 * N)[:, :N]}, "out has strides (128, 1); it takes a contiguous tensor"),
        ({"out": BYTES[1 : 1 + M * N].view(M, N)}, "out starts at no multiple of 16 bytes"),
        ({"y_scale": torch.empty(M + 1)[1:]}, "y_scale starts at no multiple of 16 bytes"),
        ({"y_scale": torch.empty(2 * M)[::2]}, "y_scale has strides (2,); pass a contiguous tensor"),
        ({"y_scale": X.view(-1)[:M], "x": X}, "y_scale overlaps x in memory"),
        ({"group_size": 32, "y_scale": torch.empty(1, 2).expand(M, 2)}, "y_scale has strides (0, 1)"),
    ],
    ("MXFP8", IllegalCombinationError): [
        ({"group_size": 64}, "is for the scales of MXFP8 and NVFP4, and group_size is 64, scale_format ue8m0; use"),
        ({"scale_format": "float"}, "use group_size 32 with scale_format ue8m0, or 16 with e4m3"),
    ],
    ("MXFP8", ShapeError): [({"y_scale": torch.empty(2, 2).to(E8M0)}, "y_scale has shape (2, 2); it takes (128, 4)")],
    ("NVFP4", ConflictError): [({"global_scale": None}, "has scales under a global_scale and none was passed; pass")],
    ("NVFP4", IllegalCombinationError): [
        (STATIC, "takes its scales from the caller, and group_size and scale_ub are for computed scales; use"),
        ({"scale_ub": ONE}, "scale_ub bounds float scales of fp8, and scale_format is e4m3, out_dtype fp4_e2m1fn"),
        ({"group_size": 32}, "group_size 32 and scale_format e4m3 do not go together; use fp4_e2m1fn, 16 and"),
        ({"scale_format": "ue8m0"}, "group_size 16 and scale_format ue8m0 do not go together; use fp4_e2m1fn, 16"),
        ({"out_dtype": E4M3}, "out_dtype fp8_e4m3fn, group_size 16 and scale_format e4m3 do not go together"),
    ],
    ("NVFP4", ShapeError): [
        ({"x": torch.ones(2, 63)}, "two neighbours of fp4_e2m1fn share a byte; it takes an even N"),
        ({"global_scale": torch.ones(2)}, "global_scale has shape (2,); it takes one value, (1,)"),
        ({"out": torch.empty(M, N, dtype=FP4)}, "out has shape (4, 64); it takes (4, 32), 2 of y's elements in"),
    ],
    ("NVFP4", DTypeError): [
        ({"out": torch.empty(M, N // 2).byte()}, "out has dtype torch.uint8; it takes torch.float4_e2m1fn_x2"),
        ({"y_scale": torch.empty(M, 4)}, "y_scale has dtype torch.float32; it takes torch.float8_e4m3fn"),
    ],
    ("NVFP4", LayoutError): [({"out": torch.empty(M, N, dtype=FP4)[:, ::2]}, "out has stride 2 in its last dimension")],
    ("modulated", ConflictError): [
        ({"residual": None}, "gate scales x before residual is added to it, and none was passed; pass residual"),
        ({"residual": None, "gate": None}, "residual_out was passed and no residual is added; pass residual"),
    ],
    ("modulated", IllegalCombinationError): [
        ({"fquant": "smooth_dynamic"}, "modulated norms have no fquant smooth_dynamic; use another fquant"),
        ({"fquant": "static"}, "modulated norms have no fquant static; use another fquant, or leave modulated out"),
        ({"fquant": "none", "out": None, "out_dtype": torch.int8}, "out_dtype int8 needs a scale for each row"),
        ({"out": None, "out_dtype": torch.float16}, "out_dtype fp16 is not a quantised type; use one of int8"),
    ],
    ("modulated", LayoutError): [
        ({"scale": X, "residual_out": X}, "residual_out overlaps scale in memory"),
        ({"out": BYTES[1 : 1 + M * N].view(M, N)}, "out starts at no multiple of 16 bytes"),
    ],
    ("gated", IllegalCombinationError): [
        ({"fquant": "smooth_dynamic"}, "gated norms have no fquant smooth_dynamic; use another fquant, or leave"),
        ({"fquant": "none", "out_dtype": torch.int8}, "out_dtype int8 needs a scale for each row, and"),
    ],
    ("renormed", IllegalCombinationError): [
        ({"fquant": "static", "out_dtype": torch.int8}, "fadd post_add_norm has no fquant static"),
    ],
    ("renormed", ConflictError): [
        ({"weight": None, "weight_offset": 1.0}, "weight_offset=1.0 is added to weight and none")
    ],
    ("renormed", GradientError): [
        ({"x": X.clone().requires_grad_()}, "2d functions compute none; call normforge.rms_norm_add")
    ],
    ("renormed", LayoutError): [
        ({"out": torch.empty(M, 2 * N)[:, :N]}, "out has strides (128, 1); it takes a contiguous tensor"),
        ({"out": X, "residual_out": X}, "residual_out overlaps out in memory; pass memory of its own"),
    ],
    ("layer", ShapeError): [
        ({"normalized_shape": (32,)}, "normalized_shape is (32,) and x has shape (4, 64)"),
        (
            {"normalized_shape": ()},
            "normalized_shape is () and x has shape (4, 64); it takes the last dimensions of x, one or more",
        ),
    ],
    ("layer", DTypeError): [
        ({"normalized_shape": wrong}, NO_TUPLE) for wrong in (64, {0: 64}, {64}, "(", "64", (64.0,), (np.float64(64),))
    ],
    ("layer", ConflictError): [
        ({"eps": None}, "eps=None will not do; it takes a number"),
        ({"weight_offset": VECTOR}, "weight_offset=tensor("),
    ],
    ("rms", ShapeError): [
        ({"normalized_shape": (2, 64)}, "normalized_shape is (2, 64) and x has shape (4, 64)"),
        ({"x": VECTOR, "normalized_shape": (1, 64)}, "normalized_shape is (1, 64) and x has shape (64,)"),
        ({"normalized_shape": (4, 64)}, "weight has shape (64,); it takes (4, 64)"),
    ],
    **{
        (norm, ConflictError): [
            ({"weight": None, "weight_offset": 1.0}, "weight_offset=1.0 is added to weight and"),
            ({"weight_offset": VECTOR}, "weight_offset=tensor("),
            *(
                ({"dropout_p": p}, f"dropout_p={p} will not do; it takes a number")
                for p in (False, True)
                if "_" in norm
            ),
        ]
        for norm in ("rms", "add_layer", "add_rms")
    },
    **{
        (norm, DTypeError): [
            ({"residual": None}, "residual is a NoneType; it takes a torch.Tensor"),
            ({"dropout_rng": 5}, "dropout_rng is 5; it takes"),
            ({"dropout_rng": (1,)}, "dropout_rng is (1,); it takes"),
        ]
        for norm in ("add_layer", "add_rms", "add_layer, dropped", "add_rms, dropped")
    },
    ("group", ShapeError): [
        ({"num_groups": 3}, "Expected number of channels in input to be divisible by num_groups, but got input of"),
        ({"num_groups": 0}, "num_groups is 0"),
        *(
            ({"num_groups": wrong}, "it takes a whole number")
            for wrong in (np.float64(2), torch.tensor(2.0), "2", True)
        ),
        ({"bias": torch.ones(1, 8)}, "bias has shape (1, 8); it takes (8,)"),
        ({"x": VECTOR}, "at least 2 dimensions"),
    ],
    ("group", ConflictError): [({"activation": "gelu"}, "activation='gelu' is no mode; it takes 'none', 'silu'")],
    ("gated groups", ShapeError): [({"group_size": wrong}, NO_DIVISOR) for wrong in (0, 7, -8, 128, 8.0, True, "8")],
    ("gated groups", ConflictError): [
        ({"norm_before_gate": "no"}, "norm_before_gate='no' is no flag; it takes True or"),
    ],
    ("gated groups", DTypeError): [({"gate": None}, "gate is a NoneType; it takes a torch.Tensor")],
    ("modulated norm", ConflictError): [
        ({"gate": VECTOR}, "gate scales x before residual is added to it, and none was passed")
    ],
    ("modulated rms", DTypeError): [({"scale": None}, "scale is a NoneType; it takes a torch.Tensor")],
    ("modulated samples", ShapeError): [
        ({name: torch.ones(shape)}, f"{name} has shape {shape} and x (2, 3, 8); it takes (2, 8) or (2, 3, 8) or (8,)")
        for shape in ((2, 3), (8, 3), (3, 8), (1, 8), (2, 1, 8))
        for name in MODULATIONS
    ],
    ("module", ShapeError): [({"x": X[:, :32]}, "normalized_shape is (64,) and x has shape (4, 32)")],
    # Rows of 64 elements were normalised before, as rows of four times sixteen.
    ("added module", ShapeError): [
        ({"x": X, "residual": X + 1}, "normalized_shape is (4, 16) and x has shape (4, 64)"),
        ({"residual": X}, "residual has shape (4, 64)"),
    ],
    ("added module", DTypeError): [({"residual": None}, "residual is a NoneType")],
    ("gated module", ShapeError): [({"group_size": 7}, "group_size=7 and hidden_size=24; it takes a divisor of that")],
    ("gated module", ConflictError): [({"norm_before_gate": 2}, "norm_before_gate=2 is no flag")],
    ("gated layer module", ConflictError): [({"activation": "gelu"}, "activation='gelu' is no mode")],
    ("group module", ConflictError): [({"activation": "relu"}, "activation='relu' is no mode")],
    **{
        (cls.__name__, ConflictError): [
            ({"weight_offset": 1.0, "elementwise_affine": False}, "weight_offset=1.0 is added to weight and elem"),
            ({"cast": "early"}, "cast='early' is no mode; it takes 'after_weight', 'before_weight'"),
            *(
                ({"dropout_p": p}, f"dropout_p={p!r} will not do; it takes a number from")
                for p in ((1.0, -0.1, "half") if cls in ADDING else ())
            ),
        ]
        for cls in PLAIN
    },
}


# Calls that leave keys as like as can be to those of the bad ones.
GOOD: tuple[dict[str, Any], ...] = (
    {"bias": VECTOR, "weight": VECTOR},
    {"x_bias": VECTOR, "out_dtype": torch.float16},
    {"residual": X.clone(), "fadd": 1, "residual_out": torch.zeros(M, N)},
    {"residual": X.clone(), "fadd": 2},
    {"out": torch.zeros(M, N)},
    {"fquant": "smooth_dynamic", "smooth_scale": VECTOR, "save_mv": True},
    {"fquant": 2, "out": torch.zeros(M, N, dtype=torch.int8), "rounding": "truncate"},
    {"fquant": 2, "out_dtype": E4M3, "scale_dtype": torch.float16, "save_mv": 1},
    {"out_dtype": torch.float16, "cast": "before_weight"},
)


@cache
def known_after_good_calls() -> dict[Any, Any]:
    """Return the plans of good calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "plans", {})
        for given in GOOD:
            normforge.layernorm2d_fwd(X, **given)
        for function, good in CALLS.values():
            for given in (good, good | {"wants": ("dx",)} if "wants" in good else {}):
                function(**good | given)
        for function, good in FOLLOWED.values():
            function(**good | {"x": good["x"].clone().requires_grad_()})
        return dispatch.plans


@pytest.mark.parametrize(
    ("like", "other", "error", "says"),
    [(like, other, error, says) for (like, error), table in REFUSED.items() for other, says in table],
)
def test_refused(
    like: str, other: dict[str, Any], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alike where nothing is known, by `which`, and after good calls, without a draw of random numbers."""
    function, good = (CALLS | MADE)[like]
    given, known, random = good | other, known_after_good_calls(), torch.get_rng_state()
    monkeypatch.setattr(dispatch, "plans", {})
    cold = refusal(function, given)
    assert cold[0] is error
    assert says in cold[1]
    assert refusal(WHICH.get(function, function), given) == cold
    monkeypatch.setattr(dispatch, "plans", known)
    assert refusal(function, given) == cold
    assert torch.equal(torch.get_rng_state(), random)


def test_norm_unknown() -> None:
    with pytest.raises(ConflictError, match=r"norm='batch' is no mode; it takes 'layer', 'rms'"):
        normforge.which(X, norm="batch")


def test_errors_are_also_what_python_would_raise() -> None:
    also = {
        ShapeError: ValueError,
        DTypeError: TypeError,
        DeviceError: RuntimeError,
        LayoutError: ValueError,
        ConflictError: ValueError,
    }
    assert all(issubclass(error, usual) and issubclass(error, ArgumentError) for error, usual in also.items())
