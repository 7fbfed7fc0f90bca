"""The base class of the module of GroupNorm, and the sequence that has one kernel compute a norm and its SiLU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ...calls.backend import is_served
from ...calls.plan import PLAIN
from ...calls.traced import global_hooks
from ...codegen.groups import Activation
from ...dtypes import FLOATS
from ..functional import group_norm
from ..replaced import Replacing, class_of
from . import row


class PlainGroupNorm(Replacing, torch.nn.GroupNorm):
    """The base class of `GroupNorm`."""

    # At class level for instances that `patch` made of torch's, which have none of their own.
    activation: str | None = None

    def _take(self, bias: bool, activation: str | Activation | None) -> None:
        """Keep what the constructor was given, once torch's has run."""
        if not bias:
            # torch's own takes the argument since 2.13.
            self.register_parameter("bias", None)
        self.activation = None if activation is None else row.applied(activation)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise input: (B, num_channels, ...), fp16, bf16, fp32 or fp64; returns its shape and dtype."""
        operands = (input, self.weight, self.bias)
        known = row.normalise_known(operands, ("layer", self.num_groups, self.eps, self.activation, None))
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
        while modules:
            module = modules.pop(0)
            if modules and _are_one(module, modules[0]) and _is_taken(input, module):
                modules.pop(0)
                input = group_norm(input, module.num_groups, module.weight, module.bias, module.eps, activation="silu")
            else:
                input = module(input)
        return input

    @staticmethod
    def serves(modules: torch.nn.Sequential) -> bool:
        """Return True if a SiLU directly follows a GroupNorm of normforge's."""
        return any(_is_ours(norm) and type(silu) is torch.nn.SiLU for norm, silu in pairwise(modules))


def _is_ours(module: torch.nn.Module) -> bool:
    """Return True if a module is a GroupNorm of normforge's, and of no subclass."""
    return PlainGroupNorm in class_of(module).__bases__


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _are_one(norm: Any, silu: torch.nn.Module) -> bool:
    """Return True if calling both computes nothing but a GroupNorm and the SiLU of its output, and runs no hook."""
    if not _is_ours(norm) or type(silu) is not torch.nn.SiLU or norm.activation is not None:
        return False
    hooked = global_hooks() or any(vars(each)[name] for each in (norm, silu) for name in _HOOKS)
    return not (hooked or "forward" in vars(norm) or "forward" in vars(silu))


def _is_taken(x: Any, norm: Any) -> bool:
    """Return True if `group_norm` takes x: at once for dense tensors, whose classes and dtypes say so."""
    is_dense: bool = type(x) in PLAIN and x.dtype in FLOATS and not x.is_nested and 0.0 <= norm.eps <= 1.0
    return is_dense or is_served((x, norm.weight, norm.bias), norm.eps)
