"""The public functions of modulated, gated and quantised norms: their signatures, and the words of their docstrings.

Callers pass these arguments in words and an order of their own; `forward` in the family's module makes a call of the
family's rows from them. Rows of `parameters` are reused where both agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .families import Family, Kind, Parameter
from .parameters import FORWARD, GATED, MODULATED, QUANTISED
from .values import Norm


@dataclass(frozen=True)
class PublicFunctions:
    """Functions that return every output of a family's forward kernels, and record no gradient.

    Attributes:
        family: the functions' names by norm, with the parameters of their signatures.
        module: the module of `runtime/families/` whose `forward` they call.
        output: the class of their result.
        summary: the docstring's first line by norm.
        details: the docstring's paragraph about all of them.
        returns: the docstring's entry about the result.
    """

    family: Family
    module: str
    output: str
    summary: Mapping[Norm, str]
    details: str
    returns: str


def _as(row: Parameter, meaning: str, **changed: Any) -> Parameter:
    """Return a row with another meaning."""
    return replace(row, meaning={Norm.LAYER: meaning}, **changed)


def _row(name: str, kind: Kind, default: str, meaning: str) -> Parameter:
    """Return a row that no call of kernels has, with one default for every norm."""
    return Parameter(name, kind, default=dict.fromkeys(Norm, default), meaning={Norm.LAYER: meaning})


_FLOATS = "fp16, bf16 or fp32"
_X = _as(
    FORWARD["x"],
    f"(..., N), {_FLOATS}, on a GPU (or anywhere under TRITON_INTERPRET=1); rows on up to three strides.",
)
_WEIGHT, _BIAS = FORWARD["weight"], FORWARD["bias"]
_EPS, _OFFSET = replace(FORWARD["eps"], torchs={}), FORWARD["weight_offset"]
_FQUANT = _as(FORWARD["fquant"], '"none" (0) or "dynamic" (2).')
_OUT_DTYPE = _as(
    FORWARD["out_dtype"],
    "y's dtype. None is x's dtype, or torch.int8 with quantisation; torch.float8_e4m3fn, torch.float8_e4m3fnuz and "
    "torch.float8_e5m2 quantise too.",
)
_SAVE_MV = FORWARD["save_mv"]
_RESIDUAL_OUT = _as(
    FORWARD["residual_out"],
    "a contiguous tensor in residual's dtype that the sum is written to, or None for a new tensor; may be residual or "
    "x itself.",
)
_EVERY_OUTPUT = "with None for outputs that were not asked for."


def _functions(family: Family, name: str, *parameters: Parameter) -> Family:
    """Return the family of public functions; `name` holds the stem of a norm's functions in braces."""
    return Family(
        direction=family.direction,
        functions={norm: name.format(**vars(norm.row)) for norm in family.functions},
        parameters=parameters,
        results=(),
        name=family.name,
    )


def _forward_of(family: Family) -> Mapping[Norm, str]:
    return {
        norm: f"Compute the forward pass of `{name}`, and quantise y if asked."
        for norm, name in family.functions.items()
    }


_MODULATED = PublicFunctions(
    _functions(
        MODULATED,
        "modulated_{stem}2d_fwd",
        _X,
        *(MODULATED[name] for name in ("scale", "shift", "gate", "residual")),
        replace(_WEIGHT, positional=False),
        replace(_BIAS, positional=False),
        _EPS,
        _OFFSET,
        _FQUANT,
        _OUT_DTYPE,
        _SAVE_MV,
        _as(
            FORWARD["out"],
            "a contiguous tensor in y's dtype that y is written to, or None for a new tensor; may be x or residual "
            "itself if the dtype is the same.",
        ),
        _RESIDUAL_OUT,
    ),
    module="modulated",
    output="LayerNormOutput",
    summary=_forward_of(MODULATED),
    details="Quantisation takes the modulated y in fp32, and one y_scale per row. Not differentiable.",
    returns=f"`LayerNormOutput`, {_EVERY_OUTPUT} residual_out is residual + x * gate, in residual's dtype.",
)

_GATED = PublicFunctions(
    _functions(
        GATED,
        "gated_{stem}2d_fwd",
        _X,
        GATED["gate"],
        _WEIGHT,
        _BIAS,
        _EPS,
        GATED["activation"],
        _row(
            "norm_before_gate",
            Kind.FLAG,
            "True",
            "True multiplies the normalised rows by the activated gate; False multiplies x by the activated gate, and "
            "normalises the product.",
        ),
        _row(
            "group_size",
            Kind.COUNT,
            "None",
            "the number of adjacent columns that are normalised together, each such group of a row by itself; a "
            "divisor of N. None is N.",
        ),
        _FQUANT,
        _OUT_DTYPE,
        _SAVE_MV,
    ),
    module="gated",
    output="LayerNormOutput",
    summary=_forward_of(GATED),
    details=(
        "Quantisation takes the gated y in fp32, and one y_scale per row, or per group of a row with group_size. Not "
        "differentiable."
    ),
    returns=(
        f"`LayerNormOutput`, {_EVERY_OUTPUT} y_scale, mean and rstd have x's shape without the last dimension; with "
        "group_size (..., N / group_size)."
    ),
)

_QUANTISED = PublicFunctions(
    _functions(
        QUANTISED,
        "quantised_{function}",
        _X,
        _WEIGHT,
        _BIAS,
        _EPS,
        _OFFSET,
        _as(QUANTISED["residual"], f"x's shape, {_FLOATS}: added to x, and the sum is returned as residual_out."),
        QUANTISED["x_bias"],
        QUANTISED["smooth_scale"],
        _as(
            QUANTISED["fquant"],
            '"dynamic" (2), "smooth_dynamic" (1) or "static" (3), which divides by the scale passed as y_scale.',
        ),
        _as(
            QUANTISED["out_dtype"],
            "torch.int8 (also if None), torch.float8_e4m3fn or torch.float8_e5m2; with one scale per row and no other "
            "option float8_e4m3fnuz too. torch.float4_e2m1fn_x2 is NVFP4, with group_size 16, scale_format "
            '"e4m3" and an even N: y * global_scale / y_scale, to nearest even, at most 6, and 0 where y_scale is 0; '
            "the first of two adjacent elements is the lower half of a byte.",
        ),
        FORWARD["cast"],
        _as(
            QUANTISED["group_size"],
            "32, 64 or 128 adjacent elements share a scale, and 16 of fp4; None for whole rows.",
            default=dict.fromkeys(Norm, "None"),
        ),
        _as(
            QUANTISED["scale_format"],
            'with groups of fp8: "float", or powers of two, rounded up: as fp32 ("ue8m0_float"), as float8_e8m0fnu '
            '("ue8m0"), or as the bytes of float8_e8m0fnu, four groups to an int32 ("ue8m0_packed"). With fp4 "e4m3": '
            "global_scale * max|y| / 6 in float8_e4m3fn, to nearest even, at most 448.",
        ),
        _as(
            QUANTISED["scale_layout"],
            'with groups: "row_major"; "column_major": scales of one group are adjacent, and each group starts at a '
            "multiple of 16 bytes, as DeepGEMM copies scales on sm_90; or, for MXFP8 and NVFP4, "
            '"swizzled_128x4": tiles of 128 rows by 4 groups in sequence, tiles of the same rows first, with zeros for '
            "padding. Scale (r, g) is byte 16 (r mod 32) + 4 (r mod 128 div 32) + g mod 4 of a tile, as "
            "torch.nn.functional's scaled_mm (SWIZZLE_32_4_4) and cuBLAS take scales "
            "(https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout).",
        ),
        _as(
            QUANTISED["global_scale"],
            "one fp32 value on x's device, above 0, which the host does not read: scales of scale_format "
            '"e4m3" are multiplied by global_scale before rounding. Usually 448 * 6 / max|y| of calibration data.',
        ),
        _as(
            QUANTISED["scale_ub"],
            "one fp32 value on x's device: the upper bound of max|y|. Goes with fp8 and computed scales that are "
            "floats. A NaN makes all scales NaN; 0 or less counts as 0, which makes all scales 1.",
        ),
        _as(
            QUANTISED["quantise_rounded"],
            "True rounds y to x's 16 bits before smooth_scale, as a kernel that reads a stored y does; False quantises "
            "y in fp32.",
        ),
        _as(QUANTISED["save_unquant"], "return y in x's dtype too, before smooth_scale."),
        _row(
            "y_scale",
            Kind.PLACE,
            "None",
            'with fquant "static" the divisor of y: one fp32 value on x\'s device, which the host does not read, or '
            f"(N,), one per column, {_FLOATS}. Otherwise the tensor that scales are written to, or None for a new "
            "tensor: in the scales' shape and dtype, or (..., 1) for one scale per row. Contiguous; scales of groups, "
            "in two dimensions and not swizzled, may have any strides above 0 that do not overlap. Swizzled scales may "
            "be flat. Scales per row, without other options, start at a multiple of 16 bytes.",
        ),
        _as(FORWARD["out"], "a contiguous tensor that y is written to, in y's shape, or None for a new tensor."),
        _RESIDUAL_OUT,
    ),
    module="quantised",
    output="QuantisedOutput",
    summary={
        norm: f"Compute {norm.row.title} of x + x_bias + residual, quantised with scales per row, per group, or static."
        for norm in QUANTISED.functions
    },
    details=(
        "y is multiplied by smooth_scale, then divided by a scale, rounded to nearest even and saturated at qmax: 127 "
        "for int8, 448 for float8_e4m3fn, 57344 for float8_e5m2. The scale of a row, or of a group of adjacent "
        "elements, the last of which may be shorter, is max|y| / qmax (as for DeepSeek-V3's activations, 2024, in "
        "groups of 128), and 1 if max|y| / qmax is no normal fp32 number, as for zeros. A row or group with a NaN or "
        "Inf has a scale that is NaN or Inf. Not differentiable."
    ),
    returns=f"`QuantisedOutput`, {_EVERY_OUTPUT}",
)

PUBLIC = (_MODULATED, _GATED, _QUANTISED)


@dataclass(frozen=True)
class FunctionalFunctions:
    """Differentiable functions of a family.

    Attributes:
        family: the functions' names by norm, with the parameters of their signatures.
        module: the module of `runtime/families/` whose `normalise` they call.
        output: the type of their result.
        overloads: the types of the result that arguments decide, with the annotations of those arguments, and the names
            of the arguments that have no default then.
        summary: the docstring's first line by norm.
        details: the docstring's paragraphs by norm.
        returns: the docstring's entry about the result.
        raises: the docstring's entries about errors.
    """

    family: Family
    module: str
    output: str
    overloads: tuple[tuple[str, Mapping[str, str], tuple[str, ...]], ...]
    summary: Mapping[Norm, str]
    details: Mapping[Norm, tuple[str, ...]]
    returns: str
    raises: tuple[str, ...]


_ANY_FLOATS = "fp16, bf16, fp32 or fp64"
_RAISES = (
    "ShapeError: a tensor's shape does not fit x's{shape}.",
    "DTypeError: a tensor is of a type that cannot be normalised.",
    "DeviceError: tensors are on several devices.",
    "LayoutError: a tensor is sparse or nested.",
    "ConflictError: {conflict} or eps is no number of at least 0.",
    "NormforgeError: one of the other errors that `layernorm2d_fwd` lists.",
)
_SUMS = "The order of sums does not change from run to run."


def _raises(shape: str, conflict: str) -> tuple[str, ...]:
    return tuple(line.format(shape=shape, conflict=conflict) for line in _RAISES)


def _floats(row: Parameter) -> Parameter:
    """Return a row whose tensor may be of fp64 too."""
    return replace(row, meaning={norm: text.replace(_FLOATS, _ANY_FLOATS) for norm, text in row.meaning.items()})


_MODULATED_FUNCTIONS = FunctionalFunctions(
    _functions(
        MODULATED,
        "modulated_{function}",
        _as(FORWARD["x"], f"(B, ..., N), {_ANY_FLOATS}. An x that kernels cannot walk is copied once."),
        *(_floats(MODULATED[name]) for name in ("scale", "shift", "gate", "residual")),
        *(_floats(replace(row, positional=False)) for row in (_WEIGHT, _BIAS)),
        _EPS,
        _OFFSET,
    ),
    module="modulated",
    output="torch.Tensor | tuple[torch.Tensor, torch.Tensor]",
    overloads=(
        ("torch.Tensor", {"residual": "None"}, ()),
        ("tuple[torch.Tensor, torch.Tensor]", {"residual": "torch.Tensor"}, ("residual",)),
    ),
    summary={
        Norm.LAYER: "Compute LayerNorm over the last dimension, scaled and shifted per sample, as AdaLN of DiT is.",
        Norm.RMS: "Compute RMSNorm over the last dimension, scaled and shifted per sample.",
    },
    details={
        norm: (
            f"y = {norm.row.title}(s) * (1 + scale) + shift of s = x, or s = residual + x * gate, all in fp32, with "
            "one rounding (Peebles and Xie, 2022). scale, shift and gate are usually chunks of one (B, 6 * N) tensor, "
            "which the kernel reads in place.",
            "Differentiable in every tensor. The backward pass saves s as it is stored (x, or residual_out), a gated "
            f"x, the small operands, and {'a mean and rstd' if norm.centres else 'an rstd'} per row. {_SUMS} Torch's "
            "operators compute a gradient of the gradient, and the gradients of fewer than eight rows per modulation.",
            "Torch's operators compute the same where kernels cannot run, as described in `layer_norm`. Under "
            "torch.autocast y has the dtype of the norm alone there.",
        )
        for norm in MODULATED.functions
    },
    returns="y: x's shape and dtype. With a residual, y and residual_out: s, in residual's dtype.",
    raises=_raises("", "there is a gate and no residual;"),
)

_GATED_FUNCTIONS = FunctionalFunctions(
    _functions(
        GATED,
        "gated_{function}",
        _as(
            FORWARD["x"], f"(..., N), {_ANY_FLOATS}; rows on any strides. An x that kernels cannot walk is copied once."
        ),
        _floats(GATED["gate"]),
        _floats(_WEIGHT),
        _as(_BIAS, f"(N,), {_ANY_FLOATS}, or None for 0; multiplied by the gate too if norm_before_gate is True."),
        *(_GATED.family[name] for name in ("activation", "norm_before_gate", "group_size")),
        _EPS,
    ),
    module="gated",
    output="torch.Tensor",
    overloads=(),
    summary={
        Norm.LAYER: "Compute LayerNorm over the last dimension, times an activated gate.",
        Norm.RMS: "Compute RMSNorm over the last dimension, times an activated gate, as RMSNormGated of Mamba2 does.",
    },
    details={
        norm: (
            f"y = {norm.row.title}(x) * weight * activation(gate), as in Gated DeltaNet (Yang et al., 2024); or, with "
            f"norm_before_gate=False, y = {norm.row.title}(x * activation(gate)) * weight, as in Mamba2 (Dao and Gu, "
            "2024). All steps are in fp32, with one rounding. The gate is usually a slice of a wider projection, which "
            "the kernel reads in place.",
            "Differentiable in every tensor. The backward pass saves the tensors themselves, and "
            f"{'a mean and rstd' if norm.centres else 'an rstd'} per row. {_SUMS} Torch's operators compute a gradient "
            "of the gradient.",
            "Torch's operators compute the same where kernels cannot run, as described in `layer_norm`. For DTensors "
            "each rank normalises its rows. Under torch.autocast y has the dtype of the norm alone there.",
        )
        for norm in GATED.functions
    },
    returns="y: x's shape and dtype.",
    raises=_raises(", or group_size does not divide N", "activation is no such word; norm_before_gate is no flag;"),
)

FUNCTIONAL = (_MODULATED_FUNCTIONS, _GATED_FUNCTIONS)
