"""Models as each variant has them: right, apart from each other, and what they say they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.models import steps
from benchmarks.models.names import AUTOCAST, BF16, COMPILE, EAGER, NOTHING
from benchmarks.models.specs import SPECS, Spec, make
from benchmarks.models.variants import VARIANTS, vary
from benchmarks.models.worker import work
from normforge.compiled import switch

from ...thorough import THOROUGH
from .toy import CPU, INSTALL, TOY, add_variant, job_of, loaded, rows_of


def test_variants_share_parameters_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(TOY, TOY.tiny, CPU, torch.bfloat16)
    add_variant(monkeypatch, "tagged", lambda copied: setattr(copied[1], "tag", 1))
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

    add_variant(monkeypatch, "global", change)
    varied = vary(make(TOY, TOY.tiny, CPU, torch.bfloat16), TOY, VARIANTS["global"])
    assert before == home.LOGITS
    with varied.within():
        assert home.LOGITS == "others"
    assert before == home.LOGITS


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
