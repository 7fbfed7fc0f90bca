"""What the generator's tests share: manifests written from text, small enough to count by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from normforge.codegen.manifest import Manifest, load

# As messages list them.
AXES_OF_MODES = (
    "direction, norm, dtype_in, dtype_out, fadd, fquant, save_mv, x_bias, group_size, scale_format, scale_layout, "
    "scale_ub, quantise_rounded, save_unquant, columnwise, save_amax, scale_dtype, rounding, cast, modulated, "
    "x_gate, gating, gate_activation, grouped, activation, channels_last, span, dropout, statistics_only, reduce, "
    "dy_format, n"
)

TWO_GROUPS = Path(__file__).with_name("two_groups.yaml").read_text()


def contents(folder: Path | str) -> dict[str, str]:
    """The text of every file of a folder."""
    return {path.name: path.read_text() for path in Path(folder).iterdir()}


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def expand(file: Callable[..., Path]) -> Callable[[str], Manifest]:
    return lambda text: load(file(text))


@pytest.fixture
def two_groups(expand: Callable[[str], Manifest]) -> Manifest:
    """Six modes over two buckets."""
    return expand(TWO_GROUPS)
