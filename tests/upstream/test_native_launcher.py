"""The launcher in C: what reaches the driver, what it refuses, what it leaves to Triton's, and what it keeps."""

from __future__ import annotations

import contextlib
import gc
import logging
import struct
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
import triton

from normforge.errors import SettingError
from normforge.upstream import triton_launcher

from .. import stand_in_cuda
from ..stand_in_cuda import NEEDS_A_COMPILER, Driver, Launched
from ..thorough import THOROUGH

pytestmark = NEEDS_A_COMPILER

GRID, STREAM, FUNCTION, DEVICE = (5, 2, 1), 0x7F00_0000_1234, 0xF00D, 3
# Of a kernel: an absent pointer among pointers, strides of one tensor, constants, and each kind of number.
SIGNATURE: dict[str, Any] = {
    "x_ptr": "*bf16",
    "bias_ptr": "constexpr",
    "y_ptr": "*fp32",
    "strides": ("i32", "i64", "constexpr"),
    "M": "i32",
    "offset": "i64",
    "eps": "fp32",
    "N": "constexpr",
    "row_stride": "i32",
}
SIZES = (8, 8, 4, 8, 4, 8, 4, 4, 8, 8)
# What launches bring is in another order.
VALUES = (2**64 - 16, "absent, and not looked at", 0x20, 1e-5, 7, -(2**63))
TAKEN = (*(triton_launcher.Slot(at) for at in (0, 1, 2)), (64, 2**40, 1), *map(triton_launcher.Slot, (4, 5, 3)), 64, -5)


def f32(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def passed(*values: int) -> tuple[int, ...]:
    """As a driver reads them, with the two scratch pointers behind."""
    return (*(value % 2**64 for value in values), 0, 0)


IN_ORDER = passed(2**64 - 16, 0x20, 64, 2**40, 7, -(2**63), f32(1e-5), 2**32 - 5)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that Triton keeps what it compiles in, empty at first."""
    folder = tmp_path_factory.mktemp("triton")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        yield folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver(stand_in_cuda.build(tmp_path_factory.mktemp("cuda")))


@pytest.fixture
def driver(built: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(triton_launcher, "LIBRARY", built.path)
    built.expect(SIZES)
    for name, value in (("status", 0), ("context", stand_in_cuda.CONTEXT), ("launches", 0), ("retained", -1)):
        built.set(name, value)
    return built


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "normforge")
    triton_launcher._say_once.cache_clear()
    for variable in ("NORMFORGE_NATIVE_LAUNCHER", "NORMFORGE_FROZEN"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def _nothing_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launcher, "_module", None)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))


def kernel(
    signature: dict[str, Any] = SIGNATURE, packed: Any = (4, 1, 1024), function: Any = FUNCTION, backend: str = "cuda"
) -> Any:
    about = {"launch_pdl": False, "launch_cooperative_grid": False, "target": SimpleNamespace(backend=backend)}
    parts = {"src": SimpleNamespace(signature=signature), "metadata": SimpleNamespace(**about)}
    return SimpleNamespace(packed_metadata=packed, function=function, **parts)


def stream_of(device: int) -> int:
    return STREAM + device


def prepare(compiled: Any = None, taken: Any = TAKEN, observed: Any = print, stream: Any = stream_of) -> Any:
    arguments = triton_launcher.Arguments(lambda values: taken, len(VALUES), (), DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launcher, "current_stream", stream)
        return triton_launcher.prepare(compiled or kernel(), arguments, observed)


def test_what_reaches_the_driver(driver: Driver) -> None:
    assert prepare()(GRID, VALUES) is None
    assert driver.last() == Launched(GRID, (128, 1, 1), 1024, STREAM + DEVICE, FUNCTION, (), IN_ORDER)
    # An empty grid launches nothing.
    for grid in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        assert prepare()(grid, VALUES) is None
    assert driver.get("launches") == 1


def bringing(at: int, *values: Any) -> list[tuple[Any, ...]]:
    """The arguments of launches, each with a value in the place of one that `VALUES` has."""
    return [(GRID, (*VALUES[:at], value, *VALUES[at + 1 :])) for value in values]


def launched_with(at: int, value: Any, driver: Driver) -> int:
    """A value as it reaches the driver, in the place of one that `VALUES` has."""
    (call,) = bringing(at, value)
    prepare()(*call)
    return driver.last().parameters[{0: 0, 2: 1, 3: 6, 4: 4, 5: 5}[at]]


@pytest.mark.parametrize(
    ("at", "bits"),
    [
        (0, {0: 0, True: 1}),
        (2, {2**63: 2**63}),
        (4, {2**31 - 1: 2**31 - 1, -(2**31): 2**31, numpy.int64(9): 9}),
        (5, {2**63 - 1: 2**63 - 1, -1: 2**64 - 1, numpy.int32(-2): 2**64 - 2}),
        (3, {0.1: 0x3DCCCCCD, 1: 0x3F800000, -1.0: 0xBF800000, numpy.float32(0.5): 0x3F000000}),
        (3, {1e-46: 0, 1e300: 0x7F800000}),
    ],
)
def test_values_are_converted(at: int, bits: dict[Any, int], driver: Driver) -> None:
    assert {value: launched_with(at, value, driver) for value in bits} == bits


class Broken:
    def __index__(self) -> int:
        raise LookupError("no index")

    def __float__(self) -> float:
        raise LookupError("no float")


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (OverflowError, bringing(0, -1, 2**64)),
        (TypeError, bringing(0, 1.0, None, numpy.int64(5), torch.zeros(1))),
        (OverflowError, bringing(4, 2**31, -(2**31) - 1, 2**70)),
        (TypeError, bringing(4, 7.0, "7")),
        (LookupError, bringing(4, Broken())),
        (OverflowError, bringing(5, 2**63)),
        (TypeError, bringing(5, None)),
        (OverflowError, bringing(3, 10**400)),
        (TypeError, bringing(3, "0.5", None)),
        (LookupError, bringing(3, Broken())),
        (TypeError, [(), (GRID,), (GRID, VALUES, 1)]),
        (TypeError, [(grid, VALUES) for grid in ([5, 2, 1], (5, 2), (5, 2, 1.0))]),
        (TypeError, [(GRID, values) for values in (VALUES[:-1], (*VALUES, 0), list(VALUES))]),
        (OverflowError, [(grid, VALUES) for grid in ((5, 2, -1), (2**31, 1, 1), (2**70, 1, 1))]),
    ],
)
def test_a_wrong_call_is_an_error_and_no_launch(error: type[Exception], calls: Any, driver: Driver) -> None:
    for call in calls:
        with pytest.raises(error):
            prepare()(*call)
    with pytest.raises(TypeError):
        prepare()(GRID, values=VALUES)
    assert driver.get("launches") == 0


@pytest.mark.parametrize(("status", "said"), [(701, "too many resources requested for launch"), (9999, "9999")])
def test_what_the_driver_refuses_is_said_as_triton_says_it(status: int, said: str, driver: Driver) -> None:
    driver.set("status", status)
    with pytest.raises(RuntimeError, match=rf"^Triton Error \[CUDA\]: {said}$"):
        prepare()(GRID, VALUES)


def test_a_thread_without_a_context_takes_its_devices(driver: Driver) -> None:
    driver.set("context", 0)
    launch = prepare()
    launch(GRID, VALUES)
    assert (driver.get("retained"), driver.get("context")) == (10 + DEVICE, stand_in_cuda.CONTEXT)
    driver.set("retained", -1)
    launch(GRID, VALUES)
    assert (driver.get("retained"), driver.get("launches")) == (-1, 2)


@pytest.mark.parametrize(
    ("stream", "error"),
    [(Mock(side_effect=LookupError), LookupError), (lambda _: None, TypeError), (lambda _: -1, OverflowError)],
)
def test_a_stream_that_cannot_be_had_is_an_error(
    stream: Callable[[int], Any], error: type[Exception], driver: Driver
) -> None:
    with pytest.raises(error):
        prepare(stream=stream)(GRID, VALUES)
    assert driver.get("launches") == 0


def test_hooks_are_honoured_from_when_they_are_set(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[Any] = []
    launch = prepare(observed=lambda *given: observed.append(given))
    hooks = triton.knobs.runtime
    for chain in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        chain.add(print)
        launch(GRID, VALUES)
        chain.remove(print)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(hooks, name, None)
            launch(GRID, VALUES)
            # A chain, but another than that which was asked.
            patch.setattr(hooks, name, triton.knobs.HookChain())
            launch(GRID, VALUES)
    with monkeypatch.context() as patch:
        patch.setattr(hooks.launch_exit_hook, "calls", (print,))
        launch(GRID, VALUES)
    assert observed == [(GRID, VALUES)] * 7
    assert driver.get("launches") == 0
    launch(GRID, VALUES)
    assert (len(observed), driver.get("launches")) == (7, 1)


def test_what_an_observed_launch_raises_is_raised(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = prepare(observed=Mock(side_effect=LookupError("a profiler's")))
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", None)
    with pytest.raises(LookupError, match="profiler"):
        launch(GRID, VALUES)


@THOROUGH
def test_nothing_is_kept_of_launches(driver: Driver) -> None:
    launch = prepare()
    # Numbers that no interpreter shares; one that fails, and what is refused.
    grid, values = (1000, 1001, 1002), (2**40, 2**43, 2**41, 0.125, 70_000, 2**42)
    wrong = (*values[:4], 2**40, 2**42)
    chains = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
    calls = [chain.calls for chain in chains]
    kept = (grid, values, wrong, *grid, *values, launch, stream_of, *chains, *calls, None)

    def rounds(count: int) -> None:
        for _ in range(count):
            launch(grid, values)
            with contextlib.suppress(OverflowError):
                launch(grid, wrong)

    def counted() -> tuple[list[int], int]:
        # What other tests left behind goes in several turns.
        while gc.collect():
            pass
        return [sys.getrefcount(each) for each in kept], sys.getallocatedblocks()

    rounds(100)
    before, blocks = counted()
    rounds(10_000)
    after, blocks_after = counted()
    assert after[:-1] == before[:-1]
    # None is everybody's, and so is memory: both move by a few.
    assert abs(after[-1] - before[-1]) < 20
    assert abs(blocks_after - blocks) < 200


def test_a_launch_that_is_dropped_or_cannot_be_made_drops_what_it_held(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Observed:
        def __call__(self, *_: object) -> None:
            raise AssertionError

    # Launches of earlier tests are gone by then.
    gc.collect()
    observed, before = Observed(), sys.getrefcount(stream_of)
    gone = weakref.ref(observed)
    launch = prepare(observed=observed)
    assert sys.getrefcount(stream_of) == before + 1
    del observed, launch
    assert gone() is None
    assert sys.getrefcount(stream_of) == before
    circle = Observed()
    gone = weakref.ref(circle)
    circle.launch = prepare(observed=circle)  # type: ignore[attr-defined] # a circle
    del circle
    assert prepare(kernel(function="a function")) is None
    assert prepare(taken=(*TAKEN[:-1], 2**31)) is None
    monkeypatch.setattr(triton_launcher, "LIBRARY", "/nowhere/libcuda.so.1")
    assert prepare() is None
    gc.collect()
    assert gone() is None
    assert sys.getrefcount(stream_of) == before


TOO_MANY = {f"p{at}_ptr": "*fp32" for at in range(129)}


@pytest.mark.parametrize(
    ("compiled", "taken", "why"),
    [
        (kernel({**SIGNATURE, "row_stride": "u64"}), TAKEN, "u64"),
        (kernel({**SIGNATURE, "x_ptr": "tensordesc<fp16[64, 64]>"}), TAKEN, "tensordesc"),
        (kernel(packed=(4, 2, 0)), TAKEN, "clusters of 2"),
        (kernel(packed=(0, 1, 0)), TAKEN, "0 threads"),
        (kernel(backend="hip"), TAKEN, "hip"),
        (SimpleNamespace(), TAKEN, "metadata"),
        (kernel(), TAKEN[:-1], "zip"),
        (kernel(), (triton_launcher.Slot(6), *TAKEN[1:]), "place 6 of 6"),
        (kernel(TOO_MANY), (triton_launcher.Slot(0),) * 129, "at most 128"),
    ],
)
def test_other_kernels_are_left_to_triton_and_that_is_said_once(
    compiled: Any, taken: Any, why: str, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    assert [prepare(compiled, taken) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert (record.levelno, why in record.getMessage()) == (logging.INFO, True)


def test_other_releases_are_left_to_triton(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.70.0")
    assert prepare() is None


def test_a_setting_turns_it_off(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for word, launches in (("0", False), ("1", True)):
        monkeypatch.setenv("NORMFORGE_NATIVE_LAUNCHER", word)
        assert (prepare() is not None) == launches
    monkeypatch.setenv("NORMFORGE_NATIVE_LAUNCHER", "no")
    with pytest.raises(SettingError, match="NORMFORGE_NATIVE_LAUNCHER='no' is neither 1"):
        prepare()


@pytest.mark.usefixtures("_nothing_loaded")
def test_without_a_compiler_triton_launches(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler, asked = tmp_path / "cc", tmp_path / "asked"
    compiler.write_text(f"#!/bin/sh\necho once >> {asked}\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert [prepare() for _ in range(3)] == [None] * 3
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert str(compiler) in caplog.records[0].getMessage()
    assert asked.read_text() == "once\n"


@pytest.mark.usefixtures("_nothing_loaded")
def test_a_frozen_process_takes_what_is_kept_and_compiles_nothing(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    assert prepare() is None
    assert not list(tmp_path.rglob("*.so"))
    assert not caplog.records
    # As warm-up does, whatever is frozen.
    assert triton_launcher.library(build=True) is not None
    assert list(tmp_path.rglob("normforge_native*.so"))
    monkeypatch.setattr(triton_launcher, "_module", None)
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert prepare() is not None


@pytest.mark.usefixtures("_nothing_loaded")
def test_what_everybody_could_have_compiled_is_not_loaded(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton loads whatever lies in its cache under the source's key: the file, its folder and the cache are asked."""
    assert triton_launcher.library(build=True) is not None
    (built,) = tmp_path.rglob("normforge_native*.so")
    for path in (built, *built.parents[:2]):
        mode = path.stat().st_mode
        path.chmod(0o777)
        triton_launcher._say_once.cache_clear()
        monkeypatch.setattr(triton_launcher, "_module", None)
        assert prepare() is None
        assert f"{path} can be written by everybody" in caplog.text
        path.chmod(mode)
