"""Norms in sharded models, in groups of two processes and four."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from ..thorough import LONG, THOROUGH
from . import compiled, models, sharded, split, wrapped
from .ranks import run

pytestmark = [LONG, pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")]

MODULES = {"sharded": sharded, "split": split, "models": models}
COMPILED = {"compiled": compiled}
WRAPPED = {"wrapped": wrapped}


# All cases of a group are one test: whichever worker runs it starts its processes, once.
@THOROUGH
@pytest.mark.parametrize(
    ("world", "modules"),
    [pytest.param(2, MODULES | COMPILED | WRAPPED, id="two"), pytest.param(4, MODULES | WRAPPED, id="four")],
)
def test_ranks_agree_with_whole_tensors(world: int, modules: Mapping[str, ModuleType], tmp_path: Path) -> None:
    _check(run(world, list(modules), tmp_path, limit=300 * world), modules)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_cards_agree_with_whole_tensors(tmp_path: Path) -> None:
    modules = MODULES | COMPILED
    _check(run(2, list(modules), tmp_path, limit=300, device="cuda"), modules)


def _check(found: dict[str, str], modules: Mapping[str, ModuleType]) -> None:
    wrong = [f"{name}: {error}" for name, error in found.items() if error]
    assert not wrong, "\n".join(wrong)
    # One that failed, or took too long, ends the others.
    assert list(found) == [name for module in modules.values() for name in module.CASES]
