"""Patched models of transformers compute, generate, train and save what unpatched ones do."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import functional

import normforge
from tests.calling import each_device
from tests.thorough import THOROUGH

from .alike import agree, close_all, train_alike

pytest.importorskip("transformers", reason="an extra of its own: make test-clients installs it")

from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from .families import FAMILIES, language_model

# One of each kind of block stands for the others in `make test`.
_QUICK = {"llama", "gpt2", "gemma2"}
# Families whose queries and keys are normalised and rotated by one kernel.
_ROTATED = ("qwen3", "gemma3_text", "gemma4_text", "olmo2", "olmo3")
_TOKENS = torch.arange(3, 13)[None] % 90


def _cases() -> Iterator[object]:
    for family in FAMILIES:
        missing = [pytest.mark.skip(reason="not in this release of transformers")] * (family not in CONFIG_MAPPING)
        yield pytest.param(family, marks=[*missing, *([] if family in _QUICK else [THOROUGH])])


def _loss_and_logits(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    out = model(_TOKENS, labels=_TOKENS)
    return out.loss, out.logits


@pytest.mark.parametrize("family", list(_cases()))
def test_a_family_is_as_before(family: str) -> None:
    agree(language_model(family), _loss_and_logits)


@pytest.mark.parametrize("family", ["llama", *(pytest.param(one, marks=THOROUGH) for one in ("gpt2", *_ROTATED))])
def test_generate_chooses_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache, and with norms and rotations of one token computed together."""
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", "0")
    model = language_model(family)
    tokens = model.generate(_TOKENS, max_new_tokens=6, do_sample=False)
    normforge.patch(model)
    assert torch.equal(model.generate(_TOKENS, max_new_tokens=6, do_sample=False), tokens)


@pytest.mark.parametrize("family", [pytest.param(one, marks=THOROUGH) for one in _ROTATED])
def test_queries_and_keys_in_bf16_err_less_than_unpatched_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As attention is given them in the first layer, beside a model in fp32: one rounding stands for several."""
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", "0")
    given: list[list[torch.Tensor]] = []
    attention = functional.scaled_dot_product_attention

    def noted(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given.append([q.double(), k.double()])
        return attention(q, k, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    model = language_model(family).bfloat16()
    exact, patched = deepcopy(model).float(), deepcopy(model)
    normforge.patch(patched)
    first = []
    for each in (exact, model, patched):
        given.clear()
        with torch.no_grad():
            each(torch.arange(3, 67)[None] % 90)
        first.append(given[0])
    for wanted, theirs, ours in zip(*first, strict=True):
        assert (ours - wanted).square().mean() < (theirs - wanted).square().mean()


def test_a_patched_model_is_saved_and_read_again(tmp_path: object) -> None:
    model = language_model("llama")
    logits = model(_TOKENS).logits.detach()
    normforge.patch(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(_TOKENS).logits.detach(), logits)


@each_device
def test_trainer_trains_a_patched_model_as_it_trains_others(
    device: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    # It would spread a batch over several.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        report_to=[],
        use_cpu=device == "cpu",
        logging_steps=1,
        save_strategy="no",
        seed=0,
    )
    examples = [{"input_ids": _TOKENS[0], "labels": _TOKENS[0]} for _ in range(24)]

    def trainer(patches: bool) -> Any:
        model = language_model("llama", patched=patches).train()
        return Trainer(model=model, args=arguments, train_dataset=examples)

    train_alike(trainer, 3)


def test_lora_on_a_patched_model_trains_and_merges() -> None:
    peft = pytest.importorskip("peft", reason="an extra of its own: make test-clients installs it")
    results = []
    for patches in (False, True):
        model = language_model("llama", patched=patches)
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"], init_lora_weights=False
        )
        tuned = peft.get_peft_model(model, config)
        out = tuned(_TOKENS, labels=_TOKENS)
        out.loss.backward()
        gradients = {n: p.grad.clone() for n, p in tuned.named_parameters() if p.grad is not None}
        merged = tuned.merge_and_unload()
        results.append((gradients, {"logits": out.logits.detach(), "merged": merged(_TOKENS).logits.detach()}))
    for theirs, ours in zip(*results, strict=True):
        close_all(ours, theirs)
