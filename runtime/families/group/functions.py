"""Differentiable GroupNorm, alone or with the SiLU behind it, and the module of it."""

from __future__ import annotations

from itertools import pairwise
from operator import index
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ...calls.argument_checks import check_device, check_dtype, check_number, check_tensor
from ...calls.backend import backend, is_served, left_to_torch
from ...calls.known import PLAIN
from ...calls.sharded import Frame
from ...calls.traced import becomes_operator, global_hooks, is_dynamo_compiling, result_dtype, unrecorded
from ...codegen.families import Kind
from ...codegen.groups import Activation
from ...dtypes import FLOATS, word
from ...errors import ShapeError
from ...upstream.torch_internals import is_sharded
from .. import eager
from ..operands import GroupOptions as Options
from ..replaced import Replacing, class_of
from . import row

_DTYPES = (*FLOATS, torch.float64)


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | Activation | None = None,
) -> torch.Tensor:
    """Compute GroupNorm, as `torch.nn.functional.group_norm`, and SiLU of the result in the same kernel if asked.

    y = act((x - mean) / sqrt(var + eps) * weight + bias), all in fp32 and rounded once, with the mean and the biased
    variance of each group: C / num_groups channels of one sample at all positions (Wu and He, 2018). With num_groups =
    C the result is InstanceNorm's.

    Kernels read x in place if positions are innermost (contiguous) or channels are (torch.channels_last,
    torch.channels_last_3d), and y has the same layout; any other layout is copied once. Several programs share a long
    group, and merge their moments in a fixed order: two runs give the same bits, forward and backward.

    Differentiable in x, weight and bias. The backward pass saves x, and a mean and rstd per group, and computes the
    input of the activation again. Torch's operators compute a gradient of the gradient.

    Torch's own operators run where kernels cannot, as described in `layer_norm`. For DTensors each rank normalises its
    samples, without communication if x is sharded along B and weight and bias are replicated; y is contiguous then.
    Under torch.autocast y is fp32 on a GPU, as torch's.

    Args:
        x: (B, C, ...), fp16, bf16, fp32 or fp64.
        num_groups: groups of each sample; it divides C.
        weight: (C,), fp16, bf16, fp32 or fp64, or None for 1.
        bias: (C,), fp16, bf16, fp32 or fp64, or None for 0.
        eps: added to the variance.
        activation: "silu", or None (or "none") for none.

    Returns:
        y: x's shape and dtype.

    Raises:
        ShapeError: x has no channels, num_groups does not divide them, or weight or bias is not (C,).
        DTypeError: a tensor is of a type that cannot be normalised.
        DeviceError: tensors are on several devices.
        LayoutError: a tensor is sparse or nested.
        ConflictError: eps is no number of at least 0, or activation no such word.
    """
    operands = (x, weight, bias)
    if not is_dynamo_compiling() and x.__class__ in PLAIN:
        known = row.normalise_known(operands, (num_groups, eps, activation))
        if known is not None:
            return known
    if any(type(operand) not in PLAIN for operand in operands if operand is not None) and has_torch_function(operands):
        y: torch.Tensor = handle_torch_function(
            group_norm, operands, x, num_groups, weight, bias, eps, activation=activation
        )
        return y
    check_tensor("x", x)
    said = _word(activation)
    if not isinstance(num_groups, (int, torch.SymInt)):
        num_groups = _as_int(num_groups)
    with unrecorded():
        _check(x, num_groups, weight, bias)
    eps = check_number("eps", eps, least=0.0)
    options = Options(num_groups, eps, said, result_dtype("group", x))
    if is_sharded(*operands):
        return _by_parts(operands, options)
    if backend(x) != "kernel" or left_to_torch(operands) or 0 in x.shape:
        return eager.group(x, weight, bias, options)
    if becomes_operator(*operands):
        return row.normalise_traced(operands, options)
    return row.normalise(operands, options, (num_groups, eps, activation))


_WORDS = tuple(activation.value for activation in Activation)


def _word(activation: str | Activation | None) -> str:
    # torch 2.11's TorchDynamo can make no enum of a word.
    if activation is None:
        return _WORDS[0]
    if isinstance(activation, str) and activation in _WORDS:
        return activation
    return word(Activation, "activation", activation).value


def _by_parts(operands: tuple[torch.Tensor | None, ...], options: Options) -> torch.Tensor:
    """Run a call of DTensors: each rank normalises its samples, in a call of plain tensors."""
    names = ("x", "weight", "bias")
    x, *vectors = operands
    assert x is not None
    frame = Frame("group_norm", dict(zip(names, operands, strict=True)), x.dim() - 1)
    weight, bias = (frame.part(Kind.VECTOR, vector) for vector in vectors)
    num_groups, eps, activation, _ = options
    y = group_norm(frame.part(Kind.ROWS, x), num_groups, weight, bias, eps, activation=activation)
    return frame.whole(Kind.ROWS, y.contiguous())


def _as_int(number: Any) -> Any:
    """Return the int that a whole number of another class is, NumPy's say, as torch takes it; else the argument."""
    try:
        return index(number)
    except TypeError:
        return number


def _check(x: torch.Tensor, num_groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    check_dtype("x", x, _DTYPES)
    if x.dim() < 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}; it takes (B, C, ...), at least 2 dimensions")
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1:
        raise ShapeError(f"num_groups is {num_groups!r}; it takes a whole number from 1 that divides the channels")
    channels = x.shape[1]
    if channels % num_groups:
        raise ShapeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(x.shape)} and num_groups={num_groups}; pass a divisor of {channels}"
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        check_tensor(name, vector)
        if tuple(vector.shape) != (channels,):
            raise ShapeError(f"{name} has shape {tuple(vector.shape)}; it takes ({channels},), the channels of x")
        check_dtype(name, vector, _DTYPES)
        check_device(name, vector, x)


class GroupNorm(Replacing, torch.nn.GroupNorm):
    """`torch.nn.GroupNorm` with its forward and backward passes in generated kernels; see `group_norm`.

    The constructor, parameters and state_dict are torch's, but for the activation, which is off by default.

    Args:
        num_groups: groups of each sample; it divides num_channels.
        num_channels: channels of the input.
        eps: added to the variance.
        affine: True adds weight and bias.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
        bias: False leaves out the bias.
        activation: "silu", applied to the result in the same kernel, or None.

    Raises:
        ConflictError: activation is no such word.
    """

    # At class level for instances that `patch` made of torch's, which have none of their own.
    activation: str | None = None

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        activation: str | Activation | None = None,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device=device, dtype=dtype)
        if not bias:
            # torch's own takes the argument since 2.13.
            self.register_parameter("bias", None)
        self.activation = None if activation is None else _word(activation)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise input: (B, num_channels, ...), fp16, bf16, fp32 or fp64; returns its shape and dtype."""
        operands, told = (input, self.weight, self.bias), (self.num_groups, self.eps, self.activation)
        if not is_dynamo_compiling() and input.__class__ in PLAIN:
            known = row.normalise_known(operands, told)
            if known is not None:
                return known
        left = self.activation is None and not is_served(operands, self.eps)
        if left and (before := self.forward_before(input)) is not None:
            y: torch.Tensor = before(self, input)
            return y
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, activation=self.activation)

    def extra_repr(self) -> str:
        """torch's, and the activation if there is one."""
        return super().extra_repr() + ("" if self.activation is None else f", activation={self.activation}")


class GroupNormSequential(Replacing, torch.nn.Sequential):
    """`torch.nn.Sequential`, but for a SiLU right behind a `GroupNorm`: one kernel computes both.

    The modules stay what they are, for whoever calls one of them. Where either has a hook, or a forward on the
    instance, both are called.
    """

    def forward(self, input: Any) -> Any:
        """Call the modules in turn."""
        modules: list[Any] = list(self)
        skips = False
        for module, behind in zip(modules, [*modules[1:], None], strict=True):
            if skips:
                skips = False
            elif behind is not None and _are_one(module, behind) and _is_taken(input, module):
                skips = True
                input = group_norm(input, module.num_groups, module.weight, module.bias, module.eps, activation="silu")
            else:
                input = module(input)
        return input


def has_activated_norm(modules: torch.nn.Sequential) -> bool:
    """Return True if a SiLU directly follows a GroupNorm of normforge's."""
    return any(class_of(norm) is GroupNorm and type(silu) is torch.nn.SiLU for norm, silu in pairwise(modules))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _are_one(norm: torch.nn.Module, silu: torch.nn.Module) -> bool:
    """Return True if calling both computes nothing but a GroupNorm and the SiLU of its output, and runs no hook."""
    if class_of(norm) is not GroupNorm or type(silu) is not torch.nn.SiLU or norm.activation is not None:
        return False
    hooked = global_hooks() or any(vars(each)[name] for each in (norm, silu) for name in _HOOKS)
    return not (hooked or "forward" in vars(norm) or "forward" in vars(silu))


def _is_taken(x: Any, norm: Any) -> bool:
    """Return True if `group_norm` takes x: at once for dense tensors, whose classes and dtypes say so."""
    is_dense: bool = type(x) in PLAIN and x.dtype in FLOATS and not x.is_nested and 0.0 <= norm.eps <= 1.0
    return is_dense or is_served((x, norm.weight, norm.bias), norm.eps)
