"""The modules of norms alone, of gated norms and of GroupNorm: signatures, calls, and the words of their docstrings.

Base classes in `runtime/families/` hold what modules share. Rows of `public` are reused where both agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .parameters import GATED
from .public import ACTIVATION, CAST, GROUP_SIZE, NORM_BEFORE_GATE, NUM_GROUPS
from .values import Norm


@dataclass(frozen=True)
class Argument:
    """An argument of a module's constructor.

    Attributes:
        name: the name that callers write.
        annotation: the type, as the signature writes it.
        default: the default, as the signature writes it; "" for none.
        meaning: the docstring's line.
        positional: whether it may be passed without its name.
    """

    name: str
    annotation: str
    default: str
    meaning: str
    positional: bool = True


@dataclass(frozen=True)
class Module:
    """A public module.

    Attributes:
        name: the name of the class.
        bases: the classes that it is derived from.
        summary: the docstring's first line.
        arguments: of the constructor.
        body: the statements of the constructor.
        raises: the docstring's entries about errors.
        details: the docstring's second paragraph; "" for none.
        forward: the macro that writes the forward method; "" if a base class has the method.
        norm: the norm.
    """

    name: str
    bases: str
    summary: str
    arguments: tuple[Argument, ...]
    body: tuple[str, ...]
    raises: tuple[str, ...]
    details: str = ""
    forward: str = ""
    norm: Norm = Norm.LAYER


@dataclass(frozen=True)
class ModulesFile:
    """An emitted file of modules.

    Attributes:
        summary: the docstring.
        imports: the lines that import what the modules need.
        modules: the modules.
    """

    summary: str
    imports: str
    modules: tuple[Module, ...]


_SHAPE = Argument("normalized_shape", "int | Sequence[int]", "", "the input's last dimensions, or the last one.")
_EPS = {
    Norm.LAYER: Argument("eps", "float", "1e-5", "added to the variance."),
    Norm.RMS: Argument(
        "eps", "float | None", "None", "added to the mean square; None is torch.finfo(torch.float32).eps."
    ),
}
_AFFINE = Argument("elementwise_affine", "bool", "True", "True adds a weight.")
_BIAS = Argument("bias", "bool", "True", "True adds a bias, if there is a weight.")
_STORED = (
    Argument("device", "Any", "None", "the device of the parameters."),
    Argument("dtype", "torch.dtype | None", "None", "the dtype of the parameters."),
)
_CAST = Argument("cast", CAST.annotation, CAST.default[Norm.LAYER], CAST.meaning[Norm.LAYER], positional=False)
_OFFSET = {
    Norm.LAYER: "added to every weight, in fp32; the weight starts as 1 - weight_offset.",
    Norm.RMS: "added to every weight, in fp32 and in the kernel; the weight starts as 1 - weight_offset.",
}
_X_BIAS = Argument(
    "x_bias",
    "bool",
    "False",
    "True adds a parameter x_bias of shape normalized_shape, zeros at first, which is added to the input before "
    "anything else: the bias of the preceding linear layer, if that layer has no bias.",
    positional=False,
)
_CAST_BEFORE_WEIGHT = Argument(
    "cast_before_weight",
    "bool",
    "False",
    "round to the input's dtype before the multiplication with the weight, as Hugging Face's `LlamaRMSNorm` does; the "
    "result has the wider of the two dtypes. By default the row is rounded once, after the multiplication.",
    positional=False,
)
_DROPOUT_P = Argument(
    "dropout_p",
    "float",
    "0.0",
    "the probability that an element of x is dropped in training, by torch's default generator.",
    positional=False,
)
_RAISES = "ConflictError: cast is no such word, or there is a weight_offset and no weight"


def _arguments(norm: Norm, *own: Argument) -> tuple[Argument, ...]:
    """Return the arguments of a norm's module, behind which its `own` stand."""
    return (
        *(_SHAPE, _EPS[norm], _AFFINE, *([_BIAS] if norm.centres else []), *_STORED, _CAST),
        Argument("weight_offset", "float", "0.0", _OFFSET[norm], positional=False),
        *(_X_BIAS, *own),
    )


def _plain(norm: Norm, taken: tuple[str, ...], *own: Argument) -> Module:
    """Return the module of a norm alone; `taken` are the statements that keep its `own` arguments."""
    title, arguments = norm.row.title, _arguments(norm, *own)
    of_torch = ", ".join(argument.name for argument in arguments if argument.positional)
    return Module(
        name=title,
        bases=f"PlainNorm, torch.nn.{title}",
        summary=f"`torch.nn.{title}` with its forward and backward passes in generated kernels; see "
        f"`{norm.row.function}`.",
        details="The constructor, parameters and state_dict are torch's, but for options that are off by default.",
        arguments=arguments,
        body=(f"super().__init__({of_torch})", "self._take(cast, weight_offset, x_bias, device, dtype)", *taken),
        raises=(f"{_RAISES}.",),
        forward="plain",
        norm=norm,
    )


def _adding(norm: Norm) -> Module:
    title = norm.row.title
    return replace(
        _plain(norm, ("self._drop(dropout_p)",), _DROPOUT_P),
        name=f"Add{title}",
        summary=f"A residual add and {title} in one kernel: `add_{norm.row.function}` with parameters as `{title}`'s.",
        raises=(f"{_RAISES}; or dropout_p is outside [0, 1).",),
        forward="adding",
    )


def _added(norm: Norm) -> Module:
    title, plain = norm.row.title, _plain(norm, ())
    return replace(
        plain,
        name=f"{title}Add",
        summary=f"{title} and its addition to a residual in one kernel: `{norm.row.function}_add` with parameters as "
        f"`{title}`'s.",
        details=f"{plain.details} The sum is rounded once, to the dtype of the residual. x and the residual are fp16, "
        "bf16, fp32 or fp64, alike or not.",
        raises=(
            *plain.raises,
            "ShapeError: in a call, x does not end in normalized_shape, or the residual has another shape than x.",
            "DTypeError: in a call, x or the residual is no tensor of these dtypes.",
        ),
        forward="added",
    )


PLAIN_MODULES = ModulesFile(
    "Drop-in modules: torch's norms on generated kernels, and their forms with a fused residual add.",
    """\
from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..calls import native
from ..codegen.values import Cast
from . import post_add
from .plain_bases import PlainNorm
from .plain_calls import normalise_cast_before_weight, normalise_first
from .replaced import own
""",
    (
        _plain(Norm.LAYER, ()),
        _plain(Norm.RMS, ("self.cast_before_weight = cast_before_weight",), _CAST_BEFORE_WEIGHT),
        _adding(Norm.LAYER),
        _adding(Norm.RMS),
        _added(Norm.LAYER),
        _added(Norm.RMS),
    ),
)


def _gated(norm: Norm, summary: str, eps: str, gating: str, *own: Argument) -> Module:
    """Return the module of a gated norm; `own` is the argument that decides about a bias."""
    title, activation = f"Gated{norm.row.title}", GATED["activation"]
    kept = "hidden_size, eps, group_size, norm_before_gate, activation, device, dtype"
    stored = [replace(each, positional=False) for each in _STORED]
    return Module(
        name=title,
        bases="PlainGatedNorm",
        summary=summary,
        arguments=(
            Argument("hidden_size", "int", "", "N."),
            Argument("eps", "float", norm.row.eps, f"{GATED.meaning(GATED['eps'], norm)[:-1]}{eps}"),
            Argument("group_size", "int | None", "None", GROUP_SIZE),
            Argument("norm_before_gate", "bool", "True", f"{NORM_BEFORE_GATE}{gating}"),
            *own,
            Argument(
                activation.name,
                activation.annotation,
                activation.default[norm],
                GATED.meaning(activation, norm),
                positional=False,
            ),
            *stored,
        ),
        body=(f"super().__init__({', '.join([kept, *(each.name for each in own)])})",),
        raises=(
            "ShapeError: group_size does not divide hidden_size.",
            "ConflictError: activation is no such word, or norm_before_gate no flag.",
        ),
        forward="gated",
        norm=norm,
    )


GATED_MODULES = ModulesFile(
    "Modules of norms times an activated gate, as in state-space models (Mamba2).",
    """\
from typing import Any

import torch

from ...codegen.values import GateActivation

# Pickles of earlier versions name these here.
from ..functional import gated_layer_norm as gated_layer_norm
from ..functional import gated_rms_norm as gated_rms_norm
from .bases import PlainGatedNorm
""",
    (
        _gated(
            Norm.RMS,
            "`gated_rms_norm` with a weight: the RMSNormGated of Mamba2 and Gated DeltaNet, whose state dicts it "
            "loads.",
            "; Mamba2 has 1e-5.",
            " Mamba2 has False.",
        ),
        _gated(
            Norm.LAYER,
            "`gated_layer_norm` with a weight and, unless it is left out, a bias.",
            ".",
            "",
            Argument("bias", "bool", "True", "True adds a bias.", positional=False),
        ),
    ),
)

GROUP_MODULES = ModulesFile(
    "GroupNorm as a module, alone or with the SiLU behind it.",
    """\
from typing import Any

import torch

from ...codegen.groups import Activation

# Pickles and saved graphs of earlier versions name these here.
from ..functional import group_norm as group_norm
from .bases import GroupNormSequential as GroupNormSequential
from .bases import PlainGroupNorm
""",
    (
        Module(
            "GroupNorm",
            "PlainGroupNorm",
            "`torch.nn.GroupNorm` with its forward and backward passes in generated kernels; see `group_norm`.",
            (
                Argument("num_groups", "int", "", f"{NUM_GROUPS}num_channels."),
                Argument("num_channels", "int", "", "channels of the input."),
                Argument("eps", "float", "1e-5", "added to the variance."),
                Argument("affine", "bool", "True", "True adds weight and bias."),
                *_STORED,
                Argument("bias", "bool", "True", "False leaves out the bias.", positional=False),
                Argument(
                    "activation",
                    ACTIVATION.annotation,
                    "None",
                    '"silu", applied to the result in the same kernel, or None.',
                    positional=False,
                ),
            ),
            (
                "super().__init__(num_groups, num_channels, eps, affine, device=device, dtype=dtype)",
                "self._take(bias, activation)",
            ),
            ("ConflictError: activation is no such word.",),
            "The constructor, parameters and state_dict are torch's, but for the activation, which is off by default.",
        ),
    ),
)
