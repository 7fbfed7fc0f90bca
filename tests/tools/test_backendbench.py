"""`normforge backendbench`: what it writes, loaded as BackendBench's directory backend loads it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from normforge.errors import DeviceError
from normforge.override.served import OPERATORS
from normforge.tools.cli import main

from ..calling import module_at, outcome_of
from ..override.test_served import SERVED, TOLERANCE, alike, with_gradients

aten: Any = torch.ops.aten

N = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "operators"
    says = f"4 operators in {made}: {', '.join(OPERATORS)}\n"
    assert outcome_of(main, ["backendbench", str(made)]) == (0, says, "")
    return made


def loaded(folder: Path) -> dict[str, Callable[..., Any]]:
    """What BackendBench 0.1.0's DirectoryBackend finds: the first file of each folder, and its function."""
    found = {}
    for place in folder.iterdir():
        file = min(file.name for file in place.iterdir() if file.name.startswith(f"{place.name}_implementation"))
        module = module_at(place / file, f"op_{place.name}")
        # A dot of an operator's name is two underscores.
        operator, overload = place.name.rsplit("__", 1)
        assert hasattr(getattr(aten, operator), overload)
        found[operator] = getattr(module, f"{place.name}_kernel_impl")
    return found


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
# float64 is torch's own; what no kernel serves must not come round to the function that stands for the operator.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_each_operator(dtype: torch.dtype, folder: Path) -> None:
    functions = loaded(folder)
    assert set(functions) == set(OPERATORS)
    x, weight, bias = (torch.randn(size, dtype=dtype, requires_grad=True) for size in ((3, N), (N,), (N,)))
    calls = [partial(with_gradients, norm, x, (N,), weight, bias) for norm in SERVED]
    expected = [call() for call in calls]
    # Torch declares no types for it.
    make: Any = torch.library.Library
    library = make("aten", "IMPL")
    try:
        # As BackendBench.enable does, for a whole process.
        for name, function in functions.items():
            library.impl(name, function, "CPU")
        for call, due in zip(calls, expected, strict=True):
            alike(call(), due, TOLERANCE.get(dtype, 1e-12))
    finally:
        library._destroy()


@pytest.mark.parametrize(("version", "says"), [("v1", "normforge did not write it"), ("a", "BackendBench would load")])
def test_another_file_in_the_way_is_refused(version: str, says: str, tmp_path: Path) -> None:
    other = tmp_path / "native_layer_norm__default" / f"native_layer_norm__default_implementation_{version}.py"
    other.parent.mkdir()
    other.write_text("# somebody's\n")
    done = outcome_of(main, ["backendbench", str(tmp_path)])
    assert done.status == 2
    assert says in done.err
    assert "move it away, or name another DIR" in done.err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [other]


def test_another_device_is_refused(folder: Path) -> None:
    with pytest.raises(DeviceError, match=r"a tensor on meta; this torch has kernels of it for cpu"):
        loaded(folder)["native_layer_norm"](torch.randn(3, N, device="meta"), (N,), None, None, 1e-5)
