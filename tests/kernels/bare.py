"""Kernels launched on the CPU without the runtime, and what they return against the fp64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from normforge import LayerNormOutput, reference
from normforge.calls.outputs import NormGradients
from normforge.codegen.model import Mode
from normforge.codegen.values import Part, Pipeline
from normforge.dtypes import TORCH_DTYPES
from normforge.selection import on_demand
from normforge.tools.compare import compare_gradients

from ..calling import agree

T = TypeVar("T")

EPS = 1e-5
# What a slot of an exchange holds before a program has published there.
EMPTY = -1
# RMSNorm's weight_offset.
OFFSET = 0.5
_ALIKE: dict[str, Any] = {
    "eps": EPS,
    "weight_offset": OFFSET,
    "ROW_ALIGNMENT": 1,
    "STAGES": 1,
    "PAIRED": False,
    "PTX": False,
    "PDL": False,
}


def run(
    mode: Mode,
    part: Pipeline | Part,
    grid: tuple[int, ...],
    tensors: dict[str, torch.Tensor],
    constants: dict[str, Any],
) -> None:
    """Launch a kernel; values are matched with parameters by name, and one that there is no value for is None.

    Args:
        mode: the kernel's, whose module is generated with every pipeline.
        part: which of the mode's kernels.
        grid: programs in each dimension.
        tensors: what it reads and writes, by name, x among them.
        constants: what differs from one launch of a mode to the next.
    """
    kernel, x = on_demand.generate(mode, 64, "a test").load(part), tensors["x"]
    values = _ALIKE | {"M": len(x), "N": x.shape[1], "row_stride": x.stride(0)} | constants
    for name, tensor in tensors.items():
        values[f"{name}_ptr"] = tensor
        if tensor.dim() == 2:
            values[f"{name}_row_stride"] = tensor.stride(0)
    kernel[grid](*map(values.get, kernel.arg_names))


def run_team(launch: Callable[[dict[str, torch.Tensor]], T], slices: int, rows: int) -> T:
    """Return what a launch makes of rows that several programs share, through the exchange that it is given.

    The interpreter runs one program after another, so that a program finds empty slots where a later one publishes.
    What a program publishes depends on its own slice alone: a second launch finds what the first one published.
    """
    exchange = torch.full((rows * slices,), EMPTY)
    # A row of one slice has nobody to wait for.
    for _ in range(slices > 1):
        launch({"exchange": exchange})
    return launch({"exchange": exchange})


def saved(mode: Mode, x: torch.Tensor, x_bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The statistics that a forward call would have saved."""
    of = reference.FORWARD[mode.norm](x, x_bias=x_bias, eps=EPS, save_mv=True)
    return {name: each for name, each in (("mean", of.mean), ("rstd", of.rstd)) if each is not None}


def hard_rows(n: int, large: float = 1e6) -> dict[str, torch.Tensor]:
    """Rows whose mean, or some of whose values, are large beside what is left when they are taken off."""
    noise, at = torch.randn(n), torch.arange(n)
    # Around the first values of lanes and of chunks of 256.
    places = {"the_start": 0, "a_lane": 3, "the_last_lane": 255, "the_second_chunk": 256, "the_end": n - 1}
    outliers = {f"outlier_at_{name}": torch.where(at == min(to, n - 1), large, noise) for name, to in places.items()}
    return outliers | {
        "noise": noise,
        "offset": 1e4 + 1e-2 * noise,
        "offset_by_steps": 1e4 + 64 * noise.round(),
        "negative_offset": -0.3 * large + noise,
        "constant": torch.full((n,), 12345.678),
        "zeros": torch.zeros(n),
        "every_lane_starts_far_away": torch.where(at < 256, 1e4, 1e-2 * noise),
        "half_the_lanes_start_far_away": torch.where(at < 128, 0.1 * large, noise),
        "two_levels": torch.where(at % 2 == 0, 1e4, -1e4) + 1e-2 * noise,
        "slices_far_apart": noise + 1e4 * (at // 512 % 2),
    }


def run_backward(
    mode: Mode, part: Pipeline | Part, grid: tuple[int, ...], given: dict[str, torch.Tensor], constants: dict[str, Any]
) -> NormGradients:
    """Launch a backward kernel whose grid ends in the programs that share the rows, and add up what they leave.

    Statistics are among the tensors that are given, and dx only where it is wanted.
    """
    names = ["dweight", *(["dbias"] if mode.norm.centres else []), *(["dx_bias"] if mode.x_bias else [])]
    partials = {name: torch.full((grid[-1], given["x"].shape[1]), float("nan")) for name in names}
    run(mode, part, grid, given | partials, {"dx_row_stride": given["x"].shape[1], **constants})
    sums = {name: partial.sum(0) for name, partial in partials.items()}
    return NormGradients(given.get("dx"), sums["dweight"], sums.get("dbias"), sums.get("dx_bias"))


def run_forward(
    mode: Mode, part: Pipeline | Part, grid: tuple[int, ...], given: dict[str, torch.Tensor], constants: dict[str, Any]
) -> LayerNormOutput:
    """Launch a forward kernel, whose y, unless it is given, and statistics begin as NaN."""
    m, n = given["x"].shape
    y = torch.full((m, n), float("nan"), dtype=TORCH_DTYPES[mode.dtype_out])
    mean, rstd = (torch.full((m,), float("nan")) for _ in range(2))
    tensors = {"y": y, "mean": mean, "rstd": rstd} | given
    run(mode, part, grid, tensors, constants)
    return LayerNormOutput(
        tensors["y"],
        given.get("residual_out"),
        None,
        mean if mode.save_mv and mode.norm.centres else None,
        rstd if mode.save_mv else None,
    )


def check_forward(actual: LayerNormOutput, mode: Mode, x: torch.Tensor, vectors: dict[str, Any]) -> None:
    """Hold every output against the oracle's."""
    asked: dict[str, Any] = {"eps": EPS, "save_mv": mode.save_mv, "cast": mode.cast, "fadd": mode.fadd}
    asked["out_dtype"] = TORCH_DTYPES[mode.dtype_out]
    asked |= {} if mode.norm.centres else {"weight_offset": OFFSET}
    agree(actual, reference.FORWARD[mode.norm](x, **vectors, **asked))


def check_gradients(actual: NormGradients, mode: Mode, operands: dict[str, Any]) -> None:
    """Hold every gradient there is against the oracle's."""
    asked: dict[str, Any] = {} if mode.norm.centres else {"weight_offset": OFFSET}
    expected = reference.BACKWARD[mode.norm](**operands, **asked, cast=mode.cast)
    findings = compare_gradients(actual, expected)
    assert len(findings) == sum(gradient is not None for gradient in actual)
    assert all(finding.ok for finding in findings), findings
