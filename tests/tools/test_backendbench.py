"""`normforge backendbench`: what it writes, loaded as BackendBench's directory backend loads it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from normforge.errors import DeviceError
from normforge.override.served import OPERATORS
from normforge.tools.cli import main
from proving.cases import close

from ..calling import module_at

aten: Any = torch.ops.aten

N = 40


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["backendbench", str(tmp_path / "operators")]) == 0
    says = capsys.readouterr().out
    assert says == f"4 operators in {tmp_path / 'operators'}: {', '.join(OPERATORS)}\n"
    return tmp_path / "operators"


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


def agrees(operator: Callable[[str], Callable[..., Any]], dtype: torch.dtype) -> None:
    """Fail unless the operators of both norms are autograd's in fp64, forward and backward."""
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    (x, dy), (weight, bias) = torch.randn(2, 2, 3, N).to(dtype), torch.randn(2, N).to(dtype)
    for name, vectors in (("native_layer_norm", (weight, bias)), ("_fused_rms_norm", (weight,))):
        y, *statistics = operator(name)(x, (N,), *vectors, 1e-5)
        wanted = [True] * (1 + len(vectors))
        gradients = operator(f"{name}_backward")(dy, x, (N,), *statistics, *vectors, wanted)
        leaves = [tensor.double().requires_grad_() for tensor in (x, *vectors)]
        function: Any = functional.layer_norm if name == "native_layer_norm" else functional.rms_norm
        due = function(leaves[0], (N,), *leaves[1:], 1e-5)
        for a, b in zip((y, *gradients), (due, *torch.autograd.grad(due, leaves, dy.double())), strict=True):
            close(name, a, b.detach(), tolerance)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
# float64 is torch's own; what no kernel serves must not come round to the function that stands for the operator.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_each_operator(dtype: torch.dtype, folder: Path) -> None:
    functions = loaded(folder)
    assert set(functions) == set(OPERATORS)
    # Torch declares no types for it.
    make: Any = torch.library.Library
    library = make("aten", "IMPL")
    try:
        # As BackendBench.enable does, for a whole process.
        for name, function in functions.items():
            library.impl(name, function, "CPU")
        agrees(functions.__getitem__, dtype)
        agrees(partial(getattr, aten), dtype)
    finally:
        library._destroy()


@pytest.mark.parametrize(("version", "says"), [("v1", "normforge did not write it"), ("a", "BackendBench would load")])
def test_another_file_in_the_way_is_refused(
    version: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "native_layer_norm__default" / f"native_layer_norm__default_implementation_{version}.py"
    other.parent.mkdir()
    other.write_text("# somebody's\n")
    with pytest.raises(SystemExit) as stop:
        main(["backendbench", str(tmp_path)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert "move it away, or name another DIR" in error
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [other]


def test_another_device_is_refused(folder: Path) -> None:
    with pytest.raises(DeviceError, match=r"a tensor on meta; this torch has kernels of it for cpu"):
        loaded(folder)["native_layer_norm"](torch.randn(3, N, device="meta"), (N,), None, None, 1e-5)
