"""Tables of tiles: what they say is what instances get, what is wrong names its line, and which tiles are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normforge.codegen import emit, tile_tables
from normforge.codegen.candidates import candidates
from normforge.codegen.errors import TileTableError
from normforge.codegen.instance import ANY, Bucket, Tile, Tiles
from normforge.codegen.manifest import Manifest, load
from normforge.codegen.model import Mode
from normforge.codegen.tile_limits import why_not
from normforge.codegen.tile_tables import TileTable, merge, read_table, tiles_of, write_table
from normforge.codegen.tiling import CLASSES, Load, TileClass, class_of, generic_tiles, standard_ladder
from normforge.codegen.values import Direction, DType, FusedAdd, FusedQuant, Norm, Pipeline, ScaleGroup
from normforge.selection.table import load_folder

from ..calling import table_at
from ..folders import write

PLAIN = TileClass(Direction.FORWARD, 2)
BACKWARD = TileClass(Direction.BACKWARD, 4)
LN_BF16 = Mode(Norm.LAYER, DType.BF16, DType.BF16)

TABLES = {"sm_90": read_table(Path(__file__).with_name("sm_90.yaml"))}


@pytest.mark.parametrize(
    ("bucket", "block"),
    [
        (Bucket("n300", 1, 300), 512),
        (Bucket("n301", 1, 301), None),
        (Bucket("n4096", 1, 4096), 256),
        (Bucket("n4000", 3999, 4000), 256),
        (Bucket("n1024", 1000, 1024), None),
        (Bucket("nbig", 1, None), 4096),
        (Bucket("n99999", 4097, 99999), 4096),
    ],
    ids=lambda value: str(value),
)
def test_a_bucket_takes_the_range_that_holds_its_longest_row(bucket: Bucket, block: int | None) -> None:
    generic = generic_tiles(PLAIN, bucket)
    by_arch = dict(tiles_of(LN_BF16, bucket, TABLES))
    assert list(by_arch) == [ANY, "sm_90"]
    assert by_arch[ANY] == generic
    assert by_arch["sm_90"].large.block == (generic.large.block if block is None else block)


def test_another_class_keeps_the_rule() -> None:
    mode = Mode(Norm.RMS, DType.FP32, DType.FP32)
    for bucket in standard_ladder():
        assert dict(tiles_of(mode, bucket, TABLES))["sm_90"] == generic_tiles(class_of(mode), bucket)


TILE = "{pipeline: one_pass, rows: 1, block: 512, warps: 4}"


def tile(pipeline: str, rows: int | str, block: int, warps: int = 4, **others: int | str) -> str:
    """The text of a tile."""
    fields = {"pipeline": pipeline, "rows": rows, "block": block, "warps": warps, **others}
    return f"{{{', '.join(f'{name}: {value}' for name, value in fields.items())}}}"


def one(tile: str, bucket: str = "1..1024", kind: str = "fwd_16bit") -> str:
    """A table whose tile for many rows is on line 3."""
    return f"{kind}:\n  {bucket}:\n    large: {tile}\n    small: {TILE}\n"


# By class and lengths of rows, tiles and messages.
IMPOSSIBLE: dict[str, dict[str, list[tuple[dict[str, Any], str]]]] = table_at(
    Path(__file__).with_name("impossible_tiles.yaml")
)

RIGHT = {
    "resident": ("fwd_16bit", "1..", tile("two_pass", 1, 512, 32, resident=2)),
    "held": ("fwd_32bit", "1024..", tile("two_pass", 1, 512, resident=1, held=2)),
    "spread": ("fwd_16bit", "1..", tile("spread", 1, 4096, 16, resident=1, held=4)),
    "cut": ("fwd_16bit_add", "1025..2048", tile("rows", 2, 512)),
    "cut_backward": ("bwd_16bit", "129..256", tile("rows", 4, 64, 1, resident=12)),
    "stages": ("bwd_16bit", "1..1024", tile("one_pass", 1, 512, resident=8, held=0, stages=3)),
    "spread_backward": ("bwd_32bit", "1..", tile("spread", 4, 1024, resident=3)),
    "spread_backward_2": ("bwd_16bit", "1..", tile("spread", 2, 512)),
}
NO_SPREAD = "pipeline spread needs PTX, which gfx942 does not run; take two_pass"
# A text, its architecture, and what is said of it.
WRONG = [
    *((text, "sm_90", message) for text, message in table_at(Path(__file__).with_name("unread_tiles.yaml"), globals())),
    *(
        (one(tile(**fields), lengths, kind), "sm_90", f"3: {kind}: {message}")
        for kind, by_lengths in IMPOSSIBLE.items()
        for lengths, tiles in by_lengths.items()
        for fields, message in tiles
    ),
    # No row is spread where programs cannot wait for one another.
    *(
        (one(tile, lengths, kind), "gfx942", f"3: {kind}: {NO_SPREAD}")
        for kind, lengths, tile in (RIGHT["spread"], RIGHT["spread_backward"])
    ),
]


@pytest.mark.parametrize(("kind", "lengths", "tile"), RIGHT.values(), ids=RIGHT)
def test_what_is_right_is_read_and_written_as_it_was(
    kind: str, lengths: str, tile: str, file: Callable[..., Path]
) -> None:
    text = f"# a remark\n\n{kind}:\n  {lengths}:\n    large: {tile}\n    small: {tile}\n"
    for whole in (text, f"{text}    some: {tile}\n", f"{text}    some: {tile}\n    ragged: {tile}\n"):
        assert write_table(read_table(file(whole, "sm_90.yaml")), "# a remark") == whole


def test_a_tile_for_some_rows_is_in_the_dispatch_table(file: Callable[..., Path], tmp_path: Path) -> None:
    """And nothing of it is where no table has one."""
    path = file("groups:\n  a: {norm: rms, dtype_in: bf16, n: n1024}\n")
    text = one(TILE, "512..1024")
    some = "{pipeline: two_pass, rows: 1, block: 512, warps: 2}"
    for extra, expected in (("", False), (f"    some: {some}\n", True)):
        tables = {"sm_90": read_table(file(text + extra, "sm_90.yaml"))}
        instances = load(path, tables).instances
        dispatch_file = emit.render_folder(instances)["dispatch.py"]
        assert ("SOME_M = 2048\n" in dispatch_file) == ("SOME_M" in dispatch_file) == expected
        entry = next(iter(load_folder(write(tmp_path / f"made{expected}", instances))))
        warps = {m: entry.tile(m, entry.first, "sm_90").warps for m in (256, 257, 2048, 2049)}
        assert warps == {256: 4, 257: 2 if expected else 4, 2048: 2 if expected else 4, 2049: 4}
        module = emit.render_folder(instances)["rms_fwd_bf16.py"]
        assert ("def rms_fwd_bf16_two_pass(" in module) == expected


def test_a_module_holds_a_spread_kernel_where_a_table_takes_one(file: Callable[..., Path]) -> None:
    kind, lengths, tile = RIGHT["spread"]
    tables = {"sm_90": read_table(file(f"{kind}:\n  {lengths}:\n    large: {tile}\n    small: {tile}\n", "sm_90.yaml"))}
    path = file("groups:\n  a: {norm: rms, dtype_in: [bf16, fp32], fadd: [none, pre_add], n: [n2048, nbig]}\n")
    files = emit.render_folder(load(path, tables).instances)
    modules = {name[:-3]: text for name, text in files.items() if name.startswith("rms_")}
    for part in ("spread", "window"):
        assert {name for name, text in modules.items() if f"def {name}_{part}(" in text} == {"rms_fwd_bf16"}


@pytest.mark.parametrize(("text", "arch", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_names_file_and_line(text: str, arch: str, message: str, file: Callable[..., Path]) -> None:
    path = file(text, f"{arch}.yaml")
    with pytest.raises(TileTableError) as caught:
        read_table(path)
    assert str(caught.value).startswith(f"{path}:{message}")


def test_a_file_is_called_after_an_architecture(tmp_path: Path) -> None:
    with pytest.raises(TileTableError, match=r"h200\.yaml: 'h200' is no architecture; name the file after one, sm_90"):
        read_table(tmp_path / "h200.yaml")
    with pytest.raises(TileTableError, match=r"sm_91\.yaml: there is no such table of tiles; measure one with"):
        read_table(tmp_path / "sm_91.yaml")


def test_the_committed_tables_can_be_read() -> None:
    assert {path.stem for path in tile_tables.FOLDER.glob("*.yaml")} == set(tile_tables.own_tables())
    # And be measured again without losing a comment.
    assert all(tile_tables.read_head(path).startswith("# ") for path in tile_tables.FOLDER.glob("*.yaml"))


def test_the_rule_gives_tiles_that_can_serve_their_buckets() -> None:
    for kind in CLASSES:
        for bucket in (*standard_ladder(), Bucket("n1", 1, 1), Bucket("nbig", 1, None), Bucket("n700", 1, 700)):
            tiles = generic_tiles(kind, bucket)
            for tile in tiles.every:
                assert why_not(kind, bucket, tile, ANY) is None


def test_merging_keeps_what_was_not_measured_again() -> None:
    def table(kind: TileClass, warps: int, *buckets: Bucket) -> TileTable:
        tile = Tile(Pipeline.TWO_PASS, 1, 512, warps)
        return TileTable({kind: tuple((bucket, Tiles(tile, tile)) for bucket in buckets)})

    old = table(PLAIN, 1, Bucket("", 1, 10), Bucket("", 11, 20), Bucket("", 21, None))
    merged = merge(merge(old, table(PLAIN, 2, Bucket("", 15, 25))), table(BACKWARD, 4, Bucket("", 1, 10)))
    assert [(str(bucket), pair.large.warps) for bucket, pair in merged.rows[PLAIN]] == [("1..10", 1), ("15..25", 2)]
    assert [(str(bucket), pair.large.warps) for bucket, pair in merged.rows[BACKWARD]] == [("1..10", 4)]


def measured(mode: Mode, bucket: Bucket, table: Mapping[TileClass, Tiles]) -> Tiles:
    """The tiles of a mode where these were measured for classes."""
    rows = {kind: ((bucket, tiles),) for kind, tiles in table.items()}
    return dict(tiles_of(mode, bucket, {"sm_90": TileTable(rows)}))["sm_90"]


def test_with_a_dropout_the_adds_tiles_serve_where_none_were_measured() -> None:
    """A norm's own before those of both, and none that spread rows."""
    bucket, spread = Bucket("n12288", 8193, 12288), Tile(Pipeline.SPREAD, 2, 1024, 4)
    few = Tile(Pipeline.TWO_PASS, 2, 1024, 8)
    of_adds, of_rms_drops = (TileClass(Direction.BACKWARD, 2, *of) for of in ((Load.ADD,), (Load.DROP, True)))
    mode = Mode(Norm.RMS, DType.BF16, DType.BF16, FusedAdd.PRE_ADD_STORE, direction=Direction.BACKWARD)
    dropping, generic = replace(mode, dropout=True), generic_tiles(class_of(mode), bucket)
    table = {of_adds: Tiles(spread, few)}
    assert measured(mode, bucket, table) == Tiles(spread, few, generic.large)
    assert measured(dropping, bucket, table) == Tiles(generic.large, few)
    assert measured(dropping, bucket, table | {of_rms_drops: generic}) == generic
    # Of some rows, which have a tile of their own, too.
    assert measured(dropping, bucket, {of_adds: Tiles(spread, few, some=few)}) == Tiles(generic.large, few, some=few)


def test_backward_an_add_takes_plain_tiles_where_none_were_measured() -> None:
    """And the rule's instead of one that has more on its way to shared memory than that holds of three tensors."""
    bucket = Bucket("n8192", 7169, 8192)
    plain, add = (TileClass(Direction.BACKWARD, 4, load) for load in (Load.PLAIN, Load.ADD))
    mode = Mode(Norm.LAYER, DType.FP32, DType.FP32, FusedAdd.PRE_ADD_STORE, direction=Direction.BACKWARD)
    three, four = (Tile(Pipeline.ONE_PASS, 1, 1024, 16, stages=stages) for stages in (3, 4))
    assert [why_not(kind, bucket, four, "sm_90") is None for kind in (plain, add)] == [True, False]
    for tile, expected in ((three, three), (four, generic_tiles(add, bucket).large)):
        assert measured(mode, bucket, {plain: Tiles(tile, tile)}).large == expected


def test_forward_a_dropout_takes_tiles_that_read_rows_once() -> None:
    bucket, whole = Bucket("n4096", 3073, 4096), Tile(Pipeline.ONE_PASS, 1, 1024, 8)
    twice = Tile(Pipeline.TWO_PASS, 1, 2048, 16)
    table = {
        TileClass(Direction.FORWARD, 2, Load.ADD, rms=True): Tiles(twice, twice),
        TileClass(Direction.FORWARD, 2, Load.QUANT): Tiles(whole, whole),
    }
    mode = Mode(Norm.RMS, DType.BF16, DType.BF16, FusedAdd.PRE_ADD_STORE)
    assert measured(mode, bucket, table).large == twice
    assert measured(replace(mode, dropout=True), bucket, table).large == whole


def test_what_is_scaled_by_less_than_a_row_takes_quants_tiles_where_none_were_measured() -> None:
    """Its own before those, and of its own those of its norm."""
    bucket = Bucket("n4096", 3073, 4096)
    rows, own, of_rms = (
        Tiles(tile, tile) for tile in (Tile(Pipeline.ONE_PASS, 1, 1024, warps) for warps in (4, 8, 16))
    )
    table = {TileClass(Direction.FORWARD, 2, Load.QUANT): rows}
    scaled = table | {TileClass(Direction.FORWARD, 2, Load.SCALED): own}
    both = scaled | {TileClass(Direction.FORWARD, 2, Load.SCALED, rms=True): of_rms}
    of_rows = Mode(Norm.RMS, DType.BF16, DType.FP8_E4M3FN, fquant=FusedQuant.DYNAMIC, save_unquant=True)
    for mode, expected in (
        (of_rows, [rows, rows, rows]),
        (replace(of_rows, group_size=ScaleGroup.G128), [rows, own, of_rms]),
        (replace(of_rows, fquant=FusedQuant.STATIC, norm=Norm.LAYER), [rows, own, own]),
        (replace(of_rows, group_size=ScaleGroup.G128, fadd=FusedAdd.PRE_ADD_STORE), [rows, rows, rows]),
    ):
        found = [measured(mode, bucket, each).large for each in (table, scaled, both)]
        assert found == [tiles.large for tiles in expected]


def test_no_class_takes_anothers_tile_that_cuts_rows_where_its_own_may_not_be() -> None:
    """A chunk may end within a group of scales."""
    bucket = Bucket("n256", 129, 256)
    cut, whole = Tile(Pipeline.ROWS, 8, 128, 2), Tile(Pipeline.ROWS, 4, 256, 1)
    narrow = Tile(Pipeline.ONE_PASS, 1, 64, 1)
    of_rows = Mode(Norm.RMS, DType.BF16, DType.FP8_E4M3FN, fquant=FusedQuant.DYNAMIC)
    of_groups = replace(of_rows, group_size=ScaleGroup.G128)
    generic = generic_tiles(class_of(of_groups), bucket).large
    for tiles, expected in (
        (Tiles(whole, whole, ragged=cut), whole),
        (Tiles(cut, whole), generic),
        (Tiles(narrow, whole), generic),
    ):
        table = {TileClass(Direction.FORWARD, 2, Load.QUANT): tiles}
        assert measured(of_rows, bucket, table) == tiles
        assert measured(of_groups, bucket, table) == Tiles(expected, whole)


def test_every_mode_of_a_manifest_has_the_tiles_that_it_has_on_demand(expand: Callable[[str], Manifest]) -> None:
    """Also where modes of one class differ in what a thread holds: backward with a gate of samples, and without."""
    instances = expand(
        "groups:\n  mine:\n    norm: layer\n    dtype_in: bf16\n    n: [n1024, n2048]\n    direction: bwd\n"
        "    fadd: [none, pre_add_store]\n    modulated: true\n    x_gate: [true, false]\n"
    ).instances
    assert {instance.mode.x_gate for instance in instances} == {True, False}  # type: ignore[union-attr]  # no GroupMode
    for instance in instances:
        assert instance.tiles == tiles_of(instance.mode, instance.bucket), instance.name


# NVIDIA's have every pipeline.
ARCH = "sm_90"


FWD_16, BWD_16 = TileClass(Direction.FORWARD, 2), TileClass(Direction.BACKWARD, 2)


@pytest.mark.parametrize(
    ("kind", "length", "tile"),
    [
        (FWD_16, 131072, Tile(Pipeline.SPREAD, 1, 512, 2, 4, held=8, stages=3)),
        (FWD_16, 65536, Tile(Pipeline.TWO_PASS, 1, 8192, 32, held=2)),
        (FWD_16, 4096, Tile(Pipeline.TWO_PASS, 1, 2048, 8)),
        (BWD_16, 1024, Tile(Pipeline.ROWS, 2, 1024, 4, 4)),
        (BWD_16, 4096, Tile(Pipeline.ONE_PASS, 1, 4096, 16, 2, stages=3)),
        (BWD_16, 16384, Tile(Pipeline.SPREAD, 4, 1024, 4, 3)),
    ],
)
def test_what_an_h200_was_seen_to_prefer_is_among_them(kind: TileClass, length: int, tile: Tile) -> None:
    bucket = next(bucket for bucket in standard_ladder() if length in bucket)
    assert tile in candidates(kind, bucket, length, ARCH, few=False)
