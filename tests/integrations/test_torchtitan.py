"""The plug of TorchTitan, beside a stand-in of its overrides and, where it is installed, beside TorchTitan."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from os import environ
from pathlib import Path
from typing import Any

import pytest
import torch

from ..nn.models import assert_same_results
from .stand_ins import of_torchtitan

N = 48
MODULE = "normforge.integrations.torchtitan"


@pytest.fixture(params=["stand-in", "naming", "own"])
def titan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """TorchTitan's `config` and module of norms, with nothing overridden yet; a stand-in's overrides may have names."""
    if request.param != "own":
        of_torchtitan.stand_in(monkeypatch, names=request.param == "naming")
    else:
        pytest.importorskip("torchtitan.config.override", reason="TorchTitan is not installed")
    config = import_module("torchtitan.config")
    config.clear_overrides()
    sys.modules.pop(MODULE, None)
    yield config, import_module("torchtitan.models.common.nn_modules")
    sys.modules.pop(MODULE, None)
    config.clear_overrides()


def root(config: Any, norms: Any) -> Any:
    """A configuration with two norms beneath it, and one of a class derived from the first's."""

    class Custom(norms.RMSNorm):  # type: ignore[misc]  # either of two packages'
        @dataclass(kw_only=True, slots=True)
        class Config(norms.RMSNorm.Config):  # type: ignore[misc]  # likewise
            pass

    @dataclass(kw_only=True, slots=True)
    class Root(config.Configurable.Config):  # type: ignore[misc]  # likewise
        rms: Any
        layer: Any
        custom: Any

    return Root(
        rms=norms.RMSNorm.Config(normalized_shape=N, eps=1e-3),
        layer=norms.LayerNorm.Config(normalized_shape=N, eps=1e-2, elementwise_affine=False),
        custom=Custom.Config(normalized_shape=N),
    )


def test_listed_overrides_replace_norms_and_others_do_not(titan: Any) -> None:
    config, norms = titan
    tree = root(config, norms)
    before = tree.rms.build(), tree.layer.build(), type(tree.custom)
    config.apply_overrides(config.OverrideConfig(imports=[f"{MODULE}.layer_norm"]), tree)
    assert type(tree.rms) is norms.RMSNorm.Config
    config.apply_overrides(config.OverrideConfig(imports=[f"{MODULE}.rms_norm"]), tree)
    after = tree.rms.build(), tree.layer.build(), type(tree.custom)
    assert after[2] is before[2]
    for new, old in zip(after[:2], before[:2], strict=True):
        assert isinstance(new, type(old))
        assert type(new).__module__ == MODULE
        assert (new.extra_repr(), new.state_dict().keys()) == (old.extra_repr(), old.state_dict().keys())
        x = torch.randn(2, 3, N, requires_grad=True)
        assert_same_results(new, old, x, tolerance=2e-6)
        # By kernels: torch leaves nodes of its own.
        assert type(new(x).grad_fn).__name__ == "_NormaliseBackward"


def small() -> Any:
    """TorchTitan's Llama for debugging, with attention that needs neither FlashAttention 3 nor Inductor."""
    attention: Any = import_module("torchtitan.models.common.attention")
    varlen: Any = attention.VarlenAttention
    llama = import_module("torchtitan.models.llama3.config_registry")

    class Attention(varlen):  # type: ignore[misc]  # TorchTitan is not there where types are checked
        @dataclass(kw_only=True, slots=True)
        class Config(varlen.Config):  # type: ignore[misc]  # likewise
            pass

        def __init__(self, config: Any) -> None:
            attention.Module.__init__(self)

        # Each row of tokens is taken for one document; TorchTitan looks placements up by these names.
        def forward(self, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, **_: Any) -> Any:
            q, k, v = [each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH)]
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    config = llama.llama3_debugmodel_ce_loss()
    config.model_spec = llama.model_registry("debugmodel", attn_backend="varlen")
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = Attention.Config()
    config.training.steps, config.training.seq_len, config.training.disable_cuda_graphs = 20, 256, True
    config.parallelism.spmd_backend, config.validator.enable, config.debug.seed = "partial_dtensor", False, 0
    config.metrics.disable_color_printing = True
    return config


def written(folder: Path) -> list[str]:
    """Write a tokenizer and text to a folder, and return the arguments that name them."""
    words = [f"w{i}" for i in range(2000)]
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(["<s>", *words])}, "unk_token": "<s>"}
    tokenizer = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
    lines = [" ".join((words * 2)[first : first + 300]) for first in range(len(words))]
    (text := folder / "text").mkdir()
    (text / "lines.json").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return [f"--hf_assets_path={folder}", f"--dataloader.dataset_path={text}"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_two_cards_train_as_they_do_without_the_plug(tmp_path: Path) -> None:
    """Under FSDP2, and under tensor parallelism with sequences sharded; all four runs at once."""
    pytest.importorskip("torchtitan.config.override", reason="TorchTitan is not installed")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr=127.0.0.1"]
    launch += ["--nproc_per_node=2", "-m", "torchtitan.train", f"--module={__name__}", "--config=small"]
    launch += written(tmp_path)
    runs, logs = {}, {}
    for degree, plug in product((1, 2), ("", "plug")):
        name = f"{degree}{plug}"
        asked = [f"--parallelism.tensor_parallel_degree={degree}", f"--dump_folder={tmp_path / name}"]
        asked += [f"--override.imports={MODULE}.rms_norm"] * bool(plug)
        recorded = environ | {"NORMFORGE_RECORD": str(tmp_path / f"{name}.yaml")}
        with (tmp_path / f"{name}.log").open("w") as log:
            runs[name] = subprocess.Popen([*launch, *asked], env=recorded, stdout=log, stderr=subprocess.STDOUT)
    for name, run in runs.items():
        status = run.wait(timeout=300)
        logs[name] = (tmp_path / f"{name}.log").read_text()
        assert status == 0, logs[name][-5000:]
    for degree in (1, 2):
        # Both ranks say it of each step.
        found = [dict(re.findall(r"step: +(\d+) +loss: +([0-9.]+)", logs[f"{degree}{plug}"])) for plug in ("", "plug")]
        expected, actual = ([float(loss) for loss in losses.values()] for losses in found)
        print(f"tensor parallel degree {degree}:", *zip(expected, actual, strict=True))
        assert len(actual) == 20
        # Logits have the 8 bits of bf16.
        torch.testing.assert_close(actual, expected, rtol=2**-8, atol=0.0)
        modes = re.findall(r'"mode": "(rms_[fb]wd_bf16)', (tmp_path / f"{degree}plug.yaml").read_text())
        assert {*modes} == {"rms_fwd_bf16", "rms_bwd_bf16"}
        assert not (tmp_path / f"{degree}.yaml").exists()
