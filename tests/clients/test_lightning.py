"""Lightning trains, saves and loads patched models as it does others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from tests.thorough import THOROUGH

pytest.importorskip("lightning", reason="an extra of its own: make test-clients installs it")

import lightning

from .alike import move


class _Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32),
            torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True),
            torch.nn.RMSNorm(32),
        )
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).mean(1).sub(batch[1]).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _model(patches: bool) -> _Classifier:
    torch.manual_seed(0)
    model = _Classifier()
    move(model)
    if patches:
        assert len(normforge.patch(model).swapped) == 3
    return model


def _fit(model: _Classifier, precision: str) -> Any:
    numbers = torch.Generator().manual_seed(2)
    rows = torch.utils.data.TensorDataset(
        torch.randn(6, 4, 16, generator=numbers), torch.randn(6, 32, generator=numbers)
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=1))
    return trainer


@pytest.mark.parametrize(
    ("precision", "rounding"), [("32-true", 1e-4), pytest.param("bf16-mixed", 2e-2, marks=THOROUGH)]
)
def test_a_patched_model_is_trained(precision: str, rounding: float) -> None:
    models = [_model(patches) for patches in (False, True)]
    for model in models:
        _fit(model, precision)
    theirs, ours = (torch.stack(model.losses) for model in models)
    assert len(theirs) == 6
    torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)


def test_a_checkpoint_is_the_same_and_is_loaded_by_either(tmp_path: Path) -> None:
    patched = _model(True)
    _fit(patched, "32-true").save_checkpoint(tmp_path / "patched.ckpt")
    x = torch.randn(2, 4, 16)
    patched.eval()
    for patches in (False, True):
        model = _model(patches).eval()
        model.load_state_dict(torch.load(tmp_path / "patched.ckpt", weights_only=True)["state_dict"])
        torch.testing.assert_close(model.layers(x), patched.layers(x), rtol=2e-5, atol=2e-5)
