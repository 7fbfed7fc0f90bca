"""TRL trains patched models as it trains others, beside an unpatched reference model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.thorough import THOROUGH

pytest.importorskip("transformers", reason="an extra of its own: make test-clients installs it")
pytest.importorskip("trl", reason="an extra of its own: make test-clients installs it")

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from .alike import train_alike
from .families import language_model

_WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(60))]
_OPTIONS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


def _tokenizer() -> Any:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _text(first: int) -> str:
    return " ".join(f"w{i % 60}" for i in range(first, first + 6))


@pytest.mark.parametrize("reference_is_patched", [False, pytest.param(True, marks=THOROUGH)])
def test_preferences_beside_a_reference_model(reference_is_patched: bool, tmp_path: Path) -> None:
    """The model and its reference are of the same classes until one is patched; at first they agree: a loss of ln 2."""
    examples = Dataset.from_list(
        [{"prompt": _text(i), "chosen": " " + _text(i + 9), "rejected": " " + _text(i + 30)} for i in range(8)]
    )

    def trainer(patches: bool) -> Any:
        return DPOTrainer(
            model=language_model("llama", patched=patches),
            ref_model=language_model("llama", patched=patches and reference_is_patched),
            args=DPOConfig(output_dir=str(tmp_path), **_OPTIONS),
            train_dataset=examples,
            processing_class=_tokenizer(),
        )

    torch.testing.assert_close(train_alike(trainer, 2)[0], torch.tensor(2.0).log(), rtol=1e-4, atol=1e-4)
