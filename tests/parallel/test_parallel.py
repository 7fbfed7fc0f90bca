"""Norms in sharded models, in groups of two processes and four."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch.distributed as dist

from ..thorough import THOROUGH
from . import models, sharded, split
from .ranks import run

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")

MODULES = {"sharded": sharded, "split": split, "models": models}

# How many processes, whether they run all they have, and of which modules.
GROUPS = {
    "two": (2, False, ("sharded", "split")),
    "two thoroughly": (2, True, tuple(MODULES)),
    "four thoroughly": (4, True, tuple(MODULES)),
}
RUNS = [
    pytest.param(group, name, marks=[THOROUGH] if thoroughly else [], id=f"{group}-{name}")
    for group, (_, thoroughly, modules) in GROUPS.items()
    for module in modules
    for name in MODULES[module].CASES
]


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """What became of each case in a group, which is started once."""

    @cache
    def started(group: str) -> dict[str, str]:
        world, thoroughly, modules = GROUPS[group]
        folder = tmp_path_factory.mktemp("ranks")
        return run(world, list(modules), folder, thoroughly=thoroughly, limit=60 * world * (1 + 4 * thoroughly))

    return started


@pytest.mark.parametrize(("group", "name"), RUNS)
def test_ranks_agree_with_whole_tensors(group: str, name: str, found: Callable[[str], dict[str, str]]) -> None:
    of_group = found(group)
    assert name in of_group, "it did not run, because another failed or took too long"
    assert not of_group[name], of_group[name]
