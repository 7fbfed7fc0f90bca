"""Triton's inner launcher: called as each release declares it, or left alone if it is another."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from inspect import Parameter, Signature
from operator import itemgetter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import triton

from normforge.upstream import triton_launcher
from normforge.upstream.triton_launcher import DECLARED

from ..calling import there

GRID, STREAM, FUNCTION, METADATA = (5, 2, 1), 1234, 99, (4, 1, 0)
VALUES, FIXED = (0x10, 0x20, 7), (64, 128)
# In the kernel's order: the second pointer, the first, a constant, the number, another constant.
ARGUMENTS = triton_launcher.Arguments(itemgetter(1, 0, 3, 2, 4), len(VALUES), FIXED, device=0)
TAKEN = (0x20, 0x10, 64, 7, 128)

# The parameters of launchers that Triton 3.6 makes, and Triton from 3.7 on.
TAKEN_BY_36, TAKEN_BY_37 = DECLARED

Calls = list[tuple[Any, ...]]


def launcher(takes: tuple[str, ...], calls: Calls, **attributes: Any) -> Any:
    """A launcher that declares these parameters."""

    class CudaLauncher:
        def __call__(self, *given: Any) -> None:
            calls.append(("launcher", *given))

    call: Any = CudaLauncher.__call__
    call.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in takes])
    made = CudaLauncher()
    usual = {
        "launch": lambda *given: calls.append(("C", *given)),
        "launch_cooperative_grid": True,
        "launch_pdl": False,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "arg_annotations": "annotations",
        "kernel_signature": b"signature",
    }
    vars(made).update(usual | attributes)
    return made


def compiled(launcher: Any) -> Any:
    def metadata(grid: triton_launcher.Grid, stream: int, *arguments: Any) -> str:
        return f"about {grid} {stream} {len(arguments)}"

    return SimpleNamespace(run=launcher, function=FUNCTION, packed_metadata=METADATA, launch_metadata=metadata)


def bound(takes: tuple[str, ...], **attributes: Any) -> tuple[triton_launcher.Launch, Calls]:
    """Return a launch by a launcher that is declared so, and a list of the calls that it makes."""
    calls: Calls = []
    launch = triton_launcher.bind(compiled(launcher(takes, calls, **attributes)), ARGUMENTS)
    return there(launch), calls


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launcher, "current_stream", lambda device: STREAM + device)
    triton_launcher._say_once.cache_clear()


@pytest.fixture
def hook() -> Iterator[list[Any]]:
    """A profiler's hook, on for one test; what it was told."""
    told: list[Any] = []
    triton.knobs.runtime.launch_enter_hook.add(told.append)
    yield told
    triton.knobs.runtime.launch_enter_hook.remove(told.append)


@pytest.mark.parametrize(
    ("takes", "others"),
    [
        (TAKEN_BY_36, (None, None, METADATA, None, None, None, *TAKEN)),
        (TAKEN_BY_37, (METADATA, *[None] * 5, "annotations", b"signature", TAKEN)),
    ],
)
def test_each_release_is_given_its_arguments_as_it_takes_them(takes: tuple[str, ...], others: tuple[Any, ...]) -> None:
    launch, calls = bound(takes)
    launch(GRID, VALUES)
    assert calls == [("C", *GRID, STREAM, FUNCTION, True, False, *others)]


@pytest.mark.parametrize("takes", DECLARED)
@pytest.mark.parametrize("more", [{"global_scratch_size": 64}, {"profile_scratch_size": 64}, {"gsan_enabled": True}])
def test_a_launch_that_is_more_than_one_call_goes_through_the_launcher(
    takes: tuple[str, ...], more: dict[str, Any]
) -> None:
    launch, calls = bound(takes, **more)
    launch(GRID, VALUES)
    assert calls == [("launcher", *GRID, STREAM, FUNCTION, METADATA, None, None, None, *TAKEN)]


def test_another_vendors_launcher_is_called_itself() -> None:
    calls: Calls = []
    theirs = launcher(TAKEN_BY_37, calls)
    type(theirs).__name__ = "HIPLauncher"
    del theirs.global_scratch_size
    there(triton_launcher.bind(compiled(theirs), ARGUMENTS))(GRID, VALUES)
    assert calls == [("launcher", *GRID, STREAM, FUNCTION, METADATA, None, None, None, *TAKEN)]


@pytest.mark.parametrize("takes", DECLARED)
def test_hooks_are_honoured_from_when_they_are_set(
    takes: tuple[str, ...], hook: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, calls = bound(takes)
    launch(GRID, VALUES)
    hooks = triton.knobs.runtime
    hooked = (f"about {GRID} {STREAM} 5", hooks.launch_enter_hook, hooks.launch_exit_hook)
    assert calls == [("launcher", *GRID, STREAM, FUNCTION, METADATA, *hooked, *TAKEN)]
    hooks.launch_enter_hook.remove(hook.append)
    launch(GRID, VALUES)
    assert calls[1][0] == "C"
    # A hook in the place of a chain.
    monkeypatch.setattr(hooks, "launch_exit_hook", print)
    launch(GRID, VALUES)
    assert calls[2] == ("launcher", *GRID, STREAM, FUNCTION, METADATA, *hooked[:2], print, *TAKEN)


def renamed() -> Any:
    """A launcher that does without its attributes."""
    made = launcher(TAKEN_BY_37, [])
    vars(made).clear()
    return made


@pytest.mark.parametrize(
    ("unknown", "why"),
    [(launcher(("self", "launch"), []), "it takes self, launch"), (renamed(), "global_scratch_size")],
)
def test_what_is_not_known_is_left_alone_and_said_once(
    unknown: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "normforge"):
        assert [triton_launcher.bind(compiled(unknown), ARGUMENTS) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert why in record.getMessage()
    assert "public interface" in record.getMessage()


def test_a_kernel_that_cannot_be_loaded_says_why() -> None:
    failing = functools.partial(Mock(side_effect=MemoryError("shared memory")))
    with pytest.raises(MemoryError, match="shared memory"):
        triton_launcher.bind(compiled(failing), ARGUMENTS)


def test_the_triton_here_is_known() -> None:
    """Its launcher's declaration, without a device to make one for."""
    from triton.backends.amd.driver import HIPLauncher
    from triton.backends.nvidia.driver import CudaLauncher

    for declares in (CudaLauncher, HIPLauncher):
        assert triton_launcher.declared(declares) in DECLARED
