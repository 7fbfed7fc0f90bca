"""Random legal calls of `layernorm2d_fwd` and `rmsnorm2d_fwd`, and all that is to hold of one."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch

import normforge
from normforge import LayerNormOutput
from normforge.codegen.values import FusedAdd, FusedQuant, Rounding

from ..calling import FLOATS, FORWARD, QUANTISED
from . import oracle
from .memory import Memory, row_strides

T = TypeVar("T")


class Choose(Protocol):
    """Picks one of some options: hypothesis does, and so does `random.choice`."""

    def __call__(self, options: Sequence[T], /) -> T: ...


def _swapped(sizes: Sequence[int]) -> tuple[int, ...]:
    """With the last two in each other's place."""
    return (*sizes[:-2], *reversed(sizes[-2:]))


# Elements from row to row, from N and the sizes of leading dimensions: of the last two one for each dimension.
ROW_STRIDES: dict[str, Callable[[int, Sequence[int]], tuple[int, ...]]] = {
    "adjoin": lambda n, leading: row_strides(leading, n),
    "odd gap": lambda n, leading: row_strides(leading, n + 1 + n % 2),
    "gap of 8": lambda n, leading: row_strides(leading, n + 8),
    "padded": lambda n, leading: row_strides(leading, (n // 16 + 1) * 16),
    "wide": lambda n, leading: row_strides(leading, 2 * n + 8),
    "expanded": lambda n, leading: row_strides(leading, 0),
    "heads": lambda n, leading: (n * (math.prod(leading[1:]) + 2), *row_strides(leading[1:], n))[: len(leading)],
    "transposed": lambda n, leading: _swapped(row_strides(_swapped(leading), n)),
}
# Elements to an output between x's rows, where those are wide.
_BESIDE = 4

CASTS = ("after_weight", "after_weight", "before_weight")

# Elements before the first; 8 of a 16-bit type are 16 bytes.
OFFSETS = (0, 0, 8, 1, 3)


@dataclass(frozen=True)
class Operand:
    """A tensor as far as a kernel may depend on it: its type, what its rows are apart, and what its address is."""

    dtype: torch.dtype
    rows: str = "adjoin"
    offset: int = 0

    def memory(
        self, shape: Sequence[int], device: torch.device, values: torch.Tensor | None, *, shared: bool = False
    ) -> Memory:
        """A tensor like this, filled with values or poison, with room for another between its rows if it is shared."""
        beside = shape[-1] + _BESIDE if shared else None
        strides = (*ROW_STRIDES[self.rows](shape[-1], shape[:-1]), 1)
        return Memory(shape, strides, self.dtype, device, self.offset, values, beside)


class Kind(SimpleNamespace):
    """All that may decide which kernels a problem takes, M aside: a value for each name of a table of options."""


# By name: what a kind may have there, from the names before. The simplest comes first: hypothesis shrinks towards it.
Options = Mapping[str, Callable[[Kind], Sequence[Any]]]


def draw_kind(choose: Choose, options: Options, lengths: Sequence[int]) -> Kind:
    """Return a random legal kind of a table, of one of some row lengths."""
    k = Kind(n=choose(lengths))
    for name, of in options.items():
        setattr(k, name, choose(of(k)))
    return k


ROWS = tuple(Operand(*parts) for parts in product(FLOATS, ROW_STRIDES, OFFSETS))
VECTORS = tuple(Operand(dtype, offset=offset) for dtype, offset in product(FLOATS, OFFSETS))
_ABSENT = (None,) * (len(VECTORS) // 2)


def _outputs(dtype: torch.dtype) -> tuple[Operand, ...]:
    return tuple(Operand(dtype, rows, offset) for rows, offset in product(ROW_STRIDES, (0, 1, 8)) if rows != "expanded")


def _replaceable(k: Any, dtype: torch.dtype, *names: str) -> tuple[str, ...]:
    """Which operands an output of a type may be written over."""
    operands = [(name, getattr(k, name)) for name in names]
    return tuple(
        name for name, operand in operands if operand and operand.dtype is dtype and operand.rows != "expanded"
    )


def _out_options(k: Any) -> tuple[Operand | str, ...]:
    given = _outputs(k.out_dtype)
    words = [*_replaceable(k, k.out_dtype, "x", "residual")]
    if k.x.rows == "wide" and k.x.dtype.itemsize == k.out_dtype.itemsize:
        words.append("beside")
    return (*("new",) * len(given), *given, *words * 4)


def _residual_out_options(k: Any) -> tuple[Operand | str, ...]:
    if k.fadd != "pre_add_store":
        return ("new",)
    given = _outputs(k.residual.dtype)
    words = [word for word in _replaceable(k, k.residual.dtype, "residual", "x") if word != k.out]
    return (*("new",) * len(given), *given, *words * 6)


# Calls of `layernorm2d_fwd` and `rmsnorm2d_fwd`. `out` and `residual_out` are operands, or words: "new" (left to the
# call), "x", "residual" (that very tensor), "beside" (between the rows of x).
CALLS: Options = {
    "norm": lambda k: ("layer", "rms"),
    "x": lambda k: ROWS,
    "fadd": lambda k: ("none", "pre_add_store", "pre_add", "post_add"),
    "residual": lambda k: (None,) if k.fadd == "none" else ROWS,
    "weight": lambda k: (*_ABSENT, *VECTORS),
    "bias": lambda k: (*_ABSENT, *VECTORS) if k.norm == "layer" else (None,),
    "x_bias": lambda k: (*_ABSENT * 4, *VECTORS),
    "fquant": lambda k: ("none", "none", *(("dynamic", "smooth_dynamic") if k.fadd != "post_add" else ())),
    "smooth_scale": lambda k: VECTORS if k.fquant == "smooth_dynamic" else (None,),
    "out_dtype": lambda k: (k.x.dtype, *FLOATS) if k.fquant == "none" else QUANTISED,
    "scale_dtype": lambda k: (torch.float32,) if k.fquant == "none" else (torch.float32, *FLOATS),
    "rounding": lambda k: ("nearest", "truncate") if k.out_dtype is torch.int8 else ("nearest",),
    "cast": lambda k: CASTS,
    "save_mv": lambda k: (False, True),
    "out": _out_options,
    "residual_out": _residual_out_options,
}

# Calls of `renormed_layernorm2d_fwd` and `renormed_rmsnorm2d_fwd`, which take contiguous outputs alone.
RENORMED_CALLS: Options = {
    **{name: of for name, of in CALLS.items() if name not in ("scale_dtype", "rounding", "out", "residual_out")},
    "fadd": lambda k: ("post_add_norm",),
    "x_bias": lambda k: (None,),
    "next_weight": CALLS["weight"],
    "next_bias": CALLS["bias"],
    "scale_dtype": lambda k: (torch.float32,),
    "rounding": lambda k: ("nearest",),
    "out": lambda k: ("new", Operand(k.out_dtype)),
    "residual_out": lambda k: ("new", Operand(k.residual.dtype)),
}


# The words of `fadd` of calls that return a sum.
STORING = ("pre_add_store", "post_add_norm")

# What rows hold: how far about what. The mean and spread of each row are drawn from these.
_SPREADS = (1.0, 1.0, 0.02, 30.0, 0.0)
_CENTRES = (0.0, 0.0, -3.0, 100.0)
_EPSILONS = (1e-5, 1e-6, 0.0, 1e-12, 1e-3, 1, 7.5)
_WEIGHT_OFFSETS = (0.0, 1.0, -1.0, 0.25, 1)

# Rows take fp64 copies; more than so many elements would take the device's memory.
MOST_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Call:
    """A legal call: a kind, and what kernels are told at run time.

    Attributes:
        kind: what may decide which kernel runs.
        leading: x's shape without N.
        eps: see `layernorm2d_fwd`.
        weight_offset: see `rmsnorm2d_fwd`.
        coded: whether modes are given as ck_tile's integers.
        seed: of the values.
        poisoned: whether every other row of x holds a NaN or an infinity.
    """

    kind: Kind
    leading: tuple[int, ...]
    eps: float
    weight_offset: float
    coded: bool
    seed: int
    poisoned: bool = False

    def made(self, device: torch.device) -> MadeCall:
        """Its tensors, on a device."""
        return (MadeRenormed if self.kind.fadd == "post_add_norm" else MadeCall)(self, device)


def draw_leading(
    choose: Choose, kind: Kind, shapes: Sequence[tuple[int, ...]], most: int = MOST_ELEMENTS
) -> tuple[int, ...]:
    """A random shape of what is before rows; of at most so many elements."""
    leading = choose(shapes)
    return leading if math.prod(leading) * kind.n <= most else (most // kind.n,)


def draw_call(choose: Choose, kind: Kind, shapes: Sequence[tuple[int, ...]], most: int = MOST_ELEMENTS) -> Call:
    """A random call of a kind."""
    leading = draw_leading(choose, kind, shapes, most)
    offsets = _WEIGHT_OFFSETS if kind.norm == "rms" and kind.weight is not None else (0.0,)
    told = choose(_EPSILONS), choose(offsets), choose((False, True)), choose(range(1 << 16))
    return Call(kind, leading, *told, poisoned=choose((False, False, True)))


_ROW_OPERANDS = ("x", "residual")
_VECTOR_OPERANDS = ("weight", "bias", "x_bias", "smooth_scale", "next_weight", "next_bias")


class Made(ABC):
    """The tensors of a problem in memory that is watched."""

    def __init__(self, problem: Any, device: torch.device) -> None:
        self._problem, self._device = problem, device
        self._m, self._n = math.prod(problem.leading), problem.kind.n
        self._memories: dict[str, Memory] = {}

    @abstractmethod
    def run(self) -> Any:
        """Make the calls of the problem."""

    def check_untouched(self, *, refused: bool = False) -> None:
        """Look at all memory that the call may not write: inputs, guards, gaps, and outputs too if it was refused.

        Raises:
            AssertionError: it did.
        """
        for name, memory in self._memories.items():
            memory.check(name, refused=refused)

    def check(self, output: Any) -> None:
        """Hold everything that came back, and all memory, to what the call is to do.

        Raises:
            AssertionError: something is wrong.
        """
        try:
            self.check_untouched()
            self._check(output)
        except AssertionError as error:
            raise AssertionError(f"{error}\nin {self._problem}") from None

    @abstractmethod
    def _check(self, output: Any) -> None:
        """Hold what came back to what the call is to do."""


class MadeCall(Made):
    """A call's tensors in memory that is watched, and its arguments.

    Attributes:
        call: the call.
        arguments: by name, what the function is given.
    """

    def __init__(self, call: Call, device: torch.device) -> None:
        super().__init__(call, device)
        self.call = call
        kind, n = call.kind, call.kind.n
        shape = (*call.leading, n)
        values = self._values(call.seed)
        for name, tensor in values.items():
            operand, shared = getattr(kind, name), name == "x" and kind.out == "beside"
            size = shape if name in _ROW_OPERANDS else (n,)
            self._memories[name] = operand.memory(size, device, tensor, shared=shared)
        inputs: dict[str, Any] = {
            name: self._memories[name].view if name in values else None
            for name in (*_ROW_OPERANDS, *_VECTOR_OPERANDS)
            if hasattr(kind, name)
        }
        # As they were before the call, which may write over them.
        self._before = {name: None if tensor is None else tensor.clone() for name, tensor in inputs.items()}
        out = self._output("out", kind.out, kind.out_dtype, shape)
        residual_out = None
        if kind.residual is not None and kind.fadd in STORING:
            residual_out = self._output("residual_out", kind.residual_out, kind.residual.dtype, shape)
        given: dict[str, Any] = {
            **inputs,
            "eps": call.eps,
            "weight_offset": call.weight_offset,
            "fadd": FusedAdd(kind.fadd).code if call.coded else kind.fadd,
            "fquant": FusedQuant(kind.fquant).code if call.coded else kind.fquant,
            **{name: getattr(kind, name) for name in ("out_dtype", "scale_dtype", "rounding", "cast", "save_mv")},
            "out": out,
            "residual_out": residual_out,
        }
        parameters = inspect.signature(self.function).parameters
        self.arguments = {name: given[name] for name in parameters if name in given}
        if call.coded:
            # What is left out and what is passed as its default are the same call.
            usual = kind.residual.dtype if kind.residual is not None and kind.fadd == "post_add" else kind.x.dtype
            defaults = {name: parameter.default for name, parameter in parameters.items()}
            defaults["out_dtype"] = usual if kind.fquant == "none" else torch.int8
            self.arguments = {
                name: value for name, value in self.arguments.items() if value != defaults[name] or name == "weight"
            }

    @property
    def function(self) -> Callable[..., LayerNormOutput]:
        """Which function is called."""
        return FORWARD[self.call.kind.norm]

    def run(self) -> LayerNormOutput:
        """The call, its first two arguments by position."""
        named = dict(self.arguments)
        first, second, *_ = inspect.signature(self.function).parameters
        return self.function(named.pop(first), named.pop(second), **named)

    def _check(self, output: LayerNormOutput) -> None:
        self._check_form(output)
        if self._m:
            self._check_values(self.call.kind, self._before, output)

    def _check_form(self, output: LayerNormOutput) -> None:
        kind = self.call.kind
        shape, rows = (*self.call.leading, kind.n), self.call.leading
        expected = {
            "y": (shape, kind.out_dtype),
            "residual_out": (shape, kind.residual.dtype) if kind.fadd in STORING and kind.residual else None,
            "y_scale": (rows, kind.scale_dtype) if kind.fquant != "none" else None,
            "mean": (rows, torch.float32) if kind.save_mv and kind.norm == "layer" else None,
            "rstd": (rows, torch.float32) if kind.save_mv else None,
        }
        for name, tensor in output._asdict().items():
            found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            assert found == expected[name], f"{name} is {found}; it is to be {expected[name]}"
            given = self.arguments.get({"y": "out"}.get(name, name))
            if given is not None:
                same = given.data_ptr() == tensor.data_ptr() and given.stride() == tensor.stride()
                assert same, f"{name} is not the tensor that was given for it"
            elif tensor is not None:
                assert tensor.is_contiguous(), f"{name} has strides {tensor.stride()}"

    def _check_values(self, kind: Kind, before: Mapping[str, Any], output: LayerNormOutput) -> None:
        call, m, n = self.call, self._m, self._n
        x, residual = before["x"], before["residual"]
        is_after = kind.fadd == "post_add"
        s = oracle.total(x, before["x_bias"], None if is_after else residual).reshape(m, n)
        if output.residual_out is not None:
            _check_sum(output.residual_out.reshape(m, n), s)
            s = s.to(output.residual_out.dtype).float()
        found = oracle.statistics(s, kind.norm == "layer", call.eps)
        finite = s.isfinite().all(-1)
        rows = finite & found.determined
        h = oracle.rounded_first(found.h, kind.cast, kind.out_dtype, x.dtype)
        y, _ = oracle.affine(h, before["weight"], before["bias"], call.weight_offset)
        if is_after and residual is not None:
            y = oracle.added(y, residual.reshape(m, n))
        if output.mean is not None:
            oracle.hold("mean", output.mean.reshape(m), _column(found.mean), rows)
        if output.rstd is not None:
            oracle.hold("rstd", output.rstd.reshape(m), _column(found.rstd), rows)
        if output.y_scale is None:
            oracle.hold("y", output.y.reshape(m, n), y, rows)
            lost = output.y.reshape(m, n).isnan().any(-1)
        else:
            smooth = before["smooth_scale"]
            z = y if smooth is None else oracle.scaled(y, smooth)
            y_scale = output.y_scale.reshape(m)
            oracle.hold_quantised(output.y.reshape(m, n), y_scale, z, Rounding(kind.rounding), rows)
            lost = ~y_scale.isfinite()
        assert bool((lost | finite).all()), "a row with a NaN or an infinity came out as if it had none"

    def _output(self, name: str, where: Operand | str, dtype: torch.dtype, shape: Sequence[int]) -> Any:
        if where == "new":
            return None
        if where == "beside":
            return self._memories["x"].neighbour(dtype)
        if isinstance(where, str):
            return self._memories[where].may_be_written()
        self._memories[name] = where.memory(shape, self._device, None)
        return self._memories[name].may_be_written()

    def refill(self, seed: int) -> None:
        """Put other values into the same tensors, outputs poisoned again."""
        values = self._values(seed)
        for name, memory in self._memories.items():
            memory.fill(values.get(name))
            if name in values:
                self._before[name] = memory.view.clone()

    def _values(self, seed: int) -> dict[str, torch.Tensor]:
        """Values of each operand there is."""
        generator = torch.Generator(self._device).manual_seed(seed)
        every = (*_ROW_OPERANDS, *_VECTOR_OPERANDS)
        names = [name for name in every if getattr(self.call.kind, name, None) is not None]
        made = {}
        for name in names:
            dtype = getattr(self.call.kind, name).dtype
            if name in _ROW_OPERANDS:
                made[name] = self._rows(name, dtype, generator)
            else:
                made[name] = torch.randn(self._n, generator=generator, device=self._device).to(dtype)
        return made

    def _rows(self, name: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        m, n, call = self._m, self.call.kind.n, self.call
        draw = partial(torch.randint, size=(m, 1), generator=generator, device=self._device)
        spread = torch.tensor(_SPREADS, device=self._device)[draw(len(_SPREADS))]
        centre = torch.tensor(_CENTRES, device=self._device)[draw(len(_CENTRES))]
        values = (torch.randn((m, n), generator=generator, device=self._device) * spread + centre).to(dtype)
        if name == "x" and call.poisoned:
            # Numbers of their own, so that all else is as in the call without poison.
            generator = torch.Generator(self._device).manual_seed(call.seed)
            draw = partial(torch.randint, size=(m, 1), generator=generator, device=self._device)
            wrong = torch.tensor((math.nan, math.inf, -math.inf), device=self._device, dtype=dtype)
            values[1::2].scatter_(1, draw(n)[1::2], wrong[draw(3)[1::2]])
        return values.reshape(*call.leading, n)


class MadeRenormed(MadeCall):
    """The same of two norms: the second is that of the sum as it was stored."""

    @property
    def function(self) -> Callable[..., LayerNormOutput]:
        """Which function is called."""
        function: Callable[..., LayerNormOutput] = getattr(normforge, f"renormed_{self.call.kind.norm}norm2d_fwd")
        return function

    def _check_form(self, output: LayerNormOutput) -> None:
        first: dict[str, Any] = {
            name: None if each is None else each[..., 0].clone() for name, each in _statistics_of(output).items()
        }
        super()._check_form(output._replace(**first))

    def _check_values(self, kind: Kind, before: Mapping[str, Any], output: LayerNormOutput) -> None:
        call, m, n = self.call, self._m, self._n
        total, both = output.residual_out, _statistics_of(output)
        x, residual = before["x"], before["residual"]
        assert total is not None
        rows = x.reshape(m, n).float()
        found = oracle.statistics(rows, kind.norm == "layer", call.eps)
        # Without 16 bits in x or y neither norm rounds first.
        cast = kind.cast if {x.dtype, kind.out_dtype} & {torch.float16, torch.bfloat16} else "after_weight"
        h = oracle.rounded_first(found.h, cast, residual.dtype, x.dtype)
        s, _ = oracle.affine(h, before["weight"], before["bias"], call.weight_offset)
        finite = rows.isfinite().all(-1)
        oracle.hold(
            "residual_out", total.reshape(m, n), oracle.added(s, residual.reshape(m, n)), finite & found.determined
        )
        for name, each in both.items():
            if each is not None:
                oracle.hold(name, each[..., 0].reshape(m), _column(getattr(found, name)), finite & found.determined)
        # The second norm is a call of the norm alone, of the stored sum.
        alone = Kind(**{**vars(kind), "x": kind.residual, "fadd": "none", "residual": None, "cast": cast})
        own = {"x": total, "weight": before["next_weight"], "bias": before["next_bias"], "residual": None}
        last: dict[str, Any] = {name: None if each is None else each[..., 1].clone() for name, each in both.items()}
        super()._check_values(alone, {**before, **own}, output._replace(residual_out=None, **last))


def _statistics_of(output: LayerNormOutput) -> dict[str, torch.Tensor | None]:
    return {"mean": output.mean, "rstd": output.rstd}


def _check_sum(got: torch.Tensor, s: torch.Tensor) -> None:
    want = s.to(got.dtype)
    wrong = ~((got == want) | (got.isnan() & want.isnan()))
    assert not wrong.any(), f"residual_out: {int(wrong.sum())} elements are not x + x_bias + residual, rounded once"


def _column(bounded: oracle.Bounded) -> oracle.Bounded:
    return oracle.Bounded(bounded.value.flatten(), bounded.error.flatten())
