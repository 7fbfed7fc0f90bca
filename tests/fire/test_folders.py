"""Whatever a dispatch table or an index of compiled kernels says: an error that changes nothing, or a folder to use."""

from __future__ import annotations

import json
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
from normforge.errors import AotError, MissingInstanceError, TableError
from normforge.kernels import binaries
from normforge.selection import dispatch

from ..folders import PLAIN, RMS, distinct_tiles, instance
from ..thorough import LONG, THOROUGH
from .world import changed, cut, fire, new_world, refusal, snapshot, values

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


ROW = {
    "key": "rms_fwd_bf16_rows x_ptr=*bf16",
    "file": "rms_fwd_bf16_rows-0123456789abcdef",
    "binary": "cubin",
    "binary_sha256": "0" * 64,
    "metadata_sha256": "1" * 64,
    "ptx_sha256": "",
    "source_sha256": "2" * 64,
}
INDEX: dict[str, Any] = {
    "format": binaries.FORMAT,
    "normforge": "0.1.0",
    "triton": binaries.triton_version(),
    "arch": "sm_90",
    "kernels": [ROW, ROW | {"key": "b", "file": "rms_bwd_bf16_rows-0123456789abcdef"}],
}

# Stands for a number of more digits than Python reads.
_ENDLESS = "endless"

_IN_INDEXES = values(
    *("../../x-0123456789abcdef", "/etc/passwd", "a\0b", "cubin", "json", "", "x" * 10_000, _ENDLESS, -1, 1.0)
)


def _text(document: Any) -> bytes:
    text = json.dumps(document).replace(f'"{_ENDLESS}"', "1" * 5000)
    return text.encode("utf-8", "surrogatepass")


_OTHERS = st.sampled_from((b'{"a":' * 50_000, b"[" * 100_000, b"NaN"))
_CUT = st.one_of(cut(_text(INDEX), st.just(b"\xff")), _OTHERS)
indexes = st.one_of(changed(INDEX, _IN_INDEXES).map(_text), changed(INDEX, _IN_INDEXES).map(_text), _CUT)


@pytest.fixture(scope="module", autouse=True)
def _nothing_loaded() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binaries, "_folder", None)
        yield


@fire(300)
@given(indexes)
def test_an_index(data: bytes) -> None:
    with new_world() as world:
        (world / "kernels").mkdir()
        (world / "kernels" / binaries.INDEX).write_bytes(data)
        before = snapshot(world)
        said = refusal(lambda: normforge.load_aot(world / "kernels"), AotError)
        assert snapshot(world) == before
        if said is not None:
            assert str(world / "kernels") in said
            return
        there: Any = binaries.loaded()
        for key, row in there.rows.items():
            assert isinstance(key, str)
            for name in row.files:
                assert Path(name).name == name
                assert name not in (".", "..")


@fire(40)
@given(st.one_of(st.text(max_size=30), st.sampled_from(("~", "~nobody-of-that-name", "/dev/zero", "/proc/self/mem"))))
def test_a_path(path: str) -> None:
    with pytest.raises(AotError):
        normforge.load_aot(path)
