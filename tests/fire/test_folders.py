"""Whatever a dispatch table says: a `TableError` that changes nothing, or a table that can be listed and asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import normforge
from normforge.codegen.emit import render_folder
from normforge.codegen.model import Mode
from normforge.codegen.tiling import standard_ladder
from normforge.codegen.values import DType, Norm
from normforge.errors import MissingInstanceError, TableError
from normforge.selection import dispatch

from ..folders import PLAIN, RMS, distinct_tiles, instance
from ..thorough import LONG, THOROUGH
from .world import changed, cut, fire, new_world, refusal, values

BF16 = Mode(Norm.LAYER, DType.BF16, DType.BF16)
FILES = render_folder([instance(mode, bucket.first) for mode in (PLAIN, RMS, BF16) for bucket in standard_ladder()])


def _defined(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(text, names)
    return {name: names[name] for name in ("FORMAT", "SMALL_M", "TABLE")}


TABLE = _defined(FILES["dispatch.py"])

_VALUES = values("rows", "one_pass", "spread", "any", "../x", 0, -1, 1.0, 1 << 70, "n128", (), [], {}, 128, 129)


@st.composite
def tables(draw: st.DrawFn) -> str:
    """The text of a dispatch.py with other data, or cut about."""
    if draw(st.integers(0, 3)):
        data = draw(changed(TABLE, _VALUES))
        return (
            "".join(f"{name} = {value!r}\n" for name, value in data.items()) if isinstance(data, dict) else repr(data)
        )
    return str(draw(cut(FILES["dispatch.py"], st.just("\x00"))))


@pytest.fixture(autouse=True)
def _nothing_but_the_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a call take what the loaded table holds and nothing else; afterwards the own table is back."""
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
    yield
    normforge.load_instances()


@THOROUGH
@LONG
@fire(150)
@given(tables())
def test_a_dispatch_table(text: str) -> None:
    with new_world() as world:
        normforge.load_instances()
        own = dispatch.loaded()
        (world / "__init__.py").write_text(FILES["__init__.py"])
        (world / "dispatch.py").write_text(text)
        said = refusal(lambda: normforge.load_instances(world), TableError)
        if said is not None:
            assert str(world) in said
            assert dispatch.loaded() is own
            return
        names = [entry.name for entry in normforge.instances()]
        assert all(distinct_tiles(entry) for entry in normforge.instances())
        for dtype, n in ((torch.float32, 1), (torch.float32, 129), (torch.bfloat16, 5000), (torch.bfloat16, 1 << 20)):
            try:
                assert normforge.which(torch.empty(0, n, dtype=dtype)) in names
            except MissingInstanceError:
                assert Path(dispatch.loaded().where) == world
