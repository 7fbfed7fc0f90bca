"""Random calls, on GPUs that are not here: whatever they bring, a recording of them comes to what they launch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import normforge
from normforge.ahead_of_time.compile_keys import recorded_keys_for
from normforge.calls import backend, first, plan, road
from normforge.families.group import row as group
from normforge.kernels import launcher
from normforge.kernels.gpu import Target, named_target
from normforge.kernels.launcher import Launcher
from normforge.upstream import triton_launcher

from ..calling import FLOATS, FORWARD, QUANTISED
from ..thorough import first_of_each

Shape = tuple[int, ...]
LEADING: Sequence[Shape] = ((3,), (2, 2), (2, 3, 2), (260,), (30, 11))
# Rows that start anywhere are among them, and those that every pipeline takes.
LENGTHS = (32, 33, 100, 1024, 2053, 4096, 5137, 9001, 17000)


@contextmanager
def launching_nothing(target: Target) -> Iterator[set[str]]:
    """Have calls on the CPU choose kernels of a GPU, of which none is compiled or launched; gives their keys."""
    met: set[str] = set()

    class Noting(Launcher):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            if given[-1] is not None:
                met.add(self.key.portable)

    with ExitStack() as patches:

        def put(place: object, name: str, value: object) -> None:
            patches.enter_context(mock.patch.object(place, name, return_value=value))

        put(plan, "target_of", target)
        patches.enter_context(mock.patch.object(plan, "Launcher", Noting))
        for module in (first, group, road):
            put(module, "require_device", None)
        put(backend, "_interpreting", True)
        put(launcher, "obtain", None)
        put(triton_launcher, "bind", lambda grid, values: None)
        put(torch.cuda, "device_count", 1)
        yield met


class Draw:
    """What random calls bring."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.one_of = self.random.choice

    def often(self, share: float = 0.5) -> bool:
        return self.random.random() < share

    def rows(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Rows that adjoin or lie apart, on several strides or one, from an aligned address or not."""
        *outer, n = shape
        kind = self.one_of(("whole", "whole", "gaps", "offset", "heads", "transposed", "expanded"))
        if kind == "gaps":
            return torch.zeros(*outer, n + self.one_of((1, 2, 4, 8, 16, 24)), dtype=dtype)[..., :n]
        if kind == "offset":
            offset = self.one_of((1, 2, 4, 8))
            return torch.zeros(torch.Size(shape).numel() + offset, dtype=dtype)[offset:].view(shape)
        if kind == "heads" and len(outer) > 1:
            wider = (*outer[:-1], outer[-1] + self.one_of((1, 2, 4)), n)
            return torch.zeros(wider, dtype=dtype)[..., : outer[-1], :]
        if kind == "transposed" and len(outer) > 1:
            return torch.zeros(outer[1], outer[0], *outer[2:], n, dtype=dtype).transpose(0, 1)
        if kind == "expanded":
            return torch.zeros(n, dtype=dtype).expand(shape)
        return torch.zeros(shape, dtype=dtype)

    def place(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The same of rows that can be written."""
        found = self.rows(shape, dtype)
        return found if 0 not in found.stride() else torch.zeros(shape, dtype=dtype)

    def vector(self, n: int) -> torch.Tensor:
        offset = self.one_of((0, 0, 1, 8))
        return torch.zeros(n + offset, dtype=self.one_of(FLOATS))[offset:]

    def leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(self.often(0.8))

    def trained(self, *outputs: torch.Tensor) -> None:
        due = [output for output in outputs if output.requires_grad]
        torch.autograd.backward(due, [self.rows(tuple(output.shape), output.dtype) for output in due])


def forward(draw: Draw) -> None:
    """One of the forward functions."""
    n, dtype, norm = draw.one_of(LENGTHS), draw.one_of(FLOATS), draw.one_of(("layer", "rms"))
    shape = (*draw.one_of(LEADING if n < 9000 else LEADING[:4]), n)
    options: dict[str, Any] = {"save_mv": draw.often(0.3), "x_bias": draw.vector(n) if draw.often(0.2) else None}
    x = draw.rows(shape, dtype)
    if draw.often(0.15):
        x = x.to(draw.one_of((torch.float8_e4m3fn, torch.float8_e5m2)))
        scale = draw.one_of((torch.ones(1), torch.ones(*shape[:-1], 1), torch.ones(9)[5]))
        options |= {"x_scale": scale, "out_dtype": draw.one_of(FLOATS), "x_bias": None}
    weights = [draw.vector(n) if draw.often(0.8) else None for _ in range(2 if norm == "layer" else 1)]
    if draw.often():
        options |= {"residual": draw.rows(shape, draw.one_of(FLOATS)), "fadd": "pre_add_store"}
        if draw.often():
            options |= {"fadd": "pre_add"}
        elif draw.often(0.3):
            options |= {"residual_out": draw.place(shape, options["residual"].dtype)}
    if draw.often(0.4):
        options |= {"fquant": "dynamic", "out_dtype": draw.one_of(QUANTISED), "scale_dtype": draw.one_of(FLOATS)}
        if draw.often():
            options |= {"fquant": "smooth_dynamic", "smooth_scale": draw.vector(n)}
    elif draw.often(0.4):
        options["out"] = draw.place(shape, options.get("out_dtype", dtype))
        options["out_dtype"] = options["out"].dtype
    FORWARD[norm](x, *weights, **options)


# What block-scaled products take.
_BLOCKS: dict[str, dict[str, Any]] = {
    "mxfp8": {"group_size": 32, "scale_format": "ue8m0", "out_dtype": torch.float8_e4m3fn},
    "nvfp4": {
        "group_size": 16,
        "scale_format": "e4m3",
        "out_dtype": torch.float4_e2m1fn_x2,
        "global_scale": torch.ones(1),
    },
}


def quantised(draw: Draw) -> None:
    """Scales of rows or of groups, in every format, given ones, and y in 16 bits beside."""
    n, dtype = draw.one_of((100, 1024, 4096)), draw.one_of(FLOATS[:2])
    shape = (*draw.one_of(LEADING), n)
    options: dict[str, Any] = {"out_dtype": draw.one_of((torch.int8, torch.float8_e4m3fn, torch.float8_e5m2))}
    options["residual"] = draw.rows(shape, dtype) if draw.often() else None
    kind = draw.one_of(("rows", "groups", "static", "mxfp8", "nvfp4"))
    if kind == "groups":
        formats = ("float",) if options["out_dtype"] is torch.int8 else ("float", "ue8m0")
        options |= {"group_size": draw.one_of((32, 64, 128)), "scale_format": draw.one_of(formats)}
        options["scale_layout"] = draw.one_of(("row_major", "column_major"))
    elif kind in ("mxfp8", "nvfp4"):
        options |= _BLOCKS[kind] | {"scale_layout": draw.one_of(("row_major", "swizzled_128x4"))}
    elif kind == "static":
        options |= {"fquant": "static", "y_scale": torch.ones(draw.one_of((1, n)))}
    else:
        bounded = options["out_dtype"] is not torch.int8 and draw.often()
        options |= {"save_unquant": draw.often(), "scale_ub": torch.ones(1) if bounded else None}
    weight = draw.vector(n) if draw.often(0.8) else None
    normforge.quantised_rms_norm(draw.rows(shape, dtype), weight, **options)


def recorded(draw: Draw) -> None:
    """One of the functions that autograd records, and its gradients."""
    n, dtype = draw.one_of(LENGTHS[:6]), draw.one_of(FLOATS)
    shape = (*draw.one_of(LEADING[:4]), n)
    x, residual = draw.leaf(draw.rows(shape, dtype)), draw.leaf(draw.rows(shape, draw.one_of(FLOATS)))
    weight, bias = (draw.leaf(draw.vector(n)) if draw.often(0.8) else None for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {
        "layer": lambda: (normforge.layer_norm(x, (n,), weight, bias),),
        "rms": lambda: (normforge.rms_norm(x, (n,), weight),),
        "add and layer": lambda: normforge.add_layer_norm(x, residual, weight, bias),
        "dropout": lambda: normforge.add_rms_norm(x, residual, weight, dropout_p=0.1),
    }
    draw.trained(*calls[draw.one_of(sorted(calls))]())


def neighbouring(draw: Draw) -> None:
    """Modulated or gated rows, and gradients."""
    n, dtype = draw.one_of(LENGTHS[:6]), draw.one_of(FLOATS)
    shape = (2, draw.one_of((9, 150)), n)
    x, gate = draw.leaf(draw.rows(shape, dtype)), draw.leaf(draw.rows(shape, dtype))
    if draw.often():
        scale, shift, x_gate = (draw.leaf(draw.rows((2, n), dtype)) for _ in range(3))
        beside = {"gate": x_gate, "residual": draw.leaf(draw.rows(shape, dtype))} if draw.often() else {}
        found = normforge.modulated_layer_norm(x, scale, shift, eps=1e-6, **beside)
        draw.trained(*(found if isinstance(found, tuple) else (found,)))
        return
    groups: dict[str, Any] = {"group_size": n // 2} if n % 2 == 0 and draw.often() else {}
    weight = draw.leaf(draw.vector(n)) if draw.often() else None
    draw.trained(normforge.gated_rms_norm(x, gate, weight, norm_before_gate=draw.often(), **groups))


def of_groups(draw: Draw) -> None:
    """GroupNorm in either layout, and gradients."""
    channels, positions = draw.one_of((8, 64)), draw.one_of(((3, 3), (16, 16), (5,)))
    x = torch.zeros(draw.one_of((2, 40)), channels, *positions, dtype=draw.one_of(FLOATS))
    x = x.to(memory_format=torch.channels_last) if len(positions) == 2 and draw.often() else x
    weight, bias = (draw.leaf(draw.vector(channels)) if draw.often(0.8) else None for _ in range(2))
    activation = draw.one_of(("none", "silu"))
    draw.trained(normforge.group_norm(draw.leaf(x), draw.one_of((2, 4)), weight, bias, activation=activation))


KINDS = (forward, quantised, recorded, neighbouring, of_groups)
CASES = first_of_each(
    [(arch, seed) for arch in ("sm_90", "sm_80", "sm_100", "gfx942") for seed in range(4)],
    lambda case: "one" if case[0] in ("sm_90", "gfx942") else None,
    lambda case: f"{case[0]}-{case[1]}",
)


@pytest.mark.parametrize("case", CASES)
def test_a_recording_comes_to_what_random_calls_launch(case: tuple[str, int], tmp_path: Path) -> None:
    arch, seed = case
    target, draw = named_target(arch), Draw(seed)
    launched = 0
    for number in range(40):
        path = tmp_path / f"{number}.yaml"
        with launching_nothing(target) as met, normforge.record(path):
            draw.one_of(KINDS)(draw)
        if met:
            assert {key.key.portable for key in recorded_keys_for(path, target, None)} == met, path.read_text()
        launched += len(met)
    assert launched >= 40
