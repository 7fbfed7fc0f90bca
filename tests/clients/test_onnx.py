"""ONNX export of patched models, by torch's exporter: the graph holds functions of ONNX alone."""

from __future__ import annotations

import pytest
import torch

import normforge

pytest.importorskip("onnxscript", reason="an extra of its own: make test-clients installs it")


@pytest.mark.parametrize("norm", [torch.nn.GroupNorm(2, 32), torch.nn.LayerNorm(32), torch.nn.RMSNorm(32)], ids=str)
def test_a_patched_model_is_exported(norm: torch.nn.Module) -> None:
    """Of a size, too, from which a traced LayerNorm is an operator of normforge's."""
    model = torch.nn.Sequential(norm)
    normforge.patch(model)
    program = torch.onnx.export(model, (torch.randn(2**17, 32),), dynamo=True)
    assert program is not None
    assert {node.domain for node in program.model.graph} <= {""}
