"""What the generator does for manifests/full.yaml, counted and not timed: axes to come must not double the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normforge.codegen import emit, instance, manifest
from normforge.codegen.emit import render_folder
from normforge.codegen.manifest import Manifest, load
from normforge.codegen.model import Mode
from normforge.codegen.report import counts
from normforge.codegen.select import select
from normforge.codegen.sketch import Sketches

from ..thorough import THOROUGH

pytestmark = THOROUGH


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often functions are called that are work of the kind that grew with every axis."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str, what: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            calls[what] += 1
            return function(*arguments)

        monkeypatch.setattr(owner, name, counted)

    count(Mode, "__post_init__", "legality checks")
    count(Mode, "__hash__", "hashes")
    count(manifest, "tiles_of", "tiles")
    count(instance.Instance, "__init__", "instances")
    count(Sketches, "_add", "sketches")
    count(emit, "_ladders", "ladders")
    return calls


@pytest.fixture
def full(calls: Counter[str], repository: Path) -> Manifest:
    return load(repository / "manifests" / "full.yaml")


def test_a_mode_is_checked_once_and_counted_without_being_hashed(full: Manifest, calls: Counter[str]) -> None:
    counts(full)
    modes = len(full.asked)
    assert modes > 20_000
    assert calls["legality checks"] <= modes
    assert calls["hashes"] <= 2 * modes
    assert not calls["instances"]
    assert not calls["tiles"]


def test_a_selection_makes_the_instances_that_are_left(full: Manifest, calls: Counter[str]) -> None:
    chosen = select(full, "ln_fwd_bf16_n*", None).instances
    assert calls["instances"] == len(chosen) == len(full.buckets)
    assert calls["tiles"] == len(full.buckets)
    assert calls["hashes"] <= 3 * len(full.asked)


def test_modules_are_filled_into_few_sketches(full: Manifest, calls: Counter[str]) -> None:
    emit.clear_caches()
    files = render_folder(full.instances)
    modes = len(full.asked)
    assert len(files) >= modes
    assert calls["sketches"] <= modes / 7
    assert calls["tiles"] <= modes / 10
    assert calls["ladders"] <= modes / 100
    assert calls["hashes"] <= 2 * len(full.instances)
