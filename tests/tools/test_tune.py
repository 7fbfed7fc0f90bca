"""`normforge tune` without a GPU: what it tries, which tile it takes, what it writes; only the times are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
from normforge.tools import tile_trials, tune
from normforge.tools.cli import main
from normforge.tools.compare import Finding
from normforge.tools.machine import Machine
from normforge.tools.measured_run import Run
from normforge.tools.tile_trials import Case, Outcome, Size, Sizes, Winner
from normforge.tools.tune_options import parse

from ..calling import there
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
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_90")

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


# The present tile of a class and every eighth candidate beside it; with time, of the usual classes every candidate.
@pytest.mark.parametrize(
    ("kind", "every"),
    [
        *(pytest.param(kind, 8, id=kind.name, marks=THOROUGH if place % 4 else ()) for place, kind in enumerate(USUAL)),
        *(pytest.param(kind, 4, id=kind.name, marks=THOROUGH) for kind in UNUSUAL),
        *(pytest.param(kind, 1, id=f"{kind.name}-whole", marks=THOROUGH) for kind in USUAL),
    ],
)
def test_every_class_is_tuned_with_kernels_that_agree_with_the_reference(
    kind: TileClass, every: int, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(kind, N128, Size.LARGE)
    sizes = MODULATED_SIZES if kind.load is Load.MODULATE else SIZES
    present, *others = case.tiles(CARD.device)
    tiles = [present, *others[::every]]
    monkeypatch.setattr(Case, "tiles", lambda *_: tiles)
    clock(lambda tile, _: float(len(tiles) - tiles.index(tile)))
    tried = []
    outcome = tile_trials.decide(case, CARD.device, sizes, lambda: tried.append(1))
    assert outcome.refused == ()
    assert [each.tile for each in outcome.tried] == tiles
    assert len(tried) == len(tiles)
    assert there(outcome.winner).tile == tiles[-1] != outcome.present == present


MANY = Tile(Pipeline.ROWS, 2, 128, 8)


# The times of the first tiles for many rows and for a few, and the place of the tile that wins.
@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(
    ("size", "ms", "few_ms", "wins"),
    [
        # The present tile, which is the first, stays unless another is clearly faster.
        (Size.LARGE, [1.0, 0.995], [], 0),
        (Size.LARGE, [1.0, 0.98], [], 1),
        # The tile for every M is fast for many rows, and the fastest of those for a few.
        (Size.INVARIANT, [1.0, 1.02, 1.05], [1.0, 0.9, 0.1], 1),
        (Size.INVARIANT, [1.0, 1.02, 1.05], [1.0, 0.995, 0.1], 0),
        (Size.INVARIANT, [1.2, 1.02, 1.0], [0.1, 0.9, 0.8], 2),
        # Some rows get a tile that is clearly faster than that for many, which is the second.
        (Size.SOME, [2.0, 1.0, 0.98], [2.0, 1.0, 0.98], 2),
        (Size.SOME, [2.0, 1.0, 0.995], [2.0, 1.0, 0.995], 1),
        (Size.SOME, [0.98, 1.0, 0.975], [0.98, 1.0, 0.975], 0),
        (Size.SOME, [0.995, 1.0, 0.99], [0.995, 1.0, 0.99], 1),
    ],
)
def test_the_tile_that_wins(
    size: Size, ms: list[float], few_ms: list[float], wins: int, clock: Callable[..., None]
) -> None:
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


@THOROUGH
def test_some_rows_may_take_the_tile_that_a_run_finds_for_many(clock: Callable[..., None]) -> None:
    case = Case(PLAIN, N128, Size.SOME)
    assert case.rows(Sizes()) == (512, 1024, 2048)
    _, instead, other, *_ = tiles = case.tiles(CARD.device, MANY)
    assert instead == MANY
    both = {tile for size in (Size.LARGE, Size.SMALL) for tile in replace(case, size=size).tiles(CARD.device)[1:]}
    assert both <= {*tiles}
    clock(lambda tile, _: 1.0 if tile == other else 2.0)
    outcomes = tile_trials.Row(PLAIN, N128).decide(CARD.device, SIZES, lambda: None)
    assert {outcome.case.size for outcome in outcomes} == {*Size}
    (large,) = [there(outcome.winner) for outcome in outcomes if outcome.case.size is Size.LARGE]
    assert [each.tile for each in outcomes[-1].tried].index(large.tile) <= 1


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
    assert [line.partition("): ")[2] for line in outcome.refused] == [
        "y differ from the reference",
        "RuntimeError: out of registers",
    ]


@THOROUGH
def test_what_is_written_is_what_the_generator_takes(
    clock: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock(lambda tile, _: 1.0 / tile.warps)
    out = tmp_path / "sm_90.yaml"
    assert run("--out", out, "--only", "fwd_16bit", "--n", "100") == 0
    ((_, tiles),) = tile_tables.read_table(out).rows[PLAIN]
    manifest = tmp_path / "mine.yaml"
    manifest.write_text("groups: {a: {norm: rms, dtype_in: bf16, n: n128}}\n")
    folder = tmp_path / "kernels"
    assert main(["generate", "--manifest", str(manifest), "--out", str(folder), "--tiles", str(out)]) == 0
    dispatch.load_instances(folder)
    (entry,) = dispatch.loaded()
    assert (entry.tile(10**6, 128, "sm_90").row, entry.tile(1, 128, "sm_90").row) == (tiles.large.row, tiles.small.row)
    assert tiles.large != entry.tile(10**6, 128, "gfx942")


def test_a_table_is_called_after_this_gpu(clock: Callable[..., None], tmp_path: Path) -> None:
    clock(lambda tile, _: 1.0)
    with pytest.raises(TileTableError, match=r"this GPU's is sm_90; write --out .*sm_90\.yaml"):
        run("--out", tmp_path / "mine.yaml")


# Two for each of the 16 processes that compile ahead: a case is compiled in a few seconds.
MOST_TILES = 32


# Each class at every fourth bucket, all of which some class has; with time at each.
@pytest.mark.parametrize(
    ("arch", "every"), [("sm_90", 4), *(pytest.param(a, 1, marks=THOROUGH) for a in ("sm_90", "gfx942"))]
)
def test_candidates_are_few_and_each_can_serve_its_bucket(
    arch: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_trials, "architecture", lambda device: arch)
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
