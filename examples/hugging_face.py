"""Patch a small Llama of Hugging Face's transformers, and train it beside the original."""

from __future__ import annotations

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import normforge

STEPS, BATCH, LENGTH, WORDS = 20, 8, 16, 32


def build() -> LlamaForCausalLM:
    """Return a Llama with random weights; nothing is downloaded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


def train(model: LlamaForCausalLM) -> list[float]:
    """Train the model to count, and return the loss of each step."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        start = torch.randint(WORDS, (BATCH, 1), device=model.device)
        words = (start + torch.arange(LENGTH, device=model.device)) % WORDS
        loss = model(input_ids=words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> tuple[list[float], list[float]]:
    """Return the losses of the original and of the patched model."""
    original = build()
    patched = copy.deepcopy(original)
    # Parameters, optimizers and state dicts stay as they are; normforge.unpatch undoes the patch.
    print(normforge.patch(patched))
    before, after = train(original), train(patched)
    print("step  original  patched")
    for step in range(0, STEPS, 5):
        print(f"{step:>4}  {before[step]:8.4f}  {after[step]:7.4f}")
    print(f"last  {before[-1]:8.4f}  {after[-1]:7.4f}")
    return before, after


if __name__ == "__main__":
    main()
