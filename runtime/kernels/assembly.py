"""The kernels of a call, with constants and grids, derived from types and strides alone.

The module uses no tensors and imports neither torch nor triton, so that calls from PyTorch and JAX share the code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import settings
from ..call_kinds import CallKind
from ..codegen.families import Family, Kind, Parameter, Result
from ..codegen.groups import AnyMode, GroupMode
from ..codegen.model import Mode
from ..codegen.parameters import BACKWARD
from ..codegen.several import Kernels, suffix
from ..codegen.tiling import WARP, power_of_two, with_room
from ..codegen.values import DType, Part, Pipeline
from ..errors import ConflictError
from . import pipelines
from .gpu import KernelKey, Target, Word, integer_type, pointer_type, row_count_type
from .pipelines import anywhere, choose, programs_a_part, refuse_variant, staged
from .strides import RowStride, RowWalk, kind_of, row_alignment, starts_aligned

if TYPE_CHECKING:
    from ..codegen.instance import Tile
    from ..upstream.triton_launcher import Grid

    # The grid of each launch, and the numbers after all other values.
    _Rounds = Sequence[tuple[Grid, tuple[int, ...]]]

# The gradients that are sums over rows: programs write partial sums of each, and a last kernel adds the sums up.
SUMS = tuple(row.name for row in BACKWARD.results if row.kind is Kind.VECTOR)

# In the backward family, the dropped tensor has a gradient beside dx.
_DROPPED = "ddropped_ptr"

# Slots of the quantised family. Scales that are powers of two are stored as exponents, whatever the type; e4m3 is
# encoded in software.
_BYTES_OF_SCALES = ("y_scale_ptr", "rowwise_scale_ptr", "columnwise_scale_ptr")
_COLUMN_STRIDES = ("columnwise_scale_column_stride", "columnwise_scale_block_stride")


# The launch that adds up partial sums: rows of partial sums at a time, and columns per program.
# 16 values per thread, in narrow tiles, so that many programs share few columns: 4096x1024 takes 18 us in total on an
# H200, and 29 us with 16 rows of 128 columns. The interpreter takes as long for a narrow program as for a wide program,
# and 25 s for a row of 17000 in narrow programs.
_SUMMING = {"ROWS": 128, "BLOCK": 16}
# Only a few programs wrote the partial sums of each part.
_SUMMING_OF_PARTS = {"ROWS": 32, "BLOCK": 64}
_INTERPRETED_SUMMING = {"ROWS": 16, "BLOCK": 1024}
_SUMMING_WARPS = 4

# Formats that NVIDIA hardware of compute capability 8.9 and up converts to with one rounding, and from. On other GPUs,
# and in the interpreter, kernels take bytes, and encode and decode in integer arithmetic.
_HARDWARE_FP8 = (DType.FP8_E4M3FN, DType.FP8_E5M2)


def in_software(dtype: DType, target: Target) -> bool:
    """Return True if kernels for a GPU take a dtype as bytes."""
    return (dtype.is_fp8 or dtype.is_fp4) and not (dtype in _HARDWARE_FP8 and target.converts_to_fp8)


# Pointers to memory that kernels pass on to other kernels.
_PARTIAL = pointer_type("float32", aligned=True)
_EXCHANGE = pointer_type("int64", aligned=True)

# Values that a program of GroupNorm merges at a time: bundles of channels, by parts of a group.
_MERGED = 1024

# The limit of a grid's first dimension.
_MOST_ITEMS = 2**31 - 1
# The most norms of a launch.
_MOST_PROBLEMS = 4


class Facts:
    """The facts of a call, in addition to M, that determine the call's kernels.

    Calls of torch's tensors and of JAX's arrays, and recorded calls, have the kernels that `assemble` returns for them.

    Attributes:
        entry: the instance that serves the call, a `selection.table.Entry`. For an invariant one the alignment of rows
            is derived from N alone, so that one kernel serves rows at any address.
        mode: the mode of the call.
        n: row length.
        target: the GPU.
        types: pointers and numbers that launches bring, in order, in Triton's words; None for an absent pointer.
        numbers: plain numbers, in order, in Triton's words.
        counts: the slots of numbers of rows or parts, which have the type of M.
        strides: row strides, by slots.
        pointed: row strides of the tensors that are there, by pointers.
        further: how far the values of scales are apart, by slots: 0 where one value serves all rows.
        dtypes: dtypes of torch or numpy, by the names of the family's tensors; None if absent.
        misaligned: pointers that are not multiples of 16 bytes.
        itemsizes: bytes per element of each tensor whose rows are read.
        sums: the pointers to the totals of partial sums, by the names of `SUMS`, which name the sums of any family in
            order; None for a sum that is not wanted. Empty in the forward pass.
        sizes: the sizes by name; see `CallKind`.
    """

    def __init__(
        self,
        entry: Any,
        family: Family,
        mode: AnyMode,
        n: int,
        sizes: Mapping[str, int],
        target: Target,
        dtypes: Mapping[str, Any],
        strides: Mapping[str, RowStride],
        misaligned: Collection[str],
    ) -> None:
        """Derive the facts from the types of a family's tensors.

        Args:
            entry: see `Facts`.
            family: the family of the call's function.
            mode: the mode of the call.
            n: row length.
            sizes: see `Facts`.
            target: the GPU.
            dtypes: see `Facts`; absent tensors may be missing.
            strides: of rows and of scales, by slots. Rows without one adjoin, and scales without one have a value per
                row, whose compilations are also those of one value for all rows, or per group.
            misaligned: slots of pointers that are not multiples of 16 bytes. Under batch invariance the misaligned rows
                follow from N.
        """
        self.entry, self.mode, self.n, self.target, self.sizes = entry, mode, n, target, sizes
        self.dtypes = dtypes = {row.name: dtypes.get(row.name) for row in family.tensors}
        rows = [(row, str(row.row_stride_slot)) for row in family.tensors if row.row_stride_slot]
        self.strides = {slot: strides.get(slot, n if dtypes[row.name] else 0) for row, slot in rows}
        self.pointed = {row.slot: self.strides[slot] for row, slot in rows if dtypes[row.name]}
        scales = [str(row.scale_stride_slot) for row in family.inputs if row.kind.is_scale and dtypes[row.name]]
        self.further = {slot: strides.get(slot, 1) for slot in scales}
        if entry.is_invariant and rows:
            misaligned = () if starts_aligned(n) else [row.slot for row, _ in rows if dtypes[row.name]]
        anywhere = {row.slot for row in family.inputs if not row.is_read_in_vectors}
        if mode.serves:
            # These may be written to a slice of the caller's tensor.
            anywhere |= {"y_scale_ptr", "amax_ptr"}
        self.misaligned = {*misaligned} - anywhere
        own = dict.fromkeys(("y", "rowwise", "columnwise"), mode.dtype_out)
        own |= {"x": mode.dtype_in, "dy": mode.dy_format.dtype}

        def handed(row: Parameter | Result) -> str | None:
            dtype = dtypes[row.name]
            if dtype is None:
                return None
            # Programs write partial sums in float32, and bytes in formats that hardware does not convert to.
            if isinstance(row, Result) and row.is_sum:
                dtype = "float32"
            elif (row.name in own and in_software(own[row.name], target)) or (
                row.slot in _BYTES_OF_SCALES and mode.scale_format.stores_bytes
            ):
                dtype = "uint8"
            return pointer_type(dtype, aligned=row.slot not in {*misaligned, *anywhere})

        self.types = {row.slot: handed(row) for row in family.tensors}
        numbers = [row.slot for row in family.parameters if row.kind is Kind.NUMBER and row.is_asked_for(mode)]
        # Only launches of dropout bring the gradient, after all other values.
        ddropped = self.types.pop(_DROPPED, None)
        dropped = {_DROPPED: ddropped} if mode.dropout and mode.is_backward else {}
        # The strides of scales of groups, which may depend on M.
        of_rows = "rowwise_scale" if mode.is_backward else "y_scale"
        strides_of_scales = [f"{of_rows}_row_stride", f"{of_rows}_group_stride"] * mode.has_scale_strides
        strides_of_scales += ["columnwise_vectors"] * mode.columnwise.transposes
        strides_of_scales += [*_COLUMN_STRIDES] * (mode.columnwise.writes and mode.has_scale_strides)
        self.numbers = {**dict.fromkeys(numbers, "fp32"), **dropped, **dict.fromkeys(strides_of_scales, "i64")}
        self.counts = [row.slot for row in family.parameters if row.kind is Kind.COUNT]
        rows_read = [dtypes[row.name] for row in family.inputs if row.kind is Kind.ROWS]
        # Eight neighbours of an fp8 dy read one scale.
        self.itemsizes = [*[dtype.itemsize for dtype in rows_read if dtype], *[1] * mode.dy_format.is_fp8]
        sums = [dtypes[row.name] for row in family.results if row.is_sum]
        words = [None if dtype is None else pointer_type(dtype, aligned=True) for dtype in sums]
        self.sums = {**dict.fromkeys(SUMS if sums else ()), **dict(zip(SUMS, words, strict=False))}

    def kind(self, m: int) -> CallKind:
        """Return the kind of calls of m rows."""
        size = self.entry.size(m)
        return kind_of(self.mode.name, self.sizes, size, self.dtypes, self.strides, self.misaligned)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One kernel of a call, with the arguments of the compilation and of the launch.

    Attributes:
        part: the kernel; None is the kernel that adds up partial sums.
        types: the types of the slots in Triton's words, in the order of a launch's values; None for an absent pointer.
        strides: arguments that are the same at every launch.
        constants: compile-time constants.
        warps: warps per program, of 32 threads.
        options: further options of the compiler.
        grid: a function from M and the programs that share the rows to the grid of a launch.
        rounds: for GroupNorm and norms over channels, a function from M to the launches.
    """

    part: Pipeline | Part | None
    types: Mapping[str, str | None]
    strides: Mapping[str, RowStride] = field(default_factory=dict)
    constants: Mapping[str, int | None]
    warps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: Callable[[int, int], Grid]
    rounds: Callable[[int], _Rounds] | None = None

    def key(self, kernel: str, parameters: Sequence[str], target: Target) -> KernelKey:
        """Return the compilation of the kernel.

        Args:
            kernel: the module and the symbol, joined by a colon.
            parameters: the kernel's parameters, in order: some of the types, strides and constants.
            target: the GPU that the kernel is for.
        """
        words: dict[str, Word] = {**self.types, **self.constants}
        for name, stride in self.strides.items():
            words[name] = stride.types(str(words["M"])) if isinstance(stride, RowWalk) else integer_type(stride)
        # A tile counts warps of 32 threads, and the target's may have 64.
        options = {"num_warps": max(1, self.warps * WARP // target.warp_size), **self.options}
        if "PDL" in parameters and self.constants["PDL"]:
            # Only kernels with this constant wait for the previous kernel: any other would read memory too early.
            options["launch_pdl"] = True
        return KernelKey(kernel, tuple((name, words[name]) for name in parameters), tuple(options.items()))


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """The kernels for one class of M.

    Attributes:
        walkers: the kernels that walk the rows, in order.
        finisher: the kernel that adds up partial sums; None without partial sums.
        programs: a function from M and the number of parts of the rows to the number of programs that share the rows of
            each part. Each program has its own partial sums.
        row_terms: pointers to the values that the first walker writes for the next walker.
        exchange: a function from M to the number of int64 values for exchange between programs; None without exchange.
        terms: a function from M to the number of fp32 values of each of `row_terms`.
    """

    walkers: tuple[Recipe, ...]
    finisher: Recipe | None
    programs: Callable[[int, int], int]
    row_terms: tuple[str, ...]
    exchange: Callable[[int], int] | None = None
    terms: Callable[[int], int] = lambda m: m

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """All kernels, in the order of their launches."""
        return self.walkers if self.finisher is None else (*self.walkers, self.finisher)


def assemble(facts: Facts, m: int) -> Assembly:
    """Return the kernels for m rows.

    Args:
        facts: the facts of the call.
        m: the number of rows; only the class of M matters.

    Raises:
        DeviceError: the GPU can run neither tile.
        InvarianceError: the call cannot be batch invariant with the tile, or with m rows.
    """
    mode, n, target, strides = facts.mode, facts.n, facts.target, facts.strides
    if isinstance(mode, GroupMode):
        return _of_groups(facts, mode, m) if mode.span.is_group else _of_channels(facts, mode)
    choices = facts.entry.choices(m, n, target.arch)
    alignment = row_alignment(*([n] if facts.entry.is_invariant else strides.values()))
    tile = choose(mode, choices, n, target)
    if mode.is_backward:
        together = pipelines.read_together(n, alignment, facts.misaligned)
        tile = staged(tile, choices[-1], n, facts.itemsizes, together, target)
    elif tile.pipeline is Pipeline.SPREAD and target.compiles:
        tile = with_room(tile, facts.itemsizes, target.arch)
    row = pipelines.row_of(mode, tile.pipeline, target)
    if facts.entry.is_invariant:
        refuse_variant(mode, tile, n, m)
    elif found := anywhere(mode, tile, n, facts.pointed, facts.misaligned, few=m <= facts.entry.small_m):
        part, tile = found
        row, strides = pipelines.ANYWHERE[part], {**strides, "row_stride": strides["x_row_stride"]}
    types = {
        **facts.types,
        **dict.fromkeys(row.row_terms, _PARTIAL),
        "exchange_ptr": _EXCHANGE if row.waits or mode.reduce.exchanges else None,
        **dict.fromkeys(("M", *facts.counts), row_count_type(m)),
        **facts.numbers,
    }
    walkers = tuple(
        Recipe(
            part=step.part or tile.pipeline,
            types=types,
            strides={**strides, **facts.further},
            constants={
                **pipelines.constants(own, n, alignment, facts.misaligned, target),
                # With a slot per lane of a warp, no warp holds a slot twice: two rows of 16384 spill 72 bytes less.
                "PEERS": max(WARP, power_of_two(row.columns(tile, n))),
                "RANKS": facts.sizes.get("ranks"),
            },
            warps=own.warps,
            options=pipelines.compiler_options(own, target, waits=row.waits),
            grid=partial(step.grid, own, (step.columns or row.columns)(own, n), target),
        )
        for step, own in ((step, step.tile(tile)) for step in row.steps)
    )
    most, rows = row.programs(tile, n, target), tile.rows

    def programs(m: int, parts: int) -> int:
        if mode.is_backward and mode.shares:
            return programs_a_part(most, parts, -(-(m // parts) // rows))
        return min(most, -(-m // rows))

    return Assembly(
        walkers=walkers,
        finisher=finisher(n, target, facts.sums, of_parts=mode.modulated or mode.grouped),
        programs=programs,
        row_terms=row.row_terms,
        exchange=partial(row.exchange, tile, n) if row.waits else None,
    )


def _of_groups(facts: Facts, mode: GroupMode, m: int) -> Assembly:
    """Return the kernels for GroupNorm, whose M is the number of groups of all samples."""
    from . import group_tiles

    channels, groups, positions = facts.sizes.values()
    shape, target = group_tiles.Shape(channels, groups, positions, mode.dtype_in.itemsize), facts.target
    tile, cut = group_tiles.choose(mode, shape, facts.entry.choices(m, facts.n, target.arch), target)
    if facts.entry.is_invariant:
        refuse_variant(mode, tile, facts.n, m)
    alone = cut.parts == 1 and cut.width % shape.group_channels == 0
    alignment = 1 if mode.channels_last else row_alignment(positions)
    units = positions // alignment
    # Partial sums per part, or, in parts of several tiles of channels, per set of tiles held at once.
    sets = -(-positions // cut.block_s) // (cut.held if cut.is_alike(positions) else 1)
    summed = cut.parts if cut.width <= cut.block_c or tile.pipeline is Pipeline.ONE_PASS else sets

    # The numbers that a part leaves of each bundle of channels, and the channels of a bundle.
    kinds, bundle = 2 if mode.is_backward else 4, 1 if mode.channels_last else shape.group_channels
    # The parts of a group that is one bundle are merged at once.
    most = cut.parts if bundle == shape.group_channels else _MERGED // power_of_two(shape.group_channels)

    constants = {
        **{name.upper(): getattr(cut, name) for name in ("width", "block_c", "block_s", "held")},
        "C": channels,
        "CHANNELS": shape.group_channels,
        "POSITIONS": positions,
        "ALIGNMENT": alignment,
        "FULL": cut.is_full(positions),
        "ALIKE": cut.is_alike(positions),
        "ALONE": alone,
        "PEERS": power_of_two(max(1, min(cut.parts, most))),
    }

    def walker(part: Pipeline | Part) -> Recipe:
        def rounds(m: int) -> _Rounds:
            items, shared = (m, 1) if part is Part.MERGE else (m // groups * channels // cut.width, cut.parts)
            return [
                ((min(_MOST_ITEMS, items - first), shared, 1), (units, first, cut.part_tiles, cut.parts))
                for first in range(0, items, _MOST_ITEMS)
            ]

        return _in_rounds(
            facts, part, tile, ("partials_ptr",), ("first_item", "part_tiles", "parts"), constants, rounds
        )

    return Assembly(
        walkers=tuple(map(walker, mode.parts(tile.pipeline)[-1 if alone else 0 :])),
        finisher=finisher(channels, target, facts.sums),
        programs=lambda m, parts: m // groups * summed,
        row_terms=("partials_ptr",),
        terms=lambda m: 0 if alone else m // groups * cut.parts * kinds * (channels // bundle),
    )


def _in_rounds(
    facts: Facts,
    part: Pipeline | Part,
    tile: Tile,
    terms: Sequence[str],
    counts: Sequence[str],
    constants: Mapping[str, int],
    rounds: Callable[[int], _Rounds],
) -> Recipe:
    """Return a kernel of GroupNorm or of a norm over channels; `terms` are pointers between kernels."""
    return Recipe(
        part=part,
        types={
            **facts.types,
            **dict.fromkeys(terms, _PARTIAL),
            "exchange_ptr": None,
            **facts.numbers,
            # The type of positions holds any offset within a group, and those of tiles beyond the group's end.
            "units": row_count_type(facts.n),
            **dict.fromkeys(counts, "i32"),
        },
        constants={**pipelines.constants(tile, facts.n, 1, facts.misaligned, facts.target), **constants},
        warps=tile.warps,
        options=pipelines.compiler_options(tile, facts.target, waits=False),
        grid=lambda m, programs: rounds(m)[0][0],
        rounds=rounds,
    )


def _of_channels(facts: Facts, mode: GroupMode) -> Assembly:
    """Return the kernels for a norm over channels, whose M is the number of samples."""
    from . import group_tiles

    channels, _, positions = facts.sizes.values()
    target, tile = facts.target, group_tiles.channel_tile(mode, channels)
    row = (pipelines.BACKWARD if mode.is_backward else pipelines.FORWARD)[tile.pipeline]
    columns, most = row.columns(tile, channels), row.programs(tile, channels, target)
    # How threads share a tile, and so the order of a sum over channels, follows from the alignment.
    alignment = 1 if facts.entry.is_invariant else row_alignment(positions)
    tiles, units = -(-positions // tile.rows), positions // alignment

    def walker(step: pipelines.Step) -> Recipe:
        def rounds(m: int) -> _Rounds:
            items = m * tiles
            return [(step.grid(replace(tile, rows=1), columns, target, items, min(most, items)), (units, items))]

        part, constants = step.part or tile.pipeline, {"N": channels, "ALIGNMENT": alignment}
        return _in_rounds(facts, part, tile, row.row_terms, ("items",), constants, rounds)

    return Assembly(
        walkers=tuple(map(walker, row.steps)),
        finisher=finisher(channels, facts.target, facts.sums),
        programs=lambda m, parts: min(most, m * tiles),
        row_terms=row.row_terms,
        terms=lambda m: m * positions,
    )


def finisher(n: int, target: Target, sums: Mapping[str, str | None], *, of_parts: bool = False) -> Recipe | None:
    """Return the kernel that adds up partial sums of n columns, or None if no sum is wanted.

    The grid is the grid of one part. With `of_parts`, several parts are in the third dimension. `Facts` describes
    `sums`.
    """
    if not any(sums.values()):
        return None
    summing = (_SUMMING_OF_PARTS if of_parts else _SUMMING) if target.compiles else _INTERPRETED_SUMMING
    partials = {f"{name}_partials_ptr": None if word is None else _PARTIAL for name, word in sums.items()}
    return Recipe(
        part=None,
        types={**partials, **{f"{name}_ptr": word for name, word in sums.items()}, "programs": integer_type(0)},
        constants={"N": n, **summing, "PDL": target.launches_early},
        warps=_SUMMING_WARPS,
        grid=lambda m, programs: (-(-n // summing["BLOCK"]), len(SUMS), 1),
    )


def check_problems(problems: Any) -> None:
    """Raise ConflictError if the problems of `rms_norms` are no list of 1 to 4 tuples (x, weight, options)."""
    is_list = isinstance(problems, (list, tuple))
    if not is_list or not 1 <= len(problems) <= _MOST_PROBLEMS:
        passed = f"has {len(problems)} items" if is_list else f"is a {type(problems).__name__}"
        raise ConflictError(f"problems {passed}; it takes a list of 1 to {_MOST_PROBLEMS} tuples (x, weight, options)")
    for at, each in enumerate(problems):
        is_sized = isinstance(each, (list, tuple)) and 1 <= len(each) <= 3
        if not is_sized or (len(each) == 3 and not isinstance(each[2], dict)):
            wanted = "(x, weight, options), with a dict of options, or without the last ones"
            raise ConflictError(f"problems[{at}] is a {type(each).__name__} of other items; it takes {wanted}")


def join(modes: Sequence[str], recipes: Sequence[Recipe], *, invariant: bool) -> tuple[Kernels, Recipe] | None:
    """Return the kernels of some problems and the recipe of the one that calls them; None if each is launched alone.

    A launch brings the values of each problem's launch in turn, and then how many programs each problem has. The grid
    is the most programs of a problem, and the problems.

    All programs of a launch have the warps of the kernel that has most, so that other kernels add a row up in another
    order. Under batch invariance all kernels have to have as many.
    """
    if not settings.generates() or (invariant and len({each.warps for each in recipes}) > 1):
        return None
    # Rows on several strides are numbered in the type of the first problem's M.
    if any(each.types["M"] != recipes[0].types["M"] or each.options for each in recipes):
        return None
    # Neither windows, whose programs walk all rows by the size of the grid, nor programs that wait for one another.
    kernels = [
        (Mode.from_name(mode), each.part)
        for mode, each in zip(modes, recipes, strict=True)
        if isinstance(each.part, Pipeline) and each.part.takes_rows_alike
    ]
    if len(kernels) < len(recipes):
        return None
    pairs = [(suffix(at), each) for at, each in enumerate(recipes)]
    recipe = replace(
        recipes[0],
        types={
            **{f"{name}{end}": word for end, each in pairs for name, word in each.types.items()},
            **{f"programs{end}": "i32" for end, _ in pairs},
        },
        strides={f"{name}{end}": stride for end, each in pairs for name, stride in each.strides.items()},
        constants={f"{name}{end}": value for end, each in pairs for name, value in each.constants.items()},
        warps=max(each.warps for each in recipes),
    )
    return kernels, recipe
