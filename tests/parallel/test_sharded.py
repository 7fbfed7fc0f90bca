"""Norms of DTensors, in groups of two processes and four."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ..thorough import THOROUGH
from . import sharded
from .ranks import run

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")


GROUPS = [(2, False), pytest.param((2, True), marks=THOROUGH), pytest.param((4, True), marks=THOROUGH)]


@pytest.fixture(scope="session", params=GROUPS, ids=str)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each case in a group of some size."""
    world, thoroughly = request.param
    return run(world, ["sharded"], tmp_path_factory.mktemp("ranks"), thoroughly=thoroughly, limit=120 * world)


@pytest.mark.parametrize("name", sharded.CASES)
def test_rows_are_sharded(name: str, found: dict[str, str]) -> None:
    assert name in found, "it did not run, because another failed or took too long"
    assert not found[name], found[name]
