"""Figures, counts, names and settings on pages are those of results, tables and code."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from statistics import geometric_mean

import pytest

import normforge
from benchmarks import generator
from benchmarks.cells import Task
from benchmarks.chosen import OVERVIEW, RESULTS
from benchmarks.models.names import Key
from benchmarks.models.specs import SPECS
from benchmarks.models.table import load as load_models
from benchmarks.overview import SECTION, overview
from benchmarks.pages import section
from benchmarks.providers import every_provider
from benchmarks.reach import RULES, Rule, check
from benchmarks.report import markdown, pictures_of
from benchmarks.results import CEILING, PROJECT, Results, Row, load, read
from benchmarks.suites import SUITES
from normforge.codegen.groups import mode_named
from normforge.errors import IllegalCombinationError
from proving.evidence import load as load_table

from .pages import PAGES, ROOT, blocks, doc, prose

H200 = RESULTS / "h200"
README = ROOT / "README.md"
BENCHMARKS = doc("benchmarks")

BF16 = ("ln_bf16", "rms_bf16")

# A suite without a table has not been run on that machine yet, and no page speaks of it.
MEASURED = [suite for suite in SUITES if load(H200, suite) is not None]


def results(suite: str) -> Results:
    found = load(H200, suite)
    assert found is not None
    return found


def said(page: Path) -> str:
    """Return a page's prose in one line."""
    return " ".join(page.read_text().split())


class Cells:
    """Some cells of a suite, and normforge's figures there."""

    def __init__(self, suite: str, group: str, most_n: int, kinds: tuple[str, ...] = BF16, least_n: int = 0) -> None:
        self.results = results(suite)
        rows = [row for row in self.results.rows.values() if row.provider == PROJECT]
        self.rows = [row for row in rows if row.group == group and row.kind in kinds and least_n <= row.n <= most_n]
        assert self.rows
        assert all(row.ok for row in self.rows)

    def to_copy(self) -> list[float]:
        """Return throughput over the copy's."""
        ratios = [self.results.ratio_to_copy(row) for row in self.rows]
        return [ratio for ratio in ratios if ratio is not None]

    def over(self, *providers: str) -> list[float]:
        """Return the time of the fastest of some providers over ours."""
        return [min(self._times(row, providers)) / row.us for row in self.rows]

    def over_best(self) -> list[float]:
        """Return the time of the fastest other provider over ours."""
        return self.over(*(name for name in every_provider() if name not in (PROJECT, CEILING)))

    def _times(self, row: Row, providers: tuple[str, ...]) -> Iterator[float]:
        others = self.results.of(row.cell)
        yield from (others[name].us for name in providers if name in others and others[name].ok)


def percent(ratios: list[float]) -> str:
    return f"{100 * min(ratios):.0f}–{100 * max(ratios):.0f} %"


def times(ratios: list[float], digits: int = 1) -> str:
    return f"{min(ratios):.{digits}f}–{max(ratios):.{digits}f}×"


def test_the_front_doors_figures_are_those_of_the_results() -> None:
    text = said(README)
    forward, backward = Cells("forward", "256 MiB", 16384), Cells("backward", "256 MiB", 8192)
    quantised = {row.kind for row in results("quant").rows.values() if row.kind.startswith("ln_bf16_")}
    fused = Cells("quant", "add + quant", 16384, tuple(quantised))
    assert {row.n for row in forward.rows} >= {256, 16384}
    assert {row.n for row in backward.rows} >= {256, 8192}
    assert {row.n for row in fused.rows} >= {1024, 16384}
    assert {row.task for row in fused.rows} == {Task.ADD_QUANT.value}
    assert f"{percent(forward.to_copy())} of the throughput of a copy for N from 256 to 16384" in text
    assert f"That is {times(forward.over('eager'))} torch's operators" in text
    assert min(forward.over_best()) > 0.99, "never more than 1 % slower"
    assert f"{percent(backward.to_copy())} of a copy for N from 256 to 8192, {times(backward.over('eager'))}" in text
    assert f"operators and {times(backward.over_best(), 2)} the fastest of the others" in text
    assert f"{percent(fused.to_copy())} of a copy for N from 1024 to 16384" in text
    assert f"{times(fused.over('compile'), 2)} torch.compile's default and {times(fused.over('eager'))} eager" in text


def test_where_others_are_faster_is_said() -> None:
    long = Cells("forward", "256 MiB", 1 << 20, ("rms_bf16",), least_n=32769)
    assert round(1 / min(long.over("quack")) - 1, 2) == 0.08
    drawn = load(RESULTS / "h200-sweep", "sweep")
    assert drawn is not None
    cells = [drawn.of(cell) for cell in drawn.cells() if cell.startswith("forward/rms_")]
    pairs = [(cell[PROJECT].us, cell["quack"].us) for cell in cells if cell[PROJECT].n > 32768 and cell["quack"].ok]
    ahead = max(ours / quack for ours, quack in pairs) - 1
    for page in (README, BENCHMARKS):
        assert f"QuACK is up to 8 % faster, and up to {100 * ahead:.0f} % at" in said(page)


def test_where_max_autotune_is_the_fastest_is_said() -> None:
    timed, behind = 0, []
    for suite in MEASURED:
        for cell in map(results(suite).of, results(suite).cells()):
            if "max-autotune" not in cell:
                continue
            timed += 1
            others = {name: row.us for name, row in cell.items() if row.ok and name != CEILING}
            if min(others, key=others.__getitem__) == "max-autotune":
                behind.append(others[PROJECT] / others["max-autotune"] - 1)
    text = f"is the fastest in {len(behind)} of the {timed} cells that it was timed in, by {max(behind):.0%} at most"
    assert text.replace("%", " %") in said(BENCHMARKS)


def test_parts_of_calls_are_those_of_the_results() -> None:
    whole = {row["part"]: float(row["us"]) for row in records("h200", "parts")}
    ratios = (
        whole["layernorm2d_fwd"] / whole["F.layer_norm"],
        whole["layer_norm, recorded"] / whole["F.layer_norm, recorded"],
        whole["layer_norm, forward and backward"] / whole["F.layer_norm, forward and backward"],
    )
    plain, recorded, both = (f"{ratio:.2f}" for ratio in ratios)
    text = (
        f"a plain call takes {plain} of torch's time, a call that records a gradient {recorded}, forward and backward"
    )
    assert f"{text} {both}." in said(BENCHMARKS)
    ours, torchs = (whole[f"{name}, forward and backward"] for name in ("layer_norm", "F.layer_norm"))
    assert f"LayerNorm 16×4096 take {ours:.0f} µs where torch takes {torchs:.0f}" in said(README)
    ours, torchs = whole["layernorm2d_fwd"], whole["F.layer_norm"]
    assert f"Calls without gradients take {ours:.1f} µs where torch takes {torchs:.1f}" in said(README)
    parts = {(row["group"], row["part"]): float(row["us"]) for row in records("h200-in-place", "parts")}
    columns = ("add + smooth int8, in place", "recorded, in place")
    for part in ("normforge's Python", "launch", "allocations", "the whole call"):
        line = " | ".join(f"{parts[column, part]:.1f}" for column in columns)
        assert re.search(rf"^\| {part}.*? \| {line} \|$", _page("design"), re.MULTILINE), part


def test_start_up_times_are_those_of_the_results() -> None:
    seconds = {row["way"]: f"{float(row['norm_s']):.1f} s" for row in records("h200-startup", "startup")}
    text = said(doc("deploy"))
    assert f"{seconds['cold']} with nothing compiled, {seconds['warm']} with Triton's cache filled" in text
    assert f"{seconds['aot']} ahead of time the first time on a machine and {seconds['aot-again']} from then on" in text
    assert f"torch's own operator takes {seconds['torch']}" in text


def test_the_generators_times_are_those_of_the_results() -> None:
    found = read(RESULTS / generator.SUITE, generator.SUITE, ["case"])
    assert found is not None
    header, records = found
    rows = [
        generator.Row(
            record["case"],
            float(record["goal_s"]),
            int(record["runs"]),
            float(record["wall_s"]),
            float(record["cpu_s"]),
            int(record["peak_mib"]),
        )
        for record in records
    ]
    assert generator.table(rows) in _page("generate")
    assert header["device"] in said(doc("generate"))


def records(folder: str, name: str) -> list[dict[str, str]]:
    """Return the rows of a table of results, as texts by column."""
    found = read(RESULTS / folder, name, ())
    assert found is not None
    return found[1]


def test_host_times_are_those_of_the_results() -> None:
    host = results("host")
    names = {"plain": Task.FORWARD, "recorded": Task.GRAD_FORWARD, "both": Task.GRAD_BOTH}
    found = {name: host.of(f"{task.value}/ln_bf16/16x4096") for name, task in names.items()}
    ours, torchs = ({name: rows[who].us for name, rows in found.items()} for who in (PROJECT, "eager"))
    line = (
        f"{ours['plain']:.1f} µs (torch {torchs['plain']:.1f}); with a gradient recorded {ours['recorded']:.1f} "
        f"({torchs['recorded']:.1f}); forward and backward {ours['both']:.0f} ({torchs['both']:.0f})"
    )
    assert line in said(doc("models"))


def test_the_tables_are_those_of_the_results() -> None:
    shown = overview([RESULTS / name for name in OVERVIEW])
    assert section(BENCHMARKS, SECTION) == "\n\n".join(grid.markdown() for grid in shown)


def test_the_tables_of_steps_are_those_of_their_results() -> None:
    folder, page = RESULTS / "h200-steps", doc("from_tutorial")
    assert section(page, "steps") == markdown(folder, pictures_of(folder, page))


def times_of(suite: str, folder: str = "family") -> dict[str, dict[str, Row]]:
    """Return the rows of a suite in a folder that have a time, by cell and provider."""
    found = load(RESULTS / f"h200-{folder}", suite)
    assert found is not None
    return {cell: {name: row for name, row in found.of(cell).items() if row.ok} for cell in found.cells()}


def span(figures: list[float], form: str = ".0f") -> str:
    return f"{min(figures):{form}} to {max(figures):{form}}"


# Folders of suites that were not run with the rest of the family.
_FOLDERS = {"groupnorm": "groupnorm", "fp8-inputs": "fp8-inputs"}


def shares(suite: str, cells: str, but: str = "") -> list[float]:
    """Return percent of a copy's throughput."""
    folder = _FOLDERS.get(suite, "family")
    found, times = load(RESULTS / f"h200-{folder}", suite), times_of(suite, folder)
    assert found is not None
    chosen = [of[PROJECT] for cell, of in times.items() if fnmatch(cell, cells) and not fnmatch(cell, but)]
    return [100 * ratio for row in chosen if (ratio := found.ratio_to_copy(row)) is not None]


def test_how_far_groupnorm_is_from_a_copy_is_what_the_results_say() -> None:
    assert f"{span(shares('groupnorm', 'group/*'))} % of a copy's throughput forward" in said(README)


def test_no_cell_waited_for_the_host() -> None:
    """A call that leaves the GPU waiting takes now this long, now that."""
    for suite in ("gated", "modulated", "groupnorm"):
        for cell, of in times_of(suite, _FOLDERS.get(suite, "family")).items():
            row = of[PROJECT]
            assert row.us_p80 < 1.2 * row.us_p20, cell


def tuned(*, revisions: tuple[str, ...]) -> list[list[str]]:
    """The lines of a committed run of `normforge tune`, cell by cell, of some revisions."""
    text = (RESULTS / "h200-tiles-rows/tune.txt").read_text()
    parts = [part for part in text.split("normforge tune ") if part.partition("revision: ")[2][:7] in revisions]
    lines = [line for part in parts for line in part.splitlines() if re.match(r"[fb]wd_16bit", line)]
    return [re.split(r" {2,}", line) for line in lines]


def test_what_groups_of_few_rows_gained_is_what_the_results_say() -> None:
    now, before = (
        {line[0]: line for line in tuned(revisions=(revision,)) if line[1:3] == ["5120", "16, 64, 256"]}
        for revision in ("8cbcfd4", "953ad2b")
    )
    layer = "fwd_16bit_scaled"
    assert f"LayerNorm {now[layer][6]} µs, {before[layer][4]} before ([tune]" in said(doc("design"))


def test_what_batch_invariance_costs_is_what_the_results_say() -> None:
    invariant = "normforge-batch-invariant"
    many, few = (times_of(suite, "batch-invariance") for suite in ("batch-invariant-many", "batch-invariant"))
    ratios = [
        (cell.partition("/")[0], of[invariant].us / of[PROJECT].us) for cell, of in many.items() if of[PROJECT].m > 256
    ]
    within = {task: [ratio <= 1.03 for other, ratio in ratios if other == task] for task, _ in ratios}
    assert all(all(within[task]) for task in ("add", "quant", "add_quant"))
    deploy = said(doc("deploy"))
    counted = [(task, sum(within[task]), len(within[task])) for task in ("forward", "backward")]
    cells = "{} in {} of {} cells and {} in {} of {}".format(*counted[0], *counted[1])
    assert f"{cells};" in deploy
    slower = [of[invariant].us / of[PROJECT].us for cell, of in few.items() if cell.startswith("forward/")]
    assert f"take {100 * (geometric_mean(slower) - 1):.0f} % longer forward, in the mean" in deploy


def test_a_decode_step_is_as_fast_as_the_results_say() -> None:
    table = load_models(RESULTS / "h200-models-decode")
    assert table is not None
    assert table.header["revision"] == "9816e3f"
    ms = {(row["run"], row["variant"]): row for row in records("h200-models-decode", "models")}
    ours, as_it_is, all_ours = (float(ms["graphs", name]["ms"]) for name in ("patch-passes", "torch", "patch"))
    text = said(doc("torch-compile"))
    assert f"takes {ours:.2f} ms patched, {as_it_is:.2f} as it is and {all_ours:.2f} with every norm" in text
    ours, as_it_is, all_ours = (float(ms["compile", name]["ms"]) for name in ("patch-passes", "torch", "patch"))
    assert f"without a CUDA graph {ours:.1f}, {as_it_is:.1f} and {all_ours:.1f} ms" in text
    apart = max(float(row["ms_p80"]) - float(row["ms_p20"]) for row in ms.values())
    assert f"up to {apart:.1f} ms apart" in text
    assert "revision 9816e3f" in text


def test_an_operators_cost_is_what_the_results_say() -> None:
    table = (RESULTS / "h200-operators/operators.txt").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines() if line.startswith("| a")]
    us = {name: found for _, name, found in cells}
    text = said(doc("design"))
    assert f"takes {us['M fixed']} µs, {us['M varies']} where M varies" in text
    assert f"`rmsnorm2d_fwd` {us['rmsnorm2d_fwd']} and `F.rms_norm` {us['F.rms_norm']}" in text
    assert f"the operator itself takes {us['operator']}." in text


def test_the_table_of_jax_is_that_of_the_results() -> None:
    us: dict[str, dict[str, float]] = {}
    for row in records("h200-jax", "jax"):
        us.setdefault(row["case"], {})[row["way"]] = float(row["us"])
    page = said(doc("jax"))
    for case, ways in us.items():
        figures = " | ".join(f"{ways[way]:.1f}" for way in ("jax", "torch", "xla"))
        assert f"| {case.replace('x', '×', 1)} | {figures} |" in page
        assert abs(ways["jax"] / ways["torch"] - 1) < 0.02


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
    place = f"{header['device']} with torch {header['torch'].partition('+')[0]} and Triton {header['triton']}"
    assert f"{place} at revision {header['revision']}" in said(README)
    assert {results(name).header["revision"] for name in MEASURED} == {header["revision"]}
    started = (RESULTS / "h200-startup" / "startup.csv").read_text()
    (revision,) = re.findall(r"^# revision: (\w+)$", started, re.MULTILINE)
    assert f"(revision {revision}, " in said(doc("deploy"))


def test_what_the_other_pages_found_is_what_testing_says() -> None:
    text = said(doc("testing"))
    conformance, accuracy, sanitizer = (load_table(ROOT, what) for what in ("conformance", "accuracy", "sanitizer"))
    passed, failed = (sum(int(row[name]) for row in conformance.rows) for name in ("passed", "failed"))
    assert failed == 0
    assert f"{passed:,} cases" in text
    cells, beyond, good = (sum(int(row[name]) for row in accuracy.rows) for name in ("cells", "beyond", "no worse"))
    assert f"of {cells:,} cells {good / cells:.0%}".replace("%", " %") in text
    worse = ("none", "one", "two", "three", "four", "five")[beyond]
    assert f"and {worse} more than four times as bad" in text
    tools = [tool for tool in sanitizer.columns if tool != "call"]
    assert len(tools) == 4
    assert all(sanitizer.header[tool].endswith(", clean") for tool in tools)


OUTCOMES = ("taken", "skipped", "not tried")


def test_norms_named_at_the_front_door_are_what_the_survey_found() -> None:
    """A family, such as `Llama`, means its RMSNorm."""
    survey, text = load_table(ROOT, "huggingface"), README.read_text()
    named = {outcome: {row["class"] for row in survey.rows if row["outcome"] == outcome} for outcome in OUTCOMES}
    taken, skipped, _ = named.values()
    ((families, others),) = re.findall(r"RMSNorm of (Llama.*?) and others; (`T5\w+`.*?) \| swaps", text)
    for name in (*(f"{family}RMSNorm" for family in families.split(", ")), *re.findall(r"`(\w+)`", others)):
        assert name in taken, name
    for name in re.findall(r", as .*?`(\w+)`", text.partition("## Models")[2].partition("## When")[0]):
        assert name in skipped, name
    version, count = survey.header["transformers"], len(taken)
    assert f"Of {count + len(skipped)} norm classes in transformers {version} it takes {count}," in said(README)


def _page(name: str) -> str:
    return doc(name).read_text()


def test_every_setting_is_listed() -> None:
    code = [path.read_text() for folder in ("runtime", "codegen") for path in (ROOT / folder).rglob("*.py")]
    read = {name for text in code for name in re.findall(r"\bNORMFORGE_[A-Z_]+\b", text)}
    listed = set(re.findall(r"^\| `(NORMFORGE_[A-Z_]+)` \|", _page("deploy"), re.MULTILINE))
    assert listed == read
    tests = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"\bNORMFORGE_[A-Z_]+\b", path.read_text())
    }
    named = {name for page in PAGES for name in re.findall(r"\bNORMFORGE_[A-Z_]+\b", page.read_text())}
    assert named <= read | tests


def test_every_public_name_is_listed() -> None:
    rows = re.findall(r"^\| (`.*?) \|", _page("names").partition("## Arguments")[0], re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    # Classes of results, and the version, are no functions.
    assert listed == set(normforge.__all__) - {
        "LayerNormOutput",
        "Patch",
        "QuantisedOutput",
        "TorchOverride",
        "__version__",
    }


_PLACES = (
    "codegen",
    "templates",
    "runtime",
    "tools",
    "tests",
    "proving",
    "benchmarks",
    "docs",
    "examples",
    "manifests",
    "generated",
)
# Made by what the text tells to do.
_MADE = {"needed.yaml", "mine.yaml", "my_tiles/sm_80.yaml", "serve.py", "rms_fwd_bf16_fp8_e5m2_dq.py", "sm_80.yaml"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    named = re.findall(r"`([\w/.-]+\.(?:py|j2|yaml|csv|txt|md))`", prose(page))
    there = [path.relative_to(ROOT).as_posix() for place in _PLACES for path in (ROOT / place).rglob("*.*")]
    there += [path.name for path in ROOT.iterdir()]
    missing = [
        name
        for name in named
        if name.rpartition("/")[2] not in _MADE and not any(f"/{path}".endswith(f"/{name}") for path in there)
    ]
    # The module of a mode that instances.yaml leaves out is made once it asks for the mode.
    assert [name for name in missing if not _is_made_of_a_mode(name)] == []


def _is_made_of_a_mode(name: str) -> bool:
    module = re.fullmatch(r"generated/(\w+)\.py", name)
    if module is None:
        return False
    try:
        mode_named(module[1])
    except IllegalCombinationError:
        return False
    return True


def test_a_module_that_could_be_generated_is_no_missing_file() -> None:
    assert _is_made_of_a_mode("generated/ln_fwd_bf16.py")
    assert not _is_made_of_a_mode("generated/ln_fwd_bf17.py")
    assert not _is_made_of_a_mode("ln_fwd_bf16.py")


def test_the_map_is_the_packages() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = re.findall(r"^(\w+)/ {2,}\S", text, re.MULTILINE)
    packages = [path.parent.name for path in (ROOT / "runtime").glob("*/__init__.py")]
    assert sorted(listed) == sorted([*packages, "tools"])


def gains(folder: str, step: str, dtype: str, run: str, variant: str, of: str = "torch") -> dict[str, float]:
    """How many times the speed of another variant one has, by model."""
    table = load_models(RESULTS / folder)
    assert table is not None
    ms = {
        (row.model, row.variant): row.ms for row in table.rows.values() if row.key[1:4] == (dtype, step, run) and row.ms
    }
    return {model: ms[model, of] / time for (model, name), time in ms.items() if name == variant and (model, of) in ms}


def test_what_dit_gains_by_its_modulation_is_that_of_the_results() -> None:
    rows = []
    for folder, dtype in (("h200-models", "bf16"), ("h200-models-again", "autocast")):
        table = load_models(RESULTS / folder)
        assert table is not None
        rows.append([table.rows[Key("dit", dtype, "train", "eager", name)] for name in ("patch", "torch")])
    (ours, torchs), (cast, torchs_cast) = rows
    guide = said(doc("models"))
    assert f"bf16 {ours.ms:.1f} ms, eager torch {torchs.ms:.1f} (3941dc9)" in guide
    assert f"autocast {cast.ms:.1f}, torch {torchs_cast.ms:.1f} (a2da303)" in guide
    assert f"memory of the first {ours.memory_gib:.2f} GiB, torch {torchs.memory_gib:.2f}" in guide


def test_what_the_sweep_says_is_that_of_the_results() -> None:
    found = load(RESULTS / "h200-sweep", "sweep")
    assert found is not None
    page = said(BENCHMARKS)
    assert f"(`sweep`, {len(SUITES['sweep'].cells)} cells)" in page
    assert set(found.cells()) == {cell.id for cell in SUITES["sweep"].cells}
    findings = check(Rule("every cell", "sweep"), found).findings
    leads = [finding.to_peer for finding in findings if finding.to_peer is not None and math.isfinite(finding.to_peer)]
    assert len(leads) == len(findings)
    assert f"ours are {geometric_mean(leads):.2f} times as fast as the best peer in the geometric mean" in page
    assert f"slower by more than 1 % in {sum(lead < 0.99 for lead in leads)} cells" in page
    us = {cell: found.of(cell)["normforge"].us for cell in found.cells()}
    ours = [us[f"forward/ln_bf16/{shape}"] for shape in ("883008x152", "64776x2072")]
    guide = said(doc("design"))
    others = [us[f"{cell}"] for cell in ("add_quant/ln_bf16_fp8_dq/466032x288", "backward/ln_bf16/103560x81")]
    assert f"883008×152 176 and {ours[0]:.0f} µs, 64776×2072 164 and {ours[1]:.0f}, with an add and fp8" in guide
    assert f"466032×288 280 and {others[0]:.0f}, backward 103560×81 67 and {others[1]:.0f}" in guide


def test_every_goal_of_the_suites_that_is_short_is_said_and_its_cells_are_profiled() -> None:
    profiled = {row["cell"] for row in records("h200", "profile")}
    for rule in RULES:
        checked = check(rule, load(H200, rule.suite)) if rule.suite in MEASURED else None
        if checked is None or checked.outcome != "short":
            continue
        met = sum(finding.met for finding in checked.findings)
        assert f"{rule.title}: {met} of {len(checked.findings)}" in said(BENCHMARKS)
        missed = {finding.row.cell for finding in checked.findings if not finding.met}
        assert rule.suite == "host" or missed <= profiled


def test_what_models_gain_is_that_of_the_results() -> None:
    trained = gains("h200-models", "train", "bf16", "eager", "patch")
    autocast = gains("h200-models-again", "train", "autocast", "eager", "patch")
    assert len(trained) == 8
    assert min(trained.values()) > 1
    mean, dit = f"{geometric_mean(trained.values()):.2f}", trained.pop("dit")
    assert min(trained, key=trained.__getitem__) == "gpt2"
    assert max(trained, key=trained.__getitem__) == "qwen3"
    span = f"{trained['gpt2']:.2f} (GPT-2) to {trained['qwen3']:.2f} (Qwen3) times torch's speed"
    for text in map(said, (README, BENCHMARKS)):
        assert re.search(rf"{re.escape(span)}, DiT at {dit:.2f}[;,] {mean} in the geometric mean", text)
    span = f"{min(autocast.values()):.2f} to {max(autocast.values()):.2f} times torch's speed"
    mean = f"{geometric_mean(autocast.values()):.2f} in the geometric mean"
    assert len(autocast) == 8
    assert f"all eight train at {span}, {mean}" in said(BENCHMARKS)
    for folder, dtype, gained in (("", "bf16", trained), ("-again", "autocast", autocast)):
        assert min(gained.values()) > 1
        assert min(gains(f"h200-models{folder}", "train", dtype, "eager", "patch", of="liger").values()) > 1


def test_what_a_step_would_gain_if_norms_were_free_is_that_of_the_results() -> None:
    """Whoever profiled a model last, of runs whose norms have the same kernels."""
    norms: dict[str, float] = {}
    for folder in ("kernels", "kernels-layernorm", "kernels-eager", "again"):
        norms |= {
            row["model"]: float(row["ms"])
            for row in records(f"h200-models-{folder}", "kernels")
            if (row["run"], row["variant"], row["owner"]) == ("eager", "patch", "normforge")
        }
    table = load_models(RESULTS / "h200-models")
    assert table is not None
    assert norms.keys() == SPECS.keys()
    speeds = []
    for model, ms in norms.items():
        ours, torchs = (table.rows[Key(model, "bf16", "train", "eager", name)].ms or 0.0 for name in ("patch", "torch"))
        speeds.append(torchs / (ours - ms))
    text = said(BENCHMARKS)
    assert f"Norms that took no time would give {geometric_mean(speeds):.2f}:" in text


def test_what_liger_gains_by_more_than_norms_is_that_of_the_results() -> None:
    text = said(BENCHMARKS)
    applied = gains("h200-models", "train", "bf16", "eager", "liger-apply", of="patch")
    figures = [f"{applied[model]:.2f}" for model in ("llama", "qwen3", "gemma")]
    assert "{}, {} and {} times as fast as `patch`".format(*figures) in text


def test_what_decoding_gains_is_that_of_the_results() -> None:
    decoded = gains("h200-models", "decode", "bf16", "eager", "patch")
    decoded.pop("gpt2")
    span = f"{min(decoded.values()):.2f} to {max(decoded.values()):.2f}"
    assert f"RMSNorm models gain {span}" in said(README)
    table = load_models(RESULTS / "h200-models")
    assert table is not None
    ours, torchs = (table.rows[Key("gpt2", "bf16", "decode", "eager", name)] for name in ("patch", "torch"))
    assert f"GPT-2 takes {ours.ms:.1f} ms where torch takes {torchs.ms:.1f}" in said(README)


def test_what_compiled_models_gain_is_that_of_the_results() -> None:
    compiled = gains("h200-models", "train", "bf16", "compile", "patch-passes")
    assert len(compiled) == 7
    least, most = (choose(compiled, key=compiled.__getitem__) for choose in (min, max))
    assert (least, most) == ("qwen3", "vit")
    span = f"{compiled[least]:.2f} to {compiled[most]:.2f}"
    assert f"of seven models, patched ones train at {span} times the speed of unpatched ones" in said(README)


def test_what_further_runs_say_of_compiled_models_is_that_of_the_results() -> None:
    folders = ("h200-models-again", "h200-models-third", "h200-models-compiled")
    trained = [gain for folder in folders for gain in compiled_of(folder, "train", "compile").values()]
    decoded = geometric_mean(compiled_of("h200-models-again", "decode", "compile").values())
    text = (
        f"three further runs trained at {min(trained):.3f} to {max(trained):.2f} times the unpatched speed, and decoded"
    )
    assert f"{text} at {decoded:.2f} without CUDA graphs in one" in said(BENCHMARKS)


def test_what_models_gain_on_slower_hosts_is_that_of_the_results() -> None:
    text, decoded, means = said(BENCHMARKS), [], set()
    for folder in ("h200-models-again", "h200-models-third"):
        trained = gains(folder, "train", "bf16", "eager", "patch")
        means.add(f"{geometric_mean(trained.values()):.2f}")
        assert trained.pop("dit") < 1 < min(trained.values())
        decoded.append(gains(folder, "decode", "bf16", "eager", "patch")["gpt2"])
    (mean,) = means
    assert f"On two slower hosts it was {mean}, and DiT gained nothing" in said(README)
    assert f"**On two slower hosts** the mean was {mean}." in text
    assert f"GPT-2's decoding ran at {span(decoded, '.2f')}." in text
    compiled = compiled_of("h200-models-again", "train", "compile")
    least, most = (choose(compiled, key=compiled.__getitem__) for choose in (min, max))
    assert (least, most, len(compiled)) == ("qwen3", "vit", 8)
    assert f"second run at {compiled[least]:.2f} to {compiled[most]:.2f}." in said(README)


def compiled_of(folder: str, step: str, run: str) -> dict[str, float]:
    return gains(folder, step, "bf16", run, "patch-passes")


def test_what_the_launcher_saves_is_that_of_the_results() -> None:
    us = []
    for folder in ("h200-launcher", "h200-launcher-triton"):
        rows = {(row["group"], row["part"]): row for row in records(folder, "parts")}
        us.append(
            [float(rows["recorded", "launch"]["us_min"]), float(rows["whole calls", "layernorm2d_fwd"]["us_min"])]
        )
    (launch, call), (launch_before, call_before) = us
    text = said(doc("design"))
    plain = f"and a plain call {call:.1f}, {call_before:.1f}"
    assert f"a launch takes {launch:.1f} µs, {launch_before:.1f} with Triton's, {plain}" in text
