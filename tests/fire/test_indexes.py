"""Whatever an index of compiled kernels says: an `AotError` of one line, or a folder that names files of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import normforge
from normforge.errors import AotError
from normforge.kernels import binaries

from .world import changed, cut, fire, new_world, refusal, snapshot, values

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

_VALUES = values(
    *("../../x-0123456789abcdef", "/etc/passwd", "a\0b", "cubin", "json", "", "x" * 10_000, _ENDLESS, -1, 1.0)
)


def _text(document: Any) -> bytes:
    text = json.dumps(document).replace(f'"{_ENDLESS}"', "1" * 5000)
    return text.encode("utf-8", "surrogatepass")


_OTHERS = st.sampled_from((b'{"a":' * 50_000, b"[" * 100_000, b"NaN"))
_CUT = st.one_of(cut(_text(INDEX), st.just(b"\xff")), _OTHERS)
indexes = st.one_of(changed(INDEX, _VALUES).map(_text), changed(INDEX, _VALUES).map(_text), _CUT)


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
