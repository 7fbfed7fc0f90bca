"""A call of a mode, with what may vary without another instance, held against the fp64 oracle as `normforge run` does.

The tensors are those of the command but for their types, which the command does not mix, and for those left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from normforge import reference
from normforge.calls.outputs import NormGradients, QuantisedGradients
from normforge.codegen.families import Kind, Parameter
from normforge.codegen.model import Mode
from normforge.codegen.parameters import BACKWARD, QUANTISED_BWD, family_of
from normforge.codegen.values import INPUT_DTYPES, Direction, DType, FusedAdd
from normforge.dtypes import TORCH_DTYPES, arguments_of
from normforge.families import public
from normforge.reference import quantised as quantisation_reference
from normforge.tools import checked_run, problem, problem_tensors
from normforge.tools.compare import (
    Finding,
    columns_of,
    compare_amax,
    compare_columns,
    compare_gradients,
    compare_quantised,
    numbers_of,
)
from normforge.tools.measured_run import Run

from .bare import saved

# The families of backward functions that callers have.
_BACKWARD = (BACKWARD, QUANTISED_BWD)

Draw = Callable[[Parameter], torch.Tensor | None]
_draws: Callable[..., Draw] = problem_tensors._drawer


@dataclass(frozen=True)
class Problem:
    """One call: a mode, forward or backward, rows, and what may vary without another instance.

    Attributes:
        mode: what is computed.
        m: rows; of samples that are differentiated there are two, of at least 8 rows each.
        n: row length; of groups there are two side by side.
        stride: elements from row to row; None is a row's length.
        dtypes: tensor name to element type, for those that need not be x's.
        absent: tensors that are left out.
        uneven: whether the last row starts far from its other values, which a kernel takes as their mean at first.
    """

    mode: Mode
    m: int
    n: int
    stride: int | None = None
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    uneven: bool = False

    def check(self, device: str) -> str:
        """Run the call, hold everything it returns against the oracle, and return the name of the instance."""
        place = torch.device(device)
        if family_of(self.mode) in _BACKWARD:
            assert self._wrong_gradients(place) == [], self
            return ""
        with (
            mock.patch.object(problem_tensors, "_drawer", self._draws),
            mock.patch.object(checked_run, "poisoned_outputs", return_value={}),
        ):
            run: Run[Any] = checked_run.prepare(self._of_the_command, place)
            wrong = [finding for finding in run.validate(run.call()) if not finding.ok]
        assert wrong == [], self
        return run.names()[0]

    @property
    def _of_the_command(self) -> problem.Problem:
        mode, groups = self.mode, 2 if self.mode.grouped else 1
        rows = max(16, self.m + self.m % 2) if mode.modulated and mode.is_backward else self.m
        # The command's mode is that of the forward call, which stores the sum of rows that it gates.
        fadd = FusedAdd.PRE_ADD_STORE if mode.x_gate else mode.fadd
        forward = mode if family_of(mode) in _BACKWARD else replace(mode, direction=Direction.FORWARD, fadd=fadd)
        return problem.Problem(
            rows,
            groups * self.n,
            forward,
            mode.is_backward,
            strides=problem.Strides.all(groups * (self.stride or self.n)),
            samples=(2 if mode.is_backward else rows) if mode.modulated else 0,
            group=self.n if mode.grouped else 0,
            scale_layout=mode.scale_layout,
            dy_format=mode.dy_format,
        )

    def _draws(self, of: problem.Problem, device: torch.device, seed: int) -> Draw:
        draw = _draws(of, device, seed)

        def drawn(row: Parameter) -> torch.Tensor | None:
            if row.name in self.absent or (row.name == "dresidual_out" and not self.mode.fadd.stores):
                return None
            tensor, dtype = draw(row), self.dtypes.get(row.name)
            if self.uneven and row.name == "x" and tensor is not None:
                tensor.flatten(0, -2)[-1, : self.n // 4] = 64
            # fp8 stays so.
            if tensor is None or dtype is None or tensor.itemsize == 1:
                return tensor
            # As strided as it was.
            other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=TORCH_DTYPES[dtype], device=device)
            return other.copy_(tensor)

        return drawn

    def _wrong_gradients(self, device: torch.device) -> list[Finding]:
        """Of a plain norm, whose command reads the stored sum, and no x_bias beside it."""
        mode, draw = self.mode, self._draws(self._of_the_command, device, problem_tensors.SEED)
        given = arguments_of(mode, lambda row: None if row.kind is Kind.PER_ROW else draw(row))
        given |= saved(mode, given["x"], given.get("x_bias"))
        before = {name: each.clone() for name, each in given.items() if isinstance(each, torch.Tensor)}
        wants = {
            "dx": True,
            "dweight": given.get("weight") is not None,
            "dbias": mode.norm.centres,
            "dx_bias": mode.x_bias,
            "ddropped": mode.dropout,
        }
        due = tuple(name for name, wanted in wants.items() if wanted)
        found = getattr(public, family_of(mode).functions[mode.norm])(**given, wants=due)
        assert all(torch.equal(given[name], tensor) for name, tensor in before.items()), self
        if mode.columnwise.writes:
            check_both_ways(mode, found)
            found = NormGradients(found.dx, found.dweight, found.dbias, None)
            given = {name: each for name, each in given.items() if name in [row.name for row in BACKWARD.parameters]}
        findings = compare_gradients(found, reference.BACKWARD[mode.norm](**given), due)
        return [finding for finding in findings if not finding.ok]


def check_both_ways(mode: Mode, actual: QuantisedGradients) -> None:
    """Fail unless dx, as it was returned, is quantised along rows and along columns to the bit."""
    dx = actual.dx.flatten(0, -2).float()
    shape = torch.Size((dx.shape[0], -(-dx.shape[1] // mode.group_size.code)))
    by_row = numbers_of(actual.rowwise_scale, mode, shape).reshape(shape)
    assert_in_blocks(mode, dx, actual.rowwise.flatten(0, -2), by_row)
    assert_in_blocks(mode, dx.t(), *columns_of(actual, mode))


def assert_in_blocks(mode: Mode, rows: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> None:
    """Fail unless data are rows that were quantised in groups, each by its scale, to the bit; all of a NaN is open."""
    # On a card torch divides by a number otherwise, and powers of two may be a bit off.
    rows, data, scale = rows.cpu(), data.cpu(), scale.cpu()
    size, n, smallest = mode.group_size.code or rows.shape[1], rows.shape[1], torch.finfo(torch.float32).smallest_normal
    blocks = torch.nn.functional.pad(rows, (0, -n % size)).reshape(rows.shape[0], -1, size)
    largest = mode.dtype_out.qmax
    expected = blocks.abs().amax(-1) / largest
    expected = torch.where(expected < smallest, 1.0, expected)
    if mode.scale_format.rounds_up:
        expected = torch.exp2(expected.log2().ceil())
    q = (blocks * (1 / expected).unsqueeze(-1)).clamp(-largest, largest).to(data.dtype).flatten(-2)[:, :n]
    known = expected.isfinite()
    assert torch.equal(scale[known], expected[known].double()), mode.name
    assert not scale[~known].isfinite().any(), mode.name
    same = q.contiguous().view(torch.uint8) == data.contiguous().view(torch.uint8)
    assert (same | ~known.repeat_interleave(size, -1)[:, :n]).all(), mode.name


def check_quantised(mode: Mode, arguments: dict[str, Any], actual: Any) -> Any:
    """Hold every output of a call of quantised norms against the oracle, and return it."""
    stored = actual.residual_out if mode.fadd.renorms else None
    expected = quantisation_reference.FORWARD[mode.norm](**arguments, stored=stored)
    scale = actual.y_scale
    if scale is not None:
        scale = numbers_of(scale, mode, expected.amax.shape, arguments.get("global_scale"))
    wrong = [finding for finding in compare_quantised(actual, scale, expected) if not finding.ok]
    if getattr(actual, "columnwise", None) is not None:
        columns = compare_columns(columns_of(actual, mode), expected)
        wrong += [finding for finding in columns if not finding.ok]
    if getattr(actual, "amax", None) is not None:
        wrong += [finding for finding in [compare_amax(actual.amax, [expected])] if not finding.ok]
    assert not wrong, f"{mode.name}: {wrong}"
    return actual


def mixed_dtypes(mode: Mode, salt: int) -> dict[str, DType]:
    """An element type for every tensor whose type is free, another mix for every salt."""
    names = [
        row.name
        for row in family_of(mode).inputs
        if row.name != "x" and row.kind not in (Kind.SCALE, Kind.SCALES, Kind.VALUE, Kind.RANDOM, Kind.PER_ROW)
    ]
    return {name: INPUT_DTYPES[(salt + index) % len(INPUT_DTYPES)] for index, name in enumerate(names)}
