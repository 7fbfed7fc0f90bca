"""The repository that `normforge hub` writes, in Hugging Face's `kernels`, with a model of transformers'."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from normforge.tools.cli import main

from ..calling import each_device

kernels = pytest.importorskip("kernels", reason="Hugging Face's kernels is not installed")

WIDTH = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hub") / "norms"
    assert main(["hub", str(made)]) == 0
    return made


@pytest.fixture(autouse=True)
def _unmarked() -> Iterator[None]:
    """What marks torch's classes for `kernels` is undone."""
    yield
    for cls in (torch.nn.LayerNorm, torch.nn.RMSNorm):
        for name in ("kernel_layer_name", "kernel_condition"):
            if name in vars(cls):
                delattr(cls, name)


def at(folder: Path, device: str) -> tuple[Path, str]:
    """The repository and the device's name for `kernels`; for a CPU, CUDA's variant."""
    if device == "cpu":
        return folder / "build" / "torch-cuda", device
    return folder, device if torch.version.hip is None else "rocm"


def kernelised(model: Any, path: Path, device: str, *layers: str) -> Any:
    """A copy of a model in which `kernels` replaced forwards by layers, which are named as classes are marked."""
    made = copy.deepcopy(model)
    mapping = {name: {device: kernels.LocalLayerRepository(path, layer_name=name)} for name in layers}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        # It raises where it would fall back.
        mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
        return kernels.kernelize(made, mode=mode, device=device, use_fallback=False)


def replaced(model: torch.nn.Module) -> int:
    """How many modules have a forward of the repository's."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    return sum(
        isinstance(each, types.MethodType) and "normforge_norms" in each.__func__.__module__ for each in forwards
    )


def trained(model: Any, *given: Any) -> list[torch.Tensor]:
    """What a model returns, and its parameters' gradients."""
    y = model(*given)
    y = getattr(y, "logits", y)
    y.square().mean().backward()
    return [y, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


alike = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


@each_device
def test_torchs_norms_are_replaced(folder: Path, device: str) -> None:
    kernels.replace_kernel_forward_from_hub(torch.nn.LayerNorm, "LayerNorm")
    kernels.replace_kernel_forward_from_hub(torch.nn.RMSNorm, "TorchRMSNorm")
    norms = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.RMSNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
    model, x = torch.nn.Sequential(*norms).to(device), torch.randn(2, 300, WIDTH, device=device)
    ours = kernelised(model, *at(folder, device), "LayerNorm", "TorchRMSNorm")
    assert replaced(ours) == 3
    alike(trained(ours, x), trained(model, x))
    if device == "cuda":
        ours.zero_grad()
        model.zero_grad()
        alike(trained(torch.compile(ours, fullgraph=True), x), trained(model, x))


@each_device
def test_a_model_of_transformers_takes_them(folder: Path, device: str) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="transformers is not installed")
    from ..clients.families import language_model

    model = language_model("llama").to(device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    kernels.replace_kernel_forward_from_hub(llama.LlamaRMSNorm, "RMSNorm")
    ours = kernelised(model, *at(folder, device), "RMSNorm")
    assert replaced(ours) == 5
    tokens = torch.randint(31, (2, 5), device=device)
    alike(trained(ours, tokens), trained(model, tokens))
