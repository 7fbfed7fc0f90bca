"""Tables of measured tiles: what they say is what instances get, and what is wrong with one names file and line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normforge.codegen import emit, tile_tables
from normforge.codegen.errors import TileTableError
from normforge.codegen.instance import ANY, Bucket, Tile, Tiles
from normforge.codegen.manifest import load
from normforge.codegen.model import Mode
from normforge.codegen.tile_limits import why_not
from normforge.codegen.tile_tables import TileTable, merge, read_table, tiles_of, write_table
from normforge.codegen.tiling import CLASSES, Load, TileClass, class_of, generic_tiles, standard_ladder
from normforge.codegen.values import Direction, DType, FusedAdd, FusedQuant, Norm, Pipeline, ScaleGroup
from normforge.selection.table import load_folder

from ..folders import write
from ..thorough import THOROUGH

PLAIN = TileClass(Direction.FORWARD, 2)
BACKWARD = TileClass(Direction.BACKWARD, 4)
LN_BF16 = Mode(Norm.LAYER, DType.BF16, DType.BF16)

TABLE = """\
fwd_16bit:
  1..300:
    large: {pipeline: rows, rows: 4, block: 512, warps: 2}
    small: {pipeline: one_pass, rows: 1, block: 512, warps: 4}
  1025..4096:
    large: {pipeline: one_pass, rows: 1, block: 256, warps: 1}
    small: {pipeline: one_pass, rows: 1, block: 4096, warps: 16}
  40000..:
    large: {pipeline: two_pass, rows: 1, block: 4096, warps: 8}
    small: {pipeline: two_pass, rows: 1, block: 8192, warps: 32}
"""


@pytest.fixture
def table_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "sm_90.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


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
def test_a_bucket_takes_the_range_that_holds_its_longest_row(
    bucket: Bucket, block: int | None, table_file: Callable[[str], Path]
) -> None:
    tables = {"sm_90": read_table(table_file(TABLE))}
    generic = generic_tiles(PLAIN, bucket)
    by_arch = dict(tiles_of(LN_BF16, bucket, tables))
    assert list(by_arch) == [ANY, "sm_90"]
    assert by_arch[ANY] == generic
    assert by_arch["sm_90"].large.block == (generic.large.block if block is None else block)


def test_another_class_keeps_the_rule(table_file: Callable[[str], Path]) -> None:
    tables = {"sm_90": read_table(table_file(TABLE))}
    mode = Mode(Norm.RMS, DType.FP32, DType.FP32)
    for bucket in standard_ladder():
        assert dict(tiles_of(mode, bucket, tables))["sm_90"] == generic_tiles(class_of(mode), bucket)


def test_the_table_that_is_emitted_has_a_ladder_an_architecture(
    table_file: Callable[[str], Path], manifest_file: Callable[[str], Path]
) -> None:
    tables = {"sm_90": read_table(table_file(TABLE)), "gfx942": TileTable({})}
    path = manifest_file("groups:\n  a: {norm: rms, dtype_in: [bf16, fp32], n: [n2048, n128]}\n")
    text = emit.render_folder(load(path, tables).instances)["dispatch.py"]
    names: dict[str, dict[str, dict[str, object]]] = {}
    exec(text, names)
    assert {mode: list(ladders) for mode, ladders in names["TABLE"].items()} == {
        "rms_fwd_bf16": [ANY, "sm_90"],
        "rms_fwd_fp32": [ANY],
    }
    assert names["TABLE"]["rms_fwd_bf16"]["sm_90"] == (
        (1, 128, "n128", ("rows", 4, 512, 2), ("one_pass", 1, 512, 4)),
        (1537, 2048, "n2048", ("one_pass", 1, 256, 1), ("one_pass", 1, 4096, 16)),
    )


def test_a_module_holds_every_kernel_that_any_architecture_takes(
    table_file: Callable[[str], Path], manifest_file: Callable[[str], Path]
) -> None:
    tables = {"sm_90": read_table(table_file(TABLE.replace("one_pass", "two_pass")))}
    path = manifest_file("groups:\n  a: {norm: rms, dtype_in: bf16, n: n2048}\n")
    module = emit.render_folder(load(path, tables).instances)["rms_fwd_bf16.py"]
    assert {pipeline: f"def rms_fwd_bf16_{pipeline.value}(" in module for pipeline in Pipeline} == {
        Pipeline.ROWS: False,
        Pipeline.ONE_PASS: True,
        Pipeline.TWO_PASS: True,
        Pipeline.SPREAD: False,
    }


TILE = "{pipeline: one_pass, rows: 1, block: 512, warps: 4}"


def one(tile: str, bucket: str = "1..1024", kind: str = "fwd_16bit") -> str:
    """A table whose tile for many rows is on line 3."""
    return f"{kind}:\n  {bucket}:\n    large: {tile}\n    small: {TILE}\n"


WRONG = {
    "empty": ("", "1: the table is empty; measure one with normforge tune --out FILE, or remove it"),
    "not_yaml": ("fwd_16bit: [", "1: this is not valid YAML"),
    "class": (
        one(TILE, kind="fwd_8bit"),
        "1: unknown class 'fwd_8bit'; did you mean ",
    ),
    "range": (one(TILE, "n1024"), "2: fwd_16bit: n1024 takes a range, first..last or first.., from 1 up, not 'n1024'"),
    "backwards": (one(TILE, "9..4"), "2: fwd_16bit: 9..4 (9..4) ends before it starts"),
    "no_small": (f"fwd_16bit:\n  1..4:\n    large: {TILE}\n", "2: fwd_16bit: 1..4 has no tile for small M; add small"),
    "size": (f"fwd_16bit:\n  1..4:\n    huge: {TILE}\n", "3: fwd_16bit: unknown size of M 'huge'; use one of large, "),
    "overlap": (one(TILE) + one(TILE, "1024..2048").partition("\n")[2], "5: fwd_16bit: 1024..2048 overlaps 1..1024"),
    "field": (one("{pipelin: rows}"), "3: fwd_16bit: unknown field 'pipelin'; did you mean pipeline? Use one of "),
    "pipeline": (one("{pipeline: one, rows: 1, block: 1, warps: 1}"), "3: fwd_16bit: unknown pipeline 'one'; use one "),
    "no_warps": (one("{pipeline: rows, rows: 1, block: 1024}"), "3: fwd_16bit: the tile has no warps; a tile is {pip"),
    "word": (one("{pipeline: rows, rows: two, block: 1, warps: 1}"), "3: fwd_16bit: rows takes a whole number, not th"),
    "power": (one("{pipeline: rows, rows: 3, block: 1024, warps: 1}"), "3: fwd_16bit: rows is 3; it takes a power of"),
    "warps": (one("{pipeline: rows, rows: 1, block: 1024, warps: 64}"), "warps is 64; a program has at most 32"),
    "cut_gated": (
        one("{pipeline: rows, rows: 2, block: 512, warps: 1}", kind="bwd_16bit_gate"),
        "3: bwd_16bit_gate: pipeline rows takes whole rows of bwd_16bit_gate: block is 512 and rows are 1..1024 lon",
    ),
    "cut_groups": (
        one("{pipeline: rows, rows: 2, block: 512, warps: 1}", "1..600", "fwd_16bit_scaled"),
        "fwd_16bit_scaled: block is 512 and rows are 1..600 long; write block: 1024, or take another pipeline",
    ),
    "cut_endless": (
        one("{pipeline: rows, rows: 2, block: 512, warps: 1}", "1.."),
        "3: fwd_16bit: pipeline rows holds rows in registers and 1.. has no cap; take two_pass",
    ),
    "cut_finely": (
        one("{pipeline: rows, rows: 8, block: 16, warps: 4}"),
        "3: fwd_16bit: a program would hold 64 chunks, each written out in the machine code; write a wider block",
    ),
    "held": (one(TILE, "1.."), "3: fwd_16bit: pipeline one_pass holds a row in registers and 1.. has no cap; take two"),
    "rows_one": (
        one("{pipeline: rows, rows: 1, block: 1024, warps: 4}"),
        "3: fwd_16bit: pipeline rows takes several rows per program, and rows is 1; take one_pass",
    ),
    "rows_one_backward": (
        one("{pipeline: two_pass, rows: 1, block: 1024, warps: 4}", kind="bwd_16bit"),
        "3: bwd_16bit: pipeline two_pass takes several rows per program, and rows is 1; write rows: 2",
    ),
    "rows": (
        one("{pipeline: two_pass, rows: 2, block: 512, warps: 4}"),
        "two_pass takes one row per program, and rows i",
    ),
    "resident": (
        one("{pipeline: one_pass, rows: 1, block: 512, warps: 4, resident: 17}"),
        "3: fwd_16bit: resident is 17 programs of 4 warps; a multiprocessor holds 1 to 16",
    ),
    "resident_none": (
        one("{pipeline: one_pass, rows: 1, block: 512, warps: 32, resident: 0}"),
        "3: fwd_16bit: resident is 0 programs of 32 warps; a multiprocessor holds 1 to 2",
    ),
    "resident_word": (
        one("{pipeline: one_pass, rows: 1, block: 512, warps: 4, resident: all}"),
        "3: fwd_16bit: resident takes a whole number, not the word 'all'",
    ),
    "held_one_pass": (
        one("{pipeline: one_pass, rows: 1, block: 512, warps: 4, held: 1}", "512..1024"),
        "3: fwd_16bit: held is 1; only forward two_pass of modes that move x and y alone keeps chunks, 512 columns "
        "each, and no more than the shortest row of 512..1024 has; leave held out",
    ),
    "held_add": (
        one("{pipeline: two_pass, rows: 1, block: 512, warps: 4, held: 1}", "512..1024", "fwd_16bit_add"),
        "3: fwd_16bit_add: held is 1; only forward two_pass of modes that move x and y alone keeps chunks",
    ),
    "held_backward": (
        one("{pipeline: two_pass, rows: 1, block: 512, warps: 4, held: 1}", "512..1024", "bwd_16bit"),
        "3: bwd_16bit: held is 1; only forward two_pass",
    ),
    "held_beyond": (
        one("{pipeline: two_pass, rows: 1, block: 512, warps: 4, held: 2}", "1023..1024"),
        "3: fwd_16bit: held is 2; only forward two_pass of modes that move x and y alone keeps chunks, 512 columns "
        "each, and no more than the shortest row of 1023..1024 has",
    ),
    "spread_add": (
        one("{pipeline: spread, rows: 1, block: 512, warps: 4, held: 2}", kind="fwd_16bit_add"),
        "3: fwd_16bit_add: pipeline spread, forward, is for modes that move x and y alone, and RMSNorm's sums; take "
        "two_pass",
    ),
    "spread_fp32": (
        one("{pipeline: spread, rows: 1, block: 512, warps: 4, held: 2}", kind="fwd_32bit"),
        "3: fwd_32bit: pipeline spread, forward, exchanges means as fp32, too coarse for fp32 rows; take two_pass",
    ),
    "spread_rows": (
        one("{pipeline: spread, rows: 2, block: 512, warps: 4, held: 2}"),
        "3: fwd_16bit: pipeline spread, forward, takes rows: 1 and held, a program's chunks, as a power of two",
    ),
    "spread_holds_nothing": (
        one("{pipeline: spread, rows: 1, block: 512, warps: 4}"),
        "3: fwd_16bit: pipeline spread, forward, takes rows: 1 and held, a program's chunks, as a power of two",
    ),
    "spread_holds_three": (
        one("{pipeline: spread, rows: 1, block: 512, warps: 4, held: 3}"),
        "3: fwd_16bit: pipeline spread, forward, takes rows: 1 and held, a program's chunks, as a power of two",
    ),
    "spread_stages_and_holds_nothing": (
        one("{pipeline: spread, rows: 1, block: 512, warps: 4, held: 0, stages: 4}"),
        "3: fwd_16bit: pipeline spread, forward, takes rows: 1 and held, a program's chunks, as a power of two",
    ),
    "two_pass_narrow": (
        one("{pipeline: two_pass, rows: 1, block: 4, warps: 1}"),
        "3: fwd_16bit: block is 4; forward two_pass takes 8 columns or more",
    ),
    "spread_narrow": (
        one("{pipeline: spread, rows: 1, block: 1, warps: 1, held: 1}"),
        "3: fwd_16bit: block is 1; forward spread takes 2 columns or more",
    ),
    "backward_narrow": (
        one("{pipeline: one_pass, rows: 1, block: 1, warps: 1}", "1..16", "bwd_16bit"),
        "3: bwd_16bit: block is 1; backward one_pass takes 2 columns or more",
    ),
    "backward_spread_narrow": (
        one("{pipeline: spread, rows: 2, block: 1, warps: 1}", "1..16", "bwd_32bit"),
        "3: bwd_32bit: block is 1; backward spread takes 2 columns or more",
    ),
    "chunks": (
        one("{pipeline: one_pass, rows: 1, block: 16, warps: 1}"),
        "3: fwd_16bit: a program would hold 64 chunks, each written out in the machine code; write a wider block",
    ),
    "chunks_held": (
        one("{pipeline: two_pass, rows: 1, block: 16, warps: 1, held: 64}", "1024..1024"),
        "3: fwd_16bit: a program would hold 64 chunks, each written out in the machine code; write held: 32 or less",
    ),
    "values": (
        one("{pipeline: rows, rows: 1048576, block: 1024, warps: 4}"),
        "a program would hold 1073741824 values on 4 warps, whose registers hold 32768; write fewer rows",
    ),
    "a_number_without_end": (
        one(f"{{pipeline: rows, rows: {'1' * 5000}, block: 1024, warps: 4}}"),
        "3: fwd_16bit: rows takes a whole number, not the whole number 1111",
    ),
    "a_tag": (
        one("!!python/object:os.system {pipeline: rows, rows: 2, block: 1024, warps: 4}"),
        "3: fwd_16bit: expected a tile, {pipeline, rows, block, warps, resident, held, stages}, not a mapping tagged",
    ),
    "no_stage": (
        one("{pipeline: one_pass, rows: 1, block: 512, warps: 4, stages: 0}", kind="bwd_16bit"),
        "3: bwd_16bit: stages is 0; forward spread and backward one_pass have 1 stage or more, and others 1",
    ),
    "stages_of_two_pass": (
        one("{pipeline: two_pass, rows: 1, block: 512, warps: 4, stages: 3}"),
        "3: fwd_16bit: stages is 3; forward spread and backward one_pass have 1 stage or more, and others 1; leave",
    ),
    "more_stages_than_fit": (
        one("{pipeline: one_pass, rows: 1, block: 1024, warps: 4, resident: 8, stages: 8}", "1..1024", "bwd_16bit"),
        "3: bwd_16bit: stages is 8, and the shared memory of sm_90 holds 7 of them; write stages: 7",
    ),
    "more_stages_than_fit_of_a_sum": (
        one("{pipeline: one_pass, rows: 1, block: 1024, warps: 4, resident: 8, stages: 7}", "1..1024", "bwd_16bit_add"),
        "3: bwd_16bit_add: stages is 7, and the shared memory of sm_90 holds 5 of them; write stages: 5",
    ),
    "more_stages_than_fit_a_slice": (
        one("{pipeline: spread, rows: 1, block: 1024, warps: 4, resident: 4, held: 4, stages: 9}"),
        "3: fwd_16bit: stages is 9, and the shared memory of sm_90 holds 7 of them; write stages: 7",
    ),
    "spread_backward_rows": (
        one("{pipeline: spread, rows: 1, block: 512, warps: 4}", kind="bwd_16bit"),
        "3: bwd_16bit: pipeline spread, backward, takes rows: 2 or 4 and no held",
    ),
    "spread_backward_many_rows": (
        one("{pipeline: spread, rows: 8, block: 512, warps: 4}", kind="bwd_32bit"),
        "3: bwd_32bit: pipeline spread, backward, takes rows: 2 or 4 and no held",
    ),
    "spread_gated": (
        one("{pipeline: spread, rows: 2, block: 512, warps: 4}", kind="bwd_16bit_gate"),
        "3: bwd_16bit_gate: pipeline spread is for norms without a gate; take two_pass",
    ),
    "spread_dropped": (
        one("{pipeline: spread, rows: 2, block: 512, warps: 4}", kind="bwd_16bit_drop"),
        "3: bwd_16bit_drop: pipeline spread is for norms without a dropout; take two_pass",
    ),
    "spread_modulated": (
        one("{pipeline: spread, rows: 2, block: 512, warps: 4}", kind="bwd_16bit_mod"),
        "3: bwd_16bit_mod: pipeline spread is for norms without a modulation; take two_pass",
    ),
    "stages_gated": (
        one("{pipeline: one_pass, rows: 1, block: 512, warps: 4, stages: 3}", kind="bwd_16bit_gate"),
        "3: bwd_16bit_gate: stages is 3, and kernels with a gate have 1; leave stages out",
    ),
    "spread_backward_holds": (
        one("{pipeline: spread, rows: 2, block: 512, warps: 4, held: 1}", kind="bwd_16bit"),
        "3: bwd_16bit: pipeline spread, backward, takes rows: 2 or 4 and no held",
    ),
}

WRONG |= {
    name: (f"{one(TILE)}    some: {tile}\n", f"5: fwd_16bit: {message}")
    for name, tile, message in (
        ("some_warps", "{pipeline: rows, rows: 2, block: 1024, warps: 64}", "warps is 64; a program has at most 32"),
        (
            "some_cut",
            "{pipeline: rows, rows: 1, block: 512, warps: 4}",
            "pipeline rows takes several rows per program, and",
        ),
        ("some_word", "{pipeline: rows, rows: two, block: 1024, warps: 4}", "rows takes a whole number, not"),
    )
}

RIGHT = {
    "resident": ("fwd_16bit", "1..", "{pipeline: two_pass, rows: 1, block: 512, warps: 32, resident: 2}"),
    "held": ("fwd_32bit", "1024..", "{pipeline: two_pass, rows: 1, block: 512, warps: 4, resident: 1, held: 2}"),
    "spread": ("fwd_16bit", "1..", "{pipeline: spread, rows: 1, block: 4096, warps: 16, resident: 1, held: 4}"),
    "cut": ("fwd_16bit_add", "1025..2048", "{pipeline: rows, rows: 2, block: 512, warps: 4}"),
    "cut_backward": ("bwd_16bit", "129..256", "{pipeline: rows, rows: 4, block: 64, warps: 1, resident: 12}"),
    "stages": (
        "bwd_16bit",
        "1..1024",
        "{pipeline: one_pass, rows: 1, block: 512, warps: 4, resident: 8, held: 0, stages: 3}",
    ),
    "spread_backward": ("bwd_32bit", "1..", "{pipeline: spread, rows: 4, block: 1024, warps: 4, resident: 3}"),
    "spread_backward_2": ("bwd_16bit", "1..", "{pipeline: spread, rows: 2, block: 512, warps: 4}"),
}


@pytest.mark.parametrize(("kind", "lengths", "tile"), RIGHT.values(), ids=RIGHT)
def test_what_is_right_is_read_and_written_as_it_was(
    kind: str, lengths: str, tile: str, table_file: Callable[[str], Path]
) -> None:
    text = f"# a remark\n\n{kind}:\n  {lengths}:\n    large: {tile}\n    small: {tile}\n"
    for whole in (text, f"{text}    some: {tile}\n", f"{text}    some: {tile}\n    ragged: {tile}\n"):
        assert write_table(read_table(table_file(whole)), "# a remark") == whole


def test_a_tile_for_some_rows_is_in_the_dispatch_table(
    table_file: Callable[[str], Path], manifest_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """And nothing of it is where no table has one."""
    path = manifest_file("groups:\n  a: {norm: rms, dtype_in: bf16, n: n1024}\n")
    text = one(TILE, "512..1024")
    some = "{pipeline: two_pass, rows: 1, block: 512, warps: 2}"
    for extra, expected in (("", False), (f"    some: {some}\n", True)):
        tables = {"sm_90": read_table(table_file(text + extra))}
        instances = load(path, tables).instances
        dispatch_file = emit.render_folder(instances)["dispatch.py"]
        assert ("SOME_M = 2048\n" in dispatch_file) == ("SOME_M" in dispatch_file) == expected
        entry = next(iter(load_folder(write(tmp_path / f"made{expected}", instances))))
        warps = {m: entry.tile(m, entry.first, "sm_90").warps for m in (256, 257, 2048, 2049)}
        assert warps == {256: 4, 257: 2 if expected else 4, 2048: 2 if expected else 4, 2049: 4}
        module = emit.render_folder(instances)["rms_fwd_bf16.py"]
        assert ("def rms_fwd_bf16_two_pass(" in module) == expected


def test_a_module_holds_a_spread_kernel_where_a_table_takes_one(
    table_file: Callable[[str], Path], manifest_file: Callable[[str], Path]
) -> None:
    kind, lengths, tile = RIGHT["spread"]
    tables = {"sm_90": read_table(table_file(f"{kind}:\n  {lengths}:\n    large: {tile}\n    small: {tile}\n"))}
    path = manifest_file("groups:\n  a: {norm: rms, dtype_in: [bf16, fp32], fadd: [none, pre_add], n: [n2048, nbig]}\n")
    files = emit.render_folder(load(path, tables).instances)
    modules = {name[:-3]: text for name, text in files.items() if name.startswith("rms_")}
    for part in ("spread", "window"):
        assert {name for name, text in modules.items() if f"def {name}_{part}(" in text} == {"rms_fwd_bf16"}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_names_file_and_line(text: str, message: str, table_file: Callable[[str], Path]) -> None:
    path = table_file(text)
    with pytest.raises(TileTableError) as caught:
        read_table(path)
    assert str(caught.value).startswith(f"{path}:")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["spread", "spread_backward"])
def test_no_row_is_spread_where_programs_cannot_wait_for_one_another(name: str, tmp_path: Path) -> None:
    kind, lengths, tile = RIGHT[name]
    path = tmp_path / "gfx942.yaml"
    path.write_text(f"{kind}:\n  {lengths}:\n    large: {tile}\n    small: {tile}\n")
    with pytest.raises(TileTableError) as caught:
        read_table(path)
    problem = "pipeline spread needs PTX, which gfx942 does not run; take two_pass"
    assert str(caught.value) == f"{path}:3: {kind}: {problem}"


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


ladders = st.lists(st.integers(1, 100_000), min_size=1, max_size=5, unique=True).map(sorted)


def tiles_of_class(kind: TileClass) -> st.SearchStrategy[Tiles]:
    tile = st.builds(
        Tile,
        st.just(Pipeline.TWO_PASS),
        st.just(2 if kind.direction is Direction.BACKWARD else 1),
        st.sampled_from([512, 4096]),
        st.sampled_from([1, 8, 32]),
        st.sampled_from([1, 2]),
    )
    return st.builds(Tiles, tile, tile, st.none() | tile, st.none() | tile)


@THOROUGH
@settings(deadline=None)
@given(lasts=ladders, data=st.data())
def test_a_table_survives_writing_and_reading(
    tmp_path_factory: pytest.TempPathFactory, lasts: list[int], data: st.DataObject
) -> None:
    firsts = [1, *(last + 1 for last in lasts)]
    buckets = [Bucket("", first, last) for first, last in zip(firsts, [*lasts, None], strict=True)]
    kinds = data.draw(st.lists(st.sampled_from(CLASSES), min_size=1, unique=True))
    table = TileTable({kind: tuple((bucket, data.draw(tiles_of_class(kind))) for bucket in buckets) for kind in kinds})
    path = tmp_path_factory.mktemp("tables") / "gfx942.yaml"
    path.write_text(write_table(table, "# a remark"))
    read = read_table(path)
    assert {kind: [(str(bucket), pair) for bucket, pair in rows] for kind, rows in read.rows.items()} == {
        kind: [(str(bucket), pair) for bucket, pair in rows] for kind, rows in table.rows.items()
    }


def test_merging_keeps_what_was_not_measured_again() -> None:
    def table(kind: TileClass, warps: int, *buckets: Bucket) -> TileTable:
        tile = Tile(Pipeline.TWO_PASS, 1, 512, warps)
        return TileTable({kind: tuple((bucket, Tiles(tile, tile)) for bucket in buckets)})

    old = table(PLAIN, 1, Bucket("", 1, 10), Bucket("", 11, 20), Bucket("", 21, None))
    merged = merge(merge(old, table(PLAIN, 2, Bucket("", 15, 25))), table(BACKWARD, 4, Bucket("", 1, 10)))
    assert [(str(bucket), pair.large.warps) for bucket, pair in merged.rows[PLAIN]] == [("1..10", 1), ("15..25", 2)]
    assert [(str(bucket), pair.large.warps) for bucket, pair in merged.rows[BACKWARD]] == [("1..10", 4)]


def test_with_a_dropout_the_adds_tiles_serve_where_none_were_measured() -> None:
    """A norm's own before those of both, and none that spread rows."""
    add, bucket, spread = Load.ADD, Bucket("n12288", 8193, 12288), Tile(Pipeline.SPREAD, 2, 1024, 4)
    few = Tile(Pipeline.TWO_PASS, 2, 1024, 8)
    table = {TileClass(Direction.BACKWARD, 2, add): ((bucket, Tiles(spread, few)),)}
    mode = Mode(Norm.RMS, DType.BF16, DType.BF16, FusedAdd.PRE_ADD_STORE, direction=Direction.BACKWARD)
    generic = generic_tiles(class_of(mode), bucket)
    for tables in (table, table | {TileClass(Direction.BACKWARD, 2, Load.DROP, rms=True): ((bucket, generic),)}):
        found = [
            dict(tiles_of(each, bucket, {"sm_90": TileTable(tables)}))["sm_90"]
            for each in (mode, replace(mode, dropout=True))
        ]
        assert found[0] == Tiles(spread, few, generic.large)
        assert found[1] == (Tiles(generic.large, few) if tables is table else generic)
    # Of some rows, which have a tile of their own, too.
    with_some = {kind: ((bucket, replace(rows[0][1], some=few)),) for kind, rows in table.items()}
    dropping = dict(tiles_of(replace(mode, dropout=True), bucket, {"sm_90": TileTable(with_some)}))["sm_90"]
    assert dropping == Tiles(generic.large, few, some=few)


def test_backward_an_add_takes_plain_tiles_where_none_were_measured() -> None:
    """And the rule's instead of one that has more on its way to shared memory than that holds of three tensors."""
    bucket = Bucket("n8192", 7169, 8192)
    plain, add = (TileClass(Direction.BACKWARD, 4, load) for load in (Load.PLAIN, Load.ADD))
    mode = Mode(Norm.LAYER, DType.FP32, DType.FP32, FusedAdd.PRE_ADD_STORE, direction=Direction.BACKWARD)
    generic = generic_tiles(add, bucket)

    def found(tile: Tile) -> Tile:
        table = TileTable({plain: ((bucket, Tiles(tile, tile)),)})
        return dict(tiles_of(mode, bucket, {"sm_90": table}))["sm_90"].large

    three, four = (Tile(Pipeline.ONE_PASS, 1, 1024, 16, stages=stages) for stages in (3, 4))
    assert [why_not(kind, bucket, four, "sm_90") is None for kind in (plain, add)] == [True, False]
    assert (found(three), found(four)) == (three, generic.large)


def test_forward_a_dropout_takes_tiles_that_read_rows_once() -> None:
    bucket, whole = Bucket("n4096", 3073, 4096), Tile(Pipeline.ONE_PASS, 1, 1024, 8)
    twice = Tile(Pipeline.TWO_PASS, 1, 2048, 16)
    table = {
        TileClass(Direction.FORWARD, 2, Load.ADD, rms=True): ((bucket, Tiles(twice, twice)),),
        TileClass(Direction.FORWARD, 2, Load.QUANT): ((bucket, Tiles(whole, whole)),),
    }
    mode = Mode(Norm.RMS, DType.BF16, DType.BF16, FusedAdd.PRE_ADD_STORE)
    for each, expected in ((mode, twice), (replace(mode, dropout=True), whole)):
        assert dict(tiles_of(each, bucket, {"sm_90": TileTable(table)}))["sm_90"].large == expected


def test_what_is_scaled_by_less_than_a_row_takes_quants_tiles_where_none_were_measured() -> None:
    """Its own before those, and of its own those of its norm."""
    bucket = Bucket("n4096", 3073, 4096)
    rows, own, of_rms = (
        Tiles(tile, tile) for tile in (Tile(Pipeline.ONE_PASS, 1, 1024, warps) for warps in (4, 8, 16))
    )
    table = {TileClass(Direction.FORWARD, 2, Load.QUANT): ((bucket, rows),)}
    measured = table | {TileClass(Direction.FORWARD, 2, Load.SCALED): ((bucket, own),)}
    both = measured | {TileClass(Direction.FORWARD, 2, Load.SCALED, rms=True): ((bucket, of_rms),)}
    of_rows = Mode(Norm.RMS, DType.BF16, DType.FP8_E4M3FN, fquant=FusedQuant.DYNAMIC, save_unquant=True)
    for mode, expected in (
        (of_rows, (rows, rows, rows)),
        (replace(of_rows, group_size=ScaleGroup.G128), (rows, own, of_rms)),
        (replace(of_rows, fquant=FusedQuant.STATIC, norm=Norm.LAYER), (rows, own, own)),
        (replace(of_rows, group_size=ScaleGroup.G128, fadd=FusedAdd.PRE_ADD_STORE), (rows, rows, rows)),
    ):
        found = [dict(tiles_of(mode, bucket, {"sm_90": TileTable(each)}))["sm_90"] for each in (table, measured, both)]
        assert [tiles.large for tiles in found] == [tiles.large for tiles in expected]


def test_no_class_takes_anothers_tile_that_cuts_rows_where_its_own_may_not_be() -> None:
    """A chunk may end within a group of scales."""
    bucket = Bucket("n256", 129, 256)
    cut, whole = Tile(Pipeline.ROWS, 8, 64, 2), Tile(Pipeline.ROWS, 4, 256, 1)
    of_rows = Mode(Norm.RMS, DType.BF16, DType.FP8_E4M3FN, fquant=FusedQuant.DYNAMIC)
    of_groups = replace(of_rows, group_size=ScaleGroup.G128)
    for measured, expected in ((Tiles(whole, whole, ragged=cut), whole), (Tiles(cut, whole), None)):
        table = {"sm_90": TileTable({TileClass(Direction.FORWARD, 2, Load.QUANT): ((bucket, measured),)})}
        assert dict(tiles_of(of_rows, bucket, table))["sm_90"] == measured
        found = dict(tiles_of(of_groups, bucket, table))["sm_90"]
        assert found == Tiles(expected or generic_tiles(class_of(of_groups), bucket).large, whole)


def test_every_mode_of_a_manifest_has_the_tiles_that_it_has_on_demand(tmp_path: Path) -> None:
    """Also where modes of one class differ in what a thread holds: backward with a gate of samples, and without."""
    manifest = tmp_path / "mine.yaml"
    manifest.write_text(
        "groups:\n  mine:\n    norm: layer\n    dtype_in: bf16\n    n: [n1024, n2048]\n    direction: bwd\n"
        "    fadd: [none, pre_add_store]\n    modulated: true\n    x_gate: [true, false]\n"
    )
    instances = [entry.instance for entry in load(manifest).entries]
    assert {instance.mode.x_gate for instance in instances} == {True, False}  # type: ignore[union-attr]  # no GroupMode
    for instance in instances:
        assert instance.tiles == tiles_of(instance.mode, instance.bucket), instance.name
