"""Train a small GPT twice, with torch's norms and with normforge's, and compare the two runs.

    python examples/train_tiny_gpt.py
    python examples/train_tiny_gpt.py --norm rms --dtype bf16 --fused-add --plot curves.png

Both runs start from the same weights and see the same batches of this repository's own text, a token a byte. So their
losses may differ only as roundings do. How far roundings drive two runs apart is measured by a third one: torch's norms
again, from weights that are nudged by one rounding. The exit status is 1 if the two differ by more than twice as much.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

import normforge

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("README.md", "CONTRIBUTING.md", "templates/*.j2", "codegen/*.py", "runtime/**/*.py", "generated/*.py")
VOCABULARY = 256

NORMS = {
    "layer": (nn.LayerNorm, normforge.AddLayerNorm),
    "rms": (nn.RMSNorm, normforge.AddRMSNorm),
}
# Steps, batch and context: a few minutes at most on either.
DEFAULTS = {"cuda": (300, 32, 256), "cpu": (60, 8, 128)}
LEARNING_RATE = 1e-3
# Steps that are not timed: libraries start up in them, and Triton compiles.
WARMUP = 5
# Losses are compared as means over this many steps.
WINDOW = 20
# Nats that curves may differ by even if the third run differs by less. A few steps leave roundings no time to grow, and
# one run is one sample: in bf16 the same run with torch's norms, done twice on an H200, came 0.014 apart.
LEAST_TOLERANCE = {"fp32": 0.002, "bf16": 0.02}
TABLE_ROWS = 12
MAX_CONTEXT = 8192


class Block(nn.Module):
    """Attention and an MLP, each behind a norm (pre-norm).

    What a block adds to the residual stream is added right before the next norm: a fused add then does both at once.
    """

    def __init__(self, width: int, heads: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = norm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = norm(width, eps=1e-5)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take and return the residual stream, (batch, context, width), and the output that is still to be added."""
        h, residual = add_norm(self.norm1, x, residual)
        h, residual = add_norm(self.norm2, self.attend(h), residual)
        return self.mlp(h), residual

    def attend(self, h: torch.Tensor) -> torch.Tensor:
        """Causal self-attention."""
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: torch.Tensor = self.out(h.transpose(1, 2).flatten(2))
        return projected


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, args: argparse.Namespace, norm: type[nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, args.width)
        self.positions = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads, norm) for _ in range(args.layers))
        self.norm = norm(args.width, eps=1e-5)
        self.head = nn.Linear(args.width, VOCABULARY)
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next token, (batch, context, 256), for tokens (batch, context)."""
        residual = self.tokens(tokens)
        x = self.positions.weight.expand_as(residual)
        for block in self.blocks:
            x, residual = block(x, residual)
        logits: torch.Tensor = self.head(add_norm(self.norm, x, residual)[0])
        return logits


def add_norm(norm: nn.Module, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream; return the norm of the sum, and the sum."""
    if isinstance(norm, normforge.AddLayerNorm | normforge.AddRMSNorm):
        y, residual = norm(x, residual)
        return y, residual
    residual = residual + x
    return norm(residual), residual


def nudge(model: nn.Module, args: argparse.Namespace) -> None:
    """Change every weight by up to one rounding of the type that the model computes in."""
    unit = torch.finfo(torch.bfloat16 if args.dtype == "bf16" else torch.float32).eps / 2
    generator = torch.Generator().manual_seed(args.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator).mul_(2).sub_(1).mul_(unit)
            parameter.mul_(1 + noise.to(args.device))


def build(args: argparse.Namespace, ours: bool) -> GPT:
    """Return a model whose initial weights depend on the seed alone, with torch's norms or with normforge's."""
    torch.manual_seed(args.seed)
    norm, fused = NORMS[args.norm]
    if ours and args.fused_add:
        return GPT(args, fused).to(args.device)
    model = GPT(args, norm).to(args.device)
    if ours:
        normforge.patch(model)  # This is all that a model with torch's norms needs.
    return model


def read_text(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the repository's text as tokens: the training text, and the held-out last tenth of every file."""
    training, held_out = bytearray(), bytearray()
    for path in (path for pattern in TEXTS for path in sorted(ROOT.glob(pattern))):
        text = path.read_bytes()
        cut = len(text) * 9 // 10
        training += text[:cut]
        held_out += text[cut:]
    if not training:
        sys.exit(f"{ROOT} has no text to train on; run this from a clone of normforge's repository")
    train, held = (torch.frombuffer(text, dtype=torch.uint8).long() for text in (training, held_out))
    return train.to(device), held.to(device)


def warm_up_and_decay(done: float) -> float:
    """Return the learning rate relative to its peak: up in the first tenth of the training, then a cosine down."""
    return min(10 * done + 0.01, 0.5 + 0.5 * math.cos(math.pi * done))


@dataclass(frozen=True)
class Run:
    """The results of one training run.

    Attributes:
        losses: the loss at every step, in nats a byte.
        held_out: the trained model's loss on text that it has not seen.
        step_ms: the median time of a step.
    """

    losses: torch.Tensor
    held_out: float
    step_ms: float


def train(model: GPT, text: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace) -> Run:
    """Train a model on batches that depend on the seed alone."""
    generator = torch.Generator().manual_seed(args.seed)
    span = args.context + 1
    starts = torch.randint(len(text) - span, (args.steps, args.batch, 1), generator=generator)
    windows = (starts + torch.arange(span)).to(args.device)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bf16"):
            logits = model(batch[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    optimiser = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: warm_up_and_decay(step / args.steps))
    losses, seconds = [], []
    for window in windows:
        start = time.perf_counter()
        loss = loss_of(text[window])
        optimiser.zero_grad()
        cast(Any, loss).backward()  # torch declares no types for it
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())  # It waits for the device, so that a whole step is timed.
        seconds.append(time.perf_counter() - start)
    with torch.no_grad():
        unseen = held_out.unfold(0, span, len(held_out) // 64)
        parts = (unseen[first : first + args.batch] for first in range(0, len(unseen), args.batch))
        validation = statistics.fmean(loss_of(batch).item() for batch in parts)
    timed = seconds[WARMUP:] or seconds
    return Run(torch.tensor(losses), validation, 1e3 * statistics.median(timed))


def smoothed(losses: torch.Tensor) -> torch.Tensor:
    """Return the means over every WINDOW successive steps, or over all of a shorter run."""
    return losses.unfold(0, min(WINDOW, len(losses)), 1).mean(1)


def distance(one: Run, other: Run) -> float:
    """Return the largest difference of two smoothed curves, in nats per byte."""
    return (smoothed(one.losses) - smoothed(other.losses)).abs().max().item()


def report(torchs: Run, ours: Run, args: argparse.Namespace) -> int:
    """Print both runs side by side.

    Returns:
        0 if the curves agree to noise, 1 if not.
    """
    print(f"\n{'step':>10}  {'torch':>9}  {'normforge':>9}  {'difference':>10}")
    steps = sorted({1, *range(args.steps, 0, -max(1, args.steps // TABLE_ROWS))})
    rows = [(str(step), torchs.losses[step - 1].item(), ours.losses[step - 1].item()) for step in steps]
    for name, one, other in [*rows, ("held out", torchs.held_out, ours.held_out)]:
        print(f"{name:>10}  {one:9.4f}  {other:9.4f}  {other - one:10.1e}")
    print(f"{'ms a step':>10}  {torchs.step_ms:9.2f}  {ours.step_ms:9.2f}  {ours.step_ms / torchs.step_ms:9.2f}×\n")

    largest = (ours.losses - torchs.losses).abs().max().item()
    apart = distance(ours, torchs)
    agree = apart <= args.tolerance  # False for NaN.
    print(f"largest difference of one step: {largest:.2g} nats a byte")
    print(f"largest difference of the means over {min(WINDOW, args.steps)} steps: {apart:.2g}", end=", ")
    print(f"tolerance {args.tolerance:.2g}: the curves {'agree' if agree else 'DO NOT AGREE'}")
    return 0 if agree else 1


def plot(torchs: Run, ours: Run, args: argparse.Namespace) -> None:
    """Draw both curves, and their difference below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    curves, gap = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    steps = range(1, args.steps + 1)
    curves.plot(steps, torchs.losses, color="#f4a259", linewidth=4, label=f"torch, {torchs.step_ms:.1f} ms a step")
    curves.plot(steps, ours.losses, color="#1b4965", linewidth=1.2, label=f"normforge, {ours.step_ms:.1f} ms a step")
    curves.set_ylabel("training loss (nats a byte)")
    curves.legend(frameon=False)
    curves.set_title(f"{describe(args)}\n{where(args.device)}", fontsize=10)

    middle = torch.arange(len(smoothed(ours.losses))) + (min(WINDOW, args.steps) + 1) / 2
    gap.axhspan(-args.tolerance, args.tolerance, color="#8ac6a0", alpha=0.25, linewidth=0, label="tolerance")
    gap.plot(middle, smoothed(ours.losses) - smoothed(torchs.losses), color="#1b4965", linewidth=1.2)
    gap.set_ylabel("difference (nats)")
    gap.set_xlabel("step")
    gap.legend(frameon=False, loc="upper left")
    for axes in (curves, gap):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    figure.savefig(args.plot, dpi=150, format="png")


def describe(args: argparse.Namespace) -> str:
    """Describe the model and its training in one line."""
    return (
        f"GPT, {args.layers} layers, width {args.width}, {args.norm} norm{', fused add' * args.fused_add}; "
        f"{args.batch}×{args.context} bytes a step, {args.dtype}, seed {args.seed}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with torch's norms and with normforge's.")
    add = parser.add_argument
    add("--norm", choices=NORMS, default="layer")
    add("--fused-add", action="store_true", help="normforge's residual adds in its norms' kernels")
    add("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16 is torch.autocast")
    add("--device", choices=DEFAULTS, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--steps", type=int, help="default: 300, or 60 on a CPU")
    add("--batch", type=int, help="default: 32, or 8 on a CPU")
    add("--context", type=int, help="default: 256, or 128 on a CPU")
    add("--width", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--seed", type=int, default=0)
    add("--tolerance", type=float, help="nats that smoothed curves may differ by (default: measured by a third run)")
    add("--plot", type=Path, metavar="FILE.png", help="draw both curves; needs matplotlib")
    args = parser.parse_args(argv)
    for name, value in zip(("steps", "batch", "context"), DEFAULTS[args.device], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("steps", "batch", "context", "width", "layers", "heads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is at least 1, not {getattr(args, name)}")
    if args.context > MAX_CONTEXT:
        parser.error(f"--context is at most {MAX_CONTEXT}, not {args.context}: the text is short")
    if args.width % args.heads:
        parser.error(f"--heads must divide --width, and {args.heads} does not divide {args.width}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if args.plot:
        # Better now than after the training.
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot needs matplotlib: pip install matplotlib")
        if not args.plot.parent.is_dir():
            parser.error(f"--plot: there is no folder {args.plot.parent}")
    return args


def where(device: str) -> str:
    """Describe the device, and the code that replaces torch's norms there."""
    if normforge.backend(torch.empty(0, device=device)) == "torch":
        return "CPU: without a GPU normforge calls torch's own operator, so nothing but equal curves is expected"
    if device == "cpu":
        return "CPU: normforge's kernels run in Triton's interpreter, where time says nothing about a GPU"
    return f"{torch.cuda.get_device_name()}: normforge's kernels run"


def main(argv: Sequence[str] | None = None) -> int:
    """Train twice and compare.

    Returns:
        0 if the curves agree to noise, 1 if not.
    """
    args = parse(argv)
    text, held_out = read_text(args.device)
    model = build(args, ours=False)
    print(describe(args))
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters, {len(text):,} bytes of text")
    print(where(args.device), flush=True)
    torchs = train(model, text, held_out, args)
    if args.tolerance is None:
        nudged = build(args, ours=False)
        nudge(nudged, args)
        noise = distance(train(nudged, text, held_out, args), torchs)
        args.tolerance = max(LEAST_TOLERANCE[args.dtype], 2 * noise)
    ours = train(build(args, ours=True), text, held_out, args)
    status = report(torchs, ours, args)
    if args.plot:
        plot(torchs, ours, args)
    return status


if __name__ == "__main__":
    sys.exit(main())
