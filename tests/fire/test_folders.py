"""Whatever an index of compiled kernels says: an error that names the folder and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import normforge
from normforge.errors import AotError
from normforge.kernels import binaries

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
    "kernels": [ROW],
}
NO_TEXTS: tuple[Any, ...] = (None, 1, [])
NO_ROWS: tuple[Any, ...] = (None, 3, "x", {"a": 1}, [None], [{}], [ROW | {"x": ""}])


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_folder", None)


def of(**changed: Any) -> bytes:
    return json.dumps(INDEX | changed).encode()


def with_row(**changed: Any) -> dict[str, Any]:
    return {"kernels": [ROW, ROW | changed]}


def test_the_index_that_is_spoilt_here_is_read(tmp_path: Path) -> None:
    (tmp_path / binaries.INDEX).write_bytes(of())
    normforge.load_aot(tmp_path)
    assert [*getattr(binaries.loaded(), "rows", ())] == [ROW["key"]]


DAMAGED: tuple[dict[str, Any], ...] = (
    *({name: 3} for name in ("normforge", "triton", "arch")),
    *({"kernels": rows} for rows in NO_ROWS),
    *(with_row(**{name: value}) for name in ROW for value in NO_TEXTS),
    *(with_row(**{name: value}) for name in [*ROW][1:] for value in ("../x", "a\0b")),
    # Names that lead elsewhere.
    *(with_row(file=name) for name in ("/etc/passwd-0123456789abcdef", "../x-0123456789abcdef")),
    with_row(binary="x" * 10_000),
)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        *((of(format=version), "has format") for version in (None, True, float(binaries.FORMAT), "1", -1)),
        *((of(**changed), "is damaged") for changed in DAMAGED),
        *((data, "is damaged") for data in (b"", b"\xff", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"1" * 5000)),
        *((data, "has format None") for data in (b"NaN", b"[]", b"{}", b'"x"')),
    ],
)
def test_what_is_no_index_is_refused(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / binaries.INDEX).write_bytes(data)
    with pytest.raises(AotError) as raised:
        normforge.load_aot(tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert said in str(raised.value)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [data]


@pytest.mark.parametrize("path", ["", "~", "~nobody-of-that-name", "a\0b", "/dev/zero", "/proc/self/mem"])
def test_a_path_without_an_index_is_refused(path: str) -> None:
    with pytest.raises(AotError):
        normforge.load_aot(path)
