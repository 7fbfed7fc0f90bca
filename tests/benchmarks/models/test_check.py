"""The check of models: what it finds wrong, and by how much a right one may be off."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.models.check import Outcome, check, make_yardstick, nudged
from benchmarks.models.names import AUTOCAST, BF16, WRONG
from benchmarks.models.specs import Spec, make
from benchmarks.models.worker import work
from benchmarks.oracle import WrongOutputError

from ...thorough import THOROUGH
from .toy import BROKEN, CPU, TOY, add_variant, job_of, of_norm, rows_of


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
