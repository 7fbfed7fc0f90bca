"""The model of tiles on GPUs that are not here: how it counts, what it says of the rule, that its table is current."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks import cli
from benchmarks.tile_model import binaries
from benchmarks.tile_model import table as table_module
from benchmarks.tile_model.binaries import Event, Usage, most_loading
from benchmarks.tile_model.devices import DEVICES
from benchmarks.tile_model.model import FEW, MANY, RULE, TABLE, Case, Row, every_case, model, of_many_rows
from benchmarks.tile_model.table import (
    FOLDER,
    KNOWN,
    LEAST_MARGIN,
    NONE_FITS,
    SPILLS,
    TOO_LITTLE,
    Calibration,
    Known,
    calibrate,
    faults,
    load,
    outlived,
    render,
    save,
    unknown,
)
from normforge.codegen.values import DType, Norm

from ..thorough import first_of_each

# A binary of one version of Triton: another's may take other registers.
_TRITON = version("triton")


def committed() -> tuple[dict[str, str], list[Row]]:
    found = load(FOLDER)
    assert found is not None
    return found


def usage(threads: int, registers: int, shared: int = 0) -> Usage:
    return Usage(threads, registers, spilled_bytes=0, shared_bytes=shared, loading_bytes=16)


@pytest.mark.parametrize(
    ("arch", "taken", "fits"),
    [
        # As an H200's profiler has them, in results/h200/profile.csv: 50, 75, 100 and 63 % of 64 warps.
        ("sm_90", usage(32, 64), (32, "programs")),
        ("sm_90", usage(64, 40, 16), (24, "registers")),
        ("sm_90", usage(128, 32, 32), (16, "warps")),
        ("sm_90", usage(256, 48, 64), (5, "registers")),
        ("sm_90", usage(256, 223, 65624), (1, "registers")),
        # CUDA keeps a KiB of each program's.
        ("sm_80", usage(128, 32, 81 * 1024), (2, "shared")),
        ("sm_80", usage(128, 32, 82 * 1024), (1, "shared")),
        ("sm_100", usage(1024, 80), (0, "registers")),
        # A lane's 512 registers: four waves of 121 to 128, three of 129, and 8 waves at most.
        ("gfx942", usage(256, 128), (4, "registers")),
        ("gfx942", usage(256, 129), (3, "registers")),
        ("gfx942", usage(64, 64), (32, "programs")),
        ("gfx942", usage(128, 61), (16, "programs")),
        ("gfx942", usage(256, 32, 33 * 1024), (1, "shared")),
    ],
)
def test_so_many_programs_fit(arch: str, taken: Usage, fits: tuple[int, str]) -> None:
    assert DEVICES[arch].resident(taken) == fits


def test_littles_law() -> None:
    """4.8 TB/s of 700 ns are 3.36 MB, of 132 multiprocessors; of a copy half is read."""
    assert DEVICES["sm_90"].needed_bytes(1.0) == pytest.approx(25455, abs=1)
    assert DEVICES["sm_90"].needed_bytes(0.5) == pytest.approx(12727, abs=1)


def test_bytes_of_a_call_that_are_read() -> None:
    case = Case("sm_90", "forward", Norm.LAYER, DType.BF16, 4096, MANY)
    shares = {kind: replace(case, kind=kind).read_share for kind in ("forward", "add", "add_quant", "backward")}
    assert shares == {"forward": 1 / 2, "add": 1 / 2, "add_quant": 4 / 7, "backward": 2 / 3}
    assert replace(case, kind="add_quant", dtype=DType.FP32).read_share == 8 / 13


def test_what_is_waited_for_is_under_way_no_more() -> None:
    first, second = Event(tag=0, bytes=16), Event(tag=1, bytes=8)
    assert most_loading([first, second]) == 24
    assert most_loading([first, Event(done=frozenset({0})), second]) == 16
    # A barrier that two loads set is waited for once.
    assert most_loading([first, first, Event(done=frozenset({0})), second, second]) == 32
    # AMD's counter: all but the last, a store, have come.
    assert most_loading([first, first, Event(tag=0), Event(left=1), second, second, second]) == 32
    assert most_loading([first, Event(left=0), second]) == 16


def test_sass_is_read() -> None:
    text = (
        "--:-:2:-:4\tLDG.E.EL.128 R8, desc[UR4][R26.64];\n"
        "--:0:3:-:1\t@!P1 LDG.E.U16 R4, [R26.64+0x10];\n"
        "--:-:-:-:1\tIMAD R1, R2, R3, R4;\n"
        "04:-:-:Y:2\tPRMT R29, R8, 0x7632, R29;\n"
        "--:-:4:-:4\tLDG.E R8, [R2.64];\n"
        "08:-:4:-:4\tLDG.E.64 R8, [R2.64];\n"
        "--:-:-:-:4\tLDGSTS.E.BYPASS.128 [R5], [R2.64];\n"
        "--:-:-:-:1\tLDGDEPBAR;\n"
    )
    assert [(sorted(event.done), event.tag, event.bytes) for event in binaries._sass(text)] == [
        ([], 2, 16),
        ([], 3, 2),
        ([2], None, 0),
        ([], 4, 4),
        ([3], 4, 8),
        ([], -1, 16),
    ]


def test_amdgcn_is_read() -> None:
    text = (
        "\tbuffer_load_dwordx4 v[2:5], v41, s[0:3], 0 offen\n"
        "\tglobal_load_ushort v1, v0, s[4:5]\n"
        "\ts_waitcnt lgkmcnt(0)\n"
        "\ts_waitcnt vmcnt(1) lgkmcnt(0)\n"
        "\tglobal_store_dwordx2 v0, v[2:3], s[4:5]\n"
        "\tds_load_b64 v[0:1], v2\n"
    )
    assert [(event.left, event.tag, event.bytes) for event in binaries._amdgcn(text)] == [
        (None, 0, 16),
        (None, 0, 2),
        (1, None, 0),
        (None, 0, 0),
    ]


GOOD = Row(
    arch="sm_80",
    tiles=RULE,
    kind="forward",
    norm="ln",
    dtype="bf16",
    n=4096,
    rows=MANY,
    tile="one_pass 1 1024 4",
    kernel="ln_fwd_bf16_one_pass",
    threads=128,
    registers=55,
    spilled_bytes=0,
    shared_bytes=32,
    resident=2,
    limit="warps",
    at_work=2,
    in_flight=200,
    needed=100,
)


def test_a_bad_tile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(GOOD) == []
    assert faults(replace(GOOD, spilled_bytes=8)) == [SPILLS]
    assert faults(replace(GOOD, resident=0)) == [NONE_FITS]
    assert faults(replace(GOOD, in_flight=int(99 * LEAST_MARGIN))) == [TOO_LITTLE]
    assert faults(replace(GOOD, in_flight=1, rows=FEW)) == []
    spilling = replace(GOOD, spilled_bytes=8)
    assert (spilling, SPILLS) in unknown([GOOD, spilling])
    assert unknown([replace(spilling, tiles=TABLE)]) == []
    listed = Known(SPILLS, "sm_80", "ln_fwd_*", "one_pass *", "for the test", most=8)
    monkeypatch.setattr(table_module, "KNOWN", (listed,))
    assert unknown([spilling]) == []
    assert len(unknown([replace(spilling, spilled_bytes=12)])) == 1
    assert outlived([GOOD]) == [listed]
    assert outlived([spilling]) == []


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    save(tmp_path, {"revision": "abc1234"}, [GOOD, replace(GOOD, arch="gfx942")])
    assert load(tmp_path) == ({"revision": "abc1234"}, [GOOD, replace(GOOD, arch="gfx942")])
    assert "sm_80 (A100 80GB)" in render([GOOD])


def test_the_committed_table_is_whole_and_what_is_bad_in_it_is_listed() -> None:
    _, rows = committed()
    kernels = {(one.arch, one.tiles, one.kind, one.norm, one.dtype, one.n, one.rows) for one in rows}
    cases = {
        (
            case.arch,
            case.tiles,
            case.kind,
            case.norm_name,
            case.dtype.value,
            case.n,
            case.rows,
        )
        for case in every_case()
    }
    assert kernels == cases
    assert unknown(rows) == []
    assert outlived(rows) == []
    assert all(known.reason for known in KNOWN)


def test_no_tile_of_an_h200_that_is_good_has_less_in_flight_than_is_asked() -> None:
    calibration = calibrate(committed()[1])
    # Of both norms.
    assert len(calibration.cells) > 60
    assert LEAST_MARGIN <= min(calibration.good()) < 1.1 * LEAST_MARGIN


def test_cells_are_counted_by_margin() -> None:
    calibration = Calibration(((2.5, 0.95), (3.0, 0.5), (4.0, 0.92), (9.0, 0.9)))
    assert calibration.good() == [2.5, 4.0]
    assert (calibration.good(most=4), calibration.good(4), calibration.below(4)) == ([2.5], [4.0], 2)
    assert "reach 0.92 of the copy's speed, none with a margin below 2.50." in str(calibration)
    assert "With one below 4 they are 1 of 2, from there on 1 of 2; " in str(calibration)


def test_ranks_are_correlated() -> None:
    assert Calibration(((1.0, 0.5), (2.0, 0.6), (3.0, 0.95))).rank_correlation == pytest.approx(1)
    assert Calibration(((1.0, 0.9), (2.0, 0.6), (3.0, 0.5))).rank_correlation == pytest.approx(-1)
    # Equals share the middle of their places: (-1, 0.5, 0.5) and (-1, 1, 0).
    assert Calibration(((1.0, 0.5), (2.0, 0.9), (2.0, 0.8))).rank_correlation == pytest.approx(0.75**0.5)


# Of each GPU and kind of call, a row that a program holds and one that it reads twice come first.
CASES = first_of_each(
    [case for case in of_many_rows() if case.norm is Norm.LAYER],
    lambda case: (case.arch, case.kind, case.n) if case.dtype is DType.BF16 and case.n in (4096, 32768) else None,
    lambda case: f"{case.arch}-{case.mode.name}-{case.n}",
)


@pytest.mark.compile
@pytest.mark.parametrize("case", CASES)
def test_a_tile_of_the_rule_is_as_the_table_says(case: Case) -> None:
    found = model(case)
    header, rows = committed()
    wrong = unknown(found)
    if header["triton"] == _TRITON:
        assert wrong == []
        assert set(found) <= set(rows)
    else:
        # Registers are another compiler's; what spills is listed of one.
        assert [fault for _, fault in wrong if fault != SPILLS] == []


def test_a_summary_is_written_beside_its_table(tmp_path: Path) -> None:
    for path in FOLDER.glob("tiles.*"):
        shutil.copy(path, tmp_path)
    assert cli.main(["model-tiles", "--summarise", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "summary.txt").read_text() == (FOLDER / "summary.txt").read_text()
