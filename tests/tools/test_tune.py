"""`normforge tune` without a GPU: what it tries, takes and writes, how a run ends and goes on; times are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from normforge.codegen import tile_limits, tile_tables
from normforge.codegen.errors import TileTableError
from normforge.codegen.instance import Tile
from normforge.codegen.tiling import CLASSES, EVERY_CLASS, GROUP_CLASSES, Load, TileClass, standard_ladder
from normforge.codegen.values import Direction, Pipeline
from normforge.kernels.gpu import named_target
from normforge.selection import dispatch
from normforge.tools import budget, tile_trials, tune
from normforge.tools.compare import Finding
from normforge.tools.machine import Machine
from normforge.tools.measured_run import Run
from normforge.tools.tile_trials import Case, Outcome, Row, Size, Sizes, Tried, Winner
from normforge.tools.tune_options import parse
from normforge.tools.tune_record import Record

from ..calling import in_threads, table_at, there
from ..thorough import THOROUGH

CARD = Machine(torch.device("cpu"), "a card", interpreted=False)
SIZES = Sizes(bytes=2**10, few=(2,), some=(3,), checked=3)
# Of eight rows a sample, the fewest that kernels take backward, and of two samples.
MODULATED_SIZES = Sizes(bytes=2**12, few=(8,), some=(8,), checked=18)
N128 = standard_ladder()[0]
PLAIN, BACKWARD = CLASSES[0], TileClass(Direction.BACKWARD, 2)

pytestmark = pytest.mark.usefixtures("fresh_table")

# From a tile and what a call by it returns.
Clock = Callable[[Tile, Any], float]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a card of the interpreter, on which a tile takes as long as a test says, in graphs or not."""
    monkeypatch.setattr(tune, "find_gpu", lambda: CARD)
    monkeypatch.setattr(tune, "target_of", lambda device: named_target("sm_90"))

    def say(ms: Clock, in_graph: Clock | None = None) -> None:
        def timer(ms: Clock) -> Callable[..., float]:
            return lambda call, **_: ms(next(iter(dispatch.loaded())).tiles[0][1].large, call())

        monkeypatch.setattr(tile_trials, "median_ms", timer(ms))
        monkeypatch.setattr(tile_trials, "graph_ms", timer(in_graph or ms))

    return say


@pytest.fixture
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out all candidates but four, each of which is checked in the interpreter."""
    tiles = Case.tiles
    monkeypatch.setattr(Case, "tiles", lambda *given: tiles(*given)[:4])


def decided(case: Case, sizes: Sizes = SIZES, many: Tile | None = None) -> tuple[Outcome, Winner]:
    """What is decided of a case, and the tile that wins, as one has to."""
    outcome = tile_trials.decide(case, CARD.device, sizes, lambda: None, many)
    return outcome, there(outcome.winner)


def run(*argv: str | Path) -> int:
    return tune.main(parse([*map(str, argv), "--jobs", "0"], "normforge tune"), SIZES)


USUAL = [
    *(kind for kind in CLASSES if kind.itemsize == 2 and "rms" not in kind.name),
    *(kind for kind in GROUP_CLASSES if kind.itemsize == 2 and "last" not in kind.name),
]
UNUSUAL = [kind for kind in (*CLASSES, *GROUP_CLASSES) if kind not in USUAL]


# The present tile of a class and every eighth candidate beside it.
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, id=kind.name, marks=THOROUGH if place % 4 else ()) for place, kind in enumerate(USUAL)),
        *(pytest.param(kind, id=kind.name, marks=THOROUGH) for kind in UNUSUAL),
    ],
)
def test_every_class_is_tuned_with_kernels_that_agree_with_the_reference(
    kind: TileClass, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(kind, N128, Size.LARGE)
    sizes = MODULATED_SIZES if kind.load is Load.MODULATE else SIZES
    present, *others = case.tiles(CARD.device)
    tiles = [present, *others[::8]]
    monkeypatch.setattr(Case, "tiles", lambda *_: tiles)
    clock(lambda tile, _: float(len(tiles) - tiles.index(tile)))
    tried = []
    outcome = tile_trials.decide(case, CARD.device, sizes, lambda: tried.append(1))
    assert outcome.refused == ()
    assert [each.tile for each in outcome.tried] == tiles
    assert len(tried) == len(tiles)
    assert there(outcome.winner).tile == tiles[-1] != outcome.present == present


MANY = Tile(Pipeline.ROWS, 2, 128, 8)


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(("word", "ms", "few_ms", "wins"), table_at(Path(__file__).with_name("tune.yaml")))
def test_the_tile_that_wins(
    word: str, ms: list[float], few_ms: list[float], wins: int, clock: Callable[..., None]
) -> None:
    size = Size[word.upper()]
    case, many = Case(PLAIN, N128, size), MANY if size is Size.SOME else None
    tiles = case.tiles(CARD.device, many)
    of_many, of_few = (dict(zip(tiles, times, strict=False)) for times in (ms, few_ms))
    clock(lambda tile, _: of_many.get(tile, 3.0), lambda tile, _: of_few.get(tile, 3.0))
    outcome, winner = decided(case, SIZES, many)
    assert (winner.tile, outcome.present) == (tiles[wins], tiles[0])
    assert (winner.ms, outcome.present_ms) == pytest.approx((ms[wins], ms[0]))
    timed = {each.tile: each.few_ms for each in outcome.tried if each.few_ms is not None}
    assert timed.items() <= of_few.items()
    assert (winner.tile in timed) == (size is Size.INVARIANT)


@pytest.mark.usefixtures("few_tiles")
def test_a_tile_serves_every_number_of_rows_of_its_class_and_their_mean_time_decides(
    clock: Callable[..., None],
) -> None:
    """One that is twice as fast for the fewest, and three times as slow for the most, does not win."""
    case = Case(PLAIN, standard_ladder()[2], Size.SMALL)
    present, fickle, steady, *_ = case.tiles(CARD.device)
    of = {present: (1.0, 1.0), fickle: (0.5, 3.0), steady: (0.9, 0.9)}
    clock(lambda tile, outputs: of.get(tile, (4.0, 4.0))[(2, 6).index(len(outputs.y))])
    outcome, winner = decided(case, replace(SIZES, few=(2, 6)))
    assert winner.tile == steady
    assert winner.ms == pytest.approx(0.9)
    assert outcome.rows == (2, 6)
    assert next(each.ms for each in outcome.tried if each.tile == fickle) == pytest.approx(1.5**0.5)


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(("size", "ms"), [(Size.SMALL, 4.0), (Size.LARGE, 9.0), (Size.SOME, 6.0)])
def test_some_rows_are_timed_with_their_operands_in_l2_and_without(
    size: Size, ms: float, clock: Callable[..., None]
) -> None:
    clock(lambda *_: 9.0, lambda *_: 4.0)
    outcome, _ = decided(Case(PLAIN, N128, size))
    assert outcome.present_ms == pytest.approx(ms)


@pytest.mark.usefixtures("few_tiles")
def test_a_tile_that_is_slow_of_the_shorter_length_does_not_win(clock: Callable[..., None]) -> None:
    """It is a tenth faster than the present one of the longest row, and takes half as long again of the other."""
    case = Case(PLAIN, N128, Size.LARGE)
    present, fickle, *_ = case.tiles(CARD.device)
    for slow, expected in ((1.5, present), (0.9, fickle)):
        ms = {present: {128: 1.0, 88: 1.0}, fickle: {128: 0.9, 88: slow}}
        clock(lambda tile, outputs, ms=ms: ms.get(tile, {}).get(outputs.y.shape[1], 4.0))
        assert decided(case)[1].tile == expected


@pytest.mark.usefixtures("few_tiles")
def test_a_tile_whose_kernel_fails_or_is_wrong_cannot_win(
    clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(lambda tile, _: 1.0)
    case = Case(PLAIN, N128, Size.LARGE)
    _, wrong, failing = case.tiles(CARD.device)[:3]
    check = tile_trials._why_not

    def why_not(trial: tile_trials.Trial, run: Run[Any]) -> str | None:
        if trial.tile == wrong:
            run = replace(run, validate=lambda outputs: (Finding("y", 1.0, 0.0, ok=False),))
        if trial.tile == failing:
            run = replace(run, call=Mock(side_effect=RuntimeError("out of registers\nand more")))
        return check(trial, run)

    monkeypatch.setattr(tile_trials, "_why_not", why_not)
    outcome = tile_trials.decide(case, CARD.device, SIZES, lambda: None)
    reasons = [line.partition("): ")[2] for line in outcome.refused]
    assert reasons == ["y differ from the reference", "RuntimeError: out of registers"]


def test_a_table_is_called_after_this_gpu(clock: Callable[..., None], tmp_path: Path) -> None:
    clock(lambda tile, _: 1.0)
    with pytest.raises(TileTableError, match=r"this GPU's is sm_90; write --out .*sm_90\.yaml"):
        run("--out", tmp_path / "mine.yaml")


# Two for each of the 16 processes that compile ahead: a case is compiled in a few seconds.
MOST_TILES = 32


# Each class at every fourth bucket, all of which some class has; with time at each.
@pytest.mark.parametrize(
    ("arch", "every"), [*(pytest.param(a, e, marks=[THOROUGH] * (e < 4)) for a in ("sm_90", "gfx942") for e in (4, 1))]
)
def test_candidates_are_few_and_each_can_serve_its_bucket(
    arch: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_trials, "target_of", lambda device: named_target(arch))
    spread = set()
    for place, kind in enumerate(EVERY_CLASS):
        for bucket in standard_ladder()[place % every :: every]:
            for size in Size:
                tiles = Case(kind, bucket, size).tiles(CARD.device)
                spread |= {size for tile in tiles if tile.pipeline is Pipeline.SPREAD}
                assert 1 <= len(tiles) <= MOST_TILES * len(size.candidates)
                assert all(tile_limits.why_not(kind, bucket, tile, arch) is None for tile in tiles)
    # The tile for every M spreads no rows, however fast that is; on gfx942 no tile does.
    assert (Size.LARGE in spread) == (arch == "sm_90")
    assert Size.INVARIANT not in spread


HERE = {"device": "a card", "torch": "2.11.0", "triton": "3.6.0", "normforge": "0.1.0"}
SHORT = [Row(PLAIN, bucket) for bucket in standard_ladder()[:3]]
THREE = ("--only", "fwd_16bit", "--n", "128,256,512")


class Bench:
    """What stands in for a card: it takes so long for a case, and the last candidate always wins."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = 0.0
        self.cases: list[Case] = []
        self.ends_at: int | None = None
        self.many: dict[Size, Tile | None] = {}

    def decide(
        self, case: Case, device: torch.device, sizes: Sizes, advance: Callable[[], object], many: Tile | None = None
    ) -> Outcome:
        if len(self.cases) == self.ends_at:
            raise KeyboardInterrupt
        self.cases.append(case)
        self.many[case.size] = many
        self.now += self.seconds
        outcome = outcome_of(case)
        for _ in outcome.tried:
            advance()
        return outcome

    def measured(self, *argv: str | Path) -> list[Row]:
        """What a run measures that ends well."""
        self.cases.clear()
        assert run(*argv) == 0
        return list(dict.fromkeys(Row(case.kind, case.bucket) for case in self.cases))


def outcome_of(case: Case) -> Outcome:
    present, *others = case.tiles(CARD.device)
    best = (present, *others)[-1]
    slower = tuple(Tried(tile, 2.0, None, None, None) for tile in others if tile != best)
    tried = (Tried(present, 2.0, 2.0, None, None), *slower, Tried(best, 1.0, 1.25, None, None))
    return Outcome(case, (7, 9), present, tried, Winner(best, 1.25, 3000.0))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    monkeypatch.setattr(tune, "find_gpu", lambda: CARD)
    monkeypatch.setattr(tune, "target_of", lambda device: named_target("sm_90"))
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
    assert bench.many[Size.SOME] == other.large

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
        tiles = [each["tile"] | {"pipeline": Pipeline(each["tile"]["pipeline"])} for each in case["candidates"]]
        assert [Tile(**tile) for tile in tiles] == [each.tile for each in tried]
        best = case["candidates"][-1]
        assert (best["tile"], best["us"], best["final_us"]) == (case["best"], 1000.0, 1250.0)
        assert case["gb_per_s"] == 3000.0
    assert line["tiles"]["small"] == line["cases"][1]["best"]
    # Some rows may take the tile that the run found for many.
    assert bench.many[Size.SOME] == outcome_of(SHORT[0].cases[0]).tried[-1].tile
    assert bench.measured("--report", path, *THREE, "--resume") == SHORT[1:]


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

    def write(some: list[Row]) -> None:
        record = Record(out, None, environment)
        for row in some:
            record.add(row, outcomes[row])

    in_threads(write, [rows[at::4] for at in range(4)])
    table = tile_tables.read_table(out)
    assert [len(table.rows[kind]) for kind in CLASSES[:2]] == [8, 8]
    assert set(Record(out, None, environment).resume(rows).kept) == set(rows)
    said = " ".join(line.removeprefix("# ") for line in head(out))
    assert said.count("Measured by") == 1
    assert said.endswith(": fwd_16bit 1..3072, fwd_16bit_rms 1..3072")
    assert sorted(path.name for path in out.parent.iterdir()) == ["sm_90.jsonl", "sm_90.yaml"]
