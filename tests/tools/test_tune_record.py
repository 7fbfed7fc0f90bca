"""What `normforge tune` writes while it measures, and how a run ends and goes on; what is measured is made up."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normforge.codegen import tile_tables
from normforge.codegen.errors import TileTableError
from normforge.codegen.instance import Tile
from normforge.codegen.tiling import CLASSES, standard_ladder
from normforge.codegen.values import Pipeline
from normforge.tools import budget, tile_trials, tune
from normforge.tools.tile_trials import Case, Outcome, Row, Size, Sizes, Tried, Winner
from normforge.tools.tune_record import Record

from .test_tune import CARD, PLAIN, run

HERE = {"device": "a card", "torch": "2.11.0", "triton": "3.6.0", "normforge": "0.1.0"}
SHORT = [Row(PLAIN, bucket) for bucket in standard_ladder()[:3]]
THREE = ("--only", "fwd_16bit", "--n", "128,256,512")

pytestmark = pytest.mark.usefixtures("fresh_table")


class Bench:
    """What stands in for a card: it takes so long for a case, and the last candidate always wins."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = 0.0
        self.cases: list[Case] = []
        self.ends_at: int | None = None
        self.runs = True
        self.many: Tile | None = None

    def decide(
        self, case: Case, device: torch.device, sizes: Sizes, advance: Callable[[], object], many: Tile | None = None
    ) -> Outcome:
        if len(self.cases) == self.ends_at:
            raise KeyboardInterrupt
        self.cases.append(case)
        self.many = many
        self.now += self.seconds
        outcome = outcome_of(case, runs=self.runs)
        for _ in outcome.tried:
            advance()
        return outcome

    def measured(self, *argv: str | Path) -> list[Row]:
        """What a run measures that ends well."""
        self.cases.clear()
        assert run(*argv) == 0
        return self.rows()

    def rows(self) -> list[Row]:
        return list(dict.fromkeys(Row(case.kind, case.bucket) for case in self.cases))


def outcome_of(case: Case, *, runs: bool = True) -> Outcome:
    present, *others = case.tiles(CARD.device)
    best = (present, *others)[-1]
    slower = tuple(Tried(tile, 2.0, None, None, None) for tile in others if tile != best)
    if not runs:
        return Outcome(case, (7, 9), present, (Tried(present, None, None, None, "it does not fit"), *slower), None)
    won = Tried(best, 1.0, 1.25, None, None)
    return Outcome(
        case, (7, 9), present, (Tried(present, 2.0, 2.0, None, None), *slower, won), Winner(best, 1.25, 3000.0)
    )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    monkeypatch.setattr(tune, "find_gpu", lambda: CARD)
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(tile_trials, "decide", made.decide)
    monkeypatch.setattr(tune, "revision_of", lambda root, written: "abc1234")
    monkeypatch.setattr(tune, "describe", lambda machine: HERE)
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "tiles" / "sm_90.yaml"


def lengths(out: Path) -> list[str]:
    return [str(bucket) for bucket, _ in tile_tables.read_table(out).rows[PLAIN]]


def head(out: Path) -> list[str]:
    return tile_tables.read_head(out).splitlines()


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_run_that_ends_early_has_its_finished_rows_and_goes_on_behind_them(
    interrupted: bool, bench: Bench, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if interrupted:
        bench.ends_at = 5
        with pytest.raises(KeyboardInterrupt):
            run("--out", out, *THREE)
        assert "\nwrote " in capsys.readouterr().out
    else:
        bench.seconds = 60
        # A row takes five minutes, and the second is begun.
        assert run("--out", out, *THREE, "--minutes", "6") == 1
        assert len(bench.cases) == 6
        said = capsys.readouterr().out
        assert "not measured, for lack of time: fwd_16bit 129..512; the same command with --resume goes on" in said
    assert lengths(out) == ["1..128"]

    bench.ends_at = None
    assert bench.measured("--out", out, *THREE, "--resume") == SHORT[1:]
    said = capsys.readouterr().out
    assert f"measured already, by {out.with_suffix('.jsonl')}: fwd_16bit 1..128\n" in said
    assert lengths(out) == ["1..128", "129..256", "257..512"]
    # All is there: nothing is measured, and nothing is written.
    before, text = list(bench.cases), out.read_text()
    assert run("--out", out, *THREE, "--resume") == 0
    assert (bench.cases, out.read_text()) == (before, text)


@pytest.mark.parametrize(
    ("changed", "to", "said"),
    [
        ("describe", HERE | {"device": "another card"}, "device a card (here another card)"),
        ("describe", HERE | {"torch": "2.12.0"}, "torch 2.11.0 (here 2.12.0)"),
        ("describe", HERE | {"triton": "3.7.0"}, "triton 3.6.0 (here 3.7.0)"),
        ("describe", HERE | {"driver": "570"}, "driver none (here 570)"),
        ("revision_of", "def5678", "revision abc1234 (here def5678)"),
        ("cache_folder", Path("0.1.0-another"), ""),
    ],
)
def test_figures_of_another_card_version_or_revision_are_not_taken(
    changed: str, to: object, said: str, bench: Bench, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Nor of the same revision, with other changes."""
    assert run("--out", out, *THREE) == 0
    monkeypatch.setattr(tune, changed, lambda *_: to)
    assert bench.measured("--out", out, *THREE, "--resume") == SHORT
    assert f"measured again: fwd_16bit 1..512, measured before with {said}" in capsys.readouterr().out


def test_a_row_that_was_changed_by_hand_is_measured_again(
    bench: Bench, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--out", out, *THREE) == 0
    text = out.read_text()
    at = text.index("257..512")
    out.write_text(text[:at] + text[at:].replace("warps: ", "resident: 2, warps: ", 1))
    assert bench.measured("--out", out, *THREE, "--resume") == SHORT[2:]
    assert f"measured again: fwd_16bit 257..512, of which {out} has other tiles than" in capsys.readouterr().out
    out.unlink()
    assert bench.measured("--out", out, *THREE, "--resume") == SHORT


def test_the_comment_at_a_tables_head_stays_and_another_follows(
    bench: Bench, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ["# Measured by hand, on a Tuesday:", "#   the first line", "", "# and of another paragraph."]
    out.parent.mkdir()
    tile = "{pipeline: two_pass, rows: 1, block: 512, warps: 4}"
    out.write_text("\n".join((*old, "", "fwd_32bit:", "  1..:", f"    large: {tile}", f"    small: {tile}", "")))
    assert run("--out", out, *THREE) == 0
    mine = "# Measured by normforge tune on a card: torch 2.11.0, Triton 3.6.0, revision abc1234: fwd_16bit 1..512"
    assert head(out) == [*old, mine]
    assert run("--out", out, "--only", "fwd_16bit", "--n", "128,512") == 0
    assert head(out) == [*old, mine]
    monkeypatch.setattr(tune, "revision_of", lambda root, written: "def5678")
    assert run("--out", out, "--only", "fwd_16bit", "--n", "128,512") == 0
    other = mine.replace("abc1234", "def5678").replace("1..512", "1..128 257..512")
    assert head(out) == [*old, mine, other]
    assert lengths(out) == ["1..128", "129..256", "257..512"]


def test_some_sizes_are_measured_and_the_others_kept(
    bench: Bench, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of rows that the table has, whatever their lengths are; others take the tiles of those that they are alike."""
    out.parent.mkdir()
    tile = "{pipeline: two_pass, rows: 1, block: 512, warps: "
    kept = [f"    large: {tile}4}}", f"    small: {tile}8}}", f"    invariant: {tile}16}}"]
    text = ["# By hand.", "", "fwd_16bit:", "  1..200:", *kept, "  300..400:", *kept, "fwd_32bit:", "  1..:", *kept, ""]
    out.write_text("\n".join(text))
    asked = ("--out", out, "--only", "fwd_16bit*", "--n", "100,200,300", "--sizes", "some")
    assert run(*asked) == 0
    (case,) = bench.cases
    assert (case.kind, str(case.bucket), case.size) == (PLAIN, "1..200", Size.SOME)
    ((_, found), (_, other)), *_ = tile_tables.read_table(out).rows.values()
    assert found == replace(other, some=found.some)
    assert found.some not in (None, found.large)
    mine = "# Measured by normforge tune on a card: torch 2.11.0, Triton 3.6.0, revision abc1234, some alone: "
    assert head(out) == ["# By hand.", f"{mine}fwd_16bit 1..200"]
    # It is held against the tile that the table has for many rows.
    assert bench.many == other.large

    bench.cases.clear()
    # Of those for other sizes none was measured.
    assert run(*asked[:-1], "large,some", "--resume") == 0
    assert [case.size for case in bench.cases] == [Size.LARGE, Size.SOME]
    with pytest.raises(SystemExit):
        run("--out", out, "--only", "bwd_16bit", "--sizes", "some")
    assert "has no row of what --only and --n name" in capsys.readouterr().err


def test_a_comment_that_would_be_lost_stops_a_run_before_it_measures(bench: Bench, out: Path) -> None:
    assert run("--out", out, "--only", "fwd_16bit", "--n", "128") == 0
    out.write_text(out.read_text().replace("  1..128:", "  # of a Tuesday\n  1..128:"))
    bench.cases.clear()
    with pytest.raises(TileTableError, match=r"sm_90\.yaml:4: a comment within the table would be lost .* move it up"):
        run("--out", out, *THREE)
    assert bench.cases == []


def test_a_report_has_every_candidate_with_its_time(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    assert run("--report", path, "--only", "fwd_16bit", "--n", "128") == 0
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert line["environment"].items() >= (HERE | {"architecture": "sm_90", "revision": "abc1234"}).items()
    assert (line["class"], line["first"], line["last"]) == ("fwd_16bit", 1, 128)
    assert [(case["for"], case["m"], case["n"]) for case in line["cases"]] == [
        ("large", [7, 9], [128, 88]),
        ("small", [7, 9], [128]),
        ("invariant", [7, 9], [128]),
        ("some", [7, 9], [128, 88]),
        ("ragged", [7, 9], [88]),
    ]
    for case, made in zip(line["cases"], SHORT[0].cases, strict=True):
        tried = outcome_of(made).tried
        assert [tile_of(each["tile"]) for each in case["candidates"]] == [each.tile for each in tried]
        best = case["candidates"][-1]
        assert (best["tile"], best["us"], best["final_us"]) == (case["best"], 1000.0, 1250.0)
        assert case["gb_per_s"] == 3000.0
    assert line["tiles"]["small"] == line["cases"][1]["best"]
    assert bench.measured("--report", path, *THREE, "--resume") == SHORT[1:]


def tile_of(words: dict[str, Any]) -> Tile:
    return Tile(**(words | {"pipeline": Pipeline(words["pipeline"])}))


@pytest.mark.parametrize("text", ["not JSON\n", "[1]\n", '{"format": 2}\n', "{}\n", "\n"])
def test_a_file_that_is_no_report_is_left_alone(text: str, bench: Bench, out: Path) -> None:
    path = out.with_suffix(".jsonl")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(
        TileTableError, match=r"sm_90\.jsonl:1: this is no line of a report .* name another with --repo"
    ):
        run("--out", out, *THREE)
    assert bench.cases == []
    assert path.read_text() == text


def test_several_write_one_table_at_once(out: Path) -> None:
    rows = [Row(kind, bucket) for kind in CLASSES[:2] for bucket in standard_ladder()[:8]]
    outcomes = {row: [outcome_of(case) for case in row.cases] for row in rows}
    environment = HERE | {"revision": "abc1234"}
    start = threading.Barrier(4)

    def write(some: list[Row]) -> None:
        record = Record(out, None, environment)
        start.wait()
        for row in some:
            record.add(row, outcomes[row])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, [rows[at::4] for at in range(4)]))
    table = tile_tables.read_table(out)
    assert [len(table.rows[kind]) for kind in CLASSES[:2]] == [8, 8]
    assert set(Record(out, None, environment).resume(rows).kept) == set(rows)
    said = " ".join(line.removeprefix("# ") for line in head(out))
    assert said.count("Measured by") == 1
    assert said.endswith(": fwd_16bit 1..3072, fwd_16bit_rms 1..3072")
    assert sorted(path.name for path in out.parent.iterdir()) == ["sm_90.jsonl", "sm_90.yaml"]
