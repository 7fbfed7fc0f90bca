"""Differentiable norms times an activated gate, as state-space models have them (Mamba2), and modules of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...calls import road
from ...calls.argument_checks import check_flag
from ...calls.backend import backend
from ...calls.check import check_normalised
from ...calls.record import records
from ...calls.sharded import is_sharded
from ...calls.traced import is_dynamo_compiling
from ...codegen.values import GateActivation
from ...dtypes import word
from ...errors import ShapeError
from ..operands import GatedOperands, GatedOptions
from ..plain_functions import by_parts, handed_on, is_handed_on, normalise_family
from ..replaced import Replacing
from . import row


def gated_layer_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    activation: str | GateActivation = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Compute LayerNorm over the last dimension, times an activated gate; see `gated_rms_norm` for formulas and errors.

    Args:
        x: (..., N), fp16, bf16, fp32 or fp64; rows on any strides. An x that kernels cannot walk is copied once.
        gate: x's shape, fp16, bf16, fp32 or fp64, with strides independent of x's.
        weight: (N,), or None for 1.
        bias: (N,), or None for 0; multiplied by the gate too if norm_before_gate is True.
        activation: "silu", gate * sigmoid(gate), or "sigmoid".
        norm_before_gate: True multiplies the normalised rows by the activated gate; False multiplies x by the activated
            gate, and normalises the product.
        group_size: the number of adjacent columns that are normalised together, each such group of a row by itself; a
            divisor of N. None is N.
        eps: added to the variance.
    """
    operands = (x, gate, weight, bias)
    options = _options("layer", activation, norm_before_gate, eps, records(operands))
    y: torch.Tensor = _normalise(operands, options, group_size)
    return y


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    activation: str | GateActivation = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Compute RMSNorm over the last dimension, times an activated gate: RMSNormGated of Mamba2 (Dao and Gu, 2024).

    y = RMSNorm(x) * weight * activation(gate), as in Gated DeltaNet (Yang et al., 2024); or, with
    norm_before_gate=False, y = RMSNorm(x * activation(gate)) * weight, as in Mamba2. All steps are in fp32, with one
    rounding. The gate is usually a slice of a wider projection, which the kernel reads in place.

    Differentiable in every tensor. The backward pass saves the tensors themselves, and an rstd (for LayerNorm a mean
    too) per row. The order of sums does not change from run to run. Torch's operators compute a gradient of the
    gradient.

    Torch's operators compute the same where kernels cannot run, as described in `layer_norm`. For DTensors each rank
    normalises its rows. Under torch.autocast y has the dtype of the norm alone there.

    Args:
        x: (..., N), fp16, bf16, fp32 or fp64; rows on any strides. An x that kernels cannot walk is copied once.
        gate: x's shape, fp16, bf16, fp32 or fp64, with strides independent of x's.
        weight: (N,), or None for 1.
        activation: "silu", gate * sigmoid(gate), or "sigmoid".
        norm_before_gate: True multiplies the normalised rows by the activated gate; False multiplies x by the activated
            gate, and normalises the product.
        group_size: the number of adjacent columns that are normalised together, each such group of a row by itself; a
            divisor of N. None is N.
        eps: added to the mean square.

    Returns:
        y: x's shape and dtype.

    Raises:
        ShapeError: a tensor's shape does not fit x's, or group_size does not divide N.
        DTypeError: a tensor is of a type that cannot be normalised.
        DeviceError: tensors are on several devices.
        LayoutError: a tensor is sparse or nested.
        ConflictError: activation is no such word; norm_before_gate is no flag; or eps is no number of at least 0.
        NormforgeError: whatever else `layernorm2d_fwd` raises.
    """
    operands = (x, gate, weight, None)
    options = _options("rms", activation, norm_before_gate, eps, records(operands))
    y: torch.Tensor = _normalise(operands, options, group_size)
    return y


def _options(norm: str, activation: Any, norm_before_gate: Any, eps: Any, saves: bool) -> GatedOptions:
    return norm, *row.words(activation, norm_before_gate), eps, 0.0, "none", None, saves


def _normalise(operands: GatedOperands, options: GatedOptions, group_size: int | None) -> Any:
    if group_size is None:
        found = None if is_dynamo_compiling() else road.normalise_known(row.CALLS, operands, options)
        return _first(operands, options, None) if found is None else found
    return _first(operands, options, group_size)


def _first(operands: GatedOperands, options: GatedOptions, group_size: int | None) -> Any:
    """Run a call that no look-up knows, or a call with groups."""
    if is_handed_on(operands):
        return _handed_on(operands, options, group_size)
    if is_sharded(*operands):
        return _by_parts(operands, options, group_size)
    if group_size is None:
        return normalise_family(row.CALLS, operands, options)
    return _normalise(row.in_groups(operands, group_size), options, None).flatten(-2)


def _by_parts(operands: GatedOperands, options: GatedOptions, group_size: int | None) -> Any:
    """Run a call of DTensors: each rank normalises its rows, in a call of plain tensors."""
    x, *_ = operands
    function, given = row.CALLS.functions[options[0]], road.named(row.CALLS, operands, options)
    # The parts may be alike on one rank and not on another, which would wait for it.
    check_normalised(function, given, x.shape[-1:], kernel=backend(x) == "kernel")
    return by_parts(function, row.CALLS.rows, operands, lambda parts: _normalise(parts, options, group_size))


def _handed_on(operands: GatedOperands, options: GatedOptions, group_size: int | None) -> Any:
    """Return the result of an operand's `__torch_function__`, as torch.fx's proxies have one."""
    given = road.named(row.CALLS, operands, options)
    given["norm_before_gate"] = given["gating"] == row.GATING[True]
    given["group_size"] = group_size
    return handed_on(_PUBLIC[options[0]], operands, given, positional=2)


# By the norm's word.
_PUBLIC: dict[str, Callable[..., Any]] = {"layer": gated_layer_norm, "rms": gated_rms_norm}


# Attributes that are arguments of the functions, with what printed modules leave out.
_OPTIONS = {"group_size": None, "norm_before_gate": True, "activation": "silu"}


class _GatedNorm(Replacing):
    """The base class of both modules: a weight of ones, and the options of the function."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        group_size: int | None,
        norm_before_gate: bool,
        activation: str | GateActivation,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.group_size = hidden_size, eps, group_size
        self.norm_before_gate = check_flag("norm_before_gate", norm_before_gate)
        self.activation = word(GateActivation, "activation", activation).value
        if group_size is not None and not row.divides(group_size, hidden_size):
            raise ShapeError(f"group_size={group_size!r} and hidden_size={hidden_size}; it takes a divisor of that")
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Weight to ones, and bias, where there is one, to zeros."""
        torch.nn.init.ones_(self.weight)
        if (bias := self._parameters.get("bias")) is not None:
            torch.nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        """The size, epsilon, and the options that are not the default."""
        others = [
            f"{name}={getattr(self, name)!r}" for name, default in _OPTIONS.items() if getattr(self, name) != default
        ]
        return ", ".join([str(self.hidden_size), f"eps={self.eps}", *others])

    @property
    def _options(self) -> dict[str, Any]:
        return {"eps": self.eps, **{name: getattr(self, name) for name in _OPTIONS}}


class GatedRMSNorm(_GatedNorm):
    """`gated_rms_norm` with a weight: the RMSNormGated of Mamba2 and Gated DeltaNet, whose state dicts it loads.

    Args:
        hidden_size: N.
        eps: added to the mean square; Mamba2 has 1e-5.
        group_size: the number of adjacent columns that are normalised together, each such group of a row by itself; a
            divisor of N. None is N.
        norm_before_gate: True multiplies the normalised rows by the activated gate; False multiplies x by the activated
            gate, and normalises the product. Mamba2 has False.
        activation: "silu", gate * sigmoid(gate), or "sigmoid".
        device: the device of the weight.
        dtype: the dtype of the weight.

    Raises:
        ShapeError: group_size does not divide hidden_size.
        ConflictError: activation is no such word, or norm_before_gate no flag.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        *,
        activation: str | GateActivation = "silu",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, activation, device, dtype)
        self.reset_parameters()

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise x and multiply it by the activated gate, in that order or the other: both (..., hidden_size)."""
        return gated_rms_norm(x, gate, self.weight, **self._options)


class GatedLayerNorm(_GatedNorm):
    """`gated_layer_norm` with a weight and, unless it is left out, a bias.

    Args:
        hidden_size: N.
        eps: added to the variance.
        group_size: the number of adjacent columns that are normalised together, each such group of a row by itself; a
            divisor of N. None is N.
        norm_before_gate: True multiplies the normalised rows by the activated gate; False multiplies x by the activated
            gate, and normalises the product.
        bias: True adds a bias.
        activation: "silu", gate * sigmoid(gate), or "sigmoid".
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ShapeError: group_size does not divide hidden_size.
        ConflictError: activation is no such word, or norm_before_gate no flag.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        *,
        bias: bool = True,
        activation: str | GateActivation = "silu",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, activation, device, dtype)
        vector = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", vector)
        self.reset_parameters()

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise x and multiply it by the activated gate, in that order or the other: both (..., hidden_size)."""
        return gated_layer_norm(x, gate, self.weight, self.bias, **self._options)
