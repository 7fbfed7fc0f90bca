"""The public functions of every family: their signatures, and the words of their docstrings.

Callers pass these arguments in words and an order of their own; `forward` in the family's module makes a call of the
family's rows from them. Rows of `parameters` are reused where both agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .families import REQUIRED, Family, Kind, Parameter
from .groups import Activation
from .parameters import ADDED, FORWARD, GATED, GROUP, MODULATED, QUANTISED, QUANTISED_BWD, RENORMED, STATISTICS
from .values import HeadNorm, Norm


@dataclass(frozen=True)
class PublicFunctions:
    """Functions that return every output of a family's forward kernels, and record no gradient.

    Attributes:
        family: the functions' names by norm, with the parameters of their signatures.
        rows: the family whose calls they make, with operands and options in the order of its rows.
        output: the class of their result.
        call: the expression that they return.
        summary: the docstring's first line by norm.
        details: the docstring's paragraph about all of them.
        returns: the docstring's entry about the result.
        renamed: the names of arguments by the rows whose values they are, where the names differ.
    """

    family: Family
    rows: Family
    output: str
    call: str
    summary: Mapping[Norm, str]
    details: str
    returns: str
    renamed: Mapping[str, str] = field(default_factory=dict, hash=False)


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
NORM_BEFORE_GATE = (
    "True multiplies the normalised rows by the activated gate; False multiplies x by the activated gate, and "
    "normalises the product."
)
GROUP_SIZE = (
    "the number of adjacent columns that are normalised together, each such group of a row by itself; a divisor of N. "
    "None is N."
)
_EVERY_OUTPUT = "with None for outputs that were not asked for."


def _functions(family: Family, name: str, *parameters: Parameter, norms: Iterable[Norm] = ()) -> Family:
    """Return the family of public functions of some norms; `name` holds a field of a `NormRow` in braces."""
    return Family(
        direction=family.direction,
        functions={norm: name.format(**vars(norm.row)) for norm in norms or family.functions},
        parameters=parameters,
        results=(),
        name=family.name,
    )


def _forward_of(family: Family) -> Mapping[Norm, str]:
    return {
        norm: f"Compute the forward pass of `{name}`, and quantise y if asked."
        for norm, name in family.functions.items()
    }


_OUT = _as(
    FORWARD["out"],
    "a contiguous tensor in y's dtype that y is written to, or None for a new tensor; may be x or residual itself if "
    "the dtype is the same.",
)
_RENORMED = PublicFunctions(
    _functions(
        RENORMED,
        "renormed_{stem}2d_fwd",
        _X,
        *(RENORMED[name] for name in ("residual", "weight", "bias", "next_weight", "next_bias")),
        _EPS,
        *(RENORMED[name] for name in ("weight_offset", "smooth_scale", "cast")),
        FORWARD["fquant"],
        _OUT_DTYPE,
        replace(_SAVE_MV, meaning={Norm.LAYER: "return mean and rstd.", Norm.RMS: "return rstd."}),
        _OUT,
        _RESIDUAL_OUT,
    ),
    rows=RENORMED,
    output="LayerNormOutput",
    call="post_add.forward(operands, options, (out, residual_out))",
    summary={
        norm: f"Compute {norm.row.title}, add the result to a residual, and compute {norm.row.title} of the sum."
        for norm in RENORMED.functions
    },
    details=(
        "The forward pass of `layer_norm_add` and `rms_norm_add` with a second norm, which manifests call fadd "
        "post_add_norm. Quantisation takes y in fp32, and one y_scale per row. Not differentiable."
    ),
    returns=(
        f"`LayerNormOutput`, {_EVERY_OUTPUT} residual_out is the sum, in residual's dtype. mean and rstd are (..., 2), "
        "one value per norm, where x is (..., N)."
    ),
)

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
        _OUT,
        _RESIDUAL_OUT,
    ),
    rows=MODULATED,
    output="LayerNormOutput",
    call="modulated.forward(operands, options, (out, residual_out))",
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
            NORM_BEFORE_GATE,
        ),
        _row(
            "group_size",
            Kind.COUNT,
            "None",
            GROUP_SIZE,
        ),
        _FQUANT,
        _OUT_DTYPE,
        _SAVE_MV,
    ),
    rows=GATED,
    output="LayerNormOutput",
    call="gated.forward(operands, options, group_size)",
    renamed={"gating": "norm_before_gate"},
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
        _as(QUANTISED["residual"], f"x's shape, {_FLOATS}: added as fadd says."),
        _as(
            QUANTISED["fadd"],
            '"pre_add_store" (1) adds residual to x and returns the sum as residual_out. "post_add" (3) adds residual '
            "to the normalised rows and quantises the sum, which save_unquant (required) returns as unquantised. "
            '"post_add_norm" (4) adds residual to the normalised rows, returns the sum as residual_out, and quantises '
            "a second norm of the sum, with the same eps, weight_offset and cast. The last two go without modulation, "
            "and post_add_norm without x_bias.",
        ),
        QUANTISED["next_weight"],
        QUANTISED["next_bias"],
        QUANTISED["x_bias"],
        _as(
            QUANTISED["scale"],
            f"(B, N) if x is (B, ..., N), one row per sample; x's shape, one row per row of x; or (N,). {_FLOATS}, on "
            "any row stride. Normalised rows are modulated, y * (1 + scale) + shift, before they are quantised. With "
            'shift and fquant "dynamic", without x_bias and cast.',
        ),
        QUANTISED["shift"],
        _as(
            QUANTISED["gate"],
            "(B, N), x's shape or (N,), as scale, or None for 1: x is multiplied by gate before residual is added. "
            "Requires residual and scale.",
        ),
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
        _as(
            QUANTISED["save_unquant"],
            "return y in x's dtype too, before smooth_scale, with a gradient where one is due.",
        ),
        _as(
            QUANTISED["columnwise"],
            '"untransposed" or "transposed" returns y quantised along columns too, in blocks of group_size rows of the '
            "M rows of x, the last of which may be shorter, or of all rows, as the gradient of a weight needs y: "
            "columnwise, (..., N) or (N, M), and columnwise_scale. With fp8, and scales that y computes.",
        ),
        _row(
            "y_scale",
            Kind.OUT,
            "None",
            'with fquant "static" the divisor of y: one fp32 value on x\'s device, which the host does not read, or '
            f"(N,), one per column, {_FLOATS}. Otherwise the tensor that scales are written to, or None for a new "
            "tensor: in the scales' shape and dtype, or (..., 1) for one scale per row. Contiguous; scales of groups, "
            "in two dimensions and not swizzled, may have any strides above 0 that do not overlap. Swizzled scales may "
            "be flat. Scales per row, without other options, start at a multiple of 16 bytes.",
        ),
        _as(FORWARD["out"], "a contiguous tensor that y is written to, in y's shape, or None for a new tensor."),
        _RESIDUAL_OUT,
        _row(
            "amax_out",
            Kind.OUT,
            "None",
            "one fp32 value on x's device, a slot of a history for example, that is raised to max|y| before y is "
            "divided by a scale, or None. The value is never lowered, so that calls accumulate; fill it with 0 first. "
            'A NaN in y makes the value NaN. With fquant "dynamic" or "static", without scale_ub.',
        ),
    ),
    rows=QUANTISED,
    output="QuantisedOutput | ColumnwiseOutput",
    call="quantised.forward(operands, options, (out, residual_out, y_scale, amax_out))",
    renamed={"save_amax": "amax_out"},
    summary={
        norm: f"Compute {norm.row.title} of x + x_bias + residual, quantised with scales per row, per group, or static."
        for norm in QUANTISED.functions
    },
    details=(
        "y is multiplied by smooth_scale, then divided by a scale, rounded to nearest even and saturated at qmax: 127 "
        "for int8, 448 for float8_e4m3fn, 57344 for float8_e5m2. The scale of a row, or of a group of adjacent "
        "elements, the last of which may be shorter, is max|y| / qmax (as for DeepSeek-V3's activations, 2024, in "
        "groups of 128), and 1 if max|y| / qmax is no normal fp32 number, as for zeros. A row or group with a NaN or "
        "Inf has a scale that is NaN or Inf. With save_unquant, unquantised and residual_out are differentiable in "
        "every operand that quantises nothing, straight through the quantisation; no other output is, and a call "
        "without save_unquant refuses operands that require a gradient while gradients are enabled."
    ),
    returns=f"`QuantisedOutput`, or `ColumnwiseOutput` with columnwise or amax_out, {_EVERY_OUTPUT}",
)

_QUANTISED_BWD = PublicFunctions(
    QUANTISED_BWD,
    rows=QUANTISED_BWD,
    output="QuantisedGradients",
    call="quantised.backward(operands, options)",
    summary={
        norm: f"Compute the gradients of `{norm.row.stem}2d_fwd`, and quantise dx along rows and along columns."
        for norm in QUANTISED_BWD.functions
    },
    details=(
        "For a linear layer before the norm, whose dy is dx: a product in fp8 takes dy along rows for the gradient of "
        "its input, and along columns for that of its weight. Gradients have the bits that the function without "
        "quantised_ returns, and dx is quantised as it is returned, by the rules of `quantised_rms_norm`. Not "
        "differentiable."
    ),
    returns="`QuantisedGradients`, with None for dweight and dbias that were not asked for.",
)

PUBLIC = (_RENORMED, _MODULATED, _GATED, _QUANTISED, _QUANTISED_BWD)


@dataclass(frozen=True)
class FunctionalFunctions:
    """Differentiable functions of a family.

    Attributes:
        family: the functions' names by norm, with the parameters of their signatures.
        rows: the family whose calls they make, with operands and options in the order of its rows.
        output: the type of their result.
        call: the expression that they return, behind a look-up if the function takes a normalized_shape.
        summary: the docstring's first line by norm.
        details: the docstring's paragraphs by norm.
        returns: the docstring's entries about the results.
        raises: the docstring's entries about errors.
        renamed: the names of arguments by the rows whose values they are, where the names differ.
        overloads: the types of the result that arguments decide, with the annotations of those arguments, and the names
            of the arguments that have no default then.
    """

    family: Family
    rows: Family
    output: str
    call: str
    summary: Mapping[Norm, str]
    details: Mapping[Norm, tuple[str, ...]]
    returns: tuple[str, ...]
    raises: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict, hash=False)
    overloads: tuple[tuple[str, Mapping[str, str], tuple[str, ...]], ...] = ()


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


def _saving_for_autograd(family: Family) -> Family:
    """Return a family whose calls pass None for save_mv: their look-up saves statistics if a gradient is due."""
    rows = [replace(row, default={}) if row.name == "save_mv" else row for row in family.parameters]
    return replace(family, parameters=tuple(rows))


_TWO, _THREE = (f"tuple[{', '.join(['torch.Tensor'] * many)}]" for many in (2, 3))
_COPIED = "An x that kernels cannot walk is copied once."
CAST = _as(
    FORWARD["cast"],
    '"after_weight" (rows are rounded once, to y\'s dtype) or "before_weight" (rows are also rounded to y\'s dtype '
    "before the multiplication by weight, as in Hugging Face's Llama; the gradient of weight is that of the rounded "
    "rows).",
)
_OFFSET_OF_ANY = replace(
    FORWARD["weight_offset"],
    default=dict.fromkeys(Norm, "0.0"),
    meaning={
        Norm.LAYER: (
            "added to every weight, in fp32; 1.0 for models that store weight - 1. LayerNorm's kernels add no offset: "
            "the sum is a separate operation on (N,)."
        ),
        Norm.RMS: ("added to every weight, in fp32 and in the kernel; 1.0 for Gemma's norms, which store weight - 1."),
    },
)


def _eps(norm: Norm, meaning: str = "") -> Parameter:
    """Return a norm's eps, which may be passed without its name, and left to torch if torch has a default."""
    row = FORWARD["eps"]
    default = {norm: "None" if norm in row.torchs else row.default[norm]}
    return replace(row, default=default, meaning={norm: f"{row.meaning[norm][:-1]}{meaning}"}, positional=True)


_EPS_OF_TORCH = (
    _eps(Norm.LAYER, "."),
    _eps(
        Norm.RMS,
        "; None is torch.finfo(torch.float32).eps, also for 16-bit x: torch takes that of the type it computes in, as "
        "its documentation says since 2.13.",
    ),
)


def _vectors(shape: str) -> tuple[Parameter, ...]:
    """Return weight and bias of a shape."""
    return tuple(
        _as(row, f"{shape}, {_ANY_FLOATS}, or None for {default}.") for row, default in ((_WEIGHT, 1), (_BIAS, 0))
    )


def _x_bias(shape: str, also: str = "") -> Parameter:
    return _as(
        FORWARD["x_bias"],
        f"{shape}, {_ANY_FLOATS}: added to x in fp32 before anything else, for example the bias of a linear layer that "
        f"leaves the addition to this function; or None. The gradient of x_bias is the sum of x's gradient over "
        f"rows.{also}",
    )


def _statistics(norm: Norm) -> str:
    return "a mean and rstd" if norm.centres else "an rstd"


def _elsewhere(norm: Norm) -> tuple[str, ...]:
    """Return the paragraphs about calls that no kernel on plain tensors serves."""
    vectors, sums = "weight is", "gradient of weight is a partial sum"
    if norm.centres:
        vectors, sums = "weight and bias are", "gradients of weight and bias are partial sums"
    of_torch = (
        "Under torch.autocast y has the dtype that torch's operator has there: fp32 on a GPU (for rms_norm depending "
        "on the release of torch), x's dtype on a CPU. "
    )
    return (
        "Torch's own operator runs where kernels cannot, on a GPU too: in transforms of torch.func, for tensors with a "
        "tangent of forward-mode AD, under torch.jit.trace, for float64 tensors (logged once), and for rows without "
        "elements.",
        "For DTensors each rank normalises its rows. No communication is needed if x is sharded along leading "
        f"dimensions and {vectors} replicated: y has x's placement, and the {sums}. Other placements are redistributed "
        "first, as for torch's own operator.",
        f"{of_torch if norm in _FORMULAS else ''}`backend` returns where kernels run and where torch's own operator "
        "runs.",
    )


_SECOND = "Torch's operators compute a gradient of the gradient, from the same formula."
_FORMULAS = {
    Norm.LAYER: (
        "y = (s - mean) / sqrt(var + eps) * (weight + weight_offset) + bias of s = x + x_bias, with the biased "
        "variance (Ba et al., 2016)."
    ),
    Norm.RMS: (
        "y = s / sqrt(mean(s**2) + eps) * (weight + weight_offset) of s = x + x_bias (Zhang and Sennrich, 2019)."
    ),
}
_PLAIN_RAISES = (
    "DTypeError: a tensor is of a type that cannot be normalised (an integer one, say).",
    "DeviceError: tensors are on several devices or meshes, or some are DTensors and others plain tensors.",
    "LayoutError: a tensor is sparse or nested.",
)
_NUMBERS = "ConflictError: eps is no number of at least 0, weight_offset none at all, or has no weight to be added to"
_OTHERS = "NormforgeError: one of the other errors that `layernorm2d_fwd` lists."

ACTIVATION = replace(_row("activation", Kind.WORD, "None", '"silu", or None (or "none") for none.'), words=Activation)


def _over_channels(takes: str) -> tuple[Parameter, Parameter]:
    """Return the rows of a norm over channels, which says what other arguments it takes."""
    return (
        _row(
            "dim",
            Kind.COUNT,
            "-1",
            "-1 normalises the last dimensions. 1 normalises the channels of x, (B, C, ...), at each position: "
            f"{takes}. Kernels read x in place if it is contiguous or channels_last, and y has the same layout; any "
            "other layout is copied once.",
        ),
        replace(
            ACTIVATION,
            meaning=dict.fromkeys(
                Norm,
                '"silu", applied to the result in the same kernel, or None; with dim=1 and an x of 3 dimensions or '
                "more. Elsewhere torch applies it.",
            ),
        ),
    )


_PLAIN_FUNCTIONS = FunctionalFunctions(
    _functions(
        FORWARD,
        "{function}",
        _as(
            FORWARD["x"],
            f"(..., *normalized_shape), {_ANY_FLOATS}; any strides. An x that kernels cannot walk (N not contiguous, "
            "leading dimensions on more than three strides) is copied once.",
        ),
        replace(
            _row("normalized_shape", Kind.SHAPE, REQUIRED, "the last dimensions of x, normalised together."),
            positional=True,
        ),
        *_vectors("normalized_shape"),
        *_EPS_OF_TORCH,
        CAST,
        _OFFSET_OF_ANY,
        _x_bias("normalized_shape"),
        *_over_channels("normalized_shape is (C,), and cast, weight_offset and x_bias keep their defaults"),
        norms=_FORMULAS,
    ),
    output="torch.Tensor",
    summary={
        norm: f"Compute {norm.row.title} over the last dimensions, with the arguments of "
        f"`torch.nn.functional.{norm.row.function}`."
        for norm in _FORMULAS
    },
    details={
        norm: (
            f"{formula} The backward pass saves x, and {_statistics(norm)} per row; nothing if no gradient is due. "
            f"{_SECOND}",
            *_elsewhere(norm),
        )
        for norm, formula in _FORMULAS.items()
    },
    returns=("y: x's shape and dtype.",),
    raises=(
        "ShapeError: normalized_shape is not what x's shape ends in, or is not the shape of each vector.",
        *_PLAIN_RAISES,
        f"{_NUMBERS}; or dim is neither -1 nor 1, an argument was passed that dim does not take, or activation is no "
        "such word.",
        _OTHERS,
    ),
    rows=FORWARD,
    call="normalise_first(operands, normalized_shape, options)",
)

_L2_FUNCTIONS = FunctionalFunctions(
    _functions(
        FORWARD,
        "{function}",
        _as(FORWARD["x"], f"(..., N), {_ANY_FLOATS}; any strides. {_COPIED}"),
        _vectors("(N,)")[0],
        _eps(Norm.L2, ". `normalize` instead bounds the norm from below."),
        _eps(Norm.L2_CLAMPED, "."),
        *_over_channels("weight is (C,)"),
        norms=(Norm.L2, Norm.L2_CLAMPED),
    ),
    output="torch.Tensor",
    summary={
        Norm.L2: (
            "Divide each row of x by its L2 norm: y = x / sqrt(sum(x**2) + eps) * weight over the last dimension."
        ),
        Norm.L2_CLAMPED: (
            "Divide each row of x by its L2 norm, as `torch.nn.functional.normalize` does over the last dimension."
        ),
    },
    details={
        norm: (
            f"{formula}Differentiable. The backward pass saves x, and an rstd per row; nothing if no gradient is due. "
            f"{_SECOND}",
            *_elsewhere(norm),
        )
        for norm, formula in {
            Norm.L2: "",
            Norm.L2_CLAMPED: (
                "y = x / max(sqrt(sum(x**2)), eps) * weight, in fp32 with one rounding. Where eps is the larger, the "
                "gradient of x is that of x / eps * weight. "
            ),
        }.items()
    },
    returns=("y: x's shape and dtype, under autocast too.",),
    raises=(
        "ShapeError: x has no dimension, or weight is not (N,).",
        *_PLAIN_RAISES,
        "ConflictError: eps is no number of at least 0, dim is neither -1 nor 1, or activation is no such word or came "
        "without dim=1.",
        _OTHERS,
    ),
    rows=FORWARD,
    call="normalise_last(operands, options)",
)

# The rows of functions that add a residual, before the norm or behind it.
_ADDING = (
    _as(FORWARD["x"], f"(..., N), {_ANY_FLOATS}; any strides. {_COPIED}"),
    _as(
        FORWARD["residual"],
        f"x's shape, {_ANY_FLOATS}, whatever x's dtype is.",
        default=dict.fromkeys(_FORMULAS, REQUIRED),
        positional=True,
    ),
    *_vectors("(N,)"),
    *_EPS_OF_TORCH,
    CAST,
    _OFFSET_OF_ANY,
)

_ADD_FUNCTIONS = FunctionalFunctions(
    _functions(
        FORWARD,
        "add_{function}",
        *_ADDING,
        _x_bias("(N,)", " The stored sum includes x_bias."),
        _as(
            FORWARD["dropout_p"],
            "the probability that an element of x + x_bias is dropped before residual is added; kept elements are "
            "divided by 1 - dropout_p. 0 <= dropout_p < 1; pass `p if module.training else 0.0`.",
        ),
        _as(
            FORWARD["dropout_rng"],
            "the source of the mask, together with an element's row and column: (seed, offset), or both in an int64 "
            "tensor of two on x's device; a torch.Generator of that device to draw them from; or None for torch's "
            "default generator. A draw advances the generator, in a CUDA graph at each replay. The backward pass "
            "computes the same mask again from seed and offset; `dropout_mask` returns the mask.",
        ),
        _row("return_mask", Kind.FLAG, "False", "return the mask too, which torch's operators compute separately."),
        norms=_FORMULAS,
    ),
    output=f"{_TWO} | {_THREE}",
    overloads=(
        (_TWO, {"return_mask": "Literal[False]"}, ()),
        (_THREE, {"return_mask": "Literal[True]"}, ("return_mask",)),
    ),
    summary={
        norm: f"Add a residual and compute {norm.row.title} of the sum over the last dimension, in one kernel."
        for norm in _FORMULAS
    },
    details={
        norm: (
            "residual_out = dropout(x + x_bias) + residual, summed in fp32 and rounded once, and y is the "
            f"{norm.row.title} of residual_out, as `{norm.row.function}` computes it. Differentiable through both "
            f"outputs; the backward pass saves residual_out, and {_statistics(norm)} per row. {_SECOND}",
            *_elsewhere(norm),
        )
        for norm in _FORMULAS
    },
    returns=(
        "y: x's shape and dtype; under torch.autocast the dtype that torch's operator has there.",
        "residual_out: x's shape, in residual's dtype; the residual of the next block.",
        "mask: only with return_mask: x's shape, bool, True where an element was kept.",
    ),
    raises=(
        "ShapeError: residual has another shape than x, or a vector is not (N,).",
        *_PLAIN_RAISES,
        f"{_NUMBERS}; or dropout_p is outside [0, 1).",
        f"{_OTHERS[:-1]}; also for a dropout of DTensors.",
    ),
    rows=FORWARD,
    call="add_normalise(operands, None, options, (dropout_p, dropout_rng, return_mask))",
)

_NEXT = (RENORMED["next_weight"], RENORMED["next_bias"])
_POST_ADD_FUNCTIONS = FunctionalFunctions(
    _functions(
        ADDED,
        "{function}_add",
        *_ADDING,
        _x_bias("(N,)"),
        _row("next_norm", Kind.FLAG, "False", "True normalises the sum again, also without a next_weight."),
        *(_floats(RENORMED[name]) for name in ("next_weight", "next_bias")),
        norms=_FORMULAS,
    ),
    rows=_saving_for_autograd(replace(ADDED, parameters=(*ADDED.parameters, *_NEXT))),
    output="torch.Tensor | tuple[torch.Tensor, torch.Tensor]",
    overloads=(
        ("torch.Tensor", {"next_norm": "Literal[False]", "next_weight": "None", "next_bias": "None"}, ()),
        (_TWO, {"next_norm": "Literal[True]"}, ("next_norm",)),
        (_TWO, {"next_weight": "torch.Tensor"}, ("next_weight",)),
    ),
    call="post_add.add(operands, options, next_norm)",
    summary={
        norm: f"Compute {norm.row.title} over the last dimension and add it to a residual, in one kernel."
        for norm in _FORMULAS
    },
    details={
        norm: (
            f"y = residual + {norm.row.function}(x), in fp32 with one rounding: the norm behind a block, as in Gemma 2 "
            "(Gemma Team, 2024) and OLMo 2 (OLMo Team, 2025). Differentiable; the backward pass saves x, and "
            f"{_statistics(norm)} per row. The gradient of residual is that of y. {_SECOND}",
            "With next_norm, a next_weight or a next_bias, the same kernel normalises the sum as it is stored, as the "
            "next block does.",
            "Torch's operators compute the same where kernels cannot run, as described in `layer_norm`. For DTensors "
            "each rank normalises its rows. Autocast changes nothing.",
        )
        for norm in _FORMULAS
    },
    returns=("y: x's shape, in residual's dtype. With a second norm, its result, in x's dtype, and the sum.",),
    raises=_raises("", "weight_offset has no weight to be added to; x_bias comes with a second norm;"),
)

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
    rows=_saving_for_autograd(MODULATED),
    call="modulated.normalise(operands, options)",
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
            f"x, the small operands, and {_statistics(norm)} per row. {_SUMS} Torch's "
            "operators compute a gradient of the gradient, and the gradients of fewer than eight rows per modulation.",
            "Torch's operators compute the same where kernels cannot run, as described in `layer_norm`. Under "
            "torch.autocast y has the dtype of the norm alone there.",
        )
        for norm in MODULATED.functions
    },
    returns=("y: x's shape and dtype. With a residual, y and residual_out: s, in residual's dtype.",),
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
    rows=_saving_for_autograd(GATED),
    output="torch.Tensor",
    call="gated.normalise(operands, options, group_size)",
    renamed={"gating": "norm_before_gate"},
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
            f"{_statistics(norm)} per row. {_SUMS} Torch's operators compute a gradient "
            "of the gradient.",
            "Torch's operators compute the same where kernels cannot run, as described in `layer_norm`. For DTensors "
            "each rank normalises its rows. Under torch.autocast y has the dtype of the norm alone there.",
        )
        for norm in GATED.functions
    },
    returns=("y: x's shape and dtype.",),
    raises=_raises(", or group_size does not divide N", "activation is no such word; norm_before_gate is no flag;"),
)

NUM_GROUPS = "groups of each sample; it divides "
_CHANNELS = [
    replace(_row(name, Kind.VECTOR, "None", f"(C,), {_ANY_FLOATS}, or None for {default}."), positional=True)
    for name, default in (("weight", 1), ("bias", 0))
]

_GROUP_FUNCTIONS = FunctionalFunctions(
    _functions(
        GROUP,
        "group_norm",
        replace(_row("x", Kind.IMAGES, REQUIRED, f"(B, C, ...), {_ANY_FLOATS}."), positional=True),
        replace(_row("num_groups", Kind.COUNT, REQUIRED, f"{NUM_GROUPS}C."), positional=True),
        *_CHANNELS,
        _eps(Norm.LAYER, "."),
        ACTIVATION,
    ),
    rows=_saving_for_autograd(GROUP),
    output="torch.Tensor",
    call="group.normalise(operands, options)",
    summary={
        Norm.LAYER: (
            "Compute GroupNorm, as `torch.nn.functional.group_norm`, and SiLU of the result in the same kernel if "
            "asked."
        )
    },
    details={
        Norm.LAYER: (
            "y = act((x - mean) / sqrt(var + eps) * weight + bias), all in fp32 and rounded once, with the mean and "
            "the biased variance of each group: C / num_groups channels of one sample at all positions (Wu and He, "
            "2018). With num_groups = C the result is InstanceNorm's.",
            "Kernels read x in place if positions are innermost (contiguous) or channels are (torch.channels_last, "
            "torch.channels_last_3d), and y has the same layout; any other layout is copied once. Several programs "
            "share a long group, and merge their moments in a fixed order: two runs give the same bits, forward and "
            "backward.",
            "Differentiable in x, weight and bias. The backward pass saves x, and a mean and rstd per group, and "
            "computes the input of the activation again. Torch's operators compute a gradient of the gradient.",
            "Torch's own operators run where kernels cannot, as described in `layer_norm`. For DTensors each rank "
            "normalises its samples, without communication if x is sharded along B and weight and bias are "
            "replicated; y is contiguous then. Under torch.autocast y is fp32 on a GPU, as torch's.",
        )
    },
    returns=("y: x's shape and dtype.",),
    raises=(
        "ShapeError: x has no channels, num_groups does not divide them, or weight or bias is not (C,).",
        *_RAISES[1:4],
        "ConflictError: eps is no number of at least 0, or activation no such word.",
    ),
)

_HEADS = f"{_ANY_FLOATS}; tokens and heads may each have any stride, as in a packed qkv"


_LENGTHS = {name: f"(D,), or (H{name} * D,) for a norm across heads" for name in "qk"}
ROTATED = (
    replace(_row("q", Kind.ROWS, REQUIRED, f"(..., Hq, D), {_HEADS}."), positional=True),
    replace(
        _row("k", Kind.ROWS, REQUIRED, "(..., Hk, D), with q's dtype and tokens; Hk may be 0, for q alone."),
        positional=True,
    ),
    *(
        replace(
            _row(f"{name}_weight", Kind.VECTOR, REQUIRED, f"{_LENGTHS[name]}, {_ANY_FLOATS}, or None for 1."),
            positional=True,
            optional=True,
        )
        for name in "qk"
    ),
    *(
        replace(_row(name, Kind.ROWS, REQUIRED, meaning), positional=True)
        for name, meaning in (
            (
                "cos",
                f"(..., rotary_dim / 2), one value for a pair of columns, or (..., rotary_dim); {_ANY_FLOATS}. "
                "Rows are tokens, in q's leading dimensions, the last of these, or one; with positions "
                "(max_position, ...).",
            ),
            ("sin", "as cos. Neither has a gradient."),
        )
    ),
    _row(
        "positions",
        Kind.ROWS,
        "None",
        "int32 or int64, one per token: its row of cos and sin, which kernels do not check; shapes as those of "
        "rows without positions. None takes the token's own row.",
    ),
    replace(
        _row(
            "norm",
            Kind.WORD,
            '"rms"',
            '"rms", "layer" or "l2" of each head; "rms_across_heads", "layer_across_heads" or "l2_across_heads" of all '
            "heads of a token together, as OLMo 2 and diffusers' rms_norm_across_heads normalise.",
        ),
        words=HeadNorm,
    ),
    _row("eps", Kind.NUMBER, "1e-6", "added to the mean square, to the variance, or to the sum of squares."),
    _row(
        "interleaved",
        Kind.FLAG,
        "False",
        "True rotates columns 2 i and 2 i + 1 (GPT-J), False i and i + rotary_dim / 2 (GPT-NeoX, Llama).",
    ),
    _row(
        "rotary_dim",
        Kind.COUNT,
        "None",
        "how many of the first columns are rotated, an even number; None is D.",
    ),
    _row("weight_offset", Kind.NUMBER, "0.0", "added to both weights, in fp32; 1.0 for Gemma's."),
    CAST,
    _row(
        "mrope_section",
        Kind.SHAPE,
        "None",
        "mRoPE (Qwen2-VL): how many pairs turn by a token's time, by its height and by its width, three numbers "
        "that add up to rotary_dim / 2. positions then have three such rows, (3, ...), and cos and sin "
        "rotary_dim / 2 columns.",
    ),
    _row(
        "mrope_interleaved",
        Kind.FLAG,
        "False",
        "True gives pairs 3 i + 1 to height and 3 i + 2 to width, as many as these have, and all others to time "
        "(Qwen3-VL); False gives the first pairs to time, the next to height and the last to width.",
    ),
)


def _of_heads(name: str, ahead: tuple[Parameter, ...], behind: tuple[Parameter, ...]) -> Family:
    """Return the family of a function of queries and keys, and of what `ROTATED` has besides."""
    rows = [replace(row, functional=True) for row in (*ahead, *ROTATED, *behind)]
    return Family(FORWARD.direction, {Norm.RMS: name}, tuple(rows), ())


_ROTARY = _of_heads(
    "qk_norm_rope",
    (),
    (
        _row(
            "out",
            Kind.OUTS,
            "None",
            "where the results go, instead of new tensors: in q's and k's shapes, and possibly q and k themselves. "
            "No operand may require a gradient then.",
        ),
        _row(
            "key_cache",
            Kind.ROWS,
            "None",
            "(blocks, slots of a block, Hk, D), any strides but D's: a paged cache that the same kernel writes "
            "the returned k to. In k's dtype, or torch.float8_e4m3fn, which saturates at 448. No operand may require a "
            "gradient then. Values are left to the caller.",
        ),
        _row(
            "slot_mapping",
            Kind.ROWS,
            "None",
            "int32 or int64, one per token, in q's leading dimensions or one: the slot in key_cache, block * slots of "
            "a block + slot in it, or -1, which writes nothing. Kernels do not check slots, and of a slot that several "
            "tokens have any of them writes each value.",
        ),
        _row(
            "k_scale",
            Kind.ROWS,
            "None",
            "one fp32 value on q's device, which the host does not read: divides k before it is rounded to fp8. None "
            "is 1.",
        ),
    ),
)
_ROTARY_GRADIENTS = _of_heads(
    "qk_norm_rope_bwd",
    (
        replace(
            _row("dq_out", Kind.ROWS, REQUIRED, "q's shape and dtype: the gradient of the first result."),
            positional=True,
        ),
        replace(_row("dk_out", Kind.ROWS, REQUIRED, "k's shape and dtype: that of the second one."), positional=True),
    ),
    (
        _row(
            "out",
            Kind.OUTS,
            "None",
            "where dq and dk go, instead of new tensors: in their shapes, heads of a packed dqkv say, and possibly "
            "dq_out and dk_out themselves.",
        ),
    ),
)
_CONFLICTS = (
    "ConflictError: a number or word is none that the argument takes; weight_offset has no weight to be added to; "
    "mrope_section does not add up to rotary_dim / 2, or has no positions; k_weight is that of no heads."
)
_ROTARY_FUNCTIONS = FunctionalFunctions(
    _ROTARY,
    rows=_ROTARY,
    output=_TWO,
    call="rotary.normalise(operands, options)",
    summary={Norm.RMS: "Normalise each head of queries and keys, and apply rotary embeddings, all in one kernel."},
    details={
        Norm.RMS: (
            "Each head, or each token's row of heads, is normalised and multiplied by its weight, as `rms_norm`, "
            "`layer_norm` and `l2_norm` compute it; pairs (a, b) of a head's columns become (a cos - b sin, b cos + "
            "a sin) (Su et al., 2021). All steps are in fp32 and rounded once.",
            "Differentiable in q, k and both weights. The backward pass saves the operands alone. One kernel computes "
            f"the gradients of q and k, and a second one adds up those of the weights. {_SUMS} {_SECOND}",
            "Kernels read views in place if all tokens are one stride apart, and all heads; anything else is copied "
            "once. Torch's operators compute the same where kernels cannot run, as described in `layer_norm`. Autocast "
            "changes nothing.",
        )
    },
    returns=("q and k, normalised and rotated: in the shapes of q and k and in their dtype.",),
    raises=(
        "ShapeError: a shape does not fit q's, or rotary_dim is no even number of columns; positions of several rows "
        "(mRoPE) do not fit; a row across heads is too long for a program, 32768 columns of powers of two.",
        "DTypeError: a tensor is of a type that cannot be normalised, or q and k are of two types.",
        "DeviceError: tensors are on several devices, or are DTensors.",
        "LayoutError: a tensor is sparse or nested; tensors of out overlap others, or their tokens are on two strides.",
        "GradientError: cos or sin requires a gradient, or an operand does and out or key_cache was passed.",
        f"{_CONFLICTS} One of key_cache and slot_mapping was passed alone, or k_scale without an fp8 key_cache.",
    ),
)
_ROTARY_GRADIENT_FUNCTIONS = FunctionalFunctions(
    _ROTARY_GRADIENTS,
    rows=_ROTARY_GRADIENTS,
    output="tuple[torch.Tensor | None, ...]",
    call="rotary.differentiate(operands, options)",
    summary={Norm.RMS: "Compute the gradients of `qk_norm_rope`, into given tensors if asked."},
    details={
        Norm.RMS: (
            "Autograd calls the same kernels, and has no packed dqkv that dq and dk could be written to. Called by "
            "itself, the function writes both to heads of one, with any strides that `qk_norm_rope` reads; a traced "
            f"call copies them there. {_SUMS} Not differentiable.",
        )
    },
    returns=(
        "dq, dk, dq_weight and dk_weight: in the shapes and dtypes of what they are gradients of. None of a weight "
        "that is None.",
    ),
    raises=(
        "GradientError: a tensor requires a gradient, with gradients enabled.",
        "NormforgeError: one of the errors that `qk_norm_rope` lists.",
    ),
)


def _statistics_functions(norm: Norm, formula: str, output: str, returned: str) -> FunctionalFunctions:
    """Return the function of a norm's statistics."""
    return FunctionalFunctions(
        _functions(
            STATISTICS,
            STATISTICS.functions[norm],
            _as(FORWARD["x"], f"(..., N), {_ANY_FLOATS}; any strides. {_COPIED}"),
            *[replace(row, positional=False) for row in _EPS_OF_TORCH if norm in row.default],
            norms=(norm,),
        ),
        rows=STATISTICS,
        output=output,
        call="statistics.compute(operands, options)",
        summary={norm: f"Compute {returned} of the last dimension, as {norm.row.title} would, in one reading of x."},
        details={
            norm: (
                f"{formula} A kernel that normalises rows as it reads them takes these: a matrix product with a norm "
                "before it, for example.",
                "Differentiable in x. The backward pass saves x and the results, and torch's operators compute all "
                "derivatives.",
                "Torch's operators compute the same where kernels cannot run, as described in `layer_norm`. For "
                "DTensors each rank computes its rows. Autocast changes nothing.",
            )
        },
        returns=(f"{returned}: fp32 (fp64 of an fp64 x), x's shape without the last dimension.",),
        raises=(
            "ShapeError: x has no dimension.",
            "DTypeError: x is of a type that cannot be normalised.",
            "LayoutError: x is sparse or nested.",
            "ConflictError: eps is no number of at least 0.",
        ),
    )


_STATISTICS_FUNCTIONS = (
    _statistics_functions(
        Norm.LAYER,
        "rstd = 1 / sqrt(var + eps), with the biased variance (Ba et al., 2016).",
        _TWO,
        "mean and rstd",
    ),
    _statistics_functions(
        Norm.RMS, "rstd = 1 / sqrt(mean(x**2) + eps) (Zhang and Sennrich, 2019).", "torch.Tensor", "rstd"
    ),
)

PLAIN = (_PLAIN_FUNCTIONS, _L2_FUNCTIONS, _ADD_FUNCTIONS)
FUNCTIONAL = (
    _POST_ADD_FUNCTIONS,
    _MODULATED_FUNCTIONS,
    _GATED_FUNCTIONS,
    _GROUP_FUNCTIONS,
    _ROTARY_FUNCTIONS,
    _ROTARY_GRADIENT_FUNCTIONS,
    *_STATISTICS_FUNCTIONS,
)
