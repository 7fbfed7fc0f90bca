"""The kernels of norms of heads with their rotary embedding, derived from types, sizes and strides alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from pkgutil import resolve_name
from typing import Any

from ..call_kinds import COUNTS, FLAGS, ROTARY
from ..codegen.tiling import columns_across, power_of_two
from ..codegen.values import DType
from ..errors import ConflictError, ShapeError
from .assembly import SUMS, Recipe, finisher, in_software
from .gpu import Target, pointer_type, row_count_type
from .strides import RowStride, row_alignment

FORWARD, BACKWARD, _ACROSS_FORWARD, _ACROSS_BACKWARD = ROTARY
# By kernel that normalises each head, the kernel that normalises all heads of a token together, as one row.
ACROSS = {FORWARD: _ACROSS_FORWARD, BACKWARD: _ACROSS_BACKWARD}

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
for _by_kernel in (RESULTS, _TENSORS):
    _by_kernel |= {across: _by_kernel[kernel] for kernel, across in ACROSS.items()}
# The tensors of heads, on two strides each.
HEADS = {kernel: [name for name in names if name in _OF_HEADS] for kernel, names in _TENSORS.items()}
# By kernel, the names of all types, and of all strides.
NAMES = {kernel: (*names, *TOTALS) for kernel, names in _TENSORS.items()}
STRIDES = {
    kernel: ["table_row_stride", *[f"{name}_{each}_stride" for name in names for each in ("token", "head")]]
    + CACHE_STRIDES * (CACHE in _TENSORS[kernel])
    for kernel, names in HEADS.items()
}

# Values of one column of each pair in a program: 8 for each of its threads, 16 bytes of 16-bit values.
_VALUES = 1024
_WARPS = 4
# A row of all heads has as many values for each thread, up to this many warps.
_MOST_WARPS = 16
# The longest such row, heads and both columns of pairs rounded up to powers of two: 64 values for each of the threads.
_MOST_ACROSS = 2**15
# Programs of a backward kernel that share the heads of one tensor, for each multiprocessor.
_RESIDENT = 4


def check_columns(n: int, rotary_dim: Any, section: Any, alternates: bool, whole: Any = int) -> tuple[int, int, int]:
    """Return how many columns of a head are rotated, and how many pairs turn by height, and by width.

    Args:
        n: columns of a head.
        rotary_dim: the argument of `qk_norm_rope`, as are `section` (mrope_section) and `alternates`.
        section: see `rotary_dim`; None gives 0 pairs to height and to width.
        alternates: mrope_interleaved.
        whole: the types of whole numbers.

    Raises:
        ShapeError: rotary_dim is no even number of columns.
        ConflictError: the section does not give each pair one axis, or alternates without any.
    """
    columns = n if rotary_dim is None else rotary_dim
    if not isinstance(columns, whole) or columns % 2 or not 2 <= columns <= n:
        raise ShapeError(f"rotary_dim is {columns!r}; it takes an even number from 2 to {n}, the last dimension of q")
    if section is None:
        if alternates:
            raise ConflictError("mrope_interleaved=True goes with mrope_section alone; pass mrope_section too")
        return columns, 0, 0
    sizes = [*section] if isinstance(section, Sequence) else []
    are_sizes = all(isinstance(size, whole) and size >= 0 for size in sizes)
    if len(sizes) != 3 or not are_sizes or sum(sizes) != columns // 2 or sizes[0] == columns // 2:
        raise ConflictError(
            f"mrope_section is {section!r}; it takes three numbers, of time, height and width, that add up to "
            f"rotary_dim / 2 = {columns // 2}, the second or the third above 0"
        )
    return columns, sizes[1], sizes[2]


def check_across(norm: str, heads: int, n: int, columns: int) -> None:
    """Raise ShapeError if no program holds a row of all heads, of n columns each, of which `columns` are rotated."""
    if columns_across(heads, n, columns) > _MOST_ACROSS:
        raise ShapeError(
            f"norm={norm!r} was asked of {heads} heads of {n} columns; it takes rows of up to {_MOST_ACROSS}, heads "
            "and rotated columns rounded up to powers of two; call rms_norm first, and rotate its result"
        )


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
) -> list[tuple[str, Recipe]]:
    """Return the kernels of a call: each with its module in generated/ and its symbol, joined by a colon.

    The first one walks the heads. The others add up gradients of weights of one length each.

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
    block, is_across = power_of_two(half), kernel in ACROSS.values()
    # No program walks the keys of a call without any.
    heads = {f"{own.upper()}_HEADS": max(1, sizes[f"{own}_heads"]) for own in "qk"}
    rows_at_once = {"ROWS": max(1, _VALUES // block)}
    if is_across:
        # Triton keeps the alignment of a tile of one element with the wrong rank.
        rows_at_once = {name.replace("HEADS", "ROWS"): power_of_two(max(2, each)) for name, each in heads.items()}
    warps = min(_MOST_WARPS, max(_WARPS, max(rows_at_once.values()) * block // 256)) if is_across else _WARPS

    absent = [] if dtypes.get(CACHE) else CACHE_STRIDES
    strides = {name: stride for name, stride in strides.items() if name not in absent}

    def pointer(name: str) -> str | None:
        dtype, slot = dtypes.get(name), f"{name}_ptr"
        if name == CACHE and dtype and dtype.itemsize == 1 and in_software(DType.FP8_E4M3FN, target):
            dtype = "uint8"
        return None if dtype is None else pointer_type(dtype, aligned=not invariant and slot not in misaligned)

    def grid(m: int, _: int) -> tuple[int, int, int]:
        at_once, counts = rows_at_once.get("ROWS"), [sizes[f"{name}_heads"] for name in "qk"]
        # Each tensor's programs, of which a row of all heads is one; none for keys without heads.
        programs = [-(-m * each // at_once) if at_once else m * bool(each) for each in counts]
        if kernel in (FORWARD, _ACROSS_FORWARD):
            return sum(programs), 1, 1
        resident = max(1, _RESIDENT * _WARPS // warps)
        return min(max(programs), target.multiprocessors * resident), 1 + bool(counts[1]), 1

    walker = Recipe(
        part=None,
        types={f"{name}_ptr": pointer(name) for name in _TENSORS[kernel]}
        | {"M": rows, "period": rows, "eps": "fp32", "weight_offset": "fp32"},
        strides=strides,
        constants={
            **heads,
            **{name.upper(): sizes[name] for name in ("n", *COUNTS)},
            **{name.upper(): bool(sizes[name]) for name in FLAGS},
            "HALF": half,
            "BLOCK": block,
            "REST": power_of_two(max(1, n - 2 * half)),
            **rows_at_once,
            "ALIGNMENT": 1 if invariant else row_alignment(*strides.values()),
            **dict.fromkeys(absent),
            "PDL": target.launches_early,
        },
        warps=warps,
        grid=grid,
    )
    recipes: list[tuple[str, Recipe | None]] = [(f"{'rotary_across' if is_across else 'rotary'}:{kernel}", walker)]
    for length, totals in summed(kernel, sizes, dtypes).items():
        sums = [pointer_type(dtypes[name], aligned=True) if name in totals else None for name in TOTALS]
        recipes.append(("finalise:sum_partials", finisher(length, target, dict(zip_longest(SUMS, sums)))))
    return [(name, recipe) for name, recipe in recipes if recipe is not None]


def weight_lengths(kernel: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the lengths of the gradients of weights."""
    return {f"d{own}_weight": sizes["n"] * (sizes[f"{own}_heads"] if kernel in ACROSS.values() else 1) for own in "qk"}


def summed(kernel: str, sizes: Mapping[str, int], dtypes: Mapping[str, Any]) -> dict[int, list[str]]:
    """Return the gradients of weights that are due, by their length: one kernel adds up those of one length."""
    lengths = {name: n for name, n in weight_lengths(kernel, sizes).items() if dtypes.get(name)}
    return {n: [name for name, own in lengths.items() if own == n] for n in lengths.values()}


def kernel_named(name: str) -> Any:
    """Return a kernel of `assemble`, a `triton.JITFunction`."""
    return resolve_name(f"normforge.generated.{name}")
