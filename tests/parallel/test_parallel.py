"""Norms in sharded models, in groups of two processes and four."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from normforge.ahead_of_time.stand_ins import Deployment, plans
from normforge.codegen.model import Mode
from normforge.codegen.values import Reduce
from normforge.kernels.gpu import Target
from normforge.kernels.obtain import compile_for

from ..kernels.compile_cases import TARGETS, binary_of
from ..thorough import COSTLY, LONG, THOROUGH
from . import models, reduced, sharded, split, wrapped
from .ranks import run

pytestmark = [LONG, pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")]

MODULES = {"sharded": sharded, "split": split, "models": models}
WRAPPED = {"wrapped": wrapped}
REDUCED = {"reduced": reduced}


# All cases of a group are one test: whichever worker runs it starts its processes, once.
@THOROUGH
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_with_whole_tensors(world: int, tmp_path: Path) -> None:
    modules = MODULES | WRAPPED
    _check(run(world, list(modules), tmp_path, limit=300 * world), modules)


@THOROUGH
@pytest.mark.parametrize("world", [2, 4])
def test_sums_of_ranks_are_normalised(world: int, tmp_path: Path) -> None:
    _check(run(world, list(REDUCED), tmp_path, limit=300 * world), REDUCED)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_cards_agree_with_whole_tensors(tmp_path: Path) -> None:
    modules = MODULES | REDUCED
    _check(run(2, list(modules), tmp_path, limit=300, device="cuda"), modules)


def _check(found: dict[str, str], modules: Mapping[str, ModuleType]) -> None:
    wrong = [f"{name}: {error}" for name, error in found.items() if error]
    assert not wrong, "\n".join(wrong)
    # One that failed, or took too long, ends the others.
    assert list(found) == [name for module in modules.values() for name in module.CASES]


@COSTLY
@pytest.mark.compile
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("reduce", tuple(Reduce)[1:], ids=lambda reduce: reduce.value)
def test_exchanges_compile(reduce: Reduce, target: Target) -> None:
    """Of rows that fill their chunk or not, and of two ranks and four."""
    for name, n, ranks in (("rms_fwd_bf16_addst", 1024, 2), ("ln_fwd_fp16_int8_addst_dq", 1000, 4)):
        for plan in plans(Mode.from_name(name), n, target, Deployment()):
            (launcher,) = plan.exchanging(reduce, ranks).prepared(1).launchers
            assembly = compile_for(launcher.key, launcher.kernel, target).asm
            assert binary_of(target) in assembly
            # Values are waited for eight at a time: by ones a gather took 5 times as long.
            assert "ld.volatile.global.b16" not in assembly.get("ptx", "")
