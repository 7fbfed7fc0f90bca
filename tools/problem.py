"""One problem of the command line: its mode and sizes. Imports no torch, so that help and refusals take no seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..call_kinds import LEAST_ROWS_OF_SAMPLE, MOST_SAMPLES
from ..codegen.axes import ROW_AXES, Axis
from ..codegen.model import Mode
from ..codegen.parameters import FORWARD
from ..codegen.values import DType, DyFormat, Norm, ScaleLayout

if TYPE_CHECKING:
    import torch

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
        """Return one stride for all tensors."""
        return cls(stride, stride, stride, stride)

    @classmethod
    def usual(cls, n: int, heads: int) -> Strides:
        """Return contiguous strides; heads of x are the queries of a packed qkv, with as many keys and values."""
        adjoining = cls.all(heads * n)
        return replace(adjoining, x=PACKED * heads * n) if heads > 1 else adjoining


@dataclass(frozen=True)
class Problem:
    """A problem to run.

    Attributes:
        m: rows.
        n: row length.
        mode: what is computed, forward; every tensor besides x is of its operand_dtype that is of no type of its own.
        backward: whether its gradients are computed instead; what a mode with columns says of y is then of dx.
        prec_sm: smooth_scale's type.
        eps: None becomes the norm's default.
        strides: None becomes what `Strides.usual` says.
        heads: how many rows lie side by side in each token, for m rows; 1 is rows on one stride.
        samples: how many there are of m rows, where they are modulated by sample: 0 becomes 1 there.
        group: columns that are normalised together, each such group of a row by itself; 0 is all.
        dropout_p: how likely elements of x are dropped, where the mode drops any: 0 becomes 0.1 there.
        scale_layout: how scales of groups lie.
        scale_ub: the most that max|y| counts as, where the mode bounds it: 0 becomes 0.5 there.
        dy_format: the dtype and scales of the gradient that arrives, if gradients are computed.

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
    dy_format: DyFormat = DyFormat.FLOAT

    # The argument that makes a problem smaller.
    smaller: ClassVar[str] = "-m (-m 64, say)"

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
        if self.m < LEAST_ROWS_OF_SAMPLE * self.samples:
            raise ValueError(
                f"-m {self.m} with -samples {self.samples} is {self.m // self.samples} rows a sample, and the backward "
                f"kernels take {LEAST_ROWS_OF_SAMPLE} or more; pass -m {LEAST_ROWS_OF_SAMPLE * self.samples}, say, or "
                "fewer samples"
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

    @property
    def elements(self) -> int:
        """How many elements x has."""
        return self.m * self.n

    @property
    def sizes(self) -> str:
        """The sizes, in prose."""
        return f"m={self.m} n={self.n}"

    @property
    def headline(self) -> str:
        """The problem, in prose."""
        heads = "" if self.heads == 1 else f" heads={self.heads}, strides {self.row_strides.x} and {self.n}"
        return f"{self.mode.norm.row.title} {self.dtypes}, {self.sizes}{heads}"

    @property
    def dtypes(self) -> str:
        """The dtypes of x and y, in prose."""
        direction = "backward " if self.backward else ""
        quantised = f"-> {self.mode.dtype_out.value}" if self.mode.columnwise.writes or not self.backward else ""
        return f"{self.mode.dtype_in.value} {direction}{quantised}".rstrip()

    def rows_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the (m, n) rows, or (tokens, heads, n) or (samples, rows, n), at the start of each row of a tensor."""
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
            "dy_format": self.dy_format.value,
            "prec_sm": self.prec_sm.value,
            "backward": self.backward,
            "eps": self.eps,
            "strides": None if self.strides is None else asdict(self.strides),
        }


@dataclass(frozen=True)
class SeveralProblem:
    """RMSNorms in one launch.

    Attributes:
        problems: the norms, which differ in row length alone.
    """

    problems: tuple[Problem, ...]

    smaller: ClassVar[str] = Problem.smaller

    @property
    def elements(self) -> int:
        """How many elements all rows have."""
        return sum(problem.elements for problem in self.problems)

    @property
    def sizes(self) -> str:
        """The sizes, in prose."""
        return f"m={self.problems[0].m} n={','.join(str(problem.n) for problem in self.problems)}"

    @property
    def headline(self) -> str:
        """The problem, in prose."""
        first = self.problems[0]
        return f"{len(self.problems)} {first.mode.norm.row.title}s {first.dtypes}, {self.sizes}"

    @property
    def words(self) -> dict[str, Any]:
        """The problem as JSON has it."""
        return {**self.problems[0].words, "n": [problem.n for problem in self.problems]}


def _word(axis: Axis, mode: Mode) -> str | bool:
    return bool(getattr(mode, axis.name)) if axis.is_boolean else axis.word_of(mode)
