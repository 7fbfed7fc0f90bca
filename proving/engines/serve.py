"""What a process does that serves a model with vLLM, with the plug or without: each function answers a question."""

from __future__ import annotations

import gc
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from zlib import crc32

WORDS = 32_000
# Rows of the batches for which vLLM captures CUDA graphs.
BATCHES = (1, 8, 64)
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
# Microseconds of the launches of each kernel.
Kernels: TypeAlias = dict[str, list[float]]

# The model that is served.
_model: Any = None


def begin(variables: dict[str, str]) -> None:
    """Set environment variables, before vLLM is imported."""
    # The engine in this process, so that the profiler and the model are at hand.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"} | variables


def start(model: dict[str, Any], first: str | None) -> str:
    """Load a model with random weights and capture its CUDA graphs; return vLLM's version.

    `first` names the provider of vLLM's IR that comes before vLLM's choice; with another than ours no graph is
    captured.
    """
    global _model
    import torch
    import vllm

    if first == "normforge" and model.get("override"):
        import normforge

        normforge.override_torch()
    options = {"compilation_config": dict(_GRAPHS)} | model.get("options", {})
    options["compilation_config"]["cudagraph_capture_sizes"] = list(BATCHES)
    if first is not None:
        options["kernel_config"] = {"ir_op_priority": {"rms_norm": [first], "fused_add_rms_norm": [first]}}
    _model = None
    gc.collect()
    torch.cuda.empty_cache()
    config = {"architectures": [model["kind"]], "vocab_size": WORDS, "torch_dtype": "bfloat16"} | model["config"]
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **config}))
        _model = vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=max(BATCHES),
            max_num_batched_tokens=8192,
            # vLLM measures what is free if it is not told, and two processes on a GPU would disturb that.
            kv_cache_memory_bytes=4 * 2**30,
            gpu_memory_utilization=0.2,
            enable_prefix_caching=False,
            attention_config={"backend": "TRITON_ATTN"},
            disable_log_stats=True,
            enforce_eager=first not in (None, "normforge"),
            **options,
        )
    _model.apply_model(_fill)
    torch.cuda.synchronize()
    return str(vllm.__version__)


def answer(rows: int, prompt: int, tokens: int) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Continue random prompts with the likeliest tokens.

    Returns:
        The tokens of each prompt, and for each token the likeliest twenty with their log-probabilities.
    """
    outputs = [output.outputs[0] for output in _generate(rows, prompt, tokens, logprobs=20)]
    likeliest = [[{word: one.logprob for word, one in place.items()} for place in each.logprobs] for each in outputs]
    return [(list(each.token_ids), words) for each, words in zip(outputs, likeliest, strict=True)]


def seconds(rows: int, prompt: int, tokens: int) -> float:
    """Return how long the same takes, without log-probabilities."""
    begun = time.perf_counter()
    _generate(rows, prompt, tokens)
    return time.perf_counter() - begun


def kernels(rows: int, prompt: int, tokens: int) -> tuple[Kernels, int]:
    """Return the microseconds of each launch of each kernel, and how many graphs were launched."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        _generate(rows, prompt, min(tokens, 8))
    taken = defaultdict(list)
    for event in found.events():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            taken[event.name].append(event.device_time_total)
    return taken, sum(event.name == "cudaGraphLaunch" for event in found.events())


def _generate(rows: int, prompt: int, tokens: int, **options: Any) -> Any:
    import torch
    from vllm import SamplingParams

    words = torch.randint(WORDS, (rows, prompt), generator=torch.Generator().manual_seed(rows)).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options)
    return _model.generate([{"prompt_token_ids": each} for each in words], sampling, use_tqdm=False)


def _fill(model: Any) -> None:
    """Give weights the values of an untrained model, where vLLM's dummy weights are all within 0.001 of 0."""
    import torch

    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.bfloat16, torch.float32) or "scale" in name:
            continue
        draw = torch.Generator(parameter.device).manual_seed(crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=draw, device=parameter.device)
        # The weight of a norm is near 1, or near 0 where 1 is added to it; both differ enough from 0.
        mean, deviation = (0.0, 0.02) if parameter.dim() > 1 else (0.0, 0.1) if name.endswith("bias") else (0.7, 0.1)
        parameter.data.copy_(values * deviation + mean)
