"""Sets Triton up before anything imports it, interpreted unless kernels are compiled, and each test's numbers."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from . import covering, in_parts, thorough
from .properties import seed

_COMPILED = ("compile", "gpu")
_KEPT_BYTES = 1 << 30
# What a file with tests that are compiled has in it.
_COMPILED_TEXT = "pytest.mark.compile"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare `--minutes` and `--resume`."""
    in_parts.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Choose interpreter or compiler, and keep generated kernels out of the user's cache."""
    selected = config.option.markexpr
    asked = [marker for marker in _COMPILED if marker in selected and f"not {marker}" not in selected]
    compiled = bool(asked)
    if compiled and os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError(f"-m {selected!r} needs Triton's compiler; unset TRITON_INTERPRET")
    # Tensors on a CPU are small: a second thread only waits, and takes a core from another worker.
    torch.set_num_threads(1)
    if not compiled:
        os.environ["TRITON_INTERPRET"] = "1"
        from . import quick_interpreter

        quick_interpreter.install()
    # Workers inherit the controller's folder, so that they race for it as processes of a user's would.
    os.environ.setdefault("NORMFORGE_CACHE", tempfile.mkdtemp(prefix="normforge-tests-"))
    seed.settle(config, looks="gpu" in asked)
    config.pluginmanager.register(in_parts.Parts(config))


@pytest.fixture(autouse=True, scope="session")
def _no_norm_is_small() -> None:
    """Have compiled norms of a few elements, which these tests are of, take the kernels that large ones take."""
    from normforge.compiled import rules

    rules.LEAST_ELEMENTS = 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import nothing without compiled tests where a run takes no others: that was 10 seconds of each worker."""
    if not thorough.compiles_alone(config) or not collection_path.match("test_*.py"):
        return None
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    return None if collection_path in named or _COMPILED_TEXT in collection_path.read_text() else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while tests are listed, and never again at what was listed: a million objects stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Settle which cases are thorough, and list none that a run excludes: those are two thirds of all."""
    yield
    if "thorough" in metafunc.config.option.markexpr:
        covering.leave_to_thorough_runs(metafunc)
    thorough.leave_out(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hold that what is compiled is found by its file's text, and put long tests first."""
    unseen = {item.path for item in items if item.get_closest_marker("compile")}
    unseen = {path for path in unseen if _COMPILED_TEXT not in path.read_text()}
    if unseen:
        raise pytest.UsageError(f"a run of what is compiled looks for {_COMPILED_TEXT!r}; write it out in {unseen}")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_report_header() -> str:
    """Say how to draw the same random problems again."""
    return seed.header()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say it too where -q leaves the header out, and which tests of clients were skipped."""
    if config.get_verbosity() < 0:
        terminalreporter.write_line(seed.header())
    skipped = terminalreporter.stats.get("skipped", ())
    clients = {str(report.nodeid) for report in skipped if "make test-clients" in str(report.longrepr)}
    if clients:
        terminalreporter.write_line(
            f"skipped, for want of the libraries that make test-clients installs: {', '.join(sorted(clients))}"
        )


@pytest.fixture
def random_calls() -> Iterator[None]:
    """Silence the warnings and logs of the random calls of proving/cold_warm, and make a group of one process."""
    from proving.cold_warm.surroundings import one_rank

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings(), one_rank():
        warnings.simplefilter("ignore")
        yield
    logging.disable(before)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    if not torch.distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    from proving.cold_warm.surroundings import one_rank

    with one_rank():
        yield init_device_mesh("cpu", (1,))


@pytest.fixture(scope="session")
def op_infos() -> dict[str, Any]:
    """The entries of PyTorch's table of operators, by name."""
    from .conformance.test_opinfo import import_invocations

    try:
        invocations = import_invocations()
    except ImportError as error:
        pytest.skip(f"this PyTorch keeps its OpInfo samples elsewhere, or lacks what they need: {error}")
    return {info.name.removeprefix("nn.functional."): info for info in invocations.op_db}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that holds the page which commands of proving/ write summaries into."""
    from benchmarks.pages import markers
    from proving.evidence import EVIDENCE

    page = tmp_path / EVIDENCE
    page.parent.mkdir(parents=True)
    page.write_text(
        "\n".join(line for what in ("accuracy", "conformance", "sanitizer", "soak") for line in markers(what))
    )
    return tmp_path


@pytest.fixture(autouse=True)
def _random_numbers() -> None:
    """Let each test draw the same numbers, whatever its worker ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_context_of_an_earlier_test() -> None:
    """Have no test be batch invariant in its traces because an earlier one kept a copied context, which died since."""
    import normforge
    from normforge.selection import invariance

    if invariance.anywhere and not invariance.by_default():
        gc.collect()
        with normforge.batch_invariant():
            pass


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _released_gpu_memory() -> Iterator[None]:
    """Give memory of a large test back to the card, which other workers share."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > _KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NORMFORGE_INSTANCES", "NORMFORGE_ON_MISS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def fresh_table(nothing_known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher of a process that has loaded and generated nothing; afterwards everything is as it was."""
    from normforge.selection import dispatch

    monkeypatch.setattr(dispatch, "_loaded", None)
    monkeypatch.setattr(dispatch, "_generated", dispatch._NOTHING)


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """No call of an earlier test is known, and none is left known for a later one."""
    from normforge.selection import dispatch

    dispatch.forget()
    yield
    dispatch.forget()


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has compiled and loaded no kernel and may compile any; no folder of kernels is in use."""
    monkeypatch.setattr("normforge.kernels.obtain._compiled", {})
    monkeypatch.setattr("normforge.kernels.binaries._folder", None)
    for variable in ("NORMFORGE_FROZEN", "NORMFORGE_AOT", "TRITON_ALWAYS_COMPILE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that Triton keeps what it compiles in."""
    monkeypatch.setattr("normforge.settings.TRITON_CACHE", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """No graph of an earlier test, and none left for a later one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def empty_cache(fresh_table: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that nothing has been generated into, in use."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("NORMFORGE_CACHE", str(cache))
    return cache
