"""What the axes of a mode may be: an enum each, whose values are the manifest's words and stand in names.

Beside them how kernels walk a row (`Pipeline`, `Part`), which no manifest says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class NormRow:
    """Everything that one norm has of its own; signatures, docstrings, kernels, checks and tests read these rows.

    Attributes:
        prefix: the start of the names of modules and kernels.
        title: the norm's name in prose.
        stem: the start of the names of the 2-d functions.
        function: the name of the differentiable function, in which the names of fused forms end.
        centres: True if the mean of a row is subtracted (and may be saved).
        averages: True if the sums of squares along a row, and of g * h backward, are divided by the row's length.
        eps: the default of eps, as a signature writes it.
        added_to: what eps is added to, in prose.
        torch_eps: the value that eps=None stands for, as an expression; "" if None is refused.
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
    eps: str
    added_to: str
    torch_eps: str
    formula: str
    lacks: tuple[str, ...]
    template: str


class Norm(Enum):
    """A normalisation; the value is the manifest's word."""

    LAYER = "layer"
    RMS = "rms"
    L2 = "l2"

    @property
    def row(self) -> NormRow:
        """Everything that this norm has of its own."""
        return _NORMS[self]

    @property
    def prefix(self) -> str:
        """The start of the names of modules and kernels."""
        return _NORMS[self].prefix

    @property
    def centres(self) -> bool:
        """True if the mean of a row is subtracted (and may be saved)."""
        return _NORMS[self].centres


_NORMS = {
    Norm.LAYER: NormRow(
        prefix="ln",
        title="LayerNorm",
        stem="layernorm",
        function="layer_norm",
        centres=True,
        averages=True,
        eps="1e-5",
        added_to="variance",
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
        eps="1e-6",
        added_to="mean square",
        # torch computes 16-bit inputs in fp32, as the kernels do.
        torch_eps="torch.finfo(torch.float32).eps",
        formula=(
            "With s = x + x_bias + residual in fp32: y = s / sqrt(mean(s**2) + eps) * (weight + weight_offset) (Zhang "
            "and Sennrich, 2019; Gemma stores weight - 1 and passes weight_offset=1)."
        ),
        lacks=(),
        template="rms.j2",
    ),
    # Applied to queries and keys, where nothing stands beside the norm but quantisation.
    Norm.L2: NormRow(
        prefix="l2",
        title="L2 norm",
        stem="l2norm",
        function="l2_norm",
        centres=False,
        averages=False,
        eps="1e-6",
        added_to="sum of squares",
        torch_eps="",
        formula="In fp32: y = x / sqrt(sum(x**2) + eps) * (weight + weight_offset).",
        lacks=("fadd.adds", "x_bias", "dropout", "cast.comes_first", "modulated", "gating.gates", "serves"),
        template="rms.j2",
    ),
}


class Direction(Enum):
    """Whether a kernel computes outputs or gradients; the value is the manifest's word and stands in names."""

    FORWARD = "fwd"
    BACKWARD = "bwd"

    @property
    def title(self) -> str:
        """The direction in prose."""
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
        """Bytes an element, or as many as share a byte."""
        return {DType.FP32: 4, DType.FP16: 2, DType.BF16: 2}.get(self, 1)

    @property
    def triton(self) -> str:
        """The type in Triton source, for the types a row's scale is stored in."""
        return {DType.FP16: "tl.float16", DType.BF16: "tl.bfloat16", DType.FP32: "tl.float32"}[self]

    @property
    def qmax(self) -> float:
        """The largest magnitude a quantised element takes: a row's amax maps to it."""
        return _QMAX[self]

    @property
    def is_quantised(self) -> bool:
        """Whether y has this type from a quantising kernel alone."""
        return self in _QMAX

    @property
    def is_fp8(self) -> bool:
        """Whether elements are floats of 8 bits, which say little without a scale."""
        return self.is_quantised and not (self.is_int or self.is_fp4)

    @property
    def is_fp4(self) -> bool:
        """Whether elements are floats of 4 bits."""
        return self is DType.FP4_E2M1FN

    @property
    def packs(self) -> int:
        """How many neighbouring elements make one of what is stored."""
        return 2 if self.is_fp4 else 1

    @property
    def is_int(self) -> bool:
        """Whether quantised values are integers rather than small floats."""
        return self is DType.INT8


_QMAX = {
    DType.INT8: 127.0,
    DType.FP8_E4M3FN: 448.0,
    DType.FP8_E4M3FNUZ: 240.0,
    DType.FP8_E5M2: 57344.0,
    DType.FP4_E2M1FN: 6.0,
}


class FusedAdd(Enum):
    """Whether a residual is added before the norm, and whether the sum is stored."""

    NONE = "none"
    PRE_ADD_STORE = "pre_add_store"
    PRE_ADD = "pre_add"

    @property
    def code(self) -> int:
        """ck_tile's integer for this mode."""
        return {FusedAdd.NONE: 0, FusedAdd.PRE_ADD_STORE: 1, FusedAdd.PRE_ADD: 2}[self]

    @property
    def adds(self) -> bool:
        """Whether a residual is read."""
        return self is not FusedAdd.NONE

    @property
    def stores(self) -> bool:
        """Whether the sum is written back."""
        return self is FusedAdd.PRE_ADD_STORE


class FusedQuant(Enum):
    """Whether a row is quantised: by its own amax, behind a smooth scale or not, or by a scale that is given."""

    NONE = "none"
    SMOOTH_DYNAMIC = "smooth_dynamic"
    DYNAMIC = "dynamic"
    STATIC = "static"
    STATIC_COLUMN = "static_column"

    @property
    def code(self) -> int:
        """ck_tile's integer for this mode, and two more for what it lacks."""
        return tuple(FusedQuant).index(self)

    @property
    def quantises(self) -> bool:
        """Whether the output is quantised."""
        return self is not FusedQuant.NONE

    @property
    def smooths(self) -> bool:
        """Whether a smooth scale is read."""
        return self is FusedQuant.SMOOTH_DYNAMIC

    @property
    def measures(self) -> bool:
        """Whether scales are computed, and returned."""
        return self in (FusedQuant.DYNAMIC, FusedQuant.SMOOTH_DYNAMIC)

    @property
    def takes_scale(self) -> bool:
        """Whether one scale is given for all that is written."""
        return self is FusedQuant.STATIC

    @property
    def takes_column_scales(self) -> bool:
        """Whether a scale is given for each column."""
        return self is FusedQuant.STATIC_COLUMN

    @property
    def is_static(self) -> bool:
        """Whether scales are given."""
        return self.takes_scale or self.takes_column_scales


class ScaleGroup(Enum):
    """How many neighbours of a row share a scale: all of them, or so many, the last group being what is left."""

    NONE = "none"
    G16 = "16"
    G32 = "32"
    G64 = "64"
    G128 = "128"

    @property
    def code(self) -> int:
        """The size as a number; 0 for whole rows."""
        return 0 if self is ScaleGroup.NONE else int(self.value)


class ScaleFormat(Enum):
    """What scales of groups are stored as: floats, powers of two, of which the exponent alone may be stored, or e4m3.

    Those are NVFP4's: of 8 bits, under one fp32 scale for all.
    """

    FLOAT = "float"
    UE8M0_FLOAT = "ue8m0_float"
    UE8M0 = "ue8m0"
    UE8M0_PACKED = "ue8m0_packed"
    E4M3 = "e4m3"

    @property
    def rounds_up(self) -> bool:
        """Whether scales are rounded up to powers of two."""
        return self not in (ScaleFormat.FLOAT, ScaleFormat.E4M3)

    @property
    def stores_exponents(self) -> bool:
        """Whether a scale is stored as an exponent."""
        return self in (ScaleFormat.UE8M0, ScaleFormat.UE8M0_PACKED)

    @property
    def takes_global(self) -> bool:
        """Whether scales stand under one that is given."""
        return self is ScaleFormat.E4M3

    @property
    def stores_bytes(self) -> bool:
        """Whether a scale is a byte."""
        return self.stores_exponents or self.takes_global

    @property
    def packs(self) -> int:
        """How many neighbouring scales make one element of what is stored."""
        return 4 if self is ScaleFormat.UE8M0_PACKED else 1


class ScaleLayout(Enum):
    """Whether scales of a row's groups lie side by side, those of a group's rows, padded to 16 bytes, or tiles of both.

    Tiles are of 128 rows by 4 groups, as block-scaled matrix multiplications of cuBLAS read them: https://docs.nvidia.com
    /cuda/cublas/index.html#d-block-scaling-factors-layout.
    """

    ROW_MAJOR = "row_major"
    COLUMN_MAJOR = "column_major"
    SWIZZLED_128X4 = "swizzled_128x4"

    @property
    def swizzles(self) -> bool:
        """Whether scales lie in tiles."""
        return self is ScaleLayout.SWIZZLED_128X4

    @property
    def of_kernels(self) -> ScaleLayout:
        """What kernels are made for: where the order is a matter of strides, one writes either."""
        return self if self.swizzles else ScaleLayout.ROW_MAJOR


class Rounding(Enum):
    """How int8 values are rounded: to nearest even, or toward zero as ck_tile does."""

    NEAREST = "nearest"
    TRUNCATE = "truncate"

    @property
    def truncates(self) -> bool:
        """Whether values are rounded toward zero."""
        return self is Rounding.TRUNCATE


class Cast(Enum):
    """Whether the normalised row is rounded once, after weight and bias, or to 16 bits before the weight as well."""

    AFTER_WEIGHT = "after_weight"
    BEFORE_WEIGHT = "before_weight"

    @property
    def comes_first(self) -> bool:
        """Whether rows are rounded before they are multiplied by the weight."""
        return self is Cast.BEFORE_WEIGHT

    def of(self, *dtypes: DType) -> Cast:
        """What this comes to where y (or dy) and x are of these types: one of 16 bits has to be among them.

        Where there is none, rows would be rounded to the fp32 that they are in.
        """
        return self if any(dtype.itemsize == 2 for dtype in dtypes) else Cast.AFTER_WEIGHT


class Gating(Enum):
    """Whether rows are multiplied by an activated gate of their own shape, and on which side of the norm."""

    NONE = "none"
    AFTER_NORM = "after_norm"
    BEFORE_NORM = "before_norm"

    @property
    def gates(self) -> bool:
        """Whether there is a gate."""
        return self is not Gating.NONE

    @property
    def is_after(self) -> bool:
        """Whether the gate comes behind weight and bias."""
        return self is Gating.AFTER_NORM

    @property
    def is_before(self) -> bool:
        """Whether what is normalised was gated."""
        return self is Gating.BEFORE_NORM


class GateActivation(Enum):
    """What becomes of a gate before rows are multiplied by it; the value is the device function's name too."""

    SILU = "silu"
    SIGMOID = "sigmoid"

    @property
    def slope(self) -> str:
        """The device function of its derivative."""
        return f"{self.value}_slope"


class Pipeline(Enum):
    """How a kernel walks a row; the value is also the kernel's suffix and its template's name."""

    ROWS = "rows"
    ONE_PASS = "one_pass"
    TWO_PASS = "two_pass"
    SPREAD = "spread"

    @property
    def summary(self) -> str:
        """What sets this pipeline apart, for headers and listings."""
        return {
            Pipeline.ROWS: "several rows a program",
            Pipeline.ONE_PASS: "one row a program, held in registers",
            Pipeline.TWO_PASS: "one row a program, read again to write it",
            Pipeline.SPREAD: "a row over several programs that exchange its statistics",
        }[self]

    @property
    def takes_rows_alike(self) -> bool:
        """Whether all rows go through the same code, so that the bits of none depend on M or on where it stands.

        A team that shares rows has the statistics of its first one from other code than those of the next.
        """
        return self is not Pipeline.SPREAD

    def runs_on(self, arch: str) -> bool:
        """Whether kernels that walk rows so can be compiled for an architecture: sm_90 or gfx942, say.

        Programs that share a row wait for one another in PTX (`gather` in templates/primitives.py.j2), which is
        NVIDIA's; in the interpreter the first would wait for ever.
        """
        return self is not Pipeline.SPREAD or arch.startswith("sm_")


class Part(Enum):
    """Kernels that a pipeline needs beside the one that carries its name."""

    ROW_TERMS = "row_terms"
    WINDOW = "window"
    # Of GroupNorm, forward and backward.
    MOMENTS = "moments"
    TERMS = "terms"

    @property
    def is_of_groups(self) -> bool:
        """Whether it is GroupNorm's, of which the committed table holds nothing."""
        return self in (Part.MOMENTS, Part.TERMS)


INPUT_DTYPES = (DType.FP16, DType.BF16, DType.FP32)
# What x may be besides in forward kernels, times an x_scale. e4m3fnuz comes out of kernels alone: no format of OCP.
FP8_INPUT_DTYPES = (DType.FP8_E4M3FN, DType.FP8_E5M2)
QUANTISED_DTYPES = (DType.INT8, DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ, DType.FP8_E5M2)
# What engines scale by groups, by given scales or with a second output; e4m3fnuz is of ROCm's older GPUs alone.
SERVED_DTYPES = (DType.INT8, DType.FP8_E4M3FN, DType.FP8_E5M2, DType.FP4_E2M1FN)
