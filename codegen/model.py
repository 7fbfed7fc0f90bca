"""Decide what a kernel computes: the axes, their legal combinations, and every name made from them.

A `Mode` is one combination of axes without the row length; all its kernels live in one generated module.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NoReturn

from .errors import IllegalCombinationError
from .lazy import cached_property
from .stages import Stage
from .values import (
    FP8_INPUT_DTYPES,
    INPUT_DTYPES,
    QUANTISED_DTYPES,
    SERVED_DTYPES,
    Cast,
    Columnwise,
    Direction,
    DType,
    DyFormat,
    FusedAdd,
    FusedQuant,
    GateActivation,
    Gating,
    Norm,
    Part,
    Pipeline,
    Reduce,
    Rounding,
    ScaleFormat,
    ScaleGroup,
    ScaleLayout,
)

# The suffixes of a mode's name after its dtypes, in this order; each field's first value has no suffix.
_SUFFIXES: dict[str, dict[Any, str]] = {
    "reduce": {
        Reduce.NONE: "",
        Reduce.ONE_SHOT: "_ar1",
        Reduce.TWO_SHOT: "_ar2",
        Reduce.SCATTER: "_rs",
        Reduce.GATHER: "_ag",
    },
    "x_bias": {False: "", True: "_xb"},
    "x_gate": {False: "", True: "_xg"},
    "dropout": {False: "", True: "_drop"},
    "fadd": {
        FusedAdd.NONE: "",
        FusedAdd.PRE_ADD_STORE: "_addst",
        FusedAdd.PRE_ADD: "_add",
        FusedAdd.POST_ADD: "_postadd",
        FusedAdd.POST_ADD_NORM: "_postaddnorm",
    },
    "cast": {Cast.AFTER_WEIGHT: "", Cast.BEFORE_WEIGHT: "_cbw"},
    "modulated": {False: "", True: "_mod"},
    "gating": {Gating.NONE: "", Gating.AFTER_NORM: "_ga", Gating.BEFORE_NORM: "_gb"},
    "gate_activation": {GateActivation.SILU: "", GateActivation.SIGMOID: "_sig"},
    "grouped": {False: "", True: "_grp"},
    "fquant": {
        FusedQuant.NONE: "",
        FusedQuant.SMOOTH_DYNAMIC: "_sdq",
        FusedQuant.DYNAMIC: "_dq",
        FusedQuant.STATIC: "_sq",
        FusedQuant.STATIC_COLUMN: "_scq",
    },
    "group_size": {size: f"_g{size.value}" if size.code else "" for size in ScaleGroup},
    "scale_format": {
        ScaleFormat.FLOAT: "",
        ScaleFormat.UE8M0_FLOAT: "_ue8m0f",
        ScaleFormat.UE8M0: "_ue8m0",
        ScaleFormat.UE8M0_PACKED: "_ue8m0p",
        ScaleFormat.E4M3: "_e4m3",
    },
    "scale_layout": {ScaleLayout.ROW_MAJOR: "", ScaleLayout.SWIZZLED_128X4: "_swz"},
    "scale_ub": {False: "", True: "_ub"},
    "quantise_rounded": {False: "", True: "_qr"},
    "save_unquant": {False: "", True: "_uq"},
    "columnwise": {Columnwise.NONE: "", Columnwise.UNTRANSPOSED: "_cw", Columnwise.TRANSPOSED: "_cwt"},
    "save_amax": {False: "", True: "_amax"},
    "rounding": {Rounding.NEAREST: "", Rounding.TRUNCATE: "_trunc"},
    "scale_dtype": {DType.FP32: "", DType.FP16: "_sfp16", DType.BF16: "_sbf16"},
    "save_mv": {False: "", True: "_mv"},
    "statistics_only": {False: "", True: "_only"},
    "dy_format": {dy: f"_dy_{dy.value}" if dy.is_fp8 else "" for dy in DyFormat},
}
# For each field, the value without a suffix, and the suffixes.
_NAMED = tuple((name, next(iter(suffixes)), suffixes) for name, suffixes in _SUFFIXES.items())


_FLOATS = ", ".join(dtype.value for dtype in INPUT_DTYPES)
_QUANTISED = ", ".join(dtype.value for dtype in QUANTISED_DTYPES)

# The formats whose scales block-scaled matrix products read in tiles: MXFP8 and NVFP4.
_SWIZZLED = ((ScaleGroup.G32, ScaleFormat.UE8M0), (ScaleGroup.G16, ScaleFormat.E4M3))

# Stages after which a chunk still takes one register per value.
_LIGHT = frozenset({Stage.X, Stage.RESIDUAL, Stage.STORED, Stage.CAST, Stage.WEIGHT})

# Stages that end in a multiplication, which compilers fuse with a following addition.
_PRODUCTS = frozenset({Stage.X_SCALE, Stage.X_GATE, Stage.GATE_BEFORE})


@cache
def _names() -> re.Pattern[str]:
    """Return the pattern of all mode names, with one group per field: the inverse of `Mode.name`."""
    words = {
        "norm": [norm.prefix for norm in Norm],
        "direction": [f"_{direction.value}" for direction in Direction],
        "dtype_in": [f"_{dtype.value}" for dtype in DType],
        "dtype_out": ["", *(f"_{dtype.value}" for dtype in DType)],
        **{name: list(suffixes.values()) for name, suffixes in _SUFFIXES.items()},
    }
    return re.compile("".join(f"(?P<{name}>{'|'.join(some)})" for name, some in words.items()))


@dataclass(frozen=True)
class Mode:
    """One legal combination of every axis but the row length.

    Raises:
        IllegalCombinationError: the axes contradict one another; the message names the rule.
    """

    norm: Norm
    dtype_in: DType
    dtype_out: DType
    fadd: FusedAdd = FusedAdd.NONE
    fquant: FusedQuant = FusedQuant.NONE
    save_mv: bool = False
    x_bias: bool = False
    scale_dtype: DType = DType.FP32
    rounding: Rounding = Rounding.NEAREST
    direction: Direction = Direction.FORWARD
    cast: Cast = Cast.AFTER_WEIGHT
    modulated: bool = False
    x_gate: bool = False
    gating: Gating = Gating.NONE
    gate_activation: GateActivation = GateActivation.SILU
    grouped: bool = False
    dropout: bool = False
    group_size: ScaleGroup = ScaleGroup.NONE
    scale_format: ScaleFormat = ScaleFormat.FLOAT
    scale_layout: ScaleLayout = ScaleLayout.ROW_MAJOR
    scale_ub: bool = False
    quantise_rounded: bool = False
    save_unquant: bool = False
    columnwise: Columnwise = Columnwise.NONE
    save_amax: bool = False
    statistics_only: bool = False
    reduce: Reduce = Reduce.NONE
    dy_format: DyFormat = DyFormat.FLOAT

    def __post_init__(self) -> None:
        if self.dtype_in not in INPUT_DTYPES:
            self._check_small_input()
        if self.scale_dtype not in INPUT_DTYPES:
            raise IllegalCombinationError(
                f"scale_dtype {self.scale_dtype.value} cannot hold a row's scale; use one of {_FLOATS}"
            )
        if self.fquant.quantises and not self.dtype_out.is_quantised:
            raise IllegalCombinationError(
                f"fquant {self.fquant.value} writes quantised values, and dtype_out {self.dtype_out.value} "
                f"is not a quantised type; use one of {_QUANTISED}, or fquant none"
            )
        if not self.fquant.quantises and self.dtype_out.is_quantised:
            raise IllegalCombinationError(
                f"dtype_out {self.dtype_out.value} needs a scale for each row, and fquant none computes none; "
                f"use fquant dynamic or smooth_dynamic, or one of {_FLOATS}"
            )
        if not self.fquant.quantises and self.scale_dtype is not DType.FP32:
            raise IllegalCombinationError(
                f"scale_dtype {self.scale_dtype.value} is the type of y_scale, and fquant none writes none; "
                "leave scale_dtype out, or use fquant dynamic or smooth_dynamic"
            )
        if self.rounding is Rounding.TRUNCATE and not self.dtype_out.is_int:
            raise IllegalCombinationError(
                f"rounding truncate is for int8, and dtype_out is {self.dtype_out.value}; "
                "leave rounding out, or use dtype_out int8"
            )
        if self.is_backward:
            self._check_backward()
        elif self.cast.comes_first and 2 not in (self.dtype_out.itemsize, self.dtype_in.itemsize):
            raise IllegalCombinationError(
                f"cast {self.cast.value} rounds to 16 bits first, and neither dtype_in {self.dtype_in.value} nor "
                f"dtype_out {self.dtype_out.value} has 16 bits; leave cast out, or use fp16 or bf16 for one of them"
            )
        if self.modulated or self.x_gate:
            self._check_modulated()
        if self.gating.gates or self.gate_activation is not GateActivation.SILU or self.grouped:
            self._check_gated()
        if self.fadd.renorms:
            self._check_renormed()
        if self.statistics_only:
            self._check_statistics()
        if self.reduce.exchanges:
            self._check_reduced()
        if self.dy_format.is_fp8:
            self._check_dy()
        if self.fadd.is_after and self.fquant.quantises and not self.save_unquant:
            raise IllegalCombinationError(
                f"fadd {self.fadd.value} makes y the sum that later blocks add to, and fquant {self.fquant.value} "
                "would quantise that sum; use save_unquant true, which returns the sum too, or fquant none"
            )
        if self.dropout and not (self.fadd.is_before or self.is_backward):
            raise IllegalCombinationError(
                f"dropout drops elements of x before a residual is added, and fadd is {self.fadd.value}; "
                "use fadd pre_add_store or pre_add, or leave dropout out"
            )
        nvfp4 = (self.dtype_out.is_fp4, self.group_size is ScaleGroup.G16, self.scale_format.takes_global)
        if any(nvfp4) and not all(nvfp4):
            raise IllegalCombinationError(
                f"dtype_out {self.dtype_out.value}, group_size {self.group_size.value} and scale_format "
                f"{self.scale_format.value} do not go together; use fp4_e2m1fn, 16 and e4m3, which are NVFP4, or none "
                "of the three"
            )
        if self.scale_layout is not self.scale_layout.of_kernels:
            raise IllegalCombinationError(
                f"scale_layout {self.scale_layout.value} shares the kernels of {self.scale_layout.of_kernels.value}, "
                "which take strides; use the latter here, and pass the layout to the call"
            )
        if self.serves:
            self._check_served()
        for lacked in self.norm.row.lacks:
            if attrgetter(lacked)(self):
                self._refuse(lacked.partition(".")[0])

    def __hash__(self) -> int:
        # A string caches its hash, and no two modes have the same name.
        return hash(self.name)

    def _refuse(self, name: str) -> NoReturn:
        """Refuse a value that a norm lacks, or every word that makes the mode one that `serves`."""
        words = self._served if name == "serves" else [f"{name} {self._word(name)}"]
        left = "it" if len(words) == 1 else "them"
        raise IllegalCombinationError(
            f"norm {self.norm.value} has no {', '.join(words)}; leave {left} out, or use another norm"
        )

    def _check_others(self, refused: str, leave: str, /, **fits: bool) -> None:
        """Refuse values beside which a feature of the mode does not go.

        Args:
            refused: the error's beginning, with a place for the axis and the value.
            leave: what to do in place of another value.
            fits: by axis, whether the mode's value goes with the feature.
        """
        for name, is_fit in fits.items():
            if not is_fit:
                value = f"{name} {self._word(name)}"
                raise IllegalCombinationError(f"{refused.format(value)}; use another {name}, or {leave}")

    def _check_served(self) -> None:
        """Refuse inference engines' forms of quantisation in combination with other features."""
        self._check_others(
            f"{', '.join(self._served)} and {{}} do not go together",
            f"leave {'it' if len(self._served) == 1 else 'them'} out",
            fquant=self.fquant.quantises,
            dtype_in=not self.dtype_in.is_fp8,
            dtype_out=self.dtype_out in SERVED_DTYPES,
            fadd=self.fadd is not FusedAdd.PRE_ADD,
            scale_dtype=self.scale_dtype is DType.FP32,
            rounding=not self.rounding.truncates,
            save_mv=not self.save_mv,
            modulated=not (self.modulated and self.is_backward),
            gating=not self.gating.gates,
            dropout=not self.dropout,
        )
        if self.scale_format.rounds_up and not (self.group_size.code and self.dtype_out.is_fp8):
            raise IllegalCombinationError(
                f"scale_format {self.scale_format.value} is for groups of fp8, and group_size is "
                f"{self.group_size.value}, dtype_out {self.dtype_out.value}; use group_size 32, 64 or 128 with fp8, or "
                "scale_format float"
            )
        if self.scale_layout.swizzles and (self.group_size, self.scale_format) not in _SWIZZLED:
            raise IllegalCombinationError(
                f"scale_layout {self.scale_layout.value} is for the scales of MXFP8 and NVFP4, and group_size is "
                f"{self.group_size.value}, scale_format {self.scale_format.value}; use group_size 32 with scale_format "
                "ue8m0, or 16 with e4m3, or leave scale_layout out"
            )
        if self.fquant.is_static and (self.group_size.code or self.scale_ub):
            raise IllegalCombinationError(
                f"fquant {self.fquant.value} takes its scales from the caller, and group_size and scale_ub are for "
                "computed scales; use fquant dynamic or smooth_dynamic, or leave group_size and scale_ub out"
            )
        if self.scale_ub and (self.scale_format.rounds_up or not self.dtype_out.is_fp8):
            raise IllegalCombinationError(
                f"scale_ub bounds float scales of fp8, and scale_format is {self.scale_format.value}, "
                f"dtype_out {self.dtype_out.value}; use scale_format float with fp8, or leave scale_ub out"
            )
        if self.columnwise.writes or self.save_amax:
            self._check_trained()
        if self.quantise_rounded and self.dtype_in.itemsize != 2:
            raise IllegalCombinationError(
                f"quantise_rounded rounds y to x's 16 bits first, and dtype_in {self.dtype_in.value} has "
                f"{8 * self.dtype_in.itemsize}; use fp16 or bf16, or leave quantise_rounded out"
            )

    def _check_trained(self) -> None:
        """Refuse what y has beyond rows in 8-bit training: scales of callers, and a bias on x."""
        is_dynamic = self.fquant is FusedQuant.DYNAMIC
        bounds = {"scale_ub": not self.scale_ub, "x_bias": not self.x_bias}
        if self.columnwise.writes:
            self._check_others(
                f"columnwise {self.columnwise.value} quantises blocks of 32, 64 or 128 rows"
                f"{'' if self.is_backward else ', or all rows,'} to fp8 by the amax of each, and has no {{}}",
                "leave columnwise out",
                group_size=self.group_size.code > 0 or not self.is_backward,
                dtype_out=self.dtype_out.is_fp8,
                fquant=is_dynamic,
                **bounds,
            )
        if self.save_amax:
            self._check_others(
                "save_amax true saves the amax of y as it is quantised, and has no {}",
                "leave save_amax out",
                fquant=is_dynamic or self.fquant.takes_scale,
                **bounds,
            )

    def _check_gated(self) -> None:
        if not self.gating.gates:
            raise IllegalCombinationError(
                "gate_activation and grouped go with a gate; use gating after_norm or before_norm, or leave them out"
            )
        self._check_others(
            "gated norms have no {}",
            "leave gating out",
            dtype_in=not self.dtype_in.is_fp8,
            fadd=not self.fadd.adds,
            fquant=not self.fquant.smooths,
            scale_dtype=self.scale_dtype is DType.FP32,
            rounding=not self.rounding.truncates,
            cast=not self.cast.comes_first,
            x_bias=not self.x_bias,
            modulated=not self.modulated,
            dropout=not self.dropout,
        )

    def _check_modulated(self) -> None:
        if not self.modulated:
            raise IllegalCombinationError(
                "x_gate is for modulated norms; use modulated true (scale and shift of a call), or leave x_gate out"
            )
        if self.x_gate and not (self.fadd.stores or self.is_backward):
            raise IllegalCombinationError(
                f"x_gate scales x before a residual is added to it, and fadd is {self.fadd.value}; "
                "use fadd pre_add_store, or leave x_gate out"
            )
        self._check_others(
            "modulated norms have no {}",
            "leave modulated out",
            dtype_in=not self.dtype_in.is_fp8,
            fadd=self.fadd.stores or not self.fadd.adds,
            fquant=self.fquant in (FusedQuant.NONE, FusedQuant.DYNAMIC),
            scale_dtype=self.scale_dtype is DType.FP32,
            rounding=not self.rounding.truncates,
            cast=not self.cast.comes_first,
        )
        for name in ("x_bias", "dropout"):
            if getattr(self, name):
                raise IllegalCombinationError(f"modulated norms have no {name}; leave {name} or modulated out")

    def _check_renormed(self) -> None:
        self._check_others(
            f"fadd {self.fadd.value} has no {{}}",
            "another fadd",
            direction=not self.is_backward,
            dtype_in=not self.dtype_in.is_fp8,
            x_bias=not self.x_bias,
            dropout=not self.dropout,
            modulated=not self.modulated,
            scale_dtype=self.scale_dtype is DType.FP32,
            rounding=not self.rounding.truncates,
        )

    def _check_statistics(self) -> None:
        self._check_others(
            "statistics_only saves mean and rstd of x and writes no y, and has no {}",
            "leave statistics_only out",
            direction=not self.is_backward,
            save_mv=self.save_mv,
            dtype_in=not self.dtype_in.is_fp8,
            dtype_out=self.dtype_out is self.dtype_in,
            fadd=not self.fadd.adds,
            x_bias=not self.x_bias,
            cast=not self.cast.comes_first,
            modulated=not self.modulated,
            gating=not self.gating.gates,
        )

    def _check_reduced(self) -> None:
        self._check_others(
            f"reduce {self.reduce.value} adds x up over ranks before the norm, and has no {{}}",
            "leave reduce out",
            direction=not self.is_backward,
            norm=self.norm.averages,
            dtype_in=not self.dtype_in.is_fp8,
            fadd=self.fadd in (FusedAdd.NONE, FusedAdd.PRE_ADD_STORE),
            x_bias=not self.x_bias,
            modulated=not self.modulated,
            gating=not self.gating.gates,
            dropout=not self.dropout,
            save_mv=not self.save_mv,
            columnwise=not self.columnwise.writes,
            save_amax=not self.save_amax,
        )

    def _check_dy(self) -> None:
        self._check_others(
            f"dy_format {self.dy_format.value} has scales of its own, and no {{}} beside dtype_in "
            f"{self.dtype_in.value}",
            "dy_format float",
            direction=self.is_backward,
            cast=self.dtype_in.itemsize == 2 or not self.cast.comes_first,
            modulated=not self.modulated,
            gating=not self.gating.gates,
            dropout=not self.dropout,
        )

    def _word(self, name: str) -> str:
        """Return the manifest's word for the mode's value on an axis."""
        value = getattr(self, name)
        return str(value).lower() if isinstance(value, bool) else str(value.value)

    def _check_small_input(self) -> None:
        if self.dtype_in not in FP8_INPUT_DTYPES:
            small = ", ".join(d.value for d in FP8_INPUT_DTYPES)
            raise IllegalCombinationError(
                f"dtype_in {self.dtype_in.value} cannot be normalised; use one of {_FLOATS}, or forward {small}"
            )
        if self.is_backward:
            raise IllegalCombinationError(
                f"dtype_in {self.dtype_in.value} has no gradient; use one of {_FLOATS} with direction bwd"
            )

    def _check_backward(self) -> None:
        if self.fquant.quantises and not self.columnwise.writes:
            raise IllegalCombinationError(
                f"fquant {self.fquant.value} has no gradient, and with direction bwd quantises dx along rows and "
                "columns; use fquant none, or columnwise untransposed or transposed"
            )
        for name in ("quantise_rounded", "save_unquant", "save_amax"):
            if self.columnwise.writes and getattr(self, name):
                raise IllegalCombinationError(
                    f"{name} is for a quantised y, and direction bwd quantises dx; leave {name} out"
                )
        if self.dtype_out is not self.dtype_in and not self.columnwise.writes:
            raise IllegalCombinationError(
                f"with direction bwd, gradients take their types from the call, and dtype_out {self.dtype_out.value} "
                "says nothing; leave dtype_out out"
            )
        if self.save_mv:
            raise IllegalCombinationError("direction bwd reads mean and rstd and saves none; leave save_mv out")
        if self.fadd.adds and not self.fadd.stores:
            raise IllegalCombinationError(
                f"with direction bwd, fadd says whether a gradient arrives for residual_out, which {self.fadd.value} "
                "does not store; use fadd none or pre_add_store"
            )

    @property
    def is_backward(self) -> bool:
        """Return True if kernels compute gradients."""
        return self.direction is Direction.BACKWARD

    @property
    def serves(self) -> bool:
        """Return True if quantisation goes beyond one dynamic scale per row: a form that inference engines ask for."""
        floats = self.group_size is ScaleGroup.NONE and self.scale_format is ScaleFormat.FLOAT
        plain = floats and not self.scale_layout.swizzles
        further = self.quantise_rounded or self.save_unquant or self.columnwise.writes or self.save_amax
        return self.fquant.is_static or not plain or self.scale_ub or further

    @property
    def has_float_groups(self) -> bool:
        """Return True if groups of a row have float scales, powers of two included."""
        return bool(self.group_size.code) and not self.scale_format.stores_bytes

    @property
    def has_scale_strides(self) -> bool:
        """Return True if kernels take the strides of groups' scales."""
        return bool(self.group_size.code) and not self.scale_layout.swizzles

    @property
    def scales_locally(self) -> bool:
        """Return True if an element's scale depends on less than its row: on its group, or on a static scale."""
        return self.fquant.is_static or bool(self.group_size.code)

    @property
    def column_parts(self) -> tuple[Part, ...]:
        """Return the kernels that quantise along columns, in order: the scales of whole columns take another one."""
        if not self.columnwise.writes:
            return ()
        parts = (Part.BOTH_WAYS,) if self.is_backward else (Part.COLUMN_AMAX, Part.COLUMNS)
        return parts[-1:] if self.group_size.code else parts

    @property
    def _served(self) -> list[str]:
        """Return the manifest's words that make the mode one that `serves`."""
        special = {
            f"fquant {self.fquant.value}": self.fquant.is_static,
            f"group_size {self.group_size.value}": bool(self.group_size.code),
            f"scale_format {self.scale_format.value}": self.scale_format.rounds_up,
            f"scale_layout {self.scale_layout.value}": self.scale_layout.swizzles,
            "scale_ub": self.scale_ub,
            "quantise_rounded": self.quantise_rounded,
            "save_unquant": self.save_unquant,
            f"columnwise {self.columnwise.value}": self.columnwise.writes,
            "save_amax": self.save_amax,
        }
        return [word for word, there in special.items() if there]

    @property
    def streams(self) -> bool:
        """Return True if a forward kernel moves only x and y, apart from vectors, and normalises x itself."""
        further = self.fadd.adds or self.fquant.quantises or self.x_bias or self.modulated or self.gating.gates
        return not (self.is_backward or further or self.dtype_in.is_fp8 or self.reduce.exchanges)

    @property
    def loads_operands_first(self) -> bool:
        """Return True if kernels load weight and bias of a tile before its rows: in modes with one scale per row.

        These modes reduce once more after the weight. Loading the operands first saves 5 % of an H200's time for many
        rows (789d707 beside 6c98afd). In other modes it takes registers, and up to 9 % more time (LayerNorm of 120
        columns).
        """
        return self.fquant.quantises and not self.scales_locally

    @property
    def unrolls(self) -> bool:
        """Return True if `two_pass` works on several chunks at once; modes with more work per chunk would spill."""
        return not self.fquant.quantises and _LIGHT.issuperset((*self.prologue, *self.epilogue))

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Return the pipelines that have kernels."""
        if self.reduce.exchanges:
            return (Pipeline.ONE_PASS,)
        gradients = not (self.shares or self.dropout or self.dy_format.is_fp8 or self.fquant.quantises)
        spreads = gradients if self.is_backward else self.streams or self.spreads_sums
        spreads = spreads and not self.statistics_only
        return tuple(p for p in Pipeline if p is not Pipeline.SPREAD or spreads)

    @property
    def spreads_sums(self) -> bool:
        """Return True if programs may share a row of sums: RMSNorm's mean square in fp32 is accurate for fp32 sums too.

        The means that LayerNorm's programs exchange are exact only for 16-bit values (`slice_moments`).
        """
        further = self.fquant.quantises or self.x_bias or self.x_gate or self.modulated or self.gating.gates
        apart = self.norm.centres or self.dropout or self.dtype_in.is_fp8
        return self.fadd.is_before and not (self.fadd.renorms or self.is_backward or further or apart)

    @property
    def shares(self) -> bool:
        """Return True if backward programs take the rows of one sample or the columns of one group."""
        return self.modulated or self.gating.gates

    @property
    def takes_x_as_read(self) -> bool:
        """Return True if the normalised row is x itself, with no more bits than x."""
        return not (self.fadd.is_before or self.x_bias or self.gating.is_before or self.reduce.exchanges)

    @property
    def has_head(self) -> bool:
        """Return True if the first values of a row may give its pivot: 16-bit centred rows that are not products.

        Compilers fuse a sum across lanes with the product in front of it, so each lane rounds the other lanes' products
        and not its own. Lanes then have pivots that differ by a rounding error of the row's largest value. Even if
        lanes agree, a pivot far from the mean loses bits of products, which have 24.

        Where the pivot was far, kernels compute a row again after y was stored, perhaps over a residual that is added
        behind the norm, and after y counted in the amax. The values that a second norm reads depend on the whole row of
        x. Sums over ranks, which are in no memory yet, have 0 as their first pivot.
        """
        may_repeat = not (self.fadd.is_after or self.fadd.renorms or self.save_amax)
        return may_repeat and self.norm.centres and self.dtype_in.itemsize == 2 and self.prologue[-1] not in _PRODUCTS

    @property
    def reads_gate(self) -> bool:
        """Return True if a kernel reads a gate's row for each row of x."""
        return self.x_gate or self.gating.gates

    @property
    def has_window(self) -> bool:
        """Return True if one_pass has a second kernel for unaligned rows: 16-bit values are slow to read singly."""
        return self.streams and self.dtype_in.itemsize == 2 and not self.statistics_only

    @property
    def has_unaligned(self) -> bool:
        """Return True if two_pass has a second kernel for unaligned rows, in which columns have other numbers."""
        numbered = self.dropout or self.group_size.code or self.fquant.takes_column_scales or self.columnwise.writes
        other = self.is_backward or self.shares or self.fadd.renorms or self.reduce.exchanges
        return self.dtype_in.itemsize == 2 and not (numbered or other)

    @property
    def stores_statistics(self) -> bool:
        """Return True if forward kernels store mean and rstd: for the caller, for columns, or for gradients."""
        return self.save_mv or self.columnwise.writes or (self.save_unquant and not self.reduce.exchanges)

    @property
    def stores_first(self) -> bool:
        """Return True if forward kernels store the mean and rstd of the first of two norms in tensors of their own."""
        return self.fadd.renorms and self.stores_statistics and not self.save_mv

    @property
    def keeps_row(self) -> bool:
        """Return True if a row in registers is used again: y follows from the row, and so does a variance."""
        return self.norm.centres or not self.statistics_only

    @property
    def operand_dtype(self) -> DType:
        """Return the default dtype of weight, residual and other operands: x's dtype, or for an fp8 x y's or bf16."""
        if not self.dtype_in.is_fp8:
            return self.dtype_in
        return DType.BF16 if self.dtype_out.is_quantised else self.dtype_out

    @cached_property
    def name(self) -> str:
        """Return the generated module's name, from which all other names of this mode are made."""
        out = "" if self.dtype_out is self.dtype_in else f"_{self.dtype_out.value}"
        suffixes = [words[value] for name, silent, words in _NAMED if (value := getattr(self, name)) is not silent]
        return f"{self.norm.prefix}_{self.direction.value}_{self.dtype_in.value}{out}{''.join(suffixes)}"

    @classmethod
    def from_name(cls, name: str) -> Mode:
        """Return the mode of a name.

        Raises:
            IllegalCombinationError: no mode has the name.
        """
        match = _names().fullmatch(name)
        if match is not None:
            parts = match.groupdict()
            dtype_in = DType(parts["dtype_in"][1:])
            values = {
                "norm": next(norm for norm in Norm if norm.prefix == parts["norm"]),
                "direction": Direction(parts["direction"][1:]),
                "dtype_in": dtype_in,
                "dtype_out": DType(parts["dtype_out"][1:]) if parts["dtype_out"] else dtype_in,
                **{
                    field: next(value for value, word in words.items() if word == parts[field])
                    for field, words in _SUFFIXES.items()
                },
            }
            with suppress(IllegalCombinationError):
                mode = cls(**values)
                # Names do not repeat a dtype that is the default.
                if mode.name == name:
                    return mode
        raise IllegalCombinationError(
            f"no mode is called {name!r}; names are like ln_fwd_bf16 or rms_fwd_fp16_addst_mv"
        )

    @property
    def quantiser(self) -> str:
        """Return the device function that rounds to this mode's quantised output."""
        truncated = "_truncated" if self.rounding.truncates else ""
        return f"to_{self.dtype_out.value}{truncated}"

    @property
    def decoder(self) -> str:
        """Return the device function that converts this mode's fp8 x to fp32."""
        return f"from_{self.dtype_in.value}"

    @cached_property
    def prologue(self) -> tuple[Stage, ...]:
        """Return the stages that compute the row to normalise."""
        has = {
            Stage.X: not (self.dtype_in.is_fp8 or self.fadd.renorms or self.reduce.exchanges),
            Stage.REDUCED: self.reduce.exchanges,
            Stage.X_SCALE: self.dtype_in.is_fp8,
            Stage.X_BIAS: self.x_bias,
            Stage.X_GATE: self.x_gate,
            Stage.GATE_BEFORE: self.gating.is_before,
            Stage.DROPOUT: self.dropout,
            Stage.RENORMED: self.fadd.renorms,
            Stage.RESIDUAL: self.fadd.is_before and not (self.fadd.renorms or self.reduce.exchanges),
            Stage.STORED: self.fadd.stores and not (self.is_backward or self.reduce.exchanges),
        }
        return tuple(stage for stage in Stage if has.get(stage))

    @cached_property
    def epilogue(self) -> tuple[Stage, ...]:
        """Return the stages between normalising a row and storing or quantising it."""
        has = {
            Stage.CAST: self.cast.comes_first,
            Stage.WEIGHT: not self.statistics_only,
            Stage.MODULATION: self.modulated,
            Stage.GATE_AFTER: self.gating.is_after,
            Stage.RESIDUAL_AFTER: self.fadd.is_after,
            Stage.ROUNDING: self.quantise_rounded,
            Stage.UNQUANTISED: self.save_unquant,
            Stage.SMOOTH: self.fquant.smooths,
            Stage.LARGEST: self.save_amax,
            Stage.DEQUANTISED: self.dy_format.is_fp8,
        }
        return tuple(stage for stage in Stage if has.get(stage))

    def kernel(self, part: Pipeline | Part) -> str:
        """Return the kernel's symbol, which profilers show."""
        return f"{self.name}_{part.value}"
