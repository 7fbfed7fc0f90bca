"""The public functions of JAX arrays: their signatures, and the words of their docstrings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .families import REQUIRED, Family, Kind, Parameter
from .parameters import FORWARD, RENORMED, STATISTICS
from .public import ACTIVATION, ROTATED, FunctionalFunctions
from .values import Norm

_NORMS = (Norm.LAYER, Norm.RMS)
_NORMS_ALONE = (*_NORMS, Norm.L2, Norm.L2_CLAMPED)
_FLOATS = "float16, bfloat16 or float32"
_FORMULAS = {
    Norm.LAYER: (
        "y = (x - mean) / sqrt(var + eps) * weight + bias, with the biased variance (Ba et al., 2016), in fp32 with "
        "one rounding at the end."
    ),
    Norm.RMS: (
        "y = x / sqrt(mean(x**2) + eps) * (weight + weight_offset) (Zhang and Sennrich, 2019), in fp32 with one "
        "rounding at the end."
    ),
    Norm.L2: "y = x / sqrt(sum(x**2) + eps) * weight, in fp32 with one rounding at the end.",
    Norm.L2_CLAMPED: (
        "y = x / max(sqrt(sum(x**2)), eps) * weight, in fp32 with one rounding at the end. Where eps is larger, the "
        "gradient is that of x / eps."
    ),
}


def _as(name: str, meaning: str, default: str | None = None, *, positional: bool = True) -> Parameter:
    """Return a row of the forward functions with another meaning, and one default for every norm if given."""
    row = FORWARD[name]
    defaults = row.default if default is None else dict.fromkeys(Norm, default)
    return replace(row, default=defaults, meaning={Norm.LAYER: meaning}, positional=positional)


_X = _as("x", f"(..., N), {_FLOATS}.")
_RESIDUAL = f"x's shape, {_FLOATS}"
_VECTORS = (_as("weight", f"(N,), {_FLOATS}, or None for 1."), _as("bias", f"(N,), {_FLOATS}, or None for 0."))
_EPS = replace(
    FORWARD["eps"],
    meaning={norm: f"{norm.row.eps_is}; a number, and no array that is traced." for norm in Norm},
    positional=True,
)
_OFFSET = replace(
    FORWARD["weight_offset"],
    default={Norm.RMS: "0.0"},
    meaning={Norm.RMS: "added to every weight, in fp32; 1.0 for Gemma's norms."},
)


def _dtype(name: str, default: str, meaning: str) -> Parameter:
    return Parameter(name, Kind.DTYPE, default=dict.fromkeys(_NORMS, default), meaning={Norm.LAYER: meaning})


_OVER = (
    Parameter(
        "dim",
        Kind.COUNT,
        default=dict.fromkeys(_NORMS_ALONE, "-1"),
        meaning={
            Norm.LAYER: "-1 normalises the last dimension. 1 normalises the channels of x, (B, C, ...), at each "
            "position, where they lie; vectors are then (C,)."
        },
    ),
    replace(ACTIVATION, meaning={Norm.LAYER: '"silu", applied to the result in the same kernel, with dim=1; or None.'}),
)


def _functions(name: str, *parameters: Parameter, norms: Sequence[Norm] = _NORMS) -> Family:
    return Family(
        direction=FORWARD.direction,
        functions={norm: name.format(function=norm.row.function) for norm in norms},
        parameters=parameters,
        results=(),
    )


_RUNS = (
    "On an NVIDIA GPU a kernel runs, forward and backward, and two runs give the same bits; anywhere else the same "
    "formula in jax.numpy. The function is differentiated in reverse mode; a gradient's gradient is that of the "
    "formula. vmap joins rows to those of one launch, but where a vector is mapped over. Arrays that are sharded "
    "along leading dimensions are normalised where they lie, and the gradients of vectors are added up over the "
    "devices; N is gathered."
)
_Y = "y: x's shape and dtype."
_RAISES = (
    "ShapeError: x has no columns, or another array another shape than described here.",
    "DTypeError: an array is of another type.",
    "ConflictError: eps is no number of at least 0, or an option lacks the array that it applies to.",
    "NormforgeError: when the program is lowered for a GPU: JaxError where jaxlib is not one that kernels are launched "
    "through, CompileError, AotError and FrozenError where a kernel cannot be had.",
)

_PLAIN = FunctionalFunctions(
    _functions("{function}", _X, *_VECTORS, _EPS, *_OVER, _OFFSET, norms=_NORMS_ALONE),
    rows=FORWARD,
    output="jax.Array",
    call="normalised",
    summary={norm: f"Compute {norm.row.title} over x's last dimension." for norm in _NORMS}
    | {
        Norm.L2: "Divide each row of x by its L2 norm, over x's last dimension.",
        Norm.L2_CLAMPED: "Divide each row of x by its L2 norm, or by eps if that is larger, over x's last dimension.",
    },
    details={norm: (f"{formula} {_RUNS}",) for norm, formula in _FORMULAS.items()},
    returns=(_Y,),
    raises=(
        *_RAISES[:2],
        f"{_RAISES[2][:-1]}; or dim is neither -1 nor 1, an argument was passed that dim does not take, or activation "
        "is no such word.",
        _RAISES[3],
    ),
)

_NEXT = (
    Parameter(
        "next_norm",
        Kind.FLAG,
        default=dict.fromkeys(_NORMS, "False"),
        meaning={Norm.LAYER: "True normalises the sum again, also without a next_weight."},
    ),
    *[replace(RENORMED[f"next_{row.name}"], meaning=row.meaning) for row in _VECTORS],
)

_ADD = FunctionalFunctions(
    _functions("add_{function}", _X, _as("residual", f"{_RESIDUAL}.", REQUIRED), *_VECTORS, _EPS, _OFFSET),
    rows=FORWARD,
    output="tuple[jax.Array, jax.Array]",
    call="summed",
    summary={norm: f"Compute {norm.row.title} of x + residual, and the sum." for norm in _NORMS},
    details={
        norm: (f"The norm is of the sum as it is returned, as `{norm.row.function}` computes it. {_RUNS}",)
        for norm in _NORMS
    },
    returns=(_Y, "residual_out: x + residual, in residual's dtype."),
    raises=_RAISES,
)

_ADDED = FunctionalFunctions(
    _functions("{function}_add", *_ADD.family.parameters[:-1], *_NEXT, _OFFSET),
    rows=FORWARD,
    output="Any",
    call="added",
    summary={norm: f"Compute {norm.row.title} of x and add it to a residual." for norm in _NORMS},
    details={
        norm: (
            f"y = residual + {norm.row.function}(x), in fp32 with one rounding at the end: the norm behind a block, as "
            f"in Gemma 2 and OLMo 2. The gradient of residual is that of y. {_RUNS}",
            "With next_norm, a next_weight or a next_bias, the same kernel normalises the sum as it is stored, as the "
            "next block does; where the call is differentiated, two kernels do.",
        )
        for norm in _NORMS
    },
    returns=("y: x's shape, in residual's dtype. With a second norm, its result, in x's dtype, and the sum.",),
    raises=_RAISES,
)

_QUANTISED = FunctionalFunctions(
    _functions(
        "quantised_{function}",
        _X,
        *_VECTORS,
        _EPS,
        _as("residual", f"{_RESIDUAL}, added before the norm, or None.", "None", positional=False),
        _as("smooth_scale", f"(N,), {_FLOATS}, of any sign, or None for 1.", "None", positional=False),
        _dtype("out_dtype", "jnp.int8", "int8, float8_e4m3fn, float8_e4m3fnuz or float8_e5m2."),
        _dtype("scale_dtype", "jnp.float32", "float32, float16 or bfloat16."),
        _OFFSET,
    ),
    rows=FORWARD,
    output="Quantised",
    call="quantised",
    summary={
        norm: f"Compute {norm.row.title} of x, or of x + residual, quantised by each row's largest magnitude."
        for norm in _NORMS
    },
    details={
        norm: (
            f"The norm is that of `{norm.row.function}`. y_scale = max|z| / qmax of z = y * smooth_scale, y = "
            "round(z / y_scale) in fp32 from the unrounded norm: int8 to nearest even within ±127, fp8 saturated. A "
            "row of zeros has y_scale 1. There is no gradient.",
        )
        for norm in _NORMS
    },
    returns=("`Quantised`, with residual_out None without a residual.",),
    raises=(
        _RAISES[0],
        "DTypeError: an array is of another type, or out_dtype or scale_dtype is none of those.",
        _RAISES[2],
        "GradientError: the function is differentiated.",
        _RAISES[3],
    ),
)

_STATISTICS = FunctionalFunctions(
    replace(
        _functions("", _X, replace(_EPS, positional=False)),
        functions={norm: STATISTICS.functions[norm] for norm in _NORMS},
    ),
    rows=FORWARD,
    output="Any",
    call="measured",
    summary={
        Norm.LAYER: "Compute the mean and rstd = 1 / sqrt(var + eps) of the last dimension, without the norm itself.",
        Norm.RMS: "Compute rstd = 1 / sqrt(mean(x**2) + eps) of the last dimension, without the norm itself.",
    },
    details={
        norm: (
            "On an NVIDIA GPU a kernel runs; the formula in jax.numpy anywhere else, and for gradients. vmap and "
            f"sharded arrays are as in `{norm.row.function}`.",
        )
        for norm in _NORMS
    },
    returns=("mean and rstd, or rstd alone for an RMSNorm: float32, x's shape without the last dimension.",),
    raises=_RAISES,
)

_TABLE = f"(..., rotary_dim / 2), one value for a pair of columns, or (..., rotary_dim); {_FLOATS}. "
_HEADS = {
    "q": f"(..., Hq, D), {_FLOATS}; the dimensions in front are tokens.",
    "k": "(..., Hk, D), with q's dtype and tokens.",
    "q_weight": f"(D,), or (Hq * D,) for a norm across heads; {_FLOATS}, or None for 1.",
    "k_weight": "(D,), or (Hk * D,), as q_weight.",
    "cos": f"{_TABLE}Rows are q's tokens, or their last dimensions; with positions (max_position, ...).",
    "sin": "as cos. Neither has a gradient, as behind `jax.lax.stop_gradient`.",
    "positions": (
        "int32 or int64, one per token, or one per index of the tokens' last dimensions: its row of cos and sin, which "
        "kernels do not check. None takes the token's own row."
    ),
}

_ROTARY = FunctionalFunctions(
    _functions(
        "qk_norm_rope",
        *(
            replace(row, meaning={Norm.RMS: _HEADS[row.name]} if row.name in _HEADS else row.meaning)
            for row in ROTATED
            if row.name != "cast"
        ),
        norms=(Norm.RMS,),
    ),
    rows=FORWARD,
    output="tuple[jax.Array, jax.Array]",
    call="rotated",
    summary={Norm.RMS: "Normalise each head of queries and keys, and apply rotary embeddings, all in one kernel."},
    details={
        Norm.RMS: (
            "Each head, or each token's row of heads, is normalised and multiplied by its weight, as `rms_norm`, "
            "`layer_norm` and `l2_norm` compute it; pairs (a, b) of a head's columns become (a cos - b sin, b cos + "
            "a sin) (Su et al., 2021). All steps are in fp32 and rounded once.",
            f"{_RUNS[: _RUNS.index('Arrays')]}Arrays that are sharded along tokens or heads stay where they lie, and "
            "gradients of weights are added up over the devices; D is gathered, and so are heads that are normalised "
            "together.",
        )
    },
    returns=("q and k, normalised and rotated: in the shapes of q and k and in their dtype.",),
    raises=(
        "ShapeError: a shape does not fit q's, or rotary_dim is no even number of columns; a row across heads is too "
        "long for a program, 32768 columns of powers of two.",
        "DTypeError: an array is of another type, or q and k are of two types.",
        "ConflictError: a number or word is none that the argument takes; weight_offset has no weight to be added to; "
        "mrope_section does not add up to rotary_dim / 2.",
        _RAISES[3],
    ),
)

JAX = (_PLAIN, _ADD, _ADDED, _QUANTISED, _ROTARY, _STATISTICS)
JAX_NAMES = sorted(name for functions in JAX for name in functions.family.functions.values())
