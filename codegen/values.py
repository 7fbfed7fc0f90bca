"""The values of a mode's axes, one enum per axis; an enum's values are the manifest's words and parts of names.

`Pipeline` and `Part` say how kernels walk a row, which no manifest sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from .lazy import cached_property


@dataclass(frozen=True)
class NormRow:
    """The properties of one norm; signatures, docstrings, kernels, checks and tests read these rows.

    Attributes:
        prefix: the start of the names of modules and kernels.
        title: the norm's name in prose.
        stem: the start of the names of the 2-d functions.
        function: the name of the differentiable function, in which the names of fused forms end.
        centres: True if the mean of a row is subtracted (and may be saved).
        averages: True if the sums of squares along a row, and of g * h backward, are divided by the row's length.
        clamps: True if a row is divided by eps where its norm is less, rather than eps added to its squares.
        eps: the default of eps, as a signature writes it.
        eps_is: what eps is to a row, in prose.
        torch_eps: the value that eps=None means, as an expression; "" if None is refused.
        formula: the paragraph of the 2-d forward function's docstring that defines y.
        lacks: attributes of a `Mode` that are False for every mode of this norm.
        template: the template that holds the norm's macros.
    """

    prefix: str
    title: str
    stem: str
    function: str
    centres: bool
    averages: bool
    clamps: bool
    eps: str
    eps_is: str
    torch_eps: str
    formula: str
    lacks: tuple[str, ...]
    template: str


class Norm(Enum):
    """A normalisation; the value is the manifest's word."""

    LAYER = "layer"
    RMS = "rms"
    L2 = "l2"
    L2_CLAMPED = "l2_clamped"

    @property
    def row(self) -> NormRow:
        """Return the properties of this norm."""
        return _NORMS[self]

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of modules and kernels."""
        return _NORMS[self].prefix

    @property
    def centres(self) -> bool:
        """Return True if the norm subtracts the mean of a row, which may be saved."""
        return _NORMS[self].centres

    @property
    def averages(self) -> bool:
        """Return True if sums along a row are divided by its length."""
        return _NORMS[self].averages

    @property
    def clamps(self) -> bool:
        """Return True if the norm of a row is clamped at eps."""
        return _NORMS[self].clamps


# Applied to queries and keys, where only quantisation is fused with the norm.
_L2 = NormRow(
    prefix="l2",
    title="L2 norm",
    stem="l2norm",
    function="l2_norm",
    centres=False,
    averages=False,
    clamps=False,
    eps="1e-6",
    eps_is="added to the sum of squares",
    torch_eps="",
    formula="In fp32: y = x / sqrt(sum(x**2) + eps) * (weight + weight_offset).",
    lacks=(
        "fadd.adds",
        "x_bias",
        "dropout",
        "cast.comes_first",
        "modulated",
        "gating.gates",
        "serves",
        "statistics_only",
        "dy_format.is_fp8",
    ),
    template="rms.j2",
)

_NORMS = {
    Norm.LAYER: NormRow(
        prefix="ln",
        title="LayerNorm",
        stem="layernorm",
        function="layer_norm",
        centres=True,
        averages=True,
        clamps=False,
        eps="1e-5",
        eps_is="added to the variance",
        torch_eps="",
        formula=(
            "With s = x + x_bias + residual in fp32: y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, with the "
            "biased variance (Ba et al., 2016)."
        ),
        lacks=(),
        template="layer.j2",
    ),
    Norm.RMS: NormRow(
        prefix="rms",
        title="RMSNorm",
        stem="rmsnorm",
        function="rms_norm",
        centres=False,
        averages=True,
        clamps=False,
        eps="1e-6",
        eps_is="added to the mean square",
        # torch computes 16-bit inputs in fp32, as the kernels do.
        torch_eps="torch.finfo(torch.float32).eps",
        formula=(
            "With s = x + x_bias + residual in fp32: y = s / sqrt(mean(s**2) + eps) * (weight + weight_offset) (Zhang "
            "and Sennrich, 2019; Gemma stores weight - 1 and passes weight_offset=1)."
        ),
        lacks=(),
        template="rms.j2",
    ),
    Norm.L2: _L2,
    Norm.L2_CLAMPED: replace(
        _L2,
        prefix="l2c",
        title="clamped L2 norm",
        stem="normalize",
        function="normalize",
        clamps=True,
        eps="1e-12",
        eps_is="the least that a row is divided by",
        formula=(
            "In fp32: y = x / max(sqrt(sum(x**2)), eps) * (weight + weight_offset), as torch.nn.functional.normalize. "
            "Where eps is the larger, the saved rstd is -1 / eps: gradients know such rows by the sign."
        ),
    ),
}


class Direction(Enum):
    """The direction of a kernel: outputs or gradients; the value is the manifest's word and part of names."""

    FORWARD = "fwd"
    BACKWARD = "bwd"

    @property
    def title(self) -> str:
        """Return the direction in prose."""
        return self.name.lower()


class DType(Enum):
    """Element types; the value is the manifest's word and the suffix in names."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    INT8 = "int8"
    FP8_E4M3FN = "fp8_e4m3fn"
    FP8_E4M3FNUZ = "fp8_e4m3fnuz"
    FP8_E5M2 = "fp8_e5m2"
    FP4_E2M1FN = "fp4_e2m1fn"

    @property
    def itemsize(self) -> int:
        """Return the bytes per element; for fp4, the bytes per pair of elements."""
        return {DType.FP32: 4, DType.FP16: 2, DType.BF16: 2}.get(self, 1)

    @property
    def triton(self) -> str:
        """Return the dtype in Triton source, for the dtypes of a row's scale."""
        return {DType.FP16: "tl.float16", DType.BF16: "tl.bfloat16", DType.FP32: "tl.float32"}[self]

    @property
    def qmax(self) -> float:
        """Return the largest magnitude of a quantised element, to which a row's amax is mapped."""
        return _QMAX[self]

    @property
    def is_quantised(self) -> bool:
        """Return True if only quantising kernels write y in this dtype."""
        return self in _QMAX

    @property
    def is_fp8(self) -> bool:
        """Return True if elements are 8-bit floats, which need a scale."""
        return self.is_quantised and not (self.is_int or self.is_fp4)

    @property
    def is_fp4(self) -> bool:
        """Return True if elements are 4-bit floats."""
        return self is DType.FP4_E2M1FN

    @property
    def packs(self) -> int:
        """Return the number of adjacent elements per stored element."""
        return 2 if self.is_fp4 else 1

    @property
    def is_int(self) -> bool:
        """Return True if quantised values are integers rather than small floats."""
        return self is DType.INT8


_QMAX = {
    DType.INT8: 127.0,
    DType.FP8_E4M3FN: 448.0,
    DType.FP8_E4M3FNUZ: 240.0,
    DType.FP8_E5M2: 57344.0,
    DType.FP4_E2M1FN: 6.0,
}


class FusedAdd(Enum):
    """The fused add: whether a residual is added before or behind the norm, and whether the sum is stored."""

    NONE = "none"
    PRE_ADD_STORE = "pre_add_store"
    PRE_ADD = "pre_add"
    POST_ADD = "post_add"
    POST_ADD_NORM = "post_add_norm"

    @property
    def code(self) -> int:
        """Return ck_tile's integer for this word, or a further integer for words that ck_tile lacks."""
        return tuple(FusedAdd).index(self)

    @property
    def adds(self) -> bool:
        """Return True if kernels read a residual."""
        return self is not FusedAdd.NONE

    @property
    def is_before(self) -> bool:
        """Return True if the residual is added to rows that are then normalised."""
        return self.adds and not self.is_after

    @property
    def is_after(self) -> bool:
        """Return True if the residual is added to the normalised rows, and the sum is y."""
        return self is FusedAdd.POST_ADD

    @property
    def stores(self) -> bool:
        """Return True if kernels store the sum."""
        return self in (FusedAdd.PRE_ADD_STORE, FusedAdd.POST_ADD_NORM)

    @property
    def renorms(self) -> bool:
        """Return True if the residual is added to normalised rows, and the sum is normalised again."""
        return self is FusedAdd.POST_ADD_NORM


class Reduce(Enum):
    """The exchange of rows between the ranks of a group, in front of the norm.

    - ONE_SHOT and TWO_SHOT add x up over all ranks. In one step, each rank gets all ranks' rows; in two, each adds up
      a share of the rows, and sends the sums to all.
    - SCATTER adds up over all ranks, and a rank normalises its share of the rows alone.
    - GATHER sends the rows of each rank, sums with the residual, to all.
    """

    NONE = "none"
    ONE_SHOT = "one_shot"
    TWO_SHOT = "two_shot"
    SCATTER = "scatter"
    GATHER = "gather"

    @property
    def exchanges(self) -> bool:
        """Return True if ranks exchange rows."""
        return self is not Reduce.NONE

    @property
    def scatters(self) -> bool:
        """Return True if x has the rows of all ranks, and y those of one."""
        return self is Reduce.SCATTER

    @property
    def gathers(self) -> bool:
        """Return True if x has the rows of one rank, and y those of all."""
        return self is Reduce.GATHER

    @property
    def function(self) -> str:
        """Return the device function that returns the rows to normalise."""
        return f"{self.value}_sum"


class FusedQuant(Enum):
    """The quantisation of a row: by its own amax, with or without a smooth scale, or by a static scale."""

    NONE = "none"
    SMOOTH_DYNAMIC = "smooth_dynamic"
    DYNAMIC = "dynamic"
    STATIC = "static"
    STATIC_COLUMN = "static_column"

    @property
    def code(self) -> int:
        """Return ck_tile's integer for this word, or a further integer for words that ck_tile lacks."""
        return tuple(FusedQuant).index(self)

    @property
    def quantises(self) -> bool:
        """Return True if the output is quantised."""
        return self is not FusedQuant.NONE

    @property
    def smooths(self) -> bool:
        """Return True if kernels read a smooth scale."""
        return self is FusedQuant.SMOOTH_DYNAMIC

    @property
    def measures(self) -> bool:
        """Return True if kernels compute and return scales."""
        return self in (FusedQuant.DYNAMIC, FusedQuant.SMOOTH_DYNAMIC)

    @property
    def takes_scale(self) -> bool:
        """Return True if callers pass one scale for all of y."""
        return self is FusedQuant.STATIC

    @property
    def takes_column_scales(self) -> bool:
        """Return True if callers pass one scale per column."""
        return self is FusedQuant.STATIC_COLUMN

    @property
    def is_static(self) -> bool:
        """Return True if callers pass the scales."""
        return self.takes_scale or self.takes_column_scales


class ScaleGroup(Enum):
    """The number of adjacent elements of a row that share a scale; the last group of a row may be shorter."""

    NONE = "none"
    G16 = "16"
    G32 = "32"
    G64 = "64"
    G128 = "128"

    # Each launch of a quantised call reads it several times.
    @cached_property
    def code(self) -> int:
        """Return the size as a number; 0 for whole rows."""
        return 0 if self is ScaleGroup.NONE else int(self.value)


class ScaleFormat(Enum):
    """The format of groups' scales: floats, powers of two, of which the exponent alone may be stored, or e4m3.

    e4m3 scales are NVFP4's: 8 bits each, under one global fp32 scale.
    """

    FLOAT = "float"
    UE8M0_FLOAT = "ue8m0_float"
    UE8M0 = "ue8m0"
    UE8M0_PACKED = "ue8m0_packed"
    E4M3 = "e4m3"

    @property
    def rounds_up(self) -> bool:
        """Return True if scales are rounded up to powers of two."""
        return self not in (ScaleFormat.FLOAT, ScaleFormat.E4M3)

    @property
    def stores_exponents(self) -> bool:
        """Return True if a scale is stored as an exponent."""
        return self in (ScaleFormat.UE8M0, ScaleFormat.UE8M0_PACKED)

    @property
    def takes_global(self) -> bool:
        """Return True if callers pass a global scale for the groups' scales."""
        return self is ScaleFormat.E4M3

    @property
    def stores_bytes(self) -> bool:
        """Return True if a scale takes one byte."""
        return self.stores_exponents or self.takes_global

    @property
    def packs(self) -> int:
        """Return the number of adjacent scales per stored element."""
        return 4 if self is ScaleFormat.UE8M0_PACKED else 1


class ScaleLayout(Enum):
    """The layout of scales: rows contiguous, columns contiguous and padded to 16 bytes, or tiles of both.

    Tiles are of 128 rows by 4 groups, as block-scaled matrix multiplications of cuBLAS read them:
    https://docs.nvidia.com /cuda/cublas/index.html#d-block-scaling-factors-layout.
    """

    ROW_MAJOR = "row_major"
    COLUMN_MAJOR = "column_major"
    SWIZZLED_128X4 = "swizzled_128x4"

    @property
    def swizzles(self) -> bool:
        """Return True if scales are stored in tiles."""
        return self is ScaleLayout.SWIZZLED_128X4

    @property
    def of_kernels(self) -> ScaleLayout:
        """Return the layout that kernels are generated for: strides let one kernel serve row_major and column_major."""
        return self if self.swizzles else ScaleLayout.ROW_MAJOR


class Columnwise(Enum):
    """The second output that is quantised along columns, for the gradient of a weight: none, as y or transposed."""

    NONE = "none"
    UNTRANSPOSED = "untransposed"
    TRANSPOSED = "transposed"

    @property
    def code(self) -> int:
        """Return an integer for this word."""
        return tuple(Columnwise).index(self)

    @property
    def writes(self) -> bool:
        """Return True if there is such an output."""
        return self is not Columnwise.NONE

    @property
    def transposes(self) -> bool:
        """Return True if the output has a row for each column of y."""
        return self is Columnwise.TRANSPOSED


class DyFormat(Enum):
    """The format of the gradient that arrives: any float, or fp8 with a scale per row or per group of a row."""

    FLOAT = "float"
    E4M3FN = "fp8_e4m3fn"
    E4M3FN_G32 = "fp8_e4m3fn_g32"
    E4M3FN_G128 = "fp8_e4m3fn_g128"
    E5M2 = "fp8_e5m2"
    E5M2_G32 = "fp8_e5m2_g32"
    E5M2_G128 = "fp8_e5m2_g128"

    @classmethod
    def of(cls, dtype: DType, scales: Sequence[int], rows: Sequence[int]) -> DyFormat:
        """Return the format of rows of a shape whose scales have another; no two sizes of groups make one number."""
        if not dtype.is_fp8:
            return cls.FLOAT
        columns = scales[-1] if len(scales) == len(rows) else 1
        sizes = [f"_g{size}" for size in DY_GROUPS if 1 < columns == -(-rows[-1] // size)]
        # TorchDynamo of torch 2.11 makes no member of a word.
        return _DY_FORMATS["".join((dtype.value, *sizes))]

    @property
    def is_fp8(self) -> bool:
        """Return True if there are scales."""
        return self is not DyFormat.FLOAT

    @property
    def dtype(self) -> DType:
        """Return the dtype of dy; fp32 for any float."""
        return DType(self.value.partition("_g")[0]) if self.is_fp8 else DType.FP32

    @property
    def decoder(self) -> str:
        """Return the device function that converts dy to fp32."""
        return f"from_{self.dtype.value}"

    @property
    def group(self) -> str:
        """Return the number of adjacent elements that share a scale, as kernels write it; N for a whole row."""
        return self.value.partition("_g")[2] or "N"

    def columns(self, n: int) -> int:
        """Return the number of scales that a row of n elements has."""
        return -(-n // int(self.value.partition("_g")[2] or n))


# The sizes of groups that `DyFormat` has.
DY_GROUPS = (32, 128)
_DY_FORMATS = {each.value: each for each in DyFormat}


class Rounding(Enum):
    """The rounding of int8 values: to nearest even, or toward zero as in ck_tile."""

    NEAREST = "nearest"
    TRUNCATE = "truncate"

    @property
    def truncates(self) -> bool:
        """Return True if values are rounded toward zero."""
        return self is Rounding.TRUNCATE


class Cast(Enum):
    """The cast of the normalised row: rounded once, after weight and bias, or to 16 bits before the weight as well."""

    AFTER_WEIGHT = "after_weight"
    BEFORE_WEIGHT = "before_weight"

    @property
    def comes_first(self) -> bool:
        """Return True if rows are rounded before they are multiplied by the weight."""
        return self is Cast.BEFORE_WEIGHT

    def of(self, *dtypes: DType) -> Cast:
        """Return the effective cast for the dtypes of y (or dy) and x, one of which must have 16 bits.

        Without a 16-bit dtype, rounding first would round to the fp32 that rows have already.
        """
        return self if any(dtype.itemsize == 2 for dtype in dtypes) else Cast.AFTER_WEIGHT


# How the words of norms end whose rows are all heads of a token.
ACROSS_HEADS = "_across_heads"


class HeadNorm(Enum):
    """A normalisation of queries and keys, of each head by itself or of all heads of a token together."""

    RMS = "rms"
    LAYER = "layer"
    L2 = "l2"
    RMS_ACROSS_HEADS = "rms_across_heads"
    LAYER_ACROSS_HEADS = "layer_across_heads"
    L2_ACROSS_HEADS = "l2_across_heads"

    @property
    def norm(self) -> Norm:
        """Return the norm of a row."""
        return Norm(self.value.removesuffix(ACROSS_HEADS))

    @property
    def is_across(self) -> bool:
        """Return True if a row is all heads of a token."""
        return self.value.endswith(ACROSS_HEADS)


class Gating(Enum):
    """The gating of rows by an activated gate of their own shape: none, after the norm, or before it."""

    NONE = "none"
    AFTER_NORM = "after_norm"
    BEFORE_NORM = "before_norm"

    @property
    def gates(self) -> bool:
        """Return True if there is a gate."""
        return self is not Gating.NONE

    @property
    def is_after(self) -> bool:
        """Return True if the gate is applied after weight and bias."""
        return self is Gating.AFTER_NORM

    @property
    def is_before(self) -> bool:
        """Return True if the gate is applied before the norm."""
        return self is Gating.BEFORE_NORM


class GateActivation(Enum):
    """The activation of a gate before rows are multiplied by it; the value is also the device function's name."""

    SILU = "silu"
    SIGMOID = "sigmoid"

    @property
    def slope(self) -> str:
        """Return the device function of the activation's derivative."""
        return f"{self.value}_slope"


class Pipeline(Enum):
    """A way in which a kernel walks a row; the value is also the kernel's suffix and its template's name."""

    ROWS = "rows"
    ONE_PASS = "one_pass"
    TWO_PASS = "two_pass"
    SPREAD = "spread"

    @property
    def summary(self) -> str:
        """Return a description of this pipeline for headers and listings."""
        return {
            Pipeline.ROWS: "several rows a program",
            Pipeline.ONE_PASS: "one row a program, held in registers",
            Pipeline.TWO_PASS: "one row a program, read again to write it",
            Pipeline.SPREAD: "a row over several programs that exchange its statistics",
        }[self]

    @property
    def takes_rows_alike(self) -> bool:
        """Return True if all rows run the same code, so that a row's bits depend neither on M nor on the row's index.

        Programs of the spread pipeline compute the statistics of their first row with other code than the next rows'.
        """
        return self is not Pipeline.SPREAD

    def runs_on(self, arch: str) -> bool:
        """Return True if this pipeline's kernels can be compiled for an architecture: sm_90 or gfx942, for example.

        Programs that share a row wait for one another in PTX (`gather` in templates/primitives.py.j2), which is
        NVIDIA's; in the interpreter the first program would wait for ever.
        """
        return self is not Pipeline.SPREAD or arch.startswith("sm_")


# The first word of the name of every kernel that calls others.
SEVERAL = "several"


class Part(Enum):
    """A kernel that a pipeline needs besides the kernel with its name."""

    ROW_TERMS = "row_terms"
    WINDOW = "window"
    UNALIGNED = "unaligned"
    COLUMN_AMAX = "column_amax"
    COLUMNS = "columns"
    BOTH_WAYS = "both_ways"
    # GroupNorm's, forward and backward.
    MOMENTS = "moments"
    TERMS = "terms"
    MERGE = "merge"

    @property
    def is_of_groups(self) -> bool:
        """Return True if the kernel is GroupNorm's, of which the committed table holds nothing."""
        return self in (Part.MOMENTS, Part.TERMS, Part.MERGE)


INPUT_DTYPES = (DType.FP16, DType.BF16, DType.FP32)
# Further dtypes of x in forward kernels, together with an x_scale. e4m3fnuz is an output only: it is not an OCP format.
FP8_INPUT_DTYPES = (DType.FP8_E4M3FN, DType.FP8_E5M2)
QUANTISED_DTYPES = (DType.INT8, DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ, DType.FP8_E5M2)
# The dtypes that engines scale by groups, statically or with a second output; only ROCm's older GPUs have e4m3fnuz.
SERVED_DTYPES = (DType.INT8, DType.FP8_E4M3FN, DType.FP8_E5M2, DType.FP4_E2M1FN)
