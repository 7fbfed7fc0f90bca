"""Set up a group of one process, for calls of sharded tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


@contextmanager
def one_rank() -> Iterator[None]:
    """Have this process be a group of one, unless it is in a group already."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
