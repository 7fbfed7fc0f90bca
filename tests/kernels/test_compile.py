"""Every pipeline of every mode of the full manifest, compiled without a GPU for the targets normforge names.

Modes that differ in nothing but element types share a kernel text. Each text is compiled for every target, in each
pipeline, with the element types taking turns so that every mode is compiled at least once. With
NORMFORGE_ALL_TARGETS=1, every mode is compiled in every pipeline for every target: nine times the work.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from normforge.codegen import emit, manifest
from normforge.codegen.model import DType, Instance, Mode, Norm, Part, Pipeline, Rounding

from .compilation import TARGETS, Target, compile_kernel

pytestmark = pytest.mark.compile

# A bucket of each pipeline, and a row length in it that leaves a ragged chunk to mask.
LENGTHS = {"n128": 100, "n2048": 1500, "n32768": 20000}

MANIFEST = Path(__file__).resolve().parents[2] / "manifests" / "full.yaml"
ALL_TARGETS = os.environ.get("NORMFORGE_ALL_TARGETS") == "1"
INSTANCES = manifest.load(MANIFEST).instances


def _cases() -> list[Any]:
    variants: dict[tuple[Mode, str], list[Instance]] = {}
    for instance in INSTANCES:
        if instance.bucket.name in LENGTHS:
            variants.setdefault((_text_of(instance.mode), instance.bucket.name), []).append(instance)
    cases = []
    for (_, bucket), instances in variants.items():
        first = list(LENGTHS).index(bucket) * len(TARGETS)
        turns = [(instances[(first + turn) % len(instances)], target) for turn, target in enumerate(TARGETS)]
        for instance, target in product(instances, TARGETS) if ALL_TARGETS else turns:
            cases.append(pytest.param(instance, target, id=f"{instance.name}-{target.name}"))
    return cases


def _text_of(mode: Mode) -> Mode:
    """The mode that stands for all whose kernels differ in nothing but element types."""
    out = mode.dtype_out if mode.fquant.quantises else DType.FP32
    return replace(mode, dtype_in=DType.FP32, dtype_out=out, scale_dtype=DType.FP32)


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An importable folder that modules are generated into as they are needed."""
    folder = tmp_path_factory.mktemp("compiled") / "compiled_kernels"
    folder.mkdir()
    for name, text in emit.shared_files(backward=True).items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder.parent))
    yield folder
    sys.path.remove(str(folder.parent))


def _kernel(package: Path, mode: Mode, pipeline: Pipeline | Part) -> Any:
    path = package / f"{mode.name}.py"
    if not path.exists():
        path.write_text(emit.render_module(mode, tuple(Pipeline)))
        importlib.invalidate_caches()
    return getattr(importlib.import_module(f"{package.name}.{mode.name}"), mode.kernel(pipeline))


@pytest.mark.parametrize(("instance", "target"), _cases())
def test_compiles(instance: Instance, target: Target, package: Path) -> None:
    kernel = _kernel(package, instance.mode, instance.tile.pipeline)
    compiled = compile_kernel(kernel, instance, LENGTHS[instance.bucket.name], target)
    assert compiled.asm[target.binary]
    if instance.mode.is_backward and instance.tile.pipeline is Pipeline.TWO_PASS:
        terms = _kernel(package, instance.mode, Part.ROW_TERMS)
        n = LENGTHS[instance.bucket.name]
        assert compile_kernel(terms, instance, n, target, Part.ROW_TERMS).asm[target.binary]


def test_every_kernel_text_meets_every_target() -> None:
    met: dict[tuple[Mode, Pipeline], set[str]] = {}
    for case in _cases():
        instance, target = case.values
        met.setdefault((_text_of(instance.mode), instance.tile.pipeline), set()).add(target.name)
    assert {frozenset(names) for names in met.values()} == {frozenset(target.name for target in TARGETS)}
    assert {pipeline for _, pipeline in met} == set(Pipeline)


def test_every_mode_is_compiled() -> None:
    assert {case.values[0].mode for case in _cases()} == {instance.mode for instance in INSTANCES}


LAYER_BF16 = Mode(Norm.LAYER, DType.BF16, DType.BF16)
SM_90 = next(target for target in TARGETS if target.name == "sm_90")


def _instance(mode: Mode, n: int) -> Instance:
    return next(instance for instance in INSTANCES if instance.mode == mode and n in instance.bucket)


@pytest.mark.parametrize(("n", "chunks", "masked"), [(5120, 5, 0), (4096, 4, 0), (5008, 5, 1)])
def test_a_row_is_read_by_16_byte_loads_and_only_a_ragged_chunk_is_masked(
    n: int, chunks: int, masked: int, package: Path
) -> None:
    """A chunk of 1024 on 128 threads: one load of bf16 x, and two each of fp32 weight and bias."""
    instance = _instance(LAYER_BF16, n)
    ptx = compile_kernel(_kernel(package, LAYER_BF16, instance.tile.pipeline), instance, n, SM_90).asm["ptx"]
    loads = [line for line in ptx.splitlines() if "ld.global" in line]
    assert len(loads) == 5 * chunks
    assert all("v4.b32" in line for line in loads)
    assert sum("@%p" in line for line in loads) == 5 * masked


def test_fp8_is_converted_by_instruction_where_there_is_one(package: Path) -> None:
    mode = next(
        instance.mode
        for instance in INSTANCES
        if instance.mode.dtype_out is DType.FP8_E4M3FN and instance.mode.rounding is Rounding.NEAREST
    )
    instance = _instance(mode, 4096)
    texts = {
        target.name: compile_kernel(_kernel(package, mode, instance.tile.pipeline), instance, 4096, target).asm["ptx"]
        for target in TARGETS
        if target.binary == "cubin"
    }
    instruction = "cvt.rn.satfinite.e4m3x2.f32"
    assert {name: instruction in ptx for name, ptx in texts.items()} == {"sm_80": False, "sm_90": True, "sm_100": True}
