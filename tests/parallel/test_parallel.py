"""Norms in sharded models, in groups of two processes and four."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from ..thorough import THOROUGH
from . import models, sharded, split
from .ranks import run

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")

MODULES = {"sharded": sharded, "split": split, "models": models}

# How many processes, whether they run all they have, and of which modules.
GROUPS = {
    "two": (2, False, ("sharded",)),
    "two thoroughly": (2, True, tuple(MODULES)),
    "four thoroughly": (4, True, tuple(MODULES)),
}
RUNS = [
    pytest.param(*group, marks=[THOROUGH] if group[1] else [], id=name.replace(" ", "-"))
    for name, group in GROUPS.items()
]


# All cases of a group are one test: whichever worker runs it starts its processes, once.
@pytest.mark.parametrize(("world", "thoroughly", "modules"), RUNS)
def test_ranks_agree_with_whole_tensors(world: int, thoroughly: bool, modules: tuple[str, ...], tmp_path: Path) -> None:
    found = run(world, list(modules), tmp_path, thoroughly=thoroughly, limit=60 * world * (1 + 4 * thoroughly))
    wrong = [f"{name}: {error}" for name, error in found.items() if error]
    assert not wrong, "\n".join(wrong)
    # One that failed, or took too long, ends the others.
    assert list(found) == [name for module in modules for name in MODULES[module].CASES]
