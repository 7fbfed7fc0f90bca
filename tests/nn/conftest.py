"""Makes each test of this folder run on one core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Tensors here are small: a second thread only waits, and takes a core from the other workers while it does.
    torch.set_num_threads(1)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """One process that is a group by itself."""
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()
