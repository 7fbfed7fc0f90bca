"""The axes of a mode as words, for manifests, --where and --count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from .errors import IllegalCombinationError
from .groups import GROUP, Activation, AnyMode, GroupMode, Span
from .model import Mode
from .values import (
    FP8_INPUT_DTYPES,
    INPUT_DTYPES,
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
    Reduce,
    Rounding,
    ScaleFormat,
    ScaleGroup,
    ScaleLayout,
)

SAME = "same"

BOOLEANS = {"false": False, "true": True}


@dataclass(frozen=True)
class Axis:
    """One axis of `Mode`: the name of its field, the value of each word, and the default word, if any."""

    name: str
    values: Mapping[str, Any]
    default: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words that a manifest may use."""
        return tuple(self.values)

    @property
    def is_boolean(self) -> bool:
        """Return True if a manifest writes this axis with YAML's booleans."""
        return self.values is BOOLEANS

    def word_of(self, mode: AnyMode) -> str:
        """Return the word for a mode's value on this axis, with dtype_out spelled out.

        A mode without this axis has the default.
        """
        if self.name == "norm" and isinstance(mode, GroupMode):
            return GROUP
        if not hasattr(mode, self.name):
            assert self.default is not None
            return self.default
        value = getattr(mode, self.name)
        return str(value).lower() if self.is_boolean else str(value.value)


def _words(values: Iterable[Enum]) -> dict[str, Any]:
    return {value.value: value for value in values}


AXES = (
    Axis("direction", _words(Direction), default="fwd"),
    Axis("norm", {**_words(Norm), GROUP: GroupMode}),
    Axis("dtype_in", _words((*INPUT_DTYPES, *FP8_INPUT_DTYPES))),
    Axis("dtype_out", {SAME: None, **_words(DType)}, default=SAME),
    Axis("fadd", _words(FusedAdd), default="none"),
    Axis("fquant", _words(FusedQuant), default="none"),
    Axis("save_mv", BOOLEANS, default="false"),
    Axis("x_bias", BOOLEANS, default="false"),
    Axis("group_size", _words(ScaleGroup), default="none"),
    Axis("scale_format", _words(ScaleFormat), default="float"),
    Axis("scale_layout", _words(layout for layout in ScaleLayout if layout is layout.of_kernels), default="row_major"),
    Axis("scale_ub", BOOLEANS, default="false"),
    Axis("quantise_rounded", BOOLEANS, default="false"),
    Axis("save_unquant", BOOLEANS, default="false"),
    Axis("columnwise", _words(Columnwise), default="none"),
    Axis("save_amax", BOOLEANS, default="false"),
    Axis("scale_dtype", _words(INPUT_DTYPES), default="fp32"),
    Axis("rounding", _words(Rounding), default="nearest"),
    Axis("cast", _words(Cast), default="after_weight"),
    Axis("modulated", BOOLEANS, default="false"),
    Axis("x_gate", BOOLEANS, default="false"),
    Axis("gating", _words(Gating), default="none"),
    Axis("gate_activation", _words(GateActivation), default="silu"),
    Axis("grouped", BOOLEANS, default="false"),
    Axis("activation", _words(Activation), default="none"),
    Axis("channels_last", BOOLEANS, default="false"),
    Axis("span", _words(Span), default="group"),
    Axis("dropout", BOOLEANS, default="false"),
    Axis("statistics_only", BOOLEANS, default="false"),
    Axis("reduce", _words(Reduce), default="none"),
    Axis("dy_format", _words(DyFormat), default="float"),
)


# The axes that norms of rows have. The axis `norm` says whether a mode is of rows or of groups.
ROW_AXES = tuple(axis for axis in AXES if axis.name in {field.name for field in fields(Mode)})
_OF_ROWS = tuple(axis for axis in ROW_AXES if axis.name != "norm")
_OF_GROUPS = tuple(axis for axis in AXES if axis.name in {field.name for field in fields(GroupMode)})
_OF_GROUPS_ALONE = tuple(axis for axis in _OF_GROUPS if axis not in _OF_ROWS)
_OF_ROWS_ALONE = tuple(axis for axis in _OF_ROWS if axis not in _OF_GROUPS)


def mode_of(words: Mapping[str, str]) -> AnyMode:
    """Return the mode that one word for each axis describes.

    Raises:
        IllegalCombinationError: no kernel can have this combination.
    """
    grouped = words["norm"] == GROUP
    own, others = (_OF_GROUPS, _OF_ROWS_ALONE) if grouped else (_OF_ROWS, _OF_GROUPS_ALONE)
    values = {axis.name: axis.values[words[axis.name]] for axis in own}
    for axis in others:
        word = words[axis.name]
        if word == axis.default:
            continue
        if axis.name == "dtype_out" and word == words["dtype_in"]:
            continue
        raise IllegalCombinationError(
            f"norm {words['norm']} has no {axis.name} {word}; leave {axis.name} out, or use another norm"
        )
    if grouped:
        return GroupMode(**values)
    if words["dtype_out"] == SAME:
        values["dtype_out"] = values["dtype_in"]
    return Mode(Norm(words["norm"]), **values)
