"""What the page of H100s says is what was measured there."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from statistics import geometric_mean

from benchmarks.chosen import RESULTS
from benchmarks.models import kernels
from benchmarks.models.names import Key
from benchmarks.models.specs import SPECS
from benchmarks.models.table import load as load_models
from benchmarks.overview import SECTION, overview
from benchmarks.pages import section
from benchmarks.results import CEILING, PROJECT, Results, Row, load

from .pages import ROOT, doc
from .test_claims import gains, said, span

PAGE = doc("h100")
QUANTISED = RESULTS / "h100-quantised"
INVARIANT = "normforge-batch-invariant"


def test_the_tables_are_those_of_the_results() -> None:
    assert section(PAGE, SECTION) == overview([QUANTISED, RESULTS / "h100-models"])


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
    assert f"in all seven that have some, {geometric_mean(beside.values()):.2f} in the mean" in text
    autocast = gains("h100-models", "train", "autocast", "eager", "patch")
    assert len(autocast) == 8
    assert min(autocast.values()) > 1
    assert f"Under autocast all eight gain, {geometric_mean(autocast.values()):.2f} in the mean" in text
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


def test_models_beside_compiled_ones_are_as_fast_as_the_results_say() -> None:
    table = load_models(RESULTS / "h100-models")
    assert table is not None
    eager, compiled = (
        [table.rows[Key(model, "bf16", "train", run, name)].ms for model in ("llama", "qwen3", "gemma")]
        for run, name in (("eager", "patch"), ("compile", "torch"))
    )
    form = "take {:.1f}, {:.1f} and {:.1f} ms; compiled and unpatched {:.1f}, {:.1f} and {:.1f}"
    assert form.format(*eager, *compiled) in said(PAGE)


def test_what_decoding_gains_is_that_of_the_results() -> None:
    text = said(PAGE)
    eager, compiled, graphs = (
        gains("h100-models", "decode", "bf16", run, variant)
        for run, variant in (("eager", "patch"), ("compile", "patch-passes"), ("graphs", "patch-passes"))
    )
    gpt2 = eager.pop("gpt2")
    assert f"RMSNorm models at {span([*eager.values()], '.2f')} times torch's speed, GPT-2 at {gpt2:.2f}" in text
    assert f"is at {span([*compiled.values()], '.2f')}, and in CUDA graphs within 0.2 %" in text
    assert all(abs(gain - 1) <= 0.002 for gain in graphs.values())
    assert len(compiled) == len(graphs) == 5


def test_what_compiled_training_gains_is_that_of_the_results() -> None:
    text = said(PAGE)
    compiled = gains("h100-models", "train", "bf16", "compile", "patch-passes")
    assert len(compiled) == 8
    assert (min(compiled, key=compiled.__getitem__), max(compiled, key=compiled.__getitem__)) == ("qwen3", "vit")
    mean = geometric_mean(compiled.values())
    form = "{:.2f} (Qwen3) to {:.2f} (ViT) times the unpatched model's speed, {:.3f} in the geometric mean of eight"
    assert form.format(compiled["qwen3"], compiled["vit"], mean) in text
    form = "GPT-2, BERT and ViT gain {:.3f}, {:.3f} and {:.3f}"
    assert form.format(compiled["gpt2"], compiled["bert"], compiled["vit"]) in text
    of_biases = f"{compiled['bert']:.2f} to {compiled['vit']:.2f}"
    assert f"GPT-2, BERT and ViT, it is {of_biases} ([H100]" in said(ROOT / "README.md")
    benchmarks = said(doc("benchmarks"))
    assert (
        f"GPT-2, BERT and ViT train at {of_biases} times the unpatched models' speed, and all eight at {mean:.3f}"
        in benchmarks
    )
    without = gains("h100-models-without-column-sums", "train", "bf16", "compile", "patch-passes")
    assert "GPT-2 gains {:.3f} and ViT {:.3f}".format(without["gpt2"], without["vit"]) in text
    assert all(without[model] < compiled[model] for model in without)


def test_what_two_runs_of_the_same_code_differ_by_is_that_of_the_results() -> None:
    text = said(PAGE)
    again, patched = (
        gains("h100-models-again", "train", "bf16", "compile", name) for name in ("torch-again", "patch-passes")
    )
    form = (
        "took {:.1f} % longer than the first in Qwen3 and {:.1f} % in DiT; the patched models took 0.1 % longer in both"
    )
    assert form.format(*(100 * (1 / again[model] - 1) for model in ("qwen3", "dit"))) in text
    assert {f"{100 * (1 / gain - 1):.1f}" for gain in patched.values()} == {"0.1"}
    found = kernels.load(RESULTS / "h100-models-again")
    assert found is not None
    rows = [row for row in found[1] if row.owner == "Inductor" and row.what == "elementwise and sums"]
    (first, second) = rows
    assert first.launches == second.launches
    assert f"the same {first.launches} elementwise kernels of Qwen3 took {first.ms:.1f} and {second.ms:.1f} ms" in text
    assert abs(first.gb / second.gb - 1) < 0.01


def test_what_engines_have_quantised_is_as_fast_as_the_results_say() -> None:
    text, many, few = said(PAGE), results("quantised"), results("quantised-decode")
    assert [len(list(found.cells())) for found in (many, few)] == [240, 240]
    groups = span(shares("add_*_g128/*", "add_*_g128_column/*"))
    assert f"behind a residual add {groups} % of a copy's throughput from M = 4096 on" in text
    assert f"with y in bf16 as well {span(shares('add_*_two/*'))} %." in text
    assert f"Without an add {span(shares('quantised/*_g128/*'))} %." in text
    compiled, helion, flashinfer = (longer(name) for name in ("compile", "helion", "flashinfer"))
    assert f"takes {span(compiled, '.2f')} times as long, in the {len(compiled)} cells of groups" in text
    form = "take {} times as long, {:.2f} in the mean of {} cells of RMSNorm. In {} they are ahead, by up to {:.1f} %."
    ahead = sum(one < 1 for one in helion)
    assert ahead == 7
    mean = geometric_mean(helion)
    assert form.format(span(helion, ".2f"), mean, len(helion), "seven", 100 * (1 - min(helion))) in text
    form = "take {} times as long, {:.2f} in the mean of {} cells"
    assert form.format(span(flashinfer, ".2f"), geometric_mean(flashinfer), len(flashinfer)) in text
    theirs = {
        of[PROJECT].cell: of["flashinfer"].us / of[PROJECT].us
        for of in measured("quantised", "quantised-decode")
        if "flashinfer" in of and of["flashinfer"].us < of[PROJECT].us
    }
    assert len(theirs) == 12
    assert all(cell.startswith("add_") for cell in theirs)
    assert {f"{100 * (1 - ratio):.0f}" for cell, ratio in theirs.items() if ratio < 0.92} == {"9", "10"}
    assert {cell.rpartition("/")[2] for cell, ratio in theirs.items() if ratio < 0.92} == {"64x5120", "1024x7168"}
    slower = [
        100 * (few.of(cell)[PROJECT].us / few.of(cell.replace("g128", "row"))[PROJECT].us - 1)
        for cell in few.cells()
        if "_g128/" in cell
    ]
    within = sum(one <= 5 for one in slower)
    assert f"in {within} of {len(slower)} cells, {max(slower):.0f} % at most" in text


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
    within = {
        task: [ratio <= 1.03 for row, ratio in ratios if row.task == task]
        for task in ("forward", "add", "quant", "add_quant", "backward")
    }
    form = (
        "in {} of {} cells forward, {} of {} with an add, {} of {} with fp8, {} of {} with both, and {} of {} backward"
    )
    assert form.format(*(count for cells in within.values() for count in (sum(cells), len(cells)))) in text
    others = [row for row, ratio in ratios if ratio > 1.03]
    assert all(row.n % 2 or row.n >= 16384 or (row.m == 257 and row.n <= 4096) for row in others)
    longest = max(ratios, key=lambda each: each[1] if each[0].n >= 16384 else 0)
    assert longest[0].task == "backward"
    assert f"(up to {100 * (longest[1] - 1):.0f} % longer, backward)" in text
    few = [of[INVARIANT].us / of[PROJECT].us for of in measured("batch-invariant") if of[PROJECT].task == "forward"]
    assert f"Few rows take {100 * (geometric_mean(few) - 1):.0f} % longer forward, in the mean" in text
