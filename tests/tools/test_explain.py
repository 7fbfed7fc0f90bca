"""`normforge.explain`: the kernels of a call, and why a call has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge

from ..folders import PLAIN, instance, write


def test_a_committed_kernel_is_the_one_that_which_names() -> None:
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    found = normforge.explain(normforge.rmsnorm2d_fwd, x)
    (use,) = found.kernels
    assert found.backend == "kernel"
    assert use.instance == normforge.which(x, norm="rms")
    assert use.kernel.startswith("rms_fwd_bf16_")
    assert (use.n, use.rows, use.source, use.binary) == (64, "few", "committed", "interpreted")
    assert use.module.name == "rms_fwd_bf16.py"
    assert use.instance in str(found)
    torch.testing.assert_close(found.result.y, normforge.rmsnorm2d_fwd(x).y)


def test_a_whole_model_forward_and_backward() -> None:
    """Also where its calls are known."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    normforge.patch(model)
    x = torch.randn(4, 64)
    for _ in range(3):
        found = normforge.explain(lambda: model(x).sum().backward())
        assert [use.kernel.split("_")[:2] for use in found.kernels][:2] == [["ln", "fwd"], ["ln", "bwd"]]
        model(x).sum().backward()


def test_a_kernel_that_was_generated_says_so(empty_cache: Path) -> None:
    found = normforge.explain(normforge.layernorm2d_fwd, torch.randn(2, 32), x_bias=torch.ones(32))
    (use,) = found.kernels
    assert use.source == "generated"
    assert use.module.is_relative_to(empty_cache)


@pytest.mark.usefixtures("fresh_table")
def test_a_kernel_of_another_folder_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", [instance(PLAIN, 1024)])
    normforge.load_instances(folder)
    (use,) = normforge.explain(normforge.layernorm2d_fwd, torch.randn(2, 1024)).kernels
    assert use.source == "folder"
    assert use.module.is_relative_to(folder)


X = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("call", "arguments", "reason"),
    [
        (normforge.layer_norm, (X.double(), (8,)), "is float64"),
        (normforge.layer_norm, (X[:0], (8,)), "has no elements"),
        (normforge.layer_norm, (X.to("meta"), (8,)), "is on 'meta'"),
        (torch.nn.LayerNorm(8), (X,), "is not patched"),
        (lambda: 8, (), "are tensors or modules"),
    ],
)
def test_torch_runs_for_a_reason(call: Callable[..., object], arguments: tuple[Any, ...], reason: str) -> None:
    found = normforge.explain(call, *arguments)
    assert (found.backend, found.kernels) == ("torch", ())
    assert reason in found.reason
    assert found.reason in str(found)


def test_without_the_interpreter_a_cpu_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "set TRITON_INTERPRET=1" in normforge.explain(torch.nn.functional.layer_norm, X, (8,)).reason
    assert "set TRITON_INTERPRET=1" in normforge.explain(lambda: normforge.layer_norm(X, (8,)).sum()).reason


def test_errors_are_the_calls_own() -> None:
    with pytest.raises(normforge.errors.ShapeError):
        normforge.explain(normforge.layer_norm, X, (9,))
