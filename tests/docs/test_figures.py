"""Figures of the README and of pages are those of results; tables and pictures are written from results."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from benchmarks.cells import Task
from benchmarks.chosen import OVERVIEW, RESULTS
from benchmarks.models.specs import SPECS
from benchmarks.models.table import load as load_models
from benchmarks.overview import SECTION, overview
from benchmarks.pages import section
from benchmarks.providers import every_provider
from benchmarks.reach import RULES, check
from benchmarks.report import markdown, pictures_of
from benchmarks.results import CEILING, PROJECT, Results, Row, load, read
from benchmarks.suites import SUITES
from proving.accuracy import report as accuracy
from proving.conformance import report as conformance
from proving.engines import command as engines
from proving.evidence import Table
from proving.evidence import load as load_table
from proving.matrix import command as matrix
from proving.models import command as models
from proving.mutants import report as mutants
from proving.sanitizer import command as sanitizer
from proving.soak import report as soak

from ..calling import there
from ..test_examples import example
from ..thorough import THOROUGH
from .shell import ROOT, blocks, doc, links

README, BENCHMARKS, H100 = ROOT / "README.md", doc("benchmarks"), doc("h100")
# A suite without a table has not been run on that machine yet, and no page speaks of it.
MEASURED = [suite for suite in SUITES if load(RESULTS / "h200", suite) is not None]


def said(page: Path) -> str:
    """Return a page's prose in one line."""
    return " ".join(page.read_text().split())


def says(page: Path, form: str, *figures: object) -> None:
    """Fail unless a page has a text with these figures in it."""
    assert form.format(*figures) in said(page)


def results(suite: str, folder: str = "h200") -> Results:
    return there(load(RESULTS / folder, suite))


def records(folder: str, name: str) -> list[dict[str, str]]:
    """Return the rows of a table of results, as texts by column."""
    return there(read(RESULTS / folder, name, ()))[1]


def chosen(found: Results, cells: str, *, least_n: int = 1, most_n: int = 1 << 62, group: str = "*") -> list[Row]:
    """Return the project's rows of some cells, each of which has a time."""
    rows = [row for row in found.rows.values() if row.provider == PROJECT and fnmatch(row.cell, cells)]
    rows = [row for row in rows if fnmatch(row.group, group) and least_n <= row.n <= most_n]
    assert rows
    assert all(row.ok for row in rows)
    return rows


def to_copy(found: Results, rows: list[Row]) -> list[float]:
    """Return percent of a copy's throughput."""
    return [100 * ratio for row in rows if (ratio := found.ratio_to_copy(row)) is not None]


def ahead(found: Results, rows: list[Row], *peers: str) -> list[float]:
    """Return the time of the fastest of some peers over ours, where a peer has one; of any peer if none is named."""
    names = peers or tuple(name for name in every_provider() if name not in (PROJECT, CEILING))
    times = [(row.us, [us for name in names if (us := time_of(found, row.cell, name)) is not None]) for row in rows]
    return [min(others) / ours for ours, others in times if others]


def time_of(found: Results, cell: str, provider: str) -> float | None:
    row = found.of(cell).get(provider)
    return row.us if row is not None and row.ok else None


def span(figures: list[float], form: str = ".0f", between: str = " to ") -> str:
    return f"{min(figures):{form}}{between}{max(figures):{form}}"


def test_the_front_doors_figures_are_those_of_the_results() -> None:
    forward, backward, quant = (results(name) for name in ("forward", "backward", "quant"))
    plain, both = "*/[lr]*_bf16/*", {"group": "256 MiB"}
    rows = chosen(forward, plain, least_n=256, most_n=16384, **both)
    share, times = span(to_copy(forward, rows), between="–"), span(ahead(forward, rows, "eager"), ".1f", "–")
    says(README, "{} % of the throughput of a copy for N from 256 to 16384", share)
    says(README, "That is {}× torch's operators", times)
    assert min(ahead(forward, rows)) > 0.99, "never more than 1 % slower"
    rows = chosen(backward, plain, least_n=256, most_n=8192, **both)
    share, times = span(to_copy(backward, rows), between="–"), span(ahead(backward, rows, "eager"), ".1f", "–")
    says(README, "{} % of a copy for N from 256 to 8192, {}×", share, times)
    says(README, "operators and {}× the fastest of the others", span(ahead(backward, rows), ".2f", "–"))
    rows = chosen(quant, "*/ln_bf16_*", most_n=16384, group="add + quant")
    says(README, "{} % of a copy for N from 1024 to 16384", span(to_copy(quant, rows), between="–"))
    compiled, eager = (
        span(ahead(quant, rows, name), digits, "–") for name, digits in (("compile", ".2f"), ("eager", ".1f"))
    )
    says(README, "{}× torch.compile's default and {}× eager", compiled, eager)
    group_norm = results("groupnorm", "h200-groupnorm")
    says(README, "{} % of a copy's throughput forward", span(to_copy(group_norm, chosen(group_norm, "group/*"))))


def test_where_others_are_faster_is_said() -> None:
    found, drawn = results("forward"), results("sweep", "h200-sweep")
    long = chosen(found, "*/rms_bf16/*", least_n=32769, group="256 MiB")
    behind = [100 / min(ahead(found, long, "quack")) - 100]
    behind.append(100 / min(ahead(drawn, chosen(drawn, "forward/rms_*", least_n=32769), "quack")) - 100)
    for page in (README, BENCHMARKS):
        says(page, "QuACK is up to {:.0f} % faster, and up to {:.0f} % at", *behind)


def test_host_times_are_those_of_the_results() -> None:
    whole = {row["part"]: float(row["us"]) for row in records("h200", "parts")}
    both, plain = ("{}, forward and backward", "layer_norm"), ("layernorm2d_fwd", "F.layer_norm")
    ours, torchs = (whole[both[0].format(name)] for name in ("layer_norm", "F.layer_norm"))
    recorded = whole["layer_norm, recorded"] / whole["F.layer_norm, recorded"]
    form = (
        "a plain call takes {:.2f} of torch's time, a call that records a gradient {:.2f}, forward and backward {:.2f}."
    )
    says(BENCHMARKS, form, whole[plain[0]] / whole[plain[1]], recorded, ours / torchs)
    says(README, "LayerNorm 16×4096 take {:.0f} µs where torch takes {:.0f}", ours, torchs)
    form = "Calls without gradients take {:.1f} µs where torch takes {:.1f}"
    says(README, form, *(whole[name] for name in plain))
    host, cell = results("host"), "{}/ln_bf16/16x4096"
    tasks = (Task.FORWARD, Task.GRAD_FORWARD, Task.GRAD_BOTH)
    figures = [host.of(cell.format(task.value))[who].us for task in tasks for who in (PROJECT, "eager")]
    form = "{:.1f} µs (torch {:.1f}); with a gradient recorded {:.1f} ({:.1f}); forward and backward {:.0f} ({:.0f})"
    says(doc("models"), form, *figures)


@pytest.mark.parametrize(("page", "folders"), [(BENCHMARKS, OVERVIEW), (H100, ("h100-quantised", "h100-models"))])
def test_the_tables_are_those_of_the_results(page: Path, folders: tuple[str, ...]) -> None:
    shown = overview([RESULTS / name for name in folders])
    assert section(page, SECTION) == "\n\n".join(grid.markdown() for grid in shown)


def test_the_tables_of_steps_are_those_of_their_results() -> None:
    folder, page = RESULTS / "h200-steps", doc("from_tutorial")
    assert section(page, "steps") == markdown(folder, pictures_of(folder, page))


def test_the_steps_on_the_page_are_those_that_are_timed() -> None:
    """Every function of `benchmarks/steps/`, to the letter, and no other code that launches a kernel."""
    shown = [block.text for block in blocks(doc("from_tutorial")) if block.language == "python"]
    texts = [(ROOT / "benchmarks" / "steps" / f"{name}.py").read_text() for name in ("forward", "backward")]
    quoted = [block.strip() for block in shown if "@triton.jit" in block or "_ptr" in block or "num_warps" in block]
    functions = [re.findall(r"^def (\w+)", text, re.MULTILINE) for text in texts]
    assert all(any(f"def {name}(" in block for block in shown) for names in functions for name in names)
    pieces = [piece for block in quoted for piece in block.split("\n\n\n")]
    assert len(pieces) > 15
    assert [piece for piece in pieces if not any(f"{piece}\n" in text for text in texts)] == []


def test_revisions_and_versions_are_those_of_the_results() -> None:
    header = results("forward").header
    versions = [header[name].partition("+")[0] for name in ("torch", "triton")]
    says(README, "{} with torch {} and Triton {} at revision {}", header["device"], *versions, header["revision"])
    assert {results(name).header["revision"] for name in MEASURED} == {header["revision"]}


def test_every_goal_of_the_suites_that_is_short_is_said_and_its_cells_are_profiled() -> None:
    profiled = {row["cell"] for row in records("h200", "profile")}
    for checked in (check(rule, results(rule.suite)) for rule in RULES if rule.suite in MEASURED):
        if checked.outcome == "short":
            missed = {finding.row.cell for finding in checked.findings if not finding.met}
            count = len(checked.findings)
            says(BENCHMARKS, "{}: {} of {}", checked.rule.title, count - len(missed), count)
            assert checked.rule.suite == "host" or missed <= profiled


def times(folder: str, step: str, run: str = "eager", dtype: str = "bf16") -> dict[tuple[str, str], float]:
    """Return milliseconds by model and variant."""
    rows = [row for row in there(load_models(RESULTS / folder)).rows.values() if row.key[1:4] == (dtype, step, run)]
    return {(row.model, row.variant): row.ms for row in rows if row.ms}


def gains(folder: str, step: str = "train", variant: str = "patch", of: str = "torch", **at: str) -> dict[str, float]:
    """Return how many times the speed of another variant one has, by model."""
    ms = times(folder, step, **at)
    return {model: ms[model, of] / time for (model, name), time in ms.items() if name == variant and (model, of) in ms}


def compiled(folder: str, step: str = "train") -> dict[str, float]:
    return gains(folder, step, run="compile", variant="patch-passes")


def test_what_models_gain_is_that_of_the_results() -> None:
    trained = gains("h200-models")
    # Gemma 3 has a table of its own.
    assert trained.keys() == SPECS.keys() - {"gemma3"}
    mean, dit = geometric_mean(trained.values()), trained.pop("dit")
    assert (min(trained, key=trained.__getitem__), max(trained, key=trained.__getitem__)) == ("gpt2", "qwen3")
    figures = (trained["gpt2"], trained["qwen3"])
    for page, between in ((README, ";"), (BENCHMARKS, ",")):
        form = "{:.2f} (GPT-2) to {:.2f} (Qwen3) times torch's speed, DiT at {:.2f}{} {:.2f} in the geometric mean"
        says(page, form, *figures, dit, between, mean)
    autocast = gains("h200-models-again", dtype="autocast")
    assert autocast.keys() == SPECS.keys() - {"gemma3"}
    form = "all eight train at {} times torch's speed, {:.2f} in the geometric mean"
    says(BENCHMARKS, form, span([*autocast.values()], ".2f"), geometric_mean(autocast.values()))
    applied = gains("h200-models", variant="liger-apply", of="patch")
    form = "{:.2f}, {:.2f} and {:.2f} times as fast as `patch`"
    says(BENCHMARKS, form, *(applied[model] for model in ("llama", "qwen3", "gemma")))


def test_what_compiled_models_gain_is_that_of_the_results() -> None:
    first, again = compiled("h200-models"), compiled("h200-models-again")
    assert (len(first), len(again)) == (7, 8)
    form = "of seven models, patched ones train at {} times the speed of unpatched ones"
    says(README, form, span([*first.values()], ".2f"))
    says(README, "second run at {}.", span([*again.values()], ".2f"))
    folders = ("h200-models-again", "h200-models-third", "h200-models-compiled")
    trained = [gain for folder in folders for gain in compiled(folder).values()]
    decoded = geometric_mean(compiled("h200-models-again", "decode").values())
    form = "three further runs trained at {:.3f} to {:.2f} times the unpatched speed, and decoded at {:.2f} without"
    says(BENCHMARKS, form, min(trained), max(trained), decoded)


def test_what_decoding_gains_is_that_of_the_results() -> None:
    decoded = gains("h200-models", "decode")
    decoded.pop("gpt2")
    says(README, "RMSNorm models gain {}", span([*decoded.values()], ".2f"))
    ms = times("h200-models", "decode")
    says(README, "GPT-2 takes {:.1f} ms where torch takes {:.1f}", ms["gpt2", "patch"], ms["gpt2", "torch"])
    runs = {(row["run"], row["variant"]): float(row["ms"]) for row in records("h200-models-decode", "models")}
    graphs, eager = ([runs[run, name] for name in ("patch-passes", "torch", "patch")] for run in ("graphs", "compile"))
    page = doc("torch-compile")
    says(page, "takes {:.2f} ms patched, {:.2f} as it is and {:.2f} with every norm", *graphs)
    says(page, "without a CUDA graph {:.1f}, {:.1f} and {:.1f} ms", *eager)


def test_what_models_gain_on_slower_hosts_is_that_of_the_results() -> None:
    slower = ("h200-models-again", "h200-models-third")
    trained = [gains(folder) for folder in slower]
    (mean,) = {f"{geometric_mean(each.values()):.2f}" for each in trained}
    assert all(each["dit"] < 1 for each in trained)
    says(README, "On two slower hosts it was {}, and DiT gained nothing", mean)
    says(BENCHMARKS, "**On two slower hosts** the mean was {}.", mean)
    decoded = [gains(folder, "decode")["gpt2"] for folder in slower]
    says(BENCHMARKS, "GPT-2's decoding ran at {}.", span(decoded, ".2f"))


def test_the_page_of_h100s_has_the_figures_of_the_results() -> None:
    fastest = [
        max(row.gb_per_s for row in results("quantised", folder).rows.values() if row.provider == CEILING) / 1000
        for folder in ("h100-quantised", "h200-quantised")
    ]
    says(H100, "An H100's memory copies at up to {:.1f} TB/s, an H200's at {:.1f}", *fastest)
    trained = gains("h100-models")
    assert (min(trained, key=trained.__getitem__), max(trained, key=trained.__getitem__)) == ("gpt2", "qwen3")
    form = "in all eight models: {:.2f} (GPT-2) to {:.2f} (Qwen3) times torch's speed, {:.2f} in the geometric mean"
    says(H100, form, trained["gpt2"], trained["qwen3"], geometric_mean(trained.values()))
    gained, without = compiled("h100-models"), compiled("h100-models-without-column-sums")
    form = "GPT-2, BERT and ViT gain {:.3f}, {:.3f} and {:.3f}"
    says(H100, form, *(gained[name] for name in ("gpt2", "bert", "vit")))
    says(H100, "GPT-2 gains {:.3f} and ViT {:.3f}", without["gpt2"], without["vit"])
    says(README, "GPT-2, BERT and ViT, it is {:.2f} to {:.2f} ([H100]", gained["bert"], gained["vit"])


def test_what_the_other_pages_found_is_what_testing_says() -> None:
    conformance, accuracy, sanitizer = (load_table(ROOT, what) for what in ("conformance", "accuracy", "sanitizer"))
    passed, failed = (sum(int(row[name]) for row in conformance.rows) for name in ("passed", "failed"))
    assert failed == 0
    says(doc("testing"), "{:,} cases", passed)
    cells, beyond, good = (sum(int(row[name]) for row in accuracy.rows) for name in ("cells", "beyond", "no worse"))
    says(doc("testing"), "of {:,} cells {:.0f} %", cells, 100 * good / cells)
    worse = ("none", "one", "two", "three", "four", "five")[beyond]
    says(doc("testing"), "and {} more than four times as bad", worse)
    tools = [tool for tool in sanitizer.columns if tool != "call"]
    assert len(tools) == 4
    assert all(sanitizer.header[tool].endswith(", clean") for tool in tools)


def test_norms_named_at_the_front_door_are_what_the_survey_found() -> None:
    """A family, such as `Llama`, means its RMSNorm."""
    survey, text = load_table(ROOT, "huggingface"), README.read_text()
    taken, skipped = ({row["class"] for row in survey.rows if row["outcome"] == how} for how in ("taken", "skipped"))
    ((families, others),) = re.findall(r"RMSNorm of (Llama.*?) and others; (`T5\w+`.*?) \| swaps", text)
    named = {*(f"{family}RMSNorm" for family in families.split(", ")), *re.findall(r"`(\w+)`", others)}
    assert named <= taken
    assert {*re.findall(r", as .*?`(\w+)`", text.partition("## Models")[2].partition("## When")[0])} <= skipped
    form = "Of {} norm classes in transformers {} it takes {},"
    says(README, form, len(taken | skipped), survey.header["transformers"], len(taken))
    for library in ("diffusers", "timm"):
        outcomes = [row["outcome"] for row in load_table(ROOT, library).rows]
        says(README, f"{{}} of {{}} in [{library}]", outcomes.count("taken"), len(outcomes))


SUMMARIES: dict[str, tuple[str, Callable[[Table], str]]] = {
    "accuracy": ("evidence", accuracy.summary),
    "conformance": ("evidence", conformance.summary),
    "sanitizer": ("evidence", sanitizer.summary),
    "soak": ("evidence", soak.summary),
    "mutants": ("evidence", mutants.summary),
    "versions": ("versions", matrix.summary),
    **{name: (name, models.summary) for name in ("huggingface", "diffusers", "timm")},
}
# A section of a page about more.
SECTIONS = SUMMARIES | {"engines": ("integrations", engines.summary)}
# Words of a section, or of a page with one section.
MOST_WORDS = 500


@pytest.mark.parametrize("what", SECTIONS)
def test_a_section_is_the_summary_of_its_table(what: str) -> None:
    name, summary = SECTIONS[what]
    written = section(doc(name), what)
    assert written == summary(load_table(ROOT, what))
    assert len(written.split()) <= MOST_WORDS


@pytest.mark.parametrize("name", sorted({name for name, _ in SUMMARIES.values()}))
def test_a_page_is_a_screen_per_section(name: str) -> None:
    sections = sum(page == name for page, _ in SUMMARIES.values())
    assert len(doc(name).read_text().split()) <= MOST_WORDS * sections


PAGE = doc("derivations")


@pytest.fixture(scope="module")
def script() -> Any:
    return example(ROOT, "derivations")


@pytest.mark.parametrize("name", ["variances", "sums"])
def test_tables_are_what_the_script_computes(script: Any, name: str) -> None:
    assert section(PAGE, name) == script.TABLES[name]()


@THOROUGH
def test_the_pictures_of_the_page_are_drawn(script: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    script.main(["--into", str(page)])
    pictures = example(ROOT, "derivation_pictures")
    pictures.main([str(tmp_path)])
    assert page.read_text() == PAGE.read_text()
    shown = {Path(link).name for link in links(PAGE) if link.endswith(".png")}
    assert shown == {path.name for path in tmp_path.glob("*.png")} == {f"{name}.png" for name in pictures.PICTURES}
