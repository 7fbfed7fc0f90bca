"""The parameters of the runtime's functions, declared once: one row per parameter, one family per direction.

`templates/calls.py.j2` emits signatures, docstrings, argument reading and keys from these rows; checks, operators'
schemas, stand-ins and kernels' slots loop over them. A call costs only its own family's rows. Plans of both directions
are made from the rows; the functions of `IN_PARTS` have rows and no names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .families import REQUIRED, Family, Kind, Parameter, Result
from .groups import GROUP as GROUP_WORD
from .groups import AnyMode, GroupMode
from .values import (
    Cast,
    Columnwise,
    Direction,
    FusedAdd,
    FusedQuant,
    GateActivation,
    Gating,
    Norm,
    Rounding,
    ScaleFormat,
    ScaleGroup,
    ScaleLayout,
)


def _each(default: str, unless: str = "") -> dict[Norm, str]:
    """Return a default for every norm, except norms that lack the attribute `unless` of a mode."""
    return {norm: default for norm in Norm if unless not in norm.row.lacks}


def _centred(default: str) -> dict[Norm, str]:
    """Return a default for the norms that subtract the mean."""
    return {norm: default for norm in Norm if norm.centres}


def _uncentred(default: str) -> dict[Norm, str]:
    """Return a default for the norms that keep the mean, which are those that add a weight_offset."""
    return {norm: default for norm in Norm if not norm.centres}


def _first(meaning: str) -> dict[Norm, str]:
    return {Norm.LAYER: meaning}


def _lacking(attribute: str, meaning: str) -> dict[Norm, str]:
    """Return a meaning for the norms that lack an attribute of a mode."""
    return {norm: meaning for norm in Norm if attribute in norm.row.lacks}


def _functions(name: str, unless: str = "") -> dict[Norm, str]:
    """Return the names of a family's functions by norm; `name` holds fields of a `NormRow` in braces."""
    return {norm: name.format(**vars(norm.row)) for norm in Norm if unless not in norm.row.lacks}


# The largest fp32 number below 1.
_LARGEST_P = 1 - 2.0**-24


FORWARD = Family(
    direction=Direction.FORWARD,
    functions=_functions("{stem}2d_fwd"),
    parameters=(
        Parameter(
            "x",
            Kind.ROWS,
            default=_each(REQUIRED),
            meaning=_first(
                "(..., N), fp16, bf16 or fp32, or float8_e4m3fn or float8_e5m2 with x_scale; rows on any stride, "
                "or on two (heads of a packed qkv) or three, the last dimension contiguous, on a GPU (or anywhere "
                "under TRITON_INTERPRET=1). M, the number of rows, may be 0."
            ),
            positional=True,
            axis="dtype_in",
            gradient="dx",
            functional=True,
        ),
        Parameter(
            "weight",
            Kind.VECTOR,
            default=_each("None"),
            meaning=_each("(N,), fp16, bf16 or fp32, or None for 1."),
            positional=True,
            gradient="dweight",
            functional=True,
        ),
        Parameter(
            "bias",
            Kind.VECTOR,
            default=_centred("None"),
            meaning=_first("(N,), fp16, bf16 or fp32, or None for 0."),
            positional=True,
            gradient="dbias",
            functional=True,
        ),
        Parameter(
            "eps",
            Kind.NUMBER,
            default={norm: norm.row.eps for norm in Norm},
            meaning={norm: f"{norm.row.eps_is}." for norm in Norm},
            least=0.0,
            functional=True,
            torchs={norm: norm.row.torch_eps for norm in Norm if norm.row.torch_eps},
        ),
        Parameter(
            "weight_offset",
            Kind.NUMBER,
            default=_uncentred("0.0"),
            meaning=_uncentred("added to every weight, in fp32."),
            needs="weight",
            absent="weight_offset={weight_offset} is added to weight and none was passed; pass weight",
            functional=True,
        ),
        Parameter(
            "residual",
            Kind.ROWS,
            default=_each("None", "fadd.adds"),
            meaning=_first("x's shape, fp16, bf16 or fp32; goes with fadd."),
            wanted="fadd.adds",
            absent="fadd {fadd!r} adds a residual and none was passed; pass residual, or fadd='none'",
            unused=(
                "residual was passed and fadd 'none' would ignore it; pass fadd='pre_add_store', 'pre_add' or "
                "'post_add'"
            ),
            gradient="dx",
            functional=True,
        ),
        Parameter(
            "fadd",
            Kind.WORD,
            default=_each('"none"', "fadd.adds"),
            meaning=_first(
                '"none" (0), "pre_add_store" (1: add residual, return the sum as residual_out), "pre_add" (2: add '
                'it) or "post_add" (3: add it to the normalised rows; the sum is y).'
            ),
            words=FusedAdd,
            axis="fadd",
        ),
        Parameter(
            "smooth_scale",
            Kind.VECTOR,
            default=_each("None"),
            meaning=_first('(N,), fp16, bf16 or fp32, of any sign; goes with fquant "smooth_dynamic".'),
            wanted="fquant.smooths",
            absent=(
                "fquant 'smooth_dynamic' multiplies by a smooth_scale and none was passed; pass it, or fquant='dynamic'"
            ),
            unused=("smooth_scale was passed and fquant {fquant!r} would ignore it; pass fquant='smooth_dynamic'"),
        ),
        Parameter(
            "fquant",
            Kind.WORD,
            default=_each('"none"'),
            meaning=_first('"none" (0), "smooth_dynamic" (1) or "dynamic" (2).'),
            words=FusedQuant,
            axis="fquant",
        ),
        Parameter(
            "x_bias",
            Kind.VECTOR,
            default=_each("None", "x_bias"),
            meaning=_first("(N,), added to every row of x before anything else, or None."),
            axis="x_bias",
            wanted="x_bias",
            gradient="dx_bias",
            functional=True,
        ),
        Parameter(
            "x_scale",
            Kind.SCALE,
            default=_each("None"),
            meaning=_first(
                "what an fp8 x is multiplied by, in fp32, before anything else: fp32 on x's device, one a row (x's "
                "shape without the last dimension, or with one of 1 there) or one for all (one element)."
            ),
            wanted="dtype_in.is_fp8",
            absent=(
                "x is fp8, whose values are x * x_scale, and no x_scale was passed; pass it, one a row or one for all, "
                "or torch.ones(1, device=x.device)"
            ),
            unused="x_scale was passed and goes with an fp8 x alone; multiply x by it, or leave x_scale out",
        ),
        Parameter(
            "dropout_p",
            Kind.NUMBER,
            default=_each("0.0", "dropout"),
            meaning=_first(
                "how likely each element of x, behind x_bias, is dropped before residual is added; those that are kept "
                "are divided by 1 - dropout_p. 0 <= dropout_p < 1; goes with fadd."
            ),
            least=0.0,
            most=_LARGEST_P,
            wanted="dropout",
            needs="dropout_rng",
            absent="dropout_p={dropout_p} drops elements by a dropout_rng and none was passed; pass it",
        ),
        Parameter(
            "dropout_rng",
            Kind.RANDOM,
            default=_each("None", "dropout"),
            meaning=_first(
                "what the mask follows from, with an element's row and column: (seed, offset), or the same as an int64 "
                "tensor of two on x's device; a torch.Generator to draw them from; or None for torch's default one. "
                "`dropout_mask` has the formula."
            ),
            axis="dropout",
            wanted="dropout",
        ),
        Parameter(
            "out_dtype",
            Kind.DTYPE,
            default=_each("None"),
            meaning=_first(
                "y's dtype; None is x's dtype, or int8 when quantised, or residual's with post_add, or that of `out`. "
                "An fp8 x needs one of these three, or out_dtype."
            ),
            axis="dtype_out",
            functional=True,
        ),
        Parameter(
            "scale_dtype",
            Kind.DTYPE,
            default=_each("torch.float32"),
            meaning=_first("y_scale's dtype: float32, float16 or bfloat16. y is divided by the scale as stored."),
            axis="scale_dtype",
        ),
        Parameter(
            "save_mv",
            Kind.FLAG,
            default=_each("False"),
            meaning=_centred("return mean and rstd.") | _uncentred("return rstd; mean is always None."),
            axis="save_mv",
        ),
        Parameter(
            "rounding",
            Kind.WORD,
            default=_each('"nearest"'),
            meaning=_first('int8 only: "nearest" (even) or "truncate" (toward zero, as ck_tile does).'),
            words=Rounding,
            axis="rounding",
        ),
        Parameter(
            "cast",
            Kind.WORD,
            default=_each('"after_weight"', "cast.comes_first"),
            meaning=_first(
                '"after_weight" (rows are rounded once, to y\'s dtype) or "before_weight" (to 16 bits before they are '
                "multiplied by weight as well, as Hugging Face's Llama and T5 do: to y's dtype if it has so many, or "
                "x's)."
            ),
            words=Cast,
            axis="cast",
            functional=True,
        ),
        Parameter(
            "out",
            Kind.OUT,
            default=_each("None"),
            meaning=_first(
                "where y goes, instead of a new tensor; may be x or residual itself if the dtype is the same."
            ),
            result="y",
        ),
        Parameter(
            "residual_out",
            Kind.OUT,
            default=_each("None", "fadd.adds"),
            meaning=_first(
                "where the sum goes, instead of a new tensor, in residual's dtype; may be residual or x itself."
            ),
            wanted="fadd.stores",
            unused=("residual_out was passed and fadd {fadd!r} does not store the sum; pass fadd='pre_add_store'"),
            result="residual_out",
        ),
    ),
    results=(
        Result("y", Kind.ROWS, axis="dtype_out"),
        Result("residual_out", Kind.ROWS, wanted="fadd.stores", like=("residual",)),
        Result("y_scale", Kind.PER_ROW, wanted="fquant.quantises", axis="scale_dtype"),
        Result("mean", Kind.PER_ROW, norms=tuple(_centred("")), wanted="save_mv"),
        Result("rstd", Kind.PER_ROW, wanted="save_mv"),
    ),
)


BACKWARD = Family(
    direction=Direction.BACKWARD,
    functions=_functions("{stem}2d_bwd"),
    parameters=(
        Parameter(
            "dy",
            Kind.ROWS,
            default=_each(REQUIRED),
            meaning=_first(
                "(..., N), fp16, bf16 or fp32, or float8_e4m3fn or float8_e5m2 with dy_scale: the gradient of y; None "
                "counts as zero."
            )
            | _lacking("dy_format.is_fp8", "(..., N), fp16, bf16 or fp32: the gradient of y; None counts as zero."),
            positional=True,
            optional=True,
            functional=True,
        ),
        Parameter(
            "x",
            Kind.ROWS,
            default=_each(REQUIRED),
            meaning=_first(
                "dy's shape, fp16, bf16 or fp32: the tensor that was normalised; after a fused add, residual_out."
            ),
            positional=True,
            axis="dtype_in",
            functional=True,
        ),
        Parameter(
            "weight",
            Kind.VECTOR,
            default=_each("None"),
            meaning=_first("(N,), or None where the forward call had none."),
            positional=True,
            functional=True,
        ),
        Parameter(
            "mean",
            Kind.PER_ROW,
            default=_centred(REQUIRED),
            meaning=_first("x's shape without the last dimension, fp32, as the forward call saved it."),
        ),
        Parameter(
            "rstd",
            Kind.PER_ROW,
            default=_each(REQUIRED),
            meaning=_first("x's shape without the last dimension, fp32, as the forward call saved it."),
            functional=True,
        ),
        Parameter(
            "weight_offset",
            Kind.NUMBER,
            default=_uncentred("0.0"),
            meaning=_uncentred("as the forward call was given it."),
            needs="weight",
            absent="weight_offset={weight_offset} is added to weight and none was passed; pass weight",
            functional=True,
        ),
        Parameter(
            "x_bias",
            Kind.VECTOR,
            default=_each("None", "x_bias"),
            meaning=_first("(N,), if the forward call added one to x; leave it out where x is residual_out."),
            axis="x_bias",
            wanted="x_bias",
            functional=True,
        ),
        Parameter(
            "dresidual_out",
            Kind.ROWS,
            default=_each("None", "fadd.adds"),
            meaning=_first("x's shape: the gradient of residual_out, added to dx before it is rounded."),
            axis="fadd",
            wanted="fadd.stores",
            functional=True,
        ),
        replace(
            FORWARD["dropout_p"],
            meaning=_first("as the forward call was given it; x is then residual_out."),
            absent=(
                "dropout_p={dropout_p} dropped elements by a dropout_rng and none was passed; pass the seed and offset "
                "that the forward call was given"
            ),
        ),
        replace(FORWARD["dropout_rng"], meaning=_first("the seed and offset that the forward call was given.")),
        Parameter(
            "cast",
            Kind.WORD,
            default=_each('"after_weight"', "cast.comes_first"),
            meaning=_first("as the forward call was given it; dweight is then of the rounded rows."),
            words=Cast,
            axis="cast",
            functional=True,
        ),
        Parameter(
            "dx_dtype", Kind.DTYPE, default=_each("None"), meaning=_first("dx's dtype; None is x's."), functional=True
        ),
        Parameter(
            "bias_dtype",
            Kind.DTYPE,
            default=_centred("None"),
            meaning=_first("dbias's dtype; None is weight's, or x's without a weight."),
            functional=True,
        ),
        Parameter(
            "dropped_dtype",
            Kind.DTYPE,
            default=_each("None", "dropout"),
            meaning=_first("ddropped's dtype; None is x's."),
        ),
        Parameter(
            "wants",
            Kind.NAMES,
            default=_each('("dx",)'),
            meaning=_first(
                'which of "dx", "dweight", "dbias", "dx_bias" and, with dropout_p, "ddropped" to compute; nothing else '
                "is."
            ),
            functional=True,
        ),
        Parameter(
            "dy_scale",
            Kind.SCALES,
            default=_each("None", "dy_format.is_fp8"),
            meaning=_first(
                "what an fp8 dy is multiplied by, in fp32: fp32, or powers of two (float8_e8m0fnu), contiguous; one a "
                "row (dy's shape without the last dimension, or with one of 1 there), one for each 32 or 128 adjacent "
                "elements of a row (..., ceil(N / 32)), or one for all (one element)."
            ),
            axis="dy_format",
            wanted="dy_format.is_fp8",
            absent=(
                "dy is fp8, whose values are dy * dy_scale, and no dy_scale was passed; pass it, one a row, a group or "
                "for all, or torch.ones(1, device=dy.device)"
            ),
            unused="dy_scale was passed and goes with an fp8 dy alone; multiply dy by it, or leave dy_scale out",
            is_new=True,
        ),
    ),
    results=(
        Result("dx", Kind.ROWS, set_by="dx_dtype", like=("x",)),
        Result("dweight", Kind.VECTOR, like=("weight",)),
        Result("dbias", Kind.VECTOR, norms=tuple(_centred("")), set_by="bias_dtype", like=("weight", "x")),
        Result("dx_bias", Kind.VECTOR, wanted="x_bias", like=("x_bias",)),
        Result("ddropped", Kind.ROWS, wanted="dropout", set_by="dropped_dtype", like=("x",)),
    ),
)


def _with(family: Family, name: str, *also: Parameter) -> Family:
    """Return a family of functional calls that have the rows `also` too, behind the others but for new ones.

    Launches of the family's functions pass tensors in the same order.
    """
    others = [row for row in family.parameters if row.name not in [each.name for each in also]]
    first, last = ([row for row in others if row.is_new == is_new] for is_new in (False, True))
    return replace(family, name=name, parameters=(*first, *(replace(row, functional=True) for row in also), *last))


# Calls with a dropout of x.
DROPPED = _with(FORWARD, "dropped", *(FORWARD[name] for name in ("fadd", "dropout_p", "dropout_rng", "save_mv")))
DROPPED_BWD = _with(BACKWARD, "dropped", *(BACKWARD[name] for name in ("dropout_p", "dropout_rng", "dropped_dtype")))
# Calls that add the residual behind the norm.
ADDED = _with(FORWARD, "added", replace(FORWARD["fadd"], default=_each('"post_add"', "fadd.adds")), FORWARD["save_mv"])

# Two norms, with an add between them.
RENORMED = Family(
    direction=Direction.FORWARD,
    name="renormed",
    functions=_functions("{function}_add", "fadd.adds"),
    parameters=(
        FORWARD["x"],
        replace(FORWARD["weight"], positional=False),
        replace(FORWARD["bias"], positional=False),
        Parameter(
            "residual",
            Kind.ROWS,
            default=_each(REQUIRED),
            meaning=_first("x's shape, fp16, bf16 or fp32: added to the normalised x; the sum is residual_out."),
            positional=True,
            axis="fadd",
            wanted="fadd.renorms",
            gradient="dresidual",
            functional=True,
        ),
        Parameter(
            "next_weight",
            Kind.VECTOR,
            default=_each("None"),
            meaning=_first("(N,), fp16, bf16 or fp32, or None for 1: the weight of the second norm."),
            gradient="dnext_weight",
            functional=True,
        ),
        Parameter(
            "next_bias",
            Kind.VECTOR,
            default=_centred("None"),
            meaning=_first("(N,), fp16, bf16 or fp32, or None for 0: the bias of the second norm."),
            gradient="dnext_bias",
            functional=True,
        ),
        replace(FORWARD["smooth_scale"], functional=True),
        replace(FORWARD["eps"], torchs={}),
        replace(FORWARD["weight_offset"], meaning=_uncentred("added to the weights of both norms, in fp32.")),
        FORWARD["cast"],
        replace(FORWARD["fquant"], functional=True),
        FORWARD["out_dtype"],
        replace(FORWARD["save_mv"], functional=True),
    ),
    results=(
        *FORWARD.results[:3],
        Result("mean", Kind.PER_ROW, norms=()),
        Result("rstd", Kind.PER_NORM, wanted="save_mv"),
    ),
)

# The mean and rstd of rows, without y.
STATISTICS = Family(
    direction=Direction.FORWARD,
    name="statistics",
    axes={"save_mv": True, "statistics_only": True},
    functions={norm: f"{norm.value}_statistics" for norm in _each("", "statistics_only")},
    parameters=(FORWARD["x"], FORWARD["eps"]),
    # The results of the forward functions, of which the first three are never returned.
    results=(
        *[replace(result, norms=()) for result in FORWARD.results[:3]],
        *[replace(result, wanted="") for result in FORWARD.results[3:]],
    ),
)

MODULATED = Family(
    direction=Direction.FORWARD,
    name="modulated",
    axes={"modulated": True},
    functions=_functions("modulated_{function}", "modulated"),
    parameters=(
        FORWARD["x"],
        Parameter(
            "scale",
            Kind.SAMPLES,
            default=_each(REQUIRED),
            meaning=_first(
                "(B, N) if x is (B, ..., N), one row per sample; x's shape, one row per row of x; or (N,), one row for "
                "all. fp16, bf16 or fp32, rows on any stride. Rows are multiplied by 1 + scale."
            ),
            positional=True,
            gradient="dscale",
            functional=True,
        ),
        Parameter(
            "shift",
            Kind.SAMPLES,
            default=_each(REQUIRED),
            meaning=_first("(B, N), x's shape or (N,), as scale; added after the multiplication."),
            positional=True,
            gradient="dshift",
            functional=True,
        ),
        Parameter(
            "gate",
            Kind.SAMPLES,
            default=_each("None"),
            meaning=_first(
                "(B, N), x's shape or (N,), as scale, or None for 1: x is multiplied by gate before residual is added. "
                "Requires residual."
            ),
            axis="x_gate",
            wanted="x_gate",
            gradient="dgate",
            functional=True,
        ),
        Parameter(
            "residual",
            Kind.ROWS,
            default=_each("None"),
            meaning=_first("x's shape, fp16, bf16 or fp32, or None for 0."),
            axis="fadd",
            wanted="fadd.stores",
            gradient="dx",
            functional=True,
        ),
        replace(FORWARD["weight"], positional=False),
        replace(FORWARD["bias"], positional=False),
        replace(FORWARD["eps"], torchs={}),
        FORWARD["weight_offset"],
        replace(FORWARD["fquant"], functional=True),
        FORWARD["out_dtype"],
        replace(FORWARD["save_mv"], functional=True),
    ),
    # The results of the forward functions, in the order in which launches pass them.
    results=FORWARD.results,
)

GATED = Family(
    direction=Direction.FORWARD,
    name="gated",
    functions=_functions("gated_{function}", "gating.gates"),
    parameters=(
        FORWARD["x"],
        Parameter(
            "gate",
            Kind.ROWS,
            default=_each(REQUIRED),
            meaning=_first("x's shape, fp16, bf16 or fp32, with strides independent of x's."),
            positional=True,
            wanted="gating.gates",
            unused="gate was passed and gating {gating!r} would ignore it; pass gating='after_norm' or 'before_norm'",
            gradient="dgate",
            functional=True,
        ),
        Parameter(
            "weight",
            Kind.GROUPS,
            default=_each("None"),
            meaning=_first("(N,), or (G, N) where x is (..., G, N); fp16, bf16 or fp32, or None for 1."),
            axis="grouped",
            gradient="dweight",
            functional=True,
        ),
        Parameter(
            "bias",
            Kind.GROUPS,
            default=_centred("None"),
            meaning=_first("(N,), or (G, N) where x is (..., G, N); fp16, bf16 or fp32, or None for 0."),
            axis="grouped",
            gradient="dbias",
            functional=True,
        ),
        Parameter(
            "gating",
            Kind.WORD,
            default=_each('"after_norm"'),
            meaning=_first('"after_norm" or "before_norm": where rows are multiplied by the activated gate.'),
            words=Gating,
            axis="gating",
            functional=True,
        ),
        Parameter(
            "activation",
            Kind.WORD,
            default=_each('"silu"'),
            meaning=_first('"silu", gate * sigmoid(gate), or "sigmoid".'),
            words=GateActivation,
            axis="gate_activation",
            functional=True,
        ),
        replace(FORWARD["eps"], torchs={}),
        FORWARD["weight_offset"],
        replace(FORWARD["fquant"], functional=True),
        replace(FORWARD["out_dtype"], functional=True),
        replace(FORWARD["save_mv"], functional=True),
    ),
    # Gated norms have no sum, but launches pass the same results in the same order.
    results=tuple(replace(row, like=()) for row in FORWARD.results),
)

QUANTISED = Family(
    direction=Direction.FORWARD,
    name="quantised",
    functions=_functions("quantised_{function}", "serves"),
    parameters=(
        FORWARD["x"],
        FORWARD["weight"],
        FORWARD["bias"],
        replace(FORWARD["eps"], torchs={}),
        FORWARD["weight_offset"],
        Parameter(
            "residual",
            Kind.ROWS,
            default=_each("None"),
            meaning=_first("x's shape, fp16, bf16 or fp32: added to x; the sum is returned as residual_out."),
            axis="fadd",
            wanted="fadd.adds",
            absent="fadd {fadd!r} adds a residual and none was passed; pass residual, or leave fadd out",
            unused="residual was passed and fadd 'none' would ignore it; leave fadd out, or pass 'post_add'",
            gradient="dx",
            functional=True,
        ),
        replace(
            FORWARD["fadd"],
            default=_each('"pre_add_store"'),
            meaning=_first(
                'where residual goes: "pre_add_store" (1) adds it to x, "post_add" (3) to the normalised rows, and '
                '"post_add_norm" (4) normalises that sum again.'
            ),
            functional=True,
        ),
        *(
            replace(
                RENORMED[f"next_{name}"],
                wanted="fadd.renorms",
                unused=f"next_{name} was passed, and fadd {{fadd!r}} has no second norm; pass fadd='post_add_norm'",
            )
            for name in ("weight", "bias")
        ),
        FORWARD["x_bias"],
        replace(MODULATED["scale"], default=_each("None"), positional=False, axis="modulated", wanted="modulated"),
        replace(
            MODULATED["shift"],
            default=_each("None"),
            positional=False,
            wanted="modulated",
            absent="scale was passed, which multiplies rows, and no shift to add to them; pass shift",
            unused="shift was passed, which is added to rows that a scale multiplies, and no scale; pass scale",
        ),
        MODULATED["gate"],
        replace(FORWARD["smooth_scale"], functional=True),
        Parameter(
            "static_scale",
            Kind.VALUE,
            default=_each("None"),
            meaning=_first('one fp32 value on x\'s device, which y is divided by; goes with fquant "static".'),
            wanted="fquant.takes_scale",
            absent="fquant 'static' divides y by a y_scale of one value and none was passed; pass it",
            unused="a y_scale of one value was passed and fquant {fquant!r} reads none; pass fquant='static'",
            argument="y_scale",
            functional=True,
        ),
        Parameter(
            "column_scale",
            Kind.VECTOR,
            default=_each("None"),
            meaning=_first('(N,), which the columns of y are divided by; goes with fquant "static_column".'),
            wanted="fquant.takes_column_scales",
            absent="fquant 'static_column' divides y by a y_scale of N values and none was passed; pass it",
            unused="a y_scale of N values was passed and fquant {fquant!r} reads none; pass fquant='static'",
            argument="y_scale",
            functional=True,
        ),
        Parameter(
            "global_scale",
            Kind.VALUE,
            default=_each("None"),
            meaning=_first(
                "one fp32 value on x's device, which NVFP4's scales are multiplied by before they are rounded."
            ),
            wanted="scale_format.takes_global",
            absent="scale_format 'e4m3' has scales under a global_scale and none was passed; pass one fp32 value",
            unused="global_scale was passed and scale_format {scale_format!r} reads none; pass scale_format='e4m3'",
            functional=True,
        ),
        Parameter(
            "scale_ub",
            Kind.VALUE,
            default=_each("None"),
            meaning=_first("one fp32 value on x's device: the most that max|y| counts as."),
            axis="scale_ub",
            wanted="scale_ub",
            functional=True,
        ),
        replace(FORWARD["fquant"], default=_each('"dynamic"'), functional=True),
        replace(FORWARD["out_dtype"], functional=True),
        replace(FORWARD["cast"], functional=True),
        Parameter(
            "group_size",
            Kind.WORD,
            default=_each('"none"'),
            meaning=_first('"none" (0), "16", "32", "64" or "128": how many neighbours of a row share a scale.'),
            words=ScaleGroup,
            axis="group_size",
            functional=True,
        ),
        Parameter(
            "scale_format",
            Kind.WORD,
            default=_each('"float"'),
            meaning=_first('"float", powers of two ("ue8m0_float", "ue8m0" or "ue8m0_packed"), or "e4m3".'),
            words=ScaleFormat,
            axis="scale_format",
            functional=True,
        ),
        Parameter(
            "scale_layout",
            Kind.WORD,
            default=_each('"row_major"'),
            meaning=_first(
                '"row_major"; "column_major": scales of one group side by side, as TMA copies them; or '
                '"swizzled_128x4": in cuBLAS\'s tiles.'
            ),
            words=ScaleLayout,
            axis="scale_layout",
            functional=True,
        ),
        Parameter(
            "quantise_rounded",
            Kind.FLAG,
            default=_each("False"),
            meaning=_first("whether y is rounded to x's dtype before it is quantised."),
            axis="quantise_rounded",
            functional=True,
        ),
        Parameter(
            "save_unquant",
            Kind.FLAG,
            default=_each("False"),
            meaning=_first("whether y is returned in x's dtype too, as it is before smooth_scale."),
            axis="save_unquant",
            functional=True,
        ),
        Parameter(
            "columnwise",
            Kind.WORD,
            default=_each('"none"'),
            meaning=_first('"none", "untransposed" or "transposed": y quantised in blocks of rows as well.'),
            words=Columnwise,
            axis="columnwise",
            functional=True,
        ),
        Parameter(
            "save_amax",
            Kind.FLAG,
            default=_each("False"),
            meaning=_first("whether max|y| of all rows is returned."),
            axis="save_amax",
            functional=True,
        ),
    ),
    results=(
        Result("y", Kind.ROWS, axis="dtype_out"),
        Result("residual_out", Kind.ROWS, wanted="fadd.stores", like=("residual",)),
        Result("y_scale", Kind.PER_ROW, wanted="fquant.measures", axis="scale_format"),
        Result("unquantised", Kind.ROWS, wanted="save_unquant", like=("x",)),
        Result("columnwise", Kind.COLUMNS, wanted="columnwise.writes", axis="dtype_out"),
        Result("columnwise_scale", Kind.COLUMNS, wanted="columnwise.writes", axis="scale_format"),
        Result("amax", Kind.VALUE, wanted="save_amax"),
        Result("mean", Kind.PER_ROW, norms=tuple(_centred("")), wanted="stores_statistics"),
        Result("rstd", Kind.PER_ROW, wanted="stores_statistics"),
        Result("first_mean", Kind.PER_ROW, norms=tuple(_centred("")), wanted="stores_first"),
        Result("first_rstd", Kind.PER_ROW, wanted="stores_first"),
    ),
)

# Norms whose dx is quantised too, along rows and columns, for the products behind it.
QUANTISED_BWD = Family(
    direction=Direction.BACKWARD,
    name="quantised_gradients",
    axes={"fquant": FusedQuant.DYNAMIC},
    functions=_functions("quantised_{stem}2d_bwd", "serves"),
    parameters=(
        replace(
            BACKWARD["dy"],
            optional=False,
            meaning=_first(
                "(..., N), fp16, bf16 or fp32, or float8_e4m3fn or float8_e5m2 with dy_scale: the gradient of y."
            ),
        ),
        *(
            replace(BACKWARD[name], functional=True)
            for name in ("x", "weight", "mean", "rstd", "weight_offset", "dresidual_out", "cast")
        ),
        *(BACKWARD[name] for name in ("dx_dtype", "bias_dtype")),
        Parameter(
            "out_dtype",
            Kind.DTYPE,
            default=_each("torch.float8_e4m3fn"),
            meaning=_first("the dtype that dx is quantised to: torch.float8_e4m3fn or torch.float8_e5m2."),
            axis="dtype_out",
            functional=True,
        ),
        replace(
            QUANTISED["group_size"],
            default=_each('"128"'),
            meaning=_first(
                '"32", "64" or "128": how many adjacent elements of a row, and rows of a column, share a scale.'
            ),
        ),
        replace(
            QUANTISED["scale_format"],
            meaning=_first('"float", or powers of two: "ue8m0_float", "ue8m0" or "ue8m0_packed".'),
        ),
        QUANTISED["scale_layout"],
        replace(
            QUANTISED["columnwise"],
            default=_each('"transposed"'),
            meaning=_first('"transposed", (N, M), or "untransposed": how dx quantised along columns is stored.'),
        ),
        replace(
            BACKWARD["wants"],
            default=_each("()"),
            meaning=_first('which of "dweight" and "dbias" to compute too; dx always is.'),
        ),
        replace(BACKWARD["dy_scale"], functional=True, is_new=False),
    ),
    results=(
        Result("dx", Kind.ROWS, set_by="dx_dtype", like=("x",), is_sure=True),
        Result("rowwise", Kind.ROWS, axis="dtype_out", is_sure=True),
        Result("rowwise_scale", Kind.PER_ROW, axis="scale_format", is_sure=True),
        Result("columnwise", Kind.COLUMNS, axis="dtype_out", is_sure=True),
        Result("columnwise_scale", Kind.COLUMNS, axis="scale_format", is_sure=True),
        *BACKWARD.results[1:3],
    ),
)


def _unnamed(name: str, kind: Kind, **rest: Any) -> Parameter:
    """Return a parameter of a function that only autograd calls, without signature and docstring."""
    return Parameter(name, kind, **{"default": _each("None"), "meaning": {}, **rest})


_OFFSET = _unnamed("weight_offset", Kind.NUMBER, default=_uncentred("0.0"))

# The rows of one sample are a part, which programs share.
MODULATED_BWD = Family(
    direction=Direction.BACKWARD,
    name="modulated",
    functions=_functions("modulated_{function}_bwd", "modulated"),
    parameters=(
        _unnamed("dy", Kind.ROWS),
        _unnamed("x", Kind.ROWS),
        _unnamed("weight", Kind.VECTOR),
        _unnamed("scale", Kind.PER_SAMPLE),
        _unnamed("gate", Kind.PER_SAMPLE, wanted="x_gate"),
        # The product of gate and this tensor is added to the residual.
        _unnamed("gated", Kind.ROWS, wanted="x_gate"),
        _unnamed("mean", Kind.PER_ROW, default=_centred("None")),
        _unnamed("rstd", Kind.PER_ROW),
        _unnamed("dresidual_out", Kind.ROWS, wanted="fadd.stores"),
        _unnamed("sample_rows", Kind.COUNT),
        _OFFSET,
        *(_unnamed(f"{name}_dtype", Kind.DTYPE) for name in ("dx", "dgated", "dweight", "dbias", "dgate")),
        _unnamed("wants", Kind.NAMES),
    ),
    # dweight and dbias are the sums over each sample of dy * h and dy, from which autograd makes several gradients.
    results=(
        Result("dx", Kind.ROWS, set_by="dx_dtype", like=("x",)),
        Result("dgated", Kind.ROWS, wanted="x_gate", set_by="dgated_dtype", like=("gated",)),
        Result("dweight", Kind.PER_PART, set_by="dweight_dtype"),
        Result("dbias", Kind.PER_PART, set_by="dbias_dtype"),
        Result("dgate", Kind.PER_PART, wanted="x_gate", set_by="dgate_dtype", like=("gate",)),
    ),
)

# One group of columns is a part: its rows have length N and are as far apart as the rows of all groups are long.
GATED_BWD = Family(
    direction=Direction.BACKWARD,
    name="gated",
    functions=_functions("gated_{function}_bwd", "gating.gates"),
    parameters=(
        _unnamed("dy", Kind.ROWS),
        _unnamed("x", Kind.ROWS),
        _unnamed("gate", Kind.ROWS),
        _unnamed("weight", Kind.PER_PART),
        _unnamed("bias", Kind.PER_PART, default=_centred("None"), wanted="gating.is_after"),
        _unnamed("mean", Kind.PER_ROW, default=_centred("None")),
        _unnamed("rstd", Kind.PER_ROW),
        _unnamed("groups", Kind.COUNT),
        _OFFSET,
        *(_unnamed(f"{name}_dtype", Kind.DTYPE) for name in ("dx", "dgate", "dweight", "dbias")),
        _unnamed("wants", Kind.NAMES),
    ),
    results=(
        Result("dx", Kind.ROWS, set_by="dx_dtype", like=("x",)),
        Result("dgate", Kind.ROWS, set_by="dgate_dtype", like=("gate",)),
        Result("dweight", Kind.PER_PART, set_by="dweight_dtype", like=("weight",)),
        Result("dbias", Kind.PER_PART, norms=tuple(_centred("")), set_by="dbias_dtype", like=("bias",)),
    ),
)


def _of_groups(name: str, kind: Kind, **rest: Any) -> Parameter:
    return _unnamed(name, kind, default={Norm.LAYER: REQUIRED}, **rest)


# GroupNorm, whose checks are in `families.group.row`: a row is one group of channels of one sample.
GROUP = Family(
    direction=Direction.FORWARD,
    name=GROUP_WORD,
    functions={Norm.LAYER: "group_norm"},
    parameters=(
        _of_groups("x", Kind.IMAGES, functional=True, gradient="dx"),
        _of_groups("weight", Kind.VECTOR, optional=True, functional=True, gradient="dweight"),
        _of_groups("bias", Kind.VECTOR, optional=True, functional=True, gradient="dbias"),
        _of_groups("num_groups", Kind.COUNT, functional=True),
        _of_groups("eps", Kind.NUMBER, least=0.0, functional=True),
        _of_groups("activation", Kind.WORD, functional=True),
        _of_groups("out_dtype", Kind.DTYPE, optional=True),
        _of_groups("save_mv", Kind.FLAG, functional=True),
    ),
    results=(
        Result("y", Kind.IMAGES, set_by="y_dtype", like=("x",)),
        Result("mean", Kind.PER_ROW),
        Result("rstd", Kind.PER_ROW),
    ),
)

GROUP_BWD = Family(
    direction=Direction.BACKWARD,
    name=GROUP_WORD,
    functions={Norm.LAYER: "group_norm_backward"},
    parameters=(
        _of_groups("dy", Kind.IMAGES),
        *(replace(GROUP[name], gradient="") for name in ("x", "weight", "bias")),
        # Callers pass one tensor, (2, B, groups).
        *(_of_groups(name, Kind.PER_ROW, argument="statistics") for name in ("mean", "rstd")),
        *(GROUP[name] for name in ("num_groups", "eps", "activation")),
        _of_groups("wants", Kind.NAMES),
    ),
    results=(
        Result("dx", Kind.IMAGES, set_by="dx_dtype"),
        Result("dweight", Kind.VECTOR, set_by="dweight_dtype", like=("weight",)),
        Result("dbias", Kind.VECTOR, set_by="dbias_dtype", like=("bias",)),
    ),
)


def _gradients(family: Family, parameters: tuple[Parameter, ...], *others: Result) -> Family:
    """Return the family of operators that compute the gradients of a family's operands from what the call saved."""
    inputs = [row for row in family.inputs if row.gradient.removeprefix("d") == row.name]
    own = {row.name: row for row in parameters}
    return Family(
        direction=Direction.BACKWARD,
        name=family.name,
        axes=family.axes,
        functions={norm: f"{name}_backward" for norm, name in family.functions.items()},
        parameters=(
            own.pop("dy"),
            *(replace(row, gradient="") for row in inputs),
            BACKWARD["mean"],
            BACKWARD["rstd"],
            *own.values(),
            FORWARD["weight_offset"],
            BACKWARD["wants"],
        ),
        results=(
            *others,
            *(
                Result(row.gradient, row.kind, norms=tuple(row.default), like=(row.name,))
                for row in inputs
                if row.gradient not in [result.name for result in others]
            ),
        ),
    )


# Operators that traced graphs call. Those of modulated norms take the sum as x, and x itself if a gate multiplied it.
MODULATED_GRADIENTS = _gradients(
    MODULATED,
    (
        _unnamed("dy", Kind.ROWS),
        _unnamed(
            "gated",
            Kind.ROWS,
            wanted="x_gate",
            absent="gate was passed and what it multiplied was not; pass gated, or leave gate out",
            unused="gated was passed and no gate that multiplied it; pass gate, or leave gated out",
        ),
        BACKWARD["dresidual_out"],
        BACKWARD["dx_dtype"],
    ),
    Result("dx", Kind.ROWS, set_by="dx_dtype", like=("x",)),
    Result("dgated", Kind.ROWS, like=("gated",)),
)
GATED_GRADIENTS = _gradients(
    GATED, (_unnamed("dy", Kind.ROWS, default=_each(REQUIRED)), GATED["gating"], GATED["activation"])
)
# The operators that compute a forward family's gradients, by the family's word.
GRADIENTS = {"": BACKWARD, "quantised": BACKWARD, "modulated": MODULATED_GRADIENTS, "gated": GATED_GRADIENTS}

FAMILIES = (FORWARD, BACKWARD, STATISTICS, RENORMED, MODULATED, GATED, QUANTISED, QUANTISED_BWD)
# The families that only autograd calls: their rows are in parts, and their functions have no public names.
IN_PARTS = (MODULATED_BWD, GATED_BWD)


def family_of(mode: AnyMode) -> Family:
    """Return the family whose functions serve a mode."""
    if isinstance(mode, GroupMode):
        return GROUP_BWD if mode.is_backward else GROUP
    if mode.serves:
        return QUANTISED_BWD if mode.is_backward else QUANTISED
    if mode.modulated:
        return MODULATED_BWD if mode.is_backward else MODULATED
    if mode.gating.gates:
        return GATED_BWD if mode.is_backward else GATED
    if mode.fadd.renorms:
        return RENORMED
    if mode.statistics_only:
        return STATISTICS
    return BACKWARD if mode.is_backward else FORWARD
