"""One problem of the command line: its mode and sizes, and its random tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..calls.modulated_backward import LEAST_ROWS, MOST_SAMPLES
from ..codegen.axes import ROW_AXES, Axis
from ..codegen.families import Kind, Parameter
from ..codegen.model import Mode
from ..codegen.parameters import BACKWARD, FORWARD, QUANTISED, family_of
from ..codegen.values import DType, Norm, ScaleLayout
from ..dtypes import TORCH_DTYPES
from ..mode_arguments import arguments_of

SEED = 11939

# Queries, keys and values: where heads of x lie, unless a stride says otherwise.
PACKED = 3

# The API's, and for LayerNorm ck_tile's too.
DEFAULT_EPS: dict[Norm, float] = {norm: float(default) for norm, default in FORWARD["eps"].default.items()}

# ck_tile's words for axes, where they are not ours.
WORDS = {"dtype_in": "prec_i", "dtype_out": "prec_o", "scale_dtype": "prec_sy"}


@dataclass(frozen=True)
class Strides:
    """Elements from row to row of each tensor of M rows; of heads, from token to token."""

    x: int
    residual: int
    y: int
    residual_out: int

    @classmethod
    def all(cls, stride: int) -> Strides:
        """The same stride for every tensor."""
        return cls(stride, stride, stride, stride)

    @classmethod
    def usual(cls, n: int, heads: int) -> Strides:
        """Rows that adjoin; heads of x are the queries of a packed qkv, which has as many keys and values."""
        adjoining = cls.all(heads * n)
        return replace(adjoining, x=PACKED * heads * n) if heads > 1 else adjoining


@dataclass(frozen=True)
class Problem:
    """What to run.

    Attributes:
        m: rows.
        n: row length.
        mode: what is computed, forward; every tensor besides x is of its operand_dtype that is of no type of its own.
        backward: whether its gradients are computed instead.
        prec_sm: smooth_scale's type.
        eps: None becomes the norm's default.
        strides: None becomes what `Strides.usual` says.
        heads: how many rows lie side by side in each token, for m rows; 1 is rows on one stride.
        samples: how many there are of m rows, where they are modulated by sample: 0 becomes 1 there.
        group: columns that are normalised together, each such group of a row by itself; 0 is all.
        dropout_p: how likely elements of x are dropped, where the mode drops any: 0 becomes 0.1 there.
        scale_layout: how scales of groups lie.
        scale_ub: the most that max|y| counts as, where the mode bounds it: 0 becomes 0.5 there.

    Raises:
        ValueError: no kernel computes the gradients of rows in such samples.
    """

    m: int
    n: int
    mode: Mode
    backward: bool = False
    prec_sm: DType = DType.FP32
    eps: float | None = None
    strides: Strides | None = None
    heads: int = 1
    samples: int = 0
    group: int = 0
    dropout_p: float = 0.0
    scale_layout: ScaleLayout = ScaleLayout.ROW_MAJOR
    scale_ub: float = 0.0

    def __post_init__(self) -> None:
        if self.eps is None:
            object.__setattr__(self, "eps", DEFAULT_EPS[self.mode.norm])
        if self.mode.modulated and not self.samples:
            object.__setattr__(self, "samples", 1)
        if self.mode.dropout and not self.dropout_p:
            object.__setattr__(self, "dropout_p", 0.1)
        if self.mode.scale_ub and not self.scale_ub:
            object.__setattr__(self, "scale_ub", 0.5)
        if self.backward and self.samples:
            self._check_samples()

    def _check_samples(self) -> None:
        if self.m < LEAST_ROWS * self.samples:
            raise ValueError(
                f"-m {self.m} with -samples {self.samples} is {self.m // self.samples} rows a sample, and the backward "
                f"kernels take {LEAST_ROWS} or more; pass -m {LEAST_ROWS * self.samples}, say, or fewer samples"
            )
        if self.samples > MOST_SAMPLES:
            raise ValueError(
                f"-samples {self.samples} does not go with -bwd 1, whose kernels take {MOST_SAMPLES} at most; pass "
                "fewer samples, of more rows each"
            )

    @property
    def row_strides(self) -> Strides:
        """The strides, which are the usual ones where none were given."""
        return self.strides or Strides.usual(self.n, self.heads)

    @property
    def row_length(self) -> int:
        """How long the rows are that kernels see."""
        return self.group or self.n

    @property
    def rows(self) -> int:
        """How many of those there are."""
        return self.m * self.n // self.row_length

    @property
    def tokens(self) -> int:
        """How many rows there are, or groups of heads that lie side by side."""
        return self.m // self.heads

    def rows_in(self, memory: torch.Tensor) -> torch.Tensor:
        """The (m, n) rows, or (tokens, heads, n) or (samples, rows, n), at the start of each row of a tensor."""
        if self.samples:
            return memory[:, : self.n].view(self.samples, -1, self.n)
        rows = memory[:, : self.heads * self.n]
        if self.group:
            return rows.view(-1, self.n // self.group, self.group)
        return rows.view(-1, self.heads, self.n) if self.heads > 1 else rows

    @property
    def words(self) -> dict[str, Any]:
        """The problem as JSON has it: each axis of its mode by ck_tile's word, and the sizes."""
        axes = [axis for axis in ROW_AXES if axis.name != "direction"]
        return {
            "m": self.m,
            "n": self.n,
            "heads": self.heads,
            "samples": self.samples,
            "group": self.group,
            "dropout_p": self.dropout_p,
            **{WORDS.get(axis.name, axis.name): _word(axis, self.mode) for axis in axes},
            "scale_layout": self.scale_layout.value,
            "scale_ub": self.scale_ub,
            "prec_sm": self.prec_sm.value,
            "backward": self.backward,
            "eps": self.eps,
            "strides": None if self.strides is None else asdict(self.strides),
        }


def _word(axis: Axis, mode: Mode) -> str | bool:
    return bool(getattr(mode, axis.name)) if axis.is_boolean else axis.word_of(mode)


def inputs(problem: Problem, device: torch.device) -> dict[str, Any]:
    """The arguments of the forward call, with ck_tile's inputs: uniform in ±0.5, and the smooth scale in ±1."""
    draw = _drawer(problem, device, SEED)
    dropped = {"dropout_p": problem.dropout_p} if problem.mode.dropout else {}
    laid = {"scale_layout": problem.scale_layout} if family_of(problem.mode) is QUANTISED else {}
    return {**arguments_of(problem.mode, draw), "eps": problem.eps, **dropped, **laid}


def gradients_in(problem: Problem, device: torch.device) -> dict[str, torch.Tensor]:
    """The gradients that arrive: dy, and with fused add that of the stored sum; uniform in ±0.5."""
    draw = _drawer(problem, device, SEED + 1)
    names = ("dy", "dresidual_out") if problem.mode.fadd.stores else ("dy",)
    return {name: draw(BACKWARD[name]) for name in names}


def poisoned_outputs(problem: Problem, device: torch.device) -> dict[str, torch.Tensor]:
    """The call's `out` and `residual_out`, full of what no kernel writes: an element left unwritten cannot pass."""

    def poisoned(stride: int, dtype: DType) -> torch.Tensor:
        poison = torch.tensor(-128 if dtype.is_int else float("nan"), device=device).to(TORCH_DTYPES[dtype])
        return problem.rows_in(poison.repeat(problem.tokens, stride))

    strides, mode = problem.row_strides, problem.mode
    outputs = {"out": poisoned(strides.y, mode.dtype_out)}
    if mode.fadd.stores:
        outputs["residual_out"] = poisoned(strides.residual_out, mode.operand_dtype)
    return outputs


# So that none of the scales of y, which is below 2, is more than e4m3 holds.
_GLOBAL_SCALE = 1024.0

# Whose stride the gradients of y and of the sum have: that of what they are of. A gate lies as x does.
_STRIDE_OF = {"dy": "y", "dresidual_out": "residual_out", "gate": "x"}


def _drawer(problem: Problem, device: torch.device, seed: int) -> Callable[[Parameter], torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(parameter: Parameter) -> torch.Tensor:
        name, n = parameter.name, problem.n
        is_smooth = name == "smooth_scale"
        bound = 1.0 if is_smooth else 0.5
        dtype = problem.mode.dtype_in if name == "x" else problem.mode.operand_dtype
        if is_smooth:
            dtype = problem.prec_sm
        if parameter.kind is Kind.RANDOM:
            return torch.randint(2**63 - 1, (2,), device=device, generator=generator)
        if parameter.kind is Kind.VALUE:
            given = {"scale_ub": problem.scale_ub, "global_scale": _GLOBAL_SCALE}
            return torch.full((1,), given.get(name, 1 / problem.mode.dtype_out.qmax), device=device)
        if name == "column_scale":
            # None that divides by nothing; a little of y is cut off.
            values = torch.empty(n, device=device).uniform_(bound, 2 * bound, generator=generator)
            return (values / problem.mode.dtype_out.qmax).to(TORCH_DTYPES[dtype])
        if parameter.kind is Kind.SCALE:
            # One a row, and none so small that rows vanish beside eps.
            leading = (problem.tokens, problem.heads) if problem.heads > 1 else (problem.m,)
            return torch.empty(leading, device=device).uniform_(bound, 2 * bound, generator=generator)
        is_rows = parameter.kind is Kind.ROWS
        if parameter.kind is Kind.SAMPLES:
            values = torch.empty((problem.samples, n), device=device).uniform_(-bound, bound, generator=generator)
            return values.to(TORCH_DTYPES[dtype])
        stride = getattr(problem.row_strides, _STRIDE_OF.get(name, name)) if is_rows else n
        shape = (problem.tokens, stride) if is_rows else (n,)
        values = torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator).to(TORCH_DTYPES[dtype])
        if parameter.kind is Kind.GROUPS and problem.group:
            return values.view(-1, problem.group)
        return problem.rows_in(values) if is_rows else values

    return draw
