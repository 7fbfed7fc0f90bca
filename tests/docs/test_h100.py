"""Figures on the page of H100s are those measured there."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from statistics import geometric_mean

from benchmarks.chosen import RESULTS
from benchmarks.models.specs import SPECS
from benchmarks.models.table import load as load_models
from benchmarks.overview import SECTION, overview
from benchmarks.pages import section
from benchmarks.results import CEILING, PROJECT, Results, Row, load

from .pages import ROOT, doc
from .test_claims import gains, records, said, span

PAGE = doc("h100")
QUANTISED = RESULTS / "h100-quantised"
INVARIANT = "normforge-batch-invariant"


def test_the_tables_are_those_of_the_results() -> None:
    shown = overview([QUANTISED, RESULTS / "h100-models"])
    assert section(PAGE, SECTION) == "\n\n".join(grid.markdown() for grid in shown)


def results(suite: str) -> Results:
    found = load(QUANTISED, suite)
    assert found is not None
    return found


def test_how_fast_memory_copies_is_what_the_results_say() -> None:
    for name, folder in (("An H100", "h100-quantised"), ("an H200", "h200-quantised")):
        found = load(RESULTS / folder, "quantised")
        assert found is not None
        fastest = max(row.gb_per_s for row in found.rows.values() if row.provider == CEILING)
        assert f"{fastest / 1000:.1f}" in said(PAGE).partition(f"{name}'s")[2].partition("so that")[0]


def test_what_models_gain_is_that_of_the_results() -> None:
    text = said(PAGE)
    trained = gains("h100-models", "train", "bf16", "eager", "patch")
    assert trained.keys() == SPECS.keys()
    assert (min(trained, key=trained.__getitem__), max(trained, key=trained.__getitem__)) == ("gpt2", "qwen3")
    form = "in all eight models: {:.2f} (GPT-2) to {:.2f} (Qwen3) times torch's speed, {:.2f} in the geometric mean"
    assert min(trained.values()) > 1
    assert form.format(trained["gpt2"], trained["qwen3"], geometric_mean(trained.values())) in text
    beside = gains("h100-models", "train", "bf16", "eager", "patch", of="liger")
    assert min(beside.values()) > 1
    assert len(beside) == 7
    autocast = gains("h100-models", "train", "autocast", "eager", "patch")
    assert len(autocast) == 8
    assert min(autocast.values()) > 1
    table = load_models(RESULTS / "h100-models")
    assert table is not None
    memory = {
        (key.model, key.dtype, key.variant): row.memory_gib
        for key, row in table.rows.items()
        if (key.step, key.run) == ("train", "eager") and row.memory_gib is not None
    }
    pairs = [(memory[model, dtype, "patch"], of) for (model, dtype, name), of in memory.items() if name == "liger"]
    assert len(pairs) == 14
    assert all(abs(ours - ligers) < 0.01 for ours, ligers in pairs)


def test_what_compiled_training_gains_is_that_of_the_results() -> None:
    text = said(PAGE)
    compiled = gains("h100-models", "train", "bf16", "compile", "patch-passes")
    assert len(compiled) == 8
    assert (min(compiled, key=compiled.__getitem__), max(compiled, key=compiled.__getitem__)) == ("qwen3", "vit")
    form = "GPT-2, BERT and ViT gain {:.3f}, {:.3f} and {:.3f}"
    assert form.format(compiled["gpt2"], compiled["bert"], compiled["vit"]) in text
    of_biases = f"{compiled['bert']:.2f} to {compiled['vit']:.2f}"
    assert f"GPT-2, BERT and ViT, it is {of_biases} ([H100]" in said(ROOT / "README.md")
    without = gains("h100-models-without-column-sums", "train", "bf16", "compile", "patch-passes")
    assert "GPT-2 gains {:.3f} and ViT {:.3f}".format(without["gpt2"], without["vit"]) in text
    assert all(without[model] < compiled[model] for model in without)


def test_what_two_runs_of_the_same_code_differ_by_is_that_of_the_results() -> None:
    text = said(PAGE)
    again, patched = (
        gains("h100-models-again", "train", "bf16", "compile", name) for name in ("torch-again", "patch-passes")
    )
    most = max(100 * (1 / gain - 1) for gain in again.values())
    assert f"differ by up to {most:.1f} %, patched Qwen3 and DiT from unpatched by 0.1 %" in text
    assert {f"{100 * (1 / gain - 1):.1f}" for gain in patched.values()} == {"0.1"}
    (first, second) = (
        row
        for row in records("h100-models-again", "kernels")
        if (row["owner"], row["what"]) == ("Inductor", "elementwise and sums")
    )
    assert first["launches"] == second["launches"]
    assert abs(float(first["gb"]) / float(second["gb"]) - 1) < 0.01


def test_what_engines_have_quantised_is_as_fast_as_the_results_say() -> None:
    text, many, few = said(PAGE), results("quantised"), results("quantised-decode")
    assert [len(list(found.cells())) for found in (many, few)] == [240, 240]
    groups = span(shares("add_*_g128/*", "add_*_g128_column/*"))
    assert f"A copy's throughput is reached to {groups} % behind an add" in text
    compiled, helion, flashinfer = (longer(name) for name in ("compile", "helion", "flashinfer"))
    form = "torch.compile takes {} times as long, Helion {} and FlashInfer {}."
    assert form.format(*(span(ratios, ".2f") for ratios in (compiled, helion, flashinfer))) in text
    assert f"FlashInfer is ahead in {sum(one < 1 for one in flashinfer)} of {len(flashinfer)} cells" in text
    theirs = {
        of[PROJECT].cell: of["flashinfer"].us / of[PROJECT].us
        for of in measured("quantised", "quantised-decode")
        if "flashinfer" in of and of["flashinfer"].us < of[PROJECT].us
    }
    assert len(theirs) == 12
    assert all(cell.startswith("add_") for cell in theirs)


def shares(*patterns: str) -> list[float]:
    """Percent of a copy's throughput, from 4096 rows on."""
    many = results("quantised")
    rows = [many.of(cell)[PROJECT] for cell in many.cells() if any(fnmatch(cell, pattern) for pattern in patterns)]
    return [100 * (many.ratio_to_copy(row) or 0) for row in rows if row.m >= 4096]


def longer(provider: str) -> list[float]:
    """Times as long as ours, in every cell that a peer has."""
    return [of[provider].us / of[PROJECT].us for of in measured("quantised", "quantised-decode") if provider in of]


def measured(*suites: str) -> Iterator[dict[str, Row]]:
    for suite in suites:
        found = results(suite)
        yield from (found.of(cell) for cell in found.cells())


def test_what_batch_invariance_costs_is_what_the_results_say() -> None:
    text = said(PAGE)
    ratios = [(of[PROJECT], of[INVARIANT].us / of[PROJECT].us) for of in measured("batch-invariant-many")]
    others = [row for row, ratio in ratios if ratio > 1.03]
    assert all(row.n % 2 or row.n >= 16384 or (row.m == 257 and row.n <= 4096) for row in others)
    longest = max(ratios, key=lambda each: each[1] if each[0].n >= 16384 else 0)
    assert longest[0].task == "backward"
    assert f"(up to {100 * (longest[1] - 1):.0f} %, backward)" in text
