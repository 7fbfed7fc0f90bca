"""Models as each variant has them: right, apart from each other, checked against a nudge, and timed by a command."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import cli
from benchmarks.errors import UsageError
from benchmarks.models import steps
from benchmarks.models.check import Outcome, check, make_yardstick, nudged
from benchmarks.models.names import AUTOCAST, BF16, COMPILE, EAGER, NOTHING, WRONG
from benchmarks.models.specs import SPECS, Spec, make
from benchmarks.models.variants import VARIANTS, vary
from benchmarks.models.worker import work
from benchmarks.oracle import WrongOutputError
from normforge.compiled import switch

from ...thorough import THOROUGH
from .toy import BROKEN, CPU, HEADER, INSTALL, TOY, add_variant, job_of, loaded, of_norm, rows_of


def test_variants_share_parameters_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(TOY, TOY.tiny, CPU, torch.bfloat16)
    add_variant(monkeypatch, "tagged", lambda copied: setattr(copied[1], "tag", 1))
    copied: Any = vary(model, TOY, VARIANTS["tagged"]).model
    assert all(mine is theirs for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True))
    assert hasattr(copied[1], "tag")
    assert not hasattr(model.get_submodule("1"), "tag")


def test_names_set_in_a_models_module_are_there_for_that_variant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Liger's functions set the rotary embedding of every model of a family."""
    monkeypatch.setattr(nn.Sequential, "__module__", steps.__name__)
    before = steps.LOGITS

    def change(model: Any) -> None:
        steps.LOGITS = "others"

    add_variant(monkeypatch, "global", change)
    varied = vary(make(TOY, TOY.tiny, CPU, torch.bfloat16), TOY, VARIANTS["global"])
    assert before == steps.LOGITS
    with varied.within():
        assert steps.LOGITS == "others"
    assert before == steps.LOGITS


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
    work(job_of(tmp_path, runs=(COMPILE,), variants=("torch", "patch", "patch-passes")))
    assert all(row.ok and not row.note for row in rows_of(tmp_path).values())
    assert ["normforge" in code for code in graphs] == [False, True, True]


def test_passes_are_on_for_their_variant_alone(toy: Spec, tmp_path: Path) -> None:
    model = make(toy, toy.tiny, CPU, torch.bfloat16)
    found = {}
    for name in ("torch", "patch", "patch-passes", "patch"):
        with vary(model, toy, VARIANTS[name]).within():
            found[name] = switch._enabled
    assert found == {"torch": False, "patch": False, "patch-passes": True}
    keys = job_of(tmp_path, runs=(EAGER, COMPILE), variants=tuple(VARIANTS)).keys
    assert [key.run for key in keys if key.variant == "patch-passes"] == [COMPILE]


@THOROUGH
@pytest.mark.parametrize("dtype", [BF16, AUTOCAST])
@pytest.mark.parametrize("name", SPECS)
def test_each_model_is_right_as_each_variant_has_it(name: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip(SPECS[name].package, reason=INSTALL)
    # Autocast is traced like all else.
    runs = (EAGER, COMPILE) if dtype == BF16 else (EAGER,)
    work(job_of(tmp_path, name, dtype=dtype, variants=("torch", "patch", "patch-passes", "patch-unfused"), runs=runs))
    table = loaded(tmp_path)
    for key, row in table.rows.items():
        assert row.ok or (row.status.startswith(NOTHING) and key.variant != "torch"), row
    kinds = {(key.step, key.run) for key in table.rows}
    assert kinds == {*job_of(tmp_path, name, dtype=dtype, runs=runs).groups}


@pytest.mark.parametrize("dtype", [BF16, pytest.param(AUTOCAST, marks=THOROUGH)])
def test_a_wrong_model_is_told_and_not_timed(
    dtype: str, toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, function in BROKEN.items():
        add_variant(monkeypatch, name, partial(of_norm, function=function))
    work(job_of(tmp_path, dtype=dtype, variants=("torch", *BROKEN)))
    rows = rows_of(tmp_path)
    assert {name: rows[name].status.partition(":")[0] for name in BROKEN} == dict.fromkeys(BROKEN, WRONG)
    assert "times as far off as a nudge of the weights" in rows["scaled"].status
    assert [row.ms for row in rows.values() if row.variant != "torch"] == [None] * len(BROKEN)
    assert rows["torch"].ok


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


def _call(function: Callable[[], object], model: Any) -> None:
    function()


def test_what_the_table_holds_is_not_run_again(toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    for name in ("one", "two", "three"):
        add_variant(monkeypatch, name, partial(_call, partial(runs.append, name)))
    work(job_of(tmp_path, variants=("one", "two")))
    first = rows_of(tmp_path)
    assert runs == ["one", "two"]
    work(job_of(tmp_path, variants=("one", "two", "three")))
    assert runs == ["one", "two", "three"]
    assert {name: rows_of(tmp_path)[name] for name in first} == first
    with pytest.raises(UsageError, match=r"revision none there, another now.*--fresh"):
        work(replace(job_of(tmp_path), header={**HEADER, "revision": "another"}))


@THOROUGH
def test_the_command_runs_a_process_for_each_model(tmp_path: Path) -> None:
    given = ["models", "--models", "dit", "--variants", "torch", "patch", "--dtypes", "bf16", "--runs", "eager"]
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert cli.main([*given, "--revision", "r", "--rounds", "1", "--out", str(tmp_path)]) == 0
    table = loaded(tmp_path)
    found = [(key.run, key.variant, row.ok) for key, row in table.rows.items()]
    assert found == [(EAGER, "torch", True), (EAGER, "patch", True)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models.csv"]
