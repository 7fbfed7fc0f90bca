"""The kernels of norms of heads with their rotary embedding, derived from types, sizes and strides alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from itertools import zip_longest
from pkgutil import resolve_name
from typing import Any

from ..call_kinds import COUNTS, FLAGS, ROTARY
from ..codegen.tiling import power_of_two
from ..codegen.values import DType
from .assembly import SUMS, Recipe, finisher, in_software
from .gpu import Target, pointer_type, row_count_type
from .strides import RowStride, row_alignment

FORWARD, BACKWARD = ROTARY

_OF_HEADS = ("q", "k", "q_out", "k_out", "dq_out", "dk_out", "dq", "dk")
_READ = ("q", "k", "q_weight", "k_weight", "cos", "sin", "positions")
# A paged cache of keys, and its strides.
CACHE = "key_cache"
CACHE_STRIDES = [f"{CACHE}_{each}_stride" for each in ("block", "slot", "head")]
# The gradients of weights, which are sums of partial ones.
TOTALS = ("dq_weight", "dk_weight")
# By kernel, the results for q and k, and the tensors that launches bring, in order.
RESULTS = {FORWARD: ("q_out", "k_out"), BACKWARD: ("dq", "dk")}
_TENSORS = {
    FORWARD: (*_READ, "slot_mapping", "k_scale", *RESULTS[FORWARD], CACHE),
    BACKWARD: ("dq_out", "dk_out", *_READ, *RESULTS[BACKWARD], *[f"{name}_partials" for name in TOTALS]),
}
# The tensors of heads, on two strides each.
HEADS = {kernel: [name for name in names if name in _OF_HEADS] for kernel, names in _TENSORS.items()}
# By kernel, the names of all types, and of all strides.
NAMES = {kernel: (*names, *TOTALS) for kernel, names in _TENSORS.items()}
STRIDES = {
    kernel: ["table_row_stride", *[f"{name}_{each}_stride" for name in names for each in ("token", "head")]]
    for kernel, names in HEADS.items()
}
STRIDES[FORWARD] += CACHE_STRIDES

# Values of one column of each pair in a program: 8 for each of its threads, 16 bytes of 16-bit values.
_VALUES = 1024
_WARPS = 4
# Programs of a backward kernel that share the heads of one tensor, for each multiprocessor.
_RESIDENT = 4


def assemble(
    kernel: str,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, Any],
    strides: Mapping[str, RowStride],
    misaligned: Collection[str],
    m: int,
    target: Target,
    *,
    invariant: bool,
) -> dict[str, Recipe]:
    """Return the kernels of a call: each by its module in generated/ and its symbol, joined by a colon.

    Args:
        kernel: the kernel that walks the heads.
        sizes: `ROTARY_SIZES` by name.
        dtypes: dtypes of torch or numpy, by the names of `NAMES`; None if absent.
        strides: by the names of `STRIDES`.
        misaligned: slots of pointers that are not multiples of 16 bytes.
        m: the number of tokens; only the type that counts their heads matters.
        target: the GPU.
        invariant: whether one kernel serves heads wherever they lie.
    """
    n, half, rows = sizes["n"], sizes["rotary_dim"] // 2, row_count_type(m * max(sizes["q_heads"], sizes["k_heads"]))
    block = power_of_two(half)
    at_once = max(1, _VALUES // block)

    absent = [] if dtypes.get(CACHE) else CACHE_STRIDES
    strides = {name: stride for name, stride in strides.items() if name not in absent}

    def pointer(name: str) -> str | None:
        dtype, slot = dtypes.get(name), f"{name}_ptr"
        if name == CACHE and dtype and dtype.itemsize == 1 and in_software(DType.FP8_E4M3FN, target):
            dtype = "uint8"
        return None if dtype is None else pointer_type(dtype, aligned=not invariant and slot not in misaligned)

    walker = Recipe(
        part=None,
        types={f"{name}_ptr": pointer(name) for name in _TENSORS[kernel]}
        | {"M": rows, "period": rows, "eps": "fp32", "weight_offset": "fp32"},
        strides=strides,
        constants={
            **{name.upper(): sizes[name] for name in ("q_heads", "k_heads", "n", *COUNTS)},
            **{name.upper(): bool(sizes[name]) for name in FLAGS},
            "HALF": half,
            "BLOCK": block,
            "REST": power_of_two(max(1, n - 2 * half)),
            "ROWS": at_once,
            "ALIGNMENT": 1 if invariant else row_alignment(*strides.values()),
            **dict.fromkeys(absent),
            "PDL": target.launches_early,
        },
        warps=_WARPS,
        options={},
        grid=partial(_grid, kernel, sizes, at_once, target),
    )
    sums = [dtype and pointer_type(dtype, aligned=True) for dtype in map(dtypes.get, TOTALS)]
    finish = finisher(n, target, dict(zip_longest(SUMS, sums)))
    return {f"rotary:{kernel}": walker, **({"finalise:sum_partials": finish} if finish else {})}


def kernel_named(name: str) -> Any:
    """Return a kernel of `assemble`, a `triton.JITFunction`."""
    return resolve_name(f"normforge.generated.{name}")


def _grid(kernel: str, sizes: Mapping[str, int], at_once: int, target: Target, m: int, _: int) -> tuple[int, int, int]:
    programs = [-(-m * sizes[f"{name}_heads"] // at_once) for name in "qk"]
    if kernel == FORWARD:
        return sum(programs), 1, 1
    return min(max(programs), target.multiprocessors * _RESIDENT), 2, 1
