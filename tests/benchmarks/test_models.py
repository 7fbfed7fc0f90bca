"""The benchmark of models: what its check finds, what becomes of rows, and each model as each variant has it."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import cli
from benchmarks.errors import UsageError
from benchmarks.models import command, steps, worker
from benchmarks.models.check import Outcome, check, make_yardstick, nudged
from benchmarks.models.names import (
    ABSENT,
    AUTOCAST,
    BF16,
    COMPILE,
    EAGER,
    FAILS,
    GRAPHS,
    NOTHING,
    STEPS,
    TRAIN,
    WRONG,
    Key,
)
from benchmarks.models.picture import draw, picture
from benchmarks.models.specs import SPECS, Shape, Spec, make
from benchmarks.models.table import Row, Table, load, render
from benchmarks.models.variants import VARIANTS, NotOfferedError, Variant, vary
from benchmarks.models.worker import Job, read_job, work
from benchmarks.oracle import WrongOutputError
from normforge.compiled import switch

from ..thorough import THOROUGH

CPU = torch.device("cpu")
HEADER = {"device": "a test", "revision": "none"}
TOY = Spec(
    "toy",
    "torch",
    Shape(1, 16, 1, 16, batch=4),
    lambda shape: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1)),
    lambda shape, device, dtype: lambda model: _squares(model(_inputs(dtype))),
)


def _inputs(dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(-1, 1, 64).view(4, 16).to(dtype)


def _squares(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Spec:
    """A model of one norm, which the interpreter computes at once, and nothing that is worth collecting."""
    monkeypatch.setattr(worker, "release", lambda device: None)
    monkeypatch.setitem(SPECS, TOY.name, TOY)
    return TOY


def _job(out: Path, model: str = TOY.name, **given: Any) -> Job:
    options: dict[str, Any] = {"dtype": BF16, "runs": (EAGER,), "variants": ("torch", "patch"), "rounds": 1} | given
    return Job(model, steps=STEPS, size="tiny", device="cpu", out=str(out), header=HEADER, **options)


def _rows(out: Path) -> dict[str, Row]:
    """The rows of a table, by variant."""
    table = load(out)
    assert table is not None
    return {key.variant: row for key, row in table.rows.items()}


def _add_variant(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], object]) -> None:
    def changed(model: nn.Module, spec: Spec) -> None:
        change(model)

    monkeypatch.setitem(VARIANTS, name, Variant(name, name, changed))


def _call(function: Callable[[], object], model: Any) -> None:
    function()


def _of_norm(model: Any, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Let a toy's norm compute something else."""
    norm = model[1]
    norm.forward = partial(function, norm)


BROKEN: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "scaled": lambda n, x: 1.05 * functional.layer_norm(x, (16,), n.weight, n.bias, n.eps),
    "no-bias": lambda n, x: functional.layer_norm(x, (16,), n.weight, None, n.eps),
    "no-gradient": lambda n, x: functional.layer_norm(x, (16,), n.weight, n.bias.detach(), n.eps),
    "half-gradient": lambda n, x: functional.layer_norm(x, (16,), (n.weight + n.weight.detach()) / 2, n.bias, n.eps),
    "rms": lambda n, x: functional.rms_norm(x, (16,), n.weight, n.eps) + n.bias,
    "epsilon": lambda n, x: functional.layer_norm(x, (16,), n.weight, n.bias, 0.1),
    "nan": lambda n, x: functional.layer_norm(x, (16,), n.weight, n.bias, n.eps) * float("nan"),
}


@pytest.mark.parametrize("dtype", [BF16, pytest.param(AUTOCAST, marks=THOROUGH)])
def test_a_wrong_model_is_told_and_not_timed(
    dtype: str, toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, function in BROKEN.items():
        _add_variant(monkeypatch, name, partial(_of_norm, function=function))
    work(_job(tmp_path, dtype=dtype, variants=("torch", *BROKEN)))
    rows = _rows(tmp_path)
    assert {name: rows[name].status.partition(":")[0] for name in BROKEN} == dict.fromkeys(BROKEN, WRONG)
    assert "times as far off as a nudge of the weights" in rows["scaled"].status
    assert [row.ms for row in rows.values() if row.variant != "torch"] == [None] * len(BROKEN)
    assert rows["torch"].ok


def test_a_right_model_is_timed_and_its_loss_stands_beside_torchs(toy: Spec, tmp_path: Path) -> None:
    assert work(_job(tmp_path, variants=("torch", "patch"), rounds=2)) == 0
    rows = _rows(tmp_path)
    for row in rows.values():
        assert row.ok
        assert row.ms is not None
        assert row.ms > 0
        assert row.runs == 2
        assert row.torch_loss == rows["torch"].loss
        assert row.memory_gib is None
    assert rows["torch"].off == 0
    assert 0 <= (rows["patch"].off or 0) <= 1


def test_a_nudge_moves_each_weight_to_a_neighbour_and_back() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        model = make(TOY, TOY.tiny, CPU, dtype)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with nudged(model, 0):
            for parameter, old in zip(model.parameters(), before, strict=True):
                rounded = old.bfloat16()
                up, down = (torch.nextafter(rounded, torch.full_like(rounded, to)) for to in (torch.inf, -torch.inf))
                moved = [old + (to.float() - rounded.float()).to(dtype) for to in (up, down)]
                assert bool(((parameter == moved[0]) | (parameter == moved[1])).all())
                assert not bool((parameter == old).any())
        assert all(map(torch.equal, model.parameters(), before))
        with nudged(model, 0), pytest.raises(KeyError), nudged(model, 1):
            raise KeyError
        assert all(map(torch.equal, model.parameters(), before))


def test_the_check_bounds_each_tensor_and_the_loss_by_a_nudge() -> None:
    model = nn.Linear(64, 1, bias=False)

    def run() -> Outcome:
        return Outcome(float(model.weight.detach().sum()), {"weight": 2 * model.weight.detach()})

    yardstick = make_yardstick(run, model)
    expected = 2 * model.weight.detach()
    assert 0 < yardstick.distances["weight"] < 2**-7
    assert check(run(), yardstick).ratio == 0
    right = yardstick.distances["weight"] * 0.9
    assert check(Outcome(run().loss, {"weight": expected * (1 + right)}), yardstick).where == "weight"
    wrong: list[Outcome] = [
        Outcome(run().loss, {"weight": expected * (1 + 2 * right)}),
        Outcome(run().loss, {"weight": None}),
        Outcome(run().loss, {"weight": expected.bfloat16()}),
        Outcome((run().loss or 0) + 1.1 * yardstick.loss, {"weight": expected}),
        Outcome(None, {"weight": expected}),
        Outcome(float("nan"), {"weight": expected}),
    ]
    for outcome in wrong:
        with pytest.raises(WrongOutputError, match=r"as far off as a nudge"):
            check(outcome, yardstick)


def test_what_the_table_holds_is_not_run_again(toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    for name in ("one", "two", "three"):
        _add_variant(monkeypatch, name, partial(_call, partial(runs.append, name)))
    work(_job(tmp_path, variants=("one", "two")))
    first = _rows(tmp_path)
    assert runs == ["one", "two"]
    work(_job(tmp_path, variants=("one", "two", "three")))
    assert runs == ["one", "two", "three"]
    assert {name: _rows(tmp_path)[name] for name in first} == first
    with pytest.raises(UsageError, match=r"revision none there, another now.*--fresh"):
        work(replace(_job(tmp_path), header={**HEADER, "revision": "another"}))


def test_what_fails_is_a_row_and_the_others_go_on(toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(error: Exception) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            raise error

        return change

    failing = {
        "breaks": (ValueError("no such kernel"), f"{FAILS}: ValueError: no such kernel"),
        "lacks": (ModuleNotFoundError("No module named 'nobody'"), f"{ABSENT}: ModuleNotFoundError: No module named"),
        "memory": (torch.OutOfMemoryError("Tried to allocate"), f"{FAILS}: out of memory"),
        "unlike": (NotOfferedError("it has no norms"), f"{NOTHING}: it has no norms"),
    }
    for name, (error, _) in failing.items():
        _add_variant(monkeypatch, name, raises(error))
    work(_job(tmp_path, variants=(*failing, "torch")))
    rows = _rows(tmp_path)
    for name, (_, status) in failing.items():
        assert rows[name].status.startswith(status)
    assert rows["torch"].ok
    # What was not here may be, next time.
    table = load(tmp_path)
    assert table is not None
    assert [key.variant for key in table.due(_job(tmp_path, variants=(*failing, "torch")).keys)] == ["lacks"]


def test_a_model_whose_package_is_missing_is_so_in_every_row(
    toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPECS, "far", replace(toy, name="far", package="nobody_has_this"))
    work(_job(tmp_path, "far"))
    statuses = {row.status for row in _rows(tmp_path).values()}
    assert statuses == {f"{ABSENT}: ModuleNotFoundError: No module named 'nobody_has_this'"}
    table = load(tmp_path)
    assert table is not None
    assert "not here" in render(table)


def test_no_variant_is_begun_once_the_time_is_up(toy: Spec, tmp_path: Path) -> None:
    assert work(_job(tmp_path, deadline=0.0)) == 2
    assert _rows(tmp_path) == {}


@THOROUGH
def test_what_compiles_ahead_does_so_behind_what_runs_eagerly(
    toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str, bool]] = []

    def launch(job: Job) -> int:
        done.append((job.dtype, job.runs[0], job.ahead))
        table = load(tmp_path) or Table(job.header)
        for key in () if job.ahead else job.keys:
            table.add(Row(*key, "ok", ms=1.0))
        table.save(tmp_path)
        return 0

    monkeypatch.setattr(command, "launch", launch)
    given = ["models", "--models", "toy", "--variants", "torch", "--jobs", "2", "--out", str(tmp_path)]
    late = [*given, "--minutes", "0"]
    assert cli.main(late) == 0
    assert done == []
    assert cli.main(given) == 0
    each = [(EAGER, False), (COMPILE, True), (COMPILE, False)]
    assert done == [(dtype, run, ahead) for dtype in (BF16, AUTOCAST) for run, ahead in each]
    done.clear()
    assert cli.main(given) == 0
    assert done == []


def test_what_compiles_ahead_leaves_no_row(toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _add_variant(monkeypatch, "breaks", lambda model: 1 / 0)
    assert work(_job(tmp_path, variants=("torch", "breaks"), ahead=True)) == 0
    assert load(tmp_path) is None


def test_a_job_is_text_and_back(tmp_path: Path) -> None:
    job = _job(tmp_path, deadline=1.5)
    assert read_job(job.text()) == job


def test_variants_share_parameters_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(TOY, TOY.tiny, CPU, torch.bfloat16)
    _add_variant(monkeypatch, "tagged", lambda copied: setattr(copied[1], "tag", 1))
    copied: Any = vary(model, TOY, VARIANTS["tagged"]).model
    assert all(mine is theirs for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True))
    assert hasattr(copied[1], "tag")
    assert not hasattr(model.get_submodule("1"), "tag")


def test_names_set_in_a_models_module_are_there_for_that_variant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Liger's functions set the rotary embedding of every model of a family."""
    home = steps
    monkeypatch.setattr(nn.Sequential, "__module__", home.__name__)
    before = home.LOGITS

    def change(model: Any) -> None:
        home.LOGITS = "others"

    _add_variant(monkeypatch, "global", change)
    varied = vary(make(TOY, TOY.tiny, CPU, torch.bfloat16), TOY, VARIANTS["global"])
    assert before == home.LOGITS
    with varied.within():
        assert home.LOGITS == "others"
    assert before == home.LOGITS


def _table(*figures: tuple[str, str, str, float]) -> Table:
    """Rows of bf16 training steps: model, run, variant and milliseconds; none is a failure."""
    table = Table(dict(HEADER))
    for model, run, variant, ms in figures:
        key = Key(model, BF16, "train", run, variant)
        table.add(Row(*key, "ok", ms=ms, memory_gib=1.5) if ms else Row(*key, f"{FAILS}: no memory"))
    return table


def test_the_picture_is_drawn_from_the_table(tmp_path: Path) -> None:
    table = _table(
        ("llama", EAGER, "torch", 10.0),
        ("llama", EAGER, "patch", 8.0),
        ("llama", EAGER, "liger", 0),
        ("llama", COMPILE, "patch", 5.0),
        ("vit", COMPILE, "patch", 5.0),
    )
    figure = picture(table)
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == [
        "Training step, bf16, eager",
        "Training step, bf16, torch.compile",
    ]
    bars: list[list[Any]] = [list(axes.patches) for axes in figure.axes]
    heights = [[round(bar.get_height(), 3) for bar in each] for each in bars]
    # Nothing is said of a model whose eager step by torch is missing.
    assert heights == [[1.0, 1.25], [2.0]]
    table.save(tmp_path)
    assert draw(table, tmp_path) == tmp_path / "models.png"
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")
    assert picture(_table(("llama", EAGER, "patch", 8.0))) is None


def test_the_table_is_read_as_it_was_written_and_shown(tmp_path: Path) -> None:
    table = _table(("llama", EAGER, "torch", 10.0), ("llama", COMPILE, "patch", 8.126), ("vit", EAGER, "torch", 0))
    table.save(tmp_path)
    again = load(tmp_path, HEADER)
    assert again == table
    with (tmp_path / "models.csv").open() as file:
        lines = [line for line in file if not line.startswith("#")]
    assert [record["variant"] for record in csv.DictReader(lines)] == ["torch", "patch", "torch"]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in render(table).splitlines() if "|" in line]
    assert cells[0] == ["ms", "torch", "patch + compile"]
    assert cells[2:4] == [["llama", "10.00", "8.13"], ["vit", "fails", "–"]]


def test_the_last_line_is_the_mean_speed_beside_torch_run_likewise() -> None:
    table = _table(
        ("llama", EAGER, "torch", 10.0),
        ("llama", EAGER, "patch", 8.0),
        ("llama", COMPILE, "torch", 6.0),
        ("llama", COMPILE, "patch", 3.0),
        ("vit", EAGER, "torch", 10.0),
        ("vit", EAGER, "patch", 5.0),
        ("vit", COMPILE, "patch", 5.0),
    )
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in render(table).splitlines() if "|" in line]
    assert cells[0] == ["ms", "torch", "patch", "torch + compile", "patch + compile"]
    # The square root of 1.25 times 2; compiled, only one model has both.
    assert cells[4][1:] == ["1.000", "1.581", "1.000", "2.000"]
    assert "memory" in render(table)
    assert "speed" not in render(table).partition("memory")[2]


def test_the_tables_are_put_into_a_page(tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "page.md"
    _table(("llama", EAGER, "torch", 10.0)).save(results)
    page.write_text("before\n<!-- models: begin -->\nold\n<!-- models: end -->\nafter\n")
    given = ["report", "--results", str(results), "--into", str(page), "--pictures"]
    assert cli.main(given) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- models: begin -->\n\nMeasured on a test, revision none.\n\n![Times the speed")
    assert "](results/models.png)" in text
    assert "**Training step, bf16**" in text
    assert "old" not in text
    assert text.endswith("<!-- models: end -->\nafter\n")
    page.write_text("nothing")
    assert cli.main(given) == cli.USAGE


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs of the command are done in this process; the list is of those that were."""
    done: list[Job] = []

    def launch(job: Job) -> int:
        done.append(job)
        work(job)
        return 0

    monkeypatch.setattr(command, "launch", launch)
    return done


@THOROUGH
def test_the_command_fails_for_a_wrong_row(
    toy: Spec,
    in_process: list[Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["models", "--models", "toy", "--runs", "eager", "--revision", "r", "--rounds", "1", "--out", str(tmp_path)]
    assert cli.main([*given, "--variants", "t*h", "patch"]) == 0
    assert set(_rows(tmp_path)) == {"torch", "patch"}
    assert [(job.dtype, job.runs) for job in in_process] == [(BF16, (EAGER,)), (AUTOCAST, (EAGER,))]
    said = capsys.readouterr().out
    assert "**Training step, fp32 under bf16 autocast**" in said
    assert f"drawn: {tmp_path / 'models.png'}" in said
    assert (tmp_path / "models.csv").read_text().startswith("# device: Triton's CPU interpreter\n")
    in_process.clear()
    assert cli.main([*given, "--variants", "torch", "patch"]) == 0
    assert in_process == []
    _add_variant(monkeypatch, "broken", partial(_of_norm, function=BROKEN["scaled"]))
    assert cli.main([*given, "--variants", "broken", "--dtypes", "bf16"]) == command.SHORT
    assert "toy/bf16/train/eager/broken is wrong: " in capsys.readouterr().err
    document = json.loads((tmp_path / "models.json").read_text())
    assert document["header"]["size"] == "tiny"


def test_a_process_that_dies_costs_its_row_and_no_other(
    toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Job] = []

    def launch(job: Job) -> int:
        started.append(job)
        if len(started) == 1:
            job.mark.write_text(json.dumps(Key("toy", BF16, "train", EAGER, "patch")))
            return -11
        work(job)
        return 0

    monkeypatch.setattr(command, "launch", launch)
    given = ["models", "--models", "toy", "--runs", "eager", "--dtypes", "bf16", "--variants", "torch", "patch"]
    assert cli.main([*given, "--revision", "r", "--out", str(tmp_path)]) == 0
    rows = _rows(tmp_path)
    assert rows["patch"].status == f"{FAILS}: the process died with status -11 while this ran"
    assert rows["torch"].ok
    assert len(started) == 2


def test_a_process_that_breaks_without_a_row_is_no_loop(
    toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "launch", lambda job: 1)
    given = ["models", "--models", "toy", "--runs", "eager", "--dtypes", "bf16", "--variants", "torch"]
    assert cli.main([*given, "--out", str(tmp_path)]) == command.SHORT
    assert "error: the process of toy in bf16, eager, ended with 1" in capsys.readouterr().err


def test_the_most_worth_comes_first(tmp_path: Path, in_process: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "work", lambda job: 0)
    monkeypatch.setitem(globals(), "work", lambda job: 0)
    assert cli.main(["models", "--out", str(tmp_path), "--minutes", "1"]) == 0
    order = [(job.dtype, job.runs[0]) for job in in_process]
    ways = [(BF16, EAGER), (BF16, COMPILE), (AUTOCAST, EAGER), (AUTOCAST, COMPILE)]
    assert order == [way for way in ways for _ in SPECS]
    assert [job.model for job in in_process[: len(SPECS)]] == [
        "llama",
        "qwen3",
        "gemma",
        "gpt2",
        "vit",
        "bert",
        "t5",
        "dit",
    ]


@pytest.mark.parametrize("option", ["--models", "--variants"])
def test_a_name_that_nothing_has_is_refused(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", option, "nobody", "--out", str(tmp_path)]) == cli.USAGE
    assert f"error: {option} nobody names nothing; there are " in capsys.readouterr().err


def test_there_are_graphs_on_a_gpu_alone(toy: Spec) -> None:
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        steps.made_to_run(make(toy, toy.tiny, CPU, torch.bfloat16), GRAPHS, CPU)


@THOROUGH
def test_each_compiled_variant_has_a_graph_of_its_own(
    toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(str(graph.code))
        return graph.forward

    monkeypatch.setitem(steps._BACKEND, "cpu", backend)
    # The last differs from the one before in how it is compiled, and in nothing that TorchDynamo guards.
    work(_job(tmp_path, runs=(COMPILE,), variants=("torch", "patch", "patch-passes")))
    assert all(row.ok and not row.note for row in _rows(tmp_path).values())
    assert ["normforge" in code for code in graphs] == [False, True, True]


@THOROUGH
def test_a_variant_that_runs_anothers_graph_is_told(toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_with_code_of_its_own", lambda model: model)
    work(_job(tmp_path, runs=(COMPILE,), variants=("torch", "patch", "patch-passes")))
    statuses = {name: row.status for name, row in _rows(tmp_path).items()}
    assert statuses.pop("patch-passes").startswith(f"{FAILS}: RuntimeError: TorchDynamo compiled nothing for it")
    assert set(statuses.values()) == {"ok"}


def test_passes_are_on_for_their_variant_alone(toy: Spec, tmp_path: Path) -> None:
    model = make(toy, toy.tiny, CPU, torch.bfloat16)
    found = {}
    for name in ("torch", "patch", "patch-passes", "patch"):
        with vary(model, toy, VARIANTS[name]).within():
            found[name] = switch._enabled
    assert found == {"torch": False, "patch": False, "patch-passes": True}
    keys = _job(tmp_path, runs=(EAGER, COMPILE), variants=tuple(VARIANTS)).keys
    assert [key.run for key in keys if key.variant == "patch-passes"] == [COMPILE]


INSTALL = "pip install -e '.[models]' has what this model is of"


@THOROUGH
@pytest.mark.parametrize("dtype", [BF16, AUTOCAST])
@pytest.mark.parametrize("name", SPECS)
def test_each_model_is_right_as_each_variant_has_it(name: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip(SPECS[name].package, reason=INSTALL)
    # Autocast is traced like all else.
    runs = (EAGER, COMPILE) if dtype == BF16 else (EAGER,)
    work(_job(tmp_path, name, dtype=dtype, variants=("torch", "patch", "patch-passes", "patch-unfused"), runs=runs))
    table = load(tmp_path)
    assert table is not None
    for key, row in table.rows.items():
        assert row.ok or (row.status.startswith(NOTHING) and key.variant != "torch"), row
    kinds = {(key.step, key.run) for key in table.rows}
    assert kinds == {*_job(tmp_path, name, dtype=dtype, runs=runs).groups}


@THOROUGH
@pytest.mark.parametrize("name", SPECS)
def test_the_check_finds_a_broken_norm_in_each_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(SPECS[name].package, reason=INSTALL)

    def change(model: nn.Module, every: bool) -> None:
        norms = [module for module in model.modules() if "Norm" in type(module).__name__]
        for norm in norms if every else [norms[len(norms) // 2]]:
            norm.register_forward_hook(lambda module, given, y: 1.1 * y)

    _add_variant(monkeypatch, "one", partial(change, every=False))
    _add_variant(monkeypatch, "all", partial(change, every=True))
    work(_job(tmp_path, name, variants=("torch", "one", "all")))
    table = load(tmp_path)
    assert table is not None
    wrong = {(key.step, key.variant) for key, row in table.rows.items() if row.status.startswith(WRONG)}
    # A token's logits hide one norm among many; gradients do not.
    assert wrong >= {(TRAIN, "one"), *((step, "all") for step, _ in _job(tmp_path, name).groups)}
    assert all(row.ok for key, row in table.rows.items() if key.variant == "torch")


@THOROUGH
@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "t5"])
def test_ligers_modules_take_the_place_of_norms_and_their_parameters(name: str) -> None:
    for package in (SPECS[name].package, "liger_kernel"):
        pytest.importorskip(package, reason=INSTALL)
    spec = SPECS[name]
    model = make(spec, spec.tiny, CPU, torch.bfloat16)
    copied = vary(model, spec, VARIANTS["liger"]).model
    assert dict(copied.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(mine is theirs for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True))
    theirs = dict(model.named_modules())
    norms = {path: module for path, module in copied.named_modules() if "Norm" in type(module).__name__}
    assert norms
    for path, module in norms.items():
        assert type(module).__name__.startswith("Liger"), path
        old: Any = theirs[path]
        assert module.variance_epsilon == (old.variance_epsilon if hasattr(old, "variance_epsilon") else old.eps)


@THOROUGH
def test_ligers_own_function_changes_one_variant() -> None:
    for package in ("transformers", "liger_kernel"):
        pytest.importorskip(package, reason=INSTALL)
    spec = SPECS["llama"]
    model = make(spec, spec.tiny, CPU, torch.bfloat16)
    varied = vary(model, spec, VARIANTS["liger-apply"])
    assert "forward" in vars(varied.model)
    assert "forward" not in vars(model)
    assert "apply_rotary_pos_emb" in varied.replaced
    assert "liger" not in varied.home.apply_rotary_pos_emb.__module__
    with varied.within():
        assert "liger" in varied.home.apply_rotary_pos_emb.__module__


@THOROUGH
def test_the_command_runs_a_process_for_each_model(tmp_path: Path) -> None:
    given = ["models", "--models", "dit", "--variants", "torch", "patch", "--dtypes", "bf16", "--jobs", "1"]
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert cli.main([*given, "--revision", "r", "--rounds", "1", "--out", str(tmp_path)]) == 0
    table = load(tmp_path)
    assert table is not None
    assert [(key.run, key.variant, row.ok) for key, row in table.rows.items()] == [
        (EAGER, "torch", True),
        (EAGER, "patch", True),
        (COMPILE, "torch", True),
        (COMPILE, "patch", True),
    ]
    assert not (tmp_path / "models.running").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dit", "llama"])
def test_a_card_times_each_way_of_running(name: str, tmp_path: Path) -> None:
    pytest.importorskip(SPECS[name].package, reason=INSTALL)
    given = ["models", "--models", name, "--variants", "torch", "patch", "--quick", "--rounds", "1"]
    assert cli.main([*given, "--out", str(tmp_path)]) == 0
    table = load(tmp_path)
    assert table is not None
    runs = {EAGER, COMPILE, GRAPHS} if SPECS[name].decoding else {EAGER, COMPILE}
    assert {key.run for key in table.rows} == runs
    for key, row in table.rows.items():
        assert row.ok, row
        assert (row.memory_gib is not None) == (key.step == TRAIN)
